"""Legal values of single fields: names to choose from, ranges, folders."""

import difflib
import math
import os

from vigor_jax.config.fields import ConfigError
from vigor_jax.policy import advantages
from vigor_jax.policy import aggregators
from vigor_jax.policy import families
from vigor_jax.policy import loss_table

# What the models of a family always have; "tiny" is any combination.
FAMILIES = {
  "tiny": {},
  **{name: family.flags for name, family in families.FAMILIES.items()},
}

CHOICES = {
  "stage": ("rl", "sft"),
  "model.family": tuple(FAMILIES),
  "model.dtype": ("float32", "bfloat16"),
  "model.param_dtype": ("float32", "bfloat16"),
  "policy.loss": tuple(loss_table.LOSSES),
  "policy.attention": ("xla", "splash"),
  "policy.advantage": tuple(advantages.ADVANTAGES),
  "policy.aggregator": tuple(aggregators.AGGREGATORS),
  "policy.denominator": ("all", "informative"),
  "policy.kl.form": ("k1", "k2", "k3"),
  "policy.old_logprobs": ("sampler", "trainer"),
  "sampling.cache_dtype": ("", "float32", "bfloat16"),
  "optimizer.name": ("adamw", "adam", "sgd"),
  "optimizer.schedule": ("constant", "cosine", "linear"),
  "allocation.train_on": ("all", "survivors"),
}

# Smallest and largest legal value; round brackets exclude the end.
RANGES = {
  "seed": "[0, 2147483647]",
  "total_steps": "[1, inf)",
  "prompts_per_step": "[1, 65536]",
  "rollout_budget": "[1, 65536]",
  "reward.noise": "[0, 0.5]",
  "reward.workers": "[0, inf)",
  "reward.shaping.format_bonus": "[0, inf)",
  "reward.shaping.length_penalty": "[0, inf)",
  "reward.shaping.overlong_buffer": "[0, inf)",
  "reward.shaping.overlong_weight": "(0, inf)",
  "model.sizes.layers": "[1, 1024]",
  "model.sizes.width": "[1, inf)",
  "model.sizes.heads": "[1, inf)",
  "model.sizes.kv_heads": "[1, inf)",
  "model.sizes.head_dim": "[2, inf)",
  "model.sizes.ffn": "[1, inf)",
  "model.sizes.vocab": "[0, inf)",
  "model.sizes.rope_theta": "(0, inf)",
  "model.sizes.norm_eps": "(0, inf)",
  "model.lora.rank": "[0, 4096]",
  "model.lora.alpha": "(0, inf)",
  "mesh.data": "[-1, inf)",
  "mesh.fsdp": "[1, inf)",
  "mesh.tensor": "[1, inf)",
  "mesh.host_timeout": "(0, inf)",
  "policy.clip_low": "[-1, 1]",
  "policy.clip_high": "[-1, inf)",
  "policy.kl.coef": "[0, inf)",
  "policy.updates_per_step": "[1, inf)",
  "policy.minibatches": "[1, inf)",
  "policy.update_rollouts": "[0, inf)",
  "policy.update_noise": "[0, inf)",
  "policy.rollout_is_cap": "[0, inf)",
  "policy.row_length": "[2, inf)",
  "policy.rows_per_microbatch": "[1, inf)",
  "policy.advantage_eps": "[0, inf)",
  "policy.ddof": "[0, 1]",
  "sampling.slots": "[0, 65536]",
  "sampling.memory": "[0, inf)",
  "sampling.chunk": "[1, inf)",
  "sampling.chunks_per_dispatch": "[0, inf)",
  "sampling.ahead": "[-1, inf)",
  "sampling.lag": "[0, inf)",
  "sampling.prefixes": "[0, inf)",
  "sampling.temperature": "[0, inf)",
  "sampling.top_k": "[0, inf)",
  "sampling.top_p": "(0, 1]",
  "sampling.min_p": "[0, 1)",
  "sampling.max_new_tokens": "[1, inf)",
  "sampling.prefill_batch": "[1, inf)",
  "optimizer.learning_rate": "[0, inf)",
  "optimizer.warmup_steps": "[0, inf)",
  "optimizer.weight_decay": "[0, inf)",
  "optimizer.b1": "[0, 1)",
  "optimizer.b2": "[0, 1)",
  "optimizer.eps": "(0, inf)",
  "optimizer.clip_norm": "[0, inf)",
  "sft.seed": "[0, 2147483647]",
  "sft.steps": "[0, inf)",
  "sft.batch_size": "[1, inf)",
  "sft.learning_rate": "(0, inf)",
  "sft.warmup_steps": "[0, inf)",
  "evaluation.every_steps": "[0, inf)",
  "evaluation.num_prompts": "[1, 1000000]",
  "evaluation.samples_per_prompt": "[1, inf)",
  "evaluation.temperature": "[0, inf)",
  "evaluation.top_p": "(0, 1]",
  "evaluation.fresh_rollouts": "[0, inf)",
  "evaluation.fresh_prompts": "[1, inf)",
  "evaluation.num_samples_logged": "[0, inf)",
  "checkpoint.every_steps": "[1, inf)",
  "checkpoint.keep": "[1, inf)",
}


def check_choice(path, value, choices):
  """Refuses a value that is none of the choices, naming the nearest one."""
  if value in choices:
    return
  near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
  hint = f"; did you mean {near[0]!r}?" if near else ""
  legal = ", ".join(repr(choice) for choice in choices)
  raise ConfigError(f"{path}: unknown value {value!r}; legal: {legal}{hint}")


def check_range(path, value, interval):
  """Refuses a value outside an interval, written as in RANGES."""
  low, high = (float(end) for end in interval[1:-1].split(","))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  if not (above and below):
    text = interval.replace(", inf)", "")
    bound = "more than" if text[0] == "(" else "at least"
    if math.isinf(high):
      raise ConfigError(f"{path}: must be {bound} {text[1:]}, got {value!r}")
    raise ConfigError(f"{path}: must lie in {interval}, got {value!r}")


def check_folder(path, folder):
  """Refuses a local folder that is absent, naming its nearest neighbour."""
  if not folder or "://" in folder or os.path.exists(folder):
    return
  parent = os.path.dirname(os.path.abspath(folder))
  near = []
  if os.path.isdir(parent):
    near = difflib.get_close_matches(
      os.path.basename(os.path.normpath(folder)), os.listdir(parent), n=1
    )
  hint = f"; did you mean {os.path.join(parent, near[0])!r}?" if near else ""
  raise ConfigError(f"{path}: {folder!r} does not exist{hint}")
