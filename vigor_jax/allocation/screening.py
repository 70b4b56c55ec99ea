"""Screen prompts with a few rollouts, spend more on those that qualify.

The common part of speed and pilot_commit. The papers generate the second part
together with the next step's screening; here both belong to one step, so no
group is ever stale and every rollout counts where it was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation.groups import Groups, Request


@dataclasses.dataclass(frozen=True)
class ScreeningOptions:
  """Options of a screening rule.

  Attributes:
    screen: rollouts of a prompt's screening.
    extra: rollouts added to a prompt that qualifies.
    batch: share of the budget that one screening batch costs.
  """

  screen: int = 4
  extra: int = 20
  batch: float = 0.25

  def validate(self) -> None:
    base.check_int("screen", self.screen, low=1)
    base.check_int("extra", self.extra, low=1)
    base.check_float("batch", self.batch, low=0, high=1, open_low=True)


class Screening(base.Allocator):
  """Screening batches and extensions in turn until the budget is spent."""

  Options = ScreeningOptions
  opens_later = True

  def setup(self) -> None:
    o = self.options
    if o.screen > self.budget:
      raise ValueError(
        f"{self.name}: screen={o.screen} rollouts exceed budget="
        f"{self.budget}; screen must be at most the budget"
      )
    self.batch = max(1, int(o.batch * self.budget) // o.screen)
    # The whole budget may go into screening.
    self.max_prompts = -(-self.budget // o.screen) + self.skippable()

  def skippable(self) -> int:
    """Prompts of the pool that may be passed over unscreened."""
    return 0

  def largest_group(self) -> int:
    return self.options.screen + self.options.extra

  def qualifies(self, groups: Groups) -> np.ndarray:
    """bool [max_prompts]: screened prompts worth the extension."""
    raise NotImplementedError

  def candidates(self, groups: Groups) -> np.ndarray:
    """Group indices that may be screened, in order."""
    return np.arange(len(groups))

  def rounds(self, groups: Groups) -> Iterator[Request]:
    o = self.options
    queue = self.candidates(groups)
    chosen = np.zeros(len(groups), bool)
    groups.plan = chosen
    while groups.spent < self.budget and len(queue):
      counts = np.zeros(len(groups), np.int64)
      counts[queue[: self.batch]] = o.screen
      screened = counts > 0
      yield groups.request(cut(counts, self.budget - groups.spent))
      queue = queue[self.batch :]
      whole = screened & (groups.counts == o.screen)
      chosen |= whole & self.qualifies(groups)
      extra = np.where(chosen & (groups.counts == o.screen), o.extra, 0)
      extra = cut(extra, self.budget - groups.spent)
      if extra.any():
        yield groups.request(extra)
    if not chosen.any():
      groups.warn(
        f"{self.name}: step {groups.step}: none of"
        f" {int(groups.opened.sum())} screened prompts qualified; there is"
        " nothing to train on. Are the prompts all solved, or all out of"
        " reach?"
      )

  def select(self, groups: Groups) -> np.ndarray:
    """Extended groups, the last one possibly cut; others are dropped."""
    return groups.plan & (groups.counts > self.options.screen)

  def survivors(self, groups: Groups) -> np.ndarray:
    return self.select(groups)


def cut(counts, budget: int) -> np.ndarray:
  """The first rollouts of `counts` that fit into the budget, in order."""
  before = np.cumsum(counts) - counts
  return np.clip(budget - before, 0, counts)
