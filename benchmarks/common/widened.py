"""A small policy inside a large model: its outputs at the large one's cost.

A large model that was never trained says nothing worth judging, and training
one takes hours here. Instead a trained small model is laid into a large one
whose other weights are zero: a product takes as long with zeros.
"""

import math

import numpy as np


def widened(params, small, large):
  """Parameters of size `large` with which the model is that of `params`.

  RMSNorm divides by the mean over more channels, most of them zero, which the
  scales make up for; large.norm_eps must be small.norm_eps times
  small.width / large.width. A head's pairs go where the large head rotates as
  the small one did; layers that are left over add zero.

  Args:
    params: nnx.State of a transformer of sizes `small`.
    small, large: Sizes; both tied, without biases and without norms of q and
      k; large.head_dim a multiple of small.head_dim.

  Returns:
    nnx.State of float32 NumPy arrays.
  """
  import jax

  from vigor_jax.policy import transformer

  factor = large.head_dim // small.head_dim
  pairs = factor * np.arange(small.head_dim // 2)
  per, per_large = (s.heads // s.kv_heads for s in (small, large))
  heads = np.arange(small.heads)
  index = {
    "layer": np.arange(small.layers),
    "width": np.arange(small.width),
    "ffn": np.arange(small.ffn),
    "vocab": np.arange(small.vocab),
    "head": heads // per * per_large + heads % per,
    "kv": np.arange(small.kv_heads),
    "rotated": np.concatenate([pairs, large.head_dim // 2 + pairs]),
    "dim": np.arange(small.head_dim),
  }
  norm = math.sqrt(small.width / large.width)
  # Name -> (axes, factor); the attention divides by the root of head_dim.
  places = {
    "embed": (("vocab", "width"), 1.0),
    "q": (("layer", "width", "head", "rotated"), math.sqrt(factor)),
    "k": (("layer", "width", "kv", "rotated"), 1.0),
    "v": (("layer", "width", "kv", "dim"), 1.0),
    "o": (("layer", "head", "dim", "width"), 1.0),
    "gate": (("layer", "width", "ffn"), 1.0),
    "up": (("layer", "width", "ffn"), 1.0),
    "down": (("layer", "ffn", "width"), 1.0),
    "attn_norm": (("layer", "width"), norm),
    "mlp_norm": (("layer", "width"), norm),
    "final_norm": (("width",), norm),
  }

  def place(path, shape, value):
    names = [getattr(step, "key", getattr(step, "name", "")) for step in path]
    axes, factor = next(places[name] for name in names if name in places)
    result = np.zeros(shape.shape, np.float32)
    result[np.ix_(*(index[axis] for axis in axes))] = factor * np.asarray(value)
    return result

  return jax.tree_util.tree_map_with_path(
    place, transformer.abstract(large)[1], params
  )


def disagreement(params, small, wide, large, length: int = 12) -> float:
  """Largest difference of the two models' log-probs on random tokens."""
  import functools

  from flax import nnx
  import jax
  import jax.numpy as jnp

  from vigor_jax.policy import attention, transformer

  tokens = np.random.default_rng(0).integers(0, small.vocab, (4, length))
  positions = np.broadcast_to(np.arange(length), tokens.shape)
  mask = jnp.broadcast_to(
    jnp.tril(jnp.ones((length, length), bool)), (4, length, length)
  )
  attended = functools.partial(attention.blocked_attention, mask=mask)

  def logprobs(params, sizes):
    model = nnx.merge(transformer.abstract(sizes)[0], params)
    hidden, _ = model(
      jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32),
      lambda layer, q, k, v: (attended(q, k, v), None),
    )  # fmt: skip
    return jax.nn.log_softmax(model.logits(hidden))

  wide = jax.tree.map(jnp.asarray, wide)
  return float(
    jnp.abs(logprobs(params, small) - logprobs(wide, large)).max()
  )
