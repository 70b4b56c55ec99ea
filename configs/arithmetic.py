r"""Chains of arithmetic with a 105k-parameter policy, on a laptop's CPU.

    python -m vigor_jax.train --config=configs/arithmetic.py \
        --workdir=runs/arithmetic

The argument names the stream: `sparse_signal` (the default: 75 % of the
prompts are solved already, 15 % nearly impossible), `plain` or `hard_junk`,
as in --config=configs/arithmetic.py:plain. Other rules:
--config.allocation.name=uniform, or eb_widening.
"""

from vigor_jax.config import default_config


def get_config(stream="sparse_signal"):
  """Returns the configuration for one stream of prompts."""
  config = default_config("arithmetic")
  config.task.difficulty = stream

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
  config.policy.rows_per_microbatch = 8
  config.optimizer.name = "adam"
  config.optimizer.learning_rate = 5e-4
  config.optimizer.b2 = 0.99

  # A prompt is a digit, six operations and "=": 8 tokens; the completion is at
  # most six results and EOS.
  config.sampling.slots = 64
  config.sampling.chunk = 8
  config.sampling.prompt_buckets = (8,)
  # As many for every rule, so that they all share one compiled sampler.
  config.sampling.prefixes = 256
  config.sampling.max_new_tokens = 7

  config.evaluation.every_steps = 10
  config.evaluation.num_prompts = 1024
  config.evaluation.temperature = 1.0
  # Uncharged: they measure the variance per rollout that the rule reached.
  config.evaluation.fresh_rollouts = 16
  config.evaluation.fresh_prompts = 64
  config.checkpoint.every_steps = 10
  return config
