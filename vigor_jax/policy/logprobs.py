"""Log-probabilities of given tokens without a [tokens, vocabulary] array.

The rows are taken in chunks, each chunk's logits are made, reduced and
dropped; the backward pass makes them again (`jax.checkpoint`). Peak memory is
one [chunk, V] block, whatever the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Rows of logits alive at once: 2**24 float32 elements, 64 MiB.
CHUNK_ELEMENTS = 2**24


def chunk_rows(num_rows: int, vocab: int) -> int:
  """Largest power of two of rows whose logits fit in CHUNK_ELEMENTS."""
  rows = max(1, CHUNK_ELEMENTS // vocab)
  rows = 1 << (rows.bit_length() - 1)
  return min(rows, num_rows)


def token_logprobs(hidden: jax.Array, head: jax.Array, targets: jax.Array,
                   temperature: float | jax.Array = 1.0, *,
                   chunk: int | None = None) -> tuple[jax.Array, jax.Array]:
  """log softmax(hidden @ head / temperature)[targets], and the entropy.

  Args:
    hidden: [N, D].
    head: [D, V], same dtype as hidden; products accumulate in float32.
    targets: int32 [N].
    temperature: the sampling temperature (> 0): the trainer sees the same
      distribution as the sampler.
    chunk: rows of logits at once; chosen from the vocabulary when None.

  Returns:
    (logprobs float32 [N], entropy in nats float32 [N]; no gradient flows
    through the entropy).
  """
  n, d = hidden.shape
  chunk = chunk or chunk_rows(n, head.shape[1])

  def of_chunk(hidden, targets):
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    logits = logits / temperature
    norm = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    frozen = jax.lax.stop_gradient(logits - norm[:, None])
    entropy = -jnp.sum(jnp.exp(frozen) * frozen, -1)
    return picked - norm, entropy

  if chunk >= n:
    return of_chunk(hidden, targets)
  pad = -n % chunk
  hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, d)
  targets = jnp.pad(targets, (0, pad)).reshape(-1, chunk)
  logprobs, entropy = jax.lax.map(
      lambda x: jax.checkpoint(of_chunk)(*x), (hidden, targets))
  return logprobs.reshape(-1)[:n], entropy.reshape(-1)[:n]
