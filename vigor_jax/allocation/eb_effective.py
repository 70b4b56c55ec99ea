"""eb_effective: every next rollout where it adds most to the step's S.

A rule of this project (docs/theory.md, "The number of effective rollouts").
A step whose prompts have m = n - 1 useful rollouts each carries

  S = N^2 / D,   N = sum m v,   D = sum m u' + c sum (m u)^2

effective rollouts (docs/allocation.md, section 7): v the signal of a rollout,
u' the variance of the verdicts as seen, u that of the true ones. One more
rollout for prompt x changes log S by 2 / N times

  v_x - (rho / 2) u'_x - rho c m_x u_x^2,   rho = N / D,

and goes where that is largest. Beside eb_widening's two terms there is a
price on noise, and rho sets the scale of both from the step itself: the more
the step's signal is spread already, the less a further prompt is worth its
noise. p is unknown, so v, u', u^2 are posterior means, as in eb_widening.

Wrong verdicts. If a share q of them is turned round, success is seen with
p' = q + (1 - 2 q) p: the posterior uses p', the signal is (1 - 2 q) v(p), and
u' = p' (1 - p'). q is given, or estimated as the largest one that the counts
do not refute.

Graded rewards. Their variance is phi p (1 - p), phi the share of a 0/1
reward's variance with the same mean, estimated over recent steps. A rollout
then tells as much about p as 1 / phi verdicts do.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vigor_jax.allocation import base, eb_widening, widening
from vigor_jax.allocation.eb_widening import GRID
from vigor_jax.allocation.wrong_verdicts import estimate_noise, likelihood

UNKNOWN = -1.0
WAIT = 5  # steps on record before the estimate is used
FORGET = 0.9  # a step's weight in phi, from step to step
LEAST_SPREAD = 0.05
ROUNDING = 1e-9  # of sums that are the same for 0/1 rewards
BINARY = 0.97  # phi above which rewards count as 0/1


@dataclasses.dataclass(frozen=True)
class EbEffectiveOptions(widening.WideningOptions):
  """WideningOptions, and

  Attributes:
    breadth: c of S. Larger: broader.
    noise: q, share of verdicts that are turned round; -1: estimated. Graded
      rewards count as right unless it is given.
    noise_every: steps from one estimate of q to the next.
    rounds: R, rounds after the opening one.
  """

  breadth: float = 1.0
  noise: float = UNKNOWN
  noise_every: int = 1
  rounds: int = 3

  def validate(self) -> None:
    super().validate()
    base.check_int("rounds", self.rounds, low=1, high=1000)
    base.check_int("noise_every", self.noise_every, low=1)
    base.check_float("breadth", self.breadth, low=0, high=1e6)
    if self.noise != UNKNOWN:
      base.check_float("noise", self.noise, low=0, high=0.45)


@functools.lru_cache(maxsize=8)
def _moments(phi: float, noise: float, exponent: float) -> np.ndarray:
  """v, u' and u^2 over GRID: float64 [19, 3]."""
  seen = noise + (1 - 2 * noise) * GRID
  u = phi * (1 - 2 * noise) * GRID * (1 - GRID)
  v = u * (2 * (1 - GRID)) ** exponent
  return np.stack([v, phi * seen * (1 - seen), u * u], axis=1)


def pool(tallies) -> np.ndarray:
  """Adds up tallies (n, k, number of prompts) by (n, k)."""
  rows = np.concatenate(tallies)
  pairs, index = np.unique(rows[:, :2], axis=0, return_inverse=True)
  number = np.bincount(index.reshape(-1), rows[:, 2], len(pairs))
  return np.column_stack([pairs, number])


def spreads(groups: base.Groups, chosen) -> np.ndarray:
  """Variance of rewards, and of 0/1 rewards with the same mean: float [m, 2].

  Unbiased: s^2 for the variance, mean (1 - mean) + s^2 / n for what a 0/1
  reward with the same mean would have; the same number if it is 0/1.

  Args:
    groups: of a step.
    chosen: bool [max_prompts], m of them, all with finished rollouts.
  """
  n, k = groups.n[chosen], groups.reward_sum[chosen]
  variance = groups.variance("unbiased")[chosen]
  binary = (k / n) * (1 - k / n) + variance / n
  return np.stack([variance, binary], axis=1)


class EbEffective(widening.Widening):
  """Greedy ascent of the number of effective rollouts."""

  name = "eb_effective"
  Options = EbEffectiveOptions

  def setup(self) -> None:
    super().setup()
    o = self.options
    self.weights = np.full(len(GRID), 1 / len(GRID))
    self.recent: list[np.ndarray] = []
    self.noise = 0.0 if o.noise == UNKNOWN else o.noise
    self.spread = np.zeros(2)  # variances seen, those of 0/1 rewards
    self.rho = 0.0  # N / D when last asked
    self._known = None  # (phi, noise), likelihoods and numbers of `recent`

  @property
  def phi(self) -> float:
    """Variance of a reward / that of a 0/1 reward with its mean."""
    seen, binary = self.spread.tolist()
    if seen >= binary * (1 - ROUNDING):
      return 1.0
    return max(seen / binary, LEAST_SPREAD)

  def marginal(self, groups: base.Groups):
    n, k = groups.n[groups.opened], groups.reward_sum[groups.opened]
    self.fit(n, k)
    return self.values(n, k, groups.opened)

  def fit(self, n, k) -> None:
    """EM for the distribution of p on recent steps and current counts."""
    key = self.phi, self.noise
    if self._known is None or self._known[0] != key:
      rows = np.concatenate([np.zeros((0, 3)), *self.recent])
      self._known = key, self.likelihood(rows[:, 0], rows[:, 1]), rows[:, 2]
    _, past, number = self._known
    now = eb_widening.tally(n, k)
    like = np.concatenate([past, self.likelihood(now[:, 0], now[:, 1])])
    number = np.concatenate([number, now[:, 2]])
    weights = self.weights
    for _ in range(self.options.em_iterations):
      # A factor in the weights cancels, so they are normalised at the end.
      share = number / like.dot(weights)
      weights = weights * share.dot(like)
      weights += eb_widening.PSEUDO_COUNT
    self.weights = weights / weights.sum()

  def likelihood(self, n, k) -> np.ndarray:
    """Of counts [m] over GRID, each row up to a factor: float64 [m, 19]."""
    phi = self.phi
    if phi != 1:
      n, k = n / phi, k / phi
    return likelihood(n, k, self.noise)

  @property
  def table(self) -> np.ndarray:
    """v, u' and u^2 over GRID: float64 [19, 3]."""
    return _moments(self.phi, self.noise, self.options.low_success_exponent)

  def moments(self, n, k, prior=None, new=None, spread=None, like=None):
    """Means of v, u' and u^2, of opened prompts and of those without rollouts.

    Args:
      n, k: float [m], verdicts and successes of the opened prompts.
      prior: float [19] or [m, 19], of the opened prompts; default: the fit.
      new: float [q, 3], the others' means; default: by the fit.
      spread: (float [m], float [q]), each prompt's own phi / phi; default: 1.
      like: `likelihood` of n and k, if it is known.

    Returns:
      (three float [m], three numbers or float [q]).
    """
    prior = self.weights if prior is None else prior
    table = self.table
    post = (self.likelihood(n, k) if like is None else like) * prior
    post /= post.sum(1, keepdims=True)
    new = self.weights @ table if new is None else new
    mine, others = (post @ table).T, new.T
    if spread is not None:
      mine, others = (
        x * np.stack([s, s, s * s]) for x, s in zip((mine, others), spread)
      )
    return mine, others

  def values(
    self, n, k, opened, prior=None, new=None, spread=None, like=None
  ):
    """Marginal values A - n D, as widening.greedy takes them.

    Args:
      n, k: float [m], verdicts and successes of the opened prompts.
      opened: bool [max_prompts].
      prior, new, spread, like: as in `moments`.

    Returns:
      (A [max_prompts], D [max_prompts]) in units of 2 / N.
    """
    c = self.options.breadth
    (v, noise, square), new = self.moments(n, k, prior, new, spread, like)
    m = np.maximum(n - 1, 0)
    total = m @ noise + c * (m * m) @ square
    self.rho = rho = float(m @ v / total) if total else 0.0
    slope = rho * c * square
    # m = n - 1, so A is the value at n = 0, a step D above the one at m = 0.
    return (
      widening.spread(
        opened, v - rho / 2 * noise + slope, new[0] - rho / 2 * new[1]
      ),
      widening.spread(opened, slope, rho * c * new[2]),
    )

  def end(self, groups: base.Groups) -> None:
    self.record(groups)
    self.estimate(groups.step)

  def record(self, groups: base.Groups) -> np.ndarray:
    """Keeps a finished step's counts.

    Returns:
      (n - 1) x `spreads`: float [m, 2].
    """
    done = groups.n > 0
    n, k = groups.n[done], groups.reward_sum[done]
    self.recent.append(eb_widening.tally(n, k))
    self.recent = self.recent[max(len(self.recent) - self.options.history, 0) :]
    self._known = None
    own = (n - 1)[:, None] * spreads(groups, done)
    self.spread = FORGET * self.spread + own.sum(0)
    return own

  def tallies(self) -> np.ndarray:
    """Recent counts, as wrong_verdicts.estimate_noise takes them."""
    return pool(self.recent)

  def estimate(self, step: int, wait: int = WAIT) -> None:
    """Estimates the noise, if not given, once `wait` steps are on record."""
    if self.options.noise != UNKNOWN:
      return
    if len(self.recent) < min(wait, self.options.history) or not self.recent:
      self.noise = 0.0
    elif self.phi < BINARY:
      self.noise = 0.0  # Graded verdicts are believed.
    elif (step + 1) % self.options.noise_every == 0:
      self.noise = estimate_noise(self.tallies())

  def state_dict(self) -> dict:
    return {
      "prior": self.weights.tolist(),
      "recent": [rows.tolist() for rows in self.recent],
      "noise": self.noise,
      "spread": self.spread.tolist(),
    }

  def restore(self, state: dict) -> None:
    self.weights = np.asarray(state["prior"], np.float64)
    self.recent = [
      np.asarray(rows, np.float64).reshape(-1, 3) for rows in state["recent"]
    ]
    self._known = None
    self.noise = float(state["noise"])
    self.spread = np.asarray(state["spread"], np.float64)
