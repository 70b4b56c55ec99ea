"""Looking a name up in a registry, with an error that helps."""

import difflib
from collections.abc import Collection, Mapping


def check(kind: str, name: str, known: Collection[str]) -> None:
  """ValueError naming the nearest legal name, unless `name` is known."""
  if name not in known:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0)
    raise ValueError(
      f"no {kind} named {name!r}; did you mean {near[0]!r}? "
      f"Known: {', '.join(known)}"
    )


def find(kind: str, name: str, known: Mapping):
  """`known[name]`. ValueError naming the nearest legal name if absent."""
  check(kind, name, known)
  return known[name]
