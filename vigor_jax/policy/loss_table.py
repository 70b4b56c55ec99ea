"""The losses by name, and what their papers pair them with.

The table is data, so that a config can be checked without importing JAX. The
functions are in losses.py, or wherever an entry says.
"""

import dataclasses

from vigor_jax.policy import registry


@dataclasses.dataclass(frozen=True)
class Loss:
  """A loss's entry.

  Attributes:
    terms: "module:function". The function takes (logprobs, log_ratio,
      advantages, segment, valid, clip_low, clip_high), arrays [R, T] that are
      finite and 0 where not valid, and returns (terms float32 [R, T] to be
      minimised, clipped bool [R, T]).
    clip_low: published clip below ratio 1.
    clip_high: published clip above ratio 1.
    aggregator: the paper's aggregator, a key of AGGREGATORS.
    level: "token", or "sequence" where a rollout has one term (spread evenly
      over its tokens); goes to aggregators.weights.
  """

  terms: str
  clip_low: float
  clip_high: float
  aggregator: str
  level: str = "token"


_HERE = "vigor_jax.policy.losses:"

LOSSES: dict[str, Loss] = {
  "grpo": Loss(_HERE + "clipped", 0.2, 0.2, "prompt_mean"),
  "dapo": Loss(_HERE + "clipped", 0.2, 0.28, "token_mean"),
  "dr_grpo": Loss(_HERE + "clipped", 0.2, 0.2, "constant"),
  "gspo": Loss(_HERE + "gspo", 3e-4, 4e-4, "prompt_mean", level="sequence"),
  # The paper leaves the lower side open; a cap of 5 is ScaleRL's, 2510.13786.
  "cispo": Loss(_HERE + "cispo", 1.0, 4.0, "token_mean"),
  "reinforce": Loss(_HERE + "reinforce", 0.0, 0.0, "rollout_mean"),
}


def default_clips(name: str) -> tuple[float, float]:
  """The loss's published (clip_low, clip_high). ValueError: unknown name."""
  loss = registry.find("loss", name, LOSSES)
  return loss.clip_low, loss.clip_high
