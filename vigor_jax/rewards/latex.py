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

import re
from fractions import Fraction
from typing import Any

from vigor_jax.rewards.latex_clean import clean

MAX_CHARS = 4000
_MAX_DEPTH = 80

Node = tuple[Any, ...]

FUNCTIONS = (
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan",
    "cot", "sec", "csc", "log", "ln", "lg", "exp",
)
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota"
    " kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega"
    " Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell".split()
)
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=",
    "\\in": "in",
}
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


class _Tok:
  """One token; `gap` when white space stands before it."""

  __slots__ = ("kind", "text", "gap")

  def __init__(self, kind: str, text: str, gap: bool) -> None:
    self.kind, self.text, self.gap = kind, text, gap


def _tokenize(text: str) -> list[_Tok]:
  tokens: list[_Tok] = []
  at = 0
  gap = False
  while at < len(text):
    space = _SPACE.match(text, at)
    if space:
      at, gap = space.end(), True
      continue
    match = _TOKEN.match(text, at)
    if not match:
      raise Unreadable(f"unexpected {text[at:at + 8]!r}")
    tokens.append(_Tok(match.lastgroup, match[0], gap))
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


class _Parser:
  """Recursive descent over the token list."""

  def __init__(self, tokens: list[_Tok]) -> None:
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
        "\\in", "\\cup", "\\setminus", "\\backslash", "\\}", "\\rfloor", "\\rceil", "\\end", "\\|",
    )

  def _power(self) -> Node:
    return self._postfix(self._primary())

  def _postfix(self, node: Node) -> Node:
    while True:
      token = self._peek()
      if token == "^":
        self._take()
        if self._peek() == "\\circ" or (
            self._peek() == "{" and self._peek(1) == "\\circ"
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

  def _exponent(self) -> Node:
    sign = self._sign()
    if sign == "±":
      raise Unreadable("plus or minus in an exponent")
    if self._kind() == "num":
      node = number(self._take())
    elif self._peek() == "(":
      node = self._primary()
    else:
      node = self._argument()
    if self._peek() == "^":  # 2^3^2 is 2^(3^2).
      self._take()
      node = ("pow", node, self._exponent())
    return self._signed(sign, node)

  def _argument(self) -> Node:
    r"""What \frac, \sqrt or _ takes: a group, one digit, or one symbol."""
    if self._peek() == "{":
      return self._group("{", "}")
    if self._kind() == "num":
      token = self._tokens[self._at]
      if token.text.isdigit() and len(token.text) > 1:
        # \frac12 is one half: take a digit, leave the rest.
        digit, rest = token.text[0], token.text[1:]
        self._tokens[self._at] = _Tok("num", rest, False)
        return number(digit)
      return number(self._take())
    if self._kind() == "word" and len(self._peek()) > 1:
      token = self._tokens[self._at]
      if token.text not in FUNCTIONS and token.text not in ("pi", "sqrt"):
        self._tokens[self._at] = _Tok("word", token.text[1:], False)
        return _symbol(token.text[0])
    return self._primary()

  def _group(self, opening: str, closing: str) -> Node:
    self._take(opening)
    bars, self._bars = self._bars, 0
    node = self._items(end=closing)
    self._bars = bars
    self._take(closing)
    return node

  # --- primaries ------------------------------------------------------------

  def _primary(self) -> Node:
    token, kind = self._peek(), self._kind()
    if kind == "num":
      return self._number()
    if kind == "word":
      return self._word()
    if token in ("(", "["):
      return self._bracket()
    if token == "{":
      node = self._group("{", "}")
      # Plain braces with commas are a set; one value in braces is itself.
      return ("set", node[1]) if node[0] == "list" else node
    if token == "\\{":
      self._take()
      if self._peek() == "\\}":
        self._take()
        return ("set", [])
      node = self._items(end="\\}")
      self._take("\\}")
      return ("set", node[1] if node[0] == "list" else [node])
    if token in ("|", "\\|"):
      return self._absolute(token)
    if kind == "cmd":
      return self._command()
    raise Unreadable(f"unexpected {token!r}")

  def _number(self) -> Node:
    text = self._take()
    node = number(text)
    if not text.isdigit():
      return node
    if self._peek() in ("\\frac",):
      save = self._at
      self._take()
      top, bottom = self._argument(), self._argument()
      if _is_integer(top) and _is_integer(bottom):
        return self._mixed(node, top, bottom)
      self._at = save
    elif (
        self._kind() == "num" and self._gap()
        and self._peek(1) == "/" and self._kind(2) == "num"
    ):
      top, _, bottom = self._take(), self._take(), self._take()
      return self._mixed(node, number(top), number(bottom))
    return node

  @staticmethod
  def _mixed(whole: Node, top: Node, bottom: Node) -> Node:
    if not (
        _is_integer(top) and _is_integer(bottom) and 0 < top[1] < bottom[1]
    ):
      raise Unreadable("an improper fraction after a whole number")
    return ("num", whole[1] + top[1] / bottom[1], None)

  def _word(self) -> Node:
    token = self._tokens[self._at]
    text = token.text
    if text in ("infinity", "infty"):
      self._take()
      return ("const", "inf")
    if text == "pi":
      self._take()
      return ("const", "pi")
    for name in ("sqrt", *FUNCTIONS):
      if text.startswith(name):
        rest = text[len(name) :]
        if rest:
          self._tokens[self._at] = _Tok("word", rest, False)
        else:
          self._take()
        if name == "sqrt":
          return ("root", self._argument(), ("num", Fraction(2), None))
        return self._function(name)
    # "xy" is x times y: the first letter now, the rest as the next factor.
    if len(text) > 1:
      self._tokens[self._at] = _Tok("word", text[1:], False)
      return _symbol(text[0])
    self._take()
    return self._decorated(text)

  def _decorated(self, name: str) -> Node:
    """A symbol with its subscript and primes."""
    subscript = ""
    if self._peek() == "_":
      self._take()
      if self._peek() == "{":
        depth = 0
        parts = []
        while True:
          part = self._take()
          depth += (part == "{") - (part == "}")
          parts.append(part)
          if depth == 0:
            break
        subscript = "".join(parts[1:-1])
      else:
        subscript = self._take()
    primes = 0
    while self._peek() == "'":
      self._take()
      primes += 1
    if not subscript and not primes:
      return _symbol(name)
    return ("sym", f"{name}_{subscript}" + "'" * primes)

  def _bracket(self) -> Node:
    opening = self._take("(", "[")
    bars, self._bars = self._bars, 0
    node = self._items(end="")
    self._bars = bars
    closing = self._take(")", "]")
    if node[0] == "list":
      return ("tuple", opening, closing, node[1])
    if (opening, closing) not in (("(", ")"), ("[", "]")):
      raise Unreadable("brackets that do not match")
    return node

  def _absolute(self, token: str) -> Node:
    self._take()
    self._bars += 1
    node = self._sum()
    self._bars -= 1
    self._take(token)
    return ("func", "abs", node)

  def _command(self) -> Node:
    token = self._take()
    name = token[1:]
    if name == "frac":
      return ("div", self._argument(), self._argument())
    if name == "sqrt":
      index = ("num", Fraction(2), None)
      if self._peek() == "[":
        index = self._group("[", "]")
      return ("root", self._argument(), index)
    if name == "binom":
      return ("binom", self._argument(), self._argument())
    if name in ("pi", "infty"):
      return ("const", "inf" if name == "infty" else "pi")
    if name in FUNCTIONS:
      return self._function(name)
    if name in _GREEK:
      return self._decorated(name)
    if name in ("emptyset", "varnothing"):
      return ("set", [])
    if name in ("lfloor", "lceil"):
      node = self._sum()
      self._take("\\r" + name[1:])
      return ("func", name[1:], node)
    if name == "begin":
      return self._matrix()
    raise UnknownCommand(f"unknown command {token}")

  def _function(self, name: str) -> Node:
    power = base = None
    for _ in range(2):
      if self._peek() == "^" and power is None:
        self._take()
        power = self._exponent()
      elif self._peek() == "_" and base is None and name == "log":
        self._take()
        base = self._argument()
    minus_one = ("neg", ("num", Fraction(1), None))
    if power == minus_one and name in _INVERSE:
      name, power = _INVERSE[name], None
    if self._peek() in ("(", "{", "|"):
      argument = self._primary()
      if self._peek() == "!":
        raise Unreadable("an ambiguous factorial")
    else:
      argument = self._function_argument()
    if argument[0] in ("list", "tuple", "set"):
      raise Unreadable("a function of several arguments")
    if name == "log":
      node = ("log", base, argument)
    elif name == "lg":
      node = ("log", ("num", Fraction(10), None), argument)
    else:
      node = ("func", name, argument)
    return node if power is None else ("pow", node, power)

  def _function_argument(self) -> Node:
    r"""\sin 2x \cos x is sin(2x) cos x: factors up to the next function."""
    sign = self._sign()
    node = self._power()
    while self._starts_argument():
      node = ("mul", node, self._power())
    if self._peek() == "/" and self._kind(1) == "num":
      self._take()
      node = ("div", node, self._power())
    return self._signed(sign, node)

  def _starts_argument(self) -> bool:
    token = self._peek()
    if self._kind() == "word":
      return not token.startswith(FUNCTIONS)
    return token in ("\\pi", "\\frac", "\\sqrt") or (
        token[:1] == "\\" and token[1:] in _GREEK
    )

  def _matrix(self) -> Node:
    kind = self._environment()
    if kind == "array" and self._peek() == "{":
      while self._take() != "}":  # Column specification.
        pass
    if kind in ("cases", "aligned", "gathered"):
      return self._cases(kind)
    if kind not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array"):
      raise UnknownCommand(f"environment {kind}")
    rows: list[list[Node]] = [[]]
    while self._peek() != "\\end":
      rows[-1].append(self._relation())
      separator = self._peek()
      if separator == "&":
        self._take()
      elif separator == "\\\\":
        self._take()
        if self._peek() != "\\end":
          rows.append([])
    self._take("\\end")
    if self._environment() != kind:
      raise Unreadable("an environment that does not close")
    if len({len(row) for row in rows}) != 1:
      raise Unreadable("rows of different length")
    return ("matrix", rows)

  def _cases(self, kind: str) -> Node:
    """Equations one below the other, as a list; no piecewise functions."""
    items = [self._relation()]
    while self._peek() in ("\\\\", ","):
      self._take()
      if self._peek() not in ("\\\\", "\\end"):
        items.append(self._relation())
    self._take("\\end")
    if self._environment() != kind:
      raise Unreadable("an environment that does not close")
    return ("list", items, False)

  def _environment(self) -> str:
    self._take("{")
    name = self._take()
    self._take("}")
    return name


def _fold(kind: str, items: list[Node]) -> Node:
  """A balanced tree of a sum or product: deep ones would end the stack."""
  while len(items) > 1:
    pairs = [(kind, a, b) for a, b in zip(items[::2], items[1::2])]
    items = pairs + items[len(items) & ~1 :]
  return items[0]


def _symbol(name: str) -> Node:
  return ("const", name) if name in ("e", "i") else ("sym", name)


def _is_integer(node: Node) -> bool:
  return node[0] == "num" and node[2] is None and node[1].denominator == 1


def parse(text: str) -> Node:
  """The tree of one answer that `latex_clean.clean` has prepared.

  Raises:
    Unreadable: the text is longer than MAX_CHARS or outside the grammar.
  """
  if len(text) > MAX_CHARS:
    raise Unreadable(f"longer than {MAX_CHARS} characters")
  tokens = _tokenize(text)
  if not tokens:
    raise Unreadable("empty")
  return _Parser(tokens).answer()


def read(text: str) -> Node:
  """`parse` of a raw answer."""
  return parse(clean(text))
