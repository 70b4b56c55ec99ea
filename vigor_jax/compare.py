r"""Compares allocation rules over seeds under one budget.

    python -m vigor_jax.compare --config=configs/arithmetic.py \
        --allocators=uniform,uniform:prompts_per_step=64,vigor,eb_widening \
        --seeds=0,1,2 --workdir=runs/compare

A rule is an allocator's name, with overrides joined to it by colons:
vigor:rounds=2:initial_rollouts=4:keep=0.25:growth=4. A field without a dot is
one of the top level or an option of that allocator. What was written labels
the rows. --variants runs the same rules on several streams, each described the
same way: --variants=task.difficulty=sparse_signal,task.difficulty=plain (a
name may stand before: easy:task.difficulty=plain).

The same command continues a grid that was stopped. It writes compare.json,
compare.md, report.html and plots/; runs lie in cells/.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from absl import flags

from vigor_jax import config as configuration
from vigor_jax import endings
from vigor_jax import metrics
from vigor_jax import report
from vigor_jax import workdirs
from vigor_jax.grid import board as board_lib
from vigor_jax.grid import cells as cell_lib
from vigor_jax.grid import workers
from vigor_jax.reporting import pooled
from vigor_jax.reporting import runs as run_folders
from vigor_jax.reporting import verdict
from vigor_jax.reporting import wording


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    "allocators",
    "uniform,vigor,eb_widening",
    "rules: name[:field=value...], separated by commas",
    flag_values=values,
  )
  flags.DEFINE_string(
    "seeds", "0,1,2", "seeds, such as 0,1,2 or 0-4", flag_values=values
  )
  flags.DEFINE_multi_string(
    "variants",
    [],
    "streams: [name:]field=value[:field=value...], separated "
    "by commas; may be repeated",
    flag_values=values,
  )
  flags.DEFINE_string(
    "baseline",
    "",
    "the rule whose mean curve fixes the targets; default: "
    "the first uniform one",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "jobs",
    0,
    "runs at a time; default: one per core on CPUs, else 1",
    lower_bound=0,
    flag_values=values,
  )


# ------------------------------------------------------------------- one cell


class _Watch:
  """Stands in for progress.Progress and reports to the grid instead."""

  def __init__(self, report_to):
    self._report = report_to
    self._accuracy = None
    self._told = 0.0

  def say(self, text: str) -> None:
    print(text, flush=True)

  def start(self, tokens: int = 0) -> None:
    del tokens

  def step(self, step: int, values) -> None:
    del values
    if time.monotonic() - self._told > 0.5:
      self._told = time.monotonic()
      self._report({"step": step, "accuracy": self._accuracy})

  def evaluation(self, step: int, values) -> None:
    self._accuracy = values.get("eval/accuracy")
    self._report({"step": step, "accuracy": self._accuracy})


def run_cell(task: tuple[str, cell_lib.Cell], report_to, *, workdir: str):
  """Runs one task of the grid: ("warm start" or "run", cell).

  Returns:
    The run's summary; for a warm start, its folder.

  Raises:
    KeyboardInterrupt: the run was told to stop, and has saved its state.
  """
  from vigor_jax import experiment
  from vigor_jax import record
  from vigor_jax import train
  from vigor_jax import warm_start

  kind, cell = task
  config = cell_lib.config_of(cell)
  folder = str(cell_lib.folder(workdir, cell))
  try:
    if kind == "warm start":
      return warm_start.cached(config, experiment.make_task(config), folder)
    print(f"{cell.text}: {folder}", flush=True)
    return train.train(config, folder, quiet=True, progress=_Watch(report_to))
  except record.Interrupted as stop:
    print(stop, flush=True)
    raise KeyboardInterrupt from stop


# --------------------------------------------------------------------- results


def _choose_baseline(cells, wanted: str) -> str:
  labels = list(dict.fromkeys(cell.label for cell in cells))
  if not wanted:
    uniform = [label for label in labels if label.split(":")[0] == "uniform"]
    return (uniform or labels)[0]
  if wanted not in labels:
    near = difflib.get_close_matches(wanted, labels, n=1, cutoff=0.0)
    raise configuration.ConfigError(
      f"--baseline: {wanted!r} is none of the rules {', '.join(labels)}; did "
      f"you mean {near[0]!r}?"
    )
  return wanted


def _write(workdir, cells, board, baseline, command, results) -> None:
  """Writes compare.json, from which a report can be made at any time."""
  record = {
    "command": command,
    "baseline": baseline,
    "cells": [
      {
        "name": cell.text,
        "folder": f"{cell_lib.CELLS_FOLDER}/{cell.name}",
        "label": cell.label,
        "variant": cell.variant,
        "seed": cell.seed,
        "state": board.state[cell.name],
        "error": board.errors.get(cell.name),
      }
      for cell in cells
    ],
    "results": results,
    "overall": wording.overall({k or "stream": v for k, v in results.items()}),
  }
  metrics.atomic_write(
    str(pathlib.Path(workdir) / report.COMPARE_FILE),
    json.dumps(record, indent=1) + "\n",
  )


def _results(workdir, cells, board, baseline) -> dict[str, dict]:
  """{stream: verdict.analyse(...)} of the finished cells."""
  variants: dict[str, list] = {}
  for cell in cells:
    if board.state[cell.name] == "done":
      run = run_folders.read(cell_lib.folder(workdir, cell))
      run.label, run.variant = cell.label, cell.variant
      variants.setdefault(cell.variant, []).append(run)
  results = {}
  for variant, members in variants.items():
    rules = pooled.by_label(members)
    if baseline in rules:
      results[variant] = verdict.analyse(rules, baseline)
  return results


def text_report(results) -> tuple[str, str]:
  """(for the console, as markdown): table and verdict of every stream."""
  console, markdown = [], ["# Comparison of allocation rules", ""]
  for variant, result in results.items():
    if variant:
      console += ["", f"== {variant} =="]
      markdown += [f"## {variant}", ""]
    for title, header, rows in wording.tables(result):
      widths = [
        max(len(row[i]) for row in (header, *rows)) for i in range(len(header))
      ]
      console += ["", title]
      console += [
        "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip()
        for row in (header, *rows)
      ]
      markdown += [f"### {title}", ""]
      markdown += [
        "| " + " | ".join(row) + " |"
        for row in (header, ["---"] * len(header), *rows)
      ] + [""]
    console += [""] + [f"- {said}" for said in result["sentences"]]
    markdown += [f"- {said}" for said in result["sentences"]] + [""]
  if len(results) > 1:
    overall = wording.overall(results)
    console += ["", "Overall:"] + [f"- {said}" for said in overall]
    markdown += ["## Overall", ""] + [f"- {said}" for said in overall] + [""]
  return "\n".join(console), "\n".join(markdown)


# ------------------------------------------------------------------------ main


def _jobs(asked: int, tasks: int) -> int:
  """Runs at a time: more than one only where runs do not share a device."""
  import jax

  cpu = jax.default_backend() == "cpu"
  if asked > 1 and not cpu:
    raise configuration.ConfigError(
      f"--jobs={asked}: runs would share one {jax.default_backend()} device; "
      "legal: 1"
    )
  if not asked:
    cores = (
      len(os.sched_getaffinity(0))
      if hasattr(os, "sched_getaffinity")
      else os.cpu_count() or 1
    )
    asked = cores if cpu else 1
  return max(1, min(asked, tasks))


def compare(
  config,
  workdir: str,
  *,
  allocators: str,
  seeds: str = "0,1,2",
  variants: Sequence[str] = (),
  baseline: str = "",
  jobs: int = 0,
  command: str = "",
  run=run_cell,
  file=None,
) -> int:
  """Runs, or continues, a grid and writes its report.

  Args:
    config: the validated base configuration.
    workdir: the comparison's folder.
    allocators, seeds, variants, baseline, jobs: the flags.
    command: how to go on, for messages and the report.
    run: called as run(task, report, workdir=...); picklable.
    file: where lines go; None: standard output.

  Returns:
    The exit code: 0, or 1 if a cell failed.

  Raises:
    ConfigError: something that cannot be run; nothing was started.
    ValueError: another process is at work in the folder.
    KeyboardInterrupt: stopped on request; everything is saved.
  """
  grid = cell_lib.make(config, allocators, seeds, variants)
  baseline = _choose_baseline(grid, baseline)
  with workdirs.Lock(workdir) as lock:
    lock.acquire()
    return _compare(grid, workdir, baseline, jobs, command, run, file)


def _compare(grid, workdir, baseline, jobs, command, run, file) -> int:
  """`compare`, in a folder that no other process works in."""
  finished = [cell for cell in grid if cell_lib.is_finished(workdir, cell)]
  todo = [cell for cell in grid if cell not in finished]
  jobs = _jobs(jobs, len(todo)) if todo else 1
  logs = pathlib.Path(workdir) / "logs"
  board = board_lib.Board(
    grid, finished, jobs, file, logs if jobs > 1 else None
  )
  board.say(
    f"{len(grid)} cells, {len(finished)} of them finished already; "
    f"{jobs} at a time; baseline {baseline}"
  )
  call = functools.partial(run, workdir=str(workdir))

  def write(results):
    _write(workdir, grid, board, baseline, command, results)

  def notify(kind, task, value):
    board.notify(kind, task, value)
    if kind in ("done", "failed"):
      write({})

  try:
    if jobs == 1:
      workers.run_here(_phases(todo), call, notify)
    else:
      workers.run_pool(_phases(todo), call, notify, jobs=jobs, log_folder=logs)
  finally:
    results = _results(workdir, grid, board, baseline)
    write(results)
  console, markdown = text_report(results)
  metrics.atomic_write(str(pathlib.Path(workdir) / "compare.md"), markdown)
  if results:
    board.say(console)
  board.say(f"report: {report.build([workdir], workdir)}")
  if board.errors:
    board.say(
      f"{len(board.errors)} of {len(grid)} cells failed; the same "
      f"command tries them again: {', '.join(board.errors)}"
    )
  return 1 if board.errors else 0


def _phases(todo) -> list[list]:
  """Warm starts first, one per stream; then the cells.

  Streams whose warm starts are the same find it in the cache.
  """
  first = {}
  for cell in todo:
    if cell_lib.config_of(cell).init_from == "auto":
      first.setdefault(cell.variant, ("warm start", cell))
  runs = [("run", cell) for cell in todo]
  return [tasks for tasks in (list(first.values()), runs) if tasks]


def main(argv: Sequence[str]) -> int:
  args = configuration.parse_flags(argv, __doc__, _define)
  command = shlex.join(["python", "-m", "vigor_jax.compare", *argv[1:]])
  asked = args.flags
  # A polite stop from outside is the same as Ctrl-C.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with endings.one_message(f"stopped; to go on:\n  {command}"):
    return compare(
      args.config,
      args.workdir,
      allocators=asked.allocators,
      seeds=asked.seeds,
      variants=asked.variants,
      baseline=asked.baseline,
      jobs=asked.jobs,
      command=command,
    )


if __name__ == "__main__":
  sys.exit(main(sys.argv))
