"""How per-token terms become one loss: a weight per rollout, a denominator.

    loss = sum_j weight_j * sum_t term_jt / denominator

The split lets micro-batches be added in any order and size: sums are divided
once, at the optimiser step. With groups of different sizes the choice decides
how much each prompt counts (docs/theory.md), so it is a config field.
"""

from collections.abc import Callable

import numpy as np

from vigor_jax.policy import registry


def _prompt_mean(size, length, prompts, rollouts, tokens, limit):
  """1/P sum_x 1/n_x sum_j 1/|o_j| sum_t: every prompt counts alike."""
  return 1.0 / (size * length), prompts


def _rollout_mean(size, length, prompts, rollouts, tokens, limit):
  """1/B sum_j 1/|o_j| sum_t: every rollout counts alike."""
  return 1.0 / length, rollouts


def _token_mean(size, length, prompts, rollouts, tokens, limit):
  """1/total sum_j sum_t: every token counts alike. DAPO, arXiv 2503.14476."""
  return np.ones_like(length), tokens


def _constant(size, length, prompts, rollouts, tokens, limit):
  """1/(B L_max) sum_j sum_t. Dr.GRPO, arXiv 2503.20783."""
  return np.ones_like(length), rollouts * limit


# name -> function of (n_x [B], |o_j| [B], prompts, rollouts, tokens, L_max),
# giving (weight [B], denominator).
AGGREGATORS: dict[str, Callable] = {
  "prompt_mean": _prompt_mean,
  "rollout_mean": _rollout_mean,
  "token_mean": _token_mean,
  "constant": _constant,
}
DENOMINATORS = ("all", "informative")
LEVELS = ("token", "sequence")


def weights(
  name: str,
  group: np.ndarray,
  lengths: np.ndarray,
  *,
  budget: int,
  max_new_tokens: int,
  num_prompts: int,
  denominator: str = "all",
  informative: np.ndarray | None = None,
  level: str = "token",
) -> tuple[np.ndarray, float]:
  """Weights of a step's rollouts, and what to divide their sum by.

  Pass every rollout of the step that is trained on, also those that the update
  leaves out because their advantage is 0: they belong to the means.

  Args:
    name: a key of AGGREGATORS.
    group: int [B], the prompt of each rollout.
    lengths: int [B], completion tokens in the loss, |o_j|; 0 for none.
    budget: rollouts in the mean, whatever B is (a batch constant keeps the
      sum unbiased where the realised number would not).
    max_new_tokens: L_max.
    num_prompts: prompts in the mean.
    denominator: "all" counts as above; "informative" counts only rollouts with
      `informative`, and the others get weight 0.
    informative: bool [B], from advantages.informative.
    level: "token" for one term per token; "sequence" for losses with one term
      per rollout (LOSSES[name].level). The sequence weight is |o_j| times the
      token weight: prompt_mean 1/n_x, rollout_mean 1, token_mean |o_j|.

  Returns:
    (float32 [B], float). The denominator is positive; a step in which nothing
    is counted has weights 0 and denominator 1.

  Raises:
    ValueError: unknown name, or values that cannot be.
  """
  aggregator = registry.find("aggregator", name, AGGREGATORS)
  registry.check("denominator", denominator, DENOMINATORS)
  registry.check("loss level", level, LEVELS)
  group, lengths = np.asarray(group), np.asarray(lengths)
  if group.shape != lengths.shape or group.ndim != 1:
    raise ValueError(
      f"group and lengths are [B], got {group.shape=} {lengths.shape=}"
    )
  if lengths.size and (lengths.min() < 0 or lengths.max() > max_new_tokens):
    bad = int(np.flatnonzero((lengths < 0) | (lengths > max_new_tokens))[0])
    raise ValueError(
      f"length of row {bad} is {lengths[bad]}, outside 0..{max_new_tokens=}"
    )

  counted = np.ones(group.shape, bool)
  prompts, rollouts = float(num_prompts), float(budget)
  _, ids = np.unique(group, return_inverse=True)
  if denominator == "informative":
    if informative is None:
      raise ValueError("denominator 'informative' needs informative, got None")
    counted = np.asarray(informative, bool)
    if counted.shape != group.shape:
      raise ValueError(f"informative is [B], got {counted.shape=}")
    prompts = float(len(np.unique(ids[counted])))
    rollouts = float(counted.sum())
  tokens = float(lengths[counted].sum())
  size = np.bincount(ids)[ids] if ids.size else np.ones(0)
  length = np.maximum(lengths, 1).astype(np.float64)
  weight, total = aggregator(
    size, length, prompts, rollouts, tokens, float(max_new_tokens)
  )
  if level == "sequence":
    weight = weight * length
  weight = np.where(counted & (lengths > 0), weight, 0.0)
  return weight.astype(np.float32), total if total > 0 else 1.0
