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
    at = kind[order], place
    self._likelihood = np.ones((*shape, likelihood.shape[1]))
    self._likelihood[at] = likelihood[order]
    self._across = np.ascontiguousarray(self._likelihood.swapaxes(1, 2))
    self._number = np.zeros((*shape, 1))
    self._number[at] = number[order, None]
    self.number = self._number.sum((1, 2))

  def expected(self, weights) -> np.ndarray:
    """Prompts at each p, given their counts: float64 [kinds, grid].

    weights: float [kinds, grid], each kind's distribution.
    """
    total = self._likelihood @ weights[..., None]
    return weights * (self._across @ (self._number / total))[..., 0]

  def log_likelihood(self, weights) -> float:
    """Of all counts, up to what `likelihood` left out.

    weights: float [kinds, grid], each kind's distribution.
    """
    total = self._likelihood @ weights[..., None]
    return float((self._number * np.log(total)).sum())


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
