"""Paths, types and values of single configuration fields."""

import ast
import dataclasses
import difflib
import math
import re
import types
import typing
from typing import Any

import ml_collections

from vigor_jax import allocation
from vigor_jax import tasks


# Of whole numbers, either way: as many as an int32 holds.
LARGEST = 2**31 - 1
# The type of the field `imports`, which is read before there are any fields.
IMPORTS = tuple[str, ...]


class ConfigError(ValueError):
  """A configuration that cannot be run; the message is for its author."""


def flatten(config, prefix: str = "") -> dict[str, Any]:
  """Returns {"section.field": value} for all leaves, sorted by name."""
  flat = {}
  for name in config:
    if not isinstance(name, str):
      raise ConfigError(f"{prefix or 'fields'}: {name!r} is no field's name")
    value = config[name]
    if isinstance(value, (ml_collections.ConfigDict, dict)):
      flat.update(flatten(value, f"{prefix}{name}."))
    else:
      flat[prefix + name] = value
  return flat


def get(config, path: str) -> Any:
  """Returns the value or section at a dotted path (KeyError if absent)."""
  for name in path.split("."):
    if not isinstance(config, (ml_collections.ConfigDict, dict)):
      raise KeyError(path)
    config = config[name]
  return config


def suggest(config, path: str, count: int = 3) -> list[str]:
  """Returns the existing names nearest to a mistyped one, best first.

  A right name on a wrong level comes first, the named allocator's own fields
  before those of others; then fields and sections by similarity.
  """
  known = list(flatten(config))
  last = path.rsplit(".", 1)[-1]
  own = f"allocation.{config.allocation.name}."
  vigor = "allocation.vigor."
  same = [name for name in known if last in name.split(".")]
  same.sort(key=lambda name: (name.rsplit(".", 1)[-1] != last,
                              not name.startswith(own),
                              not name.startswith(vigor), name.count(".")))

  def similarity(name):
    whole = difflib.SequenceMatcher(None, path, name).ratio()
    leaf = difflib.SequenceMatcher(
      None, last, name.rsplit(".", 1)[-1]
    ).ratio()
    return whole + leaf + (0.01 if name.startswith(own) else 0.0)

  if same:
    return same[:count]
  sections = {name.rpartition(".")[0] for name in known} - {""}
  near = sorted([*known, *sorted(sections)], key=similarity, reverse=True)
  return near[:1] + [n for n in near[1:count] if similarity(n) > 1.5]


def unknown_field(config, path: str) -> ConfigError:
  """Returns the error for a field that does not exist."""
  section, _, last = path.rpartition(".")
  try:
    siblings = get(config, section) if section else config
    place = f"in section {section!r}" if section else "at the top level"
    is_section = isinstance(siblings, ml_collections.ConfigDict)
  except KeyError:
    is_section = False
  where = (
    f"there is no field {last!r} {place}" if is_section
    else f"there is no section {section!r}"
  )
  names = suggest(config, path)
  return ConfigError(
    f"unknown field {path!r}: {where}; did you mean "
    + " or ".join(repr(name) for name in names) + "?"
  )


def _options_class(config, path: str) -> type | None:
  """Returns the options dataclass that brought a field, if one did."""
  parts = path.split(".")
  if parts[0] == "task" and len(parts) == 2 and parts[1] != "name":
    return tasks.REGISTRY[config.task.name].options
  if parts[0] == "allocation" and len(parts) == 3:
    return allocation.REGISTRY[parts[1]].Options
  return None


def field_type(config, path: str) -> Any:
  """Returns a field's declared type, such as `int` or `tuple[int, ...]`."""
  options = _options_class(config, path)
  if options is not None:
    return typing.get_type_hints(options)[path.rsplit(".", 1)[-1]]
  if path == "imports":
    return IMPORTS
  default = get(config, path)
  return tuple[int, ...] if isinstance(default, tuple) else type(default)


def type_name(declared: Any) -> str:
  """Returns how an error message names a type."""
  if isinstance(declared, type) and not typing.get_args(declared):
    return declared.__name__
  return str(declared).replace("typing.", "")


def _is_union(declared: Any) -> bool:
  return typing.get_origin(declared) in (typing.Union, types.UnionType)


def _wrong(path: str, declared: Any, value: Any) -> ConfigError:
  example = {bool: " (true or false)", int: " (a whole number)"}
  return ConfigError(
    f"{path}: expected {type_name(declared)}"
    f"{example.get(declared, '')}, got {value!r}"
  )


def parse_text(path: str, declared: Any, text: str) -> Any:
  """Returns the value that a command line text means for a field.

  Raises:
    ConfigError: the text is not a value of the declared type.
  """
  if _is_union(declared):
    inner = [t for t in typing.get_args(declared) if t is not type(None)]
    if text.lower() == "none":
      return None
    return parse_text(path, inner[0], text)
  origin = typing.get_origin(declared) or declared
  if origin is str:
    return text
  if origin is bool:
    if text.lower() not in ("true", "false"):
      raise _wrong(path, declared, text)
    return text.lower() == "true"
  if origin is int:
    if not re.fullmatch(r"[+-]?\d+(_\d+)*", text):
      raise _wrong(path, declared, text)
    if len(text) > 40:  # Python refuses to read thousands of digits.
      raise ConfigError(
        f"{path}: must lie in [-{LARGEST}, {LARGEST}], got {text[:12]}... of "
        f"{len(text)} characters"
      )
    return check_value(path, declared, int(text))
  if origin is float:
    try:
      number = float(text)
    except ValueError as error:
      raise _wrong(path, declared, text) from error
    return check_value(path, declared, number)
  if origin in (tuple, list):
    return _parse_sequence(path, declared, text)
  raise ConfigError(f"{path}: a {type_name(declared)} cannot be given as text")


def _parse_sequence(path: str, declared: Any, text: str) -> tuple:
  """Parses "1,2", "(1, 2)", "[1, 2]" or "" by the declared element type."""
  element = (typing.get_args(declared) or (int,))[0]
  body = text.strip().removesuffix(",")
  if element is str and body[:1] not in ("(", "["):
    return tuple(part.strip() for part in body.split(",") if part.strip())
  if body[:1] not in ("(", "["):
    body = f"({body},)" if body else "()"
  try:
    value = ast.literal_eval(body)
  except (ValueError, SyntaxError) as error:
    raise _wrong(path, declared, text) from error
  return check_value(path, declared, value)


def check_value(path: str, declared: Any, value: Any) -> Any:
  """Returns a Python value as the declared type, or refuses it.

  Whole numbers are taken for floats, lists for tuples; nothing else is
  converted. In particular True is no int, 1.5 is no int and "False" no bool.
  """
  if _is_union(declared):
    if value is None and type(None) in typing.get_args(declared):
      return None
    inner = [t for t in typing.get_args(declared) if t is not type(None)]
    return check_value(path, inner[0], value)
  origin = typing.get_origin(declared) or declared
  if origin is float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise _wrong(path, declared, value)
    if not math.isfinite(value):
      raise ConfigError(f"{path}: must be finite, got {value!r}")
    return float(value)
  if origin is int:
    if isinstance(value, bool) or not isinstance(value, int):
      raise _wrong(path, declared, value)
    if abs(value) > LARGEST:
      raise ConfigError(
        f"{path}: must lie in [-{LARGEST}, {LARGEST}], got {value}"
      )
    return value
  if origin in (tuple, list):
    if not isinstance(value, (tuple, list)):
      raise _wrong(path, declared, value)
    element = (typing.get_args(declared) or (int,))[0]
    return tuple(
      check_value(f"{path}[{i}]", element, item)
      for i, item in enumerate(value)
    )
  if origin in (bool, str):
    if not isinstance(value, origin):
      raise _wrong(path, declared, value)
    return value
  return value


def assign(config, path: str, value: Any, is_text: bool = False) -> None:
  """Sets one field of a configuration, checked by its declared type.

  Args:
    config: the configuration, changed in place.
    path: dotted name of a field.
    value: a Python value, or with `is_text` its command line form.

  Raises:
    ConfigError: no such field, a section, or a value of the wrong type.
  """
  try:
    current = get(config, path)
  except (KeyError, AttributeError) as error:
    raise unknown_field(config, path) from error
  if isinstance(current, ml_collections.ConfigDict):
    raise ConfigError(
      f"{path!r} is a section, not a field; its fields are "
      + ", ".join(f"{path}.{name}" for name in current)
    )
  declared = field_type(config, path)
  if is_text:
    value = parse_text(path, declared, value)
  else:
    value = check_value(path, declared, value)
  section, _, name = path.rpartition(".")
  target = get(config, section) if section else config
  with target.ignore_type():
    target[name] = value


def options_of(section, options_class: type) -> dict[str, Any]:
  """Returns the fields of a section that an options dataclass takes."""
  names = [field.name for field in dataclasses.fields(options_class)]
  return {name: section[name] for name in names}
