"""The policy's weights as the decode programs take them.

A small model decodes from fused, per-layer matrices, made once per set of
parameters instead of in every dispatch. A large one decodes from the stacked
parameters as they are, on a mesh from a copy that is split otherwise. Either
way a program receives a flat tuple of arrays: flattening the module's own state
costs more than a small dispatch does.
"""

from __future__ import annotations

import functools

from flax import nnx
import jax

from vigor_jax.policy import transformer
from vigor_jax.sampling import cache
from vigor_jax.sampling import layout as layout_lib


class Weights:
  """Prepares and rebuilds the model of one graph.

  Args:
    graph: nnx graph of the transformer.
    sizes: its sizes.
    layout: where arrays live on a mesh; None = one device.

  Attributes:
    small: decodes from fused matrices.
  """

  def __init__(self, graph, sizes: transformer.Sizes,
               layout: layout_lib.Layout | None = None):
    self.sizes = sizes
    self._graph = graph
    self.small = cache.unrolled(sizes)
    self.layout = layout
    self.program = jax.jit(self._fuse if self.small
                           else self._sampling_layout)

  @property
  def as_values(self) -> bool:
    """How keys lie in the stores; see cache.py."""
    return self.layout is not None and not self.small

  def _fuse(self, params):
    model = nnx.merge(self._graph, params)
    blocks = model.split_layers()
    for block in blocks:
      block.fuse()
    del model.blocks
    rest_graph, rest = nnx.split(model)
    parts = [nnx.split(block) for block in blocks]
    leaves, tree = jax.tree.flatten((rest, [state for _, state in parts]))
    if self.layout is not None:
      # Small enough for every device to hold it whole.
      leaves = jax.lax.with_sharding_constraint(
          leaves, self.layout.placement.replicated)
    # Static results of tracing, the same for all parameters of this graph.
    self._static = rest_graph, [graph for graph, _ in parts], tree
    return tuple(leaves)

  def prepare(self, params) -> tuple[jax.Array, ...]:
    """Arrays to hand to a program, of parameters (an nnx state)."""
    if self.small:
      return self.program(params)
    if self.layout is not None:
      params = self.program(params)
    leaves, tree = jax.tree.flatten(params)
    self._static = tree
    return tuple(leaves)

  def abstract(self, params) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and shardings of `prepare(params)` on a mesh."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(self.program, params))
    if self.small:
      shardings = [self.layout.placement.replicated] * len(leaves)
    else:
      self._static = tree
      shardings = jax.tree.leaves(self._split(
          jax.tree.unflatten(tree, leaves)))
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
                 for a, s in zip(leaves, shardings))

  def _sampling_layout(self, params):
    """Parameters in the dtype of the computation, their width whole.

    A layout of its own: reading weights that other chips hold would cost
    every decode step a gather.
    """
    params = jax.tree.map(lambda a: a.astype(self.sizes.dtype), params)
    model = nnx.merge(self._graph, params)
    rules = dict(self.layout.rules)
    model.pair(rules["heads"] == self.layout.heads
               and not rules.get("head_dim"))
    # A static result of tracing, the same for all parameters of this graph.
    self._paired, params = nnx.split(model)
    return jax.lax.with_sharding_constraint(params, self._split(params))

  def _split(self, params):
    return self.layout.placement.tree(params, dict(self.layout.rules))

  def model(self, leaves):
    """(transformer, its layers one by one or None), inside a program."""
    if not self.small:
      params = jax.tree.unflatten(self._static, leaves)
      graph = self._graph if self.layout is None else self._paired
      return nnx.merge(graph, params), None
    rest_graph, graphs, tree = self._static
    rest, states = jax.tree.unflatten(tree, leaves)
    blocks = [nnx.merge(g, s) for g, s in zip(graphs, states)]
    return nnx.merge(rest_graph, rest), blocks


@functools.lru_cache(maxsize=None)
def of(graph, sizes: transformer.Sizes,
       layout: layout_lib.Layout | None = None) -> Weights:
  """The one `Weights` of a graph, shared by its samplers."""
  return Weights(graph, sizes, layout)
