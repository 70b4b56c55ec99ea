"""A tiny policy for tests with several processes."""

from vigor_jax.config import default_config


def get_config(allocator="vigor"):
  config = default_config("arithmetic")
  config.total_steps = 3
  config.prompts_per_step = 8
  config.rollout_budget = 64
  config.allocation.name = allocator
  config.policy.row_length = 64
  config.policy.rows_per_microbatch = 8
  config.model.sizes.update(
    layers=2, width=32, heads=2, kv_heads=2, head_dim=16, ffn=64)
  config.sampling.slots = 16
  config.sampling.chunk = 4
  config.sampling.prompt_buckets = (16,)
  config.sampling.max_new_tokens = 8
  config.sampling.prefill_batch = 8
  config.mesh.fsdp = 2
  config.mesh.host_timeout = 60.0
  config.optimizer.learning_rate = 1e-3
  config.evaluation.every_steps = 0
  config.checkpoint.every_steps = 2
  return config
