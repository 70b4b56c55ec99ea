"""Compares what a program gave with what a test expects, outside the sandbox.

Integers are exact; a number expected with a decimal point or an exponent may
differ by 1e-6, absolutely or relatively. Blanks round a line and empty lines at
the ends do not matter.
"""

from __future__ import annotations

import decimal
import json
import math
import re
import sys
from typing import Any

TOLERANCE = 1e-6
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_NUMBER = re.compile(
  r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?\Z"
)
_CONTEXT = decimal.Context(
  prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[]
)


def _close(expected: str, got: str) -> bool:
  """Decimal texts within the tolerance; no exponent can make this slow."""
  a, b = _CONTEXT.create_decimal(expected), _CONTEXT.create_decimal(got)
  gap = _CONTEXT.subtract(a, b).copy_abs()
  size = max(decimal.Decimal(1), a.copy_abs())
  allowed = _CONTEXT.multiply(_CONTEXT.create_decimal(str(TOLERANCE)), size)
  return bool(gap <= allowed)


def _same_token(expected: str, got: str) -> bool:
  if expected == got:
    return True
  if len(expected) > 10_000 or len(got) > 10_000:
    return False
  if _INTEGER.match(expected) or not _NUMBER.match(expected):
    return False  # Integers and words are exact.
  return bool(_NUMBER.match(got)) and _close(expected, got)


def _same_line(expected: str, got: str) -> bool:
  if expected == got:
    return True
  want, have = expected.split(), got.split()
  if len(want) != len(have) or not any(map(_NUMBER.match, want)):
    return False
  return all(map(_same_token, want, have))


def _lines(text: str) -> list[str]:
  text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
  return [line.strip() for line in text.split("\n")]


def same_output(expected: str, got: bytes) -> bool:
  """True when the printed bytes are the expected text, line by line."""
  try:
    text = got.decode("utf-8")
  except UnicodeDecodeError:
    return False
  want, have = _lines(expected), _lines(text)
  return len(want) == len(have) and all(map(_same_line, want, have))


def same_value(expected: Any, got: Any) -> bool:
  """True when a decoded result is the expected JSON value.

  As Python's == between plain data, but floats have the tolerance, a tuple is a
  list, and keys of a dict are compared as the strings that JSON has.
  """
  if isinstance(expected, bool) or isinstance(got, bool):
    return (
      isinstance(got, (bool, int))
      and isinstance(expected, (bool, int))
      and expected == got
    )
  if isinstance(expected, float):
    if not isinstance(got, (int, float)):
      return False
    if not math.isfinite(expected):
      return isinstance(got, float) and (
        expected == got or (math.isnan(expected) and math.isnan(got))
      )
    if isinstance(got, float) and not math.isfinite(got):
      return False
    return (
      _close(repr(expected), repr(got))
      if abs(got) < 1e300
      else (expected == got)
    )
  if isinstance(expected, int):
    return isinstance(got, (int, float)) and expected == got
  if isinstance(expected, str) or expected is None:
    return type(expected) is type(got) and expected == got
  if isinstance(expected, list):
    return (
      isinstance(got, list)
      and len(expected) == len(got)
      and all(map(same_value, expected, got))
    )
  if isinstance(expected, dict):
    if not (isinstance(got, dict) and list(got) == ["dict"]):
      return False
    found: dict[str, Any] = {}
    for key, value in got["dict"]:
      name = key if isinstance(key, str) else _key(key)
      if name in found:
        return False
      found[name] = value
    return found.keys() == expected.keys() and all(
      same_value(value, found[key]) for key, value in expected.items()
    )
  return False


def _key(key: Any) -> str:
  """How JSON writes a key that is no string."""
  if isinstance(key, list):
    return str(tuple(key))
  return json.dumps(key)


def same_result(expected: Any, got: bytes) -> bool:
  """True when the JSON of a called function's value is the expected value."""
  try:
    # The digits limit is the interpreter's guard against slow conversions; the
    # output limit has bounded the text.
    value = json.loads(got.decode("ascii"), parse_int=_parse_int)
  except (ValueError, RecursionError):
    return False
  try:
    return same_value(expected, value)
  except RecursionError:
    return False


def _parse_int(text: str) -> int | str:
  """An int; one longer than any expected value stays text and never matches."""
  limit = sys.get_int_max_str_digits() or 4300
  return int(text) if len(text) <= limit else f"integer {text}"
