"""Counts of verdicts of which some are wrong, and how many those are.

If a share q of the verdicts is turned round, success is seen with chance
p' = q + (1 - 2 q) p. q is estimated as the largest one that the counts do not
refute: p' lies in [q, 1 - q], and some prompts are nearly sure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
import itertools

import numpy as np

from vigor_jax.allocation import eb_widening
from vigor_jax.allocation.eb_widening import GRID
from vigor_jax.allocation.mixtures import Mixtures

NOISES = (0.0, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2)
# Log likelihood that the largest unrefuted noise may cost: a restriction that
# is true, and just so, costs each kind of prompt .25 +- .56.
SLACK = (0.25, 0.75)
# Iterations of EM, and after which of them to see whether it has gone on for
# long enough.
ITERATIONS = (4, 8, 16, 32, 60)


def likelihood(n, k, noise: float) -> np.ndarray:
  """Of n verdicts, k seen right, over GRID: float64 [m, 19], rows up to 1."""
  return _likelihood(np.asarray(n, float), np.asarray(k, float), noise)[0]


def _likelihood(n, k, noise: float) -> tuple[np.ndarray, np.ndarray]:
  """`likelihood`, and the logarithm of what its rows were divided by: [m]."""
  codes = eb_widening.codes(n, k)
  if codes is None:
    return _computed(n, k, noise)
  rows, top = _table(noise)
  return rows.take(codes, 0), top.take(codes)


@functools.lru_cache(maxsize=16)
def _table(noise: float) -> tuple[np.ndarray, np.ndarray]:
  """`_computed` of all counts that are looked up, by code."""
  n, k = np.divmod(
    np.arange((eb_widening.TABULATED + 1) ** 2), eb_widening.TABULATED + 1
  )
  return _computed(np.maximum(n, k), k, noise)


def _computed(n, k, noise: float) -> tuple[np.ndarray, np.ndarray]:
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
      prompts); every kind of prompt has a distribution of p of its own, by EM
      from a flat one.
    noise: q.
  """
  *_, (found,) = _climb(rows, (noise,))
  return float(found)


def _climb(rows, noises: Sequence[float]) -> Iterator[np.ndarray]:
  """The log likelihood under each noise after ITERATIONS of EM: float64 [q].

  All at once, since an iteration costs what the calls cost.
  """
  n, k, number = rows.T[[0, 1, -1]]
  kinds, kind = _kinds(rows)
  found = [_likelihood(n, k, noise) for noise in noises]
  mixtures = Mixtures(
    np.concatenate([like for like, _ in found]),
    (np.arange(len(noises))[:, None] * kinds + kind).ravel(),
    np.tile(number, len(noises)),
    kinds * len(noises),
  )
  scale = np.array([number @ top for _, top in found])
  weights = np.full((kinds * len(noises), len(GRID)), 1 / len(GRID))
  done = 0
  for iterations in ITERATIONS:
    weights = mixtures.climb(weights, iterations - done)
    done = iterations
    like = mixtures.log_likelihood(weights)
    yield like.reshape(-1, kinds).sum(1) + scale


def _kinds(rows) -> tuple[int, np.ndarray]:
  """(How many kinds of prompts there are, each row's number among them)."""
  if rows.shape[1] < 4:
    return 1, np.zeros(len(rows), np.int64)
  kinds, index = np.unique(rows[:, 2], return_inverse=True)
  return len(kinds), index.reshape(-1)


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
  kinds = _kinds(rows)[0]
  slack = SLACK[0] * kinds + SLACK[1] * kinds**0.5
  for last, noise in itertools.pairwise(NOISES):
    if _refuted(rows, noise, slack):
      return last
  return NOISES[-1]


def _refuted(rows, noise: float, slack: float) -> bool:
  """Whether `evidence` is smaller by more than `slack` than without noise.

  EM stops once that is all but certain: the one behind would have to gain more
  than it did over the last half of the iterations so far. Of 540 steps of three
  recorded runs none was judged otherwise than by all iterations.
  """
  before, excess = None, 0.0
  for now in _climb(rows, (0.0, noise)):
    none, some = now
    excess = none - slack - some
    if before is not None:
      gains = now - before
      # Only what the one behind still gains can turn that round, and EM gains
      # less and less.
      if abs(excess) >= (gains[1] if excess > 0 else gains[0]):
        break
    before = now
  return excess > 0
