r"""Countdown: make the target from the numbers, each used exactly once.

The expression is parsed by a grammar of its own (+ - * / and parentheses over
integers) and evaluated in exact rationals, so that no text can run code, and
no value grows beyond the product of the numbers.
"""

from __future__ import annotations

import collections
import re
from fractions import Fraction

from vigor_jax.rewards import answer_text
from vigor_jax.rewards.verdict import RewardError, shorten

# Longest expression read; the numbers of a puzzle are few.
MAX_CHARS = 2000
_MAX_DEPTH = 100
_MAX_DIGITS = 30

_SPELLINGS = (
  ("\\times", "*"),
  ("\\cdot", "*"),
  ("\\div", "/"),
  ("\\left", ""),
  ("\\right", ""),
  ("\\,", ""),
  ("\\;", ""),
  ("\\!", ""),
  ("\\ ", " "),
  ("×", "*"),
  ("·", "*"),
  ("⋅", "*"),
  ("∗", "*"),
  ("÷", "/"),
  ("∕", "/"),
  ("−", "-"),
  ("–", "-"),
  ("＋", "+"),
  ("（", "("),
  ("）", ")"),
  ("[", "("),
  ("]", ")"),
  ("$", ""),
  ("`", ""),
)
_FRACTION = re.compile(r"\\[dt]?frac")
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
_LABEL = re.compile(
  r"^\W*(?:the\s+)?(?:final\s+)?(?:answer|expression|solution|equation)"
  r"\W*(?:is)?\s*[:=]?[\s*]*",
  re.I,
)


class _Refused(ValueError):
  """Not an expression of this grammar."""


def _expand_fractions(text: str) -> str:
  r"""\frac{a}{b} as ((a)/(b))."""
  for _ in range(_MAX_DEPTH):
    match = _FRACTION.search(text)
    if not match:
      return text
    parts, at = [], match.end()
    for _ in range(2):
      while at < len(text) and text[at].isspace():
        at += 1
      if at >= len(text) or text[at] != "{":
        raise _Refused("a fraction without braces")
      end = answer_text.closing_brace(text, at)
      if end < 0:
        raise _Refused("an open brace")
      parts.append(text[at + 1 : end])
      at = end + 1
    text = f"{text[: match.start()]}(({parts[0]})/({parts[1]})){text[at:]}"
  raise _Refused("too many fractions")


def _tokens(text: str) -> list[str]:
  tokens = []
  at = 0
  while at < len(text):
    match = _TOKEN.match(text, at)
    if not match:
      if not text[at:].strip():
        break
      raise _Refused(f"unexpected {text[at : at + 10]!r}")
    token = match[1] or match[2]
    if len(token) > _MAX_DIGITS:
      raise _Refused("a number too long")
    tokens.append(token)
    at = match.end()
  return tokens


class _Parser:
  """Recursive descent over sum := product (+- product)*, and so on."""

  def __init__(self, text: str) -> None:
    self._tokens = _tokens(text)
    self._at = 0
    self.used: collections.Counter[int] = collections.Counter()

  def _peek(self) -> str:
    return self._tokens[self._at] if self._at < len(self._tokens) else ""

  def _next(self) -> str:
    token = self._peek()
    self._at += 1
    return token

  def value(self) -> Fraction:
    result = self._sum(0)
    if self._peek():
      raise _Refused(f"unexpected {self._peek()!r}")
    return result

  def _sum(self, depth: int) -> Fraction:
    if depth > _MAX_DEPTH:
      raise _Refused("nested too deep")
    result = self._product(depth)
    while self._peek() in ("+", "-"):
      if self._next() == "+":
        result += self._product(depth)
      else:
        result -= self._product(depth)
    return result

  def _product(self, depth: int) -> Fraction:
    result = self._unary(depth)
    while self._peek() in ("*", "/"):
      if self._next() == "*":
        result *= self._unary(depth)
      else:
        divisor = self._unary(depth)
        if divisor == 0:
          raise _Refused("division by zero")
        result /= divisor
    return result

  def _unary(self, depth: int) -> Fraction:
    sign = 1
    if self._peek() in ("+", "-"):  # One sign: "3 - -2", not "3---2".
      sign = -1 if self._next() == "-" else 1
    token = self._next()
    if token == "(":
      result = self._sum(depth + 1)
      if self._next() != ")":
        raise _Refused("a parenthesis is not closed")
      return sign * result
    if not token.isdigit():
      raise _Refused(f"unexpected {token!r}")
    number = int(token)
    self.used[number] += 1
    return Fraction(sign * number)


def evaluate(text: str) -> tuple[Fraction, collections.Counter[int]]:
  """Exact value of an expression and how often it uses each number.

  Raises:
    ValueError: `text` is not +, -, *, / and parentheses over whole numbers, is
      longer than MAX_CHARS, or divides by zero.
  """
  if len(text) > MAX_CHARS:
    raise _Refused(f"longer than {MAX_CHARS} characters")
  for written, meant in _SPELLINGS:
    text = text.replace(written, meant)
  parser = _Parser(_expand_fractions(text))
  return parser.value(), parser.used


def extract(completion: str) -> str:
  """The text of the final expression: tag, box, or the last line."""
  text = answer_text.after_reasoning(completion)
  found = answer_text.tagged(text)
  if found is None:
    boxed = answer_text.boxes(text)
    found = boxed[-1][2] if boxed else None
  if found is None:
    lines = [line for line in text.splitlines() if line.strip()]
    found = _LABEL.sub("", lines[-1][: MAX_CHARS + 1]) if lines else ""
  return found.strip().strip("*").rstrip(".").strip()


def _integer(value, field: str) -> int:
  try:
    number = Fraction(value)
  except (TypeError, ValueError, OverflowError, ZeroDivisionError):
    number = None
  if isinstance(value, bool) or number is None or number.denominator != 1:
    raise RewardError(
      f"countdown: metadata {field} must be whole numbers, got {shorten(value)}"
    )
  return int(number)


def verify(
  completion: str,
  answer: str,
  *,
  numbers=None,
  target=None,
  **metadata,
) -> float:
  """1.0 if the expression uses `numbers` exactly once each and equals `target`.

  Args:
    completion: text whose last <answer>, \\boxed or line is the expression; a
      trailing "= value" must be true.
    answer: not used: any right expression is right.
    numbers: the puzzle's whole numbers (a list; from the task's metadata).
    target: the whole number to reach.

  Raises:
    RewardError: `numbers` or `target` is missing or not whole.
  """
  del answer, metadata
  if numbers is None or target is None:
    raise RewardError(
      "countdown: the task's metadata must have 'numbers' and 'target'"
    )
  wanted = collections.Counter(_integer(n, "numbers") for n in numbers)
  goal = _integer(target, "target")
  left, equals, right = extract(completion).partition("=")
  try:
    value, used = evaluate(left)
    if equals and evaluate(right)[0] != value:
      return 0.0
  except ValueError:
    return 0.0
  # The grammar has no negative numerals: a given -3 is used as 3 with a sign.
  wanted = collections.Counter(abs(n) for n in wanted.elements())
  return float(value == goal and used == wanted)


verify.cheap = True
