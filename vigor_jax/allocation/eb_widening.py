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

import dataclasses
import functools

import numpy as np

from vigor_jax.allocation import base, widening
from vigor_jax.allocation.groups import Groups

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
class EbOptions(widening.WideningOptions):
  """WideningOptions, and

  Attributes:
    saturation: c; a prompt's value falls by D = E[val p(1-p)] / c a rollout.
  """

  saturation: float = 2.0

  def validate(self) -> None:
    super().validate()
    base.check_float(
      "saturation", self.saturation, low=0, high=1e6, open_low=True
    )


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
    self._pooled = None

  def posterior(self, n, k) -> np.ndarray:
    """Posterior over GRID for counts n, k [m]: float64 [m, 19]."""
    return self._posterior(likelihood(n, k))

  def _posterior(self, like: np.ndarray) -> np.ndarray:
    post = like * self.weights
    post /= post.sum(1, keepdims=True)
    return post

  def fit(self, n, k, iterations: int) -> None:
    """EM on the recent steps and the current counts n, k [m]."""
    self._fit(likelihood(n, k), iterations)

  def refit(self, n, k, iterations: int) -> np.ndarray:
    """`fit`, then the `posterior` of the same counts."""
    like = likelihood(n, k)
    self._fit(like, iterations)
    return self._posterior(like)

  def _fit(self, now: np.ndarray, iterations: int) -> None:
    if self._pooled is None:
      # Once a step, so that a round computes its own likelihoods only.
      rows = np.concatenate([np.zeros((0, 3)), *self.recent])
      self._pooled = likelihood(rows[:, 0], rows[:, 1]), rows[:, 2]
    past, weight = self._pooled
    like = np.concatenate([past, now])
    number = np.ones(len(like))
    number[: len(past)] = weight
    weights = self.weights
    for _ in range(iterations):
      # A factor in the weights cancels, so they are normalised at the end.
      share = number / like.dot(weights)
      weights = weights * share.dot(like)
      weights += PSEUDO_COUNT
    self.weights = weights / weights.sum()

  def remember(self, n, k) -> None:
    """Appends a finished step's counts; forgets those beyond `history`."""
    self.recent.append(tally(n, k))
    del self.recent[: max(len(self.recent) - self.history, 0)]
    self._pooled = None

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
    self._pooled = None


def likelihood(n, k) -> np.ndarray:
  """p^k (1 - p)^(n - k) over GRID, each row scaled to a maximum of 1."""
  n, k = np.asarray(n, np.float64), np.asarray(k, np.float64)
  found = codes(n, k)
  return _likelihood(n, k) if found is None else _table()[found]


def codes(n: np.ndarray, k: np.ndarray) -> np.ndarray | None:
  """n (TABULATED + 1) + k, [m]; None unless all are whole and tabulated."""
  if not n.size or n.max() > TABULATED:
    return None
  found = n * (TABULATED + 1) + k
  whole = found.astype(np.int64)
  return whole if (whole == found).all() else None


def _likelihood(n, k) -> np.ndarray:
  logs = k[:, None] * np.log(GRID) + (n - k)[:, None] * np.log1p(-GRID)
  return np.exp(logs - logs.max(1, keepdims=True))


@functools.cache
def _table() -> np.ndarray:
  """`_likelihood` of all counts up to TABULATED, by code: [codes, 19]."""
  n, k = np.divmod(np.arange((TABULATED + 1) ** 2), TABULATED + 1)
  return _likelihood(np.maximum(n, k), k)


def tally(n, k) -> np.ndarray:
  """Distinct (n, k) with their number: float64 [rows, 3]."""
  n, k = np.asarray(n, np.float64), np.asarray(k, np.float64)
  found = codes(n, k)
  if found is not None:
    # What the general way below gives, without its sorting.
    number = np.bincount(found)
    found = np.flatnonzero(number)
    rows = np.empty((len(found), 3))
    rows[:, 0], rows[:, 1] = np.divmod(found, TABULATED + 1)
    rows[:, 2] = number[found]
    return rows
  base_k = 2.0**20  # above any k in sixteenths
  found, number = np.unique(
    n * base_k + np.rint(k / HISTORY_QUANTUM), return_counts=True
  )
  k = found % base_k * HISTORY_QUANTUM
  return np.column_stack([found // base_k, k, number])


class EbWidening(widening.Widening):
  """Empirical-Bayes widening in rounds."""

  name = "eb_widening"
  Options = EbWideningOptions

  def setup(self) -> None:
    super().setup()
    o = self.options
    self.prior = Prior(o.history)
    self.value = GRID * (1 - GRID) * (2 * (1 - GRID)) ** o.low_success_exponent
    self.slope = self.value * GRID * (1 - GRID) / o.saturation

  def marginal(self, groups: Groups):
    opened = groups.opened
    post = self.prior.refit(
      groups.n[opened], groups.reward_sum[opened], self.options.em_iterations
    )
    return self.values(post, opened)

  def values(self, post: np.ndarray, opened: np.ndarray):
    """`marginal` from the posteriors `post` [k, 19] of the opened prompts."""
    return tuple(
      widening.spread(opened, post @ table, self.prior.weights @ table)
      for table in (self.value, self.slope)
    )

  def end(self, groups: Groups) -> None:
    done = groups.n > 0
    self.prior.remember(groups.n[done], groups.reward_sum[done])

  def state_dict(self) -> dict:
    return self.prior.state_dict()

  def restore(self, state: dict) -> None:
    self.prior.restore(state)
