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

from vigor_jax.allocation import mixtures

SPREAD = 2.0  # prior deviation of a prompt's logit, by its features
LEVEL = 3.0  # and of the common level
FORGET = 0.9  # what is left of the weights' precision after a step
ALIKE = 0.3  # correlation of a prompt's verdicts beyond its features
NEWTON = 12
TINY = 1e-9
KNOTS = np.arange(-5.0, 6.0)  # logits, one apart
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
    self._covariance = self._ahead = None  # of these weights, once asked for

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
      self._covariance = self._ahead = None
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
    z = np.empty((len(x), len(self.mean)))
    np.subtract(x, self.centre, out=z[:, :-1])
    z[:, :-1] *= self.scale
    z[:, -1] = 1
    return z

  def forecast(self, z: np.ndarray) -> np.ndarray:
    """`Fit.forecast` before anything of this step is seen."""
    if self._covariance is None:
      self._covariance = np.linalg.inv(self.precision)
    return Fit(self.mean, self._covariance).forecast(z)

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
    before = self._before()

    def at(w):
      """(minus the log posterior, logits, slope of the prior) at weights."""
      t, move = z @ w, w - self.mean
      pull = before @ move
      value = n @ np.logaddexp(0, t) - k @ t + move @ pull / 2
      return float(value), t, pull

    w = self.mean if start is None else start
    value, t, pull = at(w)
    p, precision = 1 / (1 + np.exp(-t)), None
    for _ in range(newton):
      precision = before + _square(z, n * p * (1 - p))
      move = np.linalg.solve(precision, z.T @ (k - n * p) - pull)
      found, *rest = at(w + move)
      # Newton's step may be too long far from the solution.
      while found > value and np.abs(move).max() > TINY:
        move = move / 2
        found, *rest = at(w + move)
      if found > value:
        break
      done = value - found < TINY
      w, value, (t, pull), precision = w + move, found, rest, None
      p = 1 / (1 + np.exp(-t))
      if done:
        break
    if precision is None:
      precision = before + _square(z, n * p * (1 - p))
    fit = Fit(w, np.linalg.inv(precision), precision)
    # Leaving one prompt out, by one step of Newton from the common solution.
    share = _variance(z, fit.covariance)
    rest = share / np.maximum(1 - n * p * (1 - p) * share, TINY)
    fit.without = _moderate(t - rest * (k - n * p), rest)
    return fit

  def step(self, z, n, k) -> None:
    """Ends a step with one iteration, where `fit` and `commit` take several.

    It begins where the last step ended, and the next one goes on with what it
    leaves. Arguments as in `fit`.
    """
    worth = 1 / (1 + (n - 1) * ALIKE)
    n, k = n * worth, k * worth
    before = self._before()
    t = z @ self.mean
    p = 1 / (1 + np.exp(-t))
    precision = before + _square(z, n * p * (1 - p))
    covariance = np.linalg.inv(precision)
    move = covariance @ ((k - n * p) @ z)
    turn, pull = z @ move, move @ before @ move / 2

    def loss(s):
      logits = t + s * turn
      return n @ np.logaddexp(0, logits) - k @ logits + s * s * pull

    size, value = 1.0, loss(0.0)
    while loss(size) > value and size > TINY:  # as in `fit`
      size /= 2
    self.commit(Fit(self.mean + size * move, covariance, precision))

  def _before(self) -> np.ndarray:
    """Precision of the weights before a step's verdicts: some is forgotten."""
    if self._ahead is None:
      self._ahead = FORGET * self.precision + (1 - FORGET) * self._prior()
    return self._ahead

  def commit(self, fit: Fit) -> None:
    """Ends a step with what `fit` found."""
    self.mean, self.precision = fit.mean, fit.precision
    self._covariance, self._ahead = fit.covariance, None

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
    self._covariance = self._ahead = None


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
    return _moderate(z @ self.mean, _variance(z, self.covariance))


def _square(z, weight) -> np.ndarray:
  """Sum of weight z z': float64 [D + 1, D + 1]."""
  # A matrix times itself: half the work, and symmetric to the last bit.
  half = z * np.sqrt(weight)[:, None]
  return half.T @ half


def _variance(z, covariance) -> np.ndarray:
  """Of the logits of designs z: float64 [k]."""
  return np.einsum("ij,ij->i", z @ covariance, z)


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
    self._remembered()  # sets `pooled`, recent rows by (n, k, knot)

  def prior(self, forecast: np.ndarray) -> np.ndarray:
    """Priors of prompts, between the knots' ones: float64 [k, grid]."""
    return self._between(forecast, self.tables)

  def mean(self, forecast: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Means under these priors of values over the grid.

    Args:
      forecast: float64 [k].
      values: float64 [grid] or [grid, c].

    Returns:
      float64 [k] or [k, c].
    """
    return self._between(forecast, self.tables @ values)

  @staticmethod
  def _between(forecast, at_knots):
    """Interpolates rows [knots, ...], the outermost ones beyond: [k, ...]."""
    if at_knots.ndim == 1:
      return np.interp(forecast, KNOTS, at_knots)
    place = np.clip(forecast - KNOTS[0], 0, len(KNOTS) - 1)
    low = np.minimum(place.astype(np.int64), len(KNOTS) - 2)
    share = (place - low)[:, None]
    return (1 - share) * at_knots[low] + share * at_knots[low + 1]

  def fit(self, rows, likelihood, common, iterations: int, key=None) -> None:
    """EM at every knot, from the tables as they are.

    Args:
      rows: (n, k, knot, number) of the current step.
      likelihood: (n, k) -> float64 [rows, grid].
      common: float64 [grid], the prior of all prompts.
      iterations: of EM.
      key: of the likelihood; what it gave for the rows of the steps before is
        kept as long as the key stays the same. None: not kept.
    """
    past = self._known[1]
    if key is None or key != self._known[0]:
      past = likelihood(*self.pooled.T[:2])
      self._known = key, past
    like = np.concatenate([past, likelihood(rows[:, 0], rows[:, 1])])
    rows = np.concatenate([self.pooled, rows])
    kinds = mixtures.Mixtures(
      like, rows[:, 2].astype(np.int64), rows[:, 3], len(KNOTS)
    )
    # A table is (own + SHRINKAGE nearby) / (number + SHRINKAGE), with nearby
    # (NEARBY own + COMMON common) / around: linear in own.
    number = kinds.number[:, None]
    around = NEARBY @ number + COMMON
    mix = SHRINKAGE * NEARBY / around + np.eye(len(KNOTS))
    mix /= number + SHRINKAGE
    rest = SHRINKAGE * COMMON / around / (number + SHRINKAGE) * common
    for _ in range(iterations):
      self.tables = mix @ kinds.expected(self.tables) + rest

  def remember(self, rows: np.ndarray) -> None:
    """Appends a finished step's rows."""
    self.recent.append(rows)
    del self.recent[: max(len(self.recent) - self.history, 0)]
    self._remembered()

  def _remembered(self) -> None:
    """Pools recent rows, so that a round has few to go through."""
    rows = np.concatenate([np.zeros((0, 4)), *self.recent])
    self.pooled = mixtures.distinct(rows[:, :3], rows[:, 3])
    self._known = None, None

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
  place = np.clip(forecast - KNOTS[0], 0, len(KNOTS) - 1)
  return np.rint(place).astype(np.int64)


def turns(forecast, kind) -> np.ndarray:
  """How many earlier prompts share a prompt's knot and kind: int64 [k]."""
  same = knots(forecast) * 2 + kind
  order = np.argsort(same, kind="stable")
  size = np.bincount(same)
  place = np.arange(len(same)) - np.repeat(np.cumsum(size) - size, size)
  turn = np.empty(len(same), np.int64)
  turn[order] = place
  return turn


def tally(n, k, forecast, quantum: float) -> np.ndarray:
  """Distinct (n, k, nearest knot) with their number: float64 [rows, 4]."""
  k = np.rint(k / quantum) * quantum
  return mixtures.distinct(np.stack([n, k, knots(forecast)], axis=1))
