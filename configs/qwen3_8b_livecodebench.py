r"""Qwen3-8B on LiveCodeBench v6: the published run of VIGOR on programs.

    python -m vigor_jax.train --config=configs/qwen3_8b_livecodebench.py:vigor \
        --config.model.checkpoint=/models/Qwen3-8B --workdir=runs/8b_vigor

The argument is the rule: `vigor`, `uniform` (8 rollouts a prompt),
`eb_widening` or another. Before: `python -m vigor_jax.tasks.fetch
livecodebench`; every host needs a sandbox for programs (docs/rewards.md). For
the 8 chips of a v5p that `topology` names; on other devices set
--config.topology= and the mesh.

As published: the problems that release v6 added, reward 1 for passing all the
public tests, validation on all every 5 steps at temperature .6, top-p .95:
prompts of 2048 and completions of 8192 tokens, 64 prompts a step, three seeds
(--config.seed=0, 1, 2). eval/full_pass is the share of programs that pass every
test, eval/accuracy the average share of tests passed.

Expected: the paper reports a full pass of 44.0 (GRPO) and 45.7 (VIGOR), the
first reached with 1.49 times fewer rollouts, and 63.4 and 66.8 as the average
share of tests. This project has not run it: neither its results here nor its
time are known; `python -m vigor_jax.preflight` estimates the time of a step.
Open in the readings and decided here: 512 rollouts a step, whether the reward
is all or nothing (--config.reward.mode=fraction pays for each test), what
qwen2p5_3b_math.py lists, and that Qwen3 thinks, as its chat template has it.
"""

from vigor_jax.config import default_config
from vigor_jax.policy import families


def get_config(allocator="vigor"):
  """Returns the configuration for one rule."""
  config = default_config("livecodebench")
  config.allocation.name = allocator
  config.task.template = "chat_code"
  config.task.max_prompt_length = 2048
  config.task.max_completion_length = 8192
  config.reward.mode = "binary"

  config.total_steps = 100
  config.prompts_per_step = 64
  config.rollout_budget = 512

  config.model.family = "qwen3"
  config.model.sizes.update(families.published("qwen3-8b"))
  config.model.dtype = "bfloat16"
  # In bfloat16 a parameter would not notice a step of 1e-6.
  config.model.param_dtype = "float32"

  config.topology = "v5p:2x2x2"
  config.mesh.fsdp = 4
  config.mesh.tensor = 2

  config.policy.loss = "dapo"
  config.policy.advantage = "grpo"
  config.policy.aggregator = "token_mean"
  config.policy.row_length = 10240
  config.policy.rows_per_microbatch = 8
  config.policy.remat = True
  config.optimizer.learning_rate = 1e-6
  config.optimizer.warmup_steps = 10

  config.sampling.slots = 128
  config.sampling.chunk = 32
  config.sampling.prompt_buckets = (512, 1024, 2048)
  config.sampling.prefill_batch = 8
  config.sampling.max_new_tokens = 8192

  config.evaluation.every_steps = 5
  config.evaluation.num_prompts = 1000  # All of the slice.
  config.evaluation.samples_per_prompt = 4
  config.evaluation.pass_at = (1, 4)
  config.evaluation.temperature = 0.6
  config.evaluation.top_p = 0.95
  config.evaluation.reward_mode = "fraction"
  config.checkpoint.every_steps = 5
  return config
