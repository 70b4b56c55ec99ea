"""The streams of prompts that the claim is tested on, as configurations."""

import pathlib

from vigor_jax import config as configuration

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 120

# Name -> (config, overrides), the ones that matter most first.
STREAMS = {
  "sparse_signal": ("arithmetic", "task.difficulty=sparse_signal"),
  "plain": ("arithmetic", "task.difficulty=plain"),
  "hard_junk": ("arithmetic", "task.difficulty=hard_junk"),
  "stack, plain": ("stack_language", "task.difficulty=plain"),
  "stack, sparse": ("stack_language", "task.difficulty=sparse_signal"),
  "sparse_signal, q = .1": (
    "arithmetic",
    "task.difficulty=sparse_signal:reward.noise=0.1",
  ),
  "stack, plain, q = .1": (
    "stack_language",
    "task.difficulty=plain:reward.noise=0.1",
  ),
  "sparse_signal, 512": (
    "arithmetic",
    "task.difficulty=sparse_signal:task.num_prompts=512",
  ),
  "plain, 512": ("arithmetic", "task.difficulty=plain:task.num_prompts=512"),
  "hard_junk, 512": (
    "arithmetic",
    "task.difficulty=hard_junk:task.num_prompts=512",
  ),
  # Outputs of up to 17 tokens, and most prompts out of reach at first.
  "sparse_signal, long": (
    "arithmetic",
    "task.difficulty=sparse_signal:task.operations=16:sft.steps=2000"
    ":sampling.prompt_buckets=(18,):sampling.max_new_tokens=17"
    ":policy.row_length=64",
  ),
}

def base_config(stream: str, warm_starts: pathlib.Path | str, quick: bool):
  """The stream's file of configs/, with what all runs share.

  Args:
    stream: key of STREAMS, whose own settings are not in yet.
    warm_starts: folder in which they are kept.
    quick: a few steps from a short warm start.
  """
  path = ROOT / "configs" / f"{STREAMS[stream][0]}.py"
  changes = {
    "total_steps": STEPS,
    "evaluation.num_prompts": 512,
    "evaluation.fresh_rollouts": 0,
    "checkpoint.every_steps": STEPS,  # a cell is short
    "sft.cache_dir": str(warm_starts),
  }
  if quick:
    changes |= {
      "total_steps": 12,
      "evaluation.every_steps": 4,
      "evaluation.num_prompts": 128,
      "sft.steps": 150,
    }
  return configuration.with_overrides(
    configuration.load_file(str(path)), changes
  )


def config_of(stream: str, warm_starts: pathlib.Path | str, quick: bool):
  """The configuration of a stream: `base_config` with its own settings."""
  own = dict(part.split("=", 1) for part in STREAMS[stream][1].split(":"))
  if quick:
    own["sft.steps"] = 20
  return configuration.with_overrides(
    base_config(stream, warm_starts, quick), own
  )
