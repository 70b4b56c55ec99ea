"""From a configuration to the policy's sizes, samplers and updaters."""

from __future__ import annotations

import dataclasses

from vigor_jax import allocation
from vigor_jax.config.defaults import default_config
from vigor_jax.policy import batch as batch_lib
from vigor_jax.policy import families
from vigor_jax.policy import loss_table
from vigor_jax.policy import objective as objective_lib
from vigor_jax.policy import optimizer as optimizer_lib
from vigor_jax.policy import pieces
from vigor_jax.policy import sharding
from vigor_jax.policy import sizes as sizes_lib
from vigor_jax.policy import splash
from vigor_jax.policy import transformer
from vigor_jax.policy import update as update_lib
from vigor_jax.policy import weights
from vigor_jax.sampling import settings as settings_lib


def sizes_of(config, vocab_size: int) -> transformer.Sizes:
  """Sizes of `config.model`, or of its checkpoint.

  Args:
    config: a configuration.
    vocab_size: the task's; what a vocabulary of 0 means.

  Raises:
    ValueError: the checkpoint is of another family or size than the
      configuration says, or its vocabulary is smaller than the task's.
  """
  model = config.model
  values = dict(model.sizes)
  values["rope_scaling"] = families.rope_from_text(values["rope_scaling"])
  types = dict(dtype=model.dtype, param_dtype=model.param_dtype)
  if model.checkpoint:
    family, sizes = weights.read_sizes(model.checkpoint, **types)
    _check_agreement(model, values, family, sizes)
    source = f"model.checkpoint={model.checkpoint}: its vocabulary of"
  else:
    values["vocab"] = values["vocab"] or vocab_size
    sizes = transformer.Sizes(**values, **types)
    source = "model.sizes.vocab ="
  if sizes.vocab < vocab_size:
    raise ValueError(f"{source} {sizes.vocab} is smaller than the task's "
                     f"vocabulary of {vocab_size} ids")
  return sizes


def _check_agreement(model, values, family: str, sizes) -> None:
  """Refuses a checkpoint that is not what the configuration describes.

  Sizes that were left at their defaults describe nothing.
  """
  if model.family not in ("tiny", family):
    raise ValueError(
        f"model.family={model.family!r}, but {model.checkpoint} is of the "
        f"family {family!r}; set model.family={family}")
  default = default_config().model.sizes
  for name, value in values.items():
    found = getattr(sizes, name)
    if model.sizes[name] != default[name] and value != found:
      raise ValueError(
          f"model.sizes.{name}={model.sizes[name]!r}, but {model.checkpoint} "
          f"has {found!r}; leave the field out to follow the checkpoint")


def sampler_settings(config, max_prompts: int, cheap_reward: bool = True,
                     slots: int = 0) -> settings_lib.Settings:
  """Static shapes of the sampler for an allocator of `max_prompts`.

  A reward that is not cheap is judged by other processes while the device
  decodes, so rows must come back chunk by chunk unless the config says more.

  Args:
    config: a configuration.
    max_prompts: prompts of a step.
    cheap_reward: whether verdicts are made in this process.
    slots: instead of the configuration's.
  """
  s = config.sampling
  slots = slots or s.slots
  per_dispatch = s.chunks_per_dispatch or (0 if cheap_reward else 1)
  prefixes = s.prefixes or max(max_prompts, slots)
  rule = allocation.REGISTRY[config.allocation.name]
  few = rule.streaming or rule.opens_later
  return settings_lib.Settings(
      slots=slots, chunk=min(s.chunk, s.max_new_tokens),
      chunks_per_dispatch=per_dispatch, ahead=s.ahead,
      max_new_tokens=s.max_new_tokens,
      prompt_buckets=tuple(s.prompt_buckets), prefill_batch=s.prefill_batch,
      few_prompts=s.prefill_batch // 4 if few else 0,
      prefixes=max(prefixes, max_prompts), queue=config.rollout_budget,
      cache_dtype=s.cache_dtype or config.model.dtype)


def with_slots(config, sizes: transformer.Sizes, allocator, total: int, *,
               training: bool = True,
               placement: sharding.Placement | None = None):
  """The configuration with its slots chosen, where it leaves them open (0).

  Args:
    config: a configuration; not changed.
    sizes: of its model.
    allocator: the rule that asks for rollouts. A streaming one learns from
      rollouts that have ended, so it gets slots for a quarter of the budget.
    total: bytes of each device. sampling.memory, if it is set, says instead
      what the cache may take of them.
    training: whether gradients and moments take memory, too.
    placement: see `settings.largest_slots`.

  Raises:
    ValueError: not even the fewest slots fit.
  """
  if config.sampling.slots:
    return config
  memory = int(config.sampling.memory * 2**30)
  if not memory:
    copies = 1
    if training and config.model.lora.rank:
      copies += 1  # The merged policy; what adapters need is little.
    elif training:
      copies += 1 if config.optimizer.name == "sgd" else 3
    memory = settings_lib.memory_left(total, sizes, copies=copies,
                                      placement=placement)
  budget = config.rollout_budget
  slots = settings_lib.largest_slots(
      lambda n: sampler_settings(config, allocator.max_prompts, slots=n),
      sizes, memory, budget // 4 if allocator.streaming else budget, placement)
  config = config.copy_and_resolve_references()
  config.sampling.slots = slots
  return config.lock()


def objective_of(config) -> objective_lib.Objective:
  """The loss of `config.policy`."""
  policy = config.policy
  single = policy.updates_per_step * policy.minibatches == 1
  old = policy.old_logprobs
  if old == "trainer" and single:
    old = "current"  # Nothing moves before the only update: ratio 1.
  published = loss_table.default_clips(policy.loss)
  low, high = (value if value >= 0 else default for value, default in zip(
      (policy.clip_low, policy.clip_high), published))
  return objective_lib.Objective(
      loss=policy.loss, clip_low=low, clip_high=high,
      old=old, kl_form=policy.kl.form, kl_coef=policy.kl.coef,
      importance_cap=policy.rollout_is_cap,
      temperature=config.sampling.temperature, remat=policy.remat,
      attention=policy.attention)


def optimizer_of(config) -> optimizer_lib.OptimizerOptions:
  """The optimiser of `config.optimizer`, without its learning rate."""
  o = config.optimizer
  return optimizer_lib.OptimizerOptions(
      name=o.name, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay,
      clip_norm=o.clip_norm)


def adapted_of(config, sizes: transformer.Sizes) -> transformer.Sizes | None:
  """Sizes with the adapters of `config.model.lora`; None: there are none.

  Raises:
    ValueError: a rank that is no less than what the model's matrices have.
  """
  lora = config.model.lora
  if not lora.rank:
    return None
  narrow = min(sizes.width, sizes.ffn, sizes.heads * sizes.head_dim,
               sizes.kv_heads * sizes.head_dim)
  if lora.rank >= narrow:
    raise ValueError(
        f"model.lora.rank: {lora.rank} is no less than the rank of the "
        f"model's narrowest matrix, {narrow}; legal: 1 to {narrow - 1}, or 0 "
        "to train all parameters")
  return dataclasses.replace(sizes, adapters=sizes_lib.Adapters(**lora))


def check_attention(config, sizes: transformer.Sizes, platform: str,
                    placement: sharding.Placement | None = None) -> None:
  """Raises ValueError where policy.attention cannot be what it says."""
  policy = config.policy
  if policy.attention != "splash":
    return
  why = splash.misfit(sizes.head_dim, policy.row_length, platform)
  for length in policy.row_buckets:
    if not why and not splash.block_of(length):
      why = (f"policy.row_buckets has {length}, not a multiple of "
             f"{splash.LANES}")
  if not why and placement is not None and not (
      policy.remat
      and pieces.supported(sizes, placement, policy.row_length)):
    why = ("on a mesh it needs policy.remat=True, and heads, ffn, vocabulary "
           "and row length that mesh.tensor divides")
  if why:
    raise ValueError(f"policy.attention: 'splash' cannot be used: {why}")


def updater_of(config, graph, sizes: transformer.Sizes,
               placement: sharding.Placement | None) -> update_lib.Updater:
  """The update of `config` for the plain model of `sizes`."""
  return update_lib.Updater(graph, objective_of(config), optimizer_of(config),
                            placement, adapted_of(config, sizes))


def estimator_of(config) -> batch_lib.Estimator:
  """How rewards become coefficients under `config.policy`."""
  policy = config.policy
  return batch_lib.Estimator(
      loss=policy.loss, advantage=policy.advantage,
      aggregator=policy.aggregator, denominator=policy.denominator,
      eps=policy.advantage_eps, ddof=policy.ddof,
      keep_all=policy.kl.coef > 0, minibatches=policy.minibatches,
      update_rollouts=policy.update_rollouts,
      update_noise=policy.update_noise,
      row_length=policy.row_length, rows_per_micro=policy.rows_per_microbatch,
      max_new_tokens=config.sampling.max_new_tokens,
      row_buckets=tuple(policy.row_buckets))
