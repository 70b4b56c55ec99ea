"""The sampler's decode program on devices that need not exist."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.sampling import decode as decode_lib
from vigor_jax.sampling import layout as layout_lib
from vigor_jax.sampling import placed as placed_lib
from vigor_jax.sampling import settings as settings_lib
from vigor_jax.sampling import state as state_lib
from vigor_jax.sampling import weights as weights_lib

_STOP_IDS = 8


def with_shardings(tree: Any, shardings: Any) -> Any:
  """Shapes with their shardings, for tracing."""
  return jax.tree.map(
      lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
      tree, shardings)


def per_chip(tree: Any) -> int:
  """Bytes that one device holds of a tree of shapes with shardings."""
  return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
             for a in jax.tree.leaves(tree))


def rare(sampling: Any) -> tuple[str, ...]:
  """Scopes that a decode step does not enter with these settings."""
  cuts = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
  return (() if cuts else ("truncate",)) + (
      ("greedy",) if sampling.temperature > 0 else ())


class Decoding:
  """What the sampler holds and runs on a mesh, as shapes.

  Args:
    graph, params: `transformer.abstract`, params with their shardings.
    sizes: of the model.
    settings: of the sampler.
    placement: the mesh.
    stationary: see `layout.of`.
  """

  def __init__(self, graph, params, sizes: transformer.Sizes,
               settings: settings_lib.Settings,
               placement: sharding.Placement, stationary: bool = True):
    self.sizes, self.settings, self.placement = sizes, settings, placement
    self.params = params
    self.layout = layout_lib.of(placement, sizes, settings, stationary)
    self.weights = weights_lib.of(graph, sizes, self.layout)

  @functools.cached_property
  def leaves(self) -> tuple[Any, ...]:
    """The weights as programs take them."""
    return self.weights.abstract(self.params)

  @functools.cached_property
  def prefixes(self) -> state_lib.Prefixes:
    s = self.settings
    shapes = jax.eval_shape(lambda: state_lib.empty_prefixes(
        self.sizes, s.prefixes, s.prompt_buckets[-1],
        jnp.dtype(s.cache_dtype), self.weights.as_values))
    return with_shardings(shapes, placed_lib.prefixes(self.layout, shapes))

  @functools.cached_property
  def slots(self) -> state_lib.State:
    s = self.settings
    shapes = jax.eval_shape(lambda: state_lib.empty_state(
        self.sizes, s.slots, s.ring, s.max_new_tokens,
        jnp.dtype(s.cache_dtype), self.weights.as_values))
    return with_shardings(shapes, placed_lib.state(self.layout, shapes))

  def _whole(self, *shape: int):
    return jax.ShapeDtypeStruct(shape, np.int32,
                                sharding=self.placement.replicated)

  def prefill(self, bucket: int) -> tuple[Any, tuple[Any, ...]]:
    """(jitted prefill of one batch, its arguments)."""
    prefill = functools.partial(decode_lib.prefill, self.weights)
    prefill, _ = placed_lib.wrapped(self.layout, prefill, prefill)
    n = self.settings.prefill_batch
    tokens = jax.ShapeDtypeStruct((n, bucket), np.int32,
                                  sharding=self.placement.prompts)
    return jax.jit(prefill, donate_argnums=(1,)), (
        self.leaves, self.prefixes, tokens, self._whole(n), self._whole(n))

  def chunks(self) -> tuple[Any, tuple[Any, ...]]:
    """(jitted decode of chunks, its arguments)."""
    s = self.settings
    shapes = tuple(shape for shape in s.shapes(self.sizes)
                   if shape.width == s.slots)
    decode = functools.partial(decode_lib.decode, self.weights, chunk=s.chunk,
                               shapes=shapes, rows=s.report_rows)
    _, decode = placed_lib.wrapped(self.layout, decode, decode)
    return jax.jit(decode, donate_argnums=(2,)), (
        self.leaves, self.prefixes, self.slots,
        self._whole(len(state_lib.QUEUE_DTYPES), s.queue),
        self._whole(len(state_lib.Control._fields)), self._whole(_STOP_IDS))
