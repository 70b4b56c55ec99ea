"""The sampler's programs on a mesh, their results laid out as layout.py says.

Prompts come from the host whose devices compute them. Reports are whole
everywhere, so that all hosts see the same rows and decide alike.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import jax
import numpy as np

from vigor_jax.policy import sharding
from vigor_jax.sampling import layout as layout_lib
from vigor_jax.sampling import state as state_lib


def state(layout: layout_lib.Layout, state: state_lib.State
          ) -> state_lib.State:
  """Shardings of a sampler's state (arrays or shapes)."""
  rows = layout.placement.named(None, layout.slots)
  whole = layout.placement.replicated
  return state_lib.State(
      kv=layout.stores(state.kv, prompts=False), written=whole,
      record=rows, rows=rows, counters=whole)


def prefixes(layout: layout_lib.Layout, prefixes: state_lib.Prefixes
             ) -> state_lib.Prefixes:
  """Shardings of the prefix store."""
  whole = layout.placement.replicated
  return state_lib.Prefixes(layout.stores(prefixes.kv, prompts=True), whole,
                            whole)


def empty(make: Callable[[], Any], shardings: Callable[[Any], Any]) -> Any:
  """`make()` with every piece made on the device that holds it."""
  return jax.jit(make, out_shardings=shardings(jax.eval_shape(make)))()


def prompts(placement: sharding.Placement | None,
            tokens: Sequence[np.ndarray], n: int, length: int) -> Any:
  """Prompts as int32 [n, length], padded on the right and with rows of 0.

  On a mesh each host fills and sends the rows that its devices hold, no others.
  """
  def rows(index: slice) -> np.ndarray:
    start, stop, _ = index.indices(n)
    block = np.zeros((stop - start, length), np.int32)
    for row, ids in zip(block, tokens[start: stop]):
      row[: len(ids)] = ids
    return block

  if placement is None:
    return rows(slice(None))
  return jax.make_array_from_callback(
      (n, length), placement.prompts, lambda index: rows(index[0]))


def wrapped(layout: layout_lib.Layout, prefill: Callable,
            decode: Callable) -> tuple[Callable, Callable]:
  """The programs with their results' shardings fixed, to be jitted."""
  fix = jax.lax.with_sharding_constraint
  placement = layout.placement

  @functools.wraps(prefill)
  def placed_prefill(leaves, store, tokens, lengths, rows):
    # Prompts are many tokens: weights travel, not activations.
    with sharding.activations(placement, layer=sharding.SAMPLE_RULES):
      store = prefill(leaves, store, tokens, lengths, rows)
    return fix(store, prefixes(layout, store))

  @functools.wraps(decode)
  def placed_decode(leaves, prefixes, old, *args):
    how = {}
    rows, slots = layout.batch, old.rows.shape[1]
    if layout.rules and slots % placement.count(layout.everyone) == 0:
      # Every product takes all slots of the batch; what is done to hidden
      # states between products, each device does to its share of them.
      how = dict(products=rows, layer=dict(layout.rules))
      rows = layout.everyone
    with sharding.activations(placement, rows, **how):
      new, report = decode(leaves, prefixes, old, *args)
    return (fix(new, state(layout, new)),
            fix(report, placement.replicated))

  return placed_prefill, placed_decode
