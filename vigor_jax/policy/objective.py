"""The form of the loss, and its value on a packed micro-batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from vigor_jax.policy import attention
from vigor_jax.policy import logprobs as logprobs_lib
from vigor_jax.policy import losses
from vigor_jax.policy import packing
from vigor_jax.policy import sharding
from vigor_jax.policy import splash
from vigor_jax.policy import transformer
from vigor_jax.policy import vocabulary

# Models of at most this many layers are compiled without a scan over them.
UNROLLED = 4


@dataclasses.dataclass(frozen=True)
class Objective:
  """The static part of the loss.

  Attributes:
    loss: name in losses.LOSSES.
    clip_low, clip_high: clip range around ratio 1.
    old: where the ratio's denominator comes from: "sampler", "trainer"
      (scored before the step's first update) or "current" (the only update of
      the step: old log-probs are the current ones, ratio exactly 1).
    kl_form: "k1", "k2", "k3"; used when kl_coef > 0.
    kl_coef: coefficient of the KL term against the reference; 0 = none.
    importance_cap: truncated importance weight for the sampler/trainer gap;
      0 = off.
    temperature: the sampling temperature the log-probs are taken at.
    remat: recompute layers in the backward pass.
    attention: "xla", or "splash": JAX's Pallas TPU kernel (splash.py).
  """

  loss: str = "grpo"
  clip_low: float = 0.2
  clip_high: float = 0.2
  old: str = "sampler"
  kl_form: str = "k3"
  kl_coef: float = 0.0
  importance_cap: float = 0.0
  temperature: float = 1.0
  remat: bool = False
  attention: str = "xla"


class Surroundings(NamedTuple):
  """What layers need of a packed micro-batch besides its hidden states."""

  mask: jax.Array  # bool [R, T, T]
  rope: tuple[jax.Array, jax.Array]  # of the positions


def surroundings(sizes: transformer.Sizes, micro: packing.Packed
                 ) -> Surroundings:
  """Who sees whom in a packed micro-batch, and where each token is."""
  return Surroundings(packing.packed_mask(micro.prompt, micro.segment),
                      transformer.rope_tables(sizes, micro.positions))


def micro_logprobs(model: transformer.Transformer, micro: packing.Packed,
                   objective: Objective, around: Surroundings | None = None
                   ) -> tuple[jax.Array, jax.Array]:
  """(logprobs, entropy) float32 [R, T] of a packed micro-batch [R, T].

  around: `surroundings` of it, where the caller has them.
  """
  mask, rope = around or surroundings(model.sizes, micro)
  if objective.attention == "splash":
    attended = splash.attention_of(mask, model.sizes.kv_heads)
  else:
    attended = functools.partial(attention.blocked_attention, mask=mask)

  def attend(layer, q, k, v):
    del layer
    return attended(q, k, v), None

  # Unrolled, a small model's layers need no slices of stacked arrays.
  blocks = model.split_layers() if model.sizes.layers <= UNROLLED else None
  hidden, _ = model(micro.tokens, micro.positions, attend, blocks=blocks,
                    remat=objective.remat, rope=rope)
  with jax.named_scope("logprobs"):
    hidden = sharding.constrain(hidden, sharding.BATCH, None, None)
    hidden = jnp.take_along_axis(hidden, micro.source[..., None], axis=1)
    placement = sharding.active()
    if placement is not None:
      tied = model.sizes.tied
      return vocabulary.token_logprobs(
          hidden, (model.embed if tied else model.head)[...], micro.tokens,
          objective.temperature, placement, tied)
    r, t, d = hidden.shape
    logprobs, entropy = logprobs_lib.token_logprobs(
        hidden.reshape(r * t, d), model.output_head(),
        micro.tokens.reshape(-1), objective.temperature)
  return logprobs.reshape(r, t), entropy.reshape(r, t)


def micro_loss(params, graph, objective: Objective, micro: packing.Packed,
               old: jax.Array, reference: jax.Array,
               around: Surroundings | None):
  """`loss_of` the log-probs of a micro-batch."""
  logprobs, entropy = micro_logprobs(nnx.merge(graph, params), micro,
                                     objective, around)
  return loss_of(logprobs, entropy, objective, micro, old, reference)


def loss_of(logprobs: jax.Array, entropy: jax.Array, objective: Objective,
            micro: packing.Packed, old: jax.Array, reference: jax.Array):
  """Summed loss of a micro-batch, and what the metrics are made of.

  Args:
    logprobs, entropy, old, reference: float32 [R, T].

  Returns:
    (loss, (sums by name, maxima by name)).
  """
  mask = micro.segment > 0
  if objective.old == "current":
    old = jax.lax.stop_gradient(logprobs)
  terms, clipped = losses.token_loss(
      objective.loss, logprobs, old, micro.advantages, mask, micro.segment,
      clip_low=objective.clip_low, clip_high=objective.clip_high)
  if objective.importance_cap:
    terms = terms * losses.truncated_importance_weight(
        old, micro.sampler_logprobs, mask, objective.importance_cap)
  kl_sum = jnp.zeros(())
  if objective.kl_coef:
    kl = losses.kl(objective.kl_form, logprobs, reference, mask)
    if losses.LOSSES[objective.loss].level == "sequence":
      # Sequence weights count a rollout once: spread KL over its tokens.
      ones = mask.astype(jnp.float32)
      count = losses.segment_sum(ones, micro.segment)
      kl = kl / jnp.maximum(count, 1.0)
    terms = terms + objective.kl_coef * kl
    kl_sum = jnp.sum(jnp.where(mask, kl, 0.0))
  loss = jnp.sum(jnp.where(mask, micro.weights * terms, 0.0))
  gap = jnp.where(mask, jnp.abs(logprobs - micro.sampler_logprobs), 0.0)
  count = jnp.sum(mask)
  sums = dict(tokens=count, clipped=jnp.sum(clipped),
              entropy=jnp.sum(jnp.where(mask, entropy, 0.0)), kl=kl_sum)
  peaks = dict(
      ratio=losses.ratio_max_deviation(logprobs, old, mask),
      gap=jnp.max(gap))
  return loss, (jax.lax.stop_gradient(sums), jax.lax.stop_gradient(peaks))
