"""Optimised HLO text as data: computations of instructions.

Only what a cost model needs is kept: names, result arrays with their memory
space, operands, the computations an instruction calls, and its attributes as
text. The grammar is that of `Compiled.as_text()`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

BYTES = {
    "pred": 1, "s2": .25, "u2": .25, "s4": .5, "u4": .5, "s8": 1, "u8": 1,
    "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2,
    "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1,
    "f8e5m2": 1, "f8e4m3b11fnuz": 1, "f8e4m3": 1, "token": 0,
}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](?:\{([^{}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
  """A result: "bf16", dimensions, and the memory space (0 = HBM)."""

  dtype: str
  shape: tuple[int, ...]
  space: int = 0

  @property
  def size(self) -> int:
    """Bytes, padding apart."""
    return math.ceil(math.prod(self.shape) * BYTES[self.dtype])


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line.

  Attributes:
    name, op: "fusion.3", "fusion".
    arrays: results; several for a tuple.
    operands: names.
    literal: text between the brackets (of a constant or a parameter).
    attributes: text behind them.
    root: whether it is the computation's result.
  """

  name: str
  op: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  literal: str
  attributes: str
  root: bool

  def called(self, *roles: str) -> list[str]:
    """Computations under attributes such as "calls", "body", "condition"."""
    found = []
    for role in roles:
      for one, many in re.findall(
          rf"\b{role}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.attributes):
        found += [one] if one else _NAME.findall(many)
    return found

  def number(self, pattern: str) -> int | None:
    """The number that a pattern with one group finds in the attributes."""
    found = re.search(pattern, self.attributes)
    return int(found[1]) if found else None

  @functools.cached_property
  def hbm(self) -> int:
    """Bytes of the results that live in HBM."""
    return sum(a.size for a in self.arrays if a.space == 0)

  @property
  def scope(self) -> str:
    """Where it comes from: the last parts of the traced name."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else self.op


# Computations that an instruction runs, other than a reduction's operator.
_BODIES = ("body", "condition", "calls", "branch_computations",
           "true_computation", "false_computation")


@dataclasses.dataclass(frozen=True)
class Module:
  """A program: instructions by computation, and the entry's name."""

  computations: dict[str, list[Instruction]]
  entry: str

  @functools.cached_property
  def by_name(self) -> dict[str, dict[str, Instruction]]:
    return {name: {i.name: i for i in lines}
            for name, lines in self.computations.items()}

  def arrays(self) -> set[Array]:
    """Every distinct array that is held in HBM.

    What a fusion makes on the way to its result is not: it stays in registers
    and VMEM.
    """
    found, seen, todo = set(), set(), [self.entry]
    while todo:
      name = todo.pop()
      if name in seen:
        continue
      seen.add(name)
      for line in self.computations[name]:
        found.update(a for a in line.arrays if a.space == 0)
        if line.op != "fusion":
          todo += line.called(*_BODIES)
        if line.op == "call":
          todo += line.called("to_apply")
    return found


def arrays_of(text: str) -> tuple[Array, ...]:
  """Arrays in a type, "(f32[2,3]{1,0:T(8,128)S(1)}, s32[])"."""
  found = []
  for dtype, dims, layout in _ARRAY.findall(text):
    if dtype in BYTES:
      space = re.search(r"S\((\d+)\)", layout)
      found.append(Array(dtype, tuple(int(d) for d in dims.split(",") if d),
                         int(space[1]) if space else 0))
  return tuple(found)


def _closing(text: str) -> int:
  """Index of the bracket that closes the one before text[0]."""
  depth = 1
  for i, c in enumerate(text):
    depth += (c == "(") - (c == ")")
    if depth == 0:
      return i
  return len(text)


def _instruction(line: str) -> Instruction | None:
  line = line.strip()
  root = line.startswith("ROOT ")
  name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
  if not equals:
    return None
  if rest.startswith("("):
    end = _closing(rest[1:]) + 2
    kind, rest = rest[:end], rest[end + 1:]
  else:
    kind, _, rest = rest.partition(" ")
  op, _, rest = rest.partition("(")
  end = _closing(rest)
  inside = rest[:end]
  return Instruction(
      name.removeprefix("%"), op, arrays_of(kind),
      tuple(_NAME.findall(inside)), inside, rest[end + 1:], root)


def parse(text: str) -> Module:
  """The module of `Compiled.as_text()`.

  Raises:
    ValueError: no entry computation in it.
  """
  computations: dict[str, list[Instruction]] = {}
  current, entry = None, None
  for line in text.splitlines():
    if current is None:
      head = _HEAD.match(line)
      if head:
        current = computations.setdefault(head[2], [])
        entry = head[2] if head[1] else entry
    elif line.startswith("}"):
      current = None
    else:
      made = _instruction(line)
      if made is not None:
        current.append(made)
  if entry is None:
    raise ValueError("no ENTRY computation: not the text of an HLO module")
  return Module(computations, entry)
