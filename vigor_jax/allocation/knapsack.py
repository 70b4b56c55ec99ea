"""Knapsack RL (arXiv 2509.25849): rollouts where a mixed group is in reach.

  maximise  sum_x v(N_x, p_x)   with  sum N_x = B,  2 <= N_x <= 128,
  v(N, p) = (1 - p^N - (1 - p)^N) p (1 - p)^2,

p being the pass rate at the prompt's last visit. The gain of the next rollout,
(p^N (1 - p) + (1 - p)^N p) p (1 - p)^2, falls with N, so taking the best gains
is the dynamic program's optimum. A prompt with p = 1 gets the minimum; what is
left when gains have become negligible goes to prompts with p = 0, the paper's
fallback. Prompts seen for the first time get the uniform share.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from vigor_jax.allocation import base, history, vip
from vigor_jax.allocation.groups import Groups, Request


@dataclasses.dataclass(frozen=True)
class KnapsackOptions:
  """Options of knapsack.

  Attributes:
    lowest, highest: rollouts per prompt.
    minimum_gain: of the value; below it a rollout is left over. The paper
      leaves open when the fallback starts; this is the project's choice.
  """

  lowest: int = 2
  highest: int = 128
  minimum_gain: float = 1e-4

  def validate(self) -> None:
    base.check_int("lowest", self.lowest, low=1)
    base.check_int("highest", self.highest, low=self.lowest)
    base.check_float("minimum_gain", self.minimum_gain, low=0, high=1)


def value(n, p) -> np.ndarray:
  """(1 - p^n - (1 - p)^n) p (1 - p)^2."""
  return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


def allocate(
  p, budget: int, low: int, high: int, keys, minimum_gain: float = 0.0
) -> np.ndarray:
  """Integers N with sum `budget`, low <= N <= high: int64 [P].

  Args:
    p: float [P], pass rates.
    keys: float [P], larger goes first among equals.
    minimum_gain: gains up to it wait for the fallback.
  """
  p = np.asarray(p, np.float64)
  keys = np.asarray(keys)
  counts = np.full(len(p), low, np.int64)
  n = np.arange(low, high)
  column = p[:, None]
  gains = (column**n * (1 - column) + (1 - column) ** n * column) * (
    column * (1 - column) ** 2
  )
  x, step = np.nonzero(gains > minimum_gain)
  rest = budget - int(counts.sum())
  best = np.lexsort((-keys[x], -gains[x, step]))[:rest]
  counts += np.bincount(x[best], minlength=len(p))
  fill_evenly(counts, p <= 0, budget, high, keys)
  fill_evenly(counts, p < 1, budget, high, keys)
  fill_evenly(counts, p <= 1, budget, high, keys)
  return counts


def fill_evenly(counts, members, budget: int, high: int, keys) -> None:
  """Raises the smallest counts of `members` until sum(counts) = budget."""
  while (rest := budget - int(counts.sum())) > 0:
    open_ = members & (counts < high)
    if not open_.any():
      return
    smallest = open_ & (counts == counts[open_].min())
    counts[base.top(keys, keys, rest, smallest)] += 1


class Knapsack(base.Allocator):
  """Greedy knapsack over pass rates of the last visit."""

  name = "knapsack"
  Options = KnapsackOptions

  def setup(self) -> None:
    o = self.options
    vip.check_bounds(
      self.name, self.prompts_per_step, self.budget, o.lowest, o.highest
    )
    self.rates = history.History(("rate",), (0,))

  def largest_group(self) -> int:
    return self.options.highest

  def rounds(self, groups: Groups) -> Iterator[Request]:
    o = self.options
    keys = groups.uniforms(0)
    known = self.rates.seen(groups.uids)
    share = self.budget // self.prompts_per_step
    counts = np.full(len(groups), share, np.int64)
    # First visits take the uniform share, the others divide what is left.
    rest = self.budget - share * int((~known).sum())
    members = int(known.sum())
    if members:
      counts[known] = allocate(
        self.rates.get(groups.uids[known])[:, 0],
        min(rest, members * o.highest),
        o.lowest,
        o.highest,
        keys[known],
        o.minimum_gain,
      )
    fill_evenly(counts, np.ones(len(groups), bool), self.budget, o.highest,
                keys)  # fmt: skip
    yield groups.request(counts)

  def end(self, groups: Groups) -> None:
    uids, successes, rollouts = history.merge_by_uid(
      groups.uids, groups.reward_sum, groups.n
    )
    self.rates.put(uids, (successes / rollouts)[:, None])

  def state_dict(self) -> dict:
    return {"rates": self.rates.state_dict()}

  def restore(self, state: dict) -> None:
    self.rates.load_state_dict(state["rates"])
