"""From a step's rollouts to packed micro-batches: advantages and weights.

Groups are ids, never positions in an array: prompts may have any number of
rollouts, in any order. Rollouts whose advantage is zero have no gradient
unless a KL term is on, so they are left out of the update (they still count
in every mean).
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import numpy as np

from vigor_jax.allocation import addressed
from vigor_jax.policy import advantages as advantages_lib
from vigor_jax.policy import aggregators
from vigor_jax.policy import buckets
from vigor_jax.policy import losses
from vigor_jax.policy import packing
from vigor_jax.policy import thinning

_MINIBATCH_PURPOSE = 0x6D696E69  # "mini": keeps this Philox stream apart
_THINNING_PURPOSE = 0x7468696E  # "thin"


@dataclasses.dataclass(frozen=True)
class Estimator:
  """How rewards become per-rollout coefficients.

  Attributes:
    loss: decides whether a rollout has one term or one per token.
    advantage: name in advantages.ADVANTAGES.
    aggregator: name in aggregators.AGGREGATORS.
    denominator: "all" or "informative".
    eps, ddof: of the standard deviation (advantage "grpo").
    keep_all: keep rollouts with zero advantage (a KL term needs them).
    minibatches: optimiser steps that share the rollouts out among them.
    update_rollouts: at most so many rollouts of a step in its update, equal
      ones counted once; 0: all.
    update_noise: most variance that drawing them may add to the gradient, as a
      multiple of what it has, with as many more as their micro-batches will
      nearly always hold; 0: whatever update_rollouts leaves.
    row_length, rows_per_micro: shape of a packed micro-batch.
    max_new_tokens: longest completion.
    row_buckets: lengths of shorter rows, ascending.
  """

  loss: str
  advantage: str
  aggregator: str
  denominator: str
  eps: float
  ddof: int
  keep_all: bool
  minibatches: int
  update_rollouts: int
  update_noise: float
  row_length: int
  rows_per_micro: int
  max_new_tokens: int
  row_buckets: tuple[int, ...] = ()

  @property
  def shapes(self) -> buckets.Shapes:
    """Of the micro-batches."""
    return buckets.shapes(self.row_length, self.rows_per_micro,
                          self.row_buckets)

  def most(self, budget: int) -> int:
    """Rollouts of an optimiser step, at most."""
    budget = min(budget, self.update_rollouts or budget)
    return -(-budget // self.minibatches)


@dataclasses.dataclass(frozen=True)
class Minibatch:
  """One optimiser step's worth of packed rollouts; see buckets.pack."""

  packed: packing.Rows
  num_micro: int | tuple[int, ...]
  denominator: float


@dataclasses.dataclass(frozen=True)
class Batch:
  """A step's minibatches and what was computed on the way.

  Attributes:
    minibatches: in the order of their optimiser steps.
    advantages: float32 [N] in canonical order (group, sample).
    order: int64 [N] rows of the buffer in that order.
    active: rollouts in the update.
    signal: rollouts that would be in it without `update_rollouts`.
    useful_share: packed slots that hold a token.
  """

  minibatches: list[Minibatch]
  advantages: np.ndarray
  order: np.ndarray
  active: int
  signal: int
  useful_share: float


def round_index(round_counts: Sequence[np.ndarray], group: np.ndarray,
                sample: np.ndarray) -> np.ndarray:
  """Round (0-based) in which each rollout was asked for, int [N].

  round_counts: per round, rollouts granted to each group.
  """
  granted = np.cumsum(np.stack(round_counts), axis=0)
  return (sample[None] >= granted[:, group]).sum(0)


def surprisal(logprobs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Mean and maximum of -log p over each rollout's tokens: float64 [N, 2].

  -log p of a token drawn from p is an unbiased estimate of p's entropy (nats),
  and costs nothing: the sampler's log-probs [N, L] are there.
  """
  live = np.arange(logprobs.shape[1]) < lengths[:, None]
  values = np.where(live, -logprobs.astype(np.float64), 0.0)
  return np.stack([values.sum(1) / np.maximum(lengths, 1), values.max(1)], 1)


def make_batch(buffer, groups, allocator, prompts: Sequence[np.ndarray],
               estimator: Estimator, *, seed: int, step: int) -> Batch:
  """Advantages by prompt id, weights, minibatches, packed rows.

  Args:
    buffer: the step's RolloutBuffer, complete.
    groups: the step's Groups.
    allocator: says which rollouts are trained on.
    prompts: token ids per group.
    estimator: see `Estimator`.
    seed, step: address of the minibatch shuffle.
  """
  order = buffer.order()
  group, sample = buffer.group[order], buffer.sample[order]
  shaped = buffer.shaped[order]
  keep = allocator.keep_rollouts(groups, group, sample, buffer.reward[order])
  # Statistics over all rollouts of a prompt, those not trained on included.
  everything = np.bincount(group, shaped, len(groups)) / np.maximum(
      np.bincount(group, minlength=len(groups)), 1)
  order, group, sample = order[keep], group[keep], sample[keep]
  rewards, lengths = shaped[keep], buffer.lengths[order]
  inputs = {
      "round_index": lambda: round_index(groups.round_counts, group, sample),
      "history": lambda: everything[group],
      "entropy": lambda: surprisal(buffer.logprobs[order], lengths),
  }
  needs = advantages_lib.ADVANTAGES[estimator.advantage].needs
  advantage = advantages_lib.compute(
      estimator.advantage, rewards, group, eps=estimator.eps,
      ddof=estimator.ddof, **{name: inputs[name]() for name in needs})
  informative = advantages_lib.informative(rewards, group)

  weight, denominator = aggregators.weights(
      estimator.aggregator, group, lengths, budget=max(len(order), 1),
      max_new_tokens=estimator.max_new_tokens,
      num_prompts=max(len(np.unique(group)), 1),
      denominator=estimator.denominator, informative=informative,
      level=losses.LOSSES[estimator.loss].level)

  # A minibatch keeps its rollouts' weights in the whole step and takes its
  # share of the denominator, so that a prompt counts the same however its
  # rollouts were dealt out.
  parts = [np.arange(len(order))]
  if estimator.minibatches > 1:
    rng = np.random.Generator(np.random.Philox(
        key=[seed, _MINIBATCH_PURPOSE], counter=[0, 0, 0, step]))
    parts = np.array_split(rng.permutation(len(order)),
                           estimator.minibatches)
  minibatches, active, signal, shares = [], 0, 0, []
  for part in parts:
    part = np.sort(part)
    use = np.ones(len(part), bool)
    if not estimator.keep_all:
      use = (advantage[part] != 0) & (weight[part] != 0)
    rows = part[use]
    taken, used = rows, weight
    if len(rows) and (estimator.update_rollouts or estimator.update_noise):
      taken, used = _thinned(rows, group, buffer, order, advantage, weight,
                             prompts, estimator, seed, step, len(minibatches))
    packed, num_micro = buckets.pack(
        group[taken], prompts, buffer.tokens[order[taken]], lengths[taken],
        advantage[taken], used[taken], buffer.logprobs[order[taken]],
        shapes=estimator.shapes, rollouts=estimator.most(buffer.budget))
    signal += len(rows)
    minibatches.append(
        Minibatch(packed, num_micro, denominator / len(parts)))
    active += len(taken)
    shares.append(packing.useful_share(packed))
  return Batch(minibatches, advantage, order, active, signal,
               float(np.mean(shares)))


def _thinned(rows, group, buffer, order, advantage, weight, prompts, estimator,
             seed, step, minibatch):
  """The rows to keep for an optimiser step, and all rows' new weights."""
  at = order[rows]
  first, inverse = thinning.equal(group[rows], advantage[rows],
                                  buffer.tokens[at], buffer.lengths[at])
  whole = advantage[rows] * weight[rows]
  summed = np.bincount(inverse, weight[rows], len(first))
  rows, at = rows[first], at[first]
  number = min(estimator.update_rollouts // estimator.minibatches or len(rows),
               len(rows))
  surprise = thinning.surprise(buffer.logprobs[at], buffer.lengths[at])
  size = np.abs(advantage[rows] * summed) * surprise
  if estimator.update_noise:
    noise = np.bincount(inverse, whole * whole, len(first))
    noise = estimator.update_noise * (noise * surprise * surprise).sum()
    least = min(number, thinning.enough(size, noise))
    if least < number:
      # Whether the draw then fits must not change it: that would favour some.
      number = thinning.filling(
          size, group[rows], buffer.lengths[at],
          np.array([len(prompts[g]) for g in group[rows]]), least, number,
          estimator.rows_per_micro * estimator.row_length)
  probability = thinning.probabilities(size, number)
  start = addressed.addressed_uniform(seed, step, minibatch, [0],
                                      _THINNING_PURPOSE)[0]
  kept = thinning.draw(probability, start)
  result = weight.copy()
  result[rows[kept]] = summed[kept] / probability[kept]
  return rows[kept], result
