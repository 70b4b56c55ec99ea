"""Masked attention with grouped heads, whole or by blocks of queries.

    s = q k / sqrt(hd), masked;  p = exp(s - lse);  out = p v
    dv = p' do;  ds = p (do v' - sum(do out));  dq = ds k;  dk = ds' q

Softmax is in float32. A query with nothing allowed (padding) gives the mean of
v: finite, and for no use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array
# Queries whose scores are alive at once, in the forward and in the backward
# pass: there each block adds to the gradients of all keys before it.
FORWARD_BLOCK, BACKWARD_BLOCK = 256, 384
# Of rows longer than LONG: each block is compiled.
LONG, LONG_BLOCK = 2048, 512


def grouped_attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
  """Attention of all queries at once, differentiated by jax.

  Args:
    q: [B, T, H, hd]; k, v: [B, U, K, hd] with H a multiple of K.
    mask: bool, broadcastable to [B, T, U]; True where attending is allowed.

  Returns:
    [B, T, H, hd].
  """
  b, t, h, hd = q.shape
  weights = jax.nn.softmax(_scores(q, k, mask), axis=-1).astype(q.dtype)
  out = jnp.einsum("bkgtu,bukd->btkgd", weights, v)
  return out.reshape(b, t, h, hd)


def blocked_attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
  """`grouped_attention` of rows in which nobody looks ahead.

  In long rows queries are taken in blocks, each against the keys up to its end
  only: half of the scores are never made, and one block's are alive at a time,
  in the backward pass too. Short rows are done at once.
  """
  if q.shape[1] <= 4 * FORWARD_BLOCK:
    return grouped_attention(q, k, v, mask)
  return by_blocks(q, k, v, mask)[0]


@jax.custom_vjp
def by_blocks(q: Array, k: Array, v: Array, mask: Array
              ) -> tuple[Array, Array]:
  """`blocked_attention` of rows of any length, and the softmax's norms.

  Returns:
    (out [B, T, H, hd], lse float32 [B, H, T], which has no gradient).
  """
  out, norms = [], []
  for first, end in _blocks(q.shape[1], FORWARD_BLOCK):
    scores = _scores(q[:, first:end], k[:, :end], mask[:, first:end, :end])
    peak = jnp.max(scores, -1, keepdims=True)
    e = jnp.exp(scores - peak)
    norm = jnp.sum(e, -1, keepdims=True)
    # Divided after the product, where there is less to divide.
    out.append(_mixed(e, v[:, :end], q.dtype) / norm)
    norms.append((peak + jnp.log(norm))[..., 0])
  return _joined(out, q), jnp.concatenate(norms, -1).reshape(
      q.shape[0], q.shape[2], q.shape[1])


@jax.custom_vjp
def again(q: Array, k: Array, v: Array, mask: Array, lse: Array) -> Array:
  """`by_blocks` with known norms, which saves it the reductions."""
  lse = _by_group(lse, k)
  out = []
  for first, end in _blocks(q.shape[1], FORWARD_BLOCK):
    scores = _scores(q[:, first:end], k[:, :end], mask[:, first:end, :end])
    out.append(_mixed(jnp.exp(scores - lse[..., first:end, None]),
                      v[:, :end], q.dtype))
  return _joined(out, q)


def _by_group(lse: Array, k: Array) -> Array:
  """[B, H, T] as [B, K, H/K, T]."""
  b, h, t = lse.shape
  return lse.reshape(b, k.shape[2], h // k.shape[2], t)


def _mixed(weights: Array, v: Array, dtype) -> Array:
  """float32 [B, K, H/K, T, hd]."""
  return jnp.einsum("bkgtu,bukd->bkgtd", weights.astype(dtype), v,
                    preferred_element_type=jnp.float32)


def _joined(blocks: list[Array], q: Array) -> Array:
  return jnp.moveaxis(jnp.concatenate(blocks, 3), 3, 1).reshape(
      q.shape).astype(q.dtype)


def _blocks(length: int, size: int) -> list[tuple[int, int]]:
  """(first, end) of each block of queries."""
  size = size if length <= LONG else LONG_BLOCK
  return [(first, min(first + size, length))
          for first in range(0, length, size)]


def after(x: Array, *done: Array) -> Array:
  """x, which is ready when all of `done` are.

  The compiler does side by side whatever memory allows; this makes it free
  what went into `done` before it goes on with x.
  """
  told = sum(a[(0,) * a.ndim].astype(jnp.float32) for a in done)
  return x * jnp.where(jnp.isfinite(told), 1, jnp.nan).astype(x.dtype)


def _scores(q: Array, k: Array, mask: Array) -> Array:
  """float32 [B, K, H/K, T, U]."""
  b, t, h, hd = q.shape
  q = q.reshape(b, t, k.shape[2], h // k.shape[2], hd)
  scores = jnp.einsum("btkgd,bukd->bkgtu", q, k,
                      preferred_element_type=jnp.float32) * hd**-0.5
  return jnp.where(mask[:, None, None], scores, -1e30)


def _backward(saved, do):
  q, k, v, mask, out, lse = saved
  # Where the forward pass was just computed again, its scores would be kept
  # for here, or made again early: they must wait for what they are made for.
  q, k, do = jax.lax.optimization_barrier((q, k, do))
  b, t, h, hd = q.shape
  heads = k.shape[2], h // k.shape[2], hd
  f32 = dict(preferred_element_type=jnp.float32)
  dot = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), -1)
  dot = jnp.moveaxis(dot.reshape(b, t, *heads[:2]), 1, 3)[..., None]
  lse = _by_group(lse, k)
  dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(
      v.shape, jnp.float32)
  for first, end in _blocks(t, BACKWARD_BLOCK):
    part = slice(first, end)
    query = after(q[:, part], dq[-1], dk, dv) if dq else q[:, part]
    scores = _scores(query, k[:, :end], mask[:, part, :end])
    p = jnp.exp(scores - lse[..., part, None])
    grouped = do[:, part].reshape(b, end - first, *heads)
    dv = dv.at[:, :end].add(jnp.einsum(
        "bkgtu,btkgd->bukd", p.astype(q.dtype), grouped, **f32))
    dp = jnp.einsum("btkgd,bukd->bkgtu", grouped, v[:, :end], **f32)
    ds = (p * (dp - dot[..., part, :]) * hd**-0.5).astype(q.dtype)
    dq.append(jnp.einsum("bkgtu,bukd->btkgd", ds, k[:, :end]).reshape(
        b, end - first, h, hd))
    dk = dk.at[:, :end].add(jnp.einsum(
        "bkgtu,btkgd->bukd", ds, query.reshape(grouped.shape), **f32))
  return (jnp.concatenate(dq, 1), dk.astype(k.dtype), dv.astype(v.dtype),
          None)


def _by_blocks_forward(q, k, v, mask):
  out, lse = by_blocks(q, k, v, mask)
  return (out, lse), (q, k, v, mask, out, lse)


def _again_forward(q, k, v, mask, lse):
  out = again(q, k, v, mask, lse)
  return out, (q, k, v, mask, out, lse)


by_blocks.defvjp(_by_blocks_forward,
                 lambda saved, g: _backward(saved, g[0]))
again.defvjp(_again_forward, lambda saved, g: (*_backward(saved, g), None))


def causal_attend(layer, q: Array, k: Array, v: Array):
  """Plain causal attention over one sequence per row; saves k and v."""
  del layer
  t = q.shape[1]
  mask = jnp.tril(jnp.ones((t, t), bool))[None]
  return blocked_attention(q, k, v, mask), (k, v)
