"""Several runs as one: their names, mean curves, and pass rates of prompts."""

import json
from collections.abc import Sequence

import numpy as np

from vigor_jax import statistics
from vigor_jax.allocation import population
from vigor_jax.reporting.runs import Run, flatten


def label_runs(runs: Sequence[Run]) -> None:
  """Names every run that has no label after what sets it apart.

  The allocator, then the fields in which the runs differ, without the seed
  and without the options of allocators that a run does not use.
  """
  bare = [r for r in runs if not r.label]
  flats = [flatten(r.config) for r in bare]
  keys = sorted(set().union(*flats)) if flats else []
  differing = [
    k
    for k in keys
    if len({json.dumps(f.get(k), sort_keys=True) for f in flats}) > 1
  ]
  for run, flat in zip(bare, flats):
    own = f"allocation.{run.allocator}."
    parts = [run.allocator]
    for key in differing:
      other = key.startswith("allocation.") and not key.startswith(own)
      if key in ("seed", "workdir") or other or key not in flat:
        continue
      parts.append(f"{key.removeprefix(own)}={flat[key]}")
    run.label = ":".join(parts)


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Runs of each label, seeds ascending, labels in order of appearance."""
  result: dict[str, list[Run]] = {}
  for run in runs:
    result.setdefault(run.label, []).append(run)
  for group in result.values():
    group.sort(key=lambda r: (r.seed is None, r.seed))
  return result


def mean_curve(runs: Sequence[Run], against: str):
  """Smoothed mean curve of several seeds; None if no run was evaluated.

  Runs evaluated at the same points of their budget are averaged point by
  point, spending and accuracy alike, so that a mean against tokens or seconds
  reaches to the end even where seeds spent different amounts.
  """
  curves = [(run, *smoothed(run, against)) for run in runs]
  curves = [(run, x, y) for run, x, y in curves if len(x)]
  if not curves:
    return None
  grids = [run.curve("rollouts")[0] for run, *_ in curves]
  if all(
    len(x) == len(grids[0]) and np.array_equal(grid, grids[0])
    for grid, (_, x, _) in zip(grids, curves)
  ):
    table = np.stack([y for *_, y in curves])
    return statistics.MeanCurve(
      np.mean([x for _, x, _ in curves], axis=0),
      table.mean(0),
      table.min(0),
      table.max(0),
    )
  curves = [(x, y) for _, x, y in curves]
  if max(c[0][0] for c in curves) > min(c[0][-1] for c in curves):
    return None
  return statistics.mean_curve(curves)


def smoothed(run: Run, against: str) -> tuple[np.ndarray, np.ndarray]:
  """A run's accuracy curve after the smoothing that every curve gets."""
  x, y = run.curve(against)
  return x, statistics.smooth(y, 3)


def pass_rate_histograms(runs: Sequence[Run], stretches: int = 3):
  """Pass rates of the prompts that were opened, from early to late.

  0/1 rewards are deconvolved (population.deconvolve): raw k/n of few rollouts
  piles up at 0 and 1 whatever the pass rates are. Graded rewards have no
  success counts, so their raw means are shown.

  Returns:
    ([(text, edges [11], shares [10], mean)] per stretch of steps, and how the
    shares were found, in words).
  """
  binary = all(
    np.array_equal(s["sum"], np.rint(s["sum"]))
    for run in runs
    for s in run.groups
  )
  steps = sorted({s["step"] for run in runs for s in run.groups})
  edges = np.linspace(0, 1, 11)
  histograms = []
  for part in np.array_split(steps, min(stretches, len(steps)) or 1):
    chosen = [s for run in runs for s in run.groups if s["step"] in set(part)]
    n = np.concatenate([s["n"] for s in chosen]) if chosen else np.zeros(0)
    total = np.concatenate([s["sum"] for s in chosen]) if chosen else n
    known = n > 0
    n, total = n[known], total[known]
    if not len(n):
      continue
    if binary:
      people = population.deconvolve(n, total)
      shares = np.histogram(people.mean, edges, weights=people.weights)[0]
    else:
      shares = np.histogram(total / n, edges)[0] / len(n)
    text = (
      f"step {part[0]}" if len(part) == 1 else f"steps {part[0]}\nto {part[-1]}"
    )
    mean = float((total / n).mean())
    histograms.append((text, edges, shares, mean))
  how = (
    "share of the opened prompts, deconvolved from their counts (EM)"
    if binary
    else "share of the opened prompts by their mean reward, raw"
  )
  return histograms, how
