"""Low-rank adapters: few parameters are trained, the base model is frozen.

    W' = W + alpha / rank * A B,   A [in, rank] drawn, B [rank, out] from 0

(arXiv 2106.09685.) The policy *is* the merged model: the trainer multiplies by
W' rounded exactly as the sampler's copy of it is, so that in bfloat16, where a
small A B vanishes beside W, both still speak of the same policy. The backward
pass never makes the gradient of W:

    dx = dy W'^T,   dA = s x^T (dy B^T),   dB = s (x A)^T dy,   s = alpha / rank

which is the gradient of W' projected on A and B at the price of a frozen
model's. Adapters, their moments and sums are float32 whatever the base is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from vigor_jax import checkpoints
from vigor_jax.policy.sizes import Adapters

Array = jax.Array


class Adapter(nnx.Module):
  """A and B beside one matrix.

  Args:
    shape: of the matrix, input axes first.
    axes: how many of them are input axes.
    adapters: rank and scale of the product A B.
    rngs: A is drawn with variance 1 / inputs.
  """

  def __init__(self, shape: tuple[int, ...], axes: int, adapters: Adapters,
               rngs: nnx.Rngs):
    inputs, rank = shape[:axes], adapters.rank
    a = jax.random.normal(rngs.params(), (*inputs, rank), jnp.float32)
    self.a = nnx.LoRAParam(a * math.prod(inputs) ** -0.5)
    self.b = nnx.LoRAParam(jnp.zeros((rank, *shape[axes:]), jnp.float32))
    self.scale = adapters.scale

  def matrix(self, w: Array) -> Array:
    """W' in the dtype of W. No gradient flows through it: see `product`."""
    return jax.lax.stop_gradient(
        merge(w, self.a[...], self.b[...], self.scale))


def merge(w: Array, a: Array, b: Array, scale: float) -> Array:
  """W + scale A B, made in float32 and rounded to the dtype of W."""
  change = jnp.tensordot(a, b, 1, precision="highest")
  return (w.astype(jnp.float32) + scale * change).astype(w.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def product(x: Array, w: Array, a: Array, b: Array, scale: float,
            axes: int) -> Array:
  """x W' over the last `axes` axes of x, with the gradient of A and B.

  Args:
    x: [..., *inputs]; w: W' [*inputs, *outputs] in the dtype of x.
    a: [*inputs, rank]; b: [rank, *outputs].
  """
  del a, b, scale
  return jnp.tensordot(x, w, axes)


def _forward(x, w, a, b, scale, axes):
  return product(x, w, a, b, scale, axes), (x, w, a, b)


def _backward(scale, axes, saved, g):
  x, w, a, b = saved
  lead = tuple(range(x.ndim - axes))
  outputs = w.ndim - axes
  last = tuple(range(g.ndim - outputs, g.ndim))
  dx = jnp.tensordot(g, w, (last, tuple(range(axes, w.ndim))))
  narrow = jnp.tensordot(
      g, b.astype(g.dtype), (last, tuple(range(1, b.ndim))))  # [..., rank]
  da = jnp.tensordot(x, scale * narrow, (lead, lead))
  inner = jnp.tensordot(x, a.astype(x.dtype), axes)  # [..., rank]
  db = jnp.tensordot(scale * inner, g, (lead, lead))
  return dx, jnp.zeros_like(w), da.astype(a.dtype), db.astype(b.dtype)


product.defvjp(_forward, _backward)


# ------------------------------------------------------------------- trees


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
  """(adapters, frozen base) of an adapted model's parameters."""
  return nnx.split_state(params, nnx.LoRAParam, ...)


def join(adapters: nnx.State, base: nnx.State) -> nnx.State:
  """Undoes `split`."""
  return nnx.merge_state(base, adapters)


def reference(params: nnx.State) -> nnx.State:
  """The same model with B = 0: the base, which needs no second copy."""
  adapters, base = split(params)
  return join(jax.tree.map(jnp.zeros_like, adapters), base)


def merged(params: nnx.State, scale: float) -> nnx.State:
  """Parameters of the plain model, W' in the place of W."""
  adapters, base = split(params)
  flat, pairs = checkpoints.flatten(base), checkpoints.flatten(adapters)
  for path in [p for p in pairs if p.endswith("/a")]:
    stem = path.removesuffix("/a")
    flat[stem.removesuffix("_adapter")] = jax.vmap(
        functools.partial(merge, scale=scale))(
            flat[stem.removesuffix("_adapter")], pairs[path],
            pairs[f"{stem}/b"])
  return jax.tree.unflatten(jax.tree.structure(base), list(flat.values()))


def change(params: nnx.State, scale: float) -> Array:
  """|scale A B| / |W| over all adapted matrices, without making A B.

  |A B|^2 = sum of (A^T A) * (B B^T), two matrices of rank x rank a layer.
  """
  adapters, base = split(params)
  flat, pairs = checkpoints.flatten(base), checkpoints.flatten(adapters)
  squared = whole = jnp.zeros(())
  for path in [p for p in pairs if p.endswith("/a")]:
    stem = path.removesuffix("/a")
    a, b = pairs[path], pairs[f"{stem}/b"]
    layers, rank = a.shape[0], a.shape[-1]
    a, b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    squared += jnp.sum(jnp.einsum("lir,lis->lrs", a, a)
                       * jnp.einsum("lro,lso->lrs", b, b))
    w = flat[stem.removesuffix("_adapter")].astype(jnp.float32)
    whole += jnp.sum(w * w)
  return scale * jnp.sqrt(squared / whole)


def start(create: Any, base: nnx.State, seed: int, placement: Any
          ) -> nnx.State:
  """An adapted model's parameters that computes what `base` does.

  Args:
    create: seed -> parameters of the adapted model; its own base is not made.
    base: the plain model's.
    seed: of the matrices A.
    placement: where arrays live on a mesh; None = one device.
  """
  draw = lambda seed: split(create(seed))[0]
  where = None
  if placement is not None:
    where = placement.tree(jax.eval_shape(draw, 0))
  return join(jax.jit(draw, out_shardings=where)(seed), base)
