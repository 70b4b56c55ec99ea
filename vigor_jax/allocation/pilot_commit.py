"""Pilot-Commit (arXiv 2605.26606): pilot, commit to the middle, evict the rest.

A prompt with pilot pass rate .125 <= p <= .75 gets the commit rollouts and is
trained on with both; one with p = 1 is never drawn again; the others come back
with the stream. Paper: pilot 16, commit 48 (or 32 and 96), candidates three
times the batch; here pilot 4, commit 12, the same proportion. The paper keeps
ready groups up to 4 steps in a replay buffer; here they are used at once.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from vigor_jax.allocation import base, history, screening
from vigor_jax.allocation.groups import REWARD_QUANTUM, Groups, Request


@dataclasses.dataclass(frozen=True)
class PilotCommitOptions(screening.ScreeningOptions):
  """ScreeningOptions, and

  Attributes:
    low, high: pass rates between which a prompt is committed to.
    evict: prompts with pilot pass rate 1 are never drawn again.
    pool: prompts looked at per step beyond those the budget can pilot, as a
      share of them, to pass over evicted ones.
  """

  extra: int = 12
  low: float = 0.125
  high: float = 0.75
  evict: bool = True
  pool: float = 1.0

  def validate(self) -> None:
    super().validate()
    base.check_float("high", self.high, low=0, high=1)
    base.check_float("low", self.low, low=0, high=self.high)
    base.check_float("pool", self.pool, low=0, high=100)


class PilotCommit(screening.Screening):
  """Pilot, then commit to prompts of middling difficulty."""

  name = "pilot_commit"
  Options = PilotCommitOptions

  def setup(self) -> None:
    self.evicted = history.History((), ())
    super().setup()

  def skippable(self) -> int:
    pilots = -(-self.budget // self.options.screen)
    return math.ceil(self.options.pool * pilots) if self.options.evict else 0

  def qualifies(self, groups: Groups) -> np.ndarray:
    mean = groups.mean()
    slack = REWARD_QUANTUM
    inside = (mean >= self.options.low - slack) & (
      mean <= self.options.high + slack
    )
    return inside & (groups.n > 0)

  def candidates(self, groups: Groups) -> np.ndarray:
    gone = self.evicted.seen(groups.uids)
    if gone.all():
      groups.warn(
        f"{self.name}: step {groups.step}: all {len(groups)} prompts of the"
        " pool were solved before; they are drawn again"
      )
      gone[:] = False
    return np.flatnonzero(~gone)

  def rounds(self, groups: Groups) -> Iterator[Request]:
    gone = self.evicted.seen(groups.uids)
    yield from super().rounds(groups)
    last = int(np.flatnonzero(groups.opened)[-1])
    groups.consumed[:last] |= gone[:last]

  def end(self, groups: Groups) -> None:
    if not self.options.evict:
      return
    solved = (groups.n >= self.options.screen) & (
      groups.mean() >= 1 - REWARD_QUANTUM
    )
    uids = groups.uids[solved]
    self.evicted.put(uids, np.zeros((len(uids), 0)))

  def state_dict(self) -> dict:
    return {"evicted": self.evicted.state_dict()}

  def restore(self, state: dict) -> None:
    self.evicted.load_state_dict(state["evicted"])
