"""Which features a linear prediction has to look at, when some repeat others.

Prompts' features often depend on each other: hashed counts of a few kinds of
tokens lie in a space of few dimensions. If z are the features of all prompts
and r the rank, there are r columns S and a matrix B with

  z = z_S B,   B = 1 in the columns S,

so that a logit z w is z_S u with u = B w. Nothing is lost: a prior N(0, s 1)
of w is N(0, s B B') of u. A regression on the columns S costs (r / D)^2 of one
on all of them, and the row of a prompt stays a selection of its features, with
the same bits whichever prompts it is computed with.

A prompt may bring something that none showed before. Then columns are added,
and what was learned of u is carried over (`Span.joined`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.linalg

# In deviations of a feature: what is left of a column by those already chosen,
# over all prompts, below which it is taken to repeat them; and what a prompt
# may have outside of the span (times the root of the number of features).
RANK = 1e-8
OUTSIDE = 1e-6
PROBES = 4


@dataclasses.dataclass
class Span:
  """Columns S and what the others are by them.

  Attributes:
    columns: int64 [r].
    basis: float64 [r, D], B.
  """

  columns: np.ndarray
  basis: np.ndarray

  def __post_init__(self):
    # z (1 - B on the columns S) is what lies outside: by a few random sums of
    # its columns it is seen at a small part of the price.
    size = self.basis.shape[1]
    self._probe = np.random.default_rng(0).standard_normal((size, PROBES))
    self._probe[self.columns] -= self.basis @ self._probe

  @classmethod
  def of(cls, z: np.ndarray) -> Span:
    """Of the rows z: float64 [k, D]."""
    columns, basis = _pivots(z)
    order = np.argsort(columns)
    return cls(columns[order], basis[order])

  def gram(self) -> np.ndarray:
    """B B', the covariance of u for independent w: float64 [r, r]."""
    return self.basis @ self.basis.T

  def outside(self, z: np.ndarray) -> np.ndarray:
    """bool [k]: rows of z, float64 [k, D], that the columns do not tell."""
    limit = OUTSIDE * z.shape[1] ** 0.5
    return (np.abs(z @ self._probe) > limit).any(1)

  def joined(self, z: np.ndarray) -> tuple[Span, np.ndarray]:
    """The span of these rows and of rows z.

    Args:
      z: float64 [k, D], some of them outside.

    Returns:
      (the new span, whose first r columns are those of this one; float64
      [r, r']: u, of prompts in the old span, for the new one's).
    """
    own = z[:, self.columns]
    rest = z - own @ self.basis
    rest[:, self.columns] = 0
    columns, basis = _pivots(rest)
    more = self.basis[:, columns]
    turn = np.concatenate([np.eye(len(self.columns)), more], axis=1)
    return (
      Span(
        np.concatenate([self.columns, columns]),
        np.concatenate([self.basis - more @ basis, basis]),
      ),
      turn,
    )

  def state_dict(self) -> dict:
    others = np.delete(self.basis, self.columns, axis=1)
    return {"columns": self.columns.tolist(), "basis": others.tolist()}

  @classmethod
  def from_state(cls, state: dict, size: int) -> Span:
    """What `state_dict` told of a span of `size` features."""
    columns = np.asarray(state["columns"], np.int64)
    basis = np.zeros((len(columns), size))
    basis[:, columns] = np.eye(len(columns))
    others = np.delete(np.arange(size), columns)
    basis[:, others] = np.reshape(state["basis"], (len(columns), len(others)))
    return cls(columns, basis)


def _pivots(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Columns that tell the others, and B: (int64 [r], float64 [r, D])."""
  r, order = scipy.linalg.qr(z, mode="r", pivoting=True)
  rank = int((np.abs(np.diag(r)) > RANK).sum())
  basis = np.zeros((rank, z.shape[1]))
  columns, others = order[:rank].astype(np.int64), order[rank:]
  basis[:, columns] = np.eye(rank)
  if rank:
    basis[:, others] = scipy.linalg.solve_triangular(
      r[:rank, :rank], r[:rank, rank:]
    )
  return columns, basis
