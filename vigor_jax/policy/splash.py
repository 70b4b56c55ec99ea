"""The update's attention by JAX's own Pallas TPU kernel, splash attention.

`attention.py` is the reference. The kernel never writes scores to memory, and
passes over blocks that nobody sees; in exchange it reads who sees whom as
int32 [T, T] in every head. It runs on TPUs only.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp

Array = jax.Array
LANES = 128  # Head widths and blocks are multiples of a TPU's lanes.
BLOCKS = (512, 384, 256, 128)  # Queries, and keys, taken at once.


def block_of(length: int) -> int:
  """The largest block that divides a row; 0 = none does."""
  return next((b for b in BLOCKS if length % b == 0), 0)


def misfit(head_dim: int, length: int, platform: str) -> str | None:
  """Why the kernel cannot be used; None where it can."""
  if platform != "tpu":
    return f"it runs on a TPU, not on {platform!r}"
  if head_dim % LANES:
    return f"heads of {head_dim} are not a multiple of {LANES}"
  if not block_of(length):
    near = max(length // LANES, 1) * LANES
    return (f"policy.row_length is {length}, not a multiple of {LANES} "
            f"(nearest: {near} or {near + LANES})")
  return None


def kernel(mask: Any, kv_heads: int, interpret: bool = False) -> Any:
  """One row's kernel, a function of q [H, T, hd], k and v.

  Args:
    mask: bool [1, T, T], the same for all heads, or the library's mask of
      all of them; every query sees something.
    kv_heads: of the row; 1 = k and v come without an axis of heads.
    interpret: run it without a TPU, for tests.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (  # Slow.
      splash_attention_kernel as lib)
  size = block_of(mask.shape[1])
  names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute",
           "q_dq", "kv_dq")
  blocks = lib.BlockSizes(**{f"block_{name}": size for name in names})
  make = lib.make_splash_mqa if kv_heads == 1 else lib.make_splash_mha
  made = make(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1,
              interpret=interpret)
  return known(made) if isinstance(mask, jax.Array) else made


def known(made: Any) -> Any:
  """The kernel of a traced mask; that it is one must not be traced."""
  masks = [m and m._replace(is_dynamic_mask=True) for m in (
      made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info)]
  return type(made)(*masks, **made.kwargs)


def kernels(mask: Array, kv_heads: int, interpret: bool = False
            ) -> list[Any]:
  """A kernel for each row of a packed mask, bool [R, T, T].

  Queries of padding would see nothing; they see themselves.
  """
  own = jnp.eye(mask.shape[1], dtype=bool)
  return [kernel((row | own)[None], kv_heads, interpret) for row in mask]


def by_rows(made: list, q: Array, k: Array, v: Array) -> Array:
  """Attention [R, T, H, hd] of q like it and of k, v [R, T, K, hd]."""
  out = []
  for row, *heads in zip(made, q * q.shape[-1] ** -0.5, k, v):
    queries, *pair = (jnp.swapaxes(a, 0, 1) for a in heads)
    if k.shape[2] == 1:
      pair = [a[0] for a in pair]
    out.append(jnp.swapaxes(row(queries, *pair), 0, 1))
  return jnp.stack(out)


def attention_of(mask: Array, kv_heads: int, interpret: bool = False
                 ) -> Callable[[Array, Array, Array], Array]:
  """`attention.blocked_attention` with a packed mask, for all layers."""
  return functools.partial(by_rows, kernels(mask, kv_heads, interpret))
