"""The policy on a mesh with its communication written out.

What `transformer.Transformer` and `vocabulary.token_logprobs` leave to the
compiler is decided here, once per layer and micro-batch:

    weights     [L, D/fsdp, H/tensor, .]  a layer's piece, in the dtype of the
                computation, is gathered over fsdp for the forward pass and
                again for the backward pass; its gradient is summed straight
                into the piece (arXiv 1910.02054)
    hidden      [R/rows, T/tensor, D]  split by rows, and between products by
                positions over tensor: gathered before a product, summed and
                split after it (arXiv 2205.05198)
    vocabulary  by blocks, see vocabulary.py

The backward pass is written out too. Only each layer's input is kept and the
layer is computed again from it; its gradient is added where the sum of the
micro-batches lies, so no second set of gradients exists. A sum carries an axis
in front for the mesh axes that its parameter is not split over: devices along
them add up their own share, and `total` adds the shares once an update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vigor_jax.policy import device_policy
from vigor_jax.policy import packing
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer

Array = jax.Array
P = jax.sharding.PartitionSpec
_ROWS = P(sharding.BATCH)
_HIDDEN = P(sharding.BATCH, "tensor")  # Rows and positions.
_KEPT = (P(None, sharding.BATCH, "tensor"),  # Inputs of the layers.
         P(None, sharding.BATCH, "tensor"),  # Norms; heads are split.
         _HIDDEN)


def supported(sizes: transformer.Sizes, placement: sharding.Placement,
              length: int) -> bool:
  """Whether sizes and rows of `length` tokens split evenly over tensor."""
  tensor = placement.mesh.shape["tensor"]
  whole = (sizes.heads, sizes.ffn, sizes.vocab, length)
  return (all(n % tensor == 0 for n in whole)
          and (sizes.kv_heads % tensor == 0 or tensor % sizes.kv_heads == 0))


def _unsplit(spec: P) -> tuple[str, ...]:
  """Mesh axes that a parameter is not split over."""
  return tuple(a for a in sharding.MESH_AXES if a not in spec)


def _sum_specs(params: Any, placement: sharding.Placement) -> Any:
  """PartitionSpecs of the sums of the parameters' gradients."""
  return jax.tree.map(lambda s: P(_unsplit(s.spec), *s.spec),
                      placement.tree(params))


def zeros(params: Any, placement: sharding.Placement) -> Any:
  """Sums of gradients, empty: [share, *shape] like each parameter."""
  def make(param, where):
    shares = math.prod(placement.mesh.shape[a] for a in _unsplit(where.spec))
    return jax.lax.with_sharding_constraint(
        jnp.zeros((shares, *param.shape), param.dtype),
        placement.named(_unsplit(where.spec), *where.spec))
  return jax.tree.map(make, params, placement.tree(params))


def total(sums: Any) -> Any:
  """Gradients of sums: the devices' shares added up."""
  return jax.tree.map(lambda a: jnp.sum(a, 0), sums)


class Pieces:
  """One micro-batch at a time through the split policy.

  Args:
    graph: nnx graph of the transformer.
    placement: the mesh.
    temperature: that log-probs are taken at.
    attention: see `Objective`.
  """

  def __init__(self, graph, placement: sharding.Placement,
               temperature: float, attention: str = "xla"):
    self._graph, self._placement = graph, placement
    self._temperature, self._attention = temperature, attention

  def logprobs(self, params: Any, micro: packing.Packed
               ) -> tuple[Array, Array]:
    """(log-probs, entropy) float32 [R, T] of a micro-batch [R, T]."""
    return self._forward(params, micro, keep=False)[:2]

  def add_gradient(self, params: Any, sums: Any, micro: packing.Packed,
                   loss: Callable[[Array, Array], tuple[Array, Any]]
                   ) -> tuple[tuple[Array, Any], Any]:
    """((value, more), sums with the gradient of the value added).

    Args:
      sums: of the gradients of `params`, or of those that are trained.
      loss: (value, more) of (log-probs, entropy); no gradient flows through
        the entropy.
    """
    logprobs, entropy, lse, kept = self._forward(params, micro, keep=True)
    value, gradient = jax.value_and_grad(loss, has_aux=True)(
        logprobs, entropy)
    specs = _sum_specs(jax.eval_shape(total, sums), self._placement)
    split = self._specs(params)
    run = self._mapped(
        self._local(split).backward,
        (split, specs, _ROWS, _KEPT, _ROWS, _ROWS), specs)
    return value, run(params, sums, micro, kept, lse, gradient)

  def _forward(self, params, micro, keep: bool):
    split = self._specs(params)
    local = self._local(split)
    run = lambda params, micro: local.forward(params, micro, keep)
    out = (_ROWS, _ROWS, _ROWS, _KEPT if keep else None)
    return self._mapped(run, (split, _ROWS), out)(params, micro)

  def _local(self, split) -> device_policy.DevicePolicy:
    return device_policy.DevicePolicy(
        self._graph, self._placement, split, self._temperature,
        self._attention)

  def _specs(self, params):
    return jax.tree.map(lambda s: s.spec, self._placement.tree(params))

  def _mapped(self, function, arguments, results):
    @functools.wraps(function)
    def local(*args):
      with sharding.activations(None):  # Nothing is left to constrain.
        return function(*args)
    return jax.shard_map(local, mesh=self._placement.mesh,
                         in_specs=arguments, out_specs=results,
                         check_vma=False)
