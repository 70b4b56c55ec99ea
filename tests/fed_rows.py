"""One training step of each process of a job: which rows it sends to devices.

    python tests/fed_rows.py CONFIG.py OUT OVERRIDES...

Process r writes OUT.r.npz. NAME is "prefill", prompts int32 [N, Lb], or
"update", packed tokens int32 [M, R, T]; k counts the calls:

  NAME_k_rows   [n, 2] spans of rows that this process sent, ascending
  NAME_k_sent   those rows
  prompts, lengths   ids of the step's prompts, one after another
"""

import sys

import numpy as np


def main(config_file, out, *overrides):
  from vigor_jax import distributed
  from vigor_jax.config import cli
  config = cli.parse_flags(
    ["step", f"--config={config_file}", f"--workdir={out}", *overrides],
    "", lambda values: None).config
  team = distributed.initialize(config.mesh.host_timeout)
  with distributed.guarded(passing=KeyboardInterrupt):
    np.savez(f"{out}.{team.rank}.npz", **_step(config))
    team.exchange("the end", b"")


class _Ears:
  """Hears what is placed on devices, and which programs are given it."""

  def __init__(self):
    import jax
    self.found, self._sent, self._place = {}, {}, jax.make_array_from_callback
    jax.make_array_from_callback = self._placing

  def _placing(self, shape, sharding, callback):
    sent = []

    def making(index):
      piece = callback(index)
      sent.append((index, np.array(piece)))
      return piece

    array = self._place(shape, sharding, making)
    self._sent[id(array)] = array, sent
    return array

  def around(self, name, program, at, axis):
    """The program; its argument `at`, or the tokens in it, are written down.

    axis: of its rows.
    """
    def run(*args):
      array = getattr(args[at], "tokens", args[at])
      # A plain array would be sent whole, by every host.
      _, sent = self._sent[id(array)]
      pieces = {index[axis].indices(array.shape[axis])[:2]: piece
                for index, piece in sent}
      k = sum(key.startswith(name) for key in self.found) // 2
      rows = sorted(pieces)
      self.found[f"{name}_{k}_rows"] = np.array(rows)
      self.found[f"{name}_{k}_sent"] = np.concatenate(
        [pieces[span] for span in rows], axis)
      return program(*args)
    return run


def _step(config):
  from vigor_jax import experiment
  from vigor_jax import measure
  from vigor_jax import step as step_lib

  with experiment.build(config) as parts:
    ears, sampler, updater = _Ears(), parts.sampler, parts.updater
    sampler._prefill = ears.around("prefill", sampler._prefill, 2, 0)
    updater.programs = updater.programs._replace(
      update=ears.around("update", updater.programs.update, 1, 1))
    step = step_lib.TrainingStep(parts)
    state = updater.init(parts.fresh_params(config.seed), config.seed)
    timer = measure.PhaseTimer()
    rollouts = step.collect(updater.policy(state), 0, timer)
    step.learn(state, rollouts, 0, timer)
    opened = [rollouts.prompts.tokens[i]
              for i in np.flatnonzero(rollouts.groups.opened)]
    return dict(ears.found, prompts=np.concatenate(opened),
                lengths=np.array([len(ids) for ids in opened]))


if __name__ == "__main__":
  main(*sys.argv[1:])
