"""Two rules side by side at common rates: a sensitive test of small changes.

Rollouts to target with tuned rates (experiment.py) answer what a rule is worth;
they are noisy, for the rates lie a factor of 2 apart. A change to a rule is
seen sooner in the mean accuracy over the run, at the same rate, seed by seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vigor_jax import statistics
from vigor_jax.lab import learner
from vigor_jax.lab.learner import Rule
from vigor_jax.lab.world import World

RATES = (0.2, 0.4)
WORLDS = {
  "plain, sparse": World.preset("plain"),
  "sparse_signal, sparse": World.preset("sparse_signal"),
  "hard_junk, sparse": World.preset("hard_junk"),
  "plain, graded": World.preset("plain", reward="graded"),
  "sparse_signal, graded": World.preset("sparse_signal", reward="graded"),
  "hard_junk, graded": World.preset("hard_junk", reward="graded"),
  "sparse_signal, sparse, q = .05": World.preset("sparse_signal", noise=0.05),
  "sparse_signal, sparse, q = .1": World.preset("sparse_signal", noise=0.1),
  "plain, sparse, q = .1": World.preset("plain", noise=0.1),
  "sparse_signal, graded, q = .1": World.preset(
    "sparse_signal", reward="graded", noise=0.1
  ),
}


def difference(
  world: World,
  rule: Rule,
  other: Rule,
  rate: float,
  seeds: Sequence[int],
  steps: int,
) -> tuple[float, float, float, float]:
  """Mean accuracy over the run: (other's, rule - other, low, high)."""
  area = [
    learner.train(
      world, r, np.asarray(seeds), np.full(len(seeds), rate),
      steps=steps, every=4,
    ).accuracy.mean(1)
    for r in (rule, other)
  ]  # fmt: skip
  change = area[0] - area[1]
  low, high = statistics.bootstrap_interval(change)
  return float(area[1].mean()), float(change.mean()), low, high


def rows(
  rule: Rule,
  other: Rule,
  *,
  worlds=None,
  rates=RATES,
  seeds: int = 16,
  steps: int = 120,
  say=None,
) -> list[tuple[str, ...]]:
  """A row of text per world and rate: see `HEADER`."""
  found = []
  for name, world in (worlds or WORLDS).items():
    for rate in rates:
      base, change, low, high = difference(
        world, rule, other, rate, range(seeds), steps
      )
      verdict = "better" if low > 0 else "worse" if high < 0 else ""
      found.append(
        (
          name, f"{rate:g}", f"{100 * base:.1f}",
          f"{100 * change:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]", verdict,
        )
      )  # fmt: skip
      if say:
        say("  ".join(found[-1]))
  return found


HEADER = ("stream", "rate", "other", "difference", "")
