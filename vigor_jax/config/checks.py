"""What a whole configuration must satisfy before any device work."""

from vigor_jax import allocation
from vigor_jax import tasks
from vigor_jax.config import fields
from vigor_jax.config import model_checks
from vigor_jax.config.defaults import options_section
from vigor_jax.config.fields import ConfigError
from vigor_jax.config.legal import CHOICES, RANGES
from vigor_jax.config.legal import check_choice, check_folder, check_range
from vigor_jax.policy import buckets
from vigor_jax.tasks import suites


def validate(config):
  """Returns the configuration, or raises a ConfigError for its first fault."""
  _check_registered(config)
  for path, choices in CHOICES.items():
    check_choice(path, fields.get(config, path), choices)
  for path, interval in RANGES.items():
    check_range(path, fields.get(config, path), interval)
  _check_task(config)
  _check_reward(config)
  model_checks.check(config)
  _check_sampling(config)
  _check_policy(config)
  _check_schedule(config)
  _check_evaluation(config)
  _check_start(config)
  _check_allocation(config)
  return config


def _check_registered(config):
  check_choice("task.name", config.task.name, tuple(sorted(tasks.REGISTRY)))
  check_choice(
    "allocation.name", config.allocation.name,
    tuple(sorted(allocation.REGISTRY)),
  )


def _check_task(config):
  options = tasks.REGISTRY[config.task.name].options
  values = fields.options_of(config.task, options)
  try:
    made = options(**values)
    if hasattr(made, "validate"):
      made.validate()
  except (ValueError, TypeError) as error:
    raise ConfigError(f"task ({config.task.name}): {error}") from error


def _check_reward(config):
  # A task may name its default reward in its own section.
  for path in ("reward.name", "task.reward"):
    name = fields.flatten(config).get(path)
    if name or (path == "task.reward" and name is not None):
      # Imported here: only a named reward's own module is needed.
      from vigor_jax import rewards

      try:
        rewards.resolve(name)
      except ValueError as error:
        detail = str(error).removeprefix("reward.name ")
        raise ConfigError(f"{path}: {detail}") from error
  _check_shaping(config)


def _check_shaping(config):
  shaping, longest = config.reward.shaping, config.sampling.max_new_tokens
  path = "reward.shaping"
  if shaping.format or shaping.format_bonus:
    from vigor_jax.rewards import shaping as shaping_lib

    check_choice(
      f"{path}.format", shaping.format, tuple(sorted(shaping_lib.FORMATS))
    )
    if not shaping.format_bonus:
      raise ConfigError(
        f"{path}.format={shaping.format!r} has no effect without "
        f"{path}.format_bonus; legal: '' or a bonus above 0"
      )
  if shaping.overlong_buffer > longest:
    raise ConfigError(
      f"{path}.overlong_buffer: {shaping.overlong_buffer} tokens are more than "
      f"sampling.max_new_tokens={longest}"
    )
  if shaping.overlong_weight != 1 and not shaping.overlong_buffer:
    raise ConfigError(
      f"{path}.overlong_weight={shaping.overlong_weight} has no effect without "
      f"{path}.overlong_buffer"
    )


def _check_sampling(config):
  sampling = config.sampling
  buckets = tuple(sampling.prompt_buckets)
  if not buckets or min(buckets) < 1 or list(buckets) != sorted(set(buckets)):
    raise ConfigError(
      "sampling.prompt_buckets: expected ascending positive lengths, got "
      f"{buckets}"
    )
  if config.stage == "rl" and sampling.temperature == 0:
    raise ConfigError(
      "sampling.temperature: 0 makes all rollouts of a prompt equal, so no "
      "group carries signal; legal: more than 0 (1 is usual)"
    )
  if sampling.slots and sampling.memory:
    raise ConfigError(
      f"sampling.memory={sampling.memory} has no effect with "
      f"sampling.slots={sampling.slots}; legal: sampling.slots=0, which "
      "chooses the slots from the memory, or sampling.memory=0"
    )


def _check_policy(config):
  policy, sampling = config.policy, config.sampling
  longest = max(sampling.prompt_buckets) + sampling.max_new_tokens
  if policy.row_length < longest:
    raise ConfigError(
      f"policy.row_length: {policy.row_length} tokens cannot hold the longest "
      f"rollout, {max(sampling.prompt_buckets)} (largest of "
      f"sampling.prompt_buckets) + {sampling.max_new_tokens} "
      f"(sampling.max_new_tokens); legal: {longest} or more"
    )
  why = buckets.misfit(policy.row_length, policy.row_buckets)
  if why:
    raise ConfigError(f"policy.row_buckets: {why}")
  if policy.minibatches > config.rollout_budget:
    raise ConfigError(
      f"policy.minibatches: {policy.minibatches} are more than "
      f"rollout_budget={config.rollout_budget}"
    )
  if 0 < policy.update_rollouts < policy.minibatches:
    raise ConfigError(
      f"policy.update_rollouts: {policy.update_rollouts} are fewer than "
      f"policy.minibatches={policy.minibatches}; legal: 0 (all) or at least "
      "one for each"
    )
  for name in ("update_rollouts", "update_noise"):
    if policy[name] and policy.kl.coef:
      raise ConfigError(
        f"policy.{name}: {policy[name]} draws rollouts by their advantage, but "
        f"the KL term runs over all of them; set policy.{name}=0 or "
        "policy.kl.coef=0"
      )
  for name in ("clip_low", "clip_high"):
    if -1 < policy[name] < 0:
      raise ConfigError(
        f"policy.{name}: must be -1 (as published with the loss) or at least "
        f"0, got {policy[name]}"
      )
  if 0 < policy.rollout_is_cap < 1:
    raise ConfigError(
      "policy.rollout_is_cap: a cap below 1 would shrink on-policy rollouts "
      f"too, got {policy.rollout_is_cap}; legal: 0 (off) or at least 1"
    )


def _check_schedule(config):
  optimizer = config.optimizer
  if optimizer.weight_decay and optimizer.name != "adamw":
    raise ConfigError(
      f"optimizer.weight_decay={optimizer.weight_decay} has no effect with "
      f"optimizer.name={optimizer.name!r}; legal: 0, or optimizer.name='adamw'"
    )
  if config.stage == "rl" and optimizer.warmup_steps > config.total_steps:
    raise ConfigError(
      f"optimizer.warmup_steps: {optimizer.warmup_steps} are more than "
      f"total_steps={config.total_steps}"
    )
  if config.sft.warmup_steps > config.sft.steps > 0:
    raise ConfigError(
      f"sft.warmup_steps: {config.sft.warmup_steps} are more than "
      f"sft.steps={config.sft.steps}"
    )
  outside = [
    step for step in config.profile_steps if not 1 <= step <= config.total_steps
  ]
  if outside and config.stage == "rl":
    raise ConfigError(
      f"profile_steps: {outside[0]} is no step of the run; legal: 1 to "
      f"total_steps={config.total_steps}"
    )


def _check_evaluation(config):
  evaluation = config.evaluation
  if evaluation.fresh_rollouts == 1:
    raise ConfigError(
      "evaluation.fresh_rollouts: one rollout has no variance; legal: 0 "
      "(off) or at least 2 (16 or more for a useful figure)"
    )
  most = evaluation.samples_per_prompt
  if evaluation.suite:
    try:
      most = max(m.samples or most for m in suites.parse(evaluation.suite))
    except ValueError as error:
      raise ConfigError(f"evaluation.suite: {error}") from error
  elif evaluation.suite_folder:
    raise ConfigError(
      f"evaluation.suite_folder={evaluation.suite_folder!r} has no effect "
      "without evaluation.suite"
    )
  for k in evaluation.pass_at:
    if not 1 <= k <= most:
      raise ConfigError(
        f"evaluation.pass_at: pass@{k} needs 1 <= k <= samples per prompt, "
        f"which are {most}"
      )


def _check_start(config):
  if config.stage == "sft":
    if config.sft.steps < 1:
      raise ConfigError("sft.steps: stage=sft needs at least 1, got 0")
    if config.init_from == "auto":
      raise ConfigError(
        "init_from: 'auto' trains a warm start with stage=sft, so it cannot "
        "itself start stage=sft; legal here: '' or a checkpoint"
      )
  if config.init_from == "auto":
    if config.sft.steps < 1:
      raise ConfigError("sft.steps: init_from='auto' needs at least 1, got 0")
  else:
    check_folder("init_from", config.init_from)


def _check_allocation(config):
  chosen = config.allocation.name
  for name, allocator in allocation.REGISTRY.items():
    if name == chosen:
      continue
    defaults = options_section(allocator.Options)
    for field, default in fields.flatten(defaults).items():
      value = config.allocation[name][field]
      if value != default:
        raise ConfigError(
          f"allocation.{name}.{field}={value!r} has no effect, since "
          f"allocation.name={chosen!r}; set allocation.name={name} or leave "
          f"the field at {default!r}"
        )
  options = fields.options_of(
    config.allocation[chosen], allocation.REGISTRY[chosen].Options
  )
  try:
    allocation.make(
      chosen,
      options,
      prompts_per_step=config.prompts_per_step,
      budget=config.rollout_budget,
      seed=config.seed,
      train_on=config.allocation.train_on,
    )
  except ValueError as error:
    detail = str(error).removeprefix(f"{chosen}: ")
    raise ConfigError(f"allocation.{chosen}: {detail}") from error
