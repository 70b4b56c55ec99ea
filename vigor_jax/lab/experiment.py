"""Rollouts to target in the laboratory: one protocol for every rule and cell.

A cell is a world and a rule. Protocol:

1. The learning rate of a rule is the one of RATES with the largest mean
   accuracy over the run, on tuning seeds (area under the curve), for every
   rule alike.
2. Targets are 50 % and 85 % of the rise of uniform 32 x 8's mean curve, tuned,
   over the first TARGET_SHARE of the run, on the fresh seeds.
3. Runs of fresh seeds are paired by seed; the figure is the geometric mean of
   (rollouts of the baseline / rollouts of the rule) at a target, with a 95 %
   bootstrap interval over seeds. "Best uniform" is the best of 32 x 8, 64 x 4
   and 128 x 2 at that target.

Results of cells are kept in one JSON file, so a stopped grid goes on.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib

import numpy as np

from vigor_jax import statistics
from vigor_jax.lab import learner
from vigor_jax.lab.learner import Estimator, Rule
from vigor_jax.lab.world import World

RATES = (0.1, 0.2, 0.4, 0.8)
DEFAULT = Estimator()
FRACTIONS = (0.5, 0.85)
TARGET_SHARE = 1 / 2
UNIFORMS = (Rule("uniform"), Rule("uniform", 64), Rule("uniform", 128))
HEADLINE = (
  *UNIFORMS,
  Rule("random_top"),
  Rule("vigor"),
  Rule("low_success_first"),
  Rule("eb_widening"),
)


@dataclasses.dataclass(frozen=True)
class Protocol:
  """Sizes of the measurement.

  Attributes:
    steps: of every run.
    tuning, fresh: number of seeds.
  """

  steps: int = 120
  tuning: int = 4
  fresh: int = 8


@dataclasses.dataclass(frozen=True)
class Cell:
  """One entry of a grid; `rate` in place of a tuned learning rate, if set."""

  world: World
  rule: Rule
  estimator: Estimator = Estimator()
  rate: float | None = None

  @property
  def key(self) -> str:
    fields = dataclasses.asdict(self)
    if self.rate is None:
      del fields["rate"]
    return json.dumps(fields, sort_keys=True)


def measure(cell: Cell, protocol: Protocol) -> dict:
  """Tunes the rate, then runs the fresh seeds; JSON-able."""
  tuning = 1000 + np.arange(protocol.tuning)
  rates = np.repeat(RATES, len(tuning))
  run = lambda seeds, rates: learner.train(
    cell.world, cell.rule, seeds, rates,
    steps=protocol.steps, estimator=cell.estimator,
  )  # fmt: skip
  rate = cell.rate
  if rate is None:
    tuned = run(np.tile(tuning, len(RATES)), rates)
    area = tuned.accuracy.mean(1).reshape(len(RATES), -1).mean(1)
    rate = RATES[int(area.argmax())]
  curves = run(np.arange(protocol.fresh), np.full(protocol.fresh, rate))
  return {
    "rate": rate,
    "rollouts": curves.rollouts.tolist(),
    "accuracy": np.round(curves.accuracy, 5).tolist(),
    "mixed": float(curves.mixed.mean()),
    "variance": float(curves.variance.mean()),
  }


class Results:
  """Results by cell key, in a JSON file that is written after every cell."""

  def __init__(self, path, protocol: Protocol):
    self.path = pathlib.Path(path)
    self.protocol = protocol
    self.cells: dict[str, dict] = {}
    if self.path.exists():
      stored = json.loads(self.path.read_text())
      if stored["protocol"] == dataclasses.asdict(protocol):
        self.cells = stored["cells"]

  def __getitem__(self, cell: Cell) -> dict:
    return self.cells[cell.key]

  def save(self) -> None:
    self.path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
      {"protocol": dataclasses.asdict(self.protocol), "cells": self.cells}
    )
    partial = self.path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, self.path)

  def fill(self, cells, jobs: int = 1, say=print) -> None:
    """Measures the cells that are missing."""
    todo = [c for c in dict.fromkeys(cells) if c.key not in self.cells]
    if not todo:
      return
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
      waiting = {pool.submit(measure, c, self.protocol): c for c in todo}
      for done, future in enumerate(
        concurrent.futures.as_completed(waiting), 1
      ):
        cell = waiting[future]
        self.cells[cell.key] = future.result()
        self.save()
        say(f"{done}/{len(todo)}  {cell.world.label}  {cell.rule.label}")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a rule reached in a world, one entry per fraction.

  Attributes:
    against_best: statistics.Ratio against the best uniform split.
    against_published: against 32 x 8.
    rate, mixed, variance: see learner.Curves.
  """

  against_best: tuple
  against_published: tuple
  rate: float
  mixed: float
  variance: float


def outcomes(
  results: Results,
  world: World,
  rules,
  estimator: Estimator = DEFAULT,
  rate: float | None = None,
) -> dict[str, Outcome]:
  """Ratios of rollouts to target of `rules` in one world, by label.

  Baselines are uniform splits under the default estimator. `rate` takes the
  cells at this learning rate, baselines too, in place of the tuned ones.
  """
  baselines = [results[Cell(world, rule, rate=rate)] for rule in UNIFORMS]
  published = baselines[0]
  mean = np.mean(published["accuracy"], axis=0)
  first = max(2, int(TARGET_SHARE * len(mean)))
  goals = statistics.targets(mean[:first], FRACTIONS).values
  if not goals:
    raise ValueError(f"uniform 32 x 8 learned nothing in {world.label}")
  spent = lambda cell, goal: [
    statistics.reach(cell["rollouts"], row, goal) for row in cell["accuracy"]
  ]
  cost = lambda cell, goal: np.mean(
    [np.log(r.at * (1.5 if r.censored else 1)) for r in spent(cell, goal)]
  )
  best = [min(baselines, key=lambda b, g=g: cost(b, g)) for g in goals]
  found = {}
  for rule in rules:
    cell = results[Cell(world, rule, estimator, rate)]
    found[rule.label] = Outcome(
      tuple(
        statistics.paired_ratio(spent(b, g), spent(cell, g))
        for b, g in zip(best, goals)
      ),
      tuple(
        statistics.paired_ratio(spent(published, g), spent(cell, g))
        for g in goals
      ),
      cell["rate"],
      cell["mixed"],
      cell["variance"],
    )
  return found
