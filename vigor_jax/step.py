"""One training step: rollouts, then advantages and the policy update.

    step = TrainingStep(parts)
    rollouts = step.collect(state.params, number, timer)
    state, done = step.learn(state, rollouts, number, timer)

What a run keeps of it (files, counters, checkpoints) is train.py's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vigor_jax import distributed
from vigor_jax import measure
from vigor_jax import rollouts as rollouts_lib
from vigor_jax.policy import batch as batch_lib
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import update as update_lib


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What a step leaves: its rollouts, what was trained on, the figures.

  Attributes:
    rollouts: groups, prompts and buffer.
    batch: advantages and packed minibatches.
    updated: the update's metrics, without "policy/".
    collected: the rollouts' metrics.
    group_record: the step's line of groups.jsonl.
  """

  rollouts: rollouts_lib.StepRollouts
  batch: batch_lib.Batch
  updated: dict[str, float]
  collected: dict[str, Any]
  group_record: dict[str, Any]

  def metrics(self) -> dict[str, Any]:
    """The step's keys but for counters, compiles and time."""
    return {
        **self.collected,
        "policy/active_rollouts": self.batch.active,
        "policy/signal_rollouts": self.batch.signal,
        "policy/useful_share": self.batch.useful_share,
        **{f"policy/{k}": float(v) for k, v in self.updated.items()},
    }


class TrainingStep:
  """Does training steps for one run.

  Attributes:
    meter: measure.VarianceMeter, fed with every step's groups.
  """

  def __init__(self, parts):
    self._parts = parts
    self._estimator = build_lib.estimator_of(parts.config)
    self._collector = rollouts_lib.Collector(parts)
    self.meter = measure.VarianceMeter(parts)

  def collect(self, params, number: int, timer: measure.PhaseTimer
              ) -> rollouts_lib.StepRollouts:
    """Draws and judges the rollouts of step `number` (0-based).

    Raises:
      ValueError: a prompt does not fit, or a reward is not in [0, 1].
    """
    return self._collector.collect(params, number, timer)

  def learn(self, state: update_lib.TrainState,
            rollouts: rollouts_lib.StepRollouts, number: int,
            timer: measure.PhaseTimer, reference=None
            ) -> tuple[update_lib.TrainState, StepResult]:
    """Updates the policy and closes the step.

    Args:
      state: parameters and optimiser state; donated.
      rollouts: what `collect` returned for this step and these parameters.
      number: 0-based step.
      timer: books the phases.
      reference: parameters of the KL reference, or None.
    """
    parts, groups = self._parts, rollouts.groups
    config, allocator = parts.config, parts.allocator
    with timer("update"):
      batch = batch_lib.make_batch(
          rollouts.buffer, groups, allocator, rollouts.prompts.tokens,
          self._estimator, seed=config.seed, step=number)
    distributed.cluster().agree(f"step {number + 1}", rollouts.decisions())
    with timer("update"):
      state, results = update_lib.run_updates(
          parts.updater, state, batch, config, number, reference)
    # While the device is at work.
    with timer("allocate"):
      parts.stream.advance(groups.taken)
      allocator.end(groups)
      self.meter.add(groups)
    self._collector.look_ahead(timer)
    if parts.updater.adapted is None:  # Else what is trained is no policy yet.
      with timer("prefill"):
        parts.sampler.look_ahead(state.params)
    collected, record = rollouts.metrics(), rollouts.group_record()
    with timer("update"):
      updated = update_lib.averaged(results)
    return state, StepResult(rollouts, batch, updated, collected, record)
