"""The most slots, and then the most rows of a micro-batch, that fit a chip.

Memory grows about in a straight line with either. Compiling is what takes the
time, so each program is compiled for two numbers, the number is read off the
line through both, and compiled in turn: what is suggested has been compiled.
"""

from __future__ import annotations

from collections.abc import Callable

from vigor_jax.aot import chips
from vigor_jax.aot import decoding
from vigor_jax.aot import estimate
from vigor_jax.aot import programs as programs_lib
from vigor_jax.config import fields

SLOTS, ROWS = "sampling.slots", "policy.rows_per_microbatch"
# Of a chip, left free for what is not counted: batches on their way, the
# evaluation's programs, fragments.
ROOM = 0.05
_TRIES = 5


def largest(total: Callable[[int], float], limit: float, start: int, step: int,
            most: int) -> int | None:
  """The largest number for which `total` stays within the limit.

  Args:
    total: rises with the number, about in a straight line. Each call is dear:
      few are made, and the last step may be left to the line.
    limit: see `total`.
    start: is tried first.
    step: numbers are multiples of it, from it up.
    most: no larger number is of use.

  Returns:
    A number for which `total` has been seen within the limit; None: it was
    not within the limit for any.
  """
  most = max(most // step, 1) * step
  fits, above = 0, most + step
  value, known = min(max(start // step, 1) * step, most), {}
  for _ in range(_TRIES):
    known[value] = total(value)
    if known[value] <= limit:
      fits = value
    else:
      above = value
    if len(known) > 1:
      value = _on_line(known, limit, fits, above)
    else:
      value = 2 * fits or above // 2
    value = value // step * step
    if not fits:
      value = max(value, step)
    value = min(value, above - step)
    if value <= fits:
      break
  return fits or None


def _on_line(known: dict[int, float], limit: float, fits: int,
             above: int) -> int:
  """Where the line through the known points next to the limit meets it."""
  if fits and above in known:
    a, b = fits, above
  else:
    b, a = sorted(known, reverse=bool(fits))[:2]
  slope = (known[b] - known[a]) / (b - a)
  if slope <= 0:
    return above
  return int(a + (limit - known[a]) / slope)


class Tuner:
  """Compiles a configuration's decode chunk and update at other numbers.

  Attributes:
    config: with the numbers found so far.
    results: the compiled programs of these numbers, by name.
  """

  def __init__(self, config, topology: chips.Topology, vocab: int,
               share: float, options: dict[str, str] | None,
               say: Callable[[str], None]):
    """Takes what Plan and compile_program take; `say` is told each result."""
    self.config = config.copy_and_resolve_references()
    self._topology, self._vocab, self._share = topology, vocab, share
    self._options, self._say = options, say
    self._limit = (1 - ROOM) * topology.chip.hbm
    self._compiled: dict[tuple[str, int], tuple[estimate.Result, float]] = {}

  @property
  def results(self) -> dict[str, estimate.Result]:
    made = {}
    for name, path in (("decode chunk", SLOTS), ("update", ROWS)):
      found = self._compiled.get((name, fields.get(self.config, path)))
      if found and found[0].fits:
        made[name] = found[0]
    return made

  def run(self) -> None:
    """Slots first: decoding takes most of a step, and waits for memory."""
    config, devices = self.config, len(self._topology.devices)
    plan = self._plan()
    rows_step = plan.placement.rows
    # A multiple of the devices keeps the layout of the weights.
    slots_step = rows_step if config.sampling.slots % devices else devices
    whole_step = plan.workload.micro_batches(1, config.policy.row_length)
    most_rows = -(-whole_step // rows_step) * rows_step
    if self._with_rows(config.policy.rows_per_microbatch) > self._limit:
      self._find(ROWS, self._with_rows, rows_step, most_rows)
    self._find(SLOTS, self._with_slots, slots_step, config.rollout_budget)
    self._find(ROWS, self._with_rows, rows_step, most_rows)

  def _find(self, path: str, total, step: int, most: int) -> None:
    start = fields.get(self.config, path)
    found = largest(total, self._limit, start, step, max(most, start))
    value = found or step
    fields.assign(self.config, path, value)
    self._say(f"tune: --config.{path}={value}: {total(value) / chips.GIB:.2f} "
              f"of {self._topology.chip.hbm / chips.GIB:.2f} GiB a chip" + (
                  "" if found else f", which leaves less than {ROOM:.0%}"))

  def _plan(self, **values: int) -> programs_lib.Plan:
    config = self.config.copy_and_resolve_references()
    for path, value in values.items():
      fields.assign(config, path, value)
    return programs_lib.Plan(
        config, self._topology.devices,
        programs_lib.workload_of(config, self._share), self._vocab)

  def _temporary(self, name: str, path: str, value: int) -> float:
    """Bytes per chip of a program's temporaries at this number."""
    if (name, value) not in self._compiled:
      plan = self._plan(**{path: value})
      program = next(p for p in plan.programs() if p.name == name)
      result = estimate.compile_program(program, self._topology, self._options)
      size = result.temporary
      if not result.fits:
        size = max(0, result.peak - decoding.per_chip(program.arguments))
      self._compiled[name, value] = result, size
      self._say(f"  tune: {name} at {path}={value}: {size / chips.GIB:.2f} GiB "
                f"of temporaries ({result.compile_s:.0f} processor seconds)")
    return self._compiled[name, value][1]

  def _with_slots(self, slots: int) -> float:
    stay = sum(self._plan(**{SLOTS: slots}).resident().values())
    rows = fields.get(self.config, ROWS)
    return stay + max(self._temporary("decode chunk", SLOTS, slots),
                      self._temporary("update", ROWS, rows))

  def _with_rows(self, rows: int) -> float:
    return (sum(self._plan().resident().values())
            + self._temporary("update", ROWS, rows))
