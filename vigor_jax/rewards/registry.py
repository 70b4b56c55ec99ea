"""From a name in a config to a reward function."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any

from vigor_jax.rewards.combine import Combined
from vigor_jax.rewards.verdict import RewardError

# Short names; any other reward is "module:function".
ALIASES = {
  "exact": "vigor_jax.rewards.exact:verify",
  "countdown": "vigor_jax.rewards.countdown:verify",
  "math": "vigor_jax.rewards.math:verify",
  "code": "vigor_jax.rewards.code:run_tests",
}

_TERM = re.compile(
  r"^(?P<weight>\d*\.?\d+(?:[eE][+-]?\d+)?)\s*\*\s*(?P<name>.+)$"
)


def _nearest(name: str, names) -> str:
  close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
  return f"; the nearest name is {close[0]!r}" if close else ""


def reward_name(fn: Callable[..., Any]) -> str:
  """ "module:function" of a reward function, as a config would write it."""
  named = getattr(fn, "reward_name", None)
  if named:
    return named
  module = getattr(fn, "__module__", type(fn).__module__)
  return f"{module}:{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def _where(error: BaseException) -> str:
  """" (file, line n)" of the last line of a module that failed to import."""
  if isinstance(error, SyntaxError):
    return ""  # Its own text names them.
  last = traceback.extract_tb(error.__traceback__)[-1]
  return f" ({last.filename}, line {last.lineno})"


def _resolve_one(name: str) -> Callable[..., float]:
  target = ALIASES.get(name, name)
  module_name, colon, function_name = target.partition(":")
  if not colon:
    known = ", ".join(sorted(ALIASES))
    raise RewardError(
      f"reward.name {name!r} is neither 'module:function' nor one of {known}"
      f"{_nearest(name, ALIASES)}"
    )
  if not all(module_name.split(".")):
    raise RewardError(
      f"reward {name!r}: {module_name!r} is not a module name like 'my.module'"
    )
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    # A module that exists and itself misses an import is another fault.
    if error.name and not (module_name + ".").startswith(error.name + "."):
      hint = ""
      if name in ALIASES:
        hint = "; verifiers need the extra: pip install 'vigor-jax[tasks]'"
      raise RewardError(
        f"reward {name!r}: importing {module_name!r} failed: {error}{hint}"
      ) from error
    hint = _nearest(target, ALIASES.values())
    raise RewardError(
      f"reward {name!r}: no module named {error.name!r}{hint}"
    ) from error
  # The module's own code: a syntax error, a name that is not there.
  except (Exception, SystemExit) as error:
    raise RewardError(
      f"reward {name!r}: importing {module_name!r} failed:"
      f" {type(error).__name__}: {error}{_where(error)}"
    ) from error
  fn = module
  for part in function_name.split("."):
    if not part or not hasattr(fn, part):
      functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_")
      ]
      raise RewardError(
        f"reward {name!r}: module {module_name!r} has no function"
        f" {function_name!r}{_nearest(function_name, functions)}"
      )
    fn = getattr(fn, part)
  check_signature(fn, name)
  return fn


def check_signature(fn: Callable[..., Any], name: str) -> None:
  """Raises RewardError unless `fn(completion, answer, **metadata)` can bind."""
  if not callable(fn):
    raise RewardError(f"reward {name!r} is not callable: {fn!r}")
  try:
    signature = inspect.signature(fn)
  except (TypeError, ValueError):
    return  # Some C callables have no signature; the probe calls them.
  wanted = "(completion: str, answer: str, **metadata) -> float"
  try:
    signature.bind("", "")
  except TypeError as error:
    raise RewardError(
      f"reward {name!r} has the signature {signature}, a reward is {wanted}"
    ) from error
  kinds = [p.kind for p in signature.parameters.values()]
  if inspect.Parameter.VAR_KEYWORD not in kinds:
    raise RewardError(
      f"reward {name!r} has the signature {signature} and cannot take the"
      f" task's metadata: add **metadata, a reward is {wanted}"
    )


def resolve(name: str | Callable[..., float]) -> Callable[..., float]:
  """Returns the reward function that `name` means.

  Args:
    name: "module:function", a short name (exact, countdown, math, code), a
      weighted sum of those such as "0.8*math + 0.2*my.module:style" (weights
      positive, summing to 1), or a function, which is checked and returned.

  Raises:
    RewardError: no such module or function (with the nearest name), or a
      signature that cannot take (completion, answer, **metadata).
  """
  if callable(name):
    check_signature(name, reward_name(name))
    return name
  if not isinstance(name, str) or not name.strip():
    raise RewardError(f"reward.name must be a string, got {name!r}")
  name = name.strip()
  if "*" not in name and "+" not in name:
    return _resolve_one(name)
  parts = []
  for term in name.split(" + ") if " + " in name else name.split("+"):
    match = _TERM.match(term.strip())
    if not match:
      raise RewardError(
        f"reward.name {name!r}: the term {term.strip()!r} is not"
        " 'weight*reward'"
      )
    fn = _resolve_one(match["name"].strip())
    parts.append((fn, float(match["weight"])))
  return Combined(parts)
