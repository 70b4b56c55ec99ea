"""Policy losses, per token, on packed rows.

Rows are [R, T]: several rollouts of one prompt share a row. `segment` tells
them apart inside the row: 0 is not a completion token, 1, 2, ... are the
row's rollouts. A loss returns per-token terms to be minimised, 0 where masked;
weights and denominators come from aggregators.py.

Adding one: a function and a line in loss_table.LOSSES; see docs/extending.md.
"""

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vigor_jax.policy import registry
from vigor_jax.policy.loss_table import LOSSES, default_clips

__all__ = [
  "KLS",
  "LOSSES",
  "default_clips",
  "kl",
  "ratio_max_deviation",
  "segment_sum",
  "token_loss",
  "truncated_importance_weight",
]

# exp beyond this overflows float32 and inf * 0 in its gradient is NaN; a
# log-ratio this large is far outside every clip range.
MAX_LOG_RATIO = 20.0


def _clipped_objective(ratio, advantages, clip_low, clip_high):
  """-min(rho A, clip(rho) A), and where the clip is what counts."""
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  above = (advantages > 0) & (ratio > 1.0 + clip_high)
  below = (advantages < 0) & (ratio < 1.0 - clip_low)
  return -jnp.minimum(ratio * advantages, held * advantages), above | below


def clipped(
  logprobs, log_ratio, advantages, segment, valid, clip_low, clip_high
):
  """Token ratios. PPO's clip as in GRPO, arXiv 2402.03300."""
  return _clipped_objective(jnp.exp(log_ratio), advantages, clip_low, clip_high)


def gspo(logprobs, log_ratio, advantages, segment, valid, clip_low, clip_high):
  """One ratio per rollout, exp(mean_t log rho). GSPO, arXiv 2507.18071.

  The rollout's term is divided by |o_j| on each of its tokens, so that the sum
  over tokens, and its gradient, is the sequence form.
  """
  count = segment_sum(valid.astype(jnp.float32), segment)
  mean = segment_sum(log_ratio, segment) / jnp.maximum(count, 1.0)
  term, binds = _clipped_objective(
    jnp.exp(mean), advantages, clip_low, clip_high
  )
  return term / jnp.maximum(count, 1.0), binds


def cispo(logprobs, log_ratio, advantages, segment, valid, clip_low, clip_high):
  """-sg(clip(rho)) A log pi: no token loses its gradient. arXiv 2506.13585."""
  ratio = jnp.exp(log_ratio)
  held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  binds = (held != ratio) & (advantages != 0)
  return -jax.lax.stop_gradient(held) * advantages * logprobs, binds


def reinforce(
  logprobs, log_ratio, advantages, segment, valid, clip_low, clip_high
):
  """-A log pi: on-policy, without a ratio (clips unused)."""
  return -advantages * logprobs, jnp.zeros_like(valid)


@functools.cache
def _resolve(terms: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """The function that "module:function" names."""
  module, _, function = terms.partition(":")
  return getattr(importlib.import_module(module), function)


def token_loss(
  name: str,
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  segment: jax.Array,
  *,
  clip_low: float | jax.Array,
  clip_high: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Per-token loss terms of packed rows.

  Args:
    name: a key of LOSSES.
    logprobs: [R, T], log pi of each token; differentiated.
    old_logprobs: [R, T], fixed for the step.
    advantages: [R, T], each rollout's advantage on all its tokens.
    mask: [R, T], nonzero on tokens that count. The rest may hold NaN or -inf.
    segment: int [R, T], the row's rollout of each token, 1..T; 0 for none.
    clip_low: the ratio is held above 1 - clip_low.
    clip_high: the ratio is held below 1 + clip_high.

  Returns:
    (terms float32 [R, T], 0 where masked; clipped bool [R, T], where the clip
    decides the term and, but for cispo, its gradient is 0).

  Raises:
    ValueError: unknown name.
  """
  loss = registry.find("loss", name, LOSSES)
  terms_of = _resolve(loss.terms)
  valid = _valid(mask, segment)
  logprobs = _keep(valid, logprobs)
  old_logprobs = jax.lax.stop_gradient(_keep(valid, old_logprobs))
  advantages = jax.lax.stop_gradient(_keep(valid, advantages))
  terms, clipped = terms_of(
    logprobs,
    _log_ratio(logprobs, old_logprobs),
    advantages,
    jnp.where(valid, segment, 0),
    valid,
    clip_low,
    clip_high,
  )
  return jnp.where(valid, terms, 0.0), clipped & valid


def segment_sum(values: jax.Array, segment: jax.Array) -> jax.Array:
  """Sum over the tokens of the same rollout in the same row, on each of them.

  values [R, T], segment int [R, T] with 0 <= segment <= T; returns [R, T].
  """
  count = values.shape[-1] + 1

  def row(values, segment):
    return jax.ops.segment_sum(values, segment, num_segments=count)[segment]

  return jax.vmap(row)(values, segment)


def _k1(delta):
  """log(pi / ref): unbiased, signed; its gradient is 0 in expectation."""
  return delta


def _k2(delta):
  """(log(pi / ref))^2 / 2: on policy its gradient is that of KL(pi, ref)."""
  return 0.5 * delta**2


def _k3(delta):
  """ref / pi - log(ref / pi) - 1 >= 0: unbiased. arXiv 2402.03300."""
  # expm1 keeps the small values right: k3 is about delta^2 / 2 near 0.
  return jnp.expm1(-delta) + delta


KLS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "k1": _k1,
  "k2": _k2,
  "k3": _k3,
}


def kl(
  name: str,
  logprobs: jax.Array,
  reference_logprobs: jax.Array,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Per-token estimate of KL(policy, reference) from the policy's tokens.

  Args:
    name: a key of KLS (Schulman 2020, "Approximating KL divergence").
    logprobs: [...], log pi of the sampled tokens; differentiated.
    reference_logprobs: [...], log ref of the same tokens.
    mask: [...], nonzero on tokens that count; None for all.

  Returns:
    float32 [...], nats; 0 where masked. To be added to the loss.
  """
  form = registry.find("KL form", name, KLS)
  if mask is None:
    mask = jnp.ones(jnp.shape(logprobs), bool)
  valid = jnp.asarray(mask) != 0
  reference = jax.lax.stop_gradient(_keep(valid, reference_logprobs))
  delta = _log_ratio(_keep(valid, logprobs), reference)
  return jnp.where(valid, form(delta), 0.0)


def truncated_importance_weight(
  trainer_logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  mask: jax.Array,
  cap: float | jax.Array,
) -> jax.Array:
  """min(pi_trainer_old / pi_sampler, cap) per token, without a gradient.

  Corrects for tokens drawn by a sampler whose probabilities differ from the
  trainer's (other kernels, precision, top-p). float32 [R, T], 1 where masked.
  """
  valid = jnp.asarray(mask) != 0
  log_ratio = _log_ratio(
    _keep(valid, trainer_logprobs), _keep(valid, sampler_logprobs)
  )
  return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))


def ratio_max_deviation(
  logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array
) -> jax.Array:
  """max |rho - 1| over the tokens that count: a scalar, 0 if none does."""
  valid = jnp.asarray(mask) != 0
  log_ratio = _log_ratio(_keep(valid, logprobs), _keep(valid, old_logprobs))
  # Masked tokens have log-ratio 0 here, hence deviation 0.
  return jnp.max(jnp.abs(jnp.expm1(log_ratio)), initial=0.0)


def _valid(mask, segment):
  return (jnp.asarray(mask) != 0) & (jnp.asarray(segment) > 0)


def _keep(valid, values):
  """`values` in float32, 0 where not valid (before any arithmetic)."""
  return jnp.where(valid, jnp.asarray(values, jnp.float32), 0.0)


def _log_ratio(logprobs, other):
  return jnp.clip(logprobs - other, -MAX_LOG_RATIO, MAX_LOG_RATIO)
