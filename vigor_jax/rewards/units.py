"""Units behind a number: known ones convert, unknown words are dropped."""

from __future__ import annotations

import re
from fractions import Fraction

_TABLE: dict[str, tuple[str, Fraction]] = {}


def _add(dimension: str, factor, *names: str) -> None:
  for name in names:
    _TABLE[name] = (dimension, Fraction(factor))


_add("length", 1000, "km", "kilometer", "kilometre")
_add("length", 1, "m", "meter", "metre")
_add("length", Fraction(1, 10), "dm", "decimeter")
_add("length", Fraction(1, 100), "cm", "centimeter", "centimetre")
_add("length", Fraction(1, 1000), "mm", "millimeter", "millimetre")
_add("length", Fraction(254, 10000), "in", "inch")
_add("length", Fraction(3048, 10000), "ft", "foot", "feet")
_add("length", Fraction(9144, 10000), "yd", "yard")
_add("length", Fraction(1609344, 1000), "mi", "mile")
_add("mass", 1000, "kg", "kilogram")
_add("mass", 1, "g", "gram")
_add("mass", Fraction(1, 1000), "mg", "milligram")
_add("weight", 16, "lb", "pound")
_add("weight", 1, "oz", "ounce")
_add("time", 1, "s", "sec", "second")
_add("time", Fraction(1, 1000), "ms", "millisecond")
_add("time", 60, "min", "minute")
_add("time", 3600, "h", "hr", "hour")
_add("time", 86400, "day")
_add("time", 7 * 86400, "week")
_add("volume", 1, "l", "liter", "litre")
_add("volume", Fraction(1, 1000), "ml", "milliliter", "millilitre")
_add("money", 1, "dollar", "usd")
_add("money", Fraction(1, 100), "cent")
_add("angle", 1, "degree")
_add("radian", 1, "radian", "rad")
_add("celsius", 1, "celsius")
_add("fahrenheit", 1, "fahrenheit")
_add("am", 1, "am", "a.m")
_add("pm", 1, "pm", "p.m")
_add(
  "speed",
  Fraction(1000, 3600),
  "km/h",
  "kmh",
  "kph",
  "km/hr",
  "kilometer per hour",
  "kilometers per hour",
)
_add("speed", 1, "m/s", "meter per second", "meters per second")
_add(
  "speed",
  Fraction(1609344, 3600000),
  "mph",
  "mile per hour",
  "miles per hour",
  "mi/h",
)
for _name, _factor in list(_TABLE.items()):
  if _factor[0] == "length":
    for _power, _long, _short in ((2, "square", "sq"), (3, "cubic", "cu")):
      _add(
        f"length^{_power}",
        _factor[1] ** _power,
        f"{_name}^{_power}",
        f"{_long} {_name}",
        f"{_short} {_name}",
      )

_WORD = r"[A-Za-z][A-Za-z.]*(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
_TAIL = re.compile(
  r"(?P<value>[^A-Za-z]*[0-9)\]}!%]|.*[0-9)}\]!]|.*\\pi)"
  r"\s*\{?\s*(?P<unit>" + _WORD + r"(?:[\s/*-]+" + _WORD + r"){0,5})"
  r"\s*\}?(?P<power>\s*\^\s*\{?\s*[23]\s*\}?)?\s*",
  re.S,
)
_MATH_WORDS = re.compile(
  r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|arc|lim|max|min|gcd|lcm"
  r"|and|or|mod)\b"
)
_LONGEST = 300


def _canonical(words: str) -> str:
  words = re.sub(r"[{}\s]+", " ", words).strip().rstrip(".")
  return re.sub(r"\s*([\^/])\s*", r"\1", words)


def lookup(unit: str) -> tuple[str, Fraction] | None:
  """(dimension, factor to the base unit) of a known unit, or None."""
  for name in (unit, unit.lower()):
    candidates = [name]
    for ending, singular in (("es", ""), ("s", ""), ("inches", "inch")):
      if name.endswith(ending) and len(name) > len(ending) + 1:
        candidates.append(name[: -len(ending)] + singular)
    for candidate in candidates:
      if candidate in _TABLE:
        return _TABLE[candidate]
  return None


def split(text: str) -> tuple[str, str] | None:
  """(value, unit) of a cleaned answer that ends in words, or None.

  A lone letter is a unit only if the table has it; a word of two letters or
  more must be in the table or be longer than two, and be no function.
  """
  if len(text) > _LONGEST:
    return None
  match = _TAIL.fullmatch(text)
  if not match:
    return None
  value = match["value"].strip()
  # Braces opened before the unit, as in "5 {cm}", belong to the unit.
  while value.count("{") > value.count("}") and value.endswith("{"):
    value = value[:-1].strip()
  unit = _canonical(match["unit"] + (match["power"] or ""))
  if not value or _MATH_WORDS.match(unit):
    return None
  if lookup(unit) is None:
    words = re.findall(r"[A-Za-z]+", unit)
    if "^" in unit or any(len(word) < 2 for word in words[:1]):
      return None
    if max(map(len, words)) < 3:
      return None
  return value, unit
