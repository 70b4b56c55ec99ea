"""Config files, overrides, JSON, and what may change in a used workdir."""

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from ml_collections import config_dict

from vigor_jax import tasks
from vigor_jax.config import fields
from vigor_jax.config.defaults import default_config
from vigor_jax.config.defaults import options_section

ConfigError = fields.ConfigError

# What may differ when a run is continued in its workdir.
MAY_CHANGE = (
  "total_steps", "evaluation.", "checkpoint.", "mesh.", "topology",
  "profile_steps", "imports",
)


def build(values: Mapping[str, Any] | ml_collections.ConfigDict, source: str):
  """Returns the defaults with the given values laid over them.

  Args:
    values: nested mapping; fields that it lacks keep their defaults.
    source: where the values come from, for errors.

  Raises:
    ConfigError: an unknown field or a value of the wrong type.
  """
  try:
    flat = fields.flatten(values)
    import_modules(
      fields.check_value("imports", fields.IMPORTS, flat.get("imports", ()))
    )
    name = flat.pop("task.name", "arithmetic")
    config = default_config(fields.check_value("task.name", str, name))
  except ValueError as error:
    raise ConfigError(f"{source}: {error}") from error
  # The allocator's name first: it decides which suggestions are near.
  for path in sorted(flat, key=lambda path: path != "allocation.name"):
    try:
      fields.assign(config, path, flat[path])
    except ConfigError as error:
      raise ConfigError(f"{source}: {error}") from error
  return config


def import_modules(names: Sequence[str]) -> None:
  """Imports what `imports` names: rules, tasks and losses register themselves.

  Raises:
    ConfigError: a module is not there, or fails.
  """
  for name in names:
    try:
      importlib.import_module(name)
    except (Exception, SystemExit) as error:
      frame = traceback.extract_tb(sys.exc_info()[2])[-1]
      missing = isinstance(error, ModuleNotFoundError) and error.name == name
      where = (
        "modules are looked for in the current folder and on PYTHONPATH"
        if missing else f"{frame.filename}, line {frame.lineno}"
      )
      raise ConfigError(
        f"imports: importing {name!r} failed:"
        f" {type(error).__name__}: {error} ({where})"
      ) from error


def load_file(spec: str) -> ml_collections.ConfigDict:
  """Returns the configuration of a file, `PATH.py` or `PATH.py:ARGUMENT`.

  The file defines `get_config()` or `get_config(arg)`; or it is the
  config.json of a run.

  Raises:
    ConfigError: no such file, no get_config, or an error inside it (named
      with its line).
  """
  path, argument = spec, None
  if not os.path.exists(spec) and ":" in spec:
    path, argument = spec.rsplit(":", 1)
  if not os.path.isfile(path):
    raise ConfigError(f"--config: there is no file {path!r}{_near_file(path)}")
  if path.endswith(".json"):
    config = read_json(path)
    if config.sampling.slots:  # Chosen from the memory when the run began.
      config.sampling.memory = 0.0
    return config
  if not path.endswith(".py"):
    raise ConfigError(
      f"--config: {path!r} is neither a Python file (.py) nor the config.json "
      "of a run"
    )
  module = importlib.util.module_from_spec(
    importlib.util.spec_from_file_location("vigor_jax_config_file", path)
  )
  values = _in_file(path, lambda: module.__spec__.loader.exec_module(module))
  get_config = getattr(module, "get_config", None)
  if get_config is None:
    raise ConfigError(f"{path}: defines no get_config()")
  if not callable(get_config):
    raise ConfigError(
      f"{path}: get_config must be a function, got {get_config!r}"
    )
  takes_argument = bool(inspect.signature(get_config).parameters)
  if argument is not None and not takes_argument:
    raise ConfigError(
      f"{path}: its get_config takes no argument, got {argument!r}"
    )
  arguments = () if argument is None else (argument,)
  values = _in_file(path, lambda: get_config(*arguments))
  if not isinstance(values, (ml_collections.ConfigDict, Mapping)):
    raise ConfigError(
      f"{path}: get_config returned a {type(values).__name__}, expected a "
      "ConfigDict (start from vigor_jax.config.default_config())"
    )
  return build(values, path)


def _in_file(path, call):
  """Runs a config file's code; its errors become ConfigErrors with the line."""
  try:
    return call()
  except (Exception, SystemExit) as error:
    frames = traceback.extract_tb(sys.exc_info()[2])
    lines = [f.lineno for f in frames if f.filename == path]
    line = (lines[-1:] or [getattr(error, "lineno", None)])[0]
    detail = str(error).strip() or type(error).__name__
    if isinstance(error, SystemExit):
      detail = f"it ends the program (SystemExit: {error})"
    if frames[-1].filename.startswith(os.path.dirname(config_dict.__file__)):
      detail = _in_own_words(error, detail)
    where = path if line is None else f"{path}, line {line}"
    raise ConfigError(f"{where}: {detail}") from error


def _in_own_words(error: Exception, detail: str) -> str:
  """Rewrites what ml_collections says of a field that a file got wrong."""
  if isinstance(error, (AttributeError, KeyError)):
    name = re.search(r"\w+", detail.replace('Key "', ""))[0]
    near = fields.suggest(default_config(), name)
    return (
      f"unknown field or section {name!r}; did you mean "
      + " or ".join(repr(name) for name in near) + "?"
    )
  types = re.search(
    r"field '(\w+)'.* type <class '(\w+)'>.* type <class '(\w+)'>", detail
  )
  if types is None:
    return detail
  return f"field {types[1]!r}: expected {types[3]}, got {types[2]}"


def _near_file(path: str) -> str:
  folder = os.path.dirname(path) or "."
  if not os.path.isdir(folder):
    return f" (nor a folder {folder!r})"
  names = sorted(n for n in os.listdir(folder) if n.endswith(".py"))
  near = difflib.get_close_matches(os.path.basename(path), names, n=1)
  if near:
    return f"; did you mean {os.path.join(folder, near[0])!r}?"
  return f"; python files there: {', '.join(names) or 'none'}"


def apply_overrides(config, overrides, is_text: bool) -> None:
  """Sets fields by full name, in place: (path, value) pairs in order.

  A change of task.name comes first, and starts the task's section afresh from
  that task's own options; then allocation.name, so that suggestions follow it.
  """
  first = ("task.name", "allocation.name")
  order = {path: rank for rank, path in enumerate(first)}
  overrides = sorted(overrides, key=lambda pair: order.get(pair[0], len(first)))
  for path, value in overrides:
    if path == "task.name" and value != config.task.name:
      if value not in tasks.REGISTRY:
        raise ConfigError(
          f"task.name: unknown task {value!r}; legal: "
          + ", ".join(repr(name) for name in sorted(tasks.REGISTRY))
        )
      section = ml_collections.ConfigDict({"name": value})
      section.update(options_section(tasks.REGISTRY[value].options))
      with config.unlocked():
        config.task = section
      config.lock()
    else:
      fields.assign(config, path, value, is_text)


def with_overrides(config, overrides: Mapping[str, Any]):
  """Returns a copy with fields changed, for a row of a comparison.

  A name without a dot is a field at the top level or, failing that, an option
  of the named allocator. When `allocation.name` changes, the options of the
  allocator that was named before go back to their defaults, so that they do
  not linger without effect.

  Args:
    config: the configuration to start from; not changed.
    overrides: {"field" or "section.field": value}; text is parsed by the
      field's type.

  Raises:
    ConfigError: an unknown field or a value of the wrong type.
  """
  config = ml_collections.ConfigDict(config).copy_and_resolve_references()
  config.lock()
  overrides = dict(overrides)
  name = overrides.pop("allocation.name", config.allocation.name)
  if name != config.allocation.name:
    left = config.allocation.name
    fields.assign(config, "allocation.name", name)
    defaults = default_config(config.task.name).allocation
    for field, value in fields.flatten(defaults[left]).items():
      fields.assign(config, f"allocation.{left}.{field}", value)
  pairs = []
  for path, value in overrides.items():
    if "." not in path and path not in config:
      options = config.allocation.get(name, {})
      if path not in options:
        known = [*(n for n in config if not isinstance(
          config[n], ml_collections.ConfigDict)), *options]
        near = difflib.get_close_matches(path, known, n=1, cutoff=0.0)
        raise ConfigError(
          f"unknown field {path!r}: neither a field at the top level nor an "
          f"option of allocation.{name} ({', '.join(options) or 'none'}); "
          f"did you mean {near[0]!r}?"
        )
      path = f"allocation.{name}.{path}"
    pairs.append((path, value))
  for is_text in (True, False):
    apply_overrides(
      config,
      [(p, v) for p, v in pairs if isinstance(v, str) == is_text],
      is_text,
    )
  return config


def to_json(config) -> str:
  """Returns the resolved configuration as indented JSON."""
  return json.dumps(config.to_dict(), indent=2, default=list) + "\n"


def from_json(text: str, source: str = "config.json"):
  """Returns the configuration that `to_json` wrote."""
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{source}: not JSON ({error})") from error
  if not isinstance(values, dict):
    raise ConfigError(
      f"{source}: expected an object with the configuration's fields, got a "
      f"{type(values).__name__}"
    )
  return build(values, source)


def read_json(path: str | os.PathLike):
  """Returns the configuration in a run's config.json.

  Raises:
    ConfigError: the file cannot be read or is damaged; names it.
  """
  try:
    with open(path, encoding="utf-8") as file:
      text = file.read()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"{path}: cannot be read: {error}") from error
  return from_json(text, str(path))


def fingerprint(config, ignore: tuple[str, ...] = MAY_CHANGE) -> str:
  """Returns a hash of what decides a run's numbers, 16 hex digits."""
  kept = {
    path: value for path, value in fields.flatten(config).items()
    if not path.startswith(ignore)
  }
  text = json.dumps(kept, sort_keys=True, default=list)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Difference:
  """One field that differs between a run's configuration and a new one."""

  path: str
  old: Any
  new: Any

  @property
  def may_change(self) -> bool:
    """Whether a run may be continued with the new value."""
    return self.path.startswith(MAY_CHANGE)

  def __str__(self):
    return f"{self.path}: {self.old!r} -> {self.new!r}"


def diff(old, new) -> list[Difference]:
  """Returns the fields that differ, by name."""
  before, after = fields.flatten(old), fields.flatten(new)
  return [
    Difference(path, before.get(path, "absent"), after.get(path, "absent"))
    for path in sorted({*before, *after})
    if before.get(path, "absent") != after.get(path, "absent")
  ]


def as_begun(old, new):
  """Returns the new configuration with what the run chose for itself.

  Args:
    old: the run's resolved configuration.
    new: the one to continue with; not changed.
  """
  kept, asked = old.sampling, new.sampling
  if not kept.slots or (asked.slots and asked.slots != kept.slots):
    return new
  new = new.copy_and_resolve_references()
  if not asked.slots:
    new.sampling.slots = kept.slots
  elif not asked.memory:  # The slots themselves say what it was there for.
    new.sampling.memory = kept.memory
  return new.lock()


def check_resume(old, new, workdir: str = "workdir") -> list[Difference]:
  """Returns what changes when a run goes on, all of it allowed to change.

  Raises:
    ConfigError: another field differs from the run in this workdir.
  """
  differences = diff(old, as_begun(old, new))
  refused = [d for d in differences if not d.may_change]
  if refused:
    raise ConfigError(
      f"{workdir} holds a run with another configuration:\n  "
      + "\n  ".join(str(d) for d in refused)
      + "\nOnly total_steps, evaluation.*, checkpoint.*, mesh.*, topology, "
      "profile_steps and imports may change in a used workdir; choose another "
      "--workdir, or the old values."
    )
  return differences
