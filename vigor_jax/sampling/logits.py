"""From logits to a token: temperature, top-k, top-p, min-p, inverse CDF.

Every setting is a traced array with one value per row, so changing it never
compiles. One uniform number per token decides the token by inverting the
cumulative distribution: V random bits less than the Gumbel trick needs, and
the same token whatever else is in the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Width of the second level of the cumulative sum.
_BLOCK = 128


def keep_mask(logprobs: jax.Array, top_k: jax.Array, top_p: jax.Array,
              min_p: jax.Array) -> jax.Array:
  """Tokens that survive truncation, bool [S, V].

  Ranks break ties by token id, so exactly as many tokens survive as the rule
  says. top-p keeps a token while the mass ranked before it is < top_p; min-p
  keeps tokens with p >= min_p * max p. The best token always survives.

  Args:
    logprobs: float32 [S, V], normalised.
    top_k: int32 [S], 0 = off.
    top_p: float32 [S], 1 = off.
    min_p: float32 [S], 0 = off.
  """
  vocab = logprobs.shape[-1]
  order = jnp.argsort(-logprobs, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logprobs, order, -1)
  probs = jnp.exp(ranked)
  before = jnp.cumsum(probs, -1) - probs
  rank = jnp.arange(vocab)[None]
  keep = (rank < jnp.where(top_k > 0, top_k, vocab)[:, None])
  keep &= (before < top_p[:, None]) | (top_p >= 1.0)[:, None]
  keep &= (probs >= min_p[:, None] * probs[:, :1])
  keep = keep.at[:, 0].set(True)
  rows = jnp.arange(logprobs.shape[0])[:, None]
  return jnp.zeros_like(keep).at[rows, order].set(keep)


def inverse_cdf(logprobs: jax.Array, uniform: jax.Array) -> jax.Array:
  """The token at which the cumulative distribution passes `uniform`.

  Two levels, so that no sum is over more than max(128, V / 128) float32
  terms and the long one is over block totals. Tokens of probability 0 are
  never chosen.

  Args:
    logprobs: float32 [S, V]; need not be normalised.
    uniform: float32 [S] in [0, 1).

  Returns:
    int32 [S].
  """
  return _invert(jnp.exp(logprobs), uniform)


def _invert(mass: jax.Array, uniform: jax.Array) -> jax.Array:
  """`inverse_cdf` of unnormalised probabilities [S, V]."""
  s, vocab = mass.shape
  if vocab <= _BLOCK:
    return _pick(mass, uniform)[0]
  mass = jnp.pad(mass, ((0, 0), (0, -vocab % _BLOCK)))
  blocks = mass.reshape(s, -1, _BLOCK)
  block, rest = _pick(blocks.sum(-1), uniform)
  inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  token, _ = _pick(inside, rest)
  return jnp.minimum(block * _BLOCK + token, vocab - 1)


def _pick(mass: jax.Array, uniform: jax.Array):
  """Index whose slice of the cumulated mass holds `uniform`, and the rest.

  The rest is the position inside that slice, again in [0, 1).
  """
  size = mass.shape[-1]
  if size <= _BLOCK:
    lower = jnp.triu(jnp.ones((size, size), mass.dtype))
    sums = jnp.matmul(mass, lower, precision=jax.lax.Precision.HIGHEST)
  else:
    sums = jnp.cumsum(mass, -1)
  total = sums[:, -1]
  # Strictly below the total: rounding must not reach past the last token.
  target = jnp.minimum(uniform * total, total * (1 - 2.0**-23))
  index = jnp.sum(sums <= target[:, None], -1).astype(jnp.int32)
  index = jnp.minimum(index, size - 1)
  here = jnp.take_along_axis(mass, index[:, None], 1)[:, 0]
  before = jnp.take_along_axis(sums, index[:, None], 1)[:, 0] - here
  rest = jnp.clip((target - before) / jnp.where(here > 0, here, 1), 0,
                  1 - 2.0**-23)
  return index, rest


def sample(logits: jax.Array, uniform: jax.Array, temperature: jax.Array,
           top_k: jax.Array, top_p: jax.Array, min_p: jax.Array):
  """One token per row.

  Args:
    logits: float32 [S, V].
    uniform: float32 [S] in [0, 1).
    temperature: float32 [S]; 0 means argmax.
    top_k, top_p, min_p: see `keep_mask`.

  Returns:
    (tokens int32 [S],
     logprobs float32 [S]: under softmax(logits / temperature), what the
       trainer computes (temperature 1 where it is 0),
     processed float32 [S]: under the truncated, renormalised distribution
       the token was drawn from (0 where temperature is 0).)
  """
  greedy = temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  top = jnp.max(scaled, -1, keepdims=True)
  mass = jnp.exp(scaled - top)
  norm = jnp.log(jnp.sum(mass, -1))
  truncating = (~greedy) & ((top_k > 0) | (top_p < 1) | (min_p > 0))

  @jax.named_scope("truncate")
  def cut():
    keep = keep_mask(scaled - top - norm[:, None], top_k, top_p, min_p)
    kept = jnp.where(keep | ~truncating[:, None], mass, 0.0)
    return _invert(kept, uniform), jnp.log(jnp.sum(kept, -1))

  # The sort is paid only while some row asks for truncation, and the search
  # for the best token only while some row wants it.
  tokens, kept_norm = jax.lax.cond(
      jnp.any(truncating), cut, lambda: (_invert(mass, uniform), norm))
  @jax.named_scope("greedy")
  def best():
    return jnp.where(greedy, jnp.argmax(logits, -1).astype(jnp.int32), tokens)

  tokens = jax.lax.cond(jnp.any(greedy), best, lambda: tokens)
  chosen = jnp.take_along_axis(scaled - top, tokens[:, None], 1)[:, 0]
  return (tokens, chosen - norm,
          jnp.where(greedy, 0.0, chosen - kept_norm))
