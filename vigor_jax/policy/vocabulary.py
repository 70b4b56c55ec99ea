"""Log-probabilities over a vocabulary that is split over a mesh.

Each device has its rows' hidden states and a piece of the output matrix: V
over tensor, D over fsdp. The vocabulary is taken in blocks. A block of the
matrix is gathered over fsdp, its logits [rows, block] are made, folded into a
running log-sum-exp and dropped; the backward pass makes them again, and sends
each block's gradient home as it goes. No device ever holds the gathered
matrix, its float32 gradient, or [rows, V] logits, and rows cross no wire.

    log p = z_y - lse,  lse = log sum_v exp z_v,  z = h W / temperature
    entropy = lse - sum_v p_v z_v
    d z = (1[v = y] - p_v) g
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from vigor_jax.policy import sharding

Array = jax.Array
P = jax.sharding.PartitionSpec
# Logits of a block: 2**24 float32 elements, 64 MiB a device.
BLOCK_ELEMENTS = 2**24


def blocks_of(rows: int, vocab: int) -> int:
  """Smallest divisor of `vocab` whose blocks of logits are small enough."""
  needed = max(1, math.ceil(rows * vocab / BLOCK_ELEMENTS))
  return next(n for n in range(needed, vocab + 1) if vocab % n == 0)


class Local:
  """One device's part of the computation, inside shard_map."""

  def __init__(self, placement: sharding.Placement, tied: bool, spec: P):
    self.mesh = placement.mesh
    self.tied = tied
    # Mesh axes that split the table's width and vocabulary, or None.
    self.width, self.vocab = spec[::-1] if tied else spec

  def block(self, table: Array, index: Array, count: int, dtype) -> Array:
    """[D, v] of the table's local piece, gathered over fsdp."""
    axis = 0 if self.tied else 1
    size = table.shape[axis] // count
    piece = jax.lax.dynamic_slice_in_dim(table, index * size, size, axis)
    piece = sharding.cast(piece, dtype, index)  # Before it travels.
    if self.width:
      piece = jax.lax.all_gather(piece, self.width, axis=1 - axis, tiled=True)
    return piece.T if self.tied else piece

  def home(self, gradient: Array) -> Array:
    """A block's gradient [D, v], summed over fsdp, as its owner keeps it."""
    if self.width:
      gradient = jax.lax.psum_scatter(gradient, self.width,
                                      scatter_dimension=0, tiled=True)
    return gradient.T if self.tied else gradient

  def over_vocab(self, reduce, value: Array) -> Array:
    return reduce(value, self.vocab) if self.vocab else value

  def first(self, size: int) -> Array:
    """Vocabulary index of the local piece's first column."""
    return jax.lax.axis_index(self.vocab) * size if self.vocab else 0


def _logits(hidden, weights, temperature):
  return jnp.matmul(hidden, weights,
                    preferred_element_type=jnp.float32) / temperature


def forward(local: Local, hidden, table, targets, temperature):
  """(logprobs, entropy, lse), each [n], of local rows."""
  r, t, d = hidden.shape
  rows, aims = hidden.reshape(-1, d), targets.reshape(-1)
  size = table.shape[0 if local.tied else 1]
  count = blocks_of(len(rows), size)
  width = size // count
  offset = local.first(size)

  def step(carry, index):
    peak, total, weighted, picked = carry
    z = _logits(rows, local.block(table, index, count, rows.dtype),
                temperature)
    new = jnp.maximum(peak, z.max(-1))
    keep, p = jnp.exp(peak - new), jnp.exp(z - new[:, None])
    at = aims - offset - index * width
    inside = (at >= 0) & (at < width)
    found = jnp.take_along_axis(z, jnp.clip(at, 0, width - 1)[:, None], 1)
    return (new, total * keep + p.sum(-1),
            weighted * keep + (p * z).sum(-1),
            picked + jnp.where(inside, found[:, 0], 0.0)), None

  zero = jnp.zeros(len(rows), jnp.float32)
  (peak, total, weighted, picked), _ = jax.lax.scan(
      step, (jnp.full_like(zero, -jnp.inf), zero, zero, zero),
      jnp.arange(count))
  top = local.over_vocab(jax.lax.pmax, peak)
  scale = jnp.exp(peak - top)
  total = local.over_vocab(jax.lax.psum, total * scale)
  weighted = local.over_vocab(jax.lax.psum, weighted * scale)
  lse = top + jnp.log(total)
  out = local.over_vocab(jax.lax.psum, picked) - lse, lse - weighted / total
  return tuple(a.reshape(r, t) for a in (*out, lse))


def backward(local: Local, hidden, table, sums, targets, lse, g, temperature):
  """This device's share of hidden's gradient [r, T, D], and `sums`.

  Args:
    sums: like the table's local piece; its gradient is added block by block.
      None: the table is frozen.
    lse: float32 [r, T] of `forward`.
    g: float32 [r, T], gradient of the loss by each log-prob.

  Returns:
    (shares to be summed over the axis that splits the vocabulary, sums; of
    the devices along fsdp where that splits the width).
  """
  r, t, d = hidden.shape
  rows, aims = hidden.reshape(-1, d), targets.reshape(-1)
  lse, g = lse.reshape(-1), g.reshape(-1) / temperature
  axis = 0 if local.tied else 1
  count = blocks_of(len(rows), table.shape[axis])
  width = table.shape[axis] // count
  offset = local.first(table.shape[axis])

  def step(carry, index):
    total, sums = carry
    weights = local.block(table, index, count, rows.dtype)
    z = _logits(rows, weights, temperature)
    here = (aims - offset - index * width)[:, None] == jnp.arange(width)
    dz = ((here - jnp.exp(z - lse[:, None])) * g[:, None]).astype(rows.dtype)
    total += jnp.matmul(dz, weights.T, preferred_element_type=jnp.float32)
    if sums is None:
      return (total, sums), None
    own = local.home(jnp.matmul(rows.T, dz))
    piece = jax.lax.dynamic_slice_in_dim(sums, index * width, width, axis)
    sums = jax.lax.dynamic_update_slice_in_dim(
        sums, piece + own.astype(sums.dtype), index * width, axis)
    return (total, sums), None

  (total, sums), _ = jax.lax.scan(
      step, (jnp.zeros(rows.shape, jnp.float32), sums), jnp.arange(count))
  return total.astype(hidden.dtype).reshape(hidden.shape), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def token_logprobs(hidden: Array, table: Array, targets: Array,
                   temperature: float, placement: sharding.Placement,
                   tied: bool) -> tuple[Array, Array]:
  """log softmax(hidden W / temperature)[targets], and the entropy.

  Args:
    hidden: [R, T, D], rows split over data and fsdp.
    table: the output matrix [D, V], or when tied the embedding [V, D], in the
      training layout.
    targets: int32 [R, T].
    temperature: > 0, static.

  Returns:
    (logprobs float32 [R, T], entropy in nats float32 [R, T]; no gradient
    flows through the entropy).
  """
  return _run_forward(hidden, table, targets, temperature, placement,
                      tied)[:2]


def _specs(placement, table, tied):
  path = "embed" if tied else "head"
  spec = placement.spec(path, table.shape)
  return Local(placement, tied, spec), P(*spec), P(sharding.BATCH)


def _run_forward(hidden, table, targets, temperature, placement, tied):
  local, spec, rows = _specs(placement, table, tied)
  run = functools.partial(forward, local, temperature=temperature)
  return jax.shard_map(
      run, mesh=placement.mesh, in_specs=(rows, spec, rows),
      out_specs=(rows, rows, rows), check_vma=False)(hidden, table, targets)


def _vjp_forward(hidden, table, targets, temperature, placement, tied):
  logprobs, entropy, lse = _run_forward(hidden, table, targets, temperature,
                                        placement, tied)
  return (logprobs, entropy), (hidden, table, targets, lse)


def _vjp_backward(temperature, placement, tied, saved, gradients):
  hidden, table, targets, lse = saved
  local, spec, rows = _specs(placement, table, tied)
  rest = [a for a in sharding.BATCH if a != local.width]

  def run(hidden, table, *args):
    dh, dw = backward(local, hidden, table, jnp.zeros_like(table), *args,
                      temperature)
    return (local.over_vocab(jax.lax.psum, dh),
            jax.lax.psum(dw, rest) if rest else dw)

  dh, dw = jax.shard_map(
      run, mesh=placement.mesh, in_specs=(rows, spec, rows, rows, rows),
      out_specs=(rows, spec), check_vma=False)(
          hidden, table, targets, lse, gradients[0])
  return dh, dw, None


token_logprobs.defvjp(_vjp_forward, _vjp_backward)
