"""Counts of verdicts of which some are wrong, and how many those are.

If a share q of the verdicts is turned round, success is seen with chance
p' = q + (1 - 2 q) p. q is estimated as the largest one that the counts do not
refute: p' lies in [q, 1 - q], and some prompts are nearly sure.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from vigor_jax.allocation import eb_widening
from vigor_jax.allocation.counts import Counts
from vigor_jax.allocation.eb_widening import GRID

NOISES = (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2)
# Log likelihood that the largest unrefuted noise may cost: a restriction that
# is true, and just so, costs each kind of prompt .25 +- .56.
SLACK = (0.25, 0.75)
# EM in stages, after each of which it may be seen that it has gone on for long
# enough. A step of length s multiplies the weights by what EM does to the power
# of s. EM creeps, so that one such step and s of EM end up at nearly the same;
# the short steps take out what the long ones overdo, and leave weights that sum
# to one. All stages together are as long as 60 steps of EM. To its end EM would
# judge otherwise in one training step of seven.
LEAP = (4, 1)
STAGES = ((1, 1, 2, 1, *LEAP), LEAP * 2, LEAP * 3, LEAP * 5)
# What the one behind may still catch up: at most this many times what it gained
# over the last stage, and this many times what it caught up meanwhile.
CATCHING_UP = (0.35, 1.25)


def likelihood(n, k, noise: float) -> np.ndarray:
  """Of n verdicts, k seen right, over GRID: float64 [m, 19], rows up to 1."""
  n, k = np.asarray(n, float), np.asarray(k, float)
  codes = eb_widening.codes(n, k)
  if codes is None:
    return _computed(n, k, noise)[0]
  return _table(noise)[0].take(codes, 0)


@functools.lru_cache(maxsize=16)
def _table(noise: float) -> tuple[np.ndarray, np.ndarray]:
  """`_computed` of all counts that are looked up, by code."""
  n, k = np.divmod(
    np.arange((eb_widening.TABULATED + 1) ** 2), eb_widening.TABULATED + 1
  )
  return _computed(np.maximum(n, k), k, noise)


def _computed(n, k, noise: float) -> tuple[np.ndarray, np.ndarray]:
  """`likelihood`, and the logarithm of what its rows were divided by: [m]."""
  right, wrong = _logs(noise)
  logs = k[:, None] * right
  logs += (n - k)[:, None] * wrong
  top = logs.max(1)
  logs -= top[:, None]
  return np.exp(logs, out=logs), top


@functools.lru_cache(maxsize=64)
def _logs(noise: float):
  """Logarithms of the chances that success and failure are seen, over GRID."""
  seen = noise + (1 - 2 * noise) * GRID
  return np.log(seen), np.log1p(-seen)


def evidence(rows, noise: float) -> float:
  """Largest log likelihood of counts under wrong verdicts with chance q.

  Args:
    rows: float [m, 3 or 4], (n, k, kind if there are several, number of
      prompts); kinds are whole numbers from 0. Every kind of prompt has a
      distribution of p of its own, by EM from a flat one.
    noise: q.
  """
  return _Climb(_Counts(rows), noise).after(len(STAGES) - 1)


class _Counts:
  """Counts of those kinds that have any.

  Attributes:
    prompts: float64 [kinds, counts], how many have them; no row is zero.
    share: the same as shares of their kind.
  """

  def __init__(self, rows):
    counts = Counts(rows)
    prompts = counts.prompts
    total = prompts.sum(1, keepdims=True)
    if not total.all():
      seen = total.ravel().nonzero()[0]
      prompts, total = prompts[seen], total[seen]
    self.prompts, self.share = prompts, prompts / total
    self._each = prompts.sum(0)
    self._n, self._k = counts.n, counts.k
    self._codes = eb_widening.codes(self._n, self._k)

  def likelihood(self, noise: float) -> tuple[np.ndarray, float]:
    """(That of the counts, [counts, 19], the log of what was divided out)."""
    if self._codes is None:
      like, top = _computed(self._n, self._k, noise)
    else:
      like, top = (table.take(self._codes, 0) for table in _table(noise))
    return like, float(self._each @ top)


class _Climb:
  """EM under one noise, as far as it was asked for."""

  def __init__(self, counts: _Counts, noise: float):
    self._counts = counts
    self._like, self._scale = counts.likelihood(noise)
    self._across = self._like.T
    kinds, grid = len(counts.prompts), len(GRID)
    self._weights = np.full((kinds, grid), 1 / grid)
    # What an iteration writes to, over and over.
    self._ratio = np.empty((kinds, grid))
    self._total = np.empty(counts.prompts.shape)
    self._found: list[float] = []

  def after(self, stage: int) -> float:
    """The log likelihood after stages 0 to `stage`."""
    weights, total, ratio = self._weights, self._total, self._ratio
    while len(self._found) <= stage:
      for length in STAGES[len(self._found)]:
        np.dot(weights, self._across, out=total)
        np.divide(self._counts.share, total, out=total)
        np.dot(total, self._like, out=ratio)
        while length > 1:
          ratio *= ratio
          length //= 2
        weights *= ratio
      np.dot(weights, self._across, out=total)
      np.log(total, out=total)
      self._found.append(
        float(np.vdot(self._counts.prompts, total)) + self._scale
      )
    return self._found[stage]


def estimate_noise(rows) -> float:
  """The largest q in NOISES that the counts do not refute.

  Verdicts with noise q are seen right with p' in [q, 1 - q], a restriction,
  so the likelihood falls with q; where no prompt is nearly sure, wrong verdicts
  cannot be told from medium difficulty, and the largest q is a bound only.

  Args:
    rows: float [m, 3 or 4], see `evidence`. A rule that spends by more than the
      verdicts must tell prompts apart by that: if it stops early at those that
      look hard, the counts of all together mislead.
  """
  counts = _Counts(rows)
  kinds = len(counts.prompts)
  slack = SLACK[0] * kinds + SLACK[1] * kinds**0.5
  none = _Climb(counts, 0.0)
  for last, noise in itertools.pairwise(NOISES):
    if _refuted(none, _Climb(counts, noise), slack):
      return last
  return NOISES[-1]


def _refuted(none: _Climb, some: _Climb, slack: float) -> bool:
  """Whether `some` gets less far than `none`, by more than `slack`.

  EM stops once that is all but certain: the one behind would have to catch up
  more than CATCHING_UP allows. Of 726 steps of seven recorded runs four were
  judged otherwise than by 60 steps of EM that stop when the one behind would
  have to gain what it gained over the last half of them.
  """
  before = None
  for stage in range(len(STAGES)):
    now = none.after(stage) - slack, some.after(stage)
    excess = now[0] - now[1]
    if before is not None:
      behind = 1 if excess > 0 else 0
      gain = now[behind] - before[behind]
      caught = gain - (now[1 - behind] - before[1 - behind])
      if abs(excess) >= max(CATCHING_UP[0] * gain, CATCHING_UP[1] * caught):
        break
    before = now
  return excess > 0
