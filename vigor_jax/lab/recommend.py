"""From a run's groups.jsonl: what every rule would have bought, and which one.

The counts of the opened prompts are deconvolved (allocation/population.py)
into distributions of p, early, middle and late in the run; every rule and
schedule that can spend the run's budget is then played on them, with the
allocators that train. Prompts count as fresh: rules that live on a prompt's
history (greso, vip, cero, knapsack, pilot_commit's eviction) are judged
without it, since groups.jsonl does not name prompts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax import allocation
from vigor_jax.allocation import population as population_lib
from vigor_jax.lab import prediction
from vigor_jax.reporting import runs as run_folders

STRETCHES = 3
WORTHWHILE = 1.05  # a smaller predicted gain is not worth a change
SILENT = 0.02  # p below it, or above 1 - it, hardly ever shows signal
SCHEDULES = (
  {},
  {"rounds": 2, "initial_rollouts": 4, "keep": 0.25, "growth": 4.0},
  {"rounds": 2, "initial_rollouts": 4},
)


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A rule with options and its prompts per step."""

  name: str
  prompts: int
  options: tuple = ()

  def label(self, budget: int) -> str:
    if self.name == "uniform":
      return f"uniform {self.prompts} x {budget // self.prompts}"
    extra = [f"{k}={v}" for k, v in self.options]
    return " ".join([self.name, *extra])


def candidates(prompts: int, budget: int) -> list[Candidate]:
  """Every rule that can spend the budget: splits, schedules, the registry."""
  splits = [prompts * f for f in (1, 2, 4)] + [prompts // 2, budget // 8]
  found = [
    Candidate("uniform", p)
    for p in sorted({p for p in splits if 0 < p <= budget // 2})
  ]
  for name in allocation.REGISTRY:
    if name == "uniform":
      continue
    variants = SCHEDULES if name == "vigor" else ({},)
    found += [
      Candidate(name, prompts, tuple(sorted(v.items()))) for v in variants
    ]
  return [c for c in found if _legal(c, budget)]


def _legal(candidate: Candidate, budget: int) -> bool:
  try:
    _make(candidate, budget)
  except ValueError:  # a schedule that cannot spend this budget
    return False
  return True


def _make(candidate: Candidate, budget: int):
  return allocation.make(
    candidate.name,
    dict(candidate.options),
    prompts_per_step=candidate.prompts,
    budget=budget,
    seed=0,
  )


@dataclasses.dataclass(frozen=True)
class Stretch:
  """Part of a run.

  Attributes:
    first, last: its steps.
    population: deconvolved.
    figures: one per candidate.
  """

  first: int
  last: int
  population: population_lib.Population
  figures: list[prediction.Figures]

  def shares(self) -> tuple[float, float, float]:
    """Shares of prompts that are out of reach, informative, solved."""
    p, w = self.population.mean, self.population.weights
    hard, easy = float(w[p < SILENT].sum()), float(w[p > 1 - SILENT].sum())
    return hard, max(0.0, 1 - hard - easy), easy


@dataclasses.dataclass(frozen=True)
class Advice:
  """What `advise` found.

  Attributes:
    budget, prompts: rollouts and prompts per step of the run.
    binary: verdicts are 0 or 1.
    candidates: the rules.
    stretches: early to late.
    gains: float [stretches, candidates], predicted from S against the best
      uniform split's.
    best: index of the recommended candidate.
    baseline: index of the best uniform split.
  """

  budget: int
  prompts: int
  allocator: str
  binary: bool
  candidates: list[Candidate]
  stretches: list[Stretch]
  gains: np.ndarray
  best: int
  baseline: int

  @property
  def gain(self) -> np.ndarray:
    """Geometric mean over the run, per candidate."""
    return np.exp(np.log(np.maximum(self.gains, 1e-9)).mean(0))


def advise(folder, *, steps: int = 60, warmup: int = 12) -> Advice:
  """Reads a run folder and plays every candidate on its pass rates.

  Args:
    folder: of a run, with groups.jsonl.
    steps: played per candidate and stretch, after `warmup`.

  Raises:
    ValueError: no run folder, no groups on record, or prompts without
      rollouts only.
  """
  run = run_folders.read(folder)
  lines = [g for g in run.groups if g["n"].sum() > 0]
  if not lines:
    raise ValueError(
      f"{folder}: groups.jsonl has no step with rollouts; train with it first"
    )
  spent = int(max(g["n"].sum() for g in lines))
  budget = int(run.config.get("rollout_budget") or spent)
  opened = int(np.median([(g["n"] > 0).sum() for g in lines]))
  prompts = int(run.config.get("prompts_per_step") or opened)
  rules = candidates(prompts, budget)
  binary = all(np.array_equal(g["sum"], np.rint(g["sum"])) for g in lines)
  stretches = []
  for part in np.array_split(np.arange(len(lines)), min(STRETCHES, len(lines))):
    chosen = [lines[i] for i in part]
    people = population_lib.deconvolve(
      np.concatenate([g["n"] for g in chosen]),
      np.concatenate([g["sum"] for g in chosen]),
    )
    figures = [
      prediction.summarise(
        prediction.play_population(
          _make(rule, budget), people, steps=steps, warmup=warmup
        )
      )
      for rule in rules
    ]
    stretches.append(
      Stretch(chosen[0]["step"], chosen[-1]["step"], people, figures)
    )
  effective = np.array([[f.effective for f in s.figures] for s in stretches])
  uniform = np.array([c.name == "uniform" for c in rules])
  level = np.log(np.maximum(effective, 1e-9)).mean(0)
  baseline = int(np.flatnonzero(uniform)[level[uniform].argmax()])
  gains = prediction.gain(
    effective / np.maximum(effective[:, [baseline]], 1e-9)
  )
  best = int(level.argmax())
  if prediction.gain(np.exp(level[best] - level[baseline])) < WORTHWHILE:
    best = baseline
  return Advice(
    budget, prompts, run.allocator, binary, rules, stretches, gains, best,
    baseline,
  )  # fmt: skip


def words(advice: Advice) -> str:
  """The advice as text: a table, and a recommendation in plain words."""
  labels = [c.label(advice.budget) for c in advice.candidates]
  width = max(map(len, labels))
  lines = []
  for s in advice.stretches:
    hard, middle, easy = (100 * x for x in s.shares())
    lines.append(
      f"Steps {s.first} to {s.last}: {hard:.0f} % of the prompts out of reach,"
      f" {middle:.0f} % with signal, {easy:.0f} % solved"
      f" (p below {SILENT:g}, between, above {1 - SILENT:g})."
    )
  if not advice.binary:
    lines.append(
      "Rewards are graded: they count as 0/1 with the same mean, which"
      " overstates their variance, for every rule alike."
    )
  lines.append("")
  lines.append(
    f"{'rule':{width}s}  variance per  distinct mixed  prompts  predicted"
  )
  lines.append(
    f"{'':{width}s}       rollout         prompts   opened       gain"
  )
  gain = advice.gain
  for i in np.argsort(-gain, kind="stable"):
    mean = lambda name, i=i: np.mean(
      [getattr(s.figures[i], name) for s in advice.stretches]
    )
    lines.append(
      f"{labels[i]:{width}s}  {mean('variance'):12.4f}  {mean('mixed'):14.1f}"
      f"  {mean('prompts'):7.0f}  {gain[i]:9.2f}"
    )
  lines += ["", recommendation(advice)]
  return "\n".join(lines)


def recommendation(advice: Advice) -> str:
  """One paragraph."""
  labels = [c.label(advice.budget) for c in advice.candidates]
  base, best = labels[advice.baseline], labels[advice.best]
  gain = advice.gain
  middle = 100 * np.mean([s.shares()[1] for s in advice.stretches])
  runner = int(gain.argmax())
  if advice.best == advice.baseline:
    text = (
      f"Recommended: {base}. No rule is predicted to gain"
      f" {100 * (WORTHWHILE - 1):.0f} % on it here (the best,"
      f" {labels[runner]}: {gain[runner]:.2f}x): {middle:.0f} % of the prompts"
      " have signal, and uniform groups find enough of them."
    )
  else:
    text = (
      f"Recommended: {best}. With {middle:.0f} % of the prompts carrying"
      f" signal it is predicted to be worth {gain[advice.best]:.2f} times the"
      f" rollouts of {base}, the best uniform split"
    )
    own = _own(advice)
    text += (
      f"; this run's rule, {advice.allocator}, was not played."
      if own is None
      else f", and {gain[advice.best] / gain[own]:.2f} times those of this"
      f" run's rule ({labels[own]})."
    )
    last = advice.stretches[-1]
    late = advice.gains[-1, advice.best]
    text += (
      f" In the last stretch (steps {last.first} to {last.last}) the figure is"
      f" {late:.2f}."
    )
  names = [c.name for c in advice.candidates]
  if "vigor" in names:
    vigor = names.index("vigor")
    figures = [s.figures for s in advice.stretches]
    ratio = lambda name: (
      np.mean([getattr(f[vigor], name) for f in figures])
      / max(np.mean([getattr(f[advice.baseline], name) for f in figures]), 1e-9)
    )
    text += (
      f" VIGOR's rollouts would carry {ratio('variance'):.2f} times the"
      f" variance of {base}'s, on {ratio('mixed'):.2f} times as many distinct"
      f" mixed prompts: predicted gain {gain[vigor]:.2f}."
    )
  return text + (
    " The predicted gain comes from effective rollouts S (docs/allocation.md):"
    " it ranks rules; differences below a tenth mean little."
  )


def _own(advice: Advice) -> int | None:
  """Index of the run's own rule, the first of its name; None: not played."""
  names = [c.name for c in advice.candidates]
  same = [
    i
    for i, c in enumerate(advice.candidates)
    if c.name == advice.allocator
    and (c.name != "uniform" or c.prompts == advice.prompts)
  ]
  if same:
    return same[0]
  if advice.allocator in names:
    return names.index(advice.allocator)
  return None
