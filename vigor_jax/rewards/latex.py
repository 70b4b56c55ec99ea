r"""A parser for the answers models write: LaTeX, plain text, or a mixture.

`parse` turns one answer into a tree of tuples:

  ("num", Fraction, digits)   digits: significant digits of a decimal, or None
  ("sym", name)  ("const", "pi" | "e" | "i" | "inf")
  ("add", a, b)  ("mul", a, b)  ("div", a, b)  ("pow", a, b)  ("neg", a)
  ("pm", a)      plus or minus a
  ("func", name, a)  ("log", base, a)  ("root", a, n)  ("fact", a)
  ("binom", n, k)  ("percent", a)  ("degree", a)  ("base", digits, base)
  ("tuple", open, close, items)  ("set", items)  ("matrix", rows)
  ("list", items, by_or)  ("union", items)  ("without", a, b)  ("ratio", items)
  ("rel", [a, op, b, op, c ...])  ops: = < <= > >= != in

What it cannot read raises `Unreadable`: nothing is skipped silently, so no part
of an answer is ever taken for the whole.
"""

from __future__ import annotations

from typing import Any

from vigor_jax.rewards.latex_atoms import Atoms
from vigor_jax.rewards.latex_clean import clean
from vigor_jax.rewards.latex_tokens import (
  Node,
  UnknownCommand,
  Unreadable,
  tokenize,
)

__all__ = ["MAX_CHARS", "Node", "UnknownCommand", "Unreadable", "parse", "read"]

MAX_CHARS = 4000
_MAX_DEPTH = 80

_RELATIONS = {
  "=": "=",
  "<": "<",
  ">": ">",
  "<=": "<=",
  ">=": ">=",
  "!=": "!=",
  "\\in": "in",
}


class _Parser(Atoms):
  """Recursive descent over the token list."""

  # --- structures -----------------------------------------------------------

  def answer(self) -> Node:
    node = self._items(end="")
    if self._peek():
      raise Unreadable(f"left over: {self._peek()!r}")
    return node

  def _items(self, end: str) -> Node:
    """Comma-separated items up to `end`; a list when more than one."""
    items = [self._relation()]
    by_or = False
    while self._peek() in (",", ";", "∨"):
      while self._peek() in (",", ";", "∨"):  # ", and" is one separator.
        by_or |= self._take() == "∨"
      if self._peek() == end:  # A trailing comma.
        break
      items.append(self._relation())
    return items[0] if len(items) == 1 else ("list", items, by_or)

  def _relation(self) -> Node:
    parts: list[Any] = [self._union()]
    while self._peek() in _RELATIONS:
      parts.append(_RELATIONS[self._take()])
      parts.append(self._union())
    return parts[0] if len(parts) == 1 else ("rel", parts)

  def _union(self) -> Node:
    items = [self._ratio()]
    while self._peek() == "\\cup":
      self._take()
      items.append(self._ratio())
    node = items[0] if len(items) == 1 else ("union", items)
    if self._peek() in ("\\setminus", "\\backslash"):
      self._take()
      node = ("without", node, self._ratio())
    return node

  def _ratio(self) -> Node:
    items = [self._sum()]
    while self._peek() == ":":
      self._take()
      items.append(self._sum())
    return items[0] if len(items) == 1 else ("ratio", items)

  # --- arithmetic -----------------------------------------------------------

  def _sum(self) -> Node:
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise Unreadable("nested too deep")
    terms = [self._signed(self._sign(), self._product())]
    while self._peek() in ("+", "-", "±"):
      terms.append(self._signed(self._take(), self._product()))
    self._depth -= 1
    return _fold("add", terms)

  def _sign(self) -> str:
    return self._take() if self._peek() in ("+", "-", "±") else ""

  @staticmethod
  def _signed(sign: str, node: Node) -> Node:
    if sign == "-":
      return ("neg", node)
    return ("pm", node) if sign == "±" else node

  def _product(self) -> Node:
    top, bottom = [self._power()], []
    while True:
      token = self._peek()
      if token in ("*", "/"):
        self._take()
        factor = self._signed(self._sign(), self._power())
        (top if token == "*" else bottom).append(factor)
      elif self._starts_factor():
        top.append(self._power())
      else:
        break
    # a / b * c is (a c) / b: division takes one factor.
    node = _fold("mul", top)
    return ("div", node, _fold("mul", bottom)) if bottom else node

  def _starts_factor(self) -> bool:
    token, kind = self._peek(), self._kind()
    if kind == "num":
      # "2 3" is not a product; "x 2" and ")2" are too odd to guess.
      raise Unreadable("a number after a value without an operator")
    if kind == "word" or token in ("(", "{"):
      return True
    if token == "|":
      return self._bars == 0
    return kind == "cmd" and token not in (
      "\\in",
      "\\cup",
      "\\setminus",
      "\\backslash",
      "\\}",
      "\\rfloor",
      "\\rceil",
      "\\end",
      "\\|",
    )

  def _power(self) -> Node:
    return self._postfix(self._primary())

  def _postfix(self, node: Node) -> Node:
    while True:
      token = self._peek()
      if token == "^":
        self._take()
        if self._peek() == "\\circ" or (
          self._peek() == "{"
          and self._peek(1) == "\\circ"
          and self._peek(2) == "}"
        ):
          self._at += 1 if self._peek() == "\\circ" else 3
          node = ("degree", node)
        else:
          node = ("pow", node, self._exponent())
      elif token == "!":
        self._take()
        if self._peek() == "!":
          raise Unreadable("a double factorial")
        node = ("fact", node)
      elif token == "%":
        self._take()
        node = ("percent", node)
      elif token == "\\degree":
        self._take()
        node = ("degree", node)
      elif token == "_" and node[0] == "num" and node[2] is None:
        self._take()
        base = self._argument()
        if base[0] != "num" or base[1].denominator != 1:
          raise Unreadable("a subscript that is no base")
        node = ("base", str(node[1]), int(base[1]))
      else:
        return node


def _fold(kind: str, items: list[Node]) -> Node:
  """A balanced tree of a sum or product: deep ones would end the stack."""
  while len(items) > 1:
    pairs = [(kind, a, b) for a, b in zip(items[::2], items[1::2])]
    items = pairs + items[len(items) & ~1 :]
  return items[0]


def parse(text: str) -> Node:
  """The tree of one answer that `latex_clean.clean` has prepared.

  Raises:
    Unreadable: the text is longer than MAX_CHARS or outside the grammar.
  """
  if len(text) > MAX_CHARS:
    raise Unreadable(f"longer than {MAX_CHARS} characters")
  tokens = tokenize(text)
  if not tokens:
    raise Unreadable("empty")
  return _Parser(tokens).answer()


def read(text: str) -> Node:
  """`parse` of a raw answer."""
  return parse(clean(text))
