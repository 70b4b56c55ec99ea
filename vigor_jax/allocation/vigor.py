"""VIGOR (arXiv 2607.22002): more rollouts where rewards still disagree.

Every prompt draws m0 rollouts; the share alpha with the largest reward
variance, over all its rollouts so far, goes on with gamma times as many.
Defaults T = 4, m0 = 2, alpha = 1/2, gamma = 2 give groups of 2, 6, 14 and 30
for 1/2, 1/4, 1/8 and 1/8 of the batch, 8 per prompt on average.

Not stated by the paper's public readings, decided here: equal variances are
ordered at random; all collected groups are trained on (`train_on="all"`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import base, halving, variance
from vigor_jax.allocation.groups import Groups


@dataclasses.dataclass(frozen=True)
class VigorOptions(halving.HalvingOptions):
  """HalvingOptions and `variance`: plugin | unbiased | beta.

  All groups of a round are equally large, so the three rank alike; they
  differ in other rules' hands.
  """

  variance: str = "plugin"

  def validate(self) -> None:
    super().validate()
    base.check_choice("variance", self.variance, variance.KINDS)


class Vigor(halving.Halving):
  """Successive halving by reward variance."""

  name = "vigor"
  Options = VigorOptions

  def score(self, groups: Groups, round_index: int) -> np.ndarray:
    del round_index
    return groups.variance(self.options.variance)
