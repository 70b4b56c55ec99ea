"""eb_widening: breadth first, then the prompt whose next rollout is worth most.

A rule of this project (docs/theory.md, "The value of one more rollout"). Half
of the budget opens new prompts with two rollouts each. The rest goes, in R
rounds and one rollout at a time, to the largest expected marginal value under
an empirical-Bayes posterior of the prompt's success probability p:

  pi       prior over a grid of p, by EM on the counts of recent steps
  post_x   ~ pi(p) p^k (1 - p)^(n - k)
  val(p)   = p (1 - p) (2 (1 - p))^s
  A_x      = E_post[val],   D_x = E_post[val p (1 - p)] / c
  next rollout of an opened prompt with n rollouts: A_x - n D_x, if n < cap
  an unopened prompt: E_pi[val], and it takes m0 rollouts at once

Graded rewards enter as fractional successes (quasi-binomial), which
overstates their variance.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

import numpy as np

from vigor_jax.allocation import base

GRID = np.array(
    [
        0.002, 0.01, 0.025, 0.05, 0.08, 0.12, 0.17, 0.23, 0.3, 0.4,
        0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.985, 0.997,
    ]
)  # fmt: skip
PSEUDO_COUNT = 0.5  # per grid point, keeps the prior off zero
# Successes enter the history in sixteenths: binary counts are exact, graded
# ones stay few enough to be pooled.
HISTORY_QUANTUM = 1 / 16
# Likelihoods of whole counts up to this many rollouts are looked up.
TABULATED = 32


@dataclasses.dataclass(frozen=True)
class EbOptions:
  """Options of both forms, in rounds and streaming.

  Attributes:
    open_share: prompts opened at once, as a share of the budget (P0 = B / 4).
      `prompts_per_step` plays no part.
    initial_rollouts: m0, rollouts of a prompt when it is opened.
    pool: further prompts that may be opened, as a multiple of P0.
    cap: rollouts per prompt, raised by one when every prompt has reached it.
    saturation: c; a prompt's value falls by D = E[val p(1-p)] / c a rollout.
    low_success_exponent: s in val(p).
    em_iterations: per round.
    history: steps whose counts the prior is fitted to.
  """

  open_share: float = 0.25
  initial_rollouts: int = 2
  pool: float = 2.5
  cap: int = 12
  saturation: float = 2.0
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
      "saturation", self.saturation, low=0, high=1e6, open_low=True
    )
    base.check_float(
      "low_success_exponent", self.low_success_exponent, low=0, high=10
    )
    base.check_int("em_iterations", self.em_iterations, low=0, high=1000)
    base.check_int("history", self.history, low=0, high=10000)


@dataclasses.dataclass(frozen=True)
class EbWideningOptions(EbOptions):
  """EbOptions and `rounds`: R, rounds after the opening one."""

  rounds: int = 3

  def validate(self) -> None:
    super().validate()
    base.check_int("rounds", self.rounds, low=1, high=1000)


class Prior:
  """The distribution of p over GRID and the counts it is fitted to.

  Attributes:
    weights: float64 [19], sums to 1.
    recent: one array [rows, 3] a step, of (n, k, number of prompts).
  """

  def __init__(self, history: int):
    self.history = history
    self.weights = np.full(len(GRID), 1 / len(GRID))
    self.recent: list[np.ndarray] = []
    # Likelihoods of `recent`, so that a round computes its own ones only.
    self._likelihoods: list[np.ndarray] = []

  def posterior(self, n, k) -> np.ndarray:
    """Posterior over GRID for counts n, k [m]: float64 [m, 19]."""
    post = likelihood(n, k) * self.weights
    return post / post.sum(1, keepdims=True)

  def fit(self, n, k, iterations: int) -> None:
    """EM on the recent steps and the current counts n, k [m]."""
    like = np.concatenate([*self._likelihoods, likelihood(n, k)])
    number = np.ones(len(like))
    past = len(like) - len(n)
    if past:
      number[:past] = np.concatenate([rows[:, 2] for rows in self.recent])
    weights = self.weights
    for _ in range(iterations):
      # A factor in the weights cancels, so they are normalised at the end.
      share = number / (like @ weights)
      weights = weights * (share @ like) + PSEUDO_COUNT
    self.weights = weights / weights.sum()

  def remember(self, n, k) -> None:
    """Appends a finished step's counts; forgets those beyond `history`."""
    rows = tally(n, k)
    self.recent.append(rows)
    self._likelihoods.append(likelihood(rows[:, 0], rows[:, 1]))
    forgotten = max(len(self.recent) - self.history, 0)
    del self.recent[:forgotten], self._likelihoods[:forgotten]

  def state_dict(self) -> dict:
    return {
      "prior": self.weights.tolist(),
      "recent": [rows.tolist() for rows in self.recent],
    }

  def restore(self, state: dict) -> None:
    self.weights = np.asarray(state["prior"], np.float64)
    self.recent = [
      np.asarray(rows, np.float64).reshape(-1, 3) for rows in state["recent"]
    ]
    self._likelihoods = [likelihood(r[:, 0], r[:, 1]) for r in self.recent]


def likelihood(n, k) -> np.ndarray:
  """p^k (1 - p)^(n - k) over GRID, each row scaled to a maximum of 1."""
  n, k = np.asarray(n, np.float64), np.asarray(k, np.float64)
  whole = k.astype(np.int64)
  if n.size and n.max() <= TABULATED and (whole == k).all():
    return _table()[n.astype(np.int64), whole]
  return _likelihood(n, k)


def _likelihood(n, k) -> np.ndarray:
  logs = k[:, None] * np.log(GRID) + (n - k)[:, None] * np.log1p(-GRID)
  return np.exp(logs - logs.max(1, keepdims=True))


@functools.cache
def _table() -> np.ndarray:
  """`_likelihood` of all counts up to TABULATED: [n, k, 19]."""
  size = TABULATED + 1
  n, k = np.divmod(np.arange(size * size), size)
  return _likelihood(np.maximum(n, k), k).reshape(size, size, len(GRID))


def tally(n, k) -> np.ndarray:
  """Distinct (n, k) with their number: float64 [rows, 3]."""
  n = np.asarray(n, np.float64)
  base_k = 2.0**20  # above any k in sixteenths
  codes, number = np.unique(
    n * base_k + np.rint(np.asarray(k) / HISTORY_QUANTUM), return_counts=True
  )
  k = codes % base_k * HISTORY_QUANTUM
  return np.column_stack([codes // base_k, k, number])


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
    worth = np.where(
      np.arange(active)[:, None] < opened,
      value[:active, None] - m * slope[:active, None],
      new_value - m * new_slope,
    )
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


class EbWidening(base.Allocator):
  """Empirical-Bayes widening in rounds."""

  name = "eb_widening"
  Options = EbWideningOptions

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
    self.prior = Prior(o.history)
    self.value = GRID * (1 - GRID) * (2 * (1 - GRID)) ** o.low_success_exponent
    self.slope = self.value * GRID * (1 - GRID) / o.saturation

  def rounds(self, groups: base.Groups) -> Iterator[base.Request]:
    o = self.options
    counts = np.zeros(len(groups), np.int64)
    counts[: self.first] = o.initial_rollouts
    yield groups.request(counts)
    share = (self.budget - groups.spent) // o.rounds
    cap = o.cap
    for r in range(1, o.rounds + 1):
      need = share if r < o.rounds else self.budget - groups.spent
      if not need:
        continue
      opened = int(groups.opened.sum())
      self.prior.fit(
        groups.n[:opened], groups.reward_sum[:opened], o.em_iterations
      )
      counts, cap = greedy(
        groups.counts,
        opened,
        *self.values(groups, opened),
        groups.uniforms(r),
        need,
        cap,
        o.initial_rollouts,
      )
      yield groups.request(counts)

  def values(self, groups: base.Groups, opened: int):
    """Marginal values under the present prior and the verdicts so far.

    Returns:
      (A [max_prompts], D [max_prompts], A and D of an unopened prompt); A and
      D are 0 behind the first `opened` groups.
    """
    post = self.prior.posterior(groups.n[:opened], groups.reward_sum[:opened])
    value, slope = np.zeros((2, len(groups)))
    value[:opened], slope[:opened] = post @ self.value, post @ self.slope
    return (
      value,
      slope,
      float(self.prior.weights @ self.value),
      float(self.prior.weights @ self.slope),
    )

  def end(self, groups: base.Groups) -> None:
    done = groups.n > 0
    self.prior.remember(groups.n[done], groups.reward_sum[done])

  def state_dict(self) -> dict:
    return self.prior.state_dict()

  def restore(self, state: dict) -> None:
    self.prior.restore(state)
