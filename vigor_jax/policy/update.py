"""The policy-gradient step: what is trained, and a step's optimiser steps.

The programs themselves are update_programs.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import numpy as np

from vigor_jax.policy import lora
from vigor_jax.policy import losses
from vigor_jax.policy import optimizer as optimizer_lib
from vigor_jax.policy import packing
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.policy import update_programs
from vigor_jax.policy.objective import Objective
from vigor_jax.policy.update_programs import TrainState


class Updater:
  """Jitted update and scoring of one model under one objective.

  Args:
    graph: nnx graph of the transformer.
    objective: form of the loss.
    options: optimiser.
    placement: where arrays live on a mesh; None = one device.
    adapted: sizes with adapters, where those alone are trained (lora.py).

  The compiled programs are shared by all updaters with equal arguments.
  """

  def __init__(self, graph, objective: Objective,
               options: optimizer_lib.OptimizerOptions,
               placement: sharding.Placement | None = None,
               adapted: transformer.Sizes | None = None):
    losses.default_clips(objective.loss)  # Raises on an unknown name.
    self.objective, self.adapted = objective, adapted
    self.tx = optimizer_lib.chain(options)
    self._placement = placement
    if adapted is not None:
      graph = transformer.abstract(adapted)[0]
    self.programs = update_programs.programs(
        graph, objective, options, placement, adapted)

  def init(self, params, seed: int = 0) -> TrainState:
    """Fresh optimiser state around `params` of the plain model.

    seed: of the adapters, if there are any.
    """
    if self._placement is not None:
      params = jax.device_put(params, self._placement.tree(params))
    if self.adapted is not None:
      params = lora.start(functools.partial(_created, self.adapted), params,
                          seed, self._placement)
    return TrainState(params, self.programs.init(params))

  def policy(self, state: TrainState):
    """Parameters of the plain model: to sample from, evaluate and keep."""
    if self.adapted is None:
      return state.params
    return self._finished(self.programs.policy(state.params))

  def reference(self, state: TrainState):
    """With adapters: the frozen base, as `score` takes it."""
    return lora.reference(state.params)

  def abstract_params(self, params):
    """Shapes of what is trained and frozen, of the plain model's."""
    if self.adapted is None:
      return params
    abstract = transformer.abstract(self.adapted)[1]
    return abstract if self._placement is None else self._placement.abstract(
        abstract)

  def abstract_opt(self, params):
    """Shapes of the optimiser state, with their shardings.

    params: of the plain model, or their shapes.
    """
    trained = update_programs.trained_of(self.abstract_params(params),
                                         self.adapted)
    state = jax.eval_shape(self.tx.init, trained)
    return state if self._placement is None else self._placement.abstract(
        state)

  def saved(self, state: TrainState) -> tuple[Any, Any]:
    """(params, opt_state) of a checkpoint.

    With adapters, params are the merged policy, which any program can read;
    adapters and moments are in opt_state, and the base is where it came from.
    """
    if self.adapted is None:
      return state.params, state.opt_state
    return self.policy(state), dict(
        adapters=lora.split(state.params)[0], moments=state.opt_state)

  def saved_targets(self, params) -> tuple[Any, Any]:
    """Shapes of what `restored` needs of a checkpoint; None: not needed."""
    moments = self.abstract_opt(params)
    if self.adapted is None:
      return params, moments
    return None, dict(
        adapters=lora.split(self.abstract_params(params))[0], moments=moments)

  def restored(self, params, opt_state) -> TrainState:
    """The state of what was saved.

    params: those of the checkpoint; with adapters, the base's.
    """
    if self.adapted is not None:
      params = lora.join(opt_state["adapters"], params)
      opt_state = opt_state["moments"]
    return TrainState(params, opt_state)

  def update(self, state: TrainState, batch: packing.Rows,
             num_micro: int | tuple[int, ...], denominator: float, rate: float,
             *, old=None, reference=None
             ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step. The state is donated.

    Args:
      batch: [M, R, T] micro-batches, the first `num_micro` in use. Of rows of
        several lengths a tuple, and so all that is [M, R, T] here.
      denominator: what the summed terms are divided by.
      rate: learning rate.
      old: float32 [M, R, T] trainer log-probs when objective.old is
        "trainer".
      reference: float32 [M, R, T] reference log-probs when kl_coef > 0.

    Returns:
      (state, metrics as device scalars: loss, grad_norm, clip_share,
      ratio_max_deviation, sampler_trainer_logprob_gap, entropy, kl).
    """
    batch = self._placed(batch)
    sampled = jax.tree.map(lambda rows: rows.sampler_logprobs, batch,
                           is_leaf=lambda x: isinstance(x, packing.Packed))
    old = sampled if old is None else old
    reference = sampled if reference is None else reference
    return self._finished(self.programs.update(
        state, batch, old, reference, jax.tree.map(np.int32, num_micro),
        np.float32(denominator), np.float32(rate)))

  def score(self, params, batch: packing.Rows,
            num_micro: int | tuple[int, ...]) -> Any:
    """Log-probs float32 [M, R, T] of completion tokens, 0 elsewhere."""
    return self._finished(self.programs.score(
        params, self._placed(batch), jax.tree.map(np.int32, num_micro)))

  def _placed(self, batch: packing.Rows) -> packing.Rows:
    if self._placement is None:
      return batch
    return self._placement.put(batch, self._placement.batch)

  def _finished(self, result):
    if self._placement is not None and self._placement.waits:
      jax.block_until_ready(result)
    return result


def _created(sizes: transformer.Sizes, seed: int):
  return transformer.create(sizes, seed)[1]


def to_host(metrics: dict[str, jax.Array]) -> dict[str, float]:
  """Waits for an update and returns its metrics as floats."""
  return {k: float(v) for k, v in jax.device_get(metrics).items()}


def run_updates(updater: Updater, state: TrainState, batch, config,
                step: int, reference
                ) -> tuple[TrainState, list[dict[str, jax.Array]]]:
  """Starts all optimiser steps of one training step; waits for none.

  Old log-probs are fixed for the step: with several updates and
  `old_logprobs="trainer"` every minibatch is scored before the first update.

  Args:
    batch: batch.Batch.
    config: the run's configuration.
    step: 0-based training step.
    reference: parameters of the KL reference, or None; with adapters it is
      their base.

  Returns:
    (state, metrics of each update, for `averaged`).
  """
  policy, rates = config.policy, config.optimizer
  score = lambda params, mb: updater.score(params, mb.packed, mb.num_micro)
  olds = references = [None] * len(batch.minibatches)
  if updater.objective.old == "trainer":
    olds = [score(state.params, mb) for mb in batch.minibatches]
  if updater.objective.kl_coef and updater.adapted is not None:
    reference = updater.reference(state)
  if reference is not None:
    references = [score(reference, mb) for mb in batch.minibatches]
  per_step = policy.updates_per_step * policy.minibatches
  results = []
  for _ in range(policy.updates_per_step):
    for mb, old, ref in zip(batch.minibatches, olds, references):
      rate = optimizer_lib.learning_rate(
          step * per_step + len(results), peak=rates.learning_rate,
          warmup_steps=rates.warmup_steps * per_step,
          total_steps=config.total_steps * per_step,
          schedule=rates.schedule)
      state, metrics = updater.update(
          state, mb.packed, mb.num_micro, mb.denominator, rate, old=old,
          reference=ref)
      results.append(metrics)
  return state, results


def averaged(results: Sequence[dict[str, jax.Array]]) -> dict[str, float]:
  """Waits for a step's updates; their metrics' means, of ratio and gap maxima.
  """
  results = [to_host(r) for r in results]
  peaks = ("ratio_max_deviation", "sampler_trainer_logprob_gap")
  return {
      key: float((max if key in peaks else np.mean)([r[key] for r in results]))
      for key in results[0]}
