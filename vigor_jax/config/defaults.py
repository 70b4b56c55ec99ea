"""Every configuration field with its default and its meaning.

A field is added here, and nowhere else; its type is the type of its default.
The fields of a task and of the allocators come from their own options
dataclasses, so that a new task or allocator brings its fields along.
"""

import dataclasses

import ml_collections
from ml_collections import config_dict

from vigor_jax import allocation
from vigor_jax import tasks
from vigor_jax.policy.sizes import Adapters


def options_section(options_class: type) -> ml_collections.ConfigDict:
  """Returns the fields of an options dataclass with their defaults."""
  section = ml_collections.ConfigDict()
  for field in dataclasses.fields(options_class):
    if field.default is not dataclasses.MISSING:
      section[field.name] = field.default
    elif field.default_factory is not dataclasses.MISSING:
      section[field.name] = field.default_factory()
    else:
      raise ValueError(
        f"{options_class.__name__}.{field.name} needs a default, since it is "
        "a configuration field"
      )
  return section


def default_config(task: str = "arithmetic") -> ml_collections.ConfigDict:
  """Returns the locked default configuration for one task.

  Args:
    task: the registered task whose own fields appear under `task`.

  Raises:
    ValueError: the task is not registered.
  """
  if task not in tasks.REGISTRY:
    raise ValueError(
      f"task.name: unknown task {task!r}; known: "
      + ", ".join(sorted(tasks.REGISTRY))
    )
  config = ml_collections.ConfigDict()

  # Modules imported before anything else is read, where rules, tasks and losses
  # of your own register themselves.
  config.imports = ()

  # What is run. "rl" trains with rewards, "sft" with a task's solutions.
  config.stage = "rl"
  # Where parameters start: "" draws them from the seed, a path names a
  # checkpoint (a run folder or one step in it), "auto" trains the warm start
  # described by `sft` once, into a cache, and reuses it.
  config.init_from = ""
  config.seed = 0
  config.total_steps = 100
  config.prompts_per_step = 32
  config.rollout_budget = 256  # Rollouts generated per step, all of them.
  # The accelerator slice that the run is meant for, such as "v5e:4x4": what
  # preflight compiles for by default. Empty: whatever devices are found.
  config.topology = ""
  config.profile_steps = ()  # Steps, from 1, whose device trace is written.

  config.task = ml_collections.ConfigDict({"name": task})
  config.task.update(options_section(tasks.REGISTRY[task].options))

  config.reward = config_dict.create(
    name="",  # "module:function"; empty: the task's own.
    mode="",  # Passed on to rewards that have modes ("binary", "fraction").
    noise=0.0,  # Probability with which a verdict is flipped.
    workers=0,  # Processes for rewards that are not cheap; 0: one per core.
    # What the loss sees beside the verdict; allocation never does.
    shaping=config_dict.create(
      format="",  # "boxed" or "think": what earns the bonus.
      format_bonus=0.0,
      length_penalty=0.0,  # Per 1000 tokens of a completion.
      overlong_buffer=0,  # Last tokens below the limit that cost; 0: off.
      overlong_weight=1.0,  # Of that cost, at most 1 before it.
    ),
  )

  config.model = config_dict.create(
    # "tiny" is any combination of sizes; another family is checked against
    # them, or against the checkpoint.
    family="tiny",
    # Pretrained weights: a Hugging Face folder or a .gguf file, which also
    # decides the sizes; empty: none. init_from, if set, replaces the weights.
    checkpoint="",
    sizes=config_dict.create(
      layers=2,
      width=64,
      heads=4,
      kv_heads=4,
      head_dim=16,
      ffn=184,
      vocab=0,  # 0: as many as the task's vocabulary has.
      qkv_bias=False,
      qk_norm=False,
      tied=True,
      rope_theta=10_000.0,
      rope_scaling="",  # Or "llama3:8,1,4,8192", "linear:2".
      norm_eps=1e-6,
    ),
    # Low-rank adapters beside the layers' matrices: they are trained, and the
    # parameters frozen (docs/scale.md).
    # rank=0: there are none, all parameters are trained.
    lora=options_section(Adapters),
    dtype="float32",  # Of the computation.
    param_dtype="float32",  # Of master weights, moments, sums of gradients.
  )

  # Devices along each axis; -1 along `data` takes the ones that remain.
  config.mesh = config_dict.create(
    data=-1,
    fsdp=1,
    tensor=1,
    host_timeout=900.0,  # Seconds after which a silent host ends the job.
  )

  config.policy = config_dict.create(
    loss="grpo",
    advantage="dr_grpo",
    aggregator="rollout_mean",
    denominator="all",  # Rollouts that the mean runs over.
    clip_low=-1.0,  # The ratio is held above 1 - this; -1: as published.
    clip_high=-1.0,  # And below 1 + this; -1: as published with the loss.
    # Against the policy at step 0; of a checkpoint, the step that it was then.
    kl=config_dict.create(coef=0.0, form="k3"),
    updates_per_step=1,
    minibatches=1,
    # At most so many rollouts of a step in its update: equal ones as one, the
    # others drawn by the size of their gradient and weighted up, so that the
    # expected gradient is the same. 0: all with signal.
    update_rollouts=0,
    # The same, but as few micro-batches as add at most so much variance to the
    # update, as a multiple of the variance it has, filled; 0: off. With both,
    # no more than either.
    update_noise=0.0,
    old_logprobs="sampler",
    rollout_is_cap=0.0,  # Cap of the sampler/trainer weights; 0: off.
    row_length=128,  # Tokens of a packed row of the update.
    rows_per_microbatch=16,
    # Lengths of shorter rows beside them, ascending divisors of row_length;
    # as many tokens in a micro-batch (scale.md). (): row_length alone.
    row_buckets=(),
    remat=False,  # Recompute each layer in the backward pass.
    attention="xla",  # "splash": JAX's Pallas kernel, TPUs only (scale.md).
    advantage_eps=1e-6,  # Added to the standard deviation (grpo).
    ddof=0,  # Of that standard deviation.
  )

  config.sampling = config_dict.create(
    # Rows decoded at once. 0: as many as the memory holds when the run
    # begins, halved from rollout_budget down; the run keeps that number.
    slots=64,
    # GiB of each device for keys and values, where slots is 0; 0: half of
    # what weights, gradients and moments leave of the device's memory.
    memory=0.0,
    chunk=8,  # Decode steps between two refills of free slots.
    # Chunks before the host looks. 0: all of a round, or one where the reward
    # is judged by other processes, which then overlaps with decoding.
    chunks_per_dispatch=0,
    # Streaming rules: rollouts waiting beyond the slots (-1: half of them, or
    # all of a few), and chunks after which a verdict is seen.
    ahead=-1,
    lag=1,
    prefixes=0,  # Prompts whose caches are kept; 0: what the allocator needs.
    temperature=1.0,
    top_k=0,  # 0: off.
    top_p=1.0,
    min_p=0.0,
    max_new_tokens=32,
    prompt_buckets=(32,),  # Padded prompt lengths, ascending.
    prefill_batch=32,
    cache_dtype="",  # Empty: that of the computation.
  )

  config.optimizer = config_dict.create(
    name="adamw",
    learning_rate=1e-6,
    warmup_steps=0,
    schedule="constant",
    weight_decay=0.0,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    clip_norm=1.0,  # 0: off.
  )

  # The supervised stage, and the warm start of init_from="auto".
  config.sft = config_dict.create(
    seed=0,  # Of the warm start of init_from="auto": its data and parameters.
    steps=1000,
    batch_size=128,
    learning_rate=1e-3,
    warmup_steps=50,
    cache_dir="",  # Empty: "warm_starts" beside the run's folder.
  )

  config.evaluation = config_dict.create(
    every_steps=10,  # 0: never.
    num_prompts=256,
    samples_per_prompt=1,
    temperature=1.0,
    top_p=1.0,
    pass_at=(),  # k of pass@k, beside samples_per_prompt itself.
    # Tasks to evaluate on instead of the run's own held-out prompts, as
    # "math, aime24(samples=32)"; see docs/evaluation.md.
    suite="",
    suite_folder="",  # With a sub-folder for each; empty: where fetch puts it.
    reward_mode="",  # Of the evaluation's verdicts; empty: reward.mode.
    fresh_rollouts=0,  # Uncharged rollouts per prompt to measure variance with.
    fresh_prompts=32,  # Prompts that get them.
    num_samples_logged=4,
  )

  config.checkpoint = config_dict.create(every_steps=10, keep=3)

  config.allocation = config_dict.create(name="vigor", train_on="all")
  for name, allocator in sorted(allocation.REGISTRY.items()):
    config.allocation[name] = options_section(allocator.Options)

  return config.lock()
