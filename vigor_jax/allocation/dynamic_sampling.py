"""Dynamic sampling of DAPO (arXiv 2503.14476): refill until enough are mixed.

Draw batches of prompts with n rollouts each, drop the groups whose rewards all
agree, until the batch is full. The paper trains on 512 prompts x 16, its public
recipe gives up after 10 generation batches. Here n = budget / prompts_per_step,
so the budget pays for prompts_per_step groups in all, dropped ones included;
the batch is full at a share of them. Surplus mixed groups are dropped, as in
the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from vigor_jax.allocation import base, uniform
from vigor_jax.allocation.groups import Groups, Request


@dataclasses.dataclass(frozen=True)
class DynamicSamplingOptions:
  """Options of dynamic_sampling.

  Attributes:
    target: mixed groups that fill the batch, as a share of prompts_per_step.
      With 1 the budget is always spent.
    generation: prompts drawn at a time, as a multiple of the target.
    max_batches: generation batches in a step.
  """

  target: float = 0.25
  generation: float = 1.0
  max_batches: int = 10

  def validate(self) -> None:
    base.check_float("target", self.target, low=0, high=1, open_low=True)
    base.check_float(
      "generation", self.generation, low=0, high=1000, open_low=True
    )
    base.check_int("max_batches", self.max_batches, low=1)


class DynamicSampling(base.Allocator):
  """Refills until the batch of mixed groups is full or the budget is spent."""

  name = "dynamic_sampling"
  Options = DynamicSamplingOptions
  opens_later = True

  def setup(self) -> None:
    self.group_size = uniform.per_prompt(
      self.name, self.budget, self.prompts_per_step
    )
    self.target = max(1, round(self.options.target * self.prompts_per_step))

  def largest_group(self) -> int:
    return self.group_size

  def rounds(self, groups: Groups) -> Iterator[Request]:
    queue = self.candidates(groups)
    for _ in range(self.options.max_batches):
      missing = self.target - groups.mixed_count()
      affordable = (self.budget - groups.spent) // self.group_size
      if missing <= 0 or not affordable or not len(queue):
        break
      batch = min(self.batch_size(groups, missing), affordable)
      counts = np.zeros(len(groups), np.int64)
      counts[queue[:batch]] = self.group_size
      queue = queue[batch:]
      yield groups.request(counts)
    if not groups.mixed_count():
      groups.warn(
        f"{self.name}: step {groups.step}: none of"
        f" {int(groups.opened.sum())} groups in"
        f" {len(groups.round_counts)} batches was mixed; there is nothing"
        " to train on. Are the prompts all solved, or all out of reach?"
      )

  def candidates(self, groups: Groups) -> np.ndarray:
    """Group indices that may be drawn, in order."""
    return np.arange(len(groups))

  def batch_size(self, groups: Groups, missing: int) -> int:
    """Prompts of the next generation batch."""
    del groups, missing
    return max(1, round(self.options.generation * self.target))

  def select(self, groups: Groups) -> np.ndarray:
    """The first mixed groups up to the target; `train_on` plays no part."""
    mixed = groups.mixed()
    return mixed & (np.cumsum(mixed) <= self.target)

  def survivors(self, groups: Groups) -> np.ndarray:
    return self.select(groups)
