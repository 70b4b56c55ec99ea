"""What a run leaves behind while it goes: lines, samples, checkpoints.

    config.json     resolved configuration
    metrics.jsonl   the record (docs/metrics.md), and TensorBoard events
    groups.jsonl    sizes and reward sums of every step's groups
    samples.jsonl   sample completions of every evaluation
    checkpoints/    everything needed to continue
    summary.json    written last: the run is complete

All of them continue after a kill without a gap or a double: opening a record
at the checkpoint's step drops later lines, which the run then writes again.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any, Mapping

import jax

from vigor_jax import checkpoints
from vigor_jax import compilation
from vigor_jax import distributed
from vigor_jax import metrics as metrics_lib
from vigor_jax import progress as progress_lib
from vigor_jax import workdirs
from vigor_jax.config import loading

CONFIG_FILE = "config.json"
SUMMARY_FILE = "summary.json"
# What others read of it.
_SUMMARY_FIELDS = {"total_steps": int, "rollouts": int, "seconds": (int, float),
                   "curve": list}


class Interrupted(Exception):
  """A signal asked the run to stop; its state is saved.

  Attributes:
    signum: the signal; step: steps done; workdir: the run's folder.
  """

  def __init__(self, signum: int, step: int, workdir: str):
    super().__init__(f"stopped by {signal.Signals(signum).name} after step "
                     f"{step}; saved in {workdir}")
    self.signum, self.step, self.workdir = signum, step, workdir


class Signals:
  """Turns SIGTERM and Ctrl-C into a flag; a second Ctrl-C is immediate."""

  def __init__(self):
    self.signum = 0
    self._old: dict[int, Any] = {}

  def __enter__(self) -> Signals:
    if threading.current_thread() is threading.main_thread():
      for signum in (signal.SIGTERM, signal.SIGINT):
        self._old[signum] = signal.signal(signum, self._on_signal)
    return self

  def __exit__(self, *unused) -> None:
    for signum, handler in self._old.items():
      signal.signal(signum, handler)

  def _on_signal(self, signum, frame) -> None:
    if self.signum and signum == signal.SIGINT:
      raise KeyboardInterrupt
    self.signum = signum
    # Async-signal-safe enough: one write, no buffered file.
    os.write(2, b"\nstopping after this step (Ctrl-C again: at once)\n")


def as_begun(config, workdir: str):
  """The configuration with what the workdir's run, if any, chose itself."""
  path = os.path.join(workdir, CONFIG_FILE)
  if not os.path.exists(path):
    return config
  return loading.as_begun(loading.read_json(path), config)


def check_config(config, workdir: str) -> list[str]:
  """Compares a used workdir's configuration with the new one.

  Returns:
    Lines that report what changes (allowed fields only).

  Raises:
    ConfigError: the workdir belongs to another run; names the fields.
  """
  folder = os.path.join(workdir, checkpoints.FOLDER)
  if os.path.exists(folder) and not os.path.isdir(folder):
    raise loading.ConfigError(f"{folder} is a file; a run keeps its "
                              "checkpoints there: choose another --workdir")
  path = os.path.join(workdir, CONFIG_FILE)
  if not os.path.exists(path):
    return []
  old = loading.read_json(path)
  return [f"changed since the run began: {d}"
          for d in loading.check_resume(old, config, workdir)]


class _Nothing:
  """Stands for a file in the processes that write none."""

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    pass

  def append(self, record: Mapping[str, Any]) -> None:
    pass

  def sync(self) -> None:
    pass

  def close(self) -> None:
    pass


class Record:
  """Files and console of one run; see the module's docstring.

  Only process 0 of a job writes and speaks; checkpoints are saved by all.
  Files of a remote workdir are kept in a local folder, `workdir`, and copied.

  Raises:
    ConfigError: the workdir's run is further than `total_steps`.
  """

  def __init__(self, config, workdir: str, *, quiet: bool = False,
               progress: progress_lib.Progress | None = None,
               total_steps: int, command: str = ""):
    team = distributed.cluster()
    self.primary = team.primary
    self.config, self.name, self.quiet = config, workdir, quiet
    self.total_steps = total_steps
    self.workdir = workdirs.local(workdir)
    self.mirror = workdirs.Mirror(workdir)
    self.checkpoints = checkpoints.Checkpoints(workdir,
                                               config.checkpoint.keep)
    self.step = self.checkpoints.latest() or 0
    if self.step > total_steps:
      self.checkpoints.close()
      name = "sft.steps" if config.stage == "sft" else "total_steps"
      raise loading.ConfigError(
          f"{name}: {total_steps} are fewer than the {self.step} steps that "
          f"{workdir} has done; legal: {self.step} or more, or another "
          "--workdir")
    if self.primary:
      self._describe(command)
    self.counters = metrics_lib.Counters()
    self.progress = progress or progress_lib.Progress(
        total_steps,
        file=open(os.devnull, "w") if quiet or not self.primary else None)
    self.resumed = self.checkpoints.latest() is not None
    at = self.step if self.resumed else None
    self.metrics = self._groups = self._samples = _Nothing()
    if self.primary:
      self.metrics = metrics_lib.MetricsWriter(self.workdir, at)
      self._groups, self._samples = [
          metrics_lib.JsonLines(os.path.join(self.workdir, name), at)
          for name in ("groups.jsonl", "samples.jsonl")]
    self._saved = self.step if self.resumed else -1
    self.curve: list[dict[str, float]] = []
    if self.resumed:
      path = os.path.join(self.workdir, metrics_lib.METRICS_FILE)
      self.curve = team.from_first("evaluations so far", lambda: [
          line for line in metrics_lib.read_lines(path)
          if "eval/accuracy" in line])

  def _describe(self, command: str) -> None:
    """Writes what is run."""
    os.makedirs(self.workdir, exist_ok=True)
    metrics_lib.atomic_write(os.path.join(self.workdir, CONFIG_FILE),
                             loading.to_json(self.config))
    if command:
      metrics_lib.atomic_write(os.path.join(self.workdir, "command.txt"),
                               command + "\n")

  def say(self, text: str) -> None:
    """One line on the console."""
    self.progress.say(text)

  def restore(self, params_target, opt_target):
    """(params, opt_state, host) of the step to continue from."""
    params, opt_state, host = self.checkpoints.restore(
        self.step, params_target, opt_target)
    self.counters.load_state_dict(host["counters"])
    self.say(f"resumed from step {self.step} in {self.name}")
    return params, opt_state, host

  def train_line(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes a training step's line and shows it."""
    self.metrics.write(step, values)
    self.progress.step(step, values)

  def group_line(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes a step's groups."""
    self._groups.append({"step": step, **values})

  def evaluation(self, step: int, values: Mapping[str, Any],
                 samples: list[dict[str, Any]]) -> None:
    """Writes an evaluation, its samples, and shows it."""
    line = {**self.counters.values(), **values}
    self.metrics.write(step, line)
    self._samples.append({"step": step, "samples": samples})
    self.progress.evaluation(step, line)
    self.curve.append({"step": step, **line})

  def save(self, step: int, params, opt_state, host: Mapping[str, Any]
           ) -> None:
    """Checkpoints a step; the lines up to it are durable before."""
    if step == self._saved:
      return
    self.metrics.sync()
    self._groups.sync()
    self._samples.sync()
    if self.primary:
      self.mirror.push()
    host = {**host, "counters": self.counters.state_dict()}
    self.checkpoints.save(step, params, opt_state, host)
    self._saved = step

  def finish(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Waits for the last checkpoint and writes summary.json."""
    self.checkpoints.wait()
    summary = {
        "complete": True, "step": self.total_steps,
        "total_steps": self.total_steps, **self.counters.values(), **values,
        "compiles": compilation.count(), "backend": jax.default_backend(),
        "devices": jax.device_count(), "curve": self.curve,
    }
    if self.primary:
      metrics_lib.atomic_write(os.path.join(self.workdir, SUMMARY_FILE),
                               json.dumps(summary) + "\n")
      self.mirror.push()
    return summary

  def close(self) -> None:
    """Closes every file; nothing is lost if this is never reached."""
    self.metrics.close()
    self._groups.close()
    self._samples.close()
    self.checkpoints.close()


def read_summary(workdir: str) -> dict[str, Any] | None:
  """The summary of a complete run, or None.

  Raises:
    ValueError: there is one that cannot be read.
  """
  path = os.path.join(workdir, SUMMARY_FILE)
  if not os.path.exists(path):
    return None
  try:
    with open(path, encoding="utf-8") as file:
      summary = json.load(file)
    for name, kind in _SUMMARY_FIELDS.items():
      if not isinstance(summary[name], kind):
        raise ValueError(f"{name} is {summary[name]!r}")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
        f"{path}: cannot be read ({type(error).__name__}: {error}); delete it, "
        "and the same command writes it again") from error
  return summary
