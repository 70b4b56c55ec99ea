"""Paired ratios of one stream of benchmarks/claims.py.

A pair is a (warm start, seed), "w0 s10"; a run is one entry of docs/claims.json
(reporting/claims.py).
"""

from __future__ import annotations

from collections.abc import Mapping
import math

import numpy as np

from vigor_jax import statistics
from vigor_jax.reporting import wording

FRACTIONS = (0.5, 0.85)
RISE = 5 / 6  # of the run, over which 32 x 8's rise fixes the targets
PUBLISHED = "uniform 32 x 8"
MEASURES = wording.MEASURES


def area(run: Mapping) -> float:
  """Mean accuracy over the run: area under its curve / its rollouts."""
  x, y = np.asarray(run["rollouts"], float), np.asarray(run["accuracy"])
  return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def _warm(pair: str) -> str:
  return pair.split(" ")[0]


def goals(runs: Mapping[str, Mapping]) -> dict[str, tuple[float, ...]]:
  """{warm start: target accuracies}, from 32 x 8's runs that began there."""
  found = {}
  for warm in sorted({_warm(pair) for pair in runs}):
    curves = [
      statistics.smooth(run["accuracy"])
      for pair, run in runs.items()
      if _warm(pair) == warm
    ]
    mean = np.mean(curves, axis=0)
    points = max(2, math.ceil(RISE * (len(mean) - 1)) + 1)
    found[warm] = statistics.targets(mean[:points], FRACTIONS).values
  return found


def spent(runs, goal, target: int, measure: str) -> dict:
  """{pair: Reached} of one rule; streams where 32 x 8 fell have no goal."""
  return {
    pair: statistics.reach(
      run[measure],
      statistics.smooth(run["accuracy"]),
      goal[_warm(pair)][target],
    )
    for pair, run in runs.items()
    if goal.get(_warm(pair))
  }


def ratio(base: Mapping, method: Mapping) -> statistics.Ratio | None:
  """Of the pairs that both have."""
  pairs = [pair for pair in base if pair in method]
  if not pairs:
    return None
  return statistics.paired_ratio(
    [base[p] for p in pairs], [method[p] for p in pairs]
  )


def _cost(reached: Mapping) -> tuple[int, float]:
  return (
    sum(r.censored for r in reached.values()),
    float(np.mean(np.log([r.at for r in reached.values()]))),
  )


def analyse(rules: Mapping[str, Mapping]) -> dict[str, dict]:
  """Ratios of one stream.

  Args:
    rules: {rule: {pair: run}}, 32 x 8 among them.

  Returns:
    {rule: {"pairs", "final", "full_pass", "mixed", "tokens", "censored"
    (share of runs that missed the late target), "published" and "best":
    {measure: [Ratio per target]}, "is_best": [bool per target]}}.
  """
  goal = goals(rules[PUBLISHED])
  uniforms = [rule for rule in rules if rule.startswith("uniform")]
  found = {}
  reached = {
    (rule, t, m): spent(runs, goal, t, m)
    for rule, runs in rules.items()
    for t in range(len(FRACTIONS))
    for m in MEASURES
  }
  best = {
    (t, m): min(uniforms, key=lambda u: _cost(reached[u, t, m]))
    for t in range(len(FRACTIONS))
    for m in MEASURES
  }
  for rule, runs in rules.items():
    finals = [run["accuracy"][-1] for run in runs.values()]
    late = reached[rule, len(FRACTIONS) - 1, "rollouts"]
    entry = {
      "pairs": len(runs),
      "final": (float(np.mean(finals)), *statistics.bootstrap_interval(finals)),
      "full_pass": float(np.mean([r["full_pass"] for r in runs.values()])),
      "mixed": float(np.mean([r["mixed"] for r in runs.values()])),
      "tokens": float(
        np.mean([r["tokens"][-1] / r["rollouts"][-1] for r in runs.values()])
      ),
      "censored": float(np.mean([r.censored for r in late.values()])),
      "is_best": [best[t, "rollouts"] == rule for t in range(len(FRACTIONS))],
      "published": {},
      "best": {},
    }
    for m in MEASURES:
      for key, other in (("published", lambda t, m: PUBLISHED),
                         ("best", lambda t, m: best[t, m])):  # fmt: skip
        entry[key][m] = [
          ratio(reached[other(t, m), t, m], reached[rule, t, m])
          for t in range(len(FRACTIONS))
        ]
    found[rule] = entry
  return found
