"""What the widening rules share: open many prompts, then go where it pays.

Part of the budget opens prompts with m0 rollouts each; the rest goes, in R
rounds and one rollout at a time, to the largest marginal value. A subclass says
what a rollout is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

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
  n,
  opened: int,
  value,
  slope,
  new_value,
  new_slope,
  keys,
  budget,
  cap,
  m0,
  overdraw: int = 0,
):
  """Spends `budget` rollouts one at a time on the largest marginal value.

  Values of one prompt fall with n, so the greedy order is the order of all
  (prompt, n) pairs by value, and the pairs taken are the best ones; unopened
  prompts all have one value, so they come after every pair at least as good.

  Args:
    n: int [M], rollouts granted to each prompt of the pool so far.
    opened: prompts opened so far, the first ones of the pool.
    value, slope: float [M], A and D of opened prompts.
    new_value, new_slope: A and D of a prompt without rollouts.
    keys: float [M], larger goes first among equal values.
    budget: rollouts to spend.
    cap: rollouts per prompt; rises by one whenever nothing else is left.
    m0: rollouts an unopened prompt takes.
    overdraw: rollouts that opening a last prompt may cost beyond the budget.

  Returns:
    (counts int64 [M] to add, the cap at the end). The counts add up to the
    budget, or to at most `overdraw` more, due for the last opened prompt.
  """
  size = len(n)
  start = np.asarray(n, np.int64)
  counts = np.zeros(size, np.int64)
  left = int(budget)

  def spend(level, limit, floor, active):
    """Takes pairs (x, m), m < level, value >= floor, of the first `active`."""
    have = start[:active] + counts[:active]
    m = np.arange(have.min(initial=level), level)
    worth = np.empty((active, len(m)))
    worth[:opened] = value[:opened, None] - m * slope[:opened, None]
    if active > opened:
      worth[opened:] = new_value - m * new_slope
    x, column = np.nonzero((m >= have[:, None]) & (worth >= floor))
    worth = worth[x, column]
    if len(x) > limit:
      x = x[np.lexsort((-keys[x], -worth))[:limit]]
    counts[:active] += np.bincount(x, minlength=active)
    return len(x)

  # 1. Pairs worth at least as much as a new prompt, while one can be opened.
  active = opened
  if active < size and left + overdraw >= m0:
    # With fewer than m0 left the new prompt no longer competes, but by then
    # the best pairs are the same ones.
    left -= spend(cap, left, new_value, active)
    # 2. New prompts; their own further rollouts are worth less than opening.
    fresh = min(size - active, (left + overdraw) // m0 if left else 0)
    counts[active : active + fresh] += m0
    active += fresh
    left -= fresh * m0
  # 3. What remains goes to the best pairs; the cap rises when none is left.
  while left > 0:
    if not active:
      raise ValueError(f"{left} rollouts left and no prompt to give them to")
    left -= spend(cap, left, -np.inf, active)
    if left:
      cap += 1
  return counts, cap


class Widening(base.Allocator):
  """Base of the widening rules; a subclass writes `marginal`.

  Attributes:
    first: P0, prompts of the opening round.
  """

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
    # All at once: between rounds the device's work empties the host's caches.
    keys = groups.uniforms(range(1, o.rounds + 1))
    cap = o.cap
    yield opening
    for r in range(1, o.rounds + 1):
      need = share if r < o.rounds else left
      if not need:
        continue
      left -= need
      opened = int(groups.opened.sum())
      counts, cap = greedy(
        groups.counts,
        opened,
        *self.marginal(groups, opened),
        keys[r - 1],
        need,
        cap,
        o.initial_rollouts,
      )
      yield groups.request(counts)

  def marginal(self, groups: base.Groups, opened: int):
    """What `greedy` takes, from the first `opened` groups' verdicts so far.

    Returns:
      (A [max_prompts], D [max_prompts], A and D of an unopened prompt); A and
      D are 0 behind the opened groups.
    """
    raise NotImplementedError(f"{self.name} has no marginal value")


def padded(values: np.ndarray, size: int) -> np.ndarray:
  """`values` [m] followed by zeros: float64 [size]."""
  result = np.zeros(size)
  result[: len(values)] = values
  return result
