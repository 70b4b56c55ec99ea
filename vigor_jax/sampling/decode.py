"""The jitted half of the sampler: prefill, and decode chunks that refill.

    prefixes   one row per prompt of the step: keys and values of its prompt
    queue      rollouts still to draw: (prefix, prompt position, sample index)
    slots      S decode rows; a free slot takes the next entry of the queue
    out        one row per queue entry: tokens, log-probs, length

One `decode` dispatch runs many chunks on the device. A chunk is: free slots
take work from the queue (their prefix is copied in), then up to C decode
steps for all slots, then results are written and the chunk's keys and values
are merged into the cache. Inside a chunk new keys and values go to a small
buffer at the same index for all rows, so a step never scatters:

    cache  [S, K, M, hd]   | prompt ........ | completion so far .... |
                           0              filled[s]                   M
    buffer [S, K, C, hd]   | this chunk |     index i for every row

Randomness is addressed: the uniform number behind a token is a function of
(seed, step, prompt position in the stream, sample index, token index), so a
rollout is the same in whatever slot, round or order it is drawn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from vigor_jax.policy import transformer
from vigor_jax.sampling import logits as logits_lib

Array = jax.Array


class Prefixes(NamedTuple):
  """Prompts of a step, ready to be continued.

  Attributes:
    kv: per layer (k, v), each [P, K, Lp, hd]; stacked on axis 0 or a list.
    lengths: int32 [P] prompt lengths.
    last_token: int32 [P] last prompt token: the first decode input.
  """

  kv: Any
  lengths: Array
  last_token: Array


class Queue(NamedTuple):
  """Rollouts to draw, [Q] each; entries below the tail are valid."""

  prefix: Array  # int32 row of Prefixes
  position: Array  # uint32 prompt position in the stream (low 32 bits)
  sample: Array  # uint32 index of the rollout in its group
  temperature: Array  # float32
  top_k: Array  # int32, 0 = off
  top_p: Array  # float32, 1 = off
  min_p: Array  # float32, 0 = off


class Out(NamedTuple):
  """Finished rollouts by queue entry; length 0 = not finished."""

  tokens: Array  # int32 [Q, L]
  logprobs: Array  # float32 [Q, L]
  processed: Array  # float32 [Q, L]
  lengths: Array  # int32 [Q], stop token included
  stopped: Array  # bool [Q], ended by a stop token (else truncated)
  end_chunk: Array  # int32 [Q], chunk in which the row ended: logical time
  slot: Array  # int32 [Q]


class Slots(NamedTuple):
  """Decode rows. `head` is the next queue entry to serve."""

  kv: Any  # per layer (k, v), each [S, K, M, hd]
  filled: Array  # int32 [S] valid cache entries
  token: Array  # int32 [S] next input
  generated: Array  # int32 [S]
  active: Array  # bool [S]
  item: Array  # int32 [S] queue entry, Q where none
  row_key: Array  # uint32 [S, 2]
  head: Array  # int32 []
  chunks: Array  # int32 [] chunks run so far in this step
  steps: Array  # int32 [] decode steps run so far in this step
  useful: Array  # int32 [] row steps that produced a token


def unrolled(sizes: transformer.Sizes) -> bool:
  """Small models run their layers unrolled: no slices of stacked arrays."""
  return sizes.layers <= 4


def _kv_zeros(sizes, rows: int, length: int, dtype) -> Any:
  shape = (rows, sizes.kv_heads, length, sizes.head_dim)
  if unrolled(sizes):
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(sizes.layers)]
  shape = (sizes.layers,) + shape
  return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def empty_prefixes(sizes, prompts: int, length: int, dtype) -> Prefixes:
  """A prefix store for `prompts` prompts of at most `length` tokens."""
  return Prefixes(_kv_zeros(sizes, prompts, length, dtype),
                  jnp.ones((prompts,), jnp.int32),
                  jnp.zeros((prompts,), jnp.int32))


def empty_slots(sizes, slots: int, length: int, queue: int, dtype) -> Slots:
  """All slots free; `length` is the cache's M."""
  zeros = lambda dtype=jnp.int32: jnp.zeros((slots,), dtype)
  return Slots(
      _kv_zeros(sizes, slots, length, dtype), zeros(), zeros(), zeros(),
      zeros(bool), jnp.full((slots,), queue, jnp.int32),
      jnp.zeros((slots, 2), jnp.uint32), *[jnp.zeros((), jnp.int32)] * 4)


def empty_out(queue: int, length: int) -> Out:
  """No rollout finished."""
  return Out(jnp.zeros((queue, length), jnp.int32),
             jnp.zeros((queue, length), jnp.float32),
             jnp.zeros((queue, length), jnp.float32),
             jnp.zeros((queue,), jnp.int32), jnp.zeros((queue,), bool),
             jnp.zeros((queue,), jnp.int32), jnp.zeros((queue,), jnp.int32))


def cache_length(prompt_length: int, max_new_tokens: int, chunk: int) -> int:
  """Cache entries per slot, M.

  A completion that fits in one chunk lives in the chunk's buffer only.
  """
  if max_new_tokens <= chunk:
    return prompt_length
  return prompt_length + -(-max_new_tokens // chunk) * chunk


def prefill(graph, params, prefixes: Prefixes, tokens: Array, lengths: Array,
            rows: Array) -> Prefixes:
  """Runs prompts through the model and keeps their keys and values.

  Args:
    tokens: int32 [N, Lb] right-padded prompts.
    lengths: int32 [N].
    rows: int32 [N] where to keep each; out of range = padding, dropped.
  """
  model = nnx.merge(graph, params)
  blocks = model.split_layers() if isinstance(prefixes.kv, list) else None
  n, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length), (n, length))
  _, saved = model(tokens, positions, transformer.causal_attend,
                   blocks=blocks)
  if blocks is not None:
    kv = [tuple(_put(store, new, rows) for store, new in zip(pair, news))
          for pair, news in zip(prefixes.kv, saved)]
  else:
    put = jax.vmap(_put, in_axes=(0, 0, None))
    kv = tuple(put(store, new, rows)
               for store, new in zip(prefixes.kv, saved))
  last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)[:, 0]
  return Prefixes(kv, prefixes.lengths.at[rows].set(lengths, mode="drop"),
                  prefixes.last_token.at[rows].set(last, mode="drop"))


def _put(store: Array, new: Array, rows: Array) -> Array:
  """store [P, K, Lp, hd] with new [N, T, K, hd] written at `rows`."""
  new = jnp.swapaxes(new, 1, 2).astype(store.dtype)
  return store.at[rows, :, : new.shape[2]].set(new, mode="drop")


def _attend_step(layer, q, k, v, *, valid, index):
  """One new token per row against cache, chunk buffer and itself.

  layer: (cache k, v [S, K, M, hd], buffer k, v [S, K, C, hd]).
  valid: bool [S, M]; buffer entries below `index` are valid.
  """
  cache_k, cache_v, buffer_k, buffer_v = layer
  s, _, h, hd = q.shape
  kh = k.shape[2]
  q = q.reshape(s, kh, h // kh, hd)
  k, v = k[:, 0], v[:, 0]  # [S, K, hd]
  f32 = dict(preferred_element_type=jnp.float32)
  old = jnp.einsum("skgd,skmd->skgm", q, cache_k.astype(q.dtype), **f32)
  new = jnp.einsum("skgd,skmd->skgm", q, buffer_k.astype(q.dtype), **f32)
  own = jnp.einsum("skgd,skd->skg", q, k, **f32)[..., None]
  recent = jnp.arange(buffer_k.shape[2]) < index
  scores = jnp.concatenate(
      [jnp.where(valid[:, None, None], old, -1e30),
       jnp.where(recent, new, -1e30), own], -1) * hd**-0.5
  w = jax.nn.softmax(scores, -1).astype(q.dtype)
  m = cache_k.shape[2]
  out = jnp.einsum("skgm,skmd->skgd", w[..., :m], cache_v.astype(q.dtype))
  out += jnp.einsum("skgm,skmd->skgd", w[..., m:-1],
                    buffer_v.astype(q.dtype))
  out += w[..., -1:] * v[:, :, None]
  return out.reshape(s, 1, h, hd), (k, v)


def _uniforms(row_key: Array, first: Array, count: int) -> Array:
  """Uniform numbers [S, count] for tokens first .. first + count - 1."""

  def one(key, token):
    key = jax.random.fold_in(jax.random.wrap_key_data(key), token)
    return jax.random.uniform(key)

  tokens = first[:, None] + jnp.arange(count)
  return jax.vmap(jax.vmap(one, (None, 0)))(row_key, tokens)


def _row_keys(step_key: Array, position: Array, sample: Array) -> Array:
  """uint32 [S, 2] keys of (step key, prompt position, sample index)."""

  def one(position, sample):
    key = jax.random.wrap_key_data(step_key)
    key = jax.random.fold_in(jax.random.fold_in(key, position), sample)
    return jax.random.key_data(key)

  return jax.vmap(one)(position, sample)


def _refill(prefixes: Prefixes, slots: Slots, queue: Queue, tail: Array,
            step_key: Array) -> Slots:
  """Free slots take the next queue entries, in slot order."""
  free = ~slots.active
  item = slots.head + jnp.cumsum(free, dtype=jnp.int32) - 1
  taken = free & (item < tail)

  def insert(slots):
    prefix = queue.prefix[jnp.where(taken, item, 0)]

    def copy(cache, store):
      length = store.shape[-2]
      new = jnp.where(taken[:, None, None, None],
                      store[prefix].astype(cache.dtype),
                      cache[:, :, :length])
      return cache.at[:, :, :length].set(new)

    if isinstance(slots.kv, list):
      kv = [tuple(map(copy, cache, store))
            for cache, store in zip(slots.kv, prefixes.kv)]
    else:
      kv = tuple(jax.vmap(copy)(cache, store)
                 for cache, store in zip(slots.kv, prefixes.kv))
    at = lambda new, old: jnp.where(taken, new, old)
    entry = jnp.where(taken, item, 0)
    keys = _row_keys(step_key, queue.position[entry], queue.sample[entry])
    return slots._replace(
        kv=kv,
        filled=at(prefixes.lengths[prefix] - 1, slots.filled),
        token=at(prefixes.last_token[prefix], slots.token),
        generated=at(0, slots.generated),
        active=slots.active | taken,
        item=at(item, slots.item),
        row_key=jnp.where(taken[:, None], keys, slots.row_key),
        head=slots.head + jnp.sum(taken, dtype=jnp.int32))

  return jax.lax.cond(jnp.any(taken), insert, lambda s: s, slots)


def decode(graph, params, prefixes: Prefixes, slots: Slots, out: Out,
           queue: Queue, tail: Array, max_chunks: Array, step_key: Array,
           stop_ids: Array, *, chunk: int, max_new_tokens: int
           ) -> tuple[Slots, Out]:
  """Runs up to `max_chunks` chunks, or until queue and slots are empty.

  Args:
    queue: entries [head, tail) are waiting.
    step_key: uint32 [2], key data of (seed, step).
    stop_ids: int32 [N], any of them ends a row; pad with -1.
    chunk: decode steps between refills, C.
    max_new_tokens: longest completion, L.
  """
  model = nnx.merge(graph, params)
  sizes = model.sizes
  blocks = model.split_layers() if isinstance(slots.kv, list) else None
  num_slots = slots.active.shape[0]
  kv_dtype = jax.tree.leaves(slots.kv)[0].dtype

  def step(inner):
    i, slots, buffer, record, uniforms, settings = inner
    positions = slots.filled + i
    m = jax.tree.leaves(slots.kv)[0].shape[-2]
    valid = jnp.arange(m)[None] < slots.filled[:, None]
    if blocks is not None:
      layers = [(*c, *b) for c, b in zip(slots.kv, buffer)]
    else:
      layers = (*slots.kv, *buffer)
    hidden, saved = model(
        slots.token[:, None], positions[:, None],
        lambda *a: _attend_step(*a, valid=valid, index=i),
        layers=layers, blocks=blocks)
    write = lambda b, new: jax.lax.dynamic_update_slice_in_dim(
        b, new[..., None, :].astype(b.dtype), i, axis=b.ndim - 2)
    buffer = (jax.tree.map(write, buffer, saved) if blocks is not None
              else tuple(map(write, buffer, saved)))
    with jax.named_scope("sample"):
      logits = model.logits(hidden[:, 0])
      uniform = jax.lax.dynamic_index_in_dim(uniforms, i, 1, False)
      token, logprob, processed = logits_lib.sample(
          logits, uniform, *settings)
    generated = slots.generated + slots.active
    stop = jnp.any(token[:, None] == stop_ids[None], -1)
    ended = slots.active & (stop | (generated >= max_new_tokens))
    new = (token, logprob, processed)
    record = tuple(
        jax.lax.dynamic_update_slice_in_dim(r, n[:, None], i, 1)
        for r, n in zip(record, new))
    slots = slots._replace(
        token=token, generated=generated, active=slots.active & ~ended,
        steps=slots.steps + 1,
        useful=slots.useful + jnp.sum(slots.active, dtype=jnp.int32))
    return i + 1, slots, buffer, record, uniforms, settings

  def run_chunk(carry):
    n, slots, out = carry
    with jax.named_scope("refill"):
      slots = _refill(prefixes, slots, queue, tail, step_key)
    begun = slots.active
    before = slots.generated
    entry = jnp.minimum(slots.item, queue.prefix.shape[0] - 1)
    settings = (queue.temperature[entry], queue.top_k[entry],
                queue.top_p[entry], queue.min_p[entry])
    # Slots without work must not make the others pay for sorting.
    settings = (settings[0], jnp.where(begun, settings[1], 0),
                jnp.where(begun, settings[2], 1.0),
                jnp.where(begun, settings[3], 0.0))
    buffer = _kv_zeros(sizes, num_slots, chunk, kv_dtype)
    record = (jnp.zeros((num_slots, chunk), jnp.int32),
              jnp.zeros((num_slots, chunk), jnp.float32),
              jnp.zeros((num_slots, chunk), jnp.float32))
    uniforms = _uniforms(slots.row_key, before, chunk)
    inner = (jnp.int32(0), slots, buffer, record, uniforms, settings)
    _, slots, buffer, record, _, _ = jax.lax.while_loop(
        lambda c: (c[0] < chunk) & jnp.any(c[1].active), step, inner)

    with jax.named_scope("write"):
      new = slots.generated - before
      column = before[:, None] + jnp.arange(chunk)
      column = jnp.where(jnp.arange(chunk) < new[:, None], column,
                         max_new_tokens)
      row = jnp.where(begun, slots.item, queue.prefix.shape[0])
      put = lambda o, r: o.at[row[:, None], column].set(r, mode="drop")
      ended = begun & ~slots.active
      last = jnp.take_along_axis(record[0], jnp.maximum(new - 1, 0)[:, None],
                                 1)[:, 0]
      stop = jnp.any(last[:, None] == stop_ids[None], -1)
      at = jnp.where(ended, slots.item, queue.prefix.shape[0])
      out = Out(
          *[put(o, r) for o, r in zip(out[:3], record)],
          out.lengths.at[at].set(slots.generated, mode="drop"),
          out.stopped.at[at].set(stop, mode="drop"),
          out.end_chunk.at[at].set(slots.chunks, mode="drop"),
          out.slot.at[at].set(jnp.arange(num_slots), mode="drop"))

    def merge(slots):
      put = jax.vmap(lambda c, b, start: jax.lax.dynamic_update_slice(
          c, b, (0, start, 0)))
      if blocks is not None:
        kv = [tuple(put(c, b, slots.filled) for c, b in zip(cache, buf))
              for cache, buf in zip(slots.kv, buffer)]
      else:
        kv = tuple(jax.vmap(put, (0, 0, None))(c, b, slots.filled)
                   for c, b in zip(slots.kv, buffer))
      return slots._replace(kv=kv, filled=slots.filled + chunk)

    if max_new_tokens > chunk:
      slots = jax.lax.cond(jnp.any(slots.active), merge, lambda s: s, slots)
    return n + 1, slots._replace(chunks=slots.chunks + 1), out

  def more(carry):
    n, slots, _ = carry
    return (n < max_chunks) & (jnp.any(slots.active) | (slots.head < tail))

  _, slots, out = jax.lax.while_loop(more, run_chunk,
                                     (jnp.int32(0), slots, out))
  return slots, out
