"""The sampler on a mesh: which device holds which slot and prefix.

Slots are split over data and fsdp, kv heads over tensor. Every device group
holds all prefixes of the step, so that any slot can take any prompt without
asking another device; reports are whole everywhere, so that all hosts see the
same rows and decide alike.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax

from vigor_jax.policy import sharding
from vigor_jax.sampling import state as state_lib


def _kv(placement: sharding.Placement, kv: Any, rows) -> Any:
  """Shardings of stores [(layers,) rows, K, ., .]."""
  size = placement.mesh.shape["tensor"]

  def one(array):
    lead = (None,) * (array.ndim - 4)
    heads = "tensor" if array.shape[-3] % size == 0 else None
    return placement.named(*lead, rows, heads, None, None)

  return jax.tree.map(one, kv)


def state(placement: sharding.Placement, state: state_lib.State
          ) -> state_lib.State:
  """Shardings of a sampler's state (arrays or shapes)."""
  rows = placement.named(None, sharding.BATCH)
  whole = placement.replicated
  return state_lib.State(
      kv=_kv(placement, state.kv, sharding.BATCH), written=whole,
      record=rows, rows=rows, counters=whole)


def prefixes(placement: sharding.Placement, prefixes: state_lib.Prefixes
             ) -> state_lib.Prefixes:
  """Shardings of the prefix store."""
  whole = placement.replicated
  return state_lib.Prefixes(_kv(placement, prefixes.kv, None), whole, whole)


def empty(make: Callable[[], Any], shardings: Callable[[Any], Any]) -> Any:
  """`make()` with every piece made on the device that holds it."""
  return jax.jit(make, out_shardings=shardings(jax.eval_shape(make)))()


def wrapped(placement: sharding.Placement, prefill: Callable,
            decode: Callable) -> tuple[Callable, Callable]:
  """The programs with their results' shardings fixed, to be jitted."""
  fix = jax.lax.with_sharding_constraint

  @functools.wraps(prefill)
  def placed_prefill(leaves, store, tokens, lengths, rows):
    with sharding.activations(placement):
      store = prefill(leaves, store, tokens, lengths, rows)
    return fix(store, prefixes(placement, store))

  @functools.wraps(decode)
  def placed_decode(*args):
    with sharding.activations(placement):
      new, report = decode(*args)
    return (fix(new, state(placement, new)),
            fix(report, placement.replicated))

  return placed_prefill, placed_decode
