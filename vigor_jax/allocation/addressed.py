"""Random numbers that are looked up by address, not carried along."""

from __future__ import annotations

import numpy as np


def addressed_uniform(
  seed: int, step: int, round_index: int, positions, purpose: int = 0
) -> np.ndarray:
  """Uniform [0, 1) numbers, one per stream position, by address.

  NumPy's Philox is counter based, so a number can be looked up instead of
  carried: key = (seed, step), counter = (position, round, purpose, 0), first
  word of the block. The same address gives the same number on every host.

  Args:
    seed: non-negative int.
    step: non-negative int.
    round_index: non-negative int.
    positions: int [k], non-negative positions in the prompt stream.
    purpose: keeps different uses at one address apart.

  Returns:
    float64 [k].
  """
  positions = np.asarray(positions, np.int64)
  if not positions.size:
    return np.zeros(0)
  key = np.array([seed, step], np.uint64)

  def blocks(first: int, count: int) -> np.ndarray:
    counter = np.array([first, round_index, purpose, 0], np.uint64)
    philox = np.random.Philox(key=key, counter=counter)
    return philox.random_raw(4 * count)[::4]

  low, high = int(positions.min()), int(positions.max())
  if high - low < 16 * positions.size + 1024:
    # One generator for the whole range: positions of a step lie close.
    words = blocks(low, high - low + 1)[positions - low]
  else:
    words = np.array([blocks(int(p), 1)[0] for p in positions], np.uint64)
  return (words >> np.uint64(11)) * 2.0**-53
