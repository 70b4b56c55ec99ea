r"""The allocation laboratory's commands.

python -m vigor_jax.lab --from_run=DIR
    what every rule would have bought in a run, and which one to take
python -m vigor_jax.lab --write=docs [--workdir=runs/lab] [--jobs=2]
    measures the grid (some ten minutes on two free cores; the same
    command continues) and fills docs/allocation.md and its figures
python -m vigor_jax.lab --stream=sparse_signal
    the rules of the headline on one stream, a table on the console
python -m vigor_jax.lab --paired=eb_effective,eb_widening [--write_block=docs]
    two rules at common rates, seed by seed, on every stream; some minutes.
    --write_block puts the table into docs/allocation.md
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from vigor_jax import endings
from vigor_jax.lab.world import PRESETS, REWARDS, World


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m vigor_jax.lab",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--from_run", metavar="DIR", help="a run folder")
  what.add_argument("--write", metavar="DOCS", help="the docs folder")
  what.add_argument("--stream", choices=sorted(PRESETS), help="a preset")
  what.add_argument("--paired", metavar="RULE,OTHER", help="two rules")
  parser.add_argument("--write_block", metavar="DOCS", help="with --paired")
  parser.add_argument("--reward", choices=REWARDS, default="sparse")
  parser.add_argument("--noise", type=float, default=0.0, metavar="Q")
  parser.add_argument("--workdir", default="runs/lab")
  parser.add_argument("--jobs", type=int, default=1)
  return parser


def main(argv=None) -> int:
  """Runs one command; returns the exit status."""
  options = _parser().parse_args(argv)
  with endings.one_message("stopped; the same command continues"):
    return _run(options)


def _run(options) -> int:
  if options.from_run:
    from vigor_jax.lab import recommend

    print(recommend.words(recommend.advise(options.from_run)))
    return 0
  if options.paired:
    return _paired(options)
  from vigor_jax.lab import experiment, grids

  store = pathlib.Path(options.workdir) / "results.json"
  results = experiment.Results(store, experiment.Protocol())
  if options.write:
    from vigor_jax.lab import page

    docs = pathlib.Path(options.write)
    if not (docs / "allocation.md").exists():
      raise ValueError(f"{docs} holds no allocation.md")
    results.fill(grids.cells(), options.jobs)
    page.write(results, docs)
    return 0
  world = World.preset(
    options.stream, reward=options.reward, noise=options.noise
  )
  results.fill([experiment.Cell(world, r) for r in experiment.HEADLINE],
               options.jobs)  # fmt: skip
  _show(experiment.outcomes(results, world, experiment.HEADLINE), world)
  return 0


def _paired(options) -> int:
  from vigor_jax import allocation
  from vigor_jax.lab import page, paired
  from vigor_jax.lab.learner import Rule

  names = options.paired.split(",")
  unknown = [name for name in names if name not in allocation.REGISTRY]
  if len(names) != 2 or unknown:
    raise ValueError(
      f"--paired={options.paired}: expected two rules out of"
      f" {', '.join(allocation.REGISTRY)}"
    )
  rows = paired.rows(*map(Rule, names), say=print)
  if options.write_block:
    path = pathlib.Path(options.write_block) / "allocation.md"
    table = page.table(paired.HEADER, rows)
    path.write_text(page.fill(path.read_text(), "paired", table))
  return 0


def _show(outcomes, world) -> None:
  from vigor_jax.lab import page

  print(f"{world.label}: rollouts to target, best uniform split / rule")
  for label, o in outcomes.items():
    early, late = map(page.ratio, o.against_best)
    print(f"{label:20s} early {early:24s} late {late:30s} mixed {o.mixed:.1f}")


if __name__ == "__main__":
  sys.exit(main())
