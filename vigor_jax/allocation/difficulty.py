"""What is known of prompts given a forecast of their success (predictor.py).

`Conditional` turns forecasts into priors. What is known of p given the
forecast is not what the regression believes, but what came of forecasts made
without the prompt's own verdicts: a prior for every knot of the forecast's
logit, by EM as for all prompts together, shrunk to what is known nearby and in
the end to the common prior. A forecast that tells nothing leaves that as it is.
"""

from __future__ import annotations

import numpy as np

from vigor_jax.allocation import mixtures

FORGET = 0.9  # a step's weight in the spread of rewards, from step to step
KNOTS = np.arange(-5.0, 6.0)  # logits, one apart
SHRINKAGE = 8.0  # prompts' worth of a knot's surroundings
# What prompts at other knots count for there, by distance.
NEARBY = 0.5 ** np.abs(KNOTS[:, None] - KNOTS) * (KNOTS[:, None] != KNOTS)
COMMON = 0.5  # prompts' worth of the common prior among them
PAIR = 0.25  # most variance of a 0/1 reward: what two of them tell of phi


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
    knot = rows[:, 2].astype(np.int64)
    number = np.bincount(knot, rows[:, 3], len(KNOTS))[:, None]
    # A table is (own + SHRINKAGE nearby) / (number + SHRINKAGE), with nearby
    # (NEARBY own + COMMON common) / around: linear in own and common.
    around = NEARBY @ number + COMMON
    mix = np.empty((len(KNOTS), len(KNOTS) + 1))
    mix[:, :-1] = SHRINKAGE * NEARBY / around + np.eye(len(KNOTS))
    mix[:, -1:] = SHRINKAGE * COMMON / around
    mix /= number + SHRINKAGE
    # Knots without prompts follow from the others, at the end.
    seen = number.ravel().nonzero()[0]
    mix = mix[:, [*seen, -1]]
    own = np.zeros((0, len(common)))
    if iterations and len(seen):
      place = seen.searchsorted(knot)
      kinds = mixtures.Mixtures(like, place, rows[:, 3], len(seen))
      own = kinds.expected(
        kinds.climb(self.tables[seen], iterations - 1, mix[seen], common)
      )
    if iterations:
      self.tables = mix @ np.concatenate([own, common[None]])

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
  rows = np.empty((len(n), 3))
  rows[:, 0] = n
  np.rint(k / quantum, out=rows[:, 1])
  rows[:, 1] *= quantum
  rows[:, 2] = knots(forecast)
  return mixtures.distinct(rows)
