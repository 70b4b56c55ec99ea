"""Counts of verdicts, pooled and laid out for EM.

Prompts that got the same verdicts are one row with a number. Kinds of prompts
share the likelihoods of their counts: with [kinds, counts] numbers an iteration
of EM is two small products for all kinds at once, and what it costs is the
number of NumPy's calls.
"""

from __future__ import annotations

import numpy as np


class Counts:
  """How many prompts of each kind got which verdicts.

  Attributes:
    n, k: float64 [counts], verdicts and successes.
    prompts: float64 [kinds, counts].
  """

  def __init__(self, rows, kinds: int | None = None):
    """Lays out the rows.

    Args:
      rows: float [m, 3 or 4], (n, k, kind if there are several, number of
        prompts), kinds whole numbers from 0; where equal counts are apart they
        are several.
      kinds: how many there are; default: up to the largest.
    """
    rows = np.asarray(rows, float)
    n, k, number = rows[:, 0], rows[:, 1], rows[:, -1]
    begins = np.ones(len(n), bool)
    begins[1:] = (n[1:] != n[:-1]) | (k[1:] != k[:-1])
    first = begins.nonzero()[0]
    column = begins.cumsum() - 1
    if rows.shape[1] > 3:
      kind = rows[:, 2].astype(np.int64)
      column += kind * len(first)
      kinds = int(kind.max(initial=0)) + 1 if kinds is None else kinds
    else:
      kinds = 1
    cells = np.bincount(column, number, kinds * len(first))
    self.prompts = cells.reshape(kinds, len(first))
    self.n, self.k = n[first], k[first]


def climb(counts: Counts, likelihood, mix, common, weights, iterations: int):
  """EM for kinds that learn from each other.

  Args:
    counts: of the prompts; a kind may have none.
    likelihood: float64 [counts, grid], each row up to a factor.
    mix, common: float [kinds, kinds + 1] and [grid]; distributions are mix @
      (prompts expected at each p, and `common` below them).
    weights: float [kinds, grid], distributions to begin with.
    iterations: of EM, at least 1.

  Returns:
    (prompts expected at each p, distributions): float64 [kinds, grid] both.
  """
  weights, across = weights.copy(), likelihood.T
  both = np.empty((len(weights) + 1, weights.shape[1]))
  own, both[-1] = both[:-1], common
  total = np.empty(counts.prompts.shape)
  for _ in range(iterations):
    np.dot(weights, across, out=total)
    np.divide(counts.prompts, total, out=total)
    np.dot(total, likelihood, out=own)
    own *= weights
    np.dot(mix, both, out=weights)
  return own, weights


# Makes one number of a row (n, k, kind): exact within distinct's limits.
_CODE = np.array([2.0**37, 2.0**20, 1.0])


def distinct(rows: np.ndarray, number=None) -> np.ndarray:
  """Distinct rows (n, k, kind), ascending, with their number: [rows, 4].

  Args:
    rows: float64 [rows, 3]; n up to 2**13, k a multiple of 2**-10, kinds whole
      and below 2**10.
    number: float64 [rows], prompts of each; default: one.
  """
  code = rows @ _CODE
  order = code.argsort()
  code = code.take(order)
  begins = np.ones(len(code) + 1, bool)  # And where the last one ends.
  np.not_equal(code[1:], code[:-1], out=begins[1:-1])
  first = begins.nonzero()[0]
  first, following = first[:-1], first[1:]
  result = np.empty((len(first), 4))
  result[:, :3] = rows.take(order.take(first), 0)
  if number is None:
    np.subtract(following, first, out=result[:, 3])
  elif len(first):
    np.add.reduceat(number.take(order), first, out=result[:, 3])
  return result
