"""Where the time of a step goes: medians by phase, and tables of them."""

from collections.abc import Mapping, Sequence

import numpy as np

from vigor_jax.reporting import page
from vigor_jax.reporting import runs as run_folders

# A step's time in parts that do not overlap; docs/metrics.md says of what.
PHASES = ("prefill", "decode", "reward", "allocate", "update", "other")
_CAPTION = (
  "Time of a step by phase: medians over steps, so that compilation does not "
  "show, and shares of their sum. docs/metrics.md says what a phase holds."
)


def medians(runs: Sequence[run_folders.Run]) -> dict[str, float]:
  """Median seconds of a step by phase; {} where none is on record."""
  found = {}
  for phase in PHASES:
    values = [run.series(f"time/{phase}")[1] for run in runs]
    values = np.concatenate(values) if values else np.zeros(0)
    found[phase] = float(np.median(values)) if len(values) else 0.0
  return found if sum(found.values()) > 0 else {}


def _unit(longest: float) -> tuple[float, str]:
  return (1e3, "ms") if longest < 2 else (1.0, "s")


def one_run(run: run_folders.Run) -> str:
  """A line per phase; "" without records."""
  found = medians([run])
  if not found:
    return ""
  total = sum(found.values())
  scale, unit = _unit(total)
  rows = [
    [phase, f"{seconds * scale:.3g}", f"{seconds / total:.1%}"]
    for phase, seconds in [*found.items(), ("step", total)]
  ]
  return page.table(
    ["phase", f"{unit} a step", "share"],
    rows,
    numbers=(1, 2),
    caption=_CAPTION,
  )


def several_rules(rules: Mapping[str, Sequence[run_folders.Run]]) -> str:
  """A line per rule, a column per phase; "" without records."""
  found = {label: m for label, runs in rules.items() if (m := medians(runs))}
  if not found:
    return ""
  totals = {label: sum(m.values()) for label, m in found.items()}
  scale, unit = _unit(max(totals.values()))
  rows = [
    [
      label,
      *(f"{s * scale:.3g} ({s / totals[label]:.0%})" for s in m.values()),
      f"{totals[label] * scale:.3g}",
    ]
    for label, m in found.items()
  ]
  return page.table(
    ["rule", *(f"{phase}, {unit}" for phase in PHASES), f"step, {unit}"],
    rows,
    numbers=range(1, len(PHASES) + 2),
    caption=_CAPTION,
  )
