"""Verdicts on completions: a reward is a function to a number in [0, 1].

A reward function has the signature `(completion: str, answer: str, **metadata)
-> float` and a name "module:function". `Scorer` runs one over batches.
"""

from vigor_jax.rewards.combine import Combined
from vigor_jax.rewards.noise import Noise
from vigor_jax.rewards.probing import probe_examples
from vigor_jax.rewards.registry import ALIASES, resolve, reward_name
from vigor_jax.rewards.scorer import Handle, Scorer
from vigor_jax.rewards.shaping import FORMATS, Shaping
from vigor_jax.rewards.verdict import RewardError, check_verdict

__all__ = [
  "ALIASES",
  "Combined",
  "FORMATS",
  "Handle",
  "Noise",
  "RewardError",
  "Scorer",
  "Shaping",
  "check_verdict",
  "probe_examples",
  "resolve",
  "reward_name",
]
