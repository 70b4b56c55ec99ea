"""Prediction of a prompt's success from what it looks like.

`Predictor` is a logistic regression of verdicts on features, learned one step
at a time: the posterior of its weights, a Gaussian (Laplace), loses a share of
its precision between steps, so that it follows a policy that changes.

`Conditional` turns its forecasts into priors. What is known of p given the
forecast is not what the regression believes, but what came of forecasts made
without the prompt's own verdicts: a prior for every knot of the forecast's
logit, by EM as for all prompts together, shrunk to what is known nearby and in
the end to the common prior. A forecast that tells nothing leaves that as it is.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation.mixtures import Mixtures

SPREAD = 2.0  # prior deviation of a prompt's logit, by its features
LEVEL = 3.0  # and of the common level
FORGET = 0.9  # what is left of the weights' precision after a step
ALIKE = 0.3  # correlation of a prompt's verdicts beyond its features
NEWTON = 12
TINY = 1e-9
KNOTS = np.arange(-5.0, 6.0)  # logits
SHRINKAGE = 8.0  # prompts' worth of a knot's surroundings
# What prompts at other knots count for there, by distance.
NEARBY = 0.5 ** np.abs(KNOTS[:, None] - KNOTS) * (KNOTS[:, None] != KNOTS)
COMMON = 0.5  # prompts' worth of the common prior among them
PAIR = 0.25  # most variance of a 0/1 reward: what two of them tell of phi


class Predictor:
  """Bayesian logistic regression with forgetting.

  Attributes:
    centre, scale: float64 [D], set by the first prompts seen; scale 0 where a
      feature did not vary, which is then left out.
    mean: float64 [D + 1], of the weights; the last one is the level.
    precision: float64 [D + 1, D + 1].
  """

  def __init__(self):
    self.centre = self.scale = np.zeros(0)
    self.mean = np.zeros(0)
    self.precision = np.zeros((0, 0))

  def look(self, x: np.ndarray) -> bool:
    """Takes centre and scale from the first features seen.

    Returns:
      Whether any feature varies.
    """
    if not self.mean.size:
      self.centre = x.mean(0)
      deviation = x.std(0)
      varies = deviation > 1e-9 * (1 + np.abs(self.centre))
      self.scale = np.where(varies, 1 / np.where(varies, deviation, 1), 0.0)
      self.mean = np.zeros(x.shape[1] + 1)
      self.precision = self._prior()
    elif x.shape[1] != len(self.centre):
      raise ValueError(
        f"prompts have {x.shape[1]} features, those before had"
        f" {len(self.centre)}"
      )
    return bool(self.scale.any())

  def _prior(self) -> np.ndarray:
    used = max(int((self.scale > 0).sum()), 1)
    level = np.full(len(self.mean), used / SPREAD**2)
    level[-1] = 1 / LEVEL**2
    return np.diag(level)

  def design(self, x: np.ndarray) -> np.ndarray:
    """Standardised features and a one: float64 [k, D + 1]."""
    z = (x - self.centre) * self.scale
    return np.concatenate([z, np.ones((len(z), 1))], axis=1)

  def forecast(self, z: np.ndarray) -> np.ndarray:
    """`Fit.forecast` before anything of this step is seen."""
    return Fit(self.mean, np.linalg.inv(self.precision)).forecast(z)

  def fit(self, z, n, k, start=None, newton: int = NEWTON) -> Fit:
    """The weights after n > 0 verdicts, k of them right, of designs z.

    Args:
      z: float64 [m, D + 1].
      n, k: float64 [m].
      start: weights to begin at.
      newton: most iterations.
    """
    # Verdicts of one prompt share what its features do not tell.
    worth = 1 / (1 + (n - 1) * ALIKE)
    n, k = n * worth, k * worth
    before = FORGET * self.precision + (1 - FORGET) * self._prior()

    def loss(w):
      t, move = z @ w, w - self.mean
      fit = n @ np.logaddexp(0, t) - k @ t
      return float(fit + move @ before @ move / 2)

    w = self.mean if start is None else start
    value = loss(w)
    for _ in range(newton):
      p = 1 / (1 + np.exp(-(z @ w)))
      slope = z.T @ (k - n * p) - before @ (w - self.mean)
      curvature = before + (z * (n * p * (1 - p))[:, None]).T @ z
      move = np.linalg.solve(curvature, slope)
      # Newton's step may be too long far from the solution.
      while (found := loss(w + move)) > value and np.abs(move).max() > TINY:
        move = move / 2
      if found > value:
        break
      done = value - found < TINY
      w, value = w + move, found
      if done:
        break
    p = 1 / (1 + np.exp(-(z @ w)))
    precision = before + (z * (n * p * (1 - p))[:, None]).T @ z
    fit = Fit(w, np.linalg.inv(precision), precision)
    # Leaving one prompt out, by one step of Newton from the common solution.
    share = ((z @ fit.covariance) * z).sum(1)
    rest = share / np.maximum(1 - n * p * (1 - p) * share, TINY)
    fit.without = _moderate(z @ w - rest * (k - n * p), rest)
    return fit

  def commit(self, fit: Fit) -> None:
    """Ends a step with what `fit` found."""
    # Symmetric to the last bit, as what a checkpoint gives back.
    self.mean, self.precision = fit.mean, (fit.precision + fit.precision.T) / 2

  def state_dict(self) -> dict:
    lower = np.tril_indices(len(self.mean))
    return {
      "centre": self.centre.tolist(),
      "scale": self.scale.tolist(),
      "mean": self.mean.tolist(),
      "precision": self.precision[lower].tolist(),
    }

  def load_state_dict(self, state: dict) -> None:
    self.centre, self.scale, self.mean = (
      np.asarray(state[name], np.float64)
      for name in ("centre", "scale", "mean")
    )
    size = len(self.mean)
    self.precision = np.zeros((size, size))
    self.precision[np.tril_indices(size)] = state["precision"]
    self.precision += np.tril(self.precision, -1).T


@dataclasses.dataclass
class Fit:
  """A posterior of the weights.

  Attributes:
    mean, covariance, precision: float64 [D + 1], twice [D + 1, D + 1].
    without: float64 [m], forecasts for the prompts it was fitted to, each as
      if its own verdicts had not been seen.
  """

  mean: np.ndarray
  covariance: np.ndarray
  precision: np.ndarray | None = None
  without: np.ndarray | None = None

  def forecast(self, z: np.ndarray) -> np.ndarray:
    """Logit of the predictive success probability: float64 [k]."""
    return _moderate(z @ self.mean, ((z @ self.covariance) * z).sum(1))


def _moderate(logit, variance):
  """The logit of E sigma(t), t normal, by MacKay's approximation (1992)."""
  return logit / np.sqrt(1 + np.pi / 8 * variance)


class Conditional:
  """Priors of p over a grid, given a forecast.

  Attributes:
    tables: float64 [knots, grid], a prior per knot.
    recent: one array [rows, 4] a step, of (n, k, knot, number of prompts).
  """

  def __init__(self, grid: int, history: int):
    self.history = history
    self.tables = np.full((len(KNOTS), grid), 1 / grid)
    self.recent: list[np.ndarray] = []
    self._remembered()

  def prior(self, forecast: np.ndarray) -> np.ndarray:
    """Priors of prompts, between the knots' ones: float64 [k, grid]."""
    place = np.interp(forecast, KNOTS, np.arange(len(KNOTS)))
    low = np.minimum(place.astype(np.int64), len(KNOTS) - 2)
    share = (place - low)[:, None]
    return (1 - share) * self.tables[low] + share * self.tables[low + 1]

  def fit(self, rows, likelihood, common, iterations: int) -> None:
    """EM at every knot, from the tables as they are.

    Args:
      rows: (n, k, knot, number) of the current step.
      likelihood: (n, k) -> float64 [rows, grid].
      common: float64 [grid], the prior of all prompts.
      iterations: of EM.
    """
    rows = np.concatenate([self.pooled, rows])
    mixtures = Mixtures(
      likelihood(rows[:, 0], rows[:, 1]),
      rows[:, 2].astype(np.int64),
      rows[:, 3],
      len(KNOTS),
    )
    number = mixtures.number[:, None]
    around = NEARBY @ number + COMMON
    for _ in range(iterations):
      own = mixtures.expected(self.tables)
      nearby = (NEARBY @ own + COMMON * common) / around
      self.tables = (own + SHRINKAGE * nearby) / (number + SHRINKAGE)

  def remember(self, rows: np.ndarray) -> None:
    """Appends a finished step's rows."""
    self.recent.append(rows)
    del self.recent[: max(len(self.recent) - self.history, 0)]
    self._remembered()

  def _remembered(self) -> None:
    """Recent rows by (n, k, knot), so that a round has few to go through."""
    rows = np.concatenate([np.zeros((0, 4)), *self.recent])
    kinds, index = np.unique(rows[:, :3], axis=0, return_inverse=True)
    number = np.bincount(index.reshape(-1), rows[:, 3], len(kinds))
    self.pooled = np.column_stack([kinds, number])

  def state_dict(self) -> dict:
    return {
      "tables": self.tables.tolist(),
      "recent": [rows.tolist() for rows in self.recent],
    }

  def load_state_dict(self, state: dict) -> None:
    self.tables = np.asarray(state["tables"], np.float64)
    self.recent = [
      np.asarray(rows, np.float64).reshape(-1, 4) for rows in state["recent"]
    ]
    self._remembered()


class Spread:
  """How far graded rewards spread, given a forecast, compared with 0/1 ones.

  The sums are of variances seen and of those that 0/1 rewards with the same
  means would have, each times n - 1, at the knots of the forecast; their ratio
  is phi there, shrunk to nearby ones and the common phi as priors are.

  Attributes:
    sums: float64 [knots, 2], from the steps so far.
  """

  def __init__(self):
    self.sums = np.zeros((len(KNOTS), 2))

  def after(self, forecast, variances) -> np.ndarray:
    """The sums with a further step's prompts: float64 [knots, 2].

    Args:
      forecast: float64 [m].
      variances: float64 [m, 2], (seen, of 0/1 rewards), each times n - 1.
    """
    member = knots(forecast) == np.arange(len(KNOTS))[:, None]
    return FORGET * self.sums + member @ variances

  @staticmethod
  def of(forecast, sums, common: float) -> np.ndarray:
    """phi of prompts with these forecasts: float64 [k]."""
    seen, binary = sums.T
    prior = COMMON * PAIR
    nearby = (NEARBY @ seen + prior * common) / (NEARBY @ binary + prior)
    prior = SHRINKAGE * PAIR
    phi = (seen + prior * nearby) / (binary + prior)
    return np.interp(forecast, KNOTS, phi)


def knots(forecast) -> np.ndarray:
  """The nearest knot of each forecast: int64 [k]."""
  place = np.interp(forecast, KNOTS, np.arange(len(KNOTS)))
  return np.rint(place).astype(np.int64)


def turns(forecast, kind) -> np.ndarray:
  """How many earlier prompts share a prompt's knot and kind: int64 [k]."""
  same = knots(forecast) * 2 + kind
  member = same == np.arange(2 * len(KNOTS))[:, None]
  return (np.cumsum(member, axis=1) - 1)[same, np.arange(len(same))]


def tally(n, k, forecast, quantum: float) -> np.ndarray:
  """Distinct (n, k, nearest knot) with their number: float64 [rows, 4]."""
  rows = np.stack([n, np.rint(k / quantum) * quantum, knots(forecast)], axis=1)
  distinct, number = np.unique(rows, axis=0, return_counts=True)
  return np.column_stack([distinct, number])
