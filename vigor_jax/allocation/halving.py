"""Rounds that keep the best share of the prompts and give them more.

The schedule of VIGOR (arXiv 2607.22002), shared by the rules that differ in
the ranking only:

  round t = 0..T-1:  P alpha^t prompts draw m0 gamma^t new rollouts each;
                     the best alpha share goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import fractions

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation.groups import Groups, Request

TIES = ("random", "index")


@dataclasses.dataclass(frozen=True)
class HalvingOptions:
  """The schedule; defaults are VIGOR's.

  Attributes:
    rounds: T.
    initial_rollouts: m0, rollouts per prompt in the first round.
    keep: alpha, share of the prompts that goes on.
    growth: gamma, factor of the rollouts per prompt from round to round.
    ties: equal scores are ordered at "random" (addressed), or by "index",
      which favours the first prompts of the batch and is there to be measured.
  """

  rounds: int = 4
  initial_rollouts: int = 2
  keep: float = 0.5
  growth: float = 2.0
  ties: str = "random"

  def validate(self) -> None:
    base.check_int("rounds", self.rounds, low=1, high=20)
    base.check_int("initial_rollouts", self.initial_rollouts, low=1)
    base.check_float("keep", self.keep, low=0, high=1, open_low=True)
    base.check_float("growth", self.growth, low=0, high=1024, open_low=True)
    base.check_choice("ties", self.ties, TIES)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """prompts[t] draw new[t] rollouts each in round t; sizes are cumulative."""

  prompts: tuple[int, ...]
  new: tuple[int, ...]

  @property
  def total(self) -> int:
    return sum(p * m for p, m in zip(self.prompts, self.new))

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """Group size of a prompt that leaves after round t: 2, 6, 14, 30."""
    return tuple(int(s) for s in np.cumsum(self.new))


def make_schedule(
  prompts: int, rounds: int, initial: int, keep: float, growth: float
) -> Schedule | None:
  """The schedule, or None if a round is not whole."""
  alpha, gamma = _fraction(keep), _fraction(growth)
  kept = [prompts * alpha**t for t in range(rounds)]
  new = [initial * gamma**t for t in range(rounds)]
  if any(x.denominator != 1 or x < 1 for x in kept + new):
    return None
  return Schedule(tuple(map(int, kept)), tuple(map(int, new)))


def _fraction(value: float) -> fractions.Fraction:
  """What was meant by 0.333 or 1.5."""
  return fractions.Fraction(value).limit_denominator(1000)


class Halving(base.Allocator):
  """Successive halving over prompts; a subclass ranks."""

  Options = HalvingOptions

  def setup(self) -> None:
    self.schedule = self._schedule(self.prompts_per_step)
    if self.schedule is None or self.schedule.total != self.budget:
      raise ValueError(self._complaint())

  def _schedule(self, prompts: int, rounds: int | None = None):
    o = self.options
    return make_schedule(
      prompts,
      rounds or o.rounds,
      o.initial_rollouts,
      o.keep,
      o.growth,
    )

  def _complaint(self) -> str:
    """What is wrong with (prompts, budget, options), and what would work."""
    o = self.options
    here = (
      f"{self.name}: rounds={o.rounds}, initial_rollouts="
      f"{o.initial_rollouts}, keep={o.keep}, growth={o.growth} with"
      f" prompts_per_step={self.prompts_per_step} and budget={self.budget}"
    )
    if self.schedule is None:
      problem = "has a round with a fractional number of prompts or rollouts"
    else:
      problem = f"spends {self.schedule.total} rollouts, not {self.budget}"
    legal = []
    exact = self._prompts_of(self.budget)
    if exact:
      legal.append(f"prompts_per_step={exact} with this budget")
    legal += [
      f"prompts_per_step={p} with budget={self._schedule(p).total}"
      for p in self._nearest_prompts()
      if p != exact
    ]
    rounds = [
      t
      for t in range(1, 13)
      if (s := self._schedule(self.prompts_per_step, t)) is not None
      and s.total == self.budget
    ]
    if rounds:
      legal.append(f"rounds={rounds[0]} with these prompts and this budget")
    if not legal:
      legal.append(
        "none near: keep ** t * prompts_per_step and growth ** t *"
        " initial_rollouts must be whole in every round t"
      )
    return f"{here} {problem}. Legal: {'; '.join(legal)}"

  def _unit(self) -> int:
    """The numbers of prompts with whole rounds are the multiples of this.

    alpha = a / b in lowest terms leaves P (a / b)^t prompts, whole for every t
    below T exactly if b^(T - 1) divides P.
    """
    return _fraction(self.options.keep).denominator ** (self.options.rounds - 1)

  def _prompts_of(self, budget: int) -> int | None:
    """The one number of prompts that spends a budget; None if there is none."""
    unit = self._unit()
    one = self._schedule(unit)  # Spending grows in proportion to prompts.
    if one is None or budget % one.total:
      return None
    return budget // one.total * unit

  def _nearest_prompts(self) -> list[int]:
    """The two legal numbers of prompts nearest to the one asked for."""
    unit, asked = self._unit(), self.prompts_per_step
    around = [unit * (asked // unit + k) for k in (-1, 0, 1, 2)]
    legal = [
      p for p in around
      if 0 < p <= 4 * asked and self._schedule(p) is not None
    ]
    return sorted(sorted(legal, key=lambda p: (abs(p - asked), p))[:2])

  def largest_group(self) -> int:
    return self.schedule.sizes[-1]

  def rounds(self, groups: Groups) -> Iterator[Request]:
    active = np.arange(len(groups))
    # All at once, before the device's work empties the host's caches.
    keys = self.tie_keys(groups, range(1, len(self.schedule.sizes)))
    for t, (size, new) in enumerate(
      zip(self.schedule.prompts, self.schedule.new)
    ):
      if t:
        scores = self.score(groups, t)[active]
        chosen = base.top(scores, keys[t - 1, active], size)
        active = np.sort(active[chosen])
      counts = np.zeros(len(groups), np.int64)
      counts[active] = new
      yield groups.request(counts)

  def tie_keys(self, groups: Groups, round_index) -> np.ndarray:
    """Larger goes first among equal scores.

    Returns:
      float64 [max_prompts], or [R, max_prompts] for a range of R rounds.
    """
    if self.options.ties == "index":
      keys = -np.arange(len(groups), dtype=np.float64)
      return np.tile(keys, (len(round_index), 1)) if isinstance(
        round_index, range
      ) else keys
    return groups.uniforms(round_index)

  def score(self, groups: Groups, round_index: int) -> np.ndarray:
    """Larger is better: float64 [max_prompts]."""
    raise NotImplementedError

  def survivors(self, groups: Groups) -> np.ndarray:
    return groups.counts == self.schedule.sizes[-1]
