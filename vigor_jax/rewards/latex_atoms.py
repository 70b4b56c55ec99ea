"""The parts of an answer that operators join: numbers, names, groups."""

from __future__ import annotations

from fractions import Fraction

from vigor_jax.rewards.latex_tokens import (
  Cursor,
  Node,
  Token,
  UnknownCommand,
  Unreadable,
  number,
)

FUNCTIONS = (
  "arcsin",
  "arccos",
  "arctan",
  "sinh",
  "cosh",
  "tanh",
  "sin",
  "cos",
  "tan",
  "cot",
  "sec",
  "csc",
  "log",
  "ln",
  "lg",
  "exp",
)
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = frozenset(
  "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota"
  " kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega"
  " Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell".split()
)


class Atoms(Cursor):
  """What `latex` parses below the level of powers.

  The levels above (`_sum`, `_power`, `_items`, `_relation`) are the subclass's.
  """

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
        self._tokens[self._at] = Token("num", rest, False)
        return number(digit)
      return number(self._take())
    if self._kind() == "word" and len(self._peek()) > 1:
      token = self._tokens[self._at]
      if token.text not in FUNCTIONS and token.text not in ("pi", "sqrt"):
        self._tokens[self._at] = Token("word", token.text[1:], False)
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
      self._kind() == "num"
      and self._gap()
      and self._peek(1) == "/"
      and self._kind(2) == "num"
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
          self._tokens[self._at] = Token("word", rest, False)
        else:
          self._take()
        if name == "sqrt":
          return ("root", self._argument(), ("num", Fraction(2), None))
        return self._function(name)
    # "xy" is x times y: the first letter now, the rest as the next factor.
    if len(text) > 1:
      self._tokens[self._at] = Token("word", text[1:], False)
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


def _symbol(name: str) -> Node:
  return ("const", name) if name in ("e", "i") else ("sym", name)


def _is_integer(node: Node) -> bool:
  return node[0] == "num" and node[2] is None and node[1].denominator == 1
