"""The command line shared by train, compare and preflight.

    --config=FILE.py[:ARGUMENT]  --workdir=DIR  --config.section.field=VALUE

as with absl and ml_collections. The config flags are read here, not by
ml_collections, because a mistyped one has to name the field that was meant.
"""

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence

import ml_collections
from absl import flags

from vigor_jax import endings
from vigor_jax.config import fields
from vigor_jax.config import loading
from vigor_jax.config.defaults import default_config
from vigor_jax.config.checks import validate

ConfigError = fields.ConfigError
exit_with_message = endings.exit_with_message


@dataclasses.dataclass(frozen=True)
class Args:
  """A parsed and validated command line."""

  config: ml_collections.ConfigDict
  workdir: str
  flags: flags.FlagValues  # The program's further flags.


def parse(
  argv: Sequence[str],
  define: Callable[[flags.FlagValues], None] | None = None,
  needs_workdir: bool = True,
) -> Args:
  """Returns the validated configuration of a command line.

  Args:
    argv: the program's name and its arguments.
    define: called with an absl FlagValues to define further flags on it.
    needs_workdir: whether --workdir must be given.

  Raises:
    ConfigError: whatever is wrong, in one message.
  """
  values = _flag_values(define)
  spec, overrides, rest = _split(list(argv), values)
  try:
    left = values(rest)[1:]
  except flags.Error as error:
    raise ConfigError(str(error)) from error
  if left:
    raise ConfigError(
      f"unexpected argument {left[0]!r}; flags look like --name=value"
    )
  if spec is None:
    raise ConfigError(
      "--config is missing; for example --config=configs/arithmetic.py"
    )
  if needs_workdir and not values.workdir:
    raise ConfigError("--workdir is missing: the folder that the run writes to")
  if values.workdir and os.path.isfile(values.workdir):
    raise ConfigError(f"--workdir: {values.workdir!r} is a file, not a folder")
  check_place("--workdir", values.workdir)
  for path, text in overrides:
    if path == "imports":  # What they register may be named by the others.
      names = fields.parse_text(path, fields.IMPORTS, text)
      loading.import_modules(names)
  config = loading.load_file(spec)
  loading.apply_overrides(config, overrides, is_text=True)
  return Args(validate(config), values.workdir, values)


def parse_flags(
  argv: Sequence[str],
  usage: str,
  define: Callable[[flags.FlagValues], None] | None = None,
  needs_workdir: bool = True,
) -> Args:
  """Parses a command line as `parse` does, for use at a program's start.

  --help prints the usage, the flags and every configuration field, and exits
  with 0; anything wrong prints one message to stderr and exits with 2.
  """
  if asks_for_help(argv):
    print(help_text(usage, define))
    sys.exit(0)
  try:
    return parse(argv, define, needs_workdir)
  except ConfigError as error:
    exit_with_message(error)


def asks_for_help(argv: Sequence[str]) -> bool:
  """Whether a command line asks what there is to be given."""
  return not {"--help", "-help", "-h", "-?", "--helpfull"}.isdisjoint(argv[1:])


def check_place(flag: str, path: str) -> None:
  """Refuses a local path that can be neither there nor made.

  Raises:
    ConfigError: something above it is a file, or may not be written to.
  """
  if not path or "://" in path:
    return
  above = os.path.abspath(path)
  while not os.path.lexists(above):
    above = os.path.dirname(above)
  if above != os.path.abspath(path) and not os.path.isdir(above):
    raise ConfigError(f"{flag}: {path!r} cannot be made: {above!r} is a file")
  if not os.access(above, os.W_OK):
    raise ConfigError(f"{flag}: {path!r}: no permission to write to {above!r}")


def help_text(usage: str, define=None) -> str:
  """Returns the usage, the program's flags and the configuration fields."""
  values = _flag_values(define)
  config = default_config()
  lines = [usage.strip(), "", "Flags:"]
  lines.append("  --config=FILE.py[:ARGUMENT]  the configuration file")
  for name in sorted(values):
    lines.append(f"  --{name}={values[name].default or ''}  "
                 f"{values[name].help}")
  lines += ["", "Configuration fields and their defaults:"]
  for path, value in fields.flatten(config).items():
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    lines.append(f"  --config.{path}={shown}")
  return "\n".join(lines)


def _flag_values(define) -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_string(
    "workdir", "", "the folder that the run writes to", flag_values=values
  )
  if define is not None:
    define(values)
  return values


def _split(argv, values):
  """Splits a command line into the config file, its overrides and the rest.

  Returns:
    (spec or None, [(path, text)], remaining argv for absl).
  """
  spec, overrides, rest = None, [], argv[:1]
  position = 1
  while position < len(argv):
    argument = argv[position]
    position += 1
    name, equals, text = argument.lstrip("-").partition("=")
    is_flag = argument.startswith("-") and name != ""
    if is_flag and (name == "config" or name.startswith("config.")):
      if not equals:
        has_value = position < len(argv) and argv[position][:2] != "--"
        if not has_value:
          raise ConfigError(f"--{name}: a value is missing (--{name}=VALUE)")
        text = argv[position]
        position += 1
      if name == "config":
        spec = text
      else:
        overrides.append((name.removeprefix("config."), text))
      continue
    if is_flag and name not in values and name != "flagfile":
      _refuse_flag(name, values)
    rest.append(argument)
  return spec, overrides, rest


def _refuse_flag(name: str, values) -> None:
  """Raises for a flag that does not exist, with the nearest that does."""
  if name.startswith("no") and name[2:] in values:
    return
  config = default_config()
  known = ["config", *values]
  near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
  if not near:
    near = [f"config.{fields.suggest(config, name.split('.', 1)[-1])[0]}"]
    if name in fields.flatten(config):
      near = [f"config.{name}"]
  raise ConfigError(f"unknown flag --{name}; did you mean --{near[0]}?")
