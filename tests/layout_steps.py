"""One layout's steps, each from the state that another run had before it.

    python tests/layout_steps.py CONFIG.py WORKDIR STEPS OUT.npz OVERRIDES...

WORKDIR holds a checkpoint of each step. Process 0 writes per step k, in the
order (group, sample): tokens_k, lengths_k, sampled_k (the sampler's log-probs),
counts_k (rollouts of each group), logprobs_k (the trainer's, before the update)
and gradient_k (one vector, taken from the change of Adam's first moment).
"""

import sys

import numpy as np


def main(config_file, workdir, steps, out, *overrides):
  from vigor_jax import distributed
  from vigor_jax.config import cli
  config = cli.parse_flags(
    ["steps", f"--config={config_file}", f"--workdir={workdir}", *overrides],
    "", lambda values: None).config
  team = distributed.initialize(config.mesh.host_timeout)
  with distributed.guarded(passing=KeyboardInterrupt):
    found = dict(_steps(config, workdir, int(steps)))
    if team.primary:
      np.savez(out, **found)
    team.exchange("the end", b"")


def _steps(config, workdir, steps):
  """(name, array) of each step."""
  import jax
  from vigor_jax import checkpoints
  from vigor_jax import experiment
  from vigor_jax import measure
  from vigor_jax import step as step_lib

  with experiment.build(config) as parts:
    saved = checkpoints.Checkpoints(workdir, keep=config.checkpoint.keep)
    updater, step = parts.updater, step_lib.TrainingStep(parts)
    for k in range(steps):
      if k:
        params, moments, host = saved.restore(
          k, *updater.saved_targets(parts.abstract_params()))
        state = updater.restored(params, moments)
        parts.allocator.load_state_dict(host["allocator"])
        parts.stream.load_state_dict(host["stream"])
        step.meter.load_state_dict(host["meter"])
      else:
        state = updater.init(parts.fresh_params(config.seed), config.seed)
      # The update deletes what it is given.
      params = jax.jit(lambda p: jax.tree.map(jax.numpy.copy, p))(
        state.params)
      before = _moment(state)
      timer = measure.PhaseTimer()
      rollouts = step.collect(updater.policy(state), k, timer)
      buffer = rollouts.buffer
      order = np.lexsort((buffer.sample[:buffer.size],
                          buffer.group[:buffer.size]))
      yield f"tokens_{k}", np.array(buffer.tokens[order])
      yield f"lengths_{k}", np.array(buffer.lengths[order])
      yield f"sampled_{k}", np.array(buffer.logprobs[order])
      state, done = step.learn(state, rollouts, k, timer)
      yield f"counts_{k}", np.array(rollouts.groups.counts)
      yield f"logprobs_{k}", np.concatenate([
        _whole(updater.score(params, mb.packed, mb.num_micro)).ravel()
        for mb in done.batch.minibatches])
      b1 = config.optimizer.b1
      yield f"gradient_{k}", (_moment(state) - b1 * before) / (1 - b1)


def _moment(state):
  """Adam's first moments, as one vector."""
  from vigor_jax import checkpoints
  flat = checkpoints.flatten(state.opt_state)
  return np.concatenate([_whole(flat[path]).ravel().astype(np.float64)
                         for path in sorted(flat) if "mu/" in path])


def _whole(array):
  from jax.experimental import multihost_utils
  return np.asarray(multihost_utils.process_allgather(array, tiled=True))


if __name__ == "__main__":
  main(*sys.argv[1:])
