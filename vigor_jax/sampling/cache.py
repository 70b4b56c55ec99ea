"""Where keys and values live between decode steps.

    prefixes   [P, K, hd, Lp]   one row per prompt of the step, shared by all
                                of its rollouts
    ring       [S, K, hd, R]    completions: every slot writes decode step t
                                at column t mod R, so a step never scatters
    buffer     [S, K, hd, C]    the running chunk, merged into the ring after
                                it (absent when a completion fits one chunk)

Values are laid out [.., K, L, hd]. A column of the ring belongs to a rollout
if it was written after the rollout began; R is at least the longest
completion, so nothing is overwritten while it is needed. Keys are stored
rotated, so columns may lie in any order.

The unrolled path gathers the active slots' prefixes and ring columns once per
chunk into a `view` [w, K, hd, Lp + b + C], the running chunk's columns at its
end; the scanned path (large models) reads the stores in every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vigor_jax.policy import transformer

Array = jax.Array
# Models up to these sizes run their layers unrolled, from fused weights.
_UNROLLED_LAYERS = 12
_UNROLLED_PARAMS = 2**28


def unrolled(sizes: transformer.Sizes) -> bool:
  """Small models run their layers one by one: no slices of stacked arrays."""
  return (sizes.layers <= _UNROLLED_LAYERS
          and sizes.num_params <= _UNROLLED_PARAMS)


def empty(sizes, rows: int, length: int, dtype) -> Any:
  """Per layer (keys [rows, K, hd, L], values [rows, K, L, hd]).

  A list over layers when unrolled, else stacked on axis 0.
  """
  lead = (rows, sizes.kv_heads)
  keys, values = (sizes.head_dim, length), (length, sizes.head_dim)
  if unrolled(sizes):
    return [(jnp.zeros(lead + keys, dtype), jnp.zeros(lead + values, dtype))
            for _ in range(sizes.layers)]
  lead = (sizes.layers, *lead)
  return jnp.zeros(lead + keys, dtype), jnp.zeros(lead + values, dtype)


def nbytes(sizes, rows: int, length: int, dtype) -> int:
  """Bytes of `empty` with these arguments."""
  return (2 * sizes.layers * sizes.kv_heads * sizes.head_dim * rows * length
          * jnp.dtype(dtype).itemsize)


def ring_length(max_new_tokens: int, chunk: int) -> int:
  """Columns of the ring; 0 when every completion fits one chunk."""
  if max_new_tokens <= chunk:
    return 0
  return -(-max_new_tokens // chunk) * chunk


def put_prompts(kv, new, rows: Array) -> Any:
  """The prefix store with prompts [N, T, K, hd] written at `rows`.

  Rows out of range are dropped.
  """

  def put(pair, news):
    k = jnp.transpose(news[0], (0, 2, 3, 1)).astype(pair[0].dtype)
    v = jnp.swapaxes(news[1], 1, 2).astype(pair[1].dtype)
    return (pair[0].at[rows, :, :, : k.shape[3]].set(k, mode="drop"),
            pair[1].at[rows, :, : v.shape[2]].set(v, mode="drop"))

  if isinstance(kv, list):
    return [put(pair, news) for pair, news in zip(kv, new)]
  return jax.vmap(put)(kv, new)


def view(prefixes, ring, prefix: Array, slots: Array | None, length: int,
         chunk: int, dtype) -> list[tuple[Array, Array]]:
  """Per layer the keys and values that `w` slots attend to in a chunk.

  Args:
    prefixes, ring: stores, lists over layers.
    prefix: int32 [w] prefix row of each.
    slots: int32 [w] their ring rows, None for all in order.
    length: ring columns that hold anything.
    chunk: columns to append for the chunk's own tokens.
    dtype: of the computation.
  """
  out = []
  for (pk, pv), (rk, rv) in zip(prefixes, ring):
    pk, pv = pk[prefix].astype(dtype), pv[prefix].astype(dtype)
    rk, rv = rk[..., :length], rv[..., :length, :]
    if slots is not None:
      rk, rv = rk[slots], rv[slots]
    w, heads, hd, _ = pk.shape
    out.append((
        jnp.concatenate([pk, rk.astype(dtype),
                         jnp.zeros((w, heads, hd, chunk), dtype)], 3),
        jnp.concatenate([pv, rv.astype(dtype),
                         jnp.zeros((w, heads, chunk, hd), dtype)], 2)))
  return out


def merge(ring, buffer, column: Array) -> Any:
  """The ring with a chunk's keys and values written at `column`, all slots.

  ring: list or stacked pair; buffer: like it, with C columns.
  """

  def put(pair, news):
    k, v = pair
    return (
        jax.lax.dynamic_update_slice_in_dim(
            k, news[0].astype(k.dtype), column, k.ndim - 1),
        jax.lax.dynamic_update_slice_in_dim(
            v, news[1].astype(v.dtype), column, v.ndim - 2))

  if isinstance(ring, list):
    return [put(pair, news) for pair, news in zip(ring, buffer)]
  return put(ring, buffer)


def _weights(scores: Array, mask: Array, hd: int, dtype) -> Array:
  scores = jnp.where(mask[:, None, None], scores * hd**-0.5, -1e30)
  return jax.nn.softmax(scores, -1).astype(dtype)


def attend_view(layer, q: Array, k: Array, v: Array, *, mask: Array,
                column: Array):
  """One new token per row against its view; it is written at `column`.

  Args:
    layer: (keys [w, K, hd, N], values [w, K, N, hd]).
    q: [w, 1, H, hd]; k, v: [w, 1, K, hd].
    mask: bool [w, N], the new column included.

  Returns:
    (out [w, 1, H, hd], the layer with the new column).
  """
  keys, values = layer
  s, _, h, hd = q.shape
  kh = k.shape[2]
  put = jax.lax.dynamic_update_slice_in_dim
  keys = put(keys, k[:, 0, :, :, None], column, 3)
  values = put(values, v[:, 0, :, None], column, 2)
  q = q.reshape(s, kh, h // kh, hd)
  scores = jnp.einsum("skgd,skdm->skgm", q, keys,
                      preferred_element_type=jnp.float32)
  w = _weights(scores, mask, hd, q.dtype)
  out = jnp.einsum("skgm,skmd->skgd", w, values)
  return out.reshape(s, 1, h, hd), (keys, values)


def attend_stores(layer, q: Array, k: Array, v: Array, *, store,
                  prefix: Array, length: int, mask: Array):
  """One new token per slot against prefix store, ring, chunk and itself.

  Args:
    layer: (its index, ring keys, values, buffer keys, values).
    store: the prefix store of all layers. The slots' rows are taken straight
      out of it: a slice of the layer would be a copy of all prompts.
    prefix: int32 [S] rows of the prefix store.
    length: ring columns that hold anything.
    mask: bool [S, Lp + length + C + 1].

  Returns:
    (out [S, 1, H, hd], (k [S, K, hd], v [S, K, hd])).
  """
  index, rk, rv, bk, bv = layer
  pk, pv = (a[index, prefix] for a in store)
  s, _, h, hd = q.shape
  kh = k.shape[2]
  q = q.reshape(s, kh, h // kh, hd)
  k, v = k[:, 0], v[:, 0]
  keys = [a.astype(q.dtype) for a in (pk, rk[..., :length], bk)]
  values = [a.astype(q.dtype) for a in (pv, rv[..., :length, :], bv)]
  f32 = dict(preferred_element_type=jnp.float32)
  scores = jnp.concatenate(
      [*[jnp.einsum("skgd,skdm->skgm", q, a, **f32) for a in keys],
       jnp.einsum("skgd,skd->skg", q, k, **f32)[..., None]], -1)
  w = _weights(scores, mask, hd, q.dtype)
  out, first = w[..., -1:] * v[:, :, None], 0
  for a in values:
    last = first + a.shape[2]
    out += jnp.einsum("skgm,skmd->skgd", w[..., first:last], a)
    first = last
  return out.reshape(s, 1, h, hd), (k, v)
