r"""Expressions to stack programs, the graded toy task, on a laptop's CPU.

    python -m vigor_jax.compare --config=configs/stack_language.py \
        --allocators=uniform,vigor,eb_widening --seeds=0,1,2 \
        --workdir=runs/stack_language

The reward is the share of 8 hidden tests that a program passes, so groups have
variance without being mixed of right and wrong. The argument is the rule of a
single run: --config=configs/stack_language.py:uniform with vigor_jax.train.
"""

from vigor_jax.config import default_config


def get_config(allocator="vigor"):
  """Returns the configuration for one rule."""
  config = default_config("stack_language")
  config.allocation.name = allocator

  # The warm start is trained once, then taken from a cache.
  config.init_from = "auto"
  config.sft.steps = 1200
  config.sft.batch_size = 128
  config.sft.learning_rate = 1e-3
  config.sft.warmup_steps = 100

  config.total_steps = 100
  config.prompts_per_step = 32
  config.rollout_budget = 256

  config.policy.advantage = "dr_grpo"
  config.policy.aggregator = "rollout_mean"
  config.policy.row_length = 32
  config.policy.rows_per_microbatch = 64
  config.optimizer.name = "adam"
  config.optimizer.learning_rate = 5e-4
  config.optimizer.b2 = 0.99

  # Three operations: prompts of 8 tokens, programs of 7 and EOS.
  config.sampling.slots = 64
  config.sampling.chunk = 4
  config.sampling.prompt_buckets = (8,)
  # As many for every rule, so that they all share one compiled sampler.
  config.sampling.prefixes = 256
  config.sampling.max_new_tokens = 8

  config.evaluation.every_steps = 10
  config.evaluation.num_prompts = 1024
  config.evaluation.temperature = 1.0
  config.checkpoint.every_steps = 10
  return config
