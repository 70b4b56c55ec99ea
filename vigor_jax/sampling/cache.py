"""Where keys and values live between decode steps.

    prefixes   [P, K, Lp, hd]   one row per prompt of the step, shared by all
                                of its rollouts
    ring       [S, K, R, hd]    completions: every slot writes decode step t
                                at column t mod R, so a step never scatters
    buffer     [S, K, C, hd]    the running chunk, merged into the ring after
                                it (absent when a completion fits one chunk)

Keys lie [.., K, hd, L] on one device, where CPUs multiply them twice as fast,
and as values on a mesh (`as_values`), so that no axis need be padded to a
TPU's lanes where a device keeps few columns. A column of the
ring belongs to a rollout if it was written after the rollout began; R is at
least the longest completion, so nothing is overwritten while it is needed. Keys
are stored rotated, so columns may lie in any order.

The unrolled path gathers the active slots' prefixes and ring columns once per
chunk into a `view` [w, K, hd, Lp + b + C], the running chunk's columns at its
end; the scanned path (large models) reads the stores in every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vigor_jax.policy import transformer

Array = jax.Array
# Models up to these sizes run their layers unrolled, from fused weights.
_UNROLLED_LAYERS = 12
_UNROLLED_PARAMS = 2**28


def unrolled(sizes: transformer.Sizes) -> bool:
  """Small models run their layers one by one: no slices of stacked arrays."""
  return (sizes.layers <= _UNROLLED_LAYERS
          and sizes.num_params <= _UNROLLED_PARAMS)


def empty(sizes, rows: int, length: int, dtype, as_values: bool = False
          ) -> Any:
  """Per layer (keys [rows, K, hd, L], values [rows, K, L, hd]).

  A list over layers when unrolled, else stacked on axis 0.

  Args:
    as_values: stacked keys are [rows, K, L, hd], too.
  """
  lead = (rows, sizes.kv_heads)
  keys, values = (sizes.head_dim, length), (length, sizes.head_dim)
  if unrolled(sizes):
    return [(jnp.zeros(lead + keys, dtype), jnp.zeros(lead + values, dtype))
            for _ in range(sizes.layers)]
  lead = (sizes.layers, *lead)
  return (jnp.zeros(lead + (values if as_values else keys), dtype),
          jnp.zeros(lead + values, dtype))


def nbytes(sizes, rows: int, length: int, dtype) -> int:
  """Bytes of `empty` with these arguments."""
  return (2 * sizes.layers * sizes.kv_heads * sizes.head_dim * rows * length
          * jnp.dtype(dtype).itemsize)


def ring_length(max_new_tokens: int, chunk: int) -> int:
  """Columns of the ring; 0 when every completion fits one chunk."""
  if max_new_tokens <= chunk:
    return 0
  return -(-max_new_tokens // chunk) * chunk


def put_prompts(kv, new, rows: Array, as_values: bool = False) -> Any:
  """The prefix store with prompts [N, T, K, hd] written at `rows`.

  Rows out of range are dropped.
  """

  def put(store, new):
    new = jnp.swapaxes(new, 1, 2).astype(store.dtype)
    return store.at[rows, :, : new.shape[2]].set(new, mode="drop")

  def put_keys(store, new):
    new = jnp.transpose(new, (0, 2, 3, 1)).astype(store.dtype)
    return store.at[rows, :, :, : new.shape[3]].set(new, mode="drop")

  if isinstance(kv, list):
    return [(put_keys(pk, k), put(pv, v))
            for (pk, pv), (k, v) in zip(kv, new)]
  (pk, pv), (k, v) = kv, new
  return (jax.vmap(put if as_values else put_keys)(pk, k),
          jax.vmap(put)(pv, v))


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


def merge(ring, buffer, column: Array, as_values: bool = False) -> Any:
  """The ring with a chunk's keys and values written at `column`, all slots.

  ring: list or stacked pair; buffer: like it, with C columns.
  """

  def put(store, new, axis):
    return jax.lax.dynamic_update_slice_in_dim(
        store, new.astype(store.dtype), column, store.ndim - axis)

  if isinstance(ring, list):
    return [(put(k, nk, 1), put(v, nv, 2))
            for (k, v), (nk, nv) in zip(ring, buffer)]
  (k, v), (nk, nv) = ring, buffer
  return put(k, nk, 2 if as_values else 1), put(v, nv, 2)


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


def attend_stores(layer, q: Array, k: Array, v: Array, *, prefixes, ring,
                  prefix: Array, length: int, mask: Array,
                  as_values: bool = False):
  """One new token per slot against prefix store, ring, chunk and itself.

  Args:
    layer: (its index, buffer keys, buffer values).
    prefixes, ring: the stores of all layers. What is attended to is taken
      straight out of them: a slice of the layer would be a copy.
    prefix: int32 [S] rows of the prefix store.
    length: ring columns that hold anything.
    mask: bool [S, Lp + length + C + 1].
    as_values: keys lie [.., L, hd].

  Returns:
    (out [S, 1, H, hd], (k [S, K, hd], v [S, K, hd])).
  """
  index, *buffer = layer
  k, v = k[:, 0], v[:, 0]
  keys, values = (
      [p[index, prefix], columns(r, index, length, last), b]
      for p, r, b, last in zip(prefixes, ring, buffer,
                               (not as_values, False)))
  s, _, h, hd = q.shape
  q = q.reshape(s, k.shape[1], -1, hd)
  scores = scores_of(q, keys, k, as_values)
  ends = np.cumsum([part.shape[-1] for part in scores])[:-1]
  w = _weights(jnp.concatenate(scores, -1), mask, hd, q.dtype)
  out = mixed(jnp.split(w, ends, -1), values, v)
  return out.reshape(s, 1, h, hd), (k, v)


def columns(store: Array, index: Array, length: int, last: bool = False
            ) -> Array:
  """The first columns [S, K, length, hd] of a layer of a stacked store.

  Args:
    last: columns are the last axis, of the result, too.
  """
  size = list(store.shape)
  size[0], size[-1 if last else -2] = 1, length
  return jax.lax.dynamic_slice(store, (index, 0, 0, 0, 0), size)[0]


def scores_of(q: Array, keys: list[Array], k: Array | None = None,
              as_values: bool = True) -> list[Array]:
  """float32 parts [S, K, H/K, .] of queries [S, K, H/K, hd].

  Args:
    keys: parts [S, K, ., hd].
    k: [S, K, hd] of the token itself: one more part, of one column.
    as_values: False = the parts are [S, K, hd, .].
  """
  product = "skgd,skmd->skgm" if as_values else "skgd,skdm->skgm"
  f32 = dict(preferred_element_type=jnp.float32)
  parts = [jnp.einsum(product, q, a.astype(q.dtype), **f32) for a in keys]
  if k is not None:
    parts.append(jnp.einsum("skgd,skd->skg", q, k, **f32)[..., None])
  return parts


def mixed(w: list[Array], values: list[Array], v: Array | None = None, **how
          ) -> Array:
  """Values [S, K, H/K, hd] under weights in parts like `scores_of`."""
  out = 0 if v is None else w[-1] * v[:, :, None]
  for part, a in zip(w, values):
    out += jnp.einsum("skgm,skmd->skgd", part, a.astype(part.dtype), **how)
  return out
