"""Random numbers that are looked up by address, not carried along."""

from __future__ import annotations

import itertools
import threading

import numpy as np

APART = 256  # a gap of positions that costs more than a new address
_THREAD = threading.local()  # its Philox: a new one costs more than the numbers


def addressed_uniform(
  seed: int, step: int, round_index, positions, purpose: int = 0
) -> np.ndarray:
  """Uniform [0, 1) numbers, one per stream position, by address.

  NumPy's Philox is counter based, so a number can be looked up instead of
  carried: key = (seed, step), counter = (position, round, purpose, 0), first
  word of the block. The same address gives the same number on every host.

  Args:
    seed: non-negative int.
    step: non-negative int.
    round_index: non-negative int, or an ascending range of R of them.
    positions: int [k], non-negative positions in the prompt stream.
    purpose: keeps different uses at one address apart.

  Returns:
    float64 [k], or [R, k] for a range.
  """
  positions = np.asarray(positions, np.int64)
  many = isinstance(round_index, range)
  rounds = round_index if many else range(round_index, round_index + 1)
  if not positions.size or not rounds:
    return np.zeros((len(rounds), positions.size) if many else positions.size)
  key = np.array([seed, step], np.uint64)

  def blocks(first: int, count: int) -> np.ndarray:
    """First words of the blocks at `count` positions, per round: [R, count]."""
    philox = _philox(key, [first, rounds[0], purpose, 0])
    words = np.empty((len(rounds), count), np.uint64)
    for i in range(len(rounds)):
      if i:  # One round on is the counter's second word.
        philox.advance((rounds.step << 64) - count)
      words[i] = philox.random_raw(4 * count)[::4]
    return words

  # One generator for neighbours: most positions of a step lie close.
  order = np.argsort(positions, kind="stable")
  inner = positions[order]
  words = np.empty((len(rounds), len(inner)), np.uint64)
  edges = np.flatnonzero(np.diff(inner) > APART) + 1
  for start, end in itertools.pairwise([0, *edges.tolist(), len(inner)]):
    low, high = int(inner[start]), int(inner[end - 1])
    found = blocks(low, high - low + 1)
    words[:, order[start:end]] = found[:, inner[start:end] - low]
  result = (words >> np.uint64(11)) * 2.0**-53
  return result if many else result[0]


def _philox(key: np.ndarray, counter: list[int]) -> np.random.Philox:
  """This thread's generator, as new at an address."""
  if not hasattr(_THREAD, "philox"):
    _THREAD.philox = np.random.Philox(0)
  _THREAD.philox.state = {
    "bit_generator": "Philox",
    "state": {"counter": np.array(counter, np.uint64), "key": key},
    "buffer": np.zeros(4, np.uint64),
    "buffer_pos": 4,  # used up
    "has_uint32": 0,
    "uinteger": 0,
  }
  return _THREAD.philox
