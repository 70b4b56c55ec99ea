"""What is known of prompts given a forecast of their success (predictor.py).

`Conditional` turns forecasts into priors. What is known of p given the
forecast is not what the regression believes, but what came of forecasts made
without the prompt's own verdicts: a prior for every knot of the forecast's
logit, by EM as for all prompts together, shrunk to what is known nearby and in
the end to the common prior. A forecast that tells nothing leaves that as it is.
"""

from __future__ import annotations

import numpy as np

from vigor_jax.allocation.counts import Counts, climb, distinct

FORGET = 0.9  # a step's weight in the spread of rewards, from step to step
KNOTS = np.arange(-5.0, 6.0)  # logits, one apart
SHRINKAGE = 8.0  # prompts' worth of a knot's surroundings
# What prompts at other knots count for there, by distance.
NEARBY = 0.5 ** np.abs(KNOTS[:, None] - KNOTS) * (KNOTS[:, None] != KNOTS)
COMMON = 0.5  # prompts' worth of the common prior among them
UPDATES = 3  # iterations of EM with the counts of a step so far
# What `_mix` is made of.
_NEARBY = SHRINKAGE * np.column_stack([NEARBY, np.full(len(KNOTS), COMMON)])
_OWN = np.eye(len(KNOTS), len(KNOTS) + 1)
PAIR = 0.25  # most variance of a 0/1 reward: what two of them tell of phi


class Conditional:
  """Priors of p over a grid, given a forecast.

  Once a step EM runs on the recent steps (`fit`). Within a step the counts so
  far are added to what those left (`update`): EM for the newcomers only (Neal
  and Hinton 1998), at a small part of the price.

  Attributes:
    tables: float64 [knots, grid], a prior per knot.
    expected: float64 [knots, grid], prompts of the recent steps at each p.
    recent: one array [rows, 4] a step, of (n, k, knot, number of prompts).
  """

  def __init__(self, grid: int, history: int):
    self.history = history
    self.tables = np.full((len(KNOTS), grid), 1 / grid)
    self.expected = np.zeros((len(KNOTS), grid))
    self.recent: list[np.ndarray] = []

  def prior(self, place: Place) -> np.ndarray:
    """Priors of prompts, between the knots' ones: float64 [k, grid]."""
    return place.between(self.tables)

  def mean(self, place: Place, values: np.ndarray) -> np.ndarray:
    """Means under these priors of values over the grid.

    Args:
      place: of k forecasts.
      values: float64 [grid, c].

    Returns:
      float64 [k, c].
    """
    return place.between(self.tables @ values)

  def fit(self, likelihood, common, iterations: int) -> None:
    """EM at every knot, from the tables as they are.

    Args:
      likelihood: (n, k) -> float64 [rows, grid].
      common: float64 [grid], the prior of all prompts.
      iterations: of EM, at least 1.
    """
    known = Counts(self.pooled(), len(KNOTS))
    mix = _mix(known.prompts.sum(1))
    like = likelihood(known.n, known.k)
    self.expected, self.tables = climb(
      known, like, mix, common, self.tables, iterations
    )

  def update(self, place: Place, likelihood, common) -> None:
    """Adds prompts of the current step to what recent ones left.

    Args:
      place: of m forecasts, of all prompts with verdicts in this step.
      likelihood: float64 [m, grid], of their counts; each row up to a factor.
      common: float64 [grid], the prior of all prompts.
    """
    nearest = place.nearest
    member = np.zeros((len(KNOTS), len(nearest)))
    member[nearest, np.arange(len(nearest))] = 1
    number = np.bincount(nearest, minlength=len(KNOTS))
    mix = _mix(self.expected.sum(1) + number)
    both = np.empty((len(KNOTS) + 1, len(common)))
    both[-1], tables = common, self.tables
    for _ in range(UPDATES):
      post = tables.take(nearest, 0)
      post *= likelihood
      post /= post.sum(1)[:, None]
      np.add(self.expected, member.dot(post), out=both[:-1])
      tables = mix.dot(both)
    self.tables = tables

  def remember(self, rows: np.ndarray) -> None:
    """Appends a finished step's rows."""
    self.recent.append(rows)
    del self.recent[: max(len(self.recent) - self.history, 0)]

  def pooled(self) -> np.ndarray:
    """Recent rows by (n, k, knot), as `recent` has them."""
    rows = np.concatenate([np.zeros((0, 4)), *self.recent])
    return distinct(rows[:, :3], rows[:, 3])

  def state_dict(self) -> dict:
    return {
      "tables": self.tables.tolist(),
      "expected": self.expected.tolist(),
      "recent": [rows.tolist() for rows in self.recent],
    }

  def load_state_dict(self, state: dict) -> None:
    self.tables = np.asarray(state["tables"], np.float64)
    self.expected = np.asarray(state["expected"], np.float64)
    self.recent = [
      np.asarray(rows, np.float64).reshape(-1, 4) for rows in state["recent"]
    ]


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


def _mix(number) -> np.ndarray:
  """What tables are of expected counts and, last, of the common prior.

  A table is (own + SHRINKAGE nearby) / (number + SHRINKAGE), with nearby
  (NEARBY own + COMMON common) / around: linear in own and common.

  Args:
    number: float64 [knots], prompts of each.

  Returns:
    float64 [knots, knots + 1].
  """
  mix = _NEARBY / (NEARBY.dot(number) + COMMON)[:, None]
  mix += _OWN
  mix /= (number + SHRINKAGE)[:, None]
  return mix


class Place:
  """Where forecasts lie among the knots.

  Attributes:
    low: int64 [k], the knot below; share: float64 [k], how far it is beyond.
  """

  def __init__(self, forecast):
    place = np.clip(forecast - KNOTS[0], 0, len(KNOTS) - 1)
    self.low = np.minimum(place.astype(np.int64), len(KNOTS) - 2)
    self.share = place - self.low

  def take(self, chosen) -> Place:
    """Those at an index or boolean array."""
    part = Place.__new__(Place)
    part.low, part.share = self.low[chosen], self.share[chosen]
    return part

  @property
  def nearest(self) -> np.ndarray:
    """The nearest knot: int64 [k]."""
    return self.low + (self.share > 0.5)

  def between(self, at_knots) -> np.ndarray:
    """Interpolates rows [knots, c], the outermost ones beyond: [k, c]."""
    result = (at_knots[1:] - at_knots[:-1]).take(self.low, 0)
    result *= self.share[:, None]
    result += at_knots.take(self.low, 0)
    return result


def knots(forecast) -> np.ndarray:
  """The nearest knot of each forecast: int64 [k]."""
  return Place(forecast).nearest


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
  return distinct(rows)
