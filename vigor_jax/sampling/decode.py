"""The jitted half of the sampler: prefill, and decode chunks that refill.

    prefixes   one row per prompt of the step: keys and values of its prompt
    queue      rollouts still to draw: (prefix, prompt position, sample index)
    slots      S decode rows; a free slot takes the next entry of the queue
    report     the rollouts that ended in this dispatch

One `decode` dispatch runs many chunks on the device. A chunk is: free slots
take work from the queue, then up to C decode steps, then the rows that ended
are appended to the report and the chunk's keys and values are merged into the
cache (cache.py). A chunk runs at one of a few widths and cache lengths, the
smallest that holds what is active (`Shape`), so the tail of a round does not
pay for idle slots nor a young cache for its empty end; all of them are
compiled into the one program.

Randomness is addressed: the uniform number behind a token is a function of
(seed, step, prompt position in the stream, sample index, token index), so a
rollout is the same in whatever slot, round or order it is drawn.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from vigor_jax.policy import attention
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.sampling import cache as cache_lib
from vigor_jax.sampling import logits as logits_lib
from vigor_jax.sampling import random as random_lib
from vigor_jax.sampling import spread
from vigor_jax.sampling import state as state_lib
from vigor_jax.sampling.state import (
    Control, Prefixes, Queue, Record, Report, Shape, Slots, State)
from vigor_jax.sampling.weights import Weights

Array = jax.Array


def prefill(weights: Weights, leaves, prefixes: Prefixes, tokens: Array,
            lengths: Array, rows: Array) -> Prefixes:
  """Runs prompts through the model and keeps their keys and values.

  Args:
    tokens: int32 [N, Lb] right-padded prompts.
    lengths: int32 [N].
    rows: int32 [N] where to keep each; out of range = padding, dropped.
  """
  model, blocks = weights.model(leaves)
  n, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length), (n, length))
  attend = attention.causal_attend
  if weights.layout is not None and weights.layout.columns:
    attend = spread.prompt_attention(weights.layout, prefixes_length(prefixes))
  _, saved = model(tokens, positions, attend, blocks=blocks)
  last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)[:, 0]
  return Prefixes(
      cache_lib.put_prompts(prefixes.kv, saved, rows, weights.as_values),
      prefixes.lengths.at[rows].set(lengths, mode="drop"),
      prefixes.last_token.at[rows].set(last, mode="drop"))


def _refill(prefixes: Prefixes, slots: Slots, queue: Queue, tail: Array,
            step_key: Array) -> Slots:
  """Free slots take the next queue entries, in slot order."""
  free = ~slots.active
  # No rollout needs the ring's columns: count time from 0 again, so that
  # they are found at its start.
  idle = jnp.all(free)
  slots = slots._replace(
      time=jnp.where(idle, 0, slots.time),
      written=jnp.where(idle, -1, slots.written))
  item = slots.head + jnp.cumsum(free, dtype=jnp.int32) - 1
  taken = free & (item < tail)

  def insert(slots):
    entry = jnp.where(taken, item, 0)
    new = jax.tree.map(lambda a: a[entry], queue)
    prefix = new.prefix
    at = lambda new, old: jnp.where(taken, new, old)
    keys = random_lib.row_keys(step_key, new.position, new.sample)
    fresh = (new.temperature, new.top_k, new.top_p, new.min_p)
    return slots._replace(
        prefix=at(prefix, slots.prefix),
        base=at(prefixes.lengths[prefix] - 1, slots.base),
        began=at(slots.time, slots.began),
        token=at(prefixes.last_token[prefix], slots.token),
        generated=at(0, slots.generated),
        limit=at(new.limit, slots.limit),
        active=slots.active | taken,
        item=at(item, slots.item),
        row_key=jnp.where(taken[:, None], keys, slots.row_key),
        settings=tuple(map(at, fresh, slots.settings)),
        head=slots.head + jnp.sum(taken, dtype=jnp.int32))

  return jax.lax.cond(jnp.any(taken), insert, lambda s: s, slots)


def _run(weights: Weights, model, blocks, prefixes: Prefixes, slots: Slots,
         stop_ids: Array, shape: Shape, chunk: int):
  """Up to C steps of the `width` first active slots.

  Returns:
    (per-slot results of the width, rank [S] of each slot in it, the chunk's
     keys and values for all slots, number of steps).
  """
  sizes, layout = model.sizes, weights.layout
  num_slots = slots.active.shape[0]
  width, length = shape
  everyone = width == num_slots
  if everyone:
    chosen, rank = None, jnp.arange(num_slots)
    pick = lambda a: a
  else:
    chosen = jnp.argsort(~slots.active, stable=True)[:width]
    rank = jnp.cumsum(slots.active, dtype=jnp.int32) - 1
    rank = jnp.clip(rank, 0, width - 1)
    pick = lambda a: a[chosen]
  active, generated, prefix = map(
      pick, (slots.active, slots.generated, slots.prefix))
  limit, base = pick(slots.limit), pick(slots.base)
  # Slots without work must not make the others pay for sorting.
  off = (1.0, 0, 1.0, 0.0)
  settings = tuple(jnp.where(active, pick(a), o)
                   for a, o in zip(slots.settings, off))
  uniforms = random_lib.uniforms(pick(slots.row_key), generated, chunk)
  positions = (base + generated)[:, None] + jnp.arange(chunk)
  ropes = transformer.rope_tables(sizes, positions)
  if layout is not None:
    ropes = tuple(map(layout.whole, ropes))

  prompt = prefixes_length(prefixes)
  columns = jnp.arange(prompt)
  in_prompt = columns[None] < base[:, None]
  in_ring = slots.written[None, :length] >= pick(slots.began)[:, None]
  mask = jnp.concatenate([in_prompt, in_ring], 1)
  dtype = jnp.dtype(sizes.dtype)
  ring = slots.kv
  if blocks is not None:
    layers = cache_lib.view(prefixes.kv, slots.kv, prefix, chosen, length,
                            chunk, dtype)
  else:
    layers = cache_lib.empty(sizes, width, chunk, dtype, weights.as_values)
    if not everyone:
      ring = tuple(jnp.take(a, chosen, axis=1) for a in ring)
  prompts = prefixes.kv
  if weights.as_values and not layout.columns:
    prompts = spread.copies(layout, prompts, prefix)
  record = state_lib.empty_record(width, chunk)
  now = jnp.arange(chunk)
  full = lambda recent: jnp.concatenate(
      [mask, jnp.broadcast_to(recent, (width, recent.shape[0]))], 1)

  def step(carry):
    i, token, active, generated, layers, record = carry
    at = lambda a: jax.lax.dynamic_index_in_dim(a, i, 1, False)
    rope = tuple(at(a)[:, None] for a in ropes)
    if layout is not None:
      token = layout.whole(token)
    if blocks is not None:
      attend = lambda layer, q, k, v: cache_lib.attend_view(
          layer, q, k, v, mask=full(now <= i), column=prompt + length + i)
      hidden, layers = model(token[:, None], None, attend, layers=layers,
                             blocks=blocks, rope=rope)
    else:
      own = jnp.append(now < i, True)
      stores = dict(prefixes=prompts, ring=ring, prefix=prefix,
                    length=length)
      if layout is not None:
        attend = spread.Attention(layout, base=base, in_ring=in_ring, own=own,
                                  **stores)
      else:
        attend = functools.partial(cache_lib.attend_stores, mask=full(own),
                                   as_values=weights.as_values, **stores)
      hidden, (k, v) = model(
          token[:, None], None, attend, rope=rope,
          layers=(jnp.arange(sizes.layers), *layers))
      one = lambda a: jnp.expand_dims(a, 3)
      new = (one(k) if weights.as_values else k[..., None], one(v))
      layers = cache_lib.merge(layers, new, i, weights.as_values)
    with jax.named_scope("sample"):
      logits = model.logits(sharding.entering(hidden)[:, 0])
      if layout is not None:
        logits = layout.by_row(logits)
      new = logits_lib.sample(logits, at(uniforms), *settings)
    record = Record(*[
        jax.lax.dynamic_update_slice_in_dim(r, n[:, None], i, 1)
        for r, n in zip(record, new)])
    # A row that has ended keeps its last token, so that it can be judged.
    token = jnp.where(active, new[0], token)
    generated = generated + active
    stop = jnp.any(token[:, None] == stop_ids[None], -1)
    active = active & ~(stop | (generated >= limit))
    return i + 1, token, active, generated, layers, record

  steps, token, active, generated, layers, record = jax.lax.while_loop(
      lambda c: (c[0] < chunk) & jnp.any(c[2]), step,
      (jnp.int32(0), pick(slots.token), active, generated, layers, record))
  if blocks is not None:
    new = [(k[..., prompt + length:], v[..., prompt + length:, :])
           for k, v in layers]
  else:
    new = layers
  if not everyone:
    # A gather that ends in all slots' order: the merge is one update.
    new = jax.tree.map(
        lambda a: a[rank] if blocks is not None else a[:, rank], new)
    token, active, generated = (
        jnp.where(slots.active, a[rank], b) for a, b in zip(
            (token, active, generated),
            (slots.token, slots.active, slots.generated)))
    record = Record(*[a[rank] for a in record])
  return token, active, generated, record, new, steps


def prefixes_length(prefixes: Prefixes) -> int:
  """Columns of the prefix store."""
  return jax.tree.leaves(prefixes.kv)[1].shape[-2]


def _append(report: tuple, slots: Slots, ended: Array,
            stop_ids: Array) -> tuple:
  """(record, ends, count) with the slots that ended in this chunk.

  In slot order. Rows past the count are overwritten by what ends next.
  """
  record, ends, count = report
  order = jnp.argsort(~ended, stable=True)
  stop = jnp.any(slots.token[:, None] == stop_ids[None], -1)
  rows = jnp.arange(ended.shape[0])
  new = jnp.stack([slots.item, slots.generated, stop.astype(jnp.int32),
                   jnp.broadcast_to(slots.chunks, rows.shape), rows])
  put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
      old, new[order], count, 0)
  return (jax.tree.map(put, record, slots.record), put(ends, new.T),
          count + jnp.sum(ended, dtype=jnp.int32))


def decode(weights: Weights, leaves, prefixes: Prefixes, state: State,
           queue: Array, control: Array, stop_ids: Array, *, chunk: int,
           shapes: tuple[Shape, ...], rows: int) -> tuple[State, Report]:
  """Runs up to `max_chunks` chunks, or until queue and slots are empty.

  It also stops when `max_ended` rows have ended, and, while the queue may
  still grow, when a slot is idle and some row has ended.

  Args:
    leaves: `weights.prepare(params)`.
    queue: int32 [8, Q], see `Queue`.
    control: int32 [8], see `Control`.
    stop_ids: int32 [N], any of them ends a row; pad with -1.
    chunk: decode steps between refills, C.
    shapes: compiled sizes of a chunk, the cheapest first; the last holds
      everything.
    rows: rows of the report. It stops when they may not suffice.
  """
  model, blocks = weights.model(leaves)
  queue = state_lib.unpack_queue(queue)
  tail, max_chunks, max_ended, growing, reset, *address = Control(*control)
  step_key = random_lib.step_key(*address)
  slots = state_lib.unpack(state)
  slots = slots._replace(
      active=slots.active & (reset == 0),
      **{name: getattr(slots, name) * (1 - reset)
         for name in state_lib.COUNTERS})
  num_slots, longest = slots.record.tokens.shape
  ring = slots.written.shape[0]
  report = (state_lib.empty_record(rows, longest),
            jnp.zeros((rows, 5), jnp.int32), jnp.int32(0))

  def run_chunk(carry):
    n, slots, report = carry
    with jax.named_scope("refill"):
      slots = _refill(prefixes, slots, queue, tail, step_key)
    count = jnp.sum(slots.active, dtype=jnp.int32)
    used = jnp.minimum(slots.time, ring)
    fits = jnp.stack([(count <= s.width) & (used <= s.length)
                      for s in shapes[:-1]] + [jnp.bool_(True)])
    choice = jnp.argmax(fits)
    run = lambda shape: lambda: _run(weights, model, blocks, prefixes, slots,
                                     stop_ids, shape, chunk)
    token, active, generated, record, new, steps = jax.lax.switch(
        choice, [run(s) for s in shapes])

    with jax.named_scope("write"):
      before, begun = slots.generated, slots.active
      fresh = generated - before
      column = jnp.arange(longest)[None] - before[:, None]
      past = column >= fresh[:, None]
      at = jnp.clip(column, 0, chunk - 1)
      record = Record(*[
          jnp.where(column < 0, o,
                    jnp.where(past, 0, jnp.take_along_axis(r, at, 1)))
          for r, o in zip(record, slots.record)])
      widths = jnp.array([s.width for s in shapes], jnp.int32)
      slots = slots._replace(
          record=record, token=token, active=active, generated=generated,
          steps=slots.steps + steps,
          row_steps=slots.row_steps + steps * widths[choice],
          useful=slots.useful + jnp.sum(fresh))
      ended = begun & ~active
      report = jax.lax.cond(
          jnp.any(ended),
          lambda: _append(report, slots, ended, stop_ids),
          lambda: report)
      if ring:
        at = slots.time % ring
        marks = jnp.where(jnp.arange(chunk) < steps,
                          slots.time + jnp.arange(chunk), -1)
        slots = slots._replace(
            kv=cache_lib.merge(slots.kv, new, at, weights.as_values),
            written=jax.lax.dynamic_update_slice(slots.written, marks,
                                                 (at,)),
            time=slots.time + chunk)
    return n + 1, slots._replace(chunks=slots.chunks + 1), report

  def more(carry):
    n, slots, (_, _, count) = carry
    waiting = slots.head < tail
    idle = ~waiting & jnp.any(~slots.active)
    return ((n < max_chunks) & (count < max_ended)
            & (count + num_slots <= rows)
            & (jnp.any(slots.active) | waiting)
            & ~((growing > 0) & (count > 0) & idle))

  _, slots, (record, ends, count) = jax.lax.while_loop(
      more, run_chunk, (jnp.int32(0), slots, report))
  return state_lib.pack(slots), Report(
      jnp.stack([state_lib.bits(a) for a in record]), ends.T,
      slots.counters.at[0].set(count))
