"""VIP (arXiv 2602.01601): least gradient variance under the budget.

  minimise  sum_x a_x f(n_x)   with  sum n_x = B,  L <= n_x <= U,
  a_x = p_x (1 - p_x) predicted,
  rloo:    f = 1 / (n - 1):     n = clip(1 + sqrt(a / lambda), L, U)
  dr_grpo: f = (n - 1) / n^2:   a (n - 2) / n^3 = lambda,  L >= 3

by bisection on lambda, then floor, then one by one to the prompt with the
largest decrease (the paper's Appendix D).

The paper predicts p with a Gaussian process over prompt embeddings, fitted to
the last step. Allocators see no text, so p comes from the prompt's own
discounted history, shrunk to the mean of all: inert until prompts come again.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import heapq

import numpy as np

from vigor_jax.allocation import base, history
from vigor_jax.allocation.groups import Groups, Request

FORMS = ("rloo", "dr_grpo")


@dataclasses.dataclass(frozen=True)
class VipOptions:
  """Options of vip.

  Attributes:
    form: the advantage whose variance is minimised, "rloo" or "dr_grpo".
    lowest, highest: L and U; L is at least 3 with dr_grpo.
    discount: of a prompt's old counts at each visit.
    shrinkage: rollouts' worth of the mean rate in a prompt's prediction.
  """

  form: str = "rloo"
  lowest: int = 2
  highest: int = 32
  discount: float = 0.5
  shrinkage: float = 1.0

  def validate(self) -> None:
    base.check_choice("form", self.form, FORMS)
    base.check_int("lowest", self.lowest, low=2 if self.form == "rloo" else 3)
    base.check_int("highest", self.highest, low=self.lowest)
    base.check_float("discount", self.discount, low=0, high=1)
    base.check_float("shrinkage", self.shrinkage, low=0, high=1e6)


def objective(form: str, n) -> np.ndarray:
  """f(n) of the two forms."""
  n = np.asarray(n, np.float64)
  return 1 / (n - 1) if form == "rloo" else (n - 1) / n**2


def relaxed(a, budget: int, low: int, high: int, form: str) -> np.ndarray:
  """The real-valued optimum, by bisection on log lambda: float64 [P]."""

  # (n - 2) / n^3 falls from n = 3 on; inverted by a table, fine enough for
  # the rounding to integers that follows.
  grid = np.linspace(low, high, 4096)
  rate = (grid - 2) / grid**3

  def at(multiplier: float) -> np.ndarray:
    if form == "rloo":
      return np.clip(1 + np.sqrt(a / multiplier), low, high)
    with np.errstate(divide="ignore"):
      return np.interp(-multiplier / a, -rate, grid)

  small, large = -60.0, 10.0
  for _ in range(60):
    middle = (small + large) / 2
    if at(np.exp(middle)).sum() > budget:
      small = middle
    else:
      large = middle
  return at(np.exp(large))


def allocate(
  a, budget: int, low: int, high: int, form: str, keys
) -> np.ndarray:
  """Integers n with sum `budget`: int64 [P]. Equal gains by the largest key."""
  a = np.asarray(a, np.float64)
  n = np.floor(relaxed(a, budget, low, high, form) + 1e-9).astype(np.int64)
  table = objective(form, np.arange(low, high + 2))
  fall = table[:-1] - table[1:]  # of f from n to n + 1, at n - low
  heap = [
    (-a[x] * fall[n[x] - low], int(n[x]), -keys[x], x)
    for x in np.flatnonzero(n < high)
  ]
  heapq.heapify(heap)
  for _ in range(budget - int(n.sum())):
    x = heapq.heappop(heap)[-1]
    n[x] += 1
    if n[x] < high:
      heapq.heappush(heap, (-a[x] * fall[n[x] - low], int(n[x]), -keys[x], x))
  return n


def check_bounds(name, prompts: int, budget: int, low: int, high: int) -> None:
  """Raises ValueError unless prompts * low <= budget <= prompts * high."""
  if not prompts * low <= budget <= prompts * high:
    raise ValueError(
      f"{name}: between {low} and {high} rollouts for each of"
      f" prompts_per_step={prompts} do not add up to budget={budget};"
      f" prompts_per_step must be {-(-budget // high)} to {budget // low},"
      f" or budget {prompts * low} to {prompts * high}"
    )


class Vip(base.Allocator):
  """Minimum predicted gradient variance."""

  name = "vip"
  Options = VipOptions

  def setup(self) -> None:
    o = self.options
    check_bounds(
      self.name, self.prompts_per_step, self.budget, o.lowest, o.highest
    )
    self.counts = history.History(("successes", "rollouts"), (0, 0))
    self.total = np.zeros(2)  # successes, rollouts of all prompts, discounted

  def largest_group(self) -> int:
    return self.options.highest

  def predicted(self, uids) -> np.ndarray:
    """Predicted p: float64 [k]."""
    mean = (self.total[0] + 0.5) / (self.total[1] + 1)
    rows = self.counts.get(uids)
    # The tiny term keeps 0 / 0 away without shrinkage.
    weight = self.options.shrinkage + 1e-9
    return (rows[:, 0] + weight * mean) / (rows[:, 1] + weight)

  def rounds(self, groups: Groups) -> Iterator[Request]:
    o = self.options
    p = self.predicted(groups.uids)
    yield groups.request(
      allocate(
        p * (1 - p),
        self.budget,
        o.lowest,
        o.highest,
        o.form,
        groups.uniforms(0),
      )
    )

  def end(self, groups: Groups) -> None:
    uids, successes, rollouts = history.merge_by_uid(
      groups.uids, groups.reward_sum, groups.n
    )
    new = np.stack([successes, rollouts], axis=1)
    discount = self.options.discount
    self.counts.put(uids, discount * self.counts.get(uids) + new)
    self.total = discount * self.total + new.sum(0)

  def state_dict(self) -> dict:
    return {
      "counts": self.counts.state_dict(),
      "total": self.total.tolist(),
    }

  def restore(self, state: dict) -> None:
    self.counts.load_state_dict(state["counts"])
    self.total = np.asarray(state["total"], np.float64)
