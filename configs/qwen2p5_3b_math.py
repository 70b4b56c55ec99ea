r"""Qwen2.5-3B on MATH: the published run of VIGOR (arXiv 2607.22002).

    python -m vigor_jax.train --config=configs/qwen2p5_3b_math.py:vigor \
        --config.model.checkpoint=/models/Qwen2.5-3B --workdir=runs/3b_vigor

The argument is the rule: `vigor`, `uniform` (GRPO, 8 rollouts a prompt),
`eb_widening`, or any other in vigor_jax/allocation. All rules share one
estimator, so that they differ in who gets rollouts and in nothing else.

Before: `python -m vigor_jax.tasks.fetch NAME` for math and, for the evaluation,
aime24, amc23, minerva, gaokao and olympiad; the checkpoint's folder on every
host. For the v5e slice of 16 chips that `topology` names; on other devices set
--config.topology= and the mesh.

Expected: the paper reports 36.6 (GRPO) and 37.9 (VIGOR) as the average accuracy
over the six sets, and up to 2.3 times fewer rollouts to a target accuracy. This
project has not run it: neither its results here nor its time are known.
`python -m vigor_jax.preflight --config=configs/qwen2p5_3b_math.py` estimates
the time of a step without a TPU.

Of the settings the readings of the paper leave open, this file decides: 128
prompts and 1024 rollouts a step, AdamW at 1e-6 after 10 steps of warm-up,
clipping at .2 and .28, the token mean, no KL term, prompts of at most 1024 and
completions of at most 3072 tokens, temperature 1; the evaluation's temperature
and samples; the number of steps. Take three seeds: --config.seed=0, 1, 2.
Advantages are divided by the standard deviation, as in GRPO; theory
(docs/theory.md) prefers --config.policy.advantage=dr_grpo with this rule.
"""

from vigor_jax.config import default_config
from vigor_jax.policy import families

# Held-out sets of the paper; `math` is evaluated on MATH-500. Small sets get
# more samples of each prompt.
SUITE = (
  "math, aime24(samples=16), amc23(samples=8), minerva, gaokao, olympiad"
)


def get_config(allocator="vigor"):
  """Returns the configuration for one rule."""
  config = default_config("math")
  config.allocation.name = allocator
  config.task.template = "qwen_boxed"
  config.task.max_prompt_length = 1024
  config.task.max_completion_length = 3072

  config.total_steps = 200
  config.prompts_per_step = 128
  config.rollout_budget = 1024

  config.model.family = "qwen2"
  config.model.sizes.update(families.published("qwen2.5-3b"))
  config.model.dtype = "bfloat16"
  # In bfloat16 a parameter would not notice a step of 1e-6.
  config.model.param_dtype = "float32"

  config.topology = "v5e:4x4"
  config.mesh.fsdp = 8
  config.mesh.tensor = 2

  config.policy.loss = "dapo"
  config.policy.advantage = "grpo"
  config.policy.aggregator = "token_mean"
  config.policy.row_length = 4096
  config.policy.rows_per_microbatch = 16
  config.policy.remat = True
  config.optimizer.learning_rate = 1e-6
  config.optimizer.warmup_steps = 10

  config.sampling.slots = 256
  config.sampling.chunk = 32
  config.sampling.prompt_buckets = (256, 512, 1024)
  config.sampling.prefill_batch = 16
  config.sampling.max_new_tokens = 3072

  config.evaluation.every_steps = 20
  config.evaluation.suite = SUITE
  config.evaluation.num_prompts = 1000  # All of every set.
  config.evaluation.temperature = 0.6
  config.evaluation.top_p = 0.95
  config.checkpoint.every_steps = 10
  return config
