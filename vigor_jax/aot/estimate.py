"""Compiles a plan's programs and says what they cost, what binds, what fits."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from vigor_jax.aot import chips
from vigor_jax.aot import cost as cost_lib
from vigor_jax.aot import hlo
from vigor_jax.aot import programs as programs_lib

GIB = chips.GIB
# XLA's rewriting of collectives around products into rings of small steps: on
# by default for TPUs, and slower for these programs in the compiler's model.
WINDOWED_OFF = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "100000"}
_TOO_MUCH = re.compile(
    r"([\d.]+)([KMGT]?)\)? exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    r"|Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass
class Result:
  """One compiled program, per chip; None where it did not compile.

  Attributes:
    name, unit, calls: see Program.
    fits: whether it compiled within the chip's memory.
    error: why not.
    arguments, temporary, peak: bytes, donated results counted once.
    alive: most bytes in use at once; what `peak` reserves has gaps.
    donated: bytes of the arguments in whose place results are written.
    flops, hbm_bytes, wire_bytes: of one call. wire: bytes by kind.
    compute_s, hbm_s, wire_s: each alone at the chip's peak.
    model_s: the compiler's own cycle estimates; 0 where it gives none.
    binds: the slowest of them.
    seconds: of one call, the slowest.
    compile_s: processor seconds that compiling took.
    biggest: largest arrays, as text.
  """

  name: str
  unit: str
  calls: float
  fits: bool
  error: str = ""
  arguments: float = 0.0
  temporary: float = 0.0
  peak: float = 0.0
  alive: float = 0.0
  donated: float = 0.0
  flops: float = 0.0
  hbm_bytes: float = 0.0
  wire_bytes: float = 0.0
  wire: dict[str, float] = dataclasses.field(default_factory=dict)
  compute_s: float = 0.0
  hbm_s: float = 0.0
  wire_s: float = 0.0
  model_s: float = 0.0
  binds: str = ""
  seconds: float = 0.0
  compile_s: float = 0.0
  biggest: list[str] = dataclasses.field(default_factory=list)


def compile_program(program: programs_lib.Program, topology: chips.Topology,
                    options: dict[str, str] | None = None,
                    inspect: Callable[[set[hlo.Array]], None] | None = None
                    ) -> Result:
  """Compiles one program and counts it.

  Args:
    inspect: is given the arrays that it holds in HBM.
  """
  devices, chip = len(topology.devices), topology.chip
  result = Result(program.name, program.unit, program.calls, fits=True)
  begun = time.process_time()
  traced = program.function.trace(*program.arguments)
  result.flops = cost_lib.flops(traced.jaxpr, program.trips) / devices
  try:
    with chips.uncached():
      compiled = traced.lower().compile(compiler_options=options or None)
  except Exception as error:
    result.compile_s = time.process_time() - begun
    needed = memory_error(str(error))
    if needed is None:
      raise
    result.fits, (result.peak, limit) = False, needed
    result.error = (f"needs {result.peak / GIB:.2f} GiB of "
                    f"{limit / GIB:.2f} GiB")
    return result
  result.compile_s = time.process_time() - begun
  memory = compiled.memory_analysis()
  text = compiled.as_text()
  counted = cost_lib.of_text(text, devices, program.trips, program.rare)
  result.arguments = memory.argument_size_in_bytes
  result.temporary = memory.temp_size_in_bytes
  result.peak = (memory.argument_size_in_bytes + memory.temp_size_in_bytes
                 + memory.output_size_in_bytes - memory.alias_size_in_bytes)
  result.alive = getattr(memory, "peak_memory_in_bytes", 0)
  result.hbm_bytes, result.wire_bytes = counted.hbm_bytes, counted.wire_total
  result.wire = dict(counted.wire_bytes)
  result.compute_s = result.flops / chip.flops
  result.hbm_s = result.hbm_bytes / chip.bandwidth
  result.wire_s = result.wire_bytes / chip.wire
  result.model_s = counted.cycles / chip.clock
  times = {"FLOPs": result.compute_s, "HBM": result.hbm_s,
           "wire": result.wire_s, "schedule": result.model_s}
  result.binds = max(times, key=times.get)
  result.seconds = times[result.binds]
  result.donated = memory.alias_size_in_bytes
  arrays = hlo.parse(text).arrays()
  result.biggest = [
      f"{a.dtype}[{','.join(map(str, a.shape))}] {a.size / GIB:.2f} GiB"
      for a in sorted(arrays, key=lambda a: -a.size)[:5]]
  if inspect is not None:
    inspect(arrays)
  return result


def memory_error(text: str) -> tuple[float, float] | None:
  """(needed, available) bytes of the compiler's complaint, or None."""
  if "RESOURCE_EXHAUSTED" not in text and "hbm" not in text.lower():
    return None
  found = _TOO_MUCH.search(text)
  if found is None:
    return None
  parts = [p for p in found.groups() if p is not None]
  return (float(parts[0]) * _UNITS[parts[1]],
          float(parts[2]) * _UNITS[parts[3]])


@dataclasses.dataclass
class Report:
  """A configuration on a topology.

  Attributes:
    resident: bytes per chip that live through a step, by what they are.
    results: its programs.
    peak: bytes per chip of the fullest moment; parts: what it is made of;
      culprit: the largest of them.
    limit: bytes per chip.
    seconds: of a step; rollouts, tokens: of a step.
  """

  topology: str
  devices: int
  mesh: dict[str, int]
  flags: str
  limit: float
  resident: dict[str, int]
  results: list[Result]
  workload: dict[str, float]
  peak: float = 0.0
  parts: dict[str, float] = dataclasses.field(default_factory=dict)
  culprit: str = ""
  seconds: float = 0.0
  rollouts: int = 0
  tokens: float = 0.0
  price: float = 0.0

  @property
  def fits(self) -> bool:
    return self.peak <= self.limit and all(r.fits for r in self.results)

  @property
  def dollars(self) -> float:
    """Price of a step; 0 when no price was given."""
    return self.price * self.devices * self.seconds / 3600

  def to_json(self) -> dict[str, Any]:
    values = dataclasses.asdict(self)
    values.update(fits=self.fits, dollars_per_step=self.dollars)
    return values


def report(plan: programs_lib.Plan, topology: chips.Topology, *,
           options: dict[str, str] | None, flags: str, price: float = 0.0,
           say: Callable[[str], None] = print,
           known: Mapping[str, Result] | None = None) -> Report:
  """Compiles everything and adds it up.

  A program's temporaries live beside everything that stays resident, so the
  fullest moment is that of the program with the most of them.

  Args:
    known: programs of this plan, with these options, that are compiled already.
  """
  work, results = plan.workload, []
  for program in plan.programs():
    results.append((known or {}).get(program.name)
                   or compile_program(program, topology, options))
    last = results[-1]
    say(f"  {last.name}: " + (
        f"{last.peak / GIB:.2f} GiB, {last.seconds * 1e3:.3g} ms a call, "
        f"bound by {last.binds}" if last.fits else last.error)
        + f" (compiled in {last.compile_s:.0f} processor seconds)")
  resident = plan.resident()
  made = Report(
      topology.name, len(topology.devices), dict(plan.placement.mesh.shape),
      flags, topology.chip.hbm, resident, results,
      dict(dataclasses.asdict(work), slots=plan.settings.slots,
           decode_steps=work.decode_steps(plan.settings.slots)),
      price=price)
  stay = sum(resident.values())
  fullest = max(results, key=lambda r: r.temporary if r.fits else r.peak)
  made.peak = stay + fullest.temporary if fullest.fits else max(
      fullest.peak, stay)
  parts = {**resident, f"temporaries of {fullest.name}": fullest.temporary}
  if not fullest.fits:
    parts = {f"program {fullest.name}": fullest.peak}
  made.parts, made.culprit = parts, max(parts, key=parts.get)
  made.seconds = sum(r.seconds * r.calls for r in results)
  made.rollouts, made.tokens = work.rollouts, work.tokens
  return made
