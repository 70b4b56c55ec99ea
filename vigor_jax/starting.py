"""Where a run's parameters come from: drawn, a checkpoint, or its own last one.

A checkpoint that `init_from` names may be of a run that still trains, whose
latest step changes. What a run began with is therefore a step, and the run
keeps its number: after a restart the reference of the KL term is the same.
"""

from __future__ import annotations

from vigor_jax import checkpoints
from vigor_jax import distributed
from vigor_jax import warm_start


def initial_params(parts, workdir: str, say=print, step: int | None = None):
  """Parameters at step 0, where `init_from` says.

  Args:
    parts: the run's parts.
    workdir: its folder.
    say: prints a line.
    step: of the checkpoint that `init_from` names, to take again what a run
      began with; None: its latest.

  Returns:
    (parameters, the checkpoint's step; None where there is no checkpoint).
  """
  config = parts.config
  source = config.init_from
  if source == "auto":
    source = warm_start.cached(config, parts.task, workdir, say)
  if not source:
    return parts.fresh_params(config.seed), None
  if step is None:
    # A run that is still going may save while the processes look.
    latest = checkpoints.step_of(source)
    step = distributed.cluster().from_first("the first step", lambda: latest)
  return parts.load_params(checkpoints.at_step(source, step)), step


def state(parts, record, updater):
  """The state, restored or at step 0.

  Returns:
    (state, the host's record or None, the step of init_from's checkpoint).

  Raises:
    ValueError: the task's data have changed since the checkpoint.
  """
  if record.resumed:
    abstract = parts.abstract_params()
    params, opt_state, host = record.restore(abstract,
                                             updater.abstract_opt(abstract))
    name = parts.task.name
    if host.get("task", name) != name:
      raise ValueError(
          f"{record.name}: the task's data are not those the run began with "
          f"({host['task']}, now {name}), so its place in them is lost; bring "
          "them back, or choose another --workdir")
    return updater.state(params, opt_state), host, host.get("init_step")
  params, step = initial_params(parts, record.name, record.say)
  return updater.init(params), None, step


def reference(parts, record, init_step: int | None):
  """The policy at step 0, the same after every restart.

  Raises:
    ValueError: its checkpoint is gone.
  """
  try:
    params, step = initial_params(parts, record.name, record.say, init_step)
  except checkpoints.CheckpointError as error:
    raise ValueError(
        "policy.kl.coef: the reference, with which the run began, cannot be "
        f"read: {error}") from error
  source = parts.config.init_from
  if source not in ("", "auto"):
    record.say(f"reference of policy.kl: step {step} of {source}, also after "
               "a restart; keep it")
  return params
