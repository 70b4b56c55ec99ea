"""When two parsed answers say the same: lists, pairs, intervals, equations."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from vigor_jax.rewards import equality
from vigor_jax.rewards import evaluate
from vigor_jax.rewards.latex import Node

_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_SCALARS = frozenset(
  (
    "num",
    "sym",
    "const",
    "add",
    "mul",
    "div",
    "pow",
    "neg",
    "func",
    "log",
    "root",
    "fact",
    "binom",
    "percent",
    "degree",
    "base",
  )
)


def _expand_signs(node, sign: str):
  """The tree with every plus-or-minus taken as `sign`."""
  if isinstance(node, tuple):
    if node and node[0] == "pm":
      inner = _expand_signs(node[1], sign)
      return ("neg", inner) if sign == "-" else inner
    return tuple(_expand_signs(child, sign) for child in node)
  if isinstance(node, list):
    return [_expand_signs(child, sign) for child in node]
  return node


def _has(node, kind: str) -> bool:
  if isinstance(node, tuple):
    return bool(node) and (
      node[0] == kind or any(_has(child, kind) for child in node)
    )
  return isinstance(node, list) and any(_has(child, kind) for child in node)


def _is_equation(node: Node) -> bool:
  return node[0] == "rel" and all(op == "=" for op in node[1][1::2])


def _named(node: Node) -> str | None:
  """The symbol of "x = value", or None."""
  if _is_equation(node) and len(node[1]) == 3 and node[1][0][0] == "sym":
    return node[1][0][1]
  return None


def normal(node: Node) -> Node:
  """One form for what is written in several: see the comments."""
  if _has(node, "pm"):
    # "3 pm 1" is the two values, "x = 3 pm 1" the two equations.
    node = ("list", [_expand_signs(node, s) for s in "+-"], True)
  if node[0] == "list":
    items = []
    for item in map(normal, node[1]):
      items.extend(item[1] if item[0] == "list" else [item])
    names = [_named(item) for item in items]
    if names[0] is not None and not any(names[1:]):
      # "n = 1, 2, 3" is three values of n.
      if all(item[0] in _SCALARS for item in items[1:]):
        items = [items[0][1][2], *items[1:]]
    elif names[0] is not None and len(set(names)) == 1:
      items = [item[1][2] for item in items]
    return ("list", items, node[2])
  if node[0] == "set":
    items = [normal(item) for item in node[1]]
    return items[0] if len(items) == 1 else ("set", items)
  if node[0] == "rel":
    parts = node[1]
    if parts[1:2] == ["in"] and len(parts) == 3:
      return normal(parts[2])
    if _is_equation(node):
      # "x = 2 + 3 = 5" says x = 5; "5 = x" says x = 5.
      left, right = parts[0], parts[-1]
      if right[0] == "sym" and left[0] != "sym":
        left, right = right, left
      return ("rel", [left, "=", normal(right)])
  return node


# --- intervals ---------------------------------------------------------------


def _intervals(node: Node) -> tuple[str | None, list[tuple]] | None:
  """(variable, [(low, closed, high, closed)]) of an interval or inequality."""
  infinity = ("const", "inf")
  if node[0] == "tuple" and len(node[3]) == 2:
    low, high = node[3]
    return None, [(low, node[1] == "[", high, node[2] == "]")]
  if node == ("sym", "R"):
    return None, [(("neg", infinity), False, infinity, False)]
  if node[0] == "without":
    return _reals_without(node)
  if node[0] == "union":
    pieces: list[tuple] = []
    for item in node[1]:
      found = _intervals(normal(item))
      if found is None:
        return None
      pieces.extend(found[1])
    return None, pieces
  if node[0] == "rel":
    parts = list(node[1])
    ops = parts[1::2]
    if ops == ["!="] and parts[0][0] == "sym":
      found = _reals_without(("without", ("sym", "R"), ("set", [parts[2]])))
      return found and (parts[0][1], found[1])
    if any(op not in ("<", "<=", ">", ">=") for op in ops):
      return None
    if ops[0] in (">", ">="):  # Turn it round: all signs point one way.
      parts = [
        _MIRROR.get(p, p) if isinstance(p, str) else p for p in reversed(parts)
      ]
      ops = parts[1::2]
    if any(op not in ("<", "<=") for op in ops):
      return None
    if len(parts) == 3:
      if parts[2][0] == "sym" and not evaluate.free_symbols(parts[0]):
        return parts[2][1], [(parts[0], ops[0] == "<=", infinity, False)]
      if parts[0][0] == "sym" and not evaluate.free_symbols(parts[2]):
        low = ("neg", infinity)
        return parts[0][1], [(low, False, parts[2], ops[0] == "<=")]
    if len(parts) == 5 and parts[2][0] == "sym":
      piece = (parts[0], ops[0] == "<=", parts[4], ops[1] == "<=")
      return parts[2][1], [piece]
    return None
  if node[0] == "list":
    found = [_intervals(item) for item in node[1]]
    if None in found or len({name for name, _ in found}) != 1:
      return None
    name = found[0][0]
    pieces = [piece for _, part in found for piece in part]
    if node[2]:  # "x < 1 or x > 3"
      return name, pieces
    if name is not None and len(pieces) == 2:  # "x > 1 and x < 3"
      lows = [p for p in pieces if not equality._infinity(p[0])]
      highs = [p for p in pieces if not equality._infinity(p[2])]
      if len(lows) == len(highs) == 1 and lows[0] is not highs[0]:
        return name, [(lows[0][0], lows[0][1], highs[0][2], highs[0][3])]
  return None


def _reals_without(node: Node) -> tuple[str | None, list[tuple]] | None:
  r"""The real line without some points: \mathbb{R} \setminus \{0, 1\}."""
  infinity = ("const", "inf")
  whole = _intervals(normal(node[1]))
  if whole is None or len(whole[1]) != 1:
    return None
  ends = whole[1][0][0], whole[1][0][2]
  if ends != (("neg", infinity), infinity):
    return None
  points = node[2][1] if node[2][0] == "set" else [node[2]]
  try:
    points = sorted(points, key=evaluate.exact)
  except ValueError:  # Points that cannot be ordered exactly.
    return None
  edges = [("neg", infinity), *points, infinity]
  return None, [(a, False, b, False) for a, b in zip(edges, edges[1:])]


def _same_intervals(a, b) -> bool:
  def alike(x, y):
    return (
      x[1] == y[1]
      and x[3] == y[3]
      and equality.same(x[0], y[0])
      and equality.same(x[2], y[2])
    )

  names = {a[0], b[0]} - {None}
  return len(names) <= 1 and _match_all(a[1], b[1], alike)


# --- collections -------------------------------------------------------------


def _match_all(a: list[Any], b: list[Any], alike) -> bool:
  """The items pair off, in any order (alike is an equivalence)."""
  if len(a) != len(b) or len(a) > 64:
    return False
  rest = list(b)
  for item in a:
    for i, other in enumerate(rest):
      if alike(item, other):
        del rest[i]
        break
    else:
      return False
  return True


def _distinct(items: list[Node]) -> list[Node]:
  out: list[Node] = []
  for item in items[:64]:
    if not any(equivalent(item, other) for other in out):
      out.append(item)
  return out if len(items) <= 64 else items


def _as_point(node: Node) -> list[Node] | None:
  """(x, y) out of "x = 1, y = 2", in the order of the names."""
  if node[0] == "list":
    names = [_named(item) for item in node[1]]
    if None not in names and len(set(names)) == len(names):
      return [item[1][2] for _, item in sorted(zip(names, node[1]))]
  return None


def _sequence(node: Node) -> list[Node] | None:
  """Items in order, of a tuple, a list without names, or a vector."""
  if node[0] == "tuple":
    return node[3]
  if node[0] == "list":
    return _as_point(node) or node[1]
  if node[0] == "matrix":
    rows = node[1]
    if len(rows) == 1:
      return rows[0]
    if len(rows[0]) == 1:
      return [row[0] for row in rows]
  return None


def _same_order(a: list[Node], b: list[Node]) -> bool:
  return len(a) == len(b) and all(map(equivalent, a, b))


# --- relations ---------------------------------------------------------------


def _difference(relation: Node) -> Node:
  return ("add", relation[1][0], ("neg", relation[1][2]))


def _same_relation(a: Node, b: Node) -> bool:
  if len(a[1]) != 3 or len(b[1]) != 3:
    return len(a[1]) == len(b[1]) and all(
      x == y if isinstance(x, str) else equivalent(x, y)
      for x, y in zip(a[1], b[1])
    )
  op_a, op_b = a[1][1], b[1][1]
  sides = (a[1][0], a[1][2], b[1][0], b[1][2])
  if op_a == op_b and equivalent(sides[0], sides[2]):
    if equivalent(sides[1], sides[3]):
      return True
  if any(side[0] not in _SCALARS for side in sides):
    return False
  sign = equality.proportional(_difference(a), _difference(b))
  if not sign:
    return False
  return op_a == (op_b if sign > 0 else _MIRROR.get(op_b))


def _is_label(node: Node) -> bool:
  """What a result is given a name by: x, f(x), P(A), |AB|, sin A."""
  if node[0] == "sym":
    return True
  if node[0] == "mul":
    return _is_label(node[1]) and (
      node[2][0] in ("tuple", "num") or _is_label(node[2])
    )
  return node[0] == "func" and bool(evaluate.free_symbols(node[2]))


def _value_of(node: Node) -> Node | None:
  """The right side of an equation that names its left side."""
  if _is_equation(node):
    left, _, right = node[1]
    if _is_label(left):
      return right
    if not evaluate.free_symbols(left) and left[0] in _SCALARS:
      return right if equality.same(left, right) else None
  return None


# --- all together ------------------------------------------------------------


def _same_scalar(a: Node, b: Node) -> bool:
  if equality.same(a, b):
    return True
  for x, y in ((a, b), (b, a)):
    if x[0] == "percent" and y[0] != "percent":
      # The sign is a unit that one side left out.
      return equality.same(x[1], y)
    if x[0] == "degree" and y[0] != "degree":
      right_angle = ("num", Fraction(180), None)
      radians = ("div", ("mul", x[1], ("const", "pi")), right_angle)
      return equality.same(radians, y)
  return False


def _same_ratio(a: Node, b: Node) -> bool:
  if a[0] == b[0] == "ratio":
    return _same_order(a[1], b[1])
  ratio, other = (a, b) if a[0] == "ratio" else (b, a)
  if len(ratio[1]) != 2 or other[0] not in _SCALARS:
    return False
  return equality.same(("div", *ratio[1]), other)


def equivalent(a: Node, b: Node) -> bool:
  """True when two answers are the same; symmetric.

  A list or a set has no order, a tuple has; (a, b) is a pair or an open
  interval, [a, b] a closed interval; an inequality in one variable is its
  interval; equations are equal when their solution sets are, up to a constant
  factor; "x = 5" is also the value 5.
  """
  a, b = normal(a), normal(b)
  if a == b:
    return True
  if a[0] in _SCALARS and b[0] in _SCALARS:
    return _same_scalar(a, b)
  if a[0] == "rel" and b[0] == "rel" and _same_relation(a, b):
    return True
  if a[0] != "rel" or b[0] != "rel":
    for x, y in ((a, b), (b, a)):
      if x[0] == "rel" and y[0] != "rel":
        value = _value_of(x)
        if value is not None:
          return equivalent(value, y)
  if a[0] == "ratio" or b[0] == "ratio":
    return _same_ratio(a, b)
  intervals = _intervals(a), _intervals(b)
  if None not in intervals:
    return _same_intervals(*intervals)
  kinds = {a[0], b[0]}
  if kinds <= {"list", "set"}:
    items_a, items_b = a[1], b[1]
    if "set" in kinds:
      items_a, items_b = _distinct(items_a), _distinct(items_b)
    return _match_all(items_a, items_b, equivalent)
  if kinds == {"matrix"}:
    return len(a[1]) == len(b[1]) and all(map(_same_order, a[1], b[1]))
  if kinds <= {"tuple", "list", "matrix"}:
    first, second = _sequence(a), _sequence(b)
    return (
      first is not None and second is not None and (_same_order(first, second))
    )
  return False
