"""The record of a run: metrics.jsonl, TensorBoard events, atomic files.

metrics.jsonl is the record; the events are a view of it and can be rebuilt.
Every line is handed to the operating system in one write before the call
returns, so a killed process loses at most the line being written. Resuming at
a checkpoint drops the lines after it, which the resumed run writes again.

docs/metrics.md explains every key.
"""

import contextlib
import glob
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

METRICS_FILE = "metrics.jsonl"
_SYNC_SECONDS = 1.0


class NonFiniteMetric(FloatingPointError):
  """A metric was NaN or infinite; the line that shows it was written first."""


def atomic_write(path: str, data: str | bytes) -> None:
  """Writes a whole file so that a reader or a crash sees all of it or none."""
  folder = os.path.dirname(os.path.abspath(path))
  os.makedirs(folder, exist_ok=True)
  raw = data.encode() if isinstance(data, str) else data
  handle, temporary = tempfile.mkstemp(
    dir=folder, prefix=f".{os.path.basename(path)}."
  )
  try:
    with os.fdopen(handle, "wb") as file:
      file.write(raw)
      file.flush()
      os.fchmod(file.fileno(), 0o644)
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)
    raise
  _sync_folder(folder)


def _sync_folder(folder: str) -> None:
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _plain(value: Any) -> Any:
  """Turns arrays and array scalars into numbers and lists for JSON."""
  if hasattr(value, "tolist"):
    return value.tolist()
  raise TypeError(f"a {type(value).__name__} cannot be a metric: {value!r}")


def _parse_line(path: str, number: int, line: bytes) -> dict[str, Any]:
  try:
    record = json.loads(line)
  except ValueError as error:
    raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
  if not isinstance(record, dict):
    raise ValueError(f"{path}, line {number}: expected an object")
  return record


def read_lines(path: str) -> list[dict[str, Any]]:
  """Returns the records of a JSON lines file, without a torn last line.

  Raises:
    ValueError: a complete line is not a JSON object; names file and line.
  """
  with open(path, "rb") as file:
    lines = file.read().split(b"\n")[:-1]
  return [
    _parse_line(path, number, line)
    for number, line in enumerate(lines, start=1)
    if line.strip()
  ]


class JsonLines:
  """An append-only file of JSON objects that each carry a "step"."""

  def __init__(self, path: str, resume_step: int | None = None):
    """Opens the file for appending.

    Args:
      path: of the file, made if absent.
      resume_step: keep the lines with step <= this one, drop those after it
        and a torn last line; None: start empty.
    """
    self._path = path
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    self._truncate(resume_step)
    self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    self._synced = time.monotonic()

  def _truncate(self, resume_step):
    if not os.path.exists(self._path):
      return
    with open(self._path, "rb") as file:
      raw = file.read()
    kept = []
    if resume_step is not None:
      for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        if not line.strip():
          continue
        step = _parse_line(self._path, number, line).get("step")
        if not isinstance(step, (int, float)):
          raise ValueError(f"{self._path}, line {number}: has no step")
        if step <= resume_step:
          kept.append(line + b"\n")
    if raw != b"".join(kept):
      atomic_write(self._path, b"".join(kept))

  def append(self, record: Mapping[str, Any]) -> None:
    """Adds one object; it has left the process when this returns."""
    text = json.dumps(record, allow_nan=False, default=_plain)
    data = text.encode() + b"\n"
    try:
      while data:
        data = data[os.write(self._file, data):]
    except OSError as error:  # A full disk; os.write() names no file.
      raise type(error)(error.errno, error.strerror, self._path) from error
    if time.monotonic() - self._synced > _SYNC_SECONDS:
      self.sync()

  def sync(self) -> None:
    """Waits until all lines are on the disk (for a machine that stops)."""
    os.fsync(self._file)
    self._synced = time.monotonic()

  def close(self) -> None:
    """Syncs and closes the file."""
    if self._file >= 0:
      self.sync()
      os.close(self._file)
      self._file = -1


class Counters:
  """What a run has spent so far: rollouts, generated tokens and seconds.

  Seconds run from `start` on and not while `paused`, so they leave out the
  time between a kill and the restart, start-up, and evaluations.
  """

  def __init__(self):
    self.rollouts = 0
    self.tokens = 0
    self._seconds = 0.0
    self._since = None

  @property
  def seconds(self) -> float:
    """Seconds spent so far."""
    running = 0.0 if self._since is None else time.monotonic() - self._since
    return self._seconds + running

  def start(self) -> None:
    """Starts the clock."""
    if self._since is None:
      self._since = time.monotonic()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Stops the clock inside a with block."""
    was_running = self._since is not None
    self._seconds, self._since = self.seconds, None
    try:
      yield
    finally:
      if was_running:
        self.start()

  def add(self, rollouts: int, tokens: int) -> None:
    """Counts generated rollouts and their tokens."""
    self.rollouts += int(rollouts)
    self.tokens += int(tokens)

  def values(self) -> dict[str, int | float]:
    """Returns the cumulative metrics of a line."""
    return {
      "rollouts": self.rollouts,
      "tokens": self.tokens,
      "seconds": self.seconds,
    }

  state_dict = values

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint's counters; the clock is left stopped."""
    self.rollouts = int(state["rollouts"])
    self.tokens = int(state["tokens"])
    self._seconds, self._since = float(state["seconds"]), None


class MetricsWriter:
  """Writes metrics.jsonl and the TensorBoard events of a run."""

  def __init__(
    self,
    workdir: str,
    resume_step: int | None = None,
    tensorboard: bool = True,
  ):
    """Opens the record.

    Args:
      workdir: the run's folder.
      resume_step: the step of the checkpoint that the run continues from;
        None for a new run.
      tensorboard: whether to write event files too.
    """
    path = os.path.join(workdir, METRICS_FILE)
    self._lines = JsonLines(path, resume_step)
    self._events = None
    if tensorboard:
      self._events = _Events(workdir, read_lines(path))

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Records one line.

    Args:
      step: training steps done, at least the last line's.
      values: {key: number, list of numbers, or None}; None says that the
        quantity is not defined at this step, and is written as null.

    Raises:
      NonFiniteMetric: a value is NaN or infinite. The line is written first,
        with null in its place, so that the record shows where it happened.
    """
    record = json.loads(
      json.dumps({"step": int(step), **values}, default=_plain)
    )
    broken = [key for key, value in record.items() if not _is_finite(value)]
    if broken:
      record.update({key: None for key in broken}, nonfinite=broken)
    self._lines.append(record)
    if self._events is not None:
      self._events.write(record)
    if broken:
      self.sync()
      raise NonFiniteMetric(
        f"step {step}: {', '.join(broken)} became NaN or infinite; the last "
        "checkpoint is from before. Look at policy/grad_norm in the lines "
        "before, lower optimizer.learning_rate or set optimizer.clip_norm"
      )

  def sync(self) -> None:
    """Makes all lines durable; call it before a checkpoint is saved."""
    self._lines.sync()
    if self._events is not None:
      self._events.flush()

  def close(self) -> None:
    """Syncs and closes all files."""
    self._lines.close()
    if self._events is not None:
      self._events.close()
      self._events = None


def _is_finite(value: Any) -> bool:
  if isinstance(value, list):
    return all(_is_finite(item) for item in value)
  return not isinstance(value, float) or math.isfinite(value)


class _Events:
  """TensorBoard events, rebuilt from the record when a run continues.

  A killed writer loses the events in its queue and leaves those of steps that
  will run again; rewriting them from metrics.jsonl leaves no gap and no
  double. Times are laid out by the record's own `seconds`.
  """

  def __init__(self, workdir: str, records: list[dict[str, Any]]):
    import tensorboardX  # Imported here: only a running trainer needs it.

    here = glob.escape(workdir)  # A folder may be called "[1]".
    for path in glob.glob(os.path.join(here, "events.out.tfevents.*")):
      os.unlink(path)
    self._writer = tensorboardX.FileWriter(workdir, flush_secs=10)
    self._summary = tensorboardX.summary.Summary
    self._last_step = {}
    last = records[-1].get("seconds", 0.0) if records else 0.0
    now = time.time()
    for record in records:
      self.write(record, now - last + record.get("seconds", last))
    self.flush()

  def write(self, record: Mapping[str, Any], walltime: float | None = None):
    """Adds the numbers of a record, each tag at most once a step."""
    step, values = record["step"], []
    for key, value in record.items():
      items = {key: value}
      if isinstance(value, list):
        items = {f"{key}/{i}": item for i, item in enumerate(value)}
      for tag, number in items.items():
        if tag == "step" or self._last_step.get(tag) == step:
          continue
        if isinstance(number, (int, float)):
          values.append(self._summary.Value(tag=tag, simple_value=number))
          self._last_step[tag] = step
    # One event: handing each number over costs a lock between processes.
    self._writer.add_summary(self._summary(value=values), step, walltime)

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()
