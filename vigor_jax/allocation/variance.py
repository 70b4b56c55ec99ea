"""Estimators of a group's reward variance from n, sum r and sum r^2."""

from __future__ import annotations

import numpy as np

# Groups below this variance count as agreeing. Two rewards that differ by
# 1e-5 have 2.5e-11; rounding of equal rewards stays below 1e-12.
ZERO_TOLERANCE = 1e-12

KINDS = ("plugin", "unbiased", "beta")


def plugin(n, reward_sum, reward_sq) -> np.ndarray:
  """Population variance (ddof 0), u = (n sum r^2 - (sum r)^2) / n^2.

  In this form the variance of 0/1 rewards is exact and symmetric in k and
  n - k, so ties are ties. 0 where n < 2.
  """
  n = np.asarray(n, np.float64)
  spread = n * reward_sq - np.square(reward_sum)
  return np.maximum(spread, 0.0) / np.square(np.maximum(n, 1.0))


def unbiased(n, reward_sum, reward_sq) -> np.ndarray:
  """Sample variance (ddof 1), n / (n - 1) times the plug-in; 0 where n < 2."""
  n = np.asarray(n, np.float64)
  scale = np.where(n > 1, n / np.maximum(n - 1.0, 1.0), 0.0)
  return scale * plugin(n, reward_sum, reward_sq)


def beta_posterior(n, reward_sum, reward_sq=None, a0=1.0, b0=1.0) -> np.ndarray:
  """E[p (1 - p)] under Beta(a0 + sum r, b0 + n - sum r).

  ab / ((a + b)(a + b + 1)), as in CERO (arXiv 2606.05606). Graded rewards
  enter as fractional successes.
  """
  del reward_sq
  a = a0 + np.asarray(reward_sum, np.float64)
  b = b0 + np.asarray(n, np.float64) - reward_sum
  return a * b / ((a + b) * (a + b + 1.0))


def estimate(kind: str, n, reward_sum, reward_sq) -> np.ndarray:
  """Dispatches on kind: plugin | unbiased | beta."""
  functions = {
    "plugin": plugin,
    "unbiased": unbiased,
    "beta": beta_posterior,
  }
  if kind not in functions:
    raise ValueError(f"variance {kind=} must be one of {', '.join(KINDS)}")
  return functions[kind](n, reward_sum, reward_sq)
