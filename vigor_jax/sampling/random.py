"""Addressed random numbers: a hash of where a token stands, never a state."""

from __future__ import annotations

import jax
from jax.extend import random as hashes
import jax.numpy as jnp

Array = jax.Array


def step_key(seed: Array, stream: Array, step: Array) -> Array:
  """Key data uint32 [2] of (seed, stream of numbers, step)."""
  key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)
  return jax.random.key_data(jax.random.fold_in(key, step))


def _hash(key: tuple[Array, Array], first: Array, second: Array):
  """Threefry-2x32 of counters under keys, elementwise, broadcast."""
  arrays = jnp.broadcast_arrays(*key, first, second)
  return hashes.threefry2x32_p.bind(*[a.astype(jnp.uint32) for a in arrays])


def row_keys(key: Array, position: Array, sample: Array) -> Array:
  """uint32 [S, 2]: the hash of (prompt position, sample index)."""
  return jnp.stack(_hash((key[0], key[1]), position, sample), -1)


def uniforms(row_key: Array, first: Array, count: int) -> Array:
  """float32 [S, count] in [0, 1) for tokens first .. first + count - 1.

  23 random bits under an exponent of 0: the number in [1, 2), less 1.
  """
  token = first[:, None] + jnp.arange(count)
  bits, _ = _hash((row_key[:, :1], row_key[:, 1:]), token,
                  jnp.zeros_like(token))
  one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.uint32)
  return jax.lax.bitcast_convert_type(bits >> 9 | one, jnp.float32) - 1
