"""Attention of a decode step on a mesh.

The kv heads of a layer are few; beyond them, a mesh splits slots, and each
device keeps some columns of every prompt (layout.py). So each device

    1. attends, for all slots, to its columns of their prompts,
    2. attends, for its own slots, to their completions,
    3. sends each device the part of both that belongs to its heads, with the
       softmax's norms, and puts together what it receives.

Sums over parts of a softmax: out = sum_i exp(lse_i) out_i / sum_i exp(lse_i).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from vigor_jax.policy import attention
from vigor_jax.policy import sharding
from vigor_jax.sampling import cache
from vigor_jax.sampling import layout as layout_lib

Array = jax.Array
P = jax.sharding.PartitionSpec


def prompt_attention(layout: layout_lib.Layout, columns: int):
  """`attention.causal_attend` whose keys and values are saved by columns.

  Args:
    columns: of the prefix store; shorter prompts are filled up, so that each
      device writes the columns that it keeps.
  """
  where = layout.placement.named(None, layout.columns, layout.heads or None,
                                 None)

  def attend(layer, q, k, v):
    # Fixed first, or how they are saved would spread back into the attention.
    k, v = (sharding.constrain(a, sharding.BATCH, None, "tensor", None)
            for a in (k, v))
    out, saved = attention.causal_attend(layer, q, k, v)
    pad = (0, 0), (0, columns - k.shape[1]), (0, 0), (0, 0)
    return out, tuple(
        jax.lax.with_sharding_constraint(jnp.pad(a, pad), where)
        for a in saved)

  return attend


def copies(layout: layout_lib.Layout, prefixes: Any, prefix: Array) -> Any:
  """Each slot's prompt, for a chunk: stores [L, S, K, Lp, hd].

  Where heads split all weights, a device has many slots and all columns. Taken
  out of the store in every step, the prompts would be written, too.
  """
  slots, heads = layout.slots, layout.heads or None

  def local(store, prefix):
    # Row by row: as a gather it is done in pieces, each moved three times.
    lead, _, *rest = store.shape
    one = lambda i, out: jax.lax.dynamic_update_slice_in_dim(
        out, jax.lax.dynamic_slice_in_dim(store, prefix[i], 1, 1), i, 1)
    return jax.lax.fori_loop(0, prefix.shape[0], one, jax.lax.empty(
        (lead, prefix.shape[0], *rest), store.dtype))

  run = jax.shard_map(
      local, mesh=layout.placement.mesh,
      in_specs=(P(None, None, heads), P(slots)),
      out_specs=P(None, slots, heads), check_vma=False)
  return jax.tree.map(lambda store: run(store, prefix), prefixes)


class Attention:
  """`attend` of one decode step; as `cache.attend_stores`, but spread.

  Args:
    layout: of the stores.
    prefixes, ring: stores of all layers; `copies` where the layout has no
      columns.
    prefix: int32 [S] rows of the prefix store.
    base: int32 [S] columns of its prompt that a slot sees.
    length: ring columns that hold anything; in_ring: bool [S, length].
    own: bool [C + 1], columns of the running chunk, and the token itself.
  """

  def __init__(self, layout: layout_lib.Layout, *, prefixes: Any, ring: Any,
               prefix: Array, base: Array, length: int, in_ring: Array,
               own: Array):
    self._layout, self._length = layout, length
    self._arrays = prefixes, ring, prefix, base, in_ring, own

  def __call__(self, layer, q: Array, k: Array, v: Array):
    """See `cache.attend_stores`."""
    at = self._layout
    heads = at.heads or None
    rows = P(at.slots, heads, None, None)
    stacked = lambda *axes: (P(None, *axes),) * 2
    by_head = not dict(at.rules).get("head_dim")
    out = (P(at.batch, at.heads + at.columns, None) if by_head
           else P(at.batch, heads, at.columns))
    new = P(at.slots, heads, None)
    run = jax.shard_map(
        functools.partial(self._local, by_head), mesh=at.placement.mesh,
        in_specs=(P(at.batch, heads, None), new, new, P(), (rows, rows),
                  stacked(None, heads, at.columns, None) if at.columns
                  else stacked(*rows), stacked(*rows),
                  P(at.batch), P(at.batch), P(at.slots, None), P()),
        out_specs=(out, new, new), check_vma=False)
    index, *buffer = layer
    # Made whole first: that their rows are split next must not spread back to
    # hidden states, which products take whole.
    k, v = (jax.lax.with_sharding_constraint(
        a, at.placement.named(at.batch, None, heads, None)) for a in (k, v))
    out, k, v = run(q[:, 0], k[:, 0], v[:, 0], index, tuple(buffer),
                    *self._arrays)
    return out[:, None], (k, v)

  def _local(self, by_head: bool, q, k, v, index, buffer, prefixes, ring,
             prefix, base, in_ring, own):
    """What one device does: S slots of its batch, s of the ring, H heads."""
    axes = self._layout.columns
    parts = self._layout.placement.count(axes)
    me = jax.lax.axis_index(axes) if axes else 0
    mine = k.shape[0]
    q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])

    held = prefixes[0].shape[-2]
    column = me * held + jnp.arange(held)
    keys, values = (store[index, prefix] if axes
                    else cache.columns(store, index, held)
                    for store in prefixes)
    prompt = [keys], [values], [column < base[:, None]]
    completion = *([cache.columns(r, index, self._length), b]
                   for r, b in zip(ring, buffer)), [
                       in_ring, own[None, :-1], own[None, -1:]]
    if not axes:  # All that its slots attend to is here.
      keys, values, seen = (a + b for a, b in zip(prompt, completion))
      out, _ = attended(cache.scores_of(q, keys, k), values, seen, k.dtype,
                        v)
      return out.reshape(mine, -1, out.shape[-1]).astype(k.dtype), k, v

    keys, values, seen = prompt
    prompts = attended(cache.scores_of(q, keys), values, seen, k.dtype)
    keys, values, seen = completion
    own_q = jax.lax.dynamic_slice_in_dim(q, me * mine, mine, 0)
    completions = attended(cache.scores_of(own_q, keys, k), values, seen,
                           k.dtype, v)

    # [S + s, H, hd] and [S + s, H], of all slots and of the device's own.
    out, lse = (jnp.concatenate([a, b]).reshape(
        q.shape[0] + mine, -1, *a.shape[3:])
        for a, b in zip(prompts, completions))
    send = functools.partial(jax.lax.all_to_all, axis_name=axes,
                             concat_axis=0, tiled=True)
    out = send(out.astype(k.dtype), split_axis=1 if by_head else 2)
    lse = (send(lse, split_axis=1) if by_head
           else jax.lax.all_gather(lse, axes, tiled=True))

    def received(a):
      """[parts + 1, S, ...]: each device's columns, then completions."""
      a = a.reshape(parts, q.shape[0] + mine, *a.shape[1:])
      whole, rows = jnp.split(a, [q.shape[0]], 1)
      return jnp.concatenate([whole, rows.reshape(1, *whole.shape[1:])])

    out, lse = received(out), received(lse)
    w = jax.nn.softmax(lse, 0)[..., None]
    return jnp.sum(w * out, 0).astype(k.dtype), k, v


def attended(scores: list[Array], values, masks: list[Array], dtype, v=None
             ) -> tuple[Array, Array]:
  """(out [S, K, H/K, hd], log of the softmax's norm [S, K, H/K]), float32.

  Parts of the columns stay apart: put together, all scores would be written
  once more. A row that sees nothing has a norm of about exp(-1e30): it does
  not count.

  Args:
    scores, values: parts, see `cache`.
    masks: bool [S or 1, .] of each part of the scores.
  """
  hd = values[0].shape[-1]
  scores = [jnp.where(mask[:, None, None], part * hd**-0.5, -1e30)
            for part, mask in zip(scores, masks, strict=True)]
  peak = functools.reduce(
      jnp.maximum, [jnp.max(part, -1, keepdims=True) for part in scores])
  # Held, and what is held added up: left alone, exp is computed, and float32
  # scores are read, once for the norm and once for the product.
  e = jax.lax.optimization_barrier(
      [jnp.exp(part - peak).astype(dtype) for part in scores])
  norm = sum(jnp.sum(part, -1, keepdims=True, dtype=jnp.float32)
             for part in e)
  out = cache.mixed(e, values, v, preferred_element_type=jnp.float32) / norm
  return out, (peak + jnp.log(norm))[..., 0]
