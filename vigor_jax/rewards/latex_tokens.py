"""Tokens of an answer, and the cursor that a parser reads them with."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

_TOKEN = re.compile(
  r"(?P<num>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
  r"(?:[eE][+-]?[0-9]{1,6}(?![0-9A-Za-z.]))?)"
  r"|(?P<cmd>\\[A-Za-z]+|\\[{}|])"
  r"|(?P<row>\\\\)"
  r"|(?P<word>[A-Za-z]+)"
  r"|(?P<op><=|>=|!=|[-+*/^_()\[\]{}|,;:=<>!&%'±∨])"
)
_SPACE = re.compile(r"\s+")


class Unreadable(ValueError):
  """The text is not one answer of this grammar."""


class UnknownCommand(Unreadable):
  """A LaTeX command or environment that this grammar does not have."""


class Token:
  """One token; `gap` when white space stands before it."""

  __slots__ = ("kind", "text", "gap")

  def __init__(self, kind: str, text: str, gap: bool) -> None:
    self.kind, self.text, self.gap = kind, text, gap


def tokenize(text: str) -> list[Token]:
  tokens: list[Token] = []
  at = 0
  gap = False
  while at < len(text):
    space = _SPACE.match(text, at)
    if space:
      at, gap = space.end(), True
      continue
    match = _TOKEN.match(text, at)
    if not match:
      raise Unreadable(f"unexpected {text[at : at + 8]!r}")
    tokens.append(Token(match.lastgroup, match[0], gap))
    at, gap = match.end(), False
  return tokens


def number(text: str) -> Node:
  """A decimal literal as an exact rational, with its significant digits."""
  if len(text) > 2000:
    raise Unreadable("a number too long")
  mantissa, _, exponent = text.lower().partition("e")
  if exponent and abs(int(exponent)) > 5000:
    raise Unreadable("an exponent too large")
  value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
  digits = None
  if "." in mantissa or exponent:
    digits = len(mantissa.replace(".", "").lstrip("0"))
  return ("num", value, digits)


class Cursor:
  """A position in a list of tokens."""

  def __init__(self, tokens: list[Token]) -> None:
    self._tokens = tokens
    self._at = 0
    self._depth = 0
    self._bars = 0  # Open |...|: a bar then closes, it does not open.

  # --- tokens ---------------------------------------------------------------

  def _peek(self, ahead: int = 0) -> str:
    at = self._at + ahead
    return self._tokens[at].text if at < len(self._tokens) else ""

  def _kind(self, ahead: int = 0) -> str:
    at = self._at + ahead
    return self._tokens[at].kind if at < len(self._tokens) else ""

  def _gap(self, ahead: int = 0) -> bool:
    at = self._at + ahead
    return at < len(self._tokens) and self._tokens[at].gap

  def _take(self, *expected: str) -> str:
    token = self._peek()
    if not token or (expected and token not in expected):
      raise Unreadable(f"found {token!r}, wanted {expected}")
    self._at += 1
    return token
