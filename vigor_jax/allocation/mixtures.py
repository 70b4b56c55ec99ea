"""Distributions of p over a grid, one for each kind of prompt, by EM.

Counts of a kind are laid side by side and padded, so that an iteration is two
products for all kinds at once: the tables are small, and what an iteration
costs is the number of NumPy's calls.
"""

from __future__ import annotations

import numpy as np


class Mixtures:
  """Counts of prompts by kind, ready for EM."""

  def __init__(self, likelihood, kind, number, kinds: int):
    """Lays out the rows.

    Args:
      likelihood: float [rows, grid], of what was seen, given p; each row up to
        a factor.
      kind: int [rows], below `kinds`.
      number: float [rows], prompts with that outcome.
      kinds: how many there are; a kind may have no row.
    """
    order = kind.argsort(kind="stable")
    size = np.bincount(kind, minlength=kinds)
    width = max(int(size.max(initial=0)), 1)
    # Where rows go: from the multiples of `width`, kind by kind.
    shift = np.arange(0, kinds * width, width) - size.cumsum() + size
    at = shift.repeat(size) + np.arange(len(kind))
    grid = likelihood.shape[1]
    laid = np.ones((kinds * width, grid))
    laid[at] = likelihood.take(order, 0)
    self._likelihood = laid.reshape(kinds, width, grid)
    self._across = np.ascontiguousarray(self._likelihood.swapaxes(1, 2))
    laid = np.zeros(kinds * width)
    laid[at] = number.take(order)
    self._number = laid.reshape(kinds, 1, width)
    # What an iteration writes to, over and over.
    self._total = np.empty((kinds, 1, width))
    self._ratio = np.empty((kinds, 1, grid))
    self._flat = self._ratio[:, 0]

  def expected(self, weights) -> np.ndarray:
    """Prompts at each p, given their counts: float64 [kinds, grid].

    weights: float [kinds, grid], each kind's distribution.
    """
    return weights * self._ratios(weights[:, None], self._number)

  def climb(self, weights, iterations: int, mix, common):
    """EM from `weights`, with kinds that learn from each other: [kinds, grid].

    Args:
      weights: float [kinds, grid].
      iterations: of EM.
      mix, common: float [kinds, kinds + 1] and [grid]; distributions are mix @
        (`expected`, and `common` below it).
    """
    weights = weights.copy()
    row = weights[:, None]
    below = np.empty((len(weights) + 1, weights.shape[1]))
    own, below[-1] = below[:-1], common
    for _ in range(iterations):
      np.multiply(weights, self._ratios(row, self._number), out=own)
      np.dot(mix, below, out=weights)
    return weights

  def _ratios(self, row, share) -> np.ndarray:
    """How much likelier than on average the counts are at each p.

    row: float [kinds, 1, grid]; share: float [kinds, 1, rows].
    """
    np.matmul(row, self._across, out=self._total)
    np.divide(share, self._total, out=self._total)
    np.matmul(self._total, self._likelihood, out=self._ratio)
    return self._flat


# Makes one number of a row (n, k, kind): exact within distinct's limits.
CODE = np.array([2.0**37, 2.0**20, 1.0])


def distinct(rows: np.ndarray, number=None) -> np.ndarray:
  """Distinct rows (n, k, kind), ascending, with their number: [rows, 4].

  Args:
    rows: float64 [rows, 3]; n up to 2**13, k a multiple of 2**-10, kinds whole
      and below 2**10.
    number: float64 [rows], prompts of each; default: one.
  """
  code = rows @ CODE
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
