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
    params, opt_state, host = record.restore(*updater.saved_targets(abstract))
    name = parts.task.name
    if host.get("task", name) != name:
      raise ValueError(
          f"{record.name}: the task's data are not those the run began with "
          f"({host['task']}, now {name}), so its place in them is lost; bring "
          "them back, or choose another --workdir")
    step = host.get("init_step")
    if params is None:
      params = _begun_with(parts, record, step, "model.lora: the frozen base")
    return updater.restored(params, opt_state), host, step
  params, step = initial_params(parts, record.name, record.say)
  if updater.adapted is not None:
    _keep(parts, record, step, "frozen base of model.lora")
  return updater.init(params, parts.config.seed), None, step


def reference(parts, record, init_step: int | None):
  """The policy at step 0, the same after every restart.

  Raises:
    ValueError: its checkpoint is gone.
  """
  params = _begun_with(parts, record, init_step,
                       "policy.kl.coef: the reference")
  _keep(parts, record, init_step, "reference of policy.kl")
  return params


def _begun_with(parts, record, step: int | None, what: str):
  """Parameters at step 0, taken again."""
  try:
    return initial_params(parts, record.name, record.say, step)[0]
  except checkpoints.CheckpointError as error:
    raise ValueError(f"{what}, with which the run began, cannot be read: "
                     f"{error}") from error


def _keep(parts, record, step: int | None, what: str) -> None:
  source = parts.config.init_from
  if source not in ("", "auto"):
    record.say(f"{what}: step {step} of {source}, also after a restart; keep "
               "it")
