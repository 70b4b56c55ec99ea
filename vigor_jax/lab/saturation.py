"""How many rollouts one prompt is worth, and whom two rollouts miss.

The leave-one-out gradient of a prompt with n rollouts,
g_n = 1/n sum_j n/(n-1) (r_j - mean) s_j, is the U-statistic with kernel
h = (r_1 - r_2)(s_1 - s_2) / 2 (Hoeffding 1948), hence exactly

  E|g_n|^2 = |grad|^2 + 4 (n - 2) / (n (n - 1)) z_1 + 2 / (n (n - 1)) z_2,
  z_1 = (M - |grad|^2) / 4,                 M = E[(r - mean)^2 |s|^2]
  z_2 = (M + Var(r) E|s|^2) / 2,

which b + w / (n - 1) fits closely. A step of B rollouts is B / n such prompts;
their mean has variance (n / B)(beta + E|g_n|^2 - |grad|^2), beta the spread of
gradients between prompts. With beta = b this is least at n* = 1 + sqrt(w / b).
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from vigor_jax.allocation.prediction import binomial_table
from vigor_jax.lab import learner
from vigor_jax.lab import world as world_lib


@dataclasses.dataclass(frozen=True)
class Moments:
  """Exact moments of one prompt at one policy.

  Attributes:
    mean, variance: of the reward.
    signal: |grad mean|^2.
    mixed: M = E[(r - mean)^2 |s|^2].
    fisher: E|s|^2.
  """

  mean: float
  variance: float
  signal: float
  mixed: float
  fisher: float

  def energy(self, n: int) -> float:
    """E|g_n|^2 of the leave-one-out gradient of n >= 2 rollouts."""
    z1 = (self.mixed - self.signal) / 4
    z2 = (self.mixed + self.variance * self.fisher) / 2
    return (
      self.signal + 4 * (n - 2) / (n * (n - 1)) * z1 + 2 / (n * (n - 1)) * z2
    )


def moments(policies: np.ndarray, graded: bool = False) -> Moments:
  """By enumeration of all arms: policies [d, ARMS], one row per step."""
  d, arms = policies.shape
  choices = np.array(list(itertools.product(range(arms), repeat=d)))
  chance = policies[np.arange(d), choices].prod(1)
  right = choices == 0
  reward = right.mean(1) if graded else right.all(1).astype(float)
  score = np.eye(arms)[choices] - policies  # [arms^d, d, ARMS]
  mean = chance @ reward
  square = (score**2).sum((1, 2))
  slope = np.einsum("y,y,yda->da", chance, reward, score)
  return Moments(
    float(mean),
    float(chance @ (reward - mean) ** 2),
    float((slope**2).sum()),
    float(chance @ ((reward - mean) ** 2 * square)),
    float(chance @ square),
  )


SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclasses.dataclass(frozen=True)
class Saturation:
  """Fit of E|g_n|^2 by b + w / (n - 1), and the best group size.

  Attributes:
    b, w: least squares on log scale over SIZES.
    fit_error: largest relative error of the fit.
    best: n* = 1 + sqrt(w / b).
    exact: argmin over n of n E|g_n|^2.
  """

  b: float
  w: float
  fit_error: float
  best: float
  exact: int


def saturation(prompts: list[Moments], weights=None) -> Saturation:
  """Saturation of prompts taken together, weights [len(prompts)]."""
  weights = np.ones(len(prompts)) if weights is None else np.asarray(weights)
  weights = weights / weights.sum()
  mean = lambda n: float(weights @ [m.energy(n) for m in prompts])
  energy = np.array([mean(n) for n in SIZES])
  x = 1 / (np.array(SIZES) - 1.0)
  design = np.stack([np.ones(len(x)), x], axis=1) / energy[:, None]
  b, w = np.linalg.lstsq(design, np.ones(len(x)), rcond=None)[0]
  sizes = np.arange(2, 65)
  cost = [n * mean(n) for n in sizes]
  return Saturation(
    float(b),
    float(w),
    float(np.abs(design @ [b, w] - 1).max()),
    float(1 + np.sqrt(w / b)),
    int(sizes[np.argmin(cost)]),
  )


def chain_moments(world, seed: int, count: int = 200) -> list[Moments]:
  """Prompts of a world's stream at the start of training."""
  policy = learner.softmax(world.initial(seed))
  chains = world_lib.Stream(world, seed).peek(count).chains
  graded = world.reward == "graded"
  return [
    moments(policy[chain[chain < world.skills]], graded) for chain in chains
  ]


@dataclasses.dataclass(frozen=True)
class Missed:
  """The paper's false negatives: prompts that left after the first round.

  Attributes:
    dropped: share of the prompts that left with m0 rollouts.
    mixed: of these, share that 8 fresh rollouts would find mixed.
    high: share whose 8 fresh rollouts have variance of at least 3/16 (2 to 6
      of 8 right).
    of_all_high: of all high-variance prompts, the share that was dropped.
  """

  dropped: float
  mixed: float
  high: float
  of_all_high: float


def false_negatives(
  world, rule: learner.Rule, *, runs: int = 32, steps: int = 10
) -> Missed:
  """By playing the rule on the warm start; re-measurement is exact in p."""
  seeds = np.arange(runs)
  rules = [rule.make(int(s)) for s in seeds]
  streams = [world_lib.Stream(world, int(s)) for s in seeds]
  policy = learner.softmax(np.stack([world.initial(int(s)) for s in seeds]))
  table, dropped = [], []
  for step in range(steps):
    rollouts, groups = learner.collect(
      world, policy, rules, streams, step, seeds
    )
    first = rollouts.sample == 0
    p = learner.success(world, policy, rollouts.run, rollouts.chains)
    count = np.array(
      [groups[r].counts[g] for r, g in zip(rollouts.run, rollouts.group)]
    )
    table.append(p[first])
    dropped.append(count[first] == count.min())
  p, dropped = np.concatenate(table), np.concatenate(dropped)
  k = binomial_table(8, np.clip(p, 1e-12, 1 - 1e-12))
  mixed, high = k[:, 1:8].sum(1), k[:, 2:7].sum(1)
  return Missed(
    float(dropped.mean()),
    float(mixed[dropped].mean()),
    float(high[dropped].mean()),
    float(high[dropped].sum() / high.sum()),
  )
