"""VIGOR's rounds, mixed groups with the fewest successes first.

A rule of this project: the signal per rollout is larger at p than at 1 - p,
so among groups whose rewards disagree the harder one is worth more. Then come
all-fail groups, then groups that agree on a higher reward; ties at random.
"""

from __future__ import annotations

import numpy as np

from vigor_jax.allocation import halving, variance
from vigor_jax.allocation.groups import Groups


class LowSuccessFirst(halving.Halving):
  """Successive halving: mixed by fewest successes, all-fail, all-success."""

  name = "low_success_first"

  def score(self, groups: Groups, round_index: int) -> np.ndarray:
    del round_index
    mean = groups.mean()
    # Mixed scores lie in (2, 3], all-fail is 1, agreement above 0 is <= 0.
    agreed = np.where(mean <= variance.ZERO_TOLERANCE, 1.0, -mean)
    return np.where(groups.mixed(), 3.0 - mean, agreed)
