"""Reinforce-Ada (arXiv 2510.04996): sample a prompt until it has enough signal.

Rounds of M rollouts for every prompt that is not done, at most N rounds. Done
is, by `rule`, "positive": at least `positives` correct; "balance": at least
keep / 2 correct and as many wrong. Then keep rollouts are trained on, half of
them correct where possible, with the advantage r - mean over ALL rollouts of
the prompt and no division by the deviation: the advantage "global_mean".

Paper: 512 prompts, M = 8, N = 4, keep 4. Here M = 4, and each batch has half of
prompts_per_step prompts; when all are done the next batch is drawn, until the
budget is spent. The last request is cut to fit.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from vigor_jax.allocation import base, screening
from vigor_jax.allocation.groups import Groups, Request

RULES = ("balance", "positive")


@dataclasses.dataclass(frozen=True)
class ReinforceAdaOptions:
  """Options of reinforce_ada.

  Attributes:
    round_size: M.
    max_rounds: N.
    keep: rollouts trained on per prompt; even.
    rule: "balance" or "positive".
    positives: correct rollouts that end a prompt under "positive".
    threshold: a reward above it is correct.
    batch: prompts of one batch, as a share of prompts_per_step.
  """

  round_size: int = 4
  max_rounds: int = 4
  keep: int = 4
  rule: str = "balance"
  positives: int = 1
  threshold: float = 0.7
  batch: float = 0.5

  def validate(self) -> None:
    base.check_int("round_size", self.round_size, low=1)
    base.check_int("max_rounds", self.max_rounds, low=1)
    base.check_int("keep", self.keep, low=2)
    if self.keep % 2:
      raise ValueError(
        f"keep={self.keep} must be even: {self.keep - 1} or {self.keep + 1}"
      )
    base.check_choice("rule", self.rule, RULES)
    base.check_int("positives", self.positives, low=1)
    base.check_float("threshold", self.threshold, low=0, high=1)
    base.check_float("batch", self.batch, low=0, high=1, open_low=True)


class ReinforceAda(base.Allocator):
  """Successive elimination of prompts that have enough signal."""

  name = "reinforce_ada"
  Options = ReinforceAdaOptions
  opens_later = True

  def setup(self) -> None:
    self.batch = max(1, round(self.options.batch * self.prompts_per_step))
    # Every prompt may be done after one round.
    self.max_prompts = -(-self.budget // self.options.round_size)

  def largest_group(self) -> int:
    return self.options.round_size * self.options.max_rounds

  def rounds(self, groups: Groups) -> Iterator[Request]:
    o = self.options
    opened = 0
    while groups.spent < self.budget:
      active = (groups.counts > 0) & ~self.done(groups)
      active &= groups.counts < o.round_size * o.max_rounds
      if not active.any():
        active[opened : opened + self.batch] = True
        opened += self.batch
      counts = np.where(active, o.round_size, 0)
      yield groups.request(screening.cut(counts, self.budget - groups.spent))
    if not groups.mixed_count():
      groups.warn(
        f"{self.name}: step {groups.step}: none of"
        f" {int(groups.opened.sum())} prompts was mixed after at most"
        f" {self.largest_group()} rollouts; there is nothing to train on."
        " Are the prompts all solved, or all out of reach?"
      )

  def correct(self, groups: Groups) -> np.ndarray:
    """Correct rollouts per group; graded rewards count as their sum."""
    return groups.reward_sum

  def done(self, groups: Groups) -> np.ndarray:
    """bool [max_prompts]: the prompt has enough signal."""
    correct = self.correct(groups)
    if self.options.rule == "positive":
      return correct >= self.options.positives
    half = self.options.keep / 2
    return (correct >= half) & (groups.n - correct >= half)

  def keep_rollouts(self, groups, group, sample, reward) -> np.ndarray:
    group, sample = np.asarray(group), np.asarray(sample)
    correct = np.asarray(reward) > self.options.threshold
    n = np.bincount(group, minlength=len(groups))
    positive = np.bincount(group, correct, len(groups)).astype(int)
    half = self.options.keep // 2
    few_positive = np.minimum(positive, half)
    few_negative = np.minimum(n - positive, half)
    # What one side lacks the other fills.
    quota_negative = np.minimum(n - positive, self.options.keep - few_positive)
    quota_positive = np.minimum(positive, self.options.keep - few_negative)
    # Rank of each rollout among those of its group and class.
    order = np.lexsort((sample, correct, group))
    code = (2 * group + correct)[order]
    start = np.flatnonzero(np.diff(code, prepend=-1))
    rank = np.arange(len(code)) - np.repeat(
      start, np.diff(np.append(start, len(code)))
    )
    quota = np.where(correct, quota_positive[group], quota_negative[group])
    keep = np.zeros(len(group), bool)
    keep[order] = rank < quota[order]
    return keep & self.select(groups)[group]
