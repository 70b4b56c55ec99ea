"""Records from local files, with errors that name the file and the line."""

import codecs
import dataclasses
import glob
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from vigor_jax.tasks import files

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_PARQUET = (".parquet",)
FORMATS = _JSON_LINES + _PARQUET


class DataError(ValueError):
  """A record or file that cannot be used; starts with file (and line)."""


class EmptyError(ValueError):
  """Data without a single usable record."""


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
  in_evaluation: int = 0  # records left out because they are evaluated on

  def leave_out(self, evaluation: "Loaded") -> None:
    """Drops, and counts, the prompts that the evaluation part has too."""
    held_out = {example.prompt.strip() for example in evaluation.examples}
    kept = [e for e in self.examples if e.prompt.strip() not in held_out]
    self.in_evaluation += len(self.examples) - len(kept)
    self.examples = kept


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
    found = [p for p in sorted(glob.glob(path)) if not os.path.isdir(p)]
    found = found or ([path] if os.path.exists(path) else [])
  if not found:
    raise ValueError(
      f"no data at {path!r}: expected a file, a folder or a pattern of"
      f" {', '.join(FORMATS)}"
    )
  return found


def _json_lines(path: str) -> Iterator[tuple[str, Any]]:
  with files.open_binary(path) as f:
    for number, line in enumerate(f, start=1):
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
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


def _json_array(path: str) -> Iterator[tuple[str, Any]]:
  """One JSON array, as some publishers write .json, or lines as in .jsonl."""
  with files.open_binary(path) as f:
    start = f.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()
  if not start.startswith(b"["):
    yield from _json_lines(path)
    return
  with files.open_binary(path) as f:
    try:
      items = json.load(f)
    except (ValueError, RecursionError) as error:
      raise DataError(f"{path}: not a JSON array: {error}") from None
  for number, item in enumerate(items, start=1):
    yield f"{path}:item {number}", item


def _rows(file: str) -> Iterator[tuple[str, Any]]:
  """(where, record) of one file.

  Raises:
    DataError: the file as a whole cannot be read: cut off, damaged, no access.
  """
  read = _json_lines
  if file.endswith(_PARQUET):
    read = _parquet
  elif file.endswith((".json", ".json.gz")):
    read = _json_array
  try:
    yield from read(file)
  except DataError:
    raise
  # A cut or damaged .gz, a damaged .parquet, a file that may not be opened.
  except (OSError, EOFError, zlib.error, ValueError) as error:
    detail = str(error).strip() or type(error).__name__
    raise DataError(f"{file}: cannot be read: {detail}") from error


def _decoded(raw: Any) -> Mapping[str, Any]:
  if isinstance(raw, bytes):
    try:
      raw = json.loads(raw)
    # Bad JSON, bad UTF-8, brackets without end.
    except (ValueError, RecursionError) as error:
      raise DataError(f"not a JSON record: {error}") from None
  if not isinstance(raw, Mapping):
    raise DataError(
      f"a record must be an object with named fields, got"
      f" {type(raw).__name__} {str(raw)[:40]!r}"
    )
  return raw


def text_field(record: Mapping[str, Any], name: str) -> str:
  """A field that must be there and be a text that is not blank.

  Raises:
    DataError: without file and line; `load_rows` puts them in front.
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
  try:
    value.encode()
  except UnicodeEncodeError as error:  # JSON can write half a pair, "\\ud83d"
    raise DataError(
      f"field {name!r} is no text: {value[error.start]!r} at character"
      f" {error.start} is half of a surrogate pair"
    ) from None
  return value


def load(
  path: str,
  parse: Callable[[Mapping[str, Any]], Example],
  **settings: Any,
) -> Loaded:
  """Reads every record of a path (see `expand`); else as `load_rows`."""
  rows = (row for file in expand(path) for row in _rows(file))
  try:
    return load_rows(rows, parse, **settings)
  except EmptyError as error:
    raise ValueError(f"{path!r} {error}") from None


def load_rows(
  rows: Iterable[tuple[str, Any]],
  parse: Callable[[Mapping[str, Any]], Example],
  *,
  skip_malformed: bool = False,
  distinct: bool = False,
  problem: Callable[[str], str | None] | None = None,
) -> Loaded:
  """Parses records.

  Args:
    rows: (where, record); a record may still be a line of JSON.
    parse: record -> Example; raises DataError for one that cannot be used.
    skip_malformed: count such records instead of stopping at the first.
    distinct: keep only the first record of every prompt text.
    problem: what is wrong with a gold answer, None if it can be judged.

  Raises:
    DataError: with file and physical line (or row) of the first bad record.
    EmptyError: no usable record at all.
  """
  loaded, seen = Loaded([]), set()
  for where, raw in rows:
    try:
      example = parse(_decoded(raw))
      fault = problem(example.answer) if problem is not None else None
      if fault is not None:
        raise DataError(fault)
    except DataError as error:
      if skip_malformed:
        loaded.skipped += 1
        continue
      raise DataError(f"{where}: {error}") from None
    if distinct and example.prompt in seen:
      loaded.doubles += 1
      continue
    seen.add(example.prompt)
    loaded.examples.append(example)
  if not loaded.examples:
    raise EmptyError(
      f"holds no usable record ({loaded.skipped} were skipped)"
    )
  return loaded
