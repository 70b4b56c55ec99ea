"""Packed rows of a few static lengths, for rollouts of very unequal length.

Attention of a row costs its length squared, and the longest rollout decides
how long rows must be. With shorter rows beside them (`policy.row_buckets`)
rollouts that fit are packed there:

    micro-batch of bucket k   [rows * longest / length_k, length_k]

All hold as many tokens, so they cost the same but for attention, and no more
memory. The count of micro-batches comes first: rows move to shorter ones only
where that needs no more micro-batches than one length does.

NumPy only. What lies in a row is packing's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vigor_jax.policy import packing
from vigor_jax.policy.packing import Layout

# Numbers of micro-batches of a bucket that are tried, at most about twice.
_TRIES = 8


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Static shapes of an update's micro-batches, the shortest rows first.

  Attributes:
    lengths: tokens of a row, by bucket.
    rows: rows of a micro-batch, by bucket.
  """

  lengths: tuple[int, ...]
  rows: tuple[int, ...]

  def micro_batches(self, rollouts: int) -> tuple[tuple[int, int, int], ...]:
    """[M, R, T] by bucket; M always suffices: each row holds a rollout."""
    return tuple((-(-rollouts // rows), rows, length)
                 for rows, length in zip(self.rows, self.lengths))


def shapes(row_length: int, rows_per_micro: int, shorter: Sequence[int] = ()
           ) -> Shapes:
  """Rows of `row_length`, and shorter ones that it is a multiple of.

  Args:
    rows_per_micro: of the longest.
    shorter: ascending.
  """
  lengths = (*shorter, row_length)
  return Shapes(lengths, tuple(
      rows_per_micro * (row_length // length) for length in lengths))


def misfit(row_length: int, shorter: Sequence[int]) -> str | None:
  """Why rows of these lengths cannot stand beside row_length; None: can."""
  shorter = tuple(shorter)
  if list(shorter) == sorted(set(shorter)) and all(
      1 < n < row_length and row_length % n == 0 for n in shorter):
    return None
  legal = [n for n in range(2, row_length) if row_length % n == 0]
  return (f"{shorter} are not ascending, shorter than "
          f"policy.row_length={row_length} and divisors of it; legal: () or "
          f"some of {', '.join(map(str, legal)) or 'none'}")


def plan(group: np.ndarray, lengths: np.ndarray, prompt_lengths: np.ndarray,
         shapes: Shapes) -> list[tuple[np.ndarray, Layout]]:
  """(rollouts, their layout) of each bucket.

  Args:
    group: int [N] group of each rollout, indexing prompt_lengths.
    lengths: int [N] completion lengths, >= 1.
    prompt_lengths: int [G].

  Raises:
    ValueError: a prompt and its completion do not fit the longest row.
  """
  return _Planner(group, lengths, prompt_lengths, shapes).run()


def pack(group: np.ndarray, prompts: Sequence[np.ndarray],
         tokens: np.ndarray, lengths: np.ndarray, advantages: np.ndarray,
         weights: np.ndarray, sampler_logprobs: np.ndarray, *,
         shapes: Shapes, rollouts: int
         ) -> tuple[packing.Rows, int | tuple[int, ...]]:
  """`packing.pack` into rows of several lengths.

  Args:
    rollouts: the most that there may be; with `shapes` it decides what
      shapes the arrays have.

  Returns:
    (micro-batches, how many are in use) of each bucket, as two tuples; of one
    bucket its own.
  """
  prompt_lengths = np.array([len(p) for p in prompts], np.int64)
  each = [
      packing.filled(layout, group[at], prompts, tokens[at], lengths[at],
                     advantages[at], weights[at], sampler_logprobs[at], shape)
      for (at, layout), shape in zip(
          plan(group, lengths, prompt_lengths, shapes),
          shapes.micro_batches(rollouts))]
  packed, used = zip(*each)
  return packing.joined(packed), packing.joined(used)


class _Planner:
  """Moves rows to shorter buckets, a whole number of micro-batches at a time.

  What stays of a bucket are full micro-batches, but for the shortest one in
  use. Among rows that may move, those with the longest rollouts and prompts
  stay: they leave most of a short row empty.
  """

  def __init__(self, group, lengths, prompt_lengths, shapes: Shapes):
    self._group, self._lengths = group, lengths
    self._prompts, self._shapes = prompt_lengths, shapes

  def run(self) -> list[tuple[np.ndarray, Layout]]:
    top = len(self._shapes.lengths) - 1
    everything = np.arange(len(self._group))
    return self._down(everything, self._layout(everything, top), top)

  def _layout(self, members: np.ndarray, bucket: int) -> Layout:
    return packing.plan(self._group[members], self._lengths[members],
                        self._prompts, self._shapes.lengths[bucket])

  def _micro(self, layout: Layout, bucket: int) -> int:
    return -(-layout.rows // self._shapes.rows[bucket])

  def _down(self, members, layout: Layout, bucket: int
            ) -> list[tuple[np.ndarray, Layout]]:
    """`members` over this bucket and shorter ones, the shortest first."""
    if not bucket:
      return [(members, layout)]
    micro, rows = self._micro(layout, bucket), self._shapes.rows[bucket]
    rank, least = self._rank(members, layout, bucket)
    least = -(-least // rows)
    for stay in range(least, micro, max(1, (micro - least) // _TRIES)):
      moved = members[rank[layout.row] >= stay * rows]
      below = self._layout(moved, bucket - 1)
      if stay + self._micro(below, bucket - 1) <= micro:
        kept = rank[layout.row] < stay * rows
        return [*self._down(moved, below, bucket - 1),
                (members[kept], _kept(layout, rank, stay * rows))]
    nothing = members[:0]
    return [*((nothing, self._layout(nothing, k)) for k in range(bucket)),
            (members, layout)]

  def _rank(self, members, layout: Layout, bucket: int
            ) -> tuple[np.ndarray, int]:
    """(rank of each row, the last may move first; how many may not)."""
    need = self._prompts[self._group[members]] + self._lengths[members]
    most, prompts = np.zeros((2, layout.rows), np.int64)
    np.maximum.at(most, layout.row, need)
    np.add.at(prompts, layout.copy_row, self._prompts[layout.copy_group])
    must = most > self._shapes.lengths[bucket - 1]
    rank = np.empty(layout.rows, np.int64)
    rank[np.lexsort((-most - prompts, ~must))] = np.arange(layout.rows)
    return rank, np.count_nonzero(must)


def _kept(layout: Layout, rank: np.ndarray, rows: int) -> Layout:
  """The `rows` rows of a layout that rank first, in this order."""
  mine, copies = rank[layout.row] < rows, rank[layout.copy_row] < rows
  renumbered = np.cumsum(copies) - 1
  return Layout(
      row=rank[layout.row[mine]], start=layout.start[mine],
      segment=layout.segment[mine], copy=renumbered[layout.copy[mine]],
      copy_group=layout.copy_group[copies],
      copy_row=rank[layout.copy_row[copies]],
      copy_start=layout.copy_start[copies],
      copy_number=layout.copy_number[copies], rows=rows)
