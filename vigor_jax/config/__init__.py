"""Run configuration: defaults, command line, validation, JSON, comparison.

Light on purpose (no jax, no tensorflow): a typing mistake is refused before
anything slow is imported.

  defaults.py      every field, its default and what it means
  fields.py        paths, types, values and suggestions
  legal.py         values and ranges of single fields
  checks.py        what a whole configuration must satisfy
  model_checks.py  its model and its mesh
  loading.py       config files, overrides, JSON and the rule for a used workdir
  showing.py       a configuration as people read it
  cli.py           the command line shared by train, compare and preflight
"""

from vigor_jax.config.cli import Args
from vigor_jax.config.cli import check_place
from vigor_jax.config.cli import exit_with_message
from vigor_jax.config.cli import parse
from vigor_jax.config.cli import parse_flags
from vigor_jax.config.defaults import default_config
from vigor_jax.config.fields import ConfigError
from vigor_jax.config.loading import Difference
from vigor_jax.config.loading import check_resume
from vigor_jax.config.loading import diff
from vigor_jax.config.loading import fingerprint
from vigor_jax.config.loading import from_json
from vigor_jax.config.loading import load_file
from vigor_jax.config.loading import read_json
from vigor_jax.config.loading import to_json
from vigor_jax.config.loading import with_overrides
from vigor_jax.config.checks import validate
from vigor_jax.config.model_checks import mesh_shape
from vigor_jax.config.showing import brief
from vigor_jax.config.showing import pretty
from vigor_jax.config.showing import rest

__all__ = [
  "Args",
  "ConfigError",
  "Difference",
  "brief",
  "check_place",
  "check_resume",
  "default_config",
  "diff",
  "exit_with_message",
  "fingerprint",
  "from_json",
  "load_file",
  "mesh_shape",
  "parse",
  "parse_flags",
  "pretty",
  "rest",
  "read_json",
  "to_json",
  "validate",
  "with_overrides",
]
