"""Distributions of p over a grid, one for each kind of prompt, by EM.

Counts of a kind are laid side by side and padded, so that an iteration is two
products for all kinds at once: the tables are small, and what an iteration
costs is the number of NumPy's calls.
"""

from __future__ import annotations

import numpy as np


class Mixtures:
  """Counts of prompts by kind, ready for EM.

  Attributes:
    number: float64 [kinds], prompts of each.
  """

  def __init__(self, likelihood, kind, number, kinds: int):
    """Lays out the rows.

    Args:
      likelihood: float [rows, grid], of what was seen, given p; each row up to
        a factor.
      kind: int [rows], below `kinds`.
      number: float [rows], prompts with that outcome.
      kinds: how many there are; a kind may have no row.
    """
    order = np.argsort(kind, kind="stable")
    size = np.bincount(kind, minlength=kinds)
    place = np.arange(len(kind)) - np.repeat(np.cumsum(size) - size, size)
    shape = (kinds, max(int(size.max(initial=0)), 1))
    grid = likelihood.shape[1]
    at = kind[order], place
    self._likelihood = np.ones((*shape, grid))
    self._likelihood[at] = likelihood[order]
    self._across = np.ascontiguousarray(self._likelihood.swapaxes(1, 2))
    self._number = np.zeros((kinds, 1, shape[1]))
    self._number[at[0], 0, place] = number[order]
    self.number = self._number.sum((1, 2))
    # What an iteration writes to, over and over.
    self._total = np.empty_like(self._number)
    self._ratio = np.empty((kinds, 1, grid))
    self._flat = self._ratio[:, 0]

  def expected(self, weights) -> np.ndarray:
    """Prompts at each p, given their counts: float64 [kinds, grid].

    weights: float [kinds, grid], each kind's distribution.
    """
    return weights * self._ratios(weights[:, None], self._number)

  def climb(self, weights, iterations: int, mix=None, common=None):
    """EM from `weights`, for kinds all of which have a row: [kinds, grid].

    Args:
      weights: float [kinds, grid].
      iterations: of EM.
      mix, common: float [kinds, kinds + 1] and [grid]; distributions are mix @
        (`expected`, and `common` below it). Default: each kind's own.
    """
    weights = weights.copy()
    row, share = weights[:, None], self._number
    if mix is None:
      share = share / self.number[:, None, None]
      for _ in range(iterations):
        np.multiply(weights, self._ratios(row, share), out=weights)
      return weights
    below = np.empty((len(weights) + 1, weights.shape[1]))
    own, below[-1] = below[:-1], common
    for _ in range(iterations):
      np.multiply(weights, self._ratios(row, share), out=own)
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

  def log_likelihood(self, weights) -> np.ndarray:
    """Of each kind's counts, up to what `likelihood` left out: float64 [kinds].

    weights: float [kinds, grid], each kind's distribution.
    """
    total = weights[:, None] @ self._across
    return (self._number * np.log(total)).sum((1, 2))


def distinct(rows: np.ndarray, number=None) -> np.ndarray:
  """Distinct rows (n, k, kind), ascending, with their number: [rows, 4].

  Args:
    rows: float64 [rows, 3]; n up to 2**13, k a multiple of 2**-10, kinds whole
      and below 2**10.
    number: float64 [rows], prompts of each; default: one.
  """
  code = (rows[:, 0] * 2.0**17 + rows[:, 1]) * 2.0**20  # One number for a row.
  code += rows[:, 2]
  order = code.argsort()
  code = code[order]
  begins = np.ones(len(code), bool)
  np.not_equal(code[1:], code[:-1], out=begins[1:])
  first = begins.nonzero()[0]
  result = np.empty((len(first), 4))
  result[:, :3] = rows[order[first]]
  each = np.ones(len(code)) if number is None else number[order]
  if len(first):
    result[:, 3] = np.add.reduceat(each, first)
  return result
