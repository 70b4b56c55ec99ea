"""Which vocabulary a task uses, and where a stop string ends a completion."""

import functools
import os
from collections.abc import Sequence

from vigor_jax.tasks import characters


@functools.lru_cache(maxsize=4)
def load(where: str) -> characters.Vocabulary:
  """The vocabulary that `config.task.tokenizer` names.

  Args:
    where: empty for bytes; a folder with tokenizer.json; that file itself; or
      a .gguf file. Read once per process.
  """
  if not where:
    return characters.ByteVocabulary()
  try:
    from vigor_jax.tasks import pretrained
  except ModuleNotFoundError as error:
    raise ValueError(
      f"tokenizer {where!r} needs the package {error.name!r}:"
      " pip install 'vigor-jax[tasks]'"
    ) from error
  if where.endswith(".gguf"):
    if not os.path.exists(where):
      raise ValueError(f"tokenizer: no file {where!r}")
    return pretrained.from_gguf(where)
  folder, name = os.path.split(where)
  return pretrained.from_folder(folder if name == "tokenizer.json" else where)


def find_stop(
  vocabulary: characters.Vocabulary,
  ids: Sequence[int],
  stop_strings: Sequence[str],
  start: int = 0,
) -> int | None:
  """Index of the first token at which a stop string is complete.

  A stop string may span tokens; the ids themselves stay as they were sampled,
  the row just ends with the token at the returned index.

  Args:
    vocabulary: decodes the ids.
    ids: the completion so far.
    stop_strings: any of them stops; empty ones are refused.
    start: tokens before it were searched in an earlier call.

  Returns:
    The index, >= start; None while no stop string is complete.
  """
  if not all(stop_strings):
    raise ValueError(f"a stop string must not be empty, got {stop_strings!r}")
  if not stop_strings or start >= len(ids):
    return None
  # A stop string of b bytes spans at most b tokens that add text.
  reach = max(len(s.encode()) for s in stop_strings)
  first = max(0, start - reach)

  def complete(end: int) -> bool:
    text = vocabulary.decode(ids[first:end])
    return any(s in text for s in stop_strings)

  if not complete(len(ids)):
    return None
  # Longer prefixes contain what shorter ones do: bisect.
  low, high = start, len(ids)  # not known to be complete, complete
  while high - low > 1:
    middle = (low + high) // 2
    if complete(middle):
      high = middle
    else:
      low = middle
  return high - 1
