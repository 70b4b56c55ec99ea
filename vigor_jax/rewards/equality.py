"""When two expressions have the same value.

Rationals are compared exactly, other constants to 40 digits, expressions with
symbols at many points (wherever both are real). No absolute tolerance, so that
two tiny numbers differ like two large ones.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import mpmath

from vigor_jax.rewards import evaluate
from vigor_jax.rewards.evaluate import Inexact, TooBig, Undefined
from vigor_jax.rewards.latex import Node

# Significant digits a decimal must show to stand for a value that no decimal
# gives exactly (a root, pi, one third).
APPROXIMATE_DIGITS = 6
_PRIMES = (2**61 - 1, 2**89 - 1)
_CONSTANTS_OF_INTEGRATION = ("C", "c", "K", "k")
_FAILURES = (
  Inexact,
  TooBig,
  Undefined,
  ZeroDivisionError,
  OverflowError,
  ValueError,
  mpmath.libmp.NoConvergence,
)


def decimal_literal(node: Node) -> tuple[Fraction, int] | None:
  """(value, significant digits) of a decimal such as -1.20 or 1.5 * 10^3."""
  if node[0] == "num" and node[2] is not None:
    return node[1], node[2]
  if node[0] in ("neg", "degree", "percent"):
    inner = decimal_literal(node[1])
    if inner is None:
      return None
    factor = {"neg": -1, "degree": 1, "percent": Fraction(1, 100)}[node[0]]
    return inner[0] * factor, inner[1]
  if node[0] == "mul" and node[2][0] == "pow" and node[2][1][0] == "num":
    inner = decimal_literal(node[1])
    if inner is not None and node[2][1][1] == 10:
      try:
        return inner[0] * evaluate.exact(node[2]), inner[1]
      except _FAILURES:
        return None
  return None


def _ulp(value: Fraction, digits: int) -> Fraction:
  """One unit in the last shown place."""
  size = len(str(abs(value.numerator))) - len(str(value.denominator))
  while Fraction(10) ** size > abs(value):
    size -= 1
  while Fraction(10) ** (size + 1) <= abs(value):
    size += 1
  return Fraction(10) ** (size - digits + 1)


def _tolerance(literal: tuple[Fraction, int]) -> Fraction | None:
  """How far a value may be from the decimal that stands for it."""
  value, digits = literal
  if value == 0 or digits < APPROXIMATE_DIGITS or digits > 1000:
    return None
  tolerance = _ulp(value, digits)
  if digits >= 12:  # A double, with the rounding of a short computation.
    tolerance = max(tolerance, abs(value) * Fraction(1, 10**12))
  return tolerance


def _terminates(value: Fraction) -> bool:
  rest = value.denominator
  for prime in (2, 5):
    while rest % prime == 0:
      rest //= prime
  return rest == 1


def _float_noise(a: Fraction, b: Fraction, literals) -> bool:
  """0.30000000000000004 is .3 as doubles print it."""
  for literal in literals:
    if literal is not None and literal[1] >= 15:
      if literal[0].denominator != 1 and a != 0 and b != 0:
        return abs(a - b) <= max(abs(a), abs(b)) * Fraction(1, 10**14)
  return False


def _same_rational(a: Fraction, b: Fraction, ga: Node, gb: Node) -> bool:
  if a == b:
    return True
  literals = decimal_literal(ga), decimal_literal(gb)
  if _float_noise(a, b, literals):
    return True
  for literal, other in ((literals[0], b), (literals[1], a)):
    # A value that a decimal gives exactly must be given exactly.
    if literal is not None and not _terminates(other):
      tolerance = _tolerance(literal)
      if tolerance is not None and abs(literal[0] - other) < tolerance:
        return True
  return False


def _modular(node: Node, prime: int) -> int:
  """The value modulo a prime: exact where the number is too long to hold."""
  kind = node[0]
  if kind == "pow":
    exponent = evaluate.exact(node[2])
    if exponent.denominator != 1:
      raise Inexact("a fractional exponent")
    return pow(_modular(node[1], prime), exponent.numerator, prime)
  if kind == "neg":
    return -_modular(node[1], prime) % prime
  if kind in ("add", "mul", "div"):
    a, b = _modular(node[1], prime), _modular(node[2], prime)
    if kind == "add":
      return (a + b) % prime
    return a * (b if kind == "mul" else pow(b, -1, prime)) % prime
  value = evaluate.exact(node)
  return value.numerator * pow(value.denominator, -1, prime) % prime


def _same_huge(a: Node, b: Node) -> bool:
  try:
    return all(_modular(a, p) == _modular(b, p) for p in _PRIMES) and (
      _same_digits(a, b, {})
    )
  except _FAILURES:
    return False


def _same_digits(a: Node, b: Node, env: dict[str, Any]) -> bool:
  """Equal to 40 digits; a difference that shrinks with precision is none."""
  gaps = []
  for digits in (50, 100):
    with mpmath.workdps(digits):
      x, y = evaluate.numeric(a, env), evaluate.numeric(b, env)
      gaps.append((mpmath.fabs(x - y), max(mpmath.fabs(x), mpmath.fabs(y))))
  (first, _), (second, size) = gaps
  if second <= size * mpmath.mpf(10) ** -40:
    return True
  tiny = mpmath.mpf(10) ** -60
  return bool(second < tiny and second < first * mpmath.mpf(10) ** -30)


def _same_constant(a: Node, b: Node) -> bool:
  big = False
  values: list[Fraction | None] = []
  for node in (a, b):
    try:
      values.append(evaluate.exact(node))
    except TooBig:
      big = True
      values.append(None)
    except _FAILURES:
      values.append(None)
  if big:
    return _same_huge(a, b)
  if None not in values:
    return _same_rational(values[0], values[1], a, b)
  for literal, other in ((decimal_literal(a), b), (decimal_literal(b), a)):
    tolerance = literal and _tolerance(literal)
    if tolerance is not None:
      with mpmath.workdps(60 + literal[1]):
        value = evaluate.numeric(other, {})
        gap = mpmath.fabs(value - evaluate.numeric(("num", *literal), {}))
        if gap < evaluate.numeric(("num", tolerance, None), {}):
          return True
  readings = [{}]
  if evaluate.uses_plain_log(a) or evaluate.uses_plain_log(b):
    readings.append({"log": mpmath.mpf(10)})
  return any(_same_digits(a, b, env) for env in readings)


def sample(names, trial: int) -> dict[str, Any]:
  """Values of symbols for a trial: positive, of both signs, or whole."""
  draw = random.Random(f"{trial}")
  env = {}
  for name in sorted(names):
    size = Fraction(draw.randrange(2000, 40000), 9973)
    if trial % 3 == 1 and draw.random() < 0.7:
      size = -size
    elif trial % 3 == 2:
      size = Fraction(draw.randrange(2, 14))
    env[name] = mpmath.mpf(size.numerator) / size.denominator
  return env


def _same_expression(a: Node, b: Node, names) -> bool:
  real = both_complex = 0
  for trial in range(30):
    with mpmath.workdps(60):
      env = sample(names, trial)
      try:
        x, y = evaluate.numeric(a, env), evaluate.numeric(b, env)
      except TooBig:
        return False
      except _FAILURES:
        continue
      size = max(mpmath.fabs(x), mpmath.fabs(y), mpmath.mpf(10) ** -20)
      small = size * mpmath.mpf(10) ** -25
      same = mpmath.fabs(x - y) <= small
      complex_x = mpmath.fabs(mpmath.im(x)) > small
      complex_y = mpmath.fabs(mpmath.im(y)) > small
    if not complex_x and not complex_y:
      if not same:
        return False
      real += 1
    elif complex_x and complex_y:
      if same:
        both_complex += 1
      elif _has_i(a) or _has_i(b):
        return False
    if real >= 12:
      return True
  return real >= 3 or both_complex >= 3


def _has_i(node) -> bool:
  if isinstance(node, tuple):
    return node == ("const", "i") or any(map(_has_i, node))
  return isinstance(node, list) and any(map(_has_i, node))


def _infinity(node: Node) -> int:
  if node == ("const", "inf"):
    return 1
  return -1 if node == ("neg", ("const", "inf")) else 0


def _rename_constant(node, old: str, new: str):
  if isinstance(node, tuple):
    if node == ("sym", old):
      return ("sym", new)
    return tuple(_rename_constant(child, old, new) for child in node)
  if isinstance(node, list):
    return [_rename_constant(child, old, new) for child in node]
  return node


def same(a: Node, b: Node) -> bool:
  """True when two expressions are equal; units are the caller's."""
  if a == b:
    return True
  if a[0] == "base" or b[0] == "base":
    return _same_in_base(a, b)
  if _infinity(a) or _infinity(b):
    return _infinity(a) == _infinity(b)
  names_a, names_b = evaluate.free_symbols(a), evaluate.free_symbols(b)
  if names_a != names_b:
    extra_a, extra_b = names_a - names_b, names_b - names_a
    if len(extra_a) == len(extra_b) == 1:
      (old,), (new,) = extra_b, extra_a
      if {old, new} <= set(_CONSTANTS_OF_INTEGRATION):
        b, names_b = _rename_constant(b, old, new), names_a
  try:
    if not names_a | names_b:
      return _same_constant(a, b)
    return _same_expression(a, b, names_a | names_b)
  except _FAILURES:
    return False


def _same_in_base(a: Node, b: Node) -> bool:
  if a[0] == b[0]:
    try:
      return int(a[1], a[2]) == int(b[1], b[2])
    except ValueError:
      return False
  number, digits = (b, a[1]) if a[0] == "base" else (a, b[1])
  # The base is often left out; the digits must be the same.
  return number[0] == "num" and number[2] is None and str(number[1]) == digits


def proportional(a: Node, b: Node) -> int:
  """Sign of the constant c in a = c b (c != 0), or 0 when there is none."""
  names = evaluate.free_symbols(a)
  if names != evaluate.free_symbols(b) or not names:
    return 0
  ratio = None
  seen = 0
  for trial in range(20):
    with mpmath.workdps(60):
      env = sample(names, trial)
      try:
        x, y = evaluate.numeric(a, env), evaluate.numeric(b, env)
        here = x / y
      except _FAILURES:
        continue
      if mpmath.fabs(here) < mpmath.mpf(10) ** -25:
        return 0
      gap = mpmath.mpf(10) ** -25 * mpmath.fabs(here)
      if ratio is not None and mpmath.fabs(here - ratio) > gap:
        return 0
      if mpmath.fabs(mpmath.im(here)) > gap:
        return 0
      ratio = here
      seen += 1
  if seen < 5:
    return 0
  return 1 if mpmath.re(ratio) > 0 else -1
