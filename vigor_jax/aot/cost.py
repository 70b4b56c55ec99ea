"""What a compiled program moves: HBM bytes, wire bytes, cycles; and FLOPs.

The compiler's own cost analysis counts a loop's body once, so the text of the
program is walked here with trip counts. FLOPs are counted in the jaxpr, before
the compiler rewrites products. Loops whose count is data (decode steps,
micro-batches) take the caller's `trips`, outermost first.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vigor_jax.aot import hlo

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all",
               "ragged-all-to-all", "collective-permute")
# No bytes of their own: names, views, and the ends of asynchronous pairs.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant",
         "after-all", "partition-id", "replica-id", "optimization-barrier",
         "iota"}
# Of a loop, or of several by their scopes.
Trips = int | Mapping[str, int]
_VIEWS = ("bitcast", "convert", "copy", "reshape")


@dataclasses.dataclass
class Cost:
  """Of one run of a program on one chip.

  Attributes:
    hbm_bytes: read and written, counting what a slice touches.
    wire_bytes, wire_counts: by kind of collective; bytes that leave a chip.
    cycles: the compiler's estimates, summed; 0 where it gives none.
    loops: (name of the body, trips).
    assumed: loops whose trips were the caller's.
    scopes: HBM bytes by traced name.
  """

  hbm_bytes: float = 0.0
  cycles: float = 0.0
  wire_bytes: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  wire_counts: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  loops: list[tuple[str, int]] = dataclasses.field(default_factory=list)
  assumed: int = 0
  scopes: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)

  @property
  def wire_total(self) -> float:
    return float(sum(self.wire_bytes.values()))


def of_text(text: str, devices: int, trips: Sequence[Trips] = (),
            rare: Sequence[str] = ()) -> Cost:
  """Cost of a compiled program.

  Args:
    text: `Compiled.as_text()`.
    devices: of the program; the size of a group that names none.
    trips: counts of nested loops that do not say theirs; the last is used
      for deeper ones, 1 when empty. Where loops of one depth differ: their
      counts by scope.
    rare: scopes; a branch with one of them is not taken where there is
      another. Of the others the one with the most HBM bytes is.
  """
  return _Walk(hlo.parse(text), devices, trips, rare).run()


def _channel(line) -> tuple[int | None, int | None]:
  """Channel and chain that a collective names."""
  return (line.number(r"channel_id=(\d+)"),
          line.number(r'chain_id="(\d+)"'))


def _shared_channels(module: hlo.Module) -> set[int]:
  """Channels of collectives that differ."""
  seen, shared = {}, set()
  for lines in module.computations.values():
    for line in lines:
      if line.op.removesuffix("-start") in COLLECTIVES:
        channel, chain = _channel(line)
        what = line.op, tuple(a.shape for a in line.arrays), chain
        if seen.setdefault(channel, what) != what:
          shared.add(channel)
  return shared


def _count(trips: Sequence[Trips], depth: int, scope: str) -> int:
  """Trips of a loop that does not say them."""
  known = trips[min(depth, len(trips) - 1)]
  if not isinstance(known, Mapping):
    return known
  for name, count in known.items():
    if name in scope.split("/"):
      return count
  raise ValueError(f"a loop in none of the scopes {', '.join(known)}: {scope}")


class _Walk:

  def __init__(self, module: hlo.Module, devices: int, trips, rare=()):
    self.module, self.devices, self.rare = module, devices, tuple(rare)
    self.trips = tuple(trips) or (1,)
    self.cost = Cost()
    self._shared = _shared_channels(module)
    self._counted: set[tuple] = set()
    self._memo: dict[tuple[str, str, float], float] = {}

  def run(self) -> Cost:
    self._computation(self.module.entry, 1.0, 0)
    return self.cost

  def _computation(self, name: str, times: float, depth: int) -> None:
    for line in self.module.computations[name]:
      if line.op == "while":
        self._loop(line, times, depth)
      elif line.op == "conditional":
        branches = line.called("branch_computations", "true_computation",
                               "false_computation")
        self._computation(self._taken(branches, depth), times, depth)
      elif line.op == "call" or line.op == "async-start":
        for called in line.called("to_apply", "calls"):
          self._computation(called, times, depth)
      else:
        self._line(name, line, times)

  def _taken(self, branches: Sequence[str], depth: int) -> str:
    """The costliest branch that is not rare."""
    def is_rare(name):
      return any(f"/{scope}/" in line.scope for scope in self.rare
                 for line in self.module.computations[name])

    def size(name):
      kept, counted, self.cost = self.cost, set(self._counted), Cost()
      self._computation(name, 1.0, depth)
      size, self.cost, self._counted = self.cost.hbm_bytes, kept, counted
      return size

    usual = [name for name in branches if not is_rare(name)]
    return max(usual or branches, key=size)

  def _loop(self, line, times, depth) -> None:
    body, = line.called("body")
    condition, = line.called("condition")
    count = line.number(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
    if count is None:
      count = self._bound(condition)
    if count is None:
      count = _count(self.trips, depth, line.scope)
      self.cost.assumed += 1
      depth += 1
    self.cost.loops.append((body, count))
    self._computation(body, times * count, depth)

  def _bound(self, condition: str) -> int | None:
    """Trips of `i < constant` with i from 0; None when it is data."""
    lines = self.module.computations[condition]
    root = next(i for i in lines if i.root)
    if root.op == "fusion":
      inner = self.module.computations[root.called("calls")[0]]
      root_op = next(i for i in inner if i.root)
    else:
      root_op = root
    if root_op.op != "compare":
      return None
    constants = [int(i.literal) for i in lines if i.op == "constant"
                 and re.fullmatch(r"-?\d+", i.literal)]
    loads = [i for i in lines if i.op == "get-tuple-element"]
    # One counter against one constant; anything else is data.
    return max(constants) if constants and len(loads) == 1 else None

  def _line(self, computation: str, line: hlo.Instruction, times: float):
    self.cost.cycles += times * (
        line.number(r'estimated_cycles":"(\d+)"') or 0)
    self._wire(line, times, False, 0)
    if (line.op in _FREE or line.op.endswith("-done")
        or 'custom_call_target="AllocateBuffer"' in line.attributes):
      return
    bytes_ = times * self._bytes(computation, line)
    self.cost.hbm_bytes += bytes_
    self.cost.scopes[line.scope] += bytes_

  # ------------------------------------------------------------ collectives

  def _wire(self, line, times, scatters: bool, depth: int) -> None:
    """Adds a line's collectives, those inside fusions included."""
    kind = line.op.removesuffix("-start")
    if kind in COLLECTIVES:
      self._collective(kind, line, times, scatters)
    elif line.op in ("fusion", "custom-call") and depth < 6:
      for called in line.called("calls", "called_computations"):
        # TPUs spell a reduce-scatter as a fusion around an all-reduce.
        inner = scatters or "all-reduce-scatter" in called
        for nested in self.module.computations.get(called, ()):
          self._wire(nested, times, inner, depth + 1)

  def _collective(self, kind, line, times, scatters) -> None:
    sizes = [a.size for a in line.arrays if a.size > 64]
    key = self._identity(line)
    if not sizes or key in self._counted:
      return
    self._counted.add(key)
    # An asynchronous start returns its operands beside its results.
    started = line.op.endswith("-start") and len(sizes) > 1
    size = max(sizes) if started else sum(sizes)
    group = self._group(line)
    others = (group - 1) / group if group else 0.0
    if kind == "all-reduce" and scatters:
      kind, wire = "reduce-scatter", size * others
    elif kind == "all-reduce":
      wire = 2 * size * others
    elif kind == "reduce-scatter":
      wire = size * (group - 1)
    elif kind == "collective-permute":
      wire = size
    else:
      wire = size * others
    self.cost.wire_bytes[kind] += times * wire
    self.cost.wire_counts[kind] += times

  def _identity(self, line) -> tuple:
    """The same for all lines that are parts of one collective.

    One that is spread over several fusions names its chain in each; one that
    is repeated in clones, its channel. Those written by hand (shard_map) all
    have channel 1.
    """
    channel, chain = _channel(line)
    if chain is not None:
      return "chain", channel, chain
    if channel is None or channel in self._shared:
      return "line", line.name
    return "channel", channel

  def _group(self, line) -> int:
    """Chips that take part together."""
    listed = re.search(r"replica_groups=\[\d+,(\d+)\]", line.attributes)
    if listed:
      return int(listed[1])
    mesh = re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}",
                     line.attributes)
    if mesh:
      sizes = dict(re.findall(r"'([\w.]+)'=(\d+)", mesh[1]))
      return math.prod(int(sizes.get(axis, 1))
                       for axis in re.findall(r"'([\w.]+)'", mesh[2]))
    sets = re.search(r"replica_groups=\{\{([\d,]+)\}", line.attributes)
    return len(sets[1].split(",")) if sets else self.devices

  # ------------------------------------------------------------------ bytes

  def _bytes(self, computation: str, line: hlo.Instruction) -> float:
    known = self.module.by_name[computation]
    operands = [known[n] for n in line.operands if n in known]
    if line.op in ("copy-start", "slice-start"):
      ends = line.arrays[:2]
      return min(a.size for a in ends) * sum(a.space == 0 for a in ends)
    if line.op == "fusion":
      return self._fusion(line, operands)
    if line.op == "dynamic-update-slice":
      return 2 * operands[1].hbm if len(operands) > 1 else 0
    if line.op in ("dynamic-slice", "slice", "gather"):
      return 2 * line.hbm
    return line.hbm + sum(o.hbm for o in operands)

  def _fusion(self, line, operands) -> float:
    """What a fusion reads of each operand, and what it writes."""
    called = line.called("calls")[0]
    inner = self.module.computations[called]
    known = self.module.by_name[called]
    root = next(i for i in inner if i.root)
    results = [root] if root.op != "tuple" else [
        known[n] for n in root.operands]
    written, in_place = line.hbm, set()
    for result in results:
      update = self._through(result, known)
      if update.op == "dynamic-update-slice":
        # Written where it lies: only the slice moves.
        piece = known[update.operands[1]]
        written -= max(0, result.hbm - sum(a.size for a in piece.arrays))
        in_place.add(self._through(known[update.operands[0]], known).name)
    parameters = {int(i.literal): i for i in inner if i.op == "parameter"}
    read = 0.0
    for position, operand in enumerate(operands):
      parameter = parameters.get(position)
      if parameter is not None and parameter.name not in in_place:
        read += min(operand.hbm,
                    self._touched(called, parameter.name, operand.hbm, 0))
    return read + max(0.0, written)

  def _through(self, line, known):
    while line.op in _VIEWS and line.operands and line.operands[0] in known:
      line = known[line.operands[0]]
    return line

  def _touched(self, computation: str, name: str, full: float, depth: int
               ) -> float:
    """Bytes of a value that a computation reads, `full` at most."""
    key = computation, name, full
    if key not in self._memo:
      self._memo[key] = self._reads(computation, name, full, depth)
    return self._memo[key]

  def _reads(self, computation, name, full, depth) -> float:
    total = 0.0
    for line in self.module.computations[computation]:
      if name not in line.operands:
        continue
      first = line.operands[0] == name
      if line.op in ("dynamic-slice", "slice", "gather") and first:
        total += sum(a.size for a in line.arrays)
      elif line.op in ("bitcast", "reshape"):
        total += self._touched(computation, line.name, full, depth)
      elif line.op == "dynamic-update-slice" and first:
        pass
      elif line.op == "fusion" and depth < 8:
        called = line.called("calls")[0]
        known = self.module.by_name[called]
        root = next(i for i in known.values() if i.root)
        if self._through(root, known).op == "parameter":
          # Another view of it: what counts is who reads that.
          total += self._touched(computation, line.name, full, depth)
          continue
        inner = {int(i.literal): i.name for i in
                 self.module.computations[called] if i.op == "parameter"}
        total += sum(self._touched(called, inner[k], full, depth + 1)
                     for k, n in enumerate(line.operands) if n == name)
      elif line.op not in ("tuple", "get-tuple-element"):
        total += full
    return min(total, full)


# ------------------------------------------------------------------- FLOPs


def flops(jaxpr: Any, trips: Sequence[Trips] = (), _depth: int = 0) -> float:
  """Operations of the matrix products in a jaxpr, all devices together.

  A multiplication and an addition are two. Scans count their length, a
  `while` the caller's trips as in `of_text`, a `cond` its largest branch.
  """
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  total = 0.0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      shape = eqn.invars[0].aval.shape
      total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(
          shape[i] for i in contracted)
      continue
    if name == "while":
      times = _count(tuple(trips) or (1,), _depth,
                     str(eqn.source_info.name_stack))
      total += times * flops(eqn.params["body_jaxpr"], trips, _depth + 1)
      continue
    inner = [flops(j, trips, _depth) for v in eqn.params.values()
             for j in (v if isinstance(v, (tuple, list)) else [v])
             if hasattr(getattr(j, "jaxpr", j), "eqns")]
    if name == "cond":
      total += max(inner, default=0.0)
    elif name == "scan":
      total += eqn.params["length"] * sum(inner)
    elif name == "shard_map":
      total += eqn.params["mesh"].size * sum(inner)
    else:
      total += sum(inner)
  return total
