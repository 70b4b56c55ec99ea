"""Records from local files, with errors that name the file and the line."""

import dataclasses
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vigor_jax.tasks import files

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_PARQUET = (".parquet",)
FORMATS = _JSON_LINES + _PARQUET


class DataError(ValueError):
  """A record that cannot be used; the message starts with file and line."""


@dataclasses.dataclass
class Example:
  """One prompt before it is rendered.

  Attributes:
    prompt: the question, without any template.
    answer: the gold answer; never empty.
    metadata: keyword arguments of the reward.
    completion: a text to imitate in a warm start, if there is one.
  """

  prompt: str
  answer: str
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
  completion: str | None = None


@dataclasses.dataclass
class Loaded:
  """What came out of a set of files."""

  examples: list[Example]
  skipped: int = 0  # records that could not be used, when that was allowed
  doubles: int = 0  # records whose prompt had been read before


def expand(path: str) -> list[str]:
  """The data files a path means: a file, a folder of them, or a pattern.

  Raises:
    ValueError: nothing is there.
  """
  if files.is_remote(path):
    remote_folder = files.is_folder(path)
    if remote_folder:
      found = [f"{path.rstrip('/')}/{name}" for name in files.names_in(path)]
      found = [p for p in found if p.endswith(FORMATS)]
    else:
      found = [path] if files.exists(path) else []
  elif os.path.isdir(path):
    found = [os.path.join(path, name) for name in files.names_in(path)]
    found = [p for p in found if p.endswith(FORMATS)]
  else:
    found = sorted(glob.glob(path)) or ([path] if os.path.exists(path) else [])
  if not found:
    raise ValueError(
      f"no data at {path!r}: expected a file, a folder or a pattern of"
      f" {', '.join(FORMATS)}"
    )
  return found


def _json_lines(path: str) -> Iterator[tuple[str, Any]]:
  with files.open_binary(path) as f:
    for number, line in enumerate(f, start=1):
      if line.strip():
        yield f"{path}:{number}", line


def _parquet(path: str) -> Iterator[tuple[str, Any]]:
  import pyarrow.parquet

  with files.open_binary(path) as f:
    table = pyarrow.parquet.ParquetFile(f)
    row = 0
    for batch in table.iter_batches():
      for record in batch.to_pylist():
        row += 1
        yield f"{path}:row {row}", record


def _decoded(where: str, raw: Any) -> Mapping[str, Any]:
  if isinstance(raw, bytes):
    try:
      raw = json.loads(raw)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
      raise DataError(f"{where}: not a JSON record: {error}") from None
  if not isinstance(raw, Mapping):
    raise DataError(
      f"{where}: a record must be an object with named fields, got"
      f" {type(raw).__name__} {str(raw)[:40]!r}"
    )
  return raw


def text_field(record: Mapping[str, Any], name: str) -> str:
  """A field that must be there and be a text that is not blank.

  Raises:
    DataError: without file and line; `load` puts them in front.
  """
  if name not in record:
    raise DataError(
      f"field {name!r} is missing; the record has {sorted(record)}"
    )
  value = record[name]
  if not isinstance(value, str):
    kind = type(value).__name__
    raise DataError(f"field {name!r} must be a string, got {kind} {value!r}")
  if not value.strip():
    raise DataError(f"field {name!r} is empty")
  return value


def load(
  path: str,
  parse: Callable[[Mapping[str, Any]], Example | None],
  *,
  skip_malformed: bool = False,
  distinct: bool = False,
) -> Loaded:
  """Reads every record of a path.

  Args:
    path: see `expand`.
    parse: record -> Example; None leaves a record out that belongs to another
      part of the data; raises DataError for one that cannot be used.
    skip_malformed: count such records instead of stopping at the first.
    distinct: keep only the first record of every prompt text.

  Raises:
    DataError: with file and physical line (or row) of the first bad record.
    ValueError: no file, or no usable record in any.
  """
  loaded, seen = Loaded([]), set()
  for file in expand(path):
    reader = _parquet if file.endswith(_PARQUET) else _json_lines
    for where, raw in reader(file):
      try:
        example = parse(_decoded(where, raw))
      except DataError as error:
        if skip_malformed:
          loaded.skipped += 1
          continue
        message = str(error)
        prefix = "" if message.startswith(where) else f"{where}: "
        raise DataError(f"{prefix}{message}") from None
      if example is None:
        continue
      if distinct and example.prompt in seen:
        loaded.doubles += 1
        continue
      seen.add(example.prompt)
      loaded.examples.append(example)
  if not loaded.examples:
    raise ValueError(
      f"{path!r} holds no usable record ({loaded.skipped} were skipped)"
    )
  return loaded
