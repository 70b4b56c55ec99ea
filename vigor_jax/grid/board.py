"""What the console shows of a grid, a line at a time."""

import pathlib
import sys
import time

from vigor_jax import progress as progress_lib
from vigor_jax.grid import cells as cell_lib

QUIET_SECONDS = 15.0  # Between progress lines when nothing else is said.


class Board:
  """Takes the events of `workers` and prints them.

  Args:
    cells: all of the grid.
    finished: those that were complete before this command.
    parallel: runs at a time.
    file: where lines go; None: standard output.
    logs: folder of what workers print; None when nothing is hidden there.
  """

  def __init__(self, cells, finished, parallel: int, file=None, logs=None):
    self.state = {
      c.name: ("done" if c in finished else "missing") for c in cells
    }
    self.errors: dict[str, str] = {}
    self._cells = list(cells)
    self._file = file or sys.stdout
    self._left = {c.name: 0.0 if c in finished else 1.0 for c in cells}
    self._parallel = parallel
    self._running: dict[str, dict] = {}
    self._begun = self._first = None
    self._compiled = False
    self._spoke = time.monotonic()
    self._logs = logs
    self._warm: dict[str, float] = {}
    self._starts: dict[str, str] = {}  # {folder: the first stream it served}.

  def say(self, text: str) -> None:
    self._spoke = time.monotonic()
    print(text, file=self._file, flush=True)

  def notify(self, kind: str, task, value) -> None:
    """Takes an event of `workers`."""
    if task is not None and task[0] == "warm start":
      self._warm_start(kind, task[1], value)
    elif kind == "idle":
      self._breathe()
    else:
      getattr(self, f"_{kind}")(task[1], value)

  def _warm_start(self, kind, cell, value):
    what = f"warm start of {cell.variant}" if cell.variant else "warm start"
    if kind == "started":
      self._warm[cell.name] = time.monotonic()
      if self._logs:  # Else it says so itself.
        self.say(f"{what}: trained once, shared by all its cells")
    elif kind == "failed":
      self._warm.pop(cell.name)
      self.say(f"{what} failed: {value}")
    elif kind == "done":
      begun = self._warm.pop(cell.name)
      if value in self._starts:
        self.say(f"{what} is that of {self._starts[value]}: {value}")
        return
      self._starts[value] = cell.variant
      self.say(
        f"{what} ready after "
        f"{progress_lib.duration(time.monotonic() - begun)}: {value}"
      )

  def _started(self, cell, _):
    if self._begun is None:
      self._begun = time.monotonic()
      self._first = sum(self._left.values())
    self._running[cell.name] = {
      "cell": cell,
      "since": time.monotonic(),
      "total_steps": cell_lib.config_of(cell).total_steps,
    }
    if self._parallel == 1:
      self.say(f"[{self._done_count() + 1}/{len(self._cells)}] {cell.text}")

  def _progress(self, cell, value):
    self._running[cell.name].update(value)
    total = self._running[cell.name]["total_steps"]
    self._left[cell.name] = 1 - value["step"] / total
    if value["step"] and not self._compiled:
      # The first step compiled, for minutes maybe, what later runs reuse.
      self._compiled = True
      self._begun = time.monotonic()
      self._first = sum(self._left.values())
    self._breathe()

  def _done(self, cell, summary):
    since = self._running.pop(cell.name)["since"]
    self.state[cell.name] = "done"
    self._left[cell.name] = 0.0
    curve = [
      line["eval/accuracy"]
      for line in summary.get("curve", ())
      if line.get("eval/accuracy") is not None
    ]
    shown = f"accuracy {curve[-1]:.3f} (from {curve[0]:.3f}), " if curve else ""
    self.say(
      f"[{self._done_count()}/{len(self._cells)}] {cell.text}: {shown}"
      f"{progress_lib.quantity(summary['rollouts'])} rollouts, "
      f"{progress_lib.duration(time.monotonic() - since)}{self._eta()}"
    )

  def _failed(self, cell, message):
    self._running.pop(cell.name)
    self.state[cell.name] = "failed"
    self.errors[cell.name] = message
    self._left[cell.name] = 0.0
    self.say(f"FAILED {cell.text}: {message}")

  def _breathe(self):
    """A line about what is running, if nothing was said for a while."""
    if time.monotonic() - self._spoke < QUIET_SECONDS:
      return
    if self._warm:
      since = min(self._warm.values())
      self.say(
        "  warm start, "
        f"{progress_lib.duration(time.monotonic() - since)} so far"
        + self._last_word()
      )
      return
    parts = []
    for running in self._running.values():
      step = running.get("step", 0)
      text = f"{running['cell'].text} {f'step {step}' if step else 'starting'}"
      if running.get("accuracy") is not None:
        text += f" accuracy {running['accuracy']:.3f}"
      parts.append(text)
    if parts:
      self.say(
        f"  {self._done_count()} of {len(self._cells)} done; "
        f"{'; '.join(parts)}{self._eta()}"
      )

  def _last_word(self) -> str:
    """The line that a worker printed last."""
    files = (
      sorted(
        pathlib.Path(self._logs).glob("*.log"),
        key=lambda file: file.stat().st_mtime,
      )
      if self._logs
      else []
    )
    lines = files[-1].read_text().strip().splitlines() if files else []
    return f": {lines[-1]}" if lines else ""

  def _done_count(self) -> int:
    return sum(state != "missing" for state in self.state.values())

  def _eta(self) -> str:
    left = sum(self._left.values())
    made = self._first - left
    if left <= 0 or made < 0.05:  # of one run: too little to go by
      return ""
    pace = (time.monotonic() - self._begun) / made
    return f", {progress_lib.duration(pace * left)} left"
