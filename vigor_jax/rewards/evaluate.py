"""Values of parsed answers: exact rationals first, then many digits.

No step may run away: a power, a factorial or a root whose result would pass
`MAX_BITS` raises `TooBig` before it is computed.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath

from vigor_jax.rewards.latex import Node

MAX_BITS = 200_000
# Largest |exponent| of a numeric power, as a power of two.
_MAX_EXPONENT_BITS = 60


class Inexact(ValueError):
  """The value is not a rational that exact arithmetic gives."""


class TooBig(ValueError):
  """The value would be larger than any answer is."""


class Undefined(ValueError):
  """No finite value here (a division by zero, a logarithm of zero)."""


def _bits(value: Fraction) -> int:
  return value.numerator.bit_length() + value.denominator.bit_length()


def _guard(value: Fraction) -> Fraction:
  if _bits(value) > 2 * MAX_BITS:
    raise TooBig("a rational too large")
  return value


def _exact_root(value: Fraction, n: int) -> Fraction:
  """The real n-th root if it is rational."""
  if value < 0:
    if n % 2 == 0:
      raise Inexact("an even root of a negative number")
    return -_exact_root(-value, n)
  parts = []
  for part in (value.numerator, value.denominator):
    root = _integer_root(part, n)
    if root**n != part:
      raise Inexact("an irrational root")
    parts.append(root)
  return Fraction(*parts)


def _integer_root(value: int, n: int) -> int:
  """floor(value ** (1 / n)) for value >= 0, by Newton's method."""
  if value < 2:
    return value
  if n == 2:
    return math.isqrt(value)
  if n >= value.bit_length():
    return 1
  x = 1 << -(-value.bit_length() // n)
  while True:
    y = ((n - 1) * x + value // x ** (n - 1)) // n
    if y >= x:
      return x
    x = y


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
  if exponent.denominator != 1:
    if exponent.denominator > 64:
      raise Inexact("an irrational power")
    if base < 0:  # The principal value is complex.
      raise Inexact("a fractional power of a negative number")
    base = _exact_root(base, exponent.denominator)
    exponent = Fraction(exponent.numerator)
  n = exponent.numerator
  if base == 0:
    if n < 0:
      raise Undefined("zero to a negative power")
    return Fraction(int(n == 0))
  if abs(base) == 1:
    return base if n % 2 else Fraction(1)
  if abs(n) * max(1, _bits(base) - 1) > MAX_BITS:
    raise TooBig("a power too large")
  return base**n


def _exact_factorial(value: Fraction) -> Fraction:
  if value.denominator != 1 or value < 0:
    raise Inexact("a factorial of no natural number")
  if value > 12_000:  # 12000! has 144,000 bits.
    raise TooBig("a factorial too large")
  return Fraction(math.factorial(value.numerator))


def exact(node: Node) -> Fraction:
  """The rational value of a tree without symbols.

  Raises:
    Inexact: it is not rational (or this arithmetic cannot tell).
    TooBig, Undefined: as named.
  """
  kind = node[0]
  if kind == "num":
    return node[1]
  if kind in ("add", "mul", "div"):
    a, b = exact(node[1]), exact(node[2])
    if kind == "add":
      return _guard(a + b)
    if kind == "mul":
      return _guard(a * b)
    if b == 0:
      raise Undefined("a division by zero")
    return _guard(a / b)
  if kind == "neg":
    return -exact(node[1])
  if kind == "pow":
    return _exact_power(exact(node[1]), exact(node[2]))
  if kind == "root":
    index = exact(node[2])
    if index.denominator != 1 or not 1 <= index <= 64:
      raise Inexact("an unusual root")
    return _exact_root(exact(node[1]), index.numerator)
  if kind == "percent":
    return exact(node[1]) / 100
  if kind == "degree":
    return exact(node[1])
  if kind == "fact":
    return _exact_factorial(exact(node[1]))
  if kind == "binom":
    n, k = exact(node[1]), exact(node[2])
    if n.denominator != 1 or k.denominator != 1 or n < 0:
      raise Inexact("an unusual binomial")
    if n > 12_000:
      raise TooBig("a binomial too large")
    return Fraction(math.comb(n.numerator, k.numerator) if k >= 0 else 0)
  if kind == "func":
    if node[1] == "abs":
      return abs(exact(node[2]))
    if node[1] == "floor":
      return Fraction(math.floor(exact(node[2])))
    if node[1] == "ceil":
      return Fraction(math.ceil(exact(node[2])))
  raise Inexact(f"{kind} is not exact")


_NUMERIC = {
  "sin": mpmath.sin,
  "cos": mpmath.cos,
  "tan": mpmath.tan,
  "cot": mpmath.cot,
  "sec": mpmath.sec,
  "csc": mpmath.csc,
  "arcsin": mpmath.asin,
  "arccos": mpmath.acos,
  "arctan": mpmath.atan,
  "sinh": mpmath.sinh,
  "cosh": mpmath.cosh,
  "tanh": mpmath.tanh,
  "ln": mpmath.log,
  "exp": mpmath.exp,
  "abs": mpmath.fabs,
}
_PERIODIC = ("sin", "cos", "tan", "cot", "sec", "csc")


def _magnitude(value) -> int:
  """An upper bound of log2 |value|."""
  if value == 0:
    return -(10**9)
  size = mpmath.mag(value)
  return int(size) if mpmath.isfinite(size) else 10**9


def _to_mp(value: Fraction):
  return mpmath.mpf(value.numerator) / value.denominator


def _numeric_power(base, exponent):
  if base == 0:
    if mpmath.re(exponent) <= 0:
      raise Undefined("zero to a power that is not positive")
    return mpmath.mpf(0)
  if _magnitude(exponent) > _MAX_EXPONENT_BITS:
    raise TooBig("an exponent too large")
  if _magnitude(exponent) > 0 and abs(_magnitude(base)) > 2**40:
    raise TooBig("a power too large")
  return mpmath.power(base, exponent)


def numeric(node: Node, env: dict[str, Any]):
  """The value at the current mpmath precision; `env` gives the symbols.

  Raises:
    Inexact: the tree has a symbol without a value or is no expression.
    TooBig, Undefined: as named.
  """
  kind = node[0]
  if kind == "num":
    return _to_mp(node[1])
  if kind == "sym":
    if node[1] not in env:
      raise Inexact(f"no value for {node[1]}")
    return env[node[1]]
  if kind == "const":
    if node[1] == "inf":
      raise Undefined("infinity within an expression")
    return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1)}[node[1]]
  if kind in ("add", "mul", "div", "pow", "binom"):
    a, b = numeric(node[1], env), numeric(node[2], env)
    if kind == "add":
      return a + b
    if kind == "mul":
      return a * b
    if kind == "pow":
      return _numeric_power(a, b)
    if kind == "binom":
      return _gamma_like(mpmath.binomial, a, b)
    if b == 0:
      raise Undefined("a division by zero")
    return a / b
  if kind in ("neg", "percent", "degree", "fact"):
    a = numeric(node[1], env)
    if kind == "neg":
      return -a
    if kind == "percent":
      return a / 100
    return a if kind == "degree" else _gamma_like(mpmath.factorial, a)
  if kind == "root":
    return _numeric_root(numeric(node[1], env), numeric(node[2], env))
  if kind == "log":
    argument = numeric(node[2], env)
    if node[1] is None:
      # "log" without a base: the caller tries both readings.
      base = env.get("log", mpmath.e)
    else:
      base = numeric(node[1], env)
    if argument == 0 or base in (0, 1):
      raise Undefined("a logarithm of zero or to the base one")
    return mpmath.log(argument) / mpmath.log(base)
  if kind == "func":
    return _numeric_function(node, env)
  raise Inexact(f"{kind} is no expression")


def _gamma_like(fn, *arguments):
  if any(_magnitude(a) > 40 for a in arguments):
    raise TooBig("a factorial too large")
  try:
    return fn(*arguments)
  except ValueError as error:
    raise Undefined("a pole") from error


def _numeric_root(value, index):
  if index == 0:
    raise Undefined("a zeroth root")
  if value == 0:
    return mpmath.mpf(0)
  odd = mpmath.isint(index) and int(index) % 2 == 1
  if odd and mpmath.im(value) == 0 and mpmath.re(value) < 0:
    return -mpmath.power(-value, 1 / index)  # The real cube root of -8.
  return _numeric_power(value, 1 / index)


def _numeric_function(node: Node, env):
  name = node[1]
  argument_node = node[2]
  value = numeric(argument_node, env)
  if name in ("floor", "ceil"):
    return getattr(mpmath, name)(value)
  if name in _PERIODIC and _has_degrees(argument_node):
    value = value * mpmath.pi / 180
  if name in _PERIODIC and _magnitude(value) > 400:
    raise TooBig("an angle too large")
  if name in ("exp", "sinh", "cosh", "tanh"):
    if _magnitude(value) > _MAX_EXPONENT_BITS:
      raise TooBig("an exponent too large")
  if name == "ln" and value == 0:
    raise Undefined("a logarithm of zero")
  try:
    result = _NUMERIC[name](value)
  except (ValueError, ZeroDivisionError) as error:
    raise Undefined(f"{name} has a pole") from error
  if (
    name in ("tan", "cot", "sec", "csc")
    and _magnitude(result) > mpmath.mp.prec // 2
  ):
    raise Undefined(f"{name} has a pole")
  return result


def _has_degrees(node: Node) -> bool:
  if node[0] == "degree":
    return True
  return any(isinstance(c, tuple) and _has_degrees(c) for c in node[1:])


def free_symbols(node) -> frozenset[str]:
  """Names of the symbols in a tree."""
  if isinstance(node, tuple):
    if node and node[0] == "sym":
      return frozenset((node[1],))
    return frozenset().union(*map(free_symbols, node)) if node else frozenset()
  if isinstance(node, list):
    return frozenset().union(*map(free_symbols, node)) if node else frozenset()
  return frozenset()


def uses_plain_log(node) -> bool:
  """True when a "log" without a base occurs."""
  if isinstance(node, tuple):
    if node and node[0] == "log" and node[1] is None:
      return True
    return any(uses_plain_log(child) for child in node)
  return isinstance(node, list) and any(map(uses_plain_log, node))
