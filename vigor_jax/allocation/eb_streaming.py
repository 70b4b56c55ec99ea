"""eb_streaming: eb_widening's value, asked whenever a slot frees up.

A rule of this project. The first P0 prompts are opened with m0 rollouts each,
as in eb_widening; from then on every free slot goes to the largest expected
marginal value A_x - n_x D_x, n_x counting rollouts in flight, the posterior
only verdicts that have been added. An unopened prompt competes with the
prior's mean value; of its m0 rollouts those that find no slot are due next.
There are no rounds.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import base, eb_widening, streaming, widening
from vigor_jax.allocation.groups import Groups

ROUND = 1  # address of the tie keys: one set for the whole step
BARRIERS = 3  # when run in rounds, as many after the opening as eb_widening


@dataclasses.dataclass(frozen=True)
class EbStreamingOptions(eb_widening.EbOptions):
  """EbOptions, and

  Attributes:
    refit: verdicts between two fits of the prior, as a share of the budget.
  """

  refit: float = 1 / 16

  def validate(self) -> None:
    super().validate()
    base.check_float("refit", self.refit, low=0, high=1)


@dataclasses.dataclass
class Progress:
  """Rollouts due, the tie keys, the present cap, verdicts at the last fit."""

  dues: streaming.Dues
  keys: np.ndarray
  cap: int
  fitted: float


class EbStreaming(streaming.Streaming, eb_widening.EbWidening):
  """Empirical-Bayes marginal value without a barrier."""

  name = "eb_streaming"
  Options = EbStreamingOptions

  def opening(self) -> int:
    return self.first * self.options.initial_rollouts

  def barrier_slots(self) -> int:
    return max(1, -(-(self.budget - self.opening()) // BARRIERS))

  def plan(self, groups: Groups) -> Progress:
    return Progress(
      streaming.Dues(), groups.uniforms(ROUND), self.options.cap, 0.0
    )

  def fill(self, groups: Groups, counts: np.ndarray, free: int) -> None:
    plan, m0 = groups.plan, self.options.initial_rollouts
    free = plan.dues.serve(counts, free)
    opened = int((groups.opened | (counts > 0)).sum())
    first = range(opened, min(self.first, opened + -(-free // m0)))
    for group in first:
      plan.dues.put(group, m0)
    free = plan.dues.serve(counts, free)
    if not free:
      return
    opened = np.arange(len(groups)) < opened + len(first)
    left = self.budget - groups.spent - int(counts.sum())
    self.refit(groups)
    more, plan.cap = widening.greedy(
      groups.counts + counts,
      opened,
      *self.values(
        self.prior.posterior(groups.n[opened], groups.reward_sum[opened]),
        opened,
      ),
      plan.keys,
      free,
      plan.cap,
      m0,
      min(m0 - 1, left - free),
    )
    excess = int(more.sum()) - free
    if excess:
      last = int(np.flatnonzero(more)[-1])
      more[last] -= excess
      plan.dues.put(last, excess)
    counts += more

  def refit(self, groups: Groups) -> None:
    """Fits the prior again once enough verdicts have come since last time."""
    plan, o = groups.plan, self.options
    done = groups.n > 0
    seen = float(groups.n.sum())
    if seen and seen - plan.fitted >= o.refit * self.budget:
      self.prior.fit(groups.n[done], groups.reward_sum[done], o.em_iterations)
      plan.fitted = seen
