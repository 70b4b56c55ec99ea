"""Distributions of prompts: what p looks like, given or deconvolved."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Population:
  """Kinds of prompts, each with its distribution of rewards.

  Attributes:
    weights: float [kinds], shares, sum 1.
    values: float [kinds, outcomes], rewards in [0, 1].
    probabilities: float [kinds, outcomes], rows sum to 1.
  """

  weights: np.ndarray
  values: np.ndarray
  probabilities: np.ndarray

  def __post_init__(self):
    for name in ("weights", "values", "probabilities"):
      object.__setattr__(
        self, name, np.asarray(getattr(self, name), np.float64)
      )
    total = self.probabilities.sum(1)
    if self.values.shape != self.probabilities.shape or (
      len(self.weights) != len(self.values)
    ):
      raise ValueError(
        "weights, values, probabilities must be [kinds], [kinds, outcomes]"
        f" twice, got {self.weights.shape}, {self.values.shape},"
        f" {self.probabilities.shape}"
      )
    if abs(self.weights.sum() - 1) > 1e-6 or np.abs(total - 1).max() > 1e-6:
      raise ValueError("weights and rows of probabilities must sum to 1")

  @classmethod
  def binary(cls, p, weights=None) -> Population:
    """0/1 rewards with success probabilities p [kinds]."""
    p = np.asarray(p, np.float64)
    if weights is None:
      weights = np.ones(len(p))
    weights = np.asarray(weights, np.float64)
    return cls(
      weights / weights.sum(),
      np.tile([0.0, 1.0], (len(p), 1)),
      np.stack([1 - p, p], axis=1),
    )

  @classmethod
  def beta(cls, a: float, b: float, points: int = 400) -> Population:
    """0/1 rewards, p ~ Beta(a, b), on midpoints of theta, p = sin^2 theta.

    In theta the density is sin^(2a-1) cos^(2b-1): flat for a = b = 1/2, so
    the ends need no special care.
    """
    theta = (np.arange(points) + 0.5) / points * np.pi / 2
    weights = np.sin(theta) ** (2 * a - 1) * np.cos(theta) ** (2 * b - 1)
    return cls.binary(np.sin(theta) ** 2, weights)

  @property
  def mean(self) -> np.ndarray:
    """Expected reward of each kind [kinds]; p for 0/1 rewards."""
    return (self.values * self.probabilities).sum(1)

  @property
  def variance(self) -> np.ndarray:
    """Reward variance of each kind [kinds]; p (1 - p) for 0/1 rewards."""
    spread = np.square(self.values - self.mean[:, None])
    return (spread * self.probabilities).sum(1)

  @property
  def is_binary(self) -> bool:
    return bool(np.isin(self.values, (0.0, 1.0)).all())

  def draw_kinds(self, rng: np.random.Generator, count: int) -> np.ndarray:
    """Kinds of `count` independent prompts: int [count]."""
    return rng.choice(len(self.weights), count, p=self.weights)

  def draw_rewards(self, rng: np.random.Generator, kinds) -> np.ndarray:
    """One reward of a prompt of each kind: float [len(kinds)]."""
    edges = np.cumsum(self.probabilities, axis=1)[kinds]
    outcome = (rng.random(len(kinds))[:, None] >= edges[:, :-1]).sum(1)
    return self.values[kinds, outcome]


# Ends included: prompts that are never or always solved are common.
DECONVOLUTION_GRID = np.concatenate(
  [[0.0], np.sin(np.linspace(0.02, np.pi / 2 - 0.02, 99)) ** 2, [1.0]]
)


def deconvolve(
  n, k, number=None, *, grid=DECONVOLUTION_GRID, iterations: int = 500
) -> Population:
  """Distribution of p from counts, by EM for the maximum likelihood mixture.

  Raw k/n is wider than p, by p (1 - p) / n each, and piles up at 0 and 1; the
  mixture likelihood sum_g w_g p_g^k (1 - p_g)^(n - k) accounts for that
  (Kiefer and Wolfowitz 1956; Laird 1978). Rules that stop on rewards do not
  change the likelihood, so adaptive counts may be used as they are.

  Args:
    n, k: float [m], rollouts and successes per prompt; n = 0 is ignored.
    number: float [m], how many prompts had these counts; 1 if None.
    grid: float [kinds], candidate values of p.
    iterations: of EM, from a flat start. They also smooth: the last digits of
      the likelihood only sharpen spikes.

  Returns:
    A binary Population on the grid.

  Raises:
    ValueError: when there is no count, or k is outside [0, n].
  """
  n, k = np.asarray(n, np.float64), np.asarray(k, np.float64)
  number = np.ones(len(n)) if number is None else np.asarray(number, float)
  seen = n > 0
  n, k, number = n[seen], k[seen], number[seen]
  if not len(n):
    raise ValueError("deconvolution needs at least one prompt with rollouts")
  if (k < 0).any() or (k > n).any():
    raise ValueError("successes k must lie between 0 and n")
  pairs, index = np.unique(
    np.stack([n, k], axis=1), axis=0, return_inverse=True
  )
  number = np.bincount(index.reshape(-1), number, len(pairs))
  n, k = pairs[:, :1], pairs[:, 1:]
  with np.errstate(divide="ignore", invalid="ignore"):
    logs = np.where(k > 0, k * np.log(grid), 0.0)
    logs += np.where(n > k, (n - k) * np.log1p(-grid), 0.0)
  like = np.exp(logs - logs.max(1, keepdims=True))
  weights = np.full(len(grid), 1 / len(grid))
  for _ in range(iterations):
    weights = weights * ((number / (like @ weights)) @ like)
    weights /= weights.sum()
  return Population.binary(grid, weights)


def fit_beta(population: Population) -> tuple[float, float]:
  """(a, b) of the Beta law with the population's mean and variance of p.

  Raises:
    ValueError: when all p are equal, or the mean is 0 or 1.
  """
  p, w = population.mean, population.weights
  mean = float(w @ p)
  spread = float(w @ np.square(p - mean))
  if spread <= 0 or not 0 < mean < 1:
    raise ValueError("a Beta fit needs values of p that differ")
  strength = mean * (1 - mean) / spread - 1
  # p in {0, 1} only has strength 0: the limit of a, b -> 0.
  strength = max(strength, 1e-3)
  return mean * strength, (1 - mean) * strength
