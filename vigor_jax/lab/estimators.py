"""Weight, bias and variance of allocator x advantage x aggregator.

At a frozen policy every prompt is one softmax over ARMS arms, arm 0 right,
with p on a grid; scores and grad p are exact. For prompts of one p

  E[sum of the prompt's terms] = w(p) grad p / P,

and w is measured as the projection on grad p; what is left over, orthogonal to
it, must vanish (docs/theory.md, section 5). P is the number of prompts of the
published split (budget / 8), so that uniform with leave-one-out advantages has
w = 1 whatever the rule's own number of prompts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.lab import learner
from vigor_jax.lab import world as world_lib

GRID = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
_WRONG = np.array([0.5, 0.3, 0.2])  # shares of the wrong arms


@dataclasses.dataclass(frozen=True)
class Bandits:
  """Prompts of one step, p on a grid; stands in for a World.

  Attributes:
    p: float [K].
    weights: float [K], shares of the prompts.
  """

  p: np.ndarray
  weights: np.ndarray
  reward: str = "sparse"
  noise: float = 0.0
  num_prompts: int = 0

  @property
  def skills(self) -> int:
    return len(self.p)

  def draw(self, rng, count: int, mixture=None) -> np.ndarray:
    """One-step chains: int [count, STEPS], padded."""
    del mixture
    chains = np.full((count, world_lib.STEPS), self.skills)
    chains[:, 0] = rng.choice(self.skills, count, p=self.weights)
    return chains

  def policy(self) -> np.ndarray:
    """float64 [K, ARMS]."""
    return np.concatenate(
      [self.p[:, None], (1 - self.p)[:, None] * _WRONG], axis=1
    )

  def slope(self) -> np.ndarray:
    """grad p on the logits, p (e_0 - policy): float64 [K, ARMS]."""
    right = np.eye(world_lib.ARMS)[0]
    return self.p[:, None] * (right - self.policy())


def u_shaped(grid=GRID) -> Bandits:
  """p ~ Beta(1/2, 1/2) on the grid: shares by the arcsine law's cells."""
  p = np.asarray(grid, float)
  edges = np.concatenate([[0], (p[1:] + p[:-1]) / 2, [1]])
  weights = np.diff(2 / np.pi * np.arcsin(np.sqrt(edges)))
  return Bandits(p, weights / weights.sum())


@dataclasses.dataclass(frozen=True)
class Measured:
  """What an estimator does with the prompts of a step.

  Attributes:
    weight: float [K], w(p).
    weight_error: float [K], its standard error.
    sideways: float [K], the largest component orthogonal to grad p, in
      standard errors; noise only if the direction is right.
    cosine: between the expected batch gradient and the gradient of the mean
      success: what re-weighting does to the direction of the step.
    noise: trace of the covariance of the batch gradient / |its mean|^2: the
      steps to average until signal and noise are equal.
    rollouts: mean rollouts per opened prompt, by p [K].
  """

  weight: np.ndarray
  weight_error: np.ndarray
  sideways: np.ndarray
  cosine: float
  noise: float
  rollouts: np.ndarray


def measure(
  bandits: Bandits,
  rule: learner.Rule,
  estimator: learner.Estimator,
  *,
  steps: int = 200,
  runs: int = 8,
  budget: int = learner.BUDGET,
  warmup: int = 5,
) -> Measured:
  """Measures at a frozen policy, over runs * steps steps.

  Args:
    bandits: the prompts.
    rule, estimator: what is measured.
    steps, runs: of the simulation, after `warmup` steps for priors.
    budget: rollouts per step.
  """
  seeds = np.arange(runs)
  rules = [rule.make(int(s), budget) for s in seeds]
  streams = [world_lib.Stream(bandits, int(s)) for s in seeds]
  policy = np.broadcast_to(
    bandits.policy(), (runs, bandits.skills, world_lib.ARMS)
  )
  grads, opened = [], np.zeros(bandits.skills)
  drawn = np.zeros(bandits.skills)
  for step in range(warmup + steps):
    rollouts, groups = learner.collect(
      bandits, policy, rules, streams, step, seeds
    )
    if step < warmup:
      continue
    rows, c = learner.coefficients(rollouts, groups, rules, estimator)
    grads.append(learner.gradient(rollouts, rows, c, policy))
    kinds = rollouts.chains[:, 0]
    first = rollouts.sample == 0
    opened += np.bincount(kinds[first], minlength=bandits.skills)
    drawn += np.bincount(kinds, minlength=bandits.skills)
  grads = np.concatenate(grads)  # [runs * steps, K, ARMS]
  slope = bandits.slope()
  prompts = opened / len(grads)  # expected prompts of each kind in a step
  scale = budget / 8 / np.maximum(prompts, 1e-12)
  along = (grads * slope).sum(-1) / (slope**2).sum(-1) * scale
  rest = grads - (along / scale)[..., None] * slope
  error = lambda x: x.std(0, ddof=1) / np.sqrt(len(x))
  sideways = np.abs(rest.mean(0)) / np.maximum(error(rest), 1e-300)
  mean = grads.mean(0)
  target = bandits.weights[:, None] * slope
  noise = grads.var(0, ddof=1).sum()
  signal = (mean**2).sum() - noise / len(grads)
  return Measured(
    along.mean(0),
    error(along),
    sideways.max(-1),
    float((mean * target).sum() / np.sqrt((mean**2).sum() * (target**2).sum())),
    float(noise / signal),
    drawn / np.maximum(opened, 1),
  )


def uniform_weight(advantage: str, p: float, n: int) -> float:
  """w of uniform groups of n, by enumeration of k ~ Binomial(n, p).

  E[sum_j A_j (r_j / p - (1 - r_j) / (1 - p))] / n; rloo gives 1, dr_grpo
  (n - 1) / n. The factor n / 8 of prompts that are larger is not in it.
  """
  from vigor_jax.allocation.prediction import binomial_table
  from vigor_jax.policy import advantages

  total = 0.0
  for k, chance in enumerate(binomial_table(n, [p])[0]):
    rewards = (np.arange(n) < k).astype(float)
    a = advantages.compute(advantage, rewards, np.zeros(n, np.int64))
    score = rewards / p - (1 - rewards) / (1 - p)
    total += chance * float(a @ score) / n
  return total
