"""Reads run folders, whole or cut off at any instant, for reports.

A run may be read while it is being written or after it was killed, so a torn
last line, a missing file or a missing key never stops a reader. What was left
out is kept in `Run.notes` and printed in the report; nothing is dropped in
silence.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

PHASES = ("prefill", "decode", "reward", "allocate", "update", "other")


@dataclasses.dataclass
class Run:
  """One run folder.

  train: training lines of metrics.jsonl, one per step, steps ascending.
  evals: evaluation lines, one per evaluated step, steps ascending.
  groups: per step, the opened groups' sizes, reward sums and round counts.
  samples: sample completions, oldest first.
  notes: sentences about what could not be read.
  command: the command line that started the run, from command.txt.
  label, variant: the rule and the stream the run belongs to in a comparison.
  """

  folder: pathlib.Path
  config: dict
  train: list[dict]
  evals: list[dict]
  groups: list[dict]
  samples: list[dict]
  notes: list[str]
  command: str = ""
  label: str = ""
  variant: str = ""

  @property
  def seed(self) -> int | None:
    return self.config.get("seed")

  @property
  def steps(self) -> int:
    """Training steps on record."""
    return len(self.train)

  @property
  def total_steps(self) -> int | None:
    return self.config.get("total_steps")

  @property
  def allocator(self) -> str:
    return str(self.config.get("allocation", {}).get("name", "unknown"))

  def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(cumulative rollouts, values) of the train lines that have `key`."""
    pairs = [
      (number(line, "rollouts"), number(line, key)) for line in self.train
    ]
    pairs = [p for p in pairs if not any(map(math.isnan, p))]
    x, y = zip(*pairs) if pairs else ((), ())
    return np.array(x, float), np.array(y, float)

  def mean(self, key: str) -> float:
    """Mean of `key` over the run's train lines; nan if it is never there."""
    values = self.series(key)[1]
    return float(values.mean()) if len(values) else math.nan

  def last(self, key: str) -> float:
    values = self.series(key)[1]
    return float(values[-1]) if len(values) else math.nan

  def curve(self, against: str) -> tuple[np.ndarray, np.ndarray]:
    """(spent, accuracy) at the evaluations.

    Args:
      against: "rollouts", "tokens" or "seconds". Seconds are training seconds
        (see `training_seconds`), so that neither evaluation nor compilation,
        which the first run of a process pays for all, enters a comparison.
    """
    points = []
    for line in self.evals:
      accuracy = number(line, "eval/accuracy")
      rollouts = number(line, "rollouts")
      if against == "seconds":
        spent = self._seconds_at(rollouts, line)
      else:
        spent = number(line, against)
      if not (math.isnan(accuracy) or math.isnan(spent)):
        points.append((spent, accuracy))
    points.sort(key=lambda p: p[0])
    x, y = zip(*points) if points else ((), ())
    return np.array(x, float), np.array(y, float)

  def _seconds_at(self, rollouts: float, line: dict) -> float:
    spent = training_seconds(self.train)
    if spent is None or math.isnan(rollouts):
      return number(line, "seconds")
    x = np.array([number(t, "rollouts") for t in self.train])
    if np.isnan(x).any():
      return number(line, "seconds")
    return float(np.interp(rollouts, np.r_[0.0, x], np.r_[0.0, spent]))

  def compiled_after(self, steps: int = 2) -> list[int]:
    """Steps later than the first `steps` in which a program was compiled.

    The counter belongs to a process, so a fall of it marks a restart, whose
    own first steps compile again and are not counted; nor is what the
    evaluation or the checkpoint after the step before compiled.
    """
    every = self.config.get("checkpoint", {}).get("every_steps", 0)
    between = {int(line["step"]) for line in self.evals}
    late, before, grace = [], None, steps
    for line in self.train:
      count, step = number(line, "compiles"), int(line["step"])
      if math.isnan(count):
        continue
      aside = step - 1 in between or (every and (step - 1) % every == 0)
      if before is not None and count < before:
        grace = steps
      elif before is not None and count > before and grace <= 0 and not aside:
        late.append(step)
      before, grace = count, grace - 1
    return late


def number(line: dict, key: str) -> float:
  """line[key] as a float; nan when missing or not a number."""
  value = line.get(key)
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return math.nan
  return float(value) if math.isfinite(value) else math.nan


def training_seconds(train: Sequence[dict]) -> np.ndarray | None:
  """Cumulative seconds of the phases of each step, compilation left out.

  A step in which a program was compiled, and the first one on record, count
  as the run's median step: runs that share a process share compiled programs,
  and only the first of them pays. None when no phase times are on record.
  """
  if not train:
    return None
  spent = np.array(
    [
      sum(
        v
        for k in line
        if k.startswith("time/") and not math.isnan(v := number(line, k))
      )
      for line in train
    ]
  )
  if not (spent > 0).any():
    return None
  counts = np.array([number(line, "compiles") for line in train])
  compiled = np.r_[True, np.nan_to_num(np.diff(counts)) != 0]
  ordinary = spent[~compiled] if (~compiled).any() else spent
  return np.cumsum(np.where(compiled, np.median(ordinary), spent))


# --------------------------------------------------------------------- reading


def read_lines(path: pathlib.Path, notes: list[str]) -> list[dict]:
  """The objects of a .jsonl file; unreadable lines go to `notes`."""
  if not path.exists():
    return []
  lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
  objects = []
  for position, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      value = json.loads(line)
    except ValueError:
      value = None
    if isinstance(value, dict):
      objects.append(value)
    elif position == len(lines):  # no newline after it: cut off while written
      notes.append(f"{path.name}: the last line was cut off and is left out")
    else:
      notes.append(
        f"{path.name}, line {position} is not a JSON object and is left out"
      )
  return objects


def _by_step(lines: list[dict]) -> list[dict]:
  """One line per step, the latest record of it, steps ascending."""
  kept = {}
  for line in lines:
    step = number(line, "step")
    if not math.isnan(step):
      kept[int(step)] = line
  return [kept[step] for step in sorted(kept)]


def _groups(lines: list[dict], notes: list[str]) -> list[dict]:
  """Lines of groups.jsonl as arrays; those that do not fit go to `notes`."""
  result = []
  for line in _by_step(lines):
    try:
      n = np.array(line["n"], np.float64)
      total = np.array(line["sum"], np.float64)
      rounds = line.get("round_counts") or []
      table = np.zeros((len(rounds), len(n)))
      for row, counts in enumerate(rounds):
        table[row, : len(counts)] = counts
      levels = line.get("levels")
      levels = None if levels is None else np.array(levels, np.float64)
      if (
        n.ndim != 1
        or n.shape != total.shape
        or (levels is not None and levels.shape != n.shape)
      ):
        raise ValueError("lengths differ")
    except (KeyError, TypeError, ValueError) as error:
      notes.append(f"groups.jsonl, step {line['step']} is left out: {error!r}")
      continue
    result.append(
      {
        "step": int(line["step"]),
        "n": n,
        "sum": total,
        "rounds": table,
        "levels": levels,
      }
    )
  return result


def _samples(lines: list[dict]) -> list[dict]:
  flat = []
  for line in lines:
    inner = line.get("samples")
    if isinstance(inner, list):
      flat += [
        {"step": line.get("step"), **s} for s in inner if isinstance(s, dict)
      ]
    else:
      flat.append(line)
  return flat


def read(folder) -> Run:
  """Reads one run folder.

  Raises:
    ValueError: the folder has neither a config.json nor a metrics.jsonl.
  """
  folder = pathlib.Path(folder)
  notes: list[str] = []
  config: dict = {}
  path = folder / "config.json"
  if not path.exists() and not (folder / "metrics.jsonl").exists():
    near = [
      str(found.parent)
      for name in ("config.json", "compare.json")
      for found in sorted(folder.glob(f"*/{name}"))[:4]
    ]
    raise ValueError(
      f"{folder} is not a run folder: it has neither config.json nor "
      "metrics.jsonl"
      + (f"; did you mean {' or '.join(near)}?" if near else "")
    )
  if path.exists():
    try:
      config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
      notes.append(f"config.json cannot be read: {error}")
  else:
    notes.append("config.json is missing")
  command = folder / "command.txt"
  lines = read_lines(folder / "metrics.jsonl", notes)
  evals = [line for line in lines if "eval/accuracy" in line]
  train = [line for line in lines if "eval/accuracy" not in line]
  return Run(
    folder=folder,
    config=config if isinstance(config, dict) else {},
    train=_by_step(train),
    evals=_by_step(evals),
    groups=_groups(read_lines(folder / "groups.jsonl", notes), notes),
    samples=_samples(read_lines(folder / "samples.jsonl", notes)),
    notes=notes,
    command=command.read_text().strip() if command.exists() else "",
  )


def flatten(config: dict, prefix: str = "") -> dict:
  """Nested dictionaries to {"a.b.c": value}."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = value
  return flat
