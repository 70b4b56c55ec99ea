"""What the decode programs carry: queue, slots, report, and their packing.

A dispatch pays for every array it takes and returns, so between dispatches the
small arrays of `Slots` travel as one (`State`), and so do the report's and the
host's words (`Control`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vigor_jax.sampling import cache as cache_lib

Array = jax.Array


class Shape(NamedTuple):
  """A compiled size of a chunk: slots, and ring columns attended to."""

  width: int
  length: int


class Prefixes(NamedTuple):
  """Prompts of a step, ready to be continued.

  Attributes:
    kv: per layer (keys, values) of P prompts; see cache.py.
    lengths: int32 [P] prompt lengths.
    last_token: int32 [P] last prompt token: the first decode input.
  """

  kv: Any
  lengths: Array
  last_token: Array


class Queue(NamedTuple):
  """Rollouts to draw, [Q] each; entries below the tail are valid.

  On the host it is one int32 array [8, Q] in this order, floats as their
  bits: one transfer per dispatch.
  """

  prefix: Array  # int32 row of Prefixes
  position: Array  # uint32 prompt position in the stream (low 32 bits)
  sample: Array  # uint32 index of the rollout in its group
  limit: Array  # int32 longest completion
  temperature: Array  # float32
  top_k: Array  # int32, 0 = off
  top_p: Array  # float32, 1 = off
  min_p: Array  # float32, 0 = off


QUEUE_DTYPES = Queue("int32", "uint32", "uint32", "int32", "float32", "int32",
                     "float32", "float32")


class Record(NamedTuple):
  """What is kept of each token."""

  tokens: Array  # int32 [rows, L]
  logprobs: Array  # float32 [rows, L]
  processed: Array  # float32 [rows, L]


class Report(NamedTuple):
  """Rows that ended in a dispatch, in logical time; few arrays to read.

  Attributes:
    record: int32 [3, R, L] tokens, and the bits of both log-probs.
    ends: int32 [5, R]: queue entry, length (stop token included), 1 if a stop
      token ended it, chunk in which it ended (logical time), slot.
    counters: int32 [6]: rows that are valid, then `Slots`' head, chunks,
      steps, row_steps, useful.
  """

  record: Array
  ends: Array
  counters: Array


class State(NamedTuple):
  """`Slots` between dispatches, packed: a dispatch pays for each array."""

  kv: Any
  written: Array
  record: Array  # int32 [3, S, L]
  rows: Array  # int32 [14, S]
  counters: Array  # int32 [6]


class Slots(NamedTuple):
  """Decode rows. `head` is the next queue entry to serve."""

  kv: Any  # completions so far: the ring of cache.py
  written: Array  # int32 [R] time at which a ring column was written, or -1
  record: Record  # [S, L] of the running rollouts
  prefix: Array  # int32 [S] row of Prefixes
  base: Array  # int32 [S] rotary position of the first input
  began: Array  # int32 [S] time at which the rollout began
  token: Array  # int32 [S] next input
  generated: Array  # int32 [S]
  limit: Array  # int32 [S]
  active: Array  # bool [S]
  item: Array  # int32 [S] queue entry
  row_key: Array  # uint32 [S, 2]
  settings: tuple[Array, ...]  # temperature, top_k, top_p, min_p [S]
  head: Array  # int32 []
  time: Array  # int32 [] ring columns written since all slots were idle
  chunks: Array  # int32 []
  steps: Array  # int32 []
  row_steps: Array  # int32 []
  useful: Array  # int32 []

  @property
  def counters(self) -> Array:
    """int32 [6], in the order of `COUNTERS`."""
    return jnp.stack([getattr(self, name) for name in COUNTERS])


COUNTERS = ("time", "head", "chunks", "steps", "row_steps", "useful")
ROWS = ("prefix", "base", "began", "token", "generated", "limit", "item")


def bits(a: Array) -> Array:
  return (jax.lax.bitcast_convert_type(a, jnp.int32) if a.dtype != bool
          else a.astype(jnp.int32))


def pack(slots: Slots) -> State:
  rows = [getattr(slots, name) for name in ROWS]
  rows += [slots.active, *slots.row_key.T, *slots.settings]
  return State(slots.kv, slots.written, jnp.stack(
      [bits(a) for a in slots.record]), jnp.stack([bits(a) for a in rows]),
      slots.counters)


def unpack(state: State) -> Slots:
  floats = lambda a: jax.lax.bitcast_convert_type(a, jnp.float32)
  ints, (active, key0, key1, *settings) = (state.rows[: len(ROWS)],
                                           state.rows[len(ROWS):])
  temperature, top_k, top_p, min_p = settings
  tokens, logprobs, processed = state.record
  keys = jnp.stack([key0, key1], 1)
  return Slots(
      kv=state.kv, written=state.written,
      record=Record(tokens, floats(logprobs), floats(processed)),
      active=active.astype(bool),
      row_key=jax.lax.bitcast_convert_type(keys, jnp.uint32),
      settings=(floats(temperature), top_k, floats(top_p), floats(min_p)),
      **dict(zip(ROWS, ints)), **dict(zip(COUNTERS, state.counters)))


class Control(NamedTuple):
  """What the host says in a dispatch: one int32 array, in this order."""

  tail: Any  # queue entries [head, tail) are waiting
  max_chunks: Any
  max_ended: Any  # rows that may end before the host looks
  more: Any  # 1 = the queue may grow: idle slots are worth a look
  reset: Any  # 1 = a new step: every slot free, counters at 0
  seed: Any  # seed, stream and step: the address of the step's numbers
  stream: Any
  step: Any


def empty_prefixes(sizes, prompts: int, length: int, dtype,
                   as_values: bool = False) -> Prefixes:
  """A prefix store for `prompts` prompts of at most `length` tokens."""
  return Prefixes(cache_lib.empty(sizes, prompts, length, dtype, as_values),
                  jnp.ones((prompts,), jnp.int32),
                  jnp.zeros((prompts,), jnp.int32))


def empty_record(rows: int, length: int) -> Record:
  return Record(jnp.zeros((rows, length), jnp.int32),
                jnp.zeros((rows, length), jnp.float32),
                jnp.zeros((rows, length), jnp.float32))


def empty_state(sizes, slots: int, ring: int, max_new_tokens: int,
                dtype, as_values: bool = False) -> State:
  """All slots free; `ring` is the number of its columns."""
  return State(
      cache_lib.empty(sizes, slots, ring, dtype, as_values),
      jnp.full((ring,), -1, jnp.int32),
      jnp.zeros((3, slots, max_new_tokens), jnp.int32),
      jnp.zeros((len(ROWS) + 7, slots), jnp.int32),
      jnp.zeros((len(COUNTERS),), jnp.int32))


def unpack_queue(queue: Array) -> Queue:
  return Queue(*[
      row if dtype == "int32" else jax.lax.bitcast_convert_type(row, dtype)
      for row, dtype in zip(queue, QUEUE_DTYPES)])
