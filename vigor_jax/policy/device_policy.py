"""The split policy on one device, forward and backward, inside shard_map.

pieces.py says what is split how and maps these passes over the mesh.
"""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
import jax
from jax.experimental import layout
import jax.numpy as jnp

from vigor_jax import checkpoints
from vigor_jax.policy import attention
from vigor_jax.policy import packing
from vigor_jax.policy import sharding
from vigor_jax.policy import splash
from vigor_jax.policy import transformer
from vigor_jax.policy import vocabulary

Array = jax.Array


@jax.custom_vjp
def _gated(gate: Array, up: Array) -> Array:
  """silu(gate) * up, for the backward pass.

  Left alone, the compiler makes it and its gradients again in every product
  that they enter: twice as slow as to store them.
  """
  return jax.lax.optimization_barrier(jax.nn.silu(gate) * up)


def _gated_backward(saved, g):
  _, pull = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, *saved)
  return jax.lax.optimization_barrier(pull(g))


_gated.defvjp(lambda gate, up: (_gated(gate, up), (gate, up)),
              _gated_backward)


_MLP = ("mlp_norm", "gate", "up", "down")


def _whole(y: Array) -> Array:
  """All positions of pieces of them."""
  return jax.lax.all_gather(y, "tensor", axis=1, tiled=True)


def _split(y: Array) -> Array:
  """This device's positions of the sum over devices."""
  return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _laid(x: Array, order: tuple[int, ...]) -> Array:
  """x with its axes in memory in this order, outermost first."""
  return layout.with_layout_constraint(x, layout.Layout(order))


_laid.defvjp(lambda x, order: (_laid(x, order), None),
             lambda order, _, g: (g,))  # Gradients lie as they come.


class DevicePolicy:
  """What one device does, inside shard_map.

  Args:
    graph, placement, temperature, attention: see `pieces.Pieces`.
    specs: PartitionSpecs of the parameters.
  """

  def __init__(self, graph, placement, specs, temperature, attention):
    self._graph, self._temperature = graph, temperature
    self._attention = attention
    self._specs = checkpoints.flatten(specs)
    self._tensor = placement.mesh.shape["tensor"]
    self._placement = placement

  def _model(self, params):
    return nnx.merge(self._graph, params)

  # -------------------------------------------------------------- the parts

  def _gathered(self, graph, index: Array, state: Any, dtype
                ) -> transformer.Block:
    """A layer whole over fsdp; merged and cast before it travels."""
    block = nnx.merge(graph, state)
    block.merge()
    graph, state = nnx.split(block)
    flat = checkpoints.flatten(state)
    leaves = []
    for path, leaf in flat.items():
      axes = tuple(self._specs[f"blocks/{path}"])[1:]
      if "fsdp" in axes:
        axis = axes.index("fsdp")
        leaf = sharding.cast(leaf, dtype, index)
        if path in ("q", "k", "v"):
          # Left alone, the compiler would lay out all of q, k and v as
          # products want a layer, and keep those copies while the loop runs.
          leaf = _laid(_laid(leaf, (0, 1, 2)), (1, 2, 0))
        leaf = jax.lax.all_gather(leaf, "fsdp", axis=axis, tiled=True)
      leaves.append(leaf)
    return nnx.merge(
        graph, jax.tree.unflatten(jax.tree.structure(state), leaves))

  def _attend(self, mask: Array) -> transformer.Attend:
    sizes, by_kernel = self._sizes, None
    if self._attention == "splash":
      by_kernel = splash.attention_of(
          mask, max(sizes.kv_heads // self._tensor, 1))

    def attend(norm, q, k, v):
      heads = q.shape[2]
      groups = sizes.heads // sizes.kv_heads
      if sizes.kv_heads % self._tensor:
        # Whole on every device; these queries share one of them.
        first = jax.lax.axis_index("tensor") * heads // groups
        k, v = (jax.lax.dynamic_slice_in_dim(a, first, 1, 2) for a in (k, v))
      if by_kernel is not None:
        # It keeps its norms for its own backward pass, after a second forward
        # one: none of ours. Their place is held by a column.
        return by_kernel(q, k, v), jnp.zeros((len(q), heads, 1))
      if norm is None:
        return attention.by_blocks(q, k, v, mask)
      return attention.again(q, k, v, mask, norm), None
    return attend

  def _layer_gradient(self, graph, attend, rope, index, norm, state, trained,
                      x: Array, dx: Array) -> tuple[dict[str, Array], Array]:
    """(gradients of this layer's trained parameters, dx of its input).

    Args:
      attend: `_attend` of the micro-batch's mask.
      norm: the softmax's norms of the forward pass.
      trained: paths of them in `state`.
      x: the layer's input; dx: gradient of its output.
    """
    leaves, tree = jax.tree.flatten(state)
    pieces = dict(zip(checkpoints.flatten(state), leaves))
    merged = None

    def gather(some):
      nonlocal merged
      state = jax.tree.unflatten(tree, list({**pieces, **some}.values()))
      merged, state = nnx.split(self._gathered(graph, index, state, x.dtype))
      return state

    weights, home = jax.vjp(gather, {p: pieces[p] for p in trained})
    attend = functools.partial(attend, norm)
    middle, pull_attention = jax.vjp(
        lambda w, x: nnx.merge(merged, w).attention_half(
            x, rope, attend, _whole, _split)[0], weights, x)
    _, pull_mlp = jax.vjp(
        lambda w, x: nnx.merge(merged, w).mlp_half(x, _whole, _split, _gated),
        weights, middle)
    of_mlp, dx = pull_mlp(dx)
    is_mlp = lambda path: path.split("/")[0].removesuffix("_adapter") in _MLP
    flat = checkpoints.flatten(of_mlp)
    if any(pieces[p].dtype != x.dtype for p in trained):
      # Wide parameters leave little room: attention waits for these products
      # (not for their sums over devices), and what went into them is freed.
      dx = attention.after(dx, *[flat[p] for p in trained if is_mlp(p)])
    of_attention, dx = pull_attention(dx)
    other = checkpoints.flatten(of_attention)
    gradient = jax.tree.unflatten(
        jax.tree.structure(of_mlp),
        [flat[p] if is_mlp(p) else other[p] for p in flat])
    return home(gradient)[0], dx

  def _embedded(self, table: Array, tokens: Array) -> Array:
    """Rows of the table, hidden states [r, T/tensor, D] of tokens [r, T]."""
    at, inside = self._places(table, tokens)
    rows = sharding.cast(table[at], self._sizes.dtype, tokens[0, 0])
    x = jnp.where(inside[..., None], rows, 0)
    x = jax.lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
    if self._width_split:
      x = jax.lax.all_to_all(x, "fsdp", 0, 2, tiled=True)
    return x

  def _add_embedded(self, sums: Array, tokens: Array, dx: Array) -> Array:
    """`sums` [V/tensor, D/fsdp] with the gradient of `_embedded` added."""
    at, inside = self._places(sums, tokens)
    if self._width_split:
      dx = jax.lax.all_to_all(dx, "fsdp", 2, 0, tiled=True)
    dx = jax.lax.all_gather(dx, "tensor", axis=1, tiled=True)
    return sums.at[jnp.where(inside, at, len(sums))].add(
        dx.astype(sums.dtype), mode="drop")

  @property
  def _width_split(self) -> bool:
    return "fsdp" in self._specs["embed"]

  def _places(self, table: Array, tokens: Array) -> tuple[Array, Array]:
    """(row in this piece of the table, whether it is there) of tokens.

    Where the width is split, of the tokens of every device along fsdp.
    """
    if self._width_split:
      tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
    at = tokens - jax.lax.axis_index("tensor") * len(table)
    inside = (at >= 0) & (at < len(table))
    return jnp.where(inside, at, 0), inside

  def _top(self, graph, source: Array, state, x: Array) -> Array:
    """States [r, T, D] from which each token is predicted."""
    x = nnx.merge(graph, state)(x)
    x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
    return jnp.take_along_axis(x, source[..., None], axis=1)

  def _table(self, model) -> tuple[str, Array]:
    name = "embed" if model.sizes.tied else "head"
    return name, getattr(model, name)[...]

  def _vocabulary(self, name: str) -> vocabulary.Local:
    return vocabulary.Local(self._placement, name == "embed",
                            self._specs[name])

  def _surroundings(self, micro):
    return (packing.packed_mask(micro.prompt, micro.segment),
            transformer.rope_tables(self._sizes, micro.positions))

  # ------------------------------------------------------------- the passes

  def forward(self, params, micro: packing.Packed, keep: bool):
    """(log-probs, entropy, lse [r, T], what the backward pass needs or None):
    inputs [L, r, T/tensor, D] and norms [L, r, H/tensor, T] of the layers, the
    output [r, T/tensor, D]."""
    model = self._model(params)
    self._sizes = model.sizes
    x = self._embedded(model.embed[...], micro.tokens)
    graph, states = nnx.split(model.blocks)
    around = self._surroundings(micro)

    mask, rope = around
    attend = functools.partial(self._attend(mask), None)

    def step(x, scanned):
      block = self._gathered(graph, *scanned, x.dtype)
      y, norm = block(x, rope, attend, whole=_whole, split=_split)
      return y, (x, norm) if keep else None

    x, kept = jax.lax.scan(
        step, x, (jnp.arange(self._sizes.layers), states))
    with jax.named_scope("logprobs"):
      norm, scale = nnx.split(model.final_norm)
      hidden = self._top(norm, micro.source, scale, x)
      name, table = self._table(model)
      out = vocabulary.forward(self._vocabulary(name), hidden, table,
                               micro.tokens, self._temperature)
    return *out, (*kept, x) if keep else None

  def backward(self, params, sums, micro: packing.Packed, kept, lse, g):
    """The sums with this micro-batch's gradient added.

    Where adapters are trained there are sums of theirs alone.
    g: float32 [r, T], gradient of the loss by each log-prob.
    """
    model = self._model(params)
    self._sizes = model.sizes
    # Locally each sum's leading axis has length 1.
    flat = {k: a[0] for k, a in checkpoints.flatten(sums).items()}
    inputs, norms, x = kept
    with jax.named_scope("logprobs"):
      norm, scale = nnx.split(model.final_norm)
      hidden, pull = jax.vjp(
          functools.partial(self._top, norm, micro.source), scale, x)
      name, table = self._table(model)
      dh, total = vocabulary.backward(
          self._vocabulary(name), hidden, table, flat.get(name), micro.tokens,
          lse, g, self._temperature)
      dscale, dx = pull(dh)
      if name in flat:
        flat[name] = total
        flat["final_norm/scale"] += jax.tree.leaves(dscale)[0]
    graph, states = nnx.split(model.blocks)
    mask, rope = self._surroundings(micro)
    attend = self._attend(mask)
    trained = [p for p in checkpoints.flatten(states) if f"blocks/{p}" in flat]
    names = [f"blocks/{p}" for p in trained]

    def step(carry, scanned):
      dx, sums = carry
      index, state, x, norm = scanned
      gradient, dx = self._layer_gradient(
          graph, attend, rope, index, norm, state, trained, x, dx)
      sums = [a.at[index].add(gradient[p].astype(a.dtype))
              for a, p in zip(sums, trained)]
      return (dx, sums), None

    (dx, more), _ = jax.lax.scan(
        step, (dx, [flat[n] for n in names]),
        (jnp.arange(self._sizes.layers), states, inputs, norms), reverse=True)
    flat.update(zip(names, more))
    if "embed" in flat:
      flat["embed"] = self._add_embedded(flat["embed"], micro.tokens, dx)
    return jax.tree.unflatten(jax.tree.structure(sums),
                              [a[None] for a in flat.values()])
