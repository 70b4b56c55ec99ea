"""The policy: a decoder-only transformer in the shape of Qwen and Llama.

RMSNorm, rotary positions (half-split, as in the Hugging Face checkpoints),
grouped-query attention, gated MLP, optional q/k/v biases and q/k norms. Sizes
are data (`Sizes`); one class serves every family.

The sampler and the trainer run the *same* block code. What differs between a
packed training row, a prefill and a decode step is only who attends to whom,
so that part is a callback, `attend(layer, q, k, v) -> (out, saved)`:

  q      [B, T, H, hd]     rotated queries
  k, v   [B, T, K, hd]     rotated keys, values of the new tokens
  out    [B, T, H, hd]
  saved  any pytree, returned per layer (a prefill saves k and v)

Layers are stacked on axis 0 of every block parameter. They run under one
`lax.scan` (compile time independent of depth), or unrolled when the caller
passes a list of per-layer inputs (decoding a small model: no slicing copies).
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp

from vigor_jax.policy import lora
from vigor_jax.policy import sharding
from vigor_jax.policy.sizes import Sizes

Array = jax.Array
Attend = Callable[..., tuple[Array, Any]]


def _normal(rngs: nnx.Rngs, shape, scale: float, dtype) -> nnx.Param:
  value = jax.random.normal(rngs.params(), shape, jnp.float32) * scale
  return nnx.Param(value.astype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: Array, w: Array, axes: int = 1) -> Array:
  """Contracts the last `axes` axes of x with the first of w.

  The same as jnp.tensordot but for how the gradient of w is written: JAX
  computes its transpose and turns it round, which XLA's CPU backend does at a
  third of the speed.
  """
  return jnp.tensordot(x, w, axes)


def _product_forward(x, w, axes):
  return jnp.tensordot(x, w, axes), (x, w)


def _product_backward(axes, saved, g):
  x, w = saved
  lead, trail = tuple(range(x.ndim - axes)), w.ndim - axes
  dx = jnp.tensordot(g, w, (tuple(range(g.ndim - trail, g.ndim)),
                            tuple(range(axes, w.ndim))))
  return dx, jnp.tensordot(x, g, (lead, lead))


product.defvjp(_product_forward, _product_backward)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale, in float32 (arXiv 1910.07467)."""

  def __init__(self, size: int, eps: float, dtype):
    self.scale = nnx.Param(jnp.ones((size,), dtype))
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(sizes: Sizes) -> Array:
  """Rotary inverse frequencies [hd / 2] (arXiv 2104.09864), scaled if asked.

  The "llama3" rule divides low frequencies by `factor`, leaves high ones and
  blends between, as published with Llama 3.1.
  """
  half = jnp.arange(0, sizes.head_dim, 2, dtype=jnp.float32)
  inv = 1.0 / sizes.rope_theta ** (half / sizes.head_dim)
  if not sizes.rope_scaling:
    return inv
  kind, *args = sizes.rope_scaling
  if kind == "linear":
    return inv / args[0]
  if kind == "llama3":
    factor, low, high, original = args
    wavelength = 2 * jnp.pi / inv
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv / factor + smooth * inv
    return jnp.where(wavelength > original / low, inv / factor,
                     jnp.where(wavelength < original / high, inv, blended))
  raise ValueError(f"unknown rope_scaling {kind!r}: 'linear' or 'llama3'")


def rope_tables(sizes: Sizes, positions: Array) -> tuple[Array, Array]:
  """cos and sin [..., 1, hd / 2] in float32 for integer positions [...]."""
  angle = positions[..., None].astype(jnp.float32) * rope_frequencies(sizes)
  return jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
  """Rotates x [..., heads, hd]: halves (a, b) -> (a c - b s, b c + a s)."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return out.astype(x.dtype)


def _gated(gate: Array, up: Array) -> Array:
  return jax.nn.silu(gate) * up


class Block(nnx.Module):
  """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
    dtype = jnp.dtype(sizes.param_dtype)
    d, h, k, hd, f = (sizes.width, sizes.heads, sizes.kv_heads,
                      sizes.head_dim, sizes.ffn)
    # Residual branches start smaller with depth (GPT-2's rule).
    out_scale = (2 * sizes.layers) ** -0.5
    self.attn_norm = RMSNorm(d, sizes.norm_eps, dtype)
    self.q = _normal(rngs, (d, h, hd), d**-0.5, dtype)
    self.k = _normal(rngs, (d, k, hd), d**-0.5, dtype)
    self.v = _normal(rngs, (d, k, hd), d**-0.5, dtype)
    self.o = _normal(rngs, (h, hd, d), (h * hd) ** -0.5 * out_scale, dtype)
    if sizes.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros((h, hd), dtype))
      self.k_bias = nnx.Param(jnp.zeros((k, hd), dtype))
      self.v_bias = nnx.Param(jnp.zeros((k, hd), dtype))
    if sizes.qk_norm:
      self.q_norm = RMSNorm(hd, sizes.norm_eps, dtype)
      self.k_norm = RMSNorm(hd, sizes.norm_eps, dtype)
    self.mlp_norm = RMSNorm(d, sizes.norm_eps, dtype)
    self.gate = _normal(rngs, (d, f), d**-0.5, dtype)
    self.up = _normal(rngs, (d, f), d**-0.5, dtype)
    self.down = _normal(rngs, (f, d), f**-0.5 * out_scale, dtype)
    self.sizes = sizes
    self.fused = self.paired = self.merged = False
    self.adapted = sizes.adapters.names if sizes.adapters else ()
    for name in self.adapted:
      shape = getattr(self, name)[...].shape
      setattr(self, f"{name}_adapter", lora.Adapter(
          shape, 2 if name == "o" else 1, sizes.adapters, rngs))

  def fuse(self) -> None:
    """Makes q, k and v one matrix, gate and up another, for decoding.

    The same numbers from fewer and wider products: columns of a product do
    not depend on each other.
    """
    flat = lambda a: a[...].reshape(a[...].shape[0], -1)
    self.qkv = nnx.Param(
        jnp.concatenate([flat(self.q), flat(self.k), flat(self.v)], 1))
    self.gate_up = nnx.Param(
        jnp.concatenate([self.gate[...], self.up[...]], 1))
    del self.q, self.k, self.v, self.gate, self.up
    self.fused = True

  def pair(self, groups: bool) -> None:
    """Joins arrays as `fuse` does, of stacked layers split over devices.

    The axes that are split stay: gate and up become [2, F, D], k and v
    [2, K, hd, D], queries [H, hd, D]. D is last, as a TPU's products read
    them; otherwise each dispatch copies them.

    Args:
      groups: heads are split like kv heads; q, k and v become
        [K, H/K + 2, hd, D], with each kv head the queries that read it.
    """
    turned = lambda a: jnp.moveaxis(a[...], 1, -1)
    q, k, v = map(turned, (self.q, self.k, self.v))
    if groups:
      q = q.reshape(*k.shape[:2], -1, *k.shape[2:])
      self.grouped = nnx.Param(
          jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2))
    else:
      self.queries, self.kv = nnx.Param(q), nnx.Param(jnp.stack([k, v], 1))
    self.gate_up = nnx.Param(
        jnp.stack([turned(self.gate), turned(self.up)], 1))
    del self.q, self.k, self.v, self.gate, self.up
    self.paired = True

  def merge(self) -> None:
    """Puts adapted matrices in the place of the base's; see lora.py."""
    for name in self.adapted:
      matrix = getattr(self, f"{name}_adapter").matrix
      setattr(self, name, nnx.Param(matrix(getattr(self, name)[...])))
    self.merged = True

  def _times(self, name: str, x: Array, axes: int = 1) -> Array:
    """x times a matrix of this layer, adapted where it has an adapter."""
    w = getattr(self, name)[...]
    if name not in self.adapted:
      w = w.astype(x.dtype)
      if name in ("o", "down"):
        return sharding.leaving(product, name, x, w, axes)
      return product(x, w, axes)
    adapter = getattr(self, f"{name}_adapter")
    w = w if self.merged else adapter.matrix(w)
    return lora.product(x, w.astype(x.dtype), adapter.a[...], adapter.b[...],
                        adapter.scale, axes)

  def project(self, y: Array) -> tuple[Array, Array, Array]:
    """Queries [B, T, H, hd], keys and values [B, T, K, hd], not rotated."""
    sizes, dtype = self.sizes, y.dtype
    if self.fused:
      h, k = sizes.heads, sizes.kv_heads
      qkv = product(y, self.qkv[...].astype(dtype)).reshape(
          *y.shape[:2], h + 2 * k, sizes.head_dim)
      q, k, v = jnp.split(qkv, (h, h + k), axis=2)
    elif self.paired:
      times = lambda w, what: jnp.einsum(what, y, w[...].astype(dtype))
      if hasattr(self, "grouped"):
        qkv = times(self.grouped, "btd,kged->btkge")
        q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
        q = q.reshape(*y.shape[:2], sizes.heads, sizes.head_dim)
      else:
        q = times(self.queries, "btd,hed->bthe")
        k, v = times(self.kv, "btd,pked->pbtke")
    else:
      q, k, v = (self._times(name, y) for name in "qkv")
    if sizes.qkv_bias:
      q = q + self.q_bias[...].astype(dtype)
      k = k + self.k_bias[...].astype(dtype)
      v = v + self.v_bias[...].astype(dtype)
    if sizes.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return q, k, v

  def mlp(self, y: Array, gated: Callable[[Array, Array], Array]) -> Array:
    """Gated MLP of y [B, T, D]."""
    if self.fused:
      gate, up = jnp.split(product(y, self.gate_up[...].astype(y.dtype)), 2,
                           -1)
    elif self.paired:
      gate, up = jnp.einsum("btd,pfd->pbtf", y,
                            self.gate_up[...].astype(y.dtype))
    else:
      gate, up = self._times("gate", y), self._times("up", y)
    return self._times("down", gated(gate, up))

  def __call__(self, x: Array, rope, attend: Attend,
               whole: Callable[[Array], Array] = sharding.entering,
               split: Callable[[Array], Array] = lambda y: y,
               gated: Callable[[Array, Array], Array] = _gated
               ) -> tuple[Array, Any]:
    """x [B, T, D] -> (x [B, T, D], whatever `attend` saved).

    Where x is a device's piece of the positions (pieces.py), `whole` gathers
    what enters products, and `split` sums and splits what leaves them.
    `gated` is silu(gate) * up.
    """
    x, saved = self.attention_half(x, rope, attend, whole, split)
    return self.mlp_half(x, whole, split, gated), saved

  def attention_half(self, x: Array, rope, attend: Attend, whole, split
                     ) -> tuple[Array, Any]:
    """x + attention(norm(x)), and what `attend` saved."""
    with jax.named_scope("attention"):
      q, k, v = self.project(whole(self.attn_norm(x)))
      out, saved = attend(rotate(q, rope), rotate(k, rope), v)
      x = x + split(self._times("o", out, 2))
      return sharding.hidden(x), saved

  def mlp_half(self, x: Array, whole, split, gated) -> Array:
    """x + mlp(norm(x))."""
    with jax.named_scope("mlp"):
      return sharding.hidden(
          x + split(self.mlp(whole(self.mlp_norm(x)), gated)))


class Transformer(nnx.Module):
  """Embedding, stacked blocks, final norm, output head."""

  def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
    dtype = jnp.dtype(sizes.param_dtype)
    self.sizes, self.paired = sizes, False
    self.embed = _normal(rngs, (sizes.vocab, sizes.width), 0.02, dtype)

    @nnx.split_rngs(splits=sizes.layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
      return Block(sizes, rngs)

    self.blocks = stack(rngs)
    self.final_norm = RMSNorm(sizes.width, sizes.norm_eps, dtype)
    if not sizes.tied:
      self.head = _normal(rngs, (sizes.width, sizes.vocab), 0.02, dtype)

  def output_head(self) -> Array:
    """Output matrix [D, V] in the compute dtype."""
    if self.sizes.tied:
      head = self.embed[...].T
    else:
      head = self.output[...].T if self.paired else self.head[...]
    return head.astype(self.sizes.dtype)

  def logits(self, hidden: Array) -> Array:
    """float32 logits [..., V] of hidden states [..., D]."""
    return jnp.matmul(hidden, self.output_head(),
                      preferred_element_type=jnp.float32)

  def pair(self, groups: bool) -> None:
    """See `Block.pair`; the output matrix becomes [V, D], like `embed`."""
    self.blocks.pair(groups)
    if not self.sizes.tied:
      self.output = nnx.Param(self.head[...].T)
      del self.head
    self.paired = True

  def split_layers(self) -> list[Block]:
    """The blocks one by one, for unrolled loops."""
    graph, state = nnx.split(self.blocks)
    take = lambda i: jax.tree.map(lambda a: a[i], state)
    return [nnx.merge(graph, take(i)) for i in range(self.sizes.layers)]

  def __call__(self, tokens: Array, positions: Array, attend: Attend, *,
               layers: Any = None, blocks: list[Block] | None = None,
               remat: bool = False, rope: tuple[Array, Array] | None = None
               ) -> tuple[Array, Any]:
    """Hidden states after the final norm.

    Args:
      tokens: int32 [B, T].
      positions: int32 [B, T], rotary positions.
      attend: `attend(layer, q, k, v) -> (out, saved)`, see the module's top.
      layers: per-layer input of `attend`: a pytree stacked on axis 0, or a
        list of pytrees when `blocks` is given.
      blocks: `split_layers()`, to unroll the layers instead of scanning.
      remat: recompute each layer in the backward pass.
      rope: `rope_tables` of the positions, where the caller has them.

    Returns:
      (hidden [B, T, D] in the compute dtype, saved: stacked or a list).
    """
    x = sharding.hidden(self.embed[...][tokens].astype(self.sizes.dtype))
    if rope is None:
      rope = rope_tables(self.sizes, positions)
    if blocks is not None:
      layers = layers or [None] * len(blocks)
      saved = []
      for block, layer in zip(blocks, layers, strict=True):
        x, out = block(x, rope, functools.partial(attend, layer))
        saved.append(out)
      return self.final_norm(x), saved

    graph, state = nnx.split(self.blocks)

    def body(x, scanned):
      state, layer = scanned
      state = sharding.constrain_layer(state, training=remat)
      block = nnx.merge(graph, state)
      return block(x, rope, functools.partial(attend, layer))

    if remat:
      body = jax.checkpoint(body)
    x, saved = jax.lax.scan(body, x, (state, layers))
    return self.final_norm(x), saved


def create(sizes: Sizes, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
  """(graph, params) of a freshly initialised transformer.

  One compiled program: initialising array by array takes seconds.
  """
  return abstract(sizes)[0], _init(sizes)(seed)


@functools.lru_cache(maxsize=None)
def _init(sizes: Sizes) -> Callable[[int], nnx.State]:
  return jax.jit(lambda seed: nnx.split(
      Transformer(sizes, nnx.Rngs(params=jax.random.key(seed))))[1])


def abstract(sizes: Sizes) -> tuple[nnx.GraphDef, nnx.State]:
  """(graph, params as ShapeDtypeStructs): no memory, for loading and AOT."""
  model = nnx.eval_shape(lambda: Transformer(sizes, nnx.Rngs(params=0)))
  return nnx.split(model)
