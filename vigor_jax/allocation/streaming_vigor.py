"""streaming_vigor: VIGOR's stages without a barrier.

A rule of this project: asynchronous successive halving (ASHA, arXiv
1810.05934) on VIGOR's schedule (arXiv 2607.22002). Stage t means
m0 (gamma^(t+1) - 1) / (gamma - 1) rollouts. A free slot serves, in order:

  1. a stage already granted that still lacks rollouts;
  2. a promotion: of the prompts that finished stage t and were not promoted,
     the one with the largest reward variance, while
     promoted(t) < alpha finished(t); the highest t first;
  3. a prompt that has no rollouts yet;
  4. the best prompt not promoted, whatever the share;
  5. one rollout of the next stage, begun early, for the best prompt whose
     verdicts are still in flight. Of equally good ones each gets one before
     any gets two. If the prompt is promoted later, these rollouts count.

A stage is finished when it has as many verdicts as rollouts. Rule 5 applies to
slots that are, or soon will be, without work, not to all places that wait for
one. With verdicts at once and a round's slots asked at a time, group sizes are
VIGOR's. With late verdicts rules 4 and 5 keep slots busy at the price of
VIGOR's concentration; rule 5 costs less of it, as nothing but one rollout is
decided before its prompt's verdicts have come.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import base, halving, streaming, vigor
from vigor_jax.allocation.groups import Groups


@dataclasses.dataclass
class Stages:
  """Working notes of a step.

  Attributes:
    stage: int [max_prompts], highest stage granted, -1 before the first.
    early: int [max_prompts], rollouts of the next stage begun before it.
    dues: rollouts of granted stages that have found no slot.
  """

  stage: np.ndarray
  early: np.ndarray
  dues: streaming.Dues


class StreamingVigor(streaming.Streaming, halving.Halving):
  """Asynchronous successive halving by reward variance."""

  name = "streaming_vigor"
  Options = vigor.VigorOptions

  def barrier_slots(self) -> int:
    return self.schedule.prompts[0] * self.schedule.new[0]

  def plan(self, groups: Groups) -> Stages:
    size = len(groups)
    return Stages(np.full(size, -1), np.zeros(size, int), streaming.Dues())

  def fill(self, groups: Groups, counts: np.ndarray, free: int) -> None:
    plan = groups.plan
    score = groups.variance(self.options.variance)
    free = plan.dues.serve(counts, free)
    while free:
      chosen, stage = self._promotions(groups, score)
      if not len(chosen):
        chosen = np.flatnonzero(plan.stage < 0)
        stage = 0
      if not len(chosen):
        chosen, stage = self._best_unpromoted(groups, score)
      if not len(chosen):
        return
      # No more stages than there are slots to begin them in; the last one may
      # be cut, and is then due.
      new = self.schedule.new[stage]
      for group in chosen[: -(-free // new)]:
        plan.stage[group] = stage
        if new > plan.early[group]:
          plan.dues.put(group, new - plan.early[group])
        plan.early[group] = 0
      free = plan.dues.serve(counts, free)

  def occupy(
    self, groups: Groups, counts: np.ndarray, idle: int
  ) -> None:
    plan = groups.plan
    score = groups.variance(self.options.variance)
    keys = plan.stage + self.tie_keys(groups, 0)
    following = np.array([*self.schedule.new[1:], 0])[plan.stage]
    while idle:
      can = plan.early < following
      chosen = base.top(score, keys, idle, can)
      if not len(chosen):
        return
      plan.early[chosen] += 1
      counts[chosen] += 1
      idle -= len(chosen)

  def _finished(self, groups: Groups, stage: int) -> np.ndarray:
    """bool: finished `stage`, all verdicts seen, and not promoted from it."""
    return (groups.plan.stage == stage) & (
      groups.n >= self.schedule.sizes[stage]
    )

  def _promotions(self, groups: Groups, score):
    """(groups to promote, their new stage), from the highest stage possible."""
    plan = groups.plan
    for stage in range(len(self.schedule.sizes) - 2, -1, -1):
      finished = self._finished(groups, stage)
      promoted = int((plan.stage > stage).sum())
      share = self.options.keep * (promoted + int(finished.sum()))
      # promoted < share, robust to the rounding of keep * count.
      quota = int(np.ceil(share - 1e-9)) - promoted
      if quota > 0 and finished.any():
        keys = self.tie_keys(groups, stage + 1)
        return base.top(score, keys, quota, finished), stage + 1
    return np.zeros(0, int), 0

  def _best_unpromoted(self, groups: Groups, score):
    """(one group, its new stage): the best variance over all stages."""
    last = len(self.schedule.sizes) - 1
    eligible = np.zeros(len(groups), bool)
    for stage in range(last):
      eligible |= self._finished(groups, stage)
    # Equal variances: the prompt that has come further, then at random.
    keys = groups.plan.stage + self.tie_keys(groups, 0)
    chosen = base.top(score, keys, 1, eligible)
    stage = int(groups.plan.stage[chosen[0]]) + 1 if len(chosen) else 0
    return chosen, stage

  def survivors(self, groups: Groups) -> np.ndarray:
    return groups.plan.stage == len(self.schedule.sizes) - 1
