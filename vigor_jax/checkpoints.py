"""Checkpoints with orbax: everything that a run needs to continue.

A checkpoint holds three items:

  params     arrays, {"path/in/the/tree": array}
  opt_state  arrays, likewise
  host       JSON: step, counters, allocator, prompt stream, configuration hash

Trees are stored flat, by path, so that a checkpoint does not depend on the
classes of flax or optax and can be restored into any tree of equal paths. A
step appears under its final name only when all of it is written (orbax
renames a temporary folder), so a killed save is never the latest step.
Restoring always goes through targets that carry shardings: a checkpoint from
8 devices is read straight into the layout of 1, 2 or 4.
"""

import contextlib
import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from vigor_jax import workdirs

FOLDER = "checkpoints"


class _RaisedAnyway(logging.Filter):
  """Drops tracebacks that orbax logs of errors which it then raises, too.

  Its saving threads log a disk that is full six times over, before the one
  line that our caller prints.
  """

  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname
                and record.filename in ("future.py", "async_checkpointer.py",
                                        "checkpoint_manager.py"))


_RAISED_ANYWAY = _RaisedAnyway()


class CheckpointError(ValueError):
  """A checkpoint is missing, damaged, or of another model."""


def flatten(tree: Any) -> dict[str, Any]:
  """Returns {path: leaf} of any pytree, such as {"layers/mlp/up": array}."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  flat = {}
  for path, leaf in leaves:
    name = "/".join(_key_name(key) for key in path)
    # A flax variable adds its own step below the parameter's name.
    flat[name.removesuffix("/value") or "value"] = leaf
  if len(flat) != len(leaves):
    raise ValueError("two leaves of the tree have the same path")
  return flat


def _key_name(key) -> str:
  for attribute in ("key", "idx", "name"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def targets_of(tree: Any) -> Any:
  """Returns the tree with each array replaced by its target to restore."""
  return jax.tree.map(_target, tree)


def _target(leaf) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(self, workdir: str, keep: int = 3):
    """Opens workdir/checkpoints and removes what a killed save left there.

    Args:
      workdir: the run's folder.
      keep: checkpoints kept; older ones are deleted when a new one is whole.
    """
    self.folder = workdirs.join(workdir, FOLDER)
    self._manager = _manager(self.folder, keep)

  def save(
    self, step: int, params: Any, opt_state: Any, host: Mapping[str, Any]
  ) -> bool:
    """Starts to save a step; arrays are copied before this returns.

    The files are written in the background. The next save waits for them.

    Args:
      step: training steps done.
      params: pytree of arrays, each free to be donated afterwards.
      opt_state: the same.
      host: anything JSON can hold without loss.

    Returns:
      Whether it is being saved; False if the step is there already.

    Raises:
      CheckpointError: the save before this one failed.
    """
    if step in self.steps():
      return False
    host = json.loads(json.dumps(host, allow_nan=False))
    with self._saving():
      return self._manager.save(
        step,
        args=ocp.args.Composite(
          params=ocp.args.StandardSave(flatten(params)),
          opt_state=ocp.args.StandardSave(flatten(opt_state)),
          host=ocp.args.JsonSave(host),
        ),
      )

  def latest(self) -> int | None:
    """Returns the last step, once it is whole, or None."""
    self.wait()
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    """Returns all steps, once they are whole, ascending."""
    self.wait()
    return sorted(self._manager.all_steps())

  def restore(
    self, step: int, params_target: Any, opt_target: Any
  ) -> tuple[Any, Any, dict[str, Any]]:
    """Returns (params, opt_state, host) of a step.

    Args:
      step: one of `steps()`.
      params_target: the tree to fill; arrays or ShapeDtypeStructs, with the
        shardings that the restored arrays shall have. None: not restored.
      opt_target: the same.

    Raises:
      CheckpointError: no such step, a damaged file, other names or shapes.
    """
    where = os.path.join(self.folder, str(step))
    steps = self.steps()
    if step not in steps:
      raise CheckpointError(
        f"{self.folder}: there is no step {step}; there are {steps or 'none'}"
      )
    trees = {"params": params_target, "opt_state": opt_target}
    trees = {name: tree for name, tree in trees.items() if tree is not None}
    restored = _restore(self._manager, step, where, trees)
    return restored.get("params"), restored["opt_state"], restored["host"]

  def wait(self) -> None:
    """Waits until the last save is whole on disk.

    Raises:
      CheckpointError: it failed, since the disk is full, say.
    """
    with self._saving():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for the last save and for the deletion of old steps."""
    self.wait()
    self._manager.close()

  @contextlib.contextmanager
  def _saving(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # Each file system has its own.
      raise CheckpointError(
        f"{self.folder}: a checkpoint could not be saved ({_first(error)}); "
        "those before it are whole, and the same command goes on from the last"
      ) from error


def restore_params(path: str, target: Any) -> tuple[Any, dict[str, Any]]:
  """Returns (params, host) of a checkpoint for init_from and evaluation.

  Args:
    path: a run's folder (its latest step), or one step in its checkpoints.
    target: as `params_target` of Checkpoints.restore.

  Raises:
    CheckpointError: nothing there, a damaged file, other names or shapes.
  """
  folder, step = _locate(path)
  manager = _manager(folder, keep=None)
  try:
    while True:
      chosen = manager.latest_step() if step is None else step
      if chosen not in manager.all_steps():
        raise CheckpointError(
          f"{folder}: there is no whole checkpoint"
          + ("" if chosen is None else f" of step {chosen}")
          + f"; there are {sorted(manager.all_steps()) or 'none'}"
        )
      where = os.path.join(folder, str(chosen))
      try:
        restored = _restore(manager, chosen, where, {"params": target})
        return restored["params"], restored["host"]
      except CheckpointError:
        # A run that goes on may have replaced the latest step meanwhile.
        manager.reload()
        if step is not None or manager.latest_step() in (None, chosen):
          raise
  finally:
    manager.close()


def step_of(path: str) -> int:
  """Returns the step that a path means now: its own, or the run's latest.

  Raises:
    CheckpointError: there is no whole checkpoint.
  """
  folder, step = _locate(path)
  if step is None:
    with contextlib.closing(_manager(folder, keep=None)) as manager:
      step = manager.latest_step()
    if step is None:
      raise CheckpointError(f"{folder}: there is no whole checkpoint")
  return step


def at_step(path: str, step: int) -> str:
  """Returns the path of one step of what `path` means.

  Raises:
    CheckpointError: nothing is there.
  """
  return workdirs.join(_locate(path)[0], str(step))


def _locate(path: str) -> tuple[str, int | None]:
  """Returns the checkpoints folder and the step, if any, that a path means."""
  if workdirs.is_remote(path):
    head, _, name = path.rstrip("/").rpartition("/")
    if name.isdigit():
      return head, int(name)
    return path if name == FOLDER else workdirs.join(path, FOLDER), None
  path = os.path.normpath(os.path.abspath(path))
  folder, name = os.path.split(path)
  of_run = os.path.basename(folder) == FOLDER and os.path.isdir(folder)
  if name.isdigit() and (of_run or os.path.isdir(path)):
    return folder, int(name)  # Restoring says which steps there are.
  for folder in (os.path.join(path, FOLDER), path):
    if os.path.isdir(folder) and any(n.isdigit() for n in os.listdir(folder)):
      return folder, None
  raise CheckpointError(
    f"{path}: there is no checkpoint; expected a run's folder with "
    f"{FOLDER}/STEP in it, or such a step"
  )


def _manager(folder: str, keep: int | None) -> ocp.CheckpointManager:
  """Opens a folder for saving, or (keep=None) only for reading."""
  logging.getLogger("absl").addFilter(_RAISED_ANYWAY)
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep,
    create=keep is not None,
    cleanup_tmp_directories=keep is not None,
  )
  return ocp.CheckpointManager(
    folder,
    options=options,
    item_handlers={
      "params": ocp.StandardCheckpointHandler(),
      "opt_state": ocp.StandardCheckpointHandler(),
      "host": ocp.JsonCheckpointHandler(),
    },
  )


def _restore(manager, step, where, trees):
  """Restores the named trees and the JSON item."""
  flat = {name: flatten(targets_of(tree)) for name, tree in trees.items()}
  arguments = {
    name: ocp.args.StandardRestore(target) for name, target in flat.items()
  }
  arguments["host"] = ocp.args.JsonRestore()
  try:
    stored = manager.item_metadata(step)
    for name, target in flat.items():
      if stored[name] is not None:
        _compare(f"{where}/{name}", stored[name], target)
    restored = manager.restore(step, args=ocp.args.Composite(**arguments))
  except CheckpointError:
    raise
  except Exception as error:  # Orbax raises many kinds for damaged files.
    raise CheckpointError(
      f"{where}: cannot be restored, a file is missing or damaged "
      f"({_first(error)}); delete this step's folder to go on from the one "
      "before it"
    ) from error
  result = {"host": restored["host"]}
  for name, tree in trees.items():
    leaves = [restored[name][path] for path in flat[name]]
    result[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
  return result


def _first(error: Exception) -> str:
  """An error's first line, at most 300 characters, or what the system said."""
  text = (str(error).strip() or type(error).__name__).splitlines()[0]
  system = re.search(r"os_error_code='(\d+)'", text)
  if system:  # TensorStore says it last, after long paths.
    return os.strerror(int(system[1]))
  return text[:300]


def _compare(where, stored, target):
  """Refuses a checkpoint with other names or shapes than the target."""
  stored = dict(getattr(stored, "tree", stored))
  missing = [name for name in target if name not in stored]
  if missing:
    near = difflib.get_close_matches(missing[0], list(stored), n=1)
    hint = f"; the nearest there is {near[0]!r}" if near else ""
    raise CheckpointError(
      f"{where}: has no {missing[0]!r} ({len(missing)} of {len(target)} "
      f"arrays are missing{hint}); the checkpoint is of another model"
    )
  extra = [name for name in stored if name not in target]
  if extra:
    raise CheckpointError(
      f"{where}: holds {extra[0]!r}, which the model lacks ({len(extra)} of "
      f"{len(stored)} arrays); the checkpoint is of another model"
    )
  for name, wanted in target.items():
    if tuple(stored[name].shape) != tuple(wanted.shape):
      raise CheckpointError(
        f"{where}: {name!r} has shape {tuple(stored[name].shape)}, the model "
        f"expects {tuple(wanted.shape)}"
      )
