"""What the widening rules share: open many prompts, then go where it pays.

Part of the budget opens prompts with m0 rollouts each; the rest goes, in R
rounds and one rollout at a time, to the largest marginal value. A subclass says
what a rollout is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

import numpy as np

from vigor_jax.allocation import base


@dataclasses.dataclass(frozen=True)
class WideningOptions:
  """Options of every widening rule, in rounds and streaming.

  Attributes:
    open_share: prompts opened at once, as a share of the budget (P0 = B / 4).
      `prompts_per_step` plays no part.
    initial_rollouts: m0, rollouts of a prompt when it is opened.
    pool: further prompts that may be opened, as a multiple of P0.
    cap: rollouts per prompt, raised by one when every prompt has reached it.
    low_success_exponent: s in val(p).
    em_iterations: per round.
    history: steps whose counts the prior is fitted to.
  """

  open_share: float = 0.25
  initial_rollouts: int = 2
  pool: float = 2.5
  cap: int = 12
  low_success_exponent: float = 1.0
  em_iterations: int = 5
  history: int = 10

  def validate(self) -> None:
    base.check_float(
      "open_share", self.open_share, low=0, high=1, open_low=True
    )
    base.check_int("initial_rollouts", self.initial_rollouts, low=1)
    base.check_float("pool", self.pool, low=0, high=1000)
    base.check_int("cap", self.cap, low=1)
    base.check_float(
      "low_success_exponent", self.low_success_exponent, low=0, high=10
    )
    base.check_int("em_iterations", self.em_iterations, low=0, high=1000)
    base.check_int("history", self.history, low=0, high=10000)


def greedy(
  n, opened, value, slope, keys, budget, cap, m0, overdraw: int = 0
):
  """Spends `budget` rollouts one at a time on the largest marginal value.

  A rollout of a prompt with n of them is worth A - n D, opening one A, and an
  opening takes m0 rollouts at once. Values of one prompt fall with n, so the
  greedy order is the order of all (prompt, n) pairs by value, and the pairs
  taken are the best ones; all that has to be found is how many prompts are
  opened. A new prompt goes after every pair of an opened one at least as good.

  Args:
    n: int [M], rollouts granted to each prompt of the pool so far; none to
      unopened ones.
    opened: bool [M], prompts opened so far.
    value, slope: float [M], A and D; D >= 0.
    keys: float [M], larger goes first among equal values of opened prompts;
      unopened ones go in the pool's order. Or a function that gives them, for
      when values tie.
    budget: rollouts to spend.
    cap: rollouts per prompt; rises by one whenever nothing else is left.
    m0: rollouts an unopened prompt takes.
    overdraw: rollouts that opening a last prompt may cost beyond the budget.

  Returns:
    (counts int64 [M] to add, the cap at the end). The counts add up to the
    budget, or to at most `overdraw` more, due for the last opened prompt.
  """
  start = np.asarray(n, np.int64)
  counts = np.zeros(len(start), np.int64)
  left = int(budget)
  if left <= 0:
    return counts, cap
  active = opened.nonzero()[0]
  new = (~opened).nonzero()[0]
  x, worth = _pairs(active, start.take(active), value, slope, cap, left)
  if len(new) and left + overdraw >= m0:
    # 1. How many are opened: not the first whose turn comes when the pairs and
    # the openings before it have used up the budget.
    values = value.take(new)
    better = None
    if values[0] == values[-1] and values.min() == values.max():
      # They have their turn together, their own further pairs come later.
      better = worth >= values[0]
      before = int(np.count_nonzero(better))
      number = (left - before + overdraw) // m0 if left > before else 0
      new = new[:number]
      own_worth = _worth(new, value, slope, m0, cap)
    else:
      if len(worth) >= left:
        # As many pairs as there are rollouts come before the others.
        sooner = (values > worth.min()).nonzero()[0]
        new, values = new.take(sooner), values.take(sooner)
      order = (-values).argsort(kind="stable")[: (left + overdraw) // m0]
      new, turn = new.take(order), values.take(order)
      own_worth = _worth(new, value, slope, m0, cap)
      spent = m0 * np.arange(len(new))  # When it is each one's turn.
      for found, side in ((worth, "left"), (own_worth.ravel(), "right")):
        spent += len(found) - np.sort(found).searchsorted(turn, side)
      most = left - max(1, m0 - overdraw)
      new = new[: int(np.count_nonzero(spent <= most))]  # `spent` ascends.
      if len(new):
        before = int(spent[len(new) - 1]) - m0 * (len(new) - 1)
        own_worth = own_worth[: len(new)]
    # 2. The openings.
    if len(new):
      counts[new] = m0
      active = np.concatenate([active, new])
      # With an overdraw, the pairs that came before the last opening stand.
      left = max(left - m0 * len(new), before)
      if left == before and better is not None:
        x, worth = x[better], worth[better]
      elif left:
        x = np.concatenate([x, new.repeat(own_worth.shape[1])])
        worth = np.concatenate([worth, own_worth.ravel()])
  # 3. What remains goes to the best pairs; the cap rises when none is left.
  while left > 0:
    if not len(active):
      raise ValueError(f"{left} rollouts left and no prompt to give them to")
    if len(x) > left:
      best = worth >= np.partition(worth, len(worth) - left)[-left]
      x, worth = x[best], worth[best]
    if len(x) > left:
      keys = keys() if callable(keys) else keys
      x = x[np.lexsort((-keys[x], -worth))[:left]]
    counts += np.bincount(x, minlength=len(counts))
    left -= len(x)
    if left:
      cap += 1
      have = start[active] + counts[active]
      x, worth = _pairs(active, have, value, slope, cap, left)
  return counts, cap


def _pairs(prompts, have, value, slope, cap: int, left: int):
  """The best `left` pairs (x, m), x in `prompts`, m from x's `have` to the cap.

  Returns:
    (prompts int64 [pairs], values [pairs]): more than `left` only where values
    tie, fewer only where there are no more.
  """
  low = int(have.min(initial=cap))
  worth = _worth(prompts, value, slope, low, cap)
  worth[np.arange(low, cap) < have[:, None]] = -np.inf
  worth = worth.ravel()
  least = -np.inf
  if len(worth) > left:
    least = np.partition(worth, len(worth) - left)[-left]
  best = worth >= least if least > -np.inf else worth > least
  best = best.nonzero()[0]
  return prompts.take(best // max(cap - low, 1)), worth.take(best)


def _worth(prompts, value, slope, low: int, cap: int) -> np.ndarray:
  """Values of the rollouts `low` to `cap` of prompts: [prompts, cap - low]."""
  drop = np.arange(low, cap) * slope.take(prompts)[:, None]
  return np.subtract(value.take(prompts)[:, None], drop, out=drop)


class Widening(base.Allocator):
  """Base of the widening rules; a subclass writes `marginal`.

  Attributes:
    first: P0, prompts of the opening round.
  """

  opens_later = True

  def setup(self) -> None:
    o = self.options
    self.first = int(o.open_share * self.budget + 1e-9)
    most = self.budget // o.initial_rollouts
    if not 1 <= self.first <= most:
      raise ValueError(
        f"{self.name}: open_share={o.open_share} of budget={self.budget}"
        f" opens {self.first} prompts; with initial_rollouts="
        f"{o.initial_rollouts} it must be 1 to {most}"
        + (
          f": open_share from {1 / self.budget:.6g} to {most / self.budget:.6g}"
          if most
          else f": budget of at least {o.initial_rollouts}"
        )
      )
    self.max_prompts = self.first + round(o.pool * self.first)

  def rounds(self, groups: base.Groups) -> Iterator[base.Request]:
    o = self.options
    counts = np.zeros(len(groups), np.int64)
    counts[: self.first] = o.initial_rollouts
    opening = groups.request(counts)
    left = self.budget - groups.spent
    share = left // o.rounds
    drawn: list[np.ndarray] = []

    def keys(r):
      # All at once: between rounds the device's work empties the host's caches.
      drawn.extend(() if drawn else groups.uniforms(range(1, o.rounds + 1)))
      return drawn[r - 1]

    cap = o.cap
    yield opening
    for r in range(1, o.rounds + 1):
      need = share if r < o.rounds else left
      if not need:
        continue
      left -= need
      counts, cap = greedy(
        groups.counts,
        groups.opened,
        *self.marginal(groups),
        functools.partial(keys, r),
        need,
        cap,
        o.initial_rollouts,
      )
      yield groups.request(counts)

  def marginal(self, groups: base.Groups):
    """What `greedy` takes, from the verdicts so far.

    Returns:
      (A [max_prompts], D [max_prompts]), of unopened groups too.
    """
    raise NotImplementedError(f"{self.name} has no marginal value")


def spread(opened: np.ndarray, values: np.ndarray, new) -> np.ndarray:
  """`values` [k] for the opened prompts, `new` for the others: float64 [M]."""
  result = np.empty(len(opened))
  result[~opened if np.ndim(new) else slice(None)] = new
  result[opened] = values
  return result
