"""GVM (arXiv 2505.02391): pilots, then n from pass rate and gradient norm.

After N' pilots per prompt the rest of the budget goes out with

  n_i proportional to G_i / sqrt(p_i + a / p_i^(b - 1)),   a = 1e-3, b = 2,

and n_i = 0 where p_i = 0, rounded by largest remainders. G_i is the mean norm
of the gradient of accepted pilots. Allocators see rewards only, so G_i = 1 is
the default ("constant"); "deviation" takes sqrt(p_i (1 - p_i)), the reward's
share of it. Paper: N' = 8 with 8 to 32 per prompt after it, pilots discarded;
here half of each prompt's average share are pilots, and they are discarded
unless keep_pilots. The weight 1 / (n_i p_i) is the advantage "gvm".
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation.groups import Groups, Request

NORMS = ("constant", "deviation")


@dataclasses.dataclass(frozen=True)
class GvmOptions:
  """Options of gvm.

  Attributes:
    pilot: share of the budget spent on pilots.
    alpha, beta: a and b.
    norm: "constant" or "deviation", what stands for G_i.
    keep_pilots: train on the pilots too.
  """

  pilot: float = 0.5
  alpha: float = 1e-3
  beta: float = 2.0
  norm: str = "constant"
  keep_pilots: bool = False

  def validate(self) -> None:
    base.check_float("pilot", self.pilot, low=0, high=1, open_low=True)
    base.check_float("alpha", self.alpha, low=0, high=1)
    base.check_float("beta", self.beta, low=1, high=10)
    base.check_choice("norm", self.norm, NORMS)


def gvm_weights(p, norm, alpha: float = 1e-3, beta: float = 2.0) -> np.ndarray:
  """G / sqrt(p + alpha / p^(beta - 1)), 0 where p = 0: float64 [P]."""
  p = np.asarray(p, np.float64)
  safe = np.where(p > 0, p, 1.0)
  weights = norm / np.sqrt(safe + alpha / safe ** (beta - 1))
  return np.where(p > 0, weights, 0.0)


def largest_remainders(weights, total: int, keys) -> np.ndarray:
  """Integers with sum `total` next to total * weights / sum(weights).

  All weights zero count as all equal. Equal remainders go by the largest key.
  """
  weights = np.asarray(weights, np.float64)
  if not weights.sum() > 0:
    weights = np.ones(len(weights))
  exact = total * weights / weights.sum()
  counts = np.floor(exact + 1e-9).astype(np.int64)
  missing = total - int(counts.sum())
  counts[base.top(np.round(exact - counts, 9), keys, missing)] += 1
  return counts


class Gvm(base.Allocator):
  """Pilots for all, then a minimum-variance split of the rest."""

  name = "gvm"
  Options = GvmOptions

  def setup(self) -> None:
    share = self.options.pilot * self.budget / self.prompts_per_step
    self.pilots = max(1, int(share + 1e-9))
    if self.pilots * self.prompts_per_step > self.budget:
      raise ValueError(
        f"{self.name}: prompts_per_step={self.prompts_per_step} leaves less"
        f" than one pilot per prompt in budget={self.budget}; it must be at"
        f" most {self.budget}"
      )

  def rounds(self, groups: Groups) -> Iterator[Request]:
    yield groups.request(np.full(len(groups), self.pilots))
    rest = self.budget - groups.spent
    if not rest:
      return
    p = groups.mean()
    norm = np.ones(len(groups))
    if self.options.norm == "deviation":
      norm = np.sqrt(p * (1 - p))
    weights = gvm_weights(p, norm, self.options.alpha, self.options.beta)
    yield groups.request(largest_remainders(weights, rest, groups.uniforms(1)))

  def keep_rollouts(self, groups, group, sample, reward) -> np.ndarray:
    chosen = super().keep_rollouts(groups, group, sample, reward)
    if self.options.keep_pilots or self.pilots * len(groups) == self.budget:
      return chosen
    return chosen & (np.asarray(sample) >= self.pilots)

  def survivors(self, groups: Groups) -> np.ndarray:
    return groups.counts > self.pilots
