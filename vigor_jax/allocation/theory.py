"""Closed forms: VIGOR's Theorem 2, the Pareto fit it rests on, Monte Carlo.

Derivations and caveats stand in docs/theory.md. `prediction.py` has the
finite-sample prediction, which needs none of the assumptions made here.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

MAX_THRESHOLDS = 100  # tried by fit_pareto


def variance_gain(
  tail_index: float, rounds: int, keep: float = 0.5, growth: float = 2.0
) -> float:
  """Theorem 2 of VIGOR (arXiv 2607.22002): variance per rollout, over GRPO's.

    eta = sum_{i<T} (gamma alpha^(1 - 1/k))^i / sum_{i<T} (alpha gamma)^i

  for prompt variances u ~ Pareto(k, u_min) ranked without noise. It is the
  ratio of the two policies' sum n u / sum n.

  Args:
    tail_index: k > 1; inf is allowed and gives 1.
    rounds: T.
    keep: alpha.
    growth: gamma.

  Raises:
    ValueError: for k <= 1, where the mean variance does not exist.
  """
  if not tail_index > 1:
    raise ValueError(
      f"{tail_index=} must be above 1: a Pareto law has no mean below"
    )
  i = np.arange(rounds)
  carried = (growth * keep ** (1 - 1 / tail_index)) ** i
  return float(carried.sum() / ((keep * growth) ** i).sum())


def speedup(
  tail_index: float, rounds: int, keep: float = 0.5, growth: float = 2.0
) -> float:
  """eta^(1/3): the paper's bound on the ratio of times.

  It uses the lower bound Omega(Var^(-1/3)) on the time (Razin et al.) as if
  it were the time.
  """
  return variance_gain(tail_index, rounds, keep, growth) ** (1 / 3)


def monte_carlo_gain(
  tail_index: float,
  rounds: int,
  keep: float = 0.5,
  growth: float = 2.0,
  *,
  prompts: int = 4096,
  seed: int = 0,
) -> float:
  """`variance_gain` measured on drawn Pareto variances, ranked exactly.

  The weights (initial rollouts) cancel, so round i counts growth^i rollouts
  for each of the prompts * keep^i prompts it has.
  """
  rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
  u = np.sort((1 - rng.random(prompts)) ** (-1 / tail_index))[::-1]
  active = [round(prompts * keep**i) for i in range(rounds)]
  per_prompt = [growth**i for i in range(rounds)]
  carried = sum(m * u[:a].sum() for a, m in zip(active, per_prompt))
  rollouts = sum(m * a for a, m in zip(active, per_prompt))
  return float(carried / rollouts / u.mean())


@dataclasses.dataclass(frozen=True)
class ParetoFit:
  """A Pareto law fitted to the upper tail of prompt variances.

  Attributes:
    tail_index: Hill's estimate k.
    u_min: where the tail starts.
    tail_share: share of the distribution at or above u_min.
    ks: Kolmogorov-Smirnov distance of the tail to the fit, 0 to 1.
    hill_low, hill_high: Hill's estimate with the threshold at the 25th and at
      the 75th percentile of the positive variances. They agree on a Pareto
      law and drift apart on anything else.
  """

  tail_index: float
  u_min: float
  tail_share: float
  ks: float
  hill_low: float
  hill_high: float

  @property
  def describes(self) -> bool:
    """Whether Theorem 2 may be applied: k > 1 and a close fit (ks < .1)."""
    return self.tail_index > 1 and self.ks < 0.1


def hill(values, weights, u_min: float) -> float:
  """Hill's estimate k = sum w / sum w log(u / u_min) over u >= u_min.

  inf when everything lies at u_min.
  """
  values = np.asarray(values, np.float64)
  inside = values >= u_min
  excess = weights[inside] @ np.log(values[inside] / u_min)
  return float(weights[inside].sum() / excess) if excess > 0 else math.inf


def fit_pareto(values, weights=None, u_min: float | None = None) -> ParetoFit:
  """Fits Pareto(k, u_min) to positive prompt variances.

  Args:
    values: float [m], variances of prompts (deconvolved, not from raw k/n).
    weights: float [m], their shares; equal if None.
    u_min: threshold; None takes the one with the smallest KS distance that
      keeps at least a tenth of the positive values (Clauset et al. 2009).

  Raises:
    ValueError: if no value is positive.
  """
  values = np.asarray(values, np.float64)
  weights = np.ones(len(values)) if weights is None else np.asarray(weights)
  all_mass = weights.sum()
  positive = (values > 0) & (weights > 0)
  if not positive.any():
    raise ValueError("a Pareto fit needs at least one positive variance")
  values, weights = values[positive], weights[positive] / all_mass
  order = np.argsort(values)
  values, weights = values[order], weights[order]
  upper = np.cumsum(weights[::-1])[::-1]  # mass at or above each value

  def distance(threshold: float) -> float:
    k = hill(values, weights, threshold)
    if not math.isfinite(k):
      return 1.0
    tail = values >= threshold
    model = (values[tail] / threshold) ** -k
    share = upper[tail] / upper[tail][0]
    below = np.append(share[1:], 0.0)
    return float(max(np.abs(model - share).max(), np.abs(model - below).max()))

  if u_min is None:
    candidates = np.unique(values[upper >= 0.1 * upper[0]])
    if len(candidates) > MAX_THRESHOLDS:
      spaced = np.linspace(0, len(candidates) - 1, MAX_THRESHOLDS)
      candidates = candidates[spaced.astype(int)]
    u_min = float(min(candidates, key=distance))
  quartiles = [
    float(values[np.searchsorted(-upper, -(1 - q) * upper[0], "right") - 1])
    for q in (0.25, 0.75)
  ]
  return ParetoFit(
    tail_index=hill(values, weights, u_min),
    u_min=u_min,
    tail_share=float(weights[values >= u_min].sum()),
    ks=distance(u_min),
    hill_low=hill(values, weights, quartiles[0]),
    hill_high=hill(values, weights, quartiles[1]),
  )
