"""Packs rollouts of unequal length into rows of one static shape.

A row [T] holds one or more prompt copies, each followed by completions that
continue it. Completions of a group share their prompt copy: they see it and
themselves, never each other, so a prompt is computed once per row instead of
once per rollout, and padding is what is left at row ends.

    tokens     p p p a a a b b q q q q c c c c _ _
    prompt     1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 0 0   prompt copy in the row
    segment    0 0 0 1 1 1 2 2 0 0 0 0 3 3 3 3 0 0   rollout in the row
    positions  0 1 2 3 4 5 3 4 0 1 2 3 4 5 6 7 0 0
    source     . . . 2 3 4 2 6 . . . . b c d e . .   whose output predicts it

Rows never split a rollout, so sequence-level losses stay inside a row. NumPy
only; the attention rule is `packed_mask`.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, NamedTuple, Sequence

import numpy as np


class Packed(NamedTuple):
  """Micro-batches [M, R, T]; only the first `num_micro` hold anything."""

  tokens: np.ndarray  # int32
  positions: np.ndarray  # int32
  prompt: np.ndarray  # int32, 0 = padding
  segment: np.ndarray  # int32, 0 = not a completion token
  source: np.ndarray  # int32, index in the row that predicts this token
  advantages: np.ndarray  # float32
  weights: np.ndarray  # float32
  sampler_logprobs: np.ndarray  # float32


# Micro-batches of one row length, or of several: those of each.
Rows = Packed | tuple[Packed, ...]


def each(value: Any) -> tuple[Any, ...]:
  """What there is for each row length; one is not put into a tuple."""
  return value if type(value) is tuple else (value,)


def joined(parts: Sequence[Any]) -> Any:
  """The value that `each` takes apart."""
  return parts[0] if len(parts) == 1 else tuple(parts)


def scope(rows: Packed) -> str:
  """Name of the loop over micro-batches of this row length in programs."""
  return f"rows_of_{rows.tokens.shape[-1]}"


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where each rollout and prompt copy went.

  Attributes:
    row, start: int [N] of each rollout (row = global row index).
    segment: int [N] 1-based number of the rollout in its row.
    copy: int [N] which prompt copy it continues.
    copy_group, copy_row, copy_start, copy_number: int [C] prompt copies.
    rows: rows used.
  """

  row: np.ndarray
  start: np.ndarray
  segment: np.ndarray
  copy: np.ndarray
  copy_group: np.ndarray
  copy_row: np.ndarray
  copy_start: np.ndarray
  copy_number: np.ndarray
  rows: int


def plan(group: np.ndarray, lengths: np.ndarray, prompt_lengths: np.ndarray,
         row_length: int) -> Layout:
  """Best-fit decreasing over groups; one is cut where no row holds it whole.

  Args:
    group: int [N] group of each rollout, indexing prompt_lengths.
    lengths: int [N] completion lengths, >= 1.
    prompt_lengths: int [G].
    row_length: T.

  Raises:
    ValueError: a prompt and its completion do not fit in a row.
  """
  n = len(group)
  need = prompt_lengths[group] + lengths
  if n and need.max() > row_length:
    j = int(need.argmax())
    raise ValueError(
        f"rollout of group {group[j]} needs {need[j]} tokens, more than "
        f"policy.row_length={row_length}")
  order = np.lexsort((-lengths, group))
  bounds = np.flatnonzero(np.diff(group[order], prepend=-1, append=-1))
  sizes = prompt_lengths[group[order]]
  totals = np.add.reduceat(lengths[order], bounds[:-1]) if n else bounds[:-1]
  totals = totals + sizes[bounds[:-1]]
  # Python numbers from here on: the arrays of one group are too small for
  # NumPy to pay.
  ordered = lengths[order].tolist()
  spans = list(zip(group[order][bounds[:-1]].tolist(),
                   sizes[bounds[:-1]].tolist(), bounds[:-1].tolist(),
                   bounds[1:].tolist(), totals.tolist()))
  copies: list[tuple[int, ...]] = []  # group, row, start, number, first, count
  holds: list[list[int]] = []  # per row: rollouts, prompt copies
  free: list[tuple[int, int]] = []  # (space left, row), ascending
  for g, plen, first, last, total in sorted(
      spans, key=lambda span: -span[-1]):
    while first < last:
      at = bisect.bisect_left(free, (total, -1))
      if at == len(free) and free and _fitting(
          ordered, first, last, free[-1][0] - plen, plen):
        # The group is cut: the space left somewhere pays for another copy of
        # its prompt.
        at -= 1
      if at < len(free):
        space, row = free.pop(at)
      else:
        space, row = row_length, len(holds)
        holds.append([0, 0])
      count, used = 0, plen
      while (first + count < last
             and used + ordered[first + count] <= space):
        used += ordered[first + count]
        count += 1
      holds[row][1] += 1
      copies.append((g, row, row_length - space, holds[row][1], first, count,
                     holds[row][0]))
      holds[row][0] += count
      bisect.insort(free, (space - used, row))
      first += count
      total -= used - plen
  table = np.asarray(copies, np.int64).reshape(-1, 7)
  where, counts, segments = table[:, :4], table[:, 5], table[:, 6]
  # The rollouts of each copy, copy after copy.
  members = order[_ranges(table[:, 4], counts)]
  copy = np.repeat(np.arange(len(table)), counts)
  before = np.cumsum(lengths[members]) - lengths[members]
  opening = before[np.cumsum(counts) - counts] if n else before
  starts = (where[copy, 2] + prompt_lengths[where[copy, 0]] + before
            - opening[copy])
  result = np.zeros((4, n), np.int64)
  result[:, members] = (where[copy, 1], starts,
                        _ranges(segments + 1, counts), copy)
  return Layout(*result, *where.T, rows=len(holds))


def _fitting(lengths: list[int], first: int, last: int, space: int,
             wanted: int) -> bool:
  """Whether lengths[first:last] fill `space` with at least `wanted`."""
  filled = 0
  for length in lengths[first:last]:
    if filled + length > space:
      break
    filled += length
  return filled >= max(wanted, 1)


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
  """Concatenated arange(start, start + size)."""
  ends = np.cumsum(sizes)
  total = int(ends[-1]) if len(ends) else 0
  return np.arange(total) + np.repeat(starts - (ends - sizes), sizes)


def pack(group: np.ndarray, prompts: Sequence[np.ndarray],
         tokens: np.ndarray, lengths: np.ndarray, advantages: np.ndarray,
         weights: np.ndarray, sampler_logprobs: np.ndarray, *,
         row_length: int, rows_per_micro: int, max_micro: int
         ) -> tuple[Packed, int]:
  """Packs rollouts into [max_micro, rows_per_micro, row_length].

  Args:
    group: int [N] index into prompts.
    prompts: token ids per group.
    tokens: int32 [N, L] completions; lengths: int [N], >= 1.
    advantages, weights: float32 [N] per rollout.
    sampler_logprobs: float32 [N, L].

  Returns:
    (Packed, number of micro-batches in use; 0 when N is 0).

  Raises:
    ValueError: a rollout does not fit a row, or there are more rows than
      max_micro * rows_per_micro.
  """
  prompt_lengths = np.array([len(p) for p in prompts], np.int64)
  layout = plan(group, lengths, prompt_lengths, row_length)
  return filled(layout, group, prompts, tokens, lengths, advantages, weights,
                sampler_logprobs, (max_micro, rows_per_micro, row_length))


def filled(layout: Layout, group: np.ndarray, prompts: Sequence[np.ndarray],
           tokens: np.ndarray, lengths: np.ndarray, advantages: np.ndarray,
           weights: np.ndarray, sampler_logprobs: np.ndarray,
           shape: tuple[int, int, int]) -> tuple[Packed, int]:
  """The rows of a layout; arguments, results and errors are those of `pack`.

  Args:
    layout: of these rollouts.
    shape: (max_micro, rows_per_micro, row_length).
  """
  max_micro, rows_per_micro, row_length = shape
  if layout.rows > max_micro * rows_per_micro:
    raise ValueError(f"{layout.rows} packed rows needed, {shape=} holds "
                     f"{max_micro * rows_per_micro}")
  prompt_lengths = np.array([len(p) for p in prompts], np.int64)
  ints = np.zeros((5, max_micro * rows_per_micro * row_length), np.int32)
  flat_tokens, positions, prompt, segment, source = ints
  floats = np.zeros((3, ints.shape[1]), np.float32)

  sizes = prompt_lengths[layout.copy_group]
  at = _ranges(layout.copy_row * row_length + layout.copy_start, sizes)
  if len(at):
    flat_tokens[at] = np.concatenate([prompts[g] for g in layout.copy_group])
    positions[at] = _ranges(np.zeros_like(sizes), sizes)
    prompt[at] = np.repeat(layout.copy_number, sizes)

  lengths = np.asarray(lengths, np.int64)
  at = _ranges(layout.row * row_length + layout.start, lengths)
  if len(at):
    inside = _ranges(np.zeros_like(lengths), lengths)
    rollout = np.repeat(np.arange(len(group)), lengths)
    flat_tokens[at] = tokens[rollout, inside]
    positions[at] = inside + np.repeat(prompt_lengths[group], lengths)
    prompt[at] = np.repeat(layout.copy_number[layout.copy], lengths)
    segment[at] = np.repeat(layout.segment, lengths)
    last = layout.copy_start[layout.copy] + prompt_lengths[group] - 1
    source[at] = np.where(inside == 0, last[rollout],
                          layout.start[rollout] + inside - 1)
    floats[0, at] = advantages[rollout]
    floats[1, at] = weights[rollout]
    floats[2, at] = sampler_logprobs[rollout, inside]
  parts = [a.reshape(shape) for a in (*ints, *floats)]
  return Packed(*parts), -(-layout.rows // rows_per_micro)


def useful_share(packed: Rows) -> float:
  """Share of the used micro-batches' token slots that hold a token."""
  held = slots = 0
  for part in each(packed):
    used = part.prompt[part.prompt.any(axis=(1, 2))]
    held, slots = held + np.count_nonzero(used), slots + used.size
  return held / slots if slots else 0.0


def packed_mask(prompt, segment):
  """Who attends to whom, bool [R, T, T] (works on NumPy and JAX arrays).

  A token sees earlier tokens of its own prompt copy that are prompt tokens
  or belong to its own rollout.
  """
  same_prompt = prompt[:, :, None] == prompt[:, None, :]
  same_rollout = ((segment[:, None, :] == 0)
                  | (segment[:, :, None] == segment[:, None, :]))
  t = prompt.shape[1]
  causal = np.tril(np.ones((t, t), bool))
  return same_prompt & same_rollout & (prompt > 0)[:, None, :] & causal
