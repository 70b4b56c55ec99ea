r"""The claim with learned policies: rollouts, tokens, seconds to a target.

    python benchmarks/claims.py [--quick] [--workdir=runs/claims] [--write=docs]

Runs `vigor_jax.compare` stream by stream and puts the results side by side.
The same command continues where it was stopped, cell by cell. Protocol:

  rates     every rule gets the learning rate, out of RATES, with the largest
            mean accuracy over the run (area under the curve), averaged over
            two tuning seeds on `plain` and `sparse_signal`
  runs      120 steps of 256 rollouts; zero-advantage rollouts are left out
            of the update for every rule; every generated rollout counts
  targets   50 % and 85 % of the rise of uniform 32 x 8's mean curve over the
            first RISE of the run, so that slower rules get there too
  pairs     5 fresh seeds x 2 warm starts; a pair has both the same; geometric
            mean of baseline / rule with a 95 % bootstrap interval over pairs;
            5 more seeds where the house's rule is near the best uniform split,
            and 10 more where that leaves it open;
            the rules beside the headline's: 3 rates, 3 seeds, two streams
  baseline  uniform 32 x 8, and the best of 32 x 8, 64 x 4 and 128 x 2 at that
            target, chosen on the same runs, which favours the baseline

--quick plays a few short cells through the same code and checks that the
tables in docs/results.md are what docs/claims.json gives. The full form takes
a few CPU-hours. --write=docs writes that file and the tables.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import lean
from common import streams as all_streams

from vigor_jax import compare
from vigor_jax.lab import experiment as lab
from vigor_jax.lab.world import World
from vigor_jax.reporting import claims as tables
from vigor_jax.reporting import paired
from vigor_jax.reporting import runs as run_folders

ROOT = pathlib.Path(__file__).resolve().parent.parent
STREAMS, SCREENING = all_streams.STREAMS, ("sparse_signal", "plain")
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
SEEDS, TUNING_SEEDS = "10-14", "0,1"
# The other rules: three rates, three seeds, two streams.
OTHERS_RATES, OTHERS_SEEDS = RATES[:3], "10-12"
WARM_STARTS = (0, 1)  # values of sft.seed

# The laboratory's worlds for the same streams.
WORLDS = {
  "sparse_signal": ("sparse_signal", {}),
  "plain": ("plain", {}),
  "hard_junk": ("hard_junk", {}),
  "stack, plain": ("plain", {"reward": "graded"}),
  "stack, sparse": ("sparse_signal", {"reward": "graded"}),
  "sparse_signal, q = .1": ("sparse_signal", {"noise": 0.1}),
  "stack, plain, q = .1": ("plain", {"reward": "graded", "noise": 0.1}),
  "sparse_signal, 512": ("sparse_signal", {"num_prompts": 512}),
  "plain, 512": ("plain", {"num_prompts": 512}),
  "hard_junk, 512": ("hard_junk", {"num_prompts": 512}),
  "sparse_signal, long": ("sparse_signal", {}),
}

HOUSE = tables.HOUSE
# Rules as vigor_jax.compare takes them, by the name the tables use.
UNIFORMS = {
  "uniform 32 x 8": "uniform",
  "uniform 64 x 4": "uniform:prompts_per_step=64",
  "uniform 128 x 2": "uniform:prompts_per_step=128",
}
HEADLINE = {
  **UNIFORMS,
  "vigor": "vigor",
  "eb_widening": "eb_widening",
  tables.BEFORE: tables.BEFORE,
  HOUSE: HOUSE,
}
# Streams on which the house's rule is near the best uniform split, or on which
# runs differ much, so that it takes more pairs to tell: these rules have as
# many again.
CLOSE = ("plain", "hard_junk", "stack, plain", "stack, plain, q = .1",
         "plain, 512", "hard_junk, 512", "sparse_signal, q = .1")  # fmt: skip
CLOSE_RULES = (*UNIFORMS, tables.BEFORE, HOUSE)
CLOSE_SEEDS = "15-19"
# And where twenty pairs left it open, up to twenty seeds.
UNRESOLVED, UNRESOLVED_SEEDS = ("hard_junk", "hard_junk, 512"), "20-29"
OTHERS = {
  name: name
  for name in (
    "random_top", "low_success_first", "streaming_vigor", "eb_streaming",
    "dynamic_sampling", "pods", "greso", "vip", "cero", "knapsack", "gvm",
    "reinforce_ada", "pilot_commit", "speed",
  )
}  # fmt: skip
# The rule of the house with another prompt's features, at the rule's own rate.
CONTROL = {"eb_predicted, shuffled": "eb_predicted:looks=shuffled"}
# The house's rule in its lean form (common/lean.py), at the rule's own rate; on
# some streams others as well, and what other forms cost.
LEAN = {f"lean {HOUSE}": lean.entry(HOUSE)}
LEAN_OTHERS = {
  "lean uniform 64 x 4": lean.entry("uniform:prompts_per_step=64"),
  f"lean {tables.BEFORE}": lean.entry(tables.BEFORE),
}
LEAN_NARROW = {f"lean {HOUSE}, as it opens by default": lean.narrow(HOUSE)}
LEAN_WIDE = {f"{HOUSE}, opened wide": lean.wide(HOUSE)}
LEAN_32 = {f"{HOUSE}, 32 in the update": f"{HOUSE}:policy.update_rollouts=32"}
LEAN_BY_STREAM = {
  "sparse_signal": LEAN | LEAN_OTHERS | LEAN_NARROW | LEAN_32,
  "plain": LEAN | LEAN_OTHERS,
  "sparse_signal, long": LEAN | LEAN_OTHERS | LEAN_NARROW,
  "stack, sparse": LEAN | LEAN_32,
  "sparse_signal, q = .1": LEAN | LEAN_WIDE | LEAN_32,
  "stack, plain, q = .1": LEAN | LEAN_WIDE,
}
ABLATIONS = {
  "random_top": "random_top",
  "low_success_first": "low_success_first",
  "vigor, survivors": "vigor:allocation.train_on=survivors",
  "vigor, ties by index": "vigor:ties=index",
  "vigor, T 2, m0 4, 1/4": (
    "vigor:rounds=2:initial_rollouts=4:keep=0.25:growth=4.0"
  ),
  "vigor, T 2, P 64": "vigor:prompts_per_step=64:rounds=2",
}


def play(stage, stream, rules, seeds, warm_starts, options) -> dict:
  """Runs the cells of one stream that are missing and reads all of them.

  Args:
    stage: a sub-folder of the workdir.
    stream: key of STREAMS.
    rules: {name: entry with its learning rate}.
    seeds: as vigor_jax.compare takes them.
    warm_starts: values of sft.seed.
    options: workdir, quick.

  Returns:
    {name: {"w<warm start> s<seed>": curves}}, see `read`.
  """
  overrides = STREAMS[stream][1]
  folder = options.workdir / stage / stream.replace(", ", "-").replace(" ", "")
  config = all_streams.base_config(
    stream, options.workdir / "warm_starts", options.quick
  )
  status = compare.compare(
    config,
    str(folder),
    allocators=",".join(rules.values()),
    seeds=seeds,
    variants=[f"w{w}:{overrides}:sft.seed={w}" for w in warm_starts],
    jobs=1,
    command="python benchmarks/claims.py",
  )
  if status:
    raise SystemExit(f"cells of {stream} failed; see {folder}")
  names = {entry: name for name, entry in rules.items()}
  found: dict[str, dict] = {name: {} for name in rules}
  for cell in json.loads((folder / "compare.json").read_text())["cells"]:
    run = run_folders.read(folder / cell["folder"])
    pair = f"{cell['variant']} s{cell['seed']}"
    found[names[cell["label"]]][pair] = read(run)
  return found


def read(run: run_folders.Run) -> dict:
  """What the tables need of a run, rounded; lists have one entry per point."""
  rollouts, accuracy = run.curve("rollouts")
  full = [run_folders.number(line, "eval/full_pass") for line in run.evals]
  return {
    "rollouts": [round(x) for x in rollouts],
    "tokens": [round(x) for x in run.curve("tokens")[0]],
    "seconds": [round(x, 2) for x in run.curve("seconds")[0]],
    "accuracy": [round(y, 4) for y in accuracy],
    "full_pass": round(full[-1], 4),
    "mixed": round(run.mean("groups/mixed"), 2),
    "trained": round(run.mean("policy/active_rollouts"), 1),
  }


def with_rate(rules, rates) -> dict[str, str]:
  """Rules with `optimizer.learning_rate` appended: {name: entry}."""
  return {
    name: f"{entry}:optimizer.learning_rate={rates[name]:g}"
    for name, entry in rules.items()
  }


def screen(rules, rates, options) -> dict:
  """{name: {rate: {stream: mean accuracy over the run}}} on tuning seeds."""
  found: dict = {name: {} for name in rules}
  for stream in SCREENING:
    for rate in rates:
      entries = with_rate(rules, dict.fromkeys(rules, rate))
      played = play(
        f"screening-{rate:g}", stream, entries, TUNING_SEEDS, (0,), options
      )
      for name, runs in played.items():
        score = sum(map(paired.area, runs.values())) / len(runs)
        found[name].setdefault(f"{rate:g}", {})[stream] = round(score, 4)
  return found


def best_rates(screening) -> dict[str, float]:
  """The rate with the largest area, averaged over the screening streams."""
  return {
    name: float(max(by_rate, key=lambda r: sum(by_rate[r].values())))
    for name, by_rate in screening.items()
  }


def laboratory(streams, workdir: pathlib.Path) -> dict:
  """32 x 8 / rule in rollouts to target for the same cells, by the lab."""
  results = lab.Results(workdir / "lab.json", lab.Protocol())
  adaptive = ("vigor", "eb_widening", tables.BEFORE, HOUSE)
  rules = (*lab.UNIFORMS, *map(lab.Rule, adaptive))
  found = {}
  for stream in streams:
    preset, fields = WORLDS[stream]
    world = World.preset(preset, **fields)
    results.fill([lab.Cell(world, rule) for rule in rules])
    found[stream] = {}
    for name, o in lab.outcomes(results, world, rules).items():
      values = [r.value for r in o.against_published]
      early, late = (None if math.isnan(v) else round(v, 3) for v in values)
      found[stream][name] = {"early": early, "late": late}
  return found


def measure(options, data: dict) -> None:
  """Fills `data` with the stages asked for and saves it after each stream."""
  store = options.workdir / "claims.json"
  say = lambda text: print(f"[claims] {text}", flush=True)

  def save():
    options.workdir.mkdir(parents=True, exist_ok=True)
    store.write_text(tables.dump(data))

  for stage in options.stages:
    if stage == "lab":
      data["lab"] |= laboratory(data["streams"], options.workdir)
      save()
      continue
    rules = {
      "headline": HEADLINE, "others": OTHERS, "ablations": ABLATIONS,
      "lean": LEAN,
    }[stage]  # fmt: skip
    if stage == "ablations":  # what the change alone does, so at one rate
      rates = dict.fromkeys(rules, data["rates"]["vigor"])
    elif stage == "lean":
      every = LEAN | LEAN_OTHERS | LEAN_NARROW | LEAN_WIDE | LEAN_32
      of = {n: n.removeprefix("lean ").split(",")[0] for n in every}
      rates = {n: data["rates"][rule] for n, rule in of.items()}
    else:
      tried = OTHERS_RATES if stage == "others" else RATES
      data["screening"] |= screen(rules, tried, options)
      data["rates"] = rates = best_rates(data["screening"])
      save()
    if stage == "others":
      rules = rules | CONTROL
      rates = rates | dict.fromkeys(CONTROL, rates[HOUSE])
    streams = options.streams if stage in ("headline", "lean") else SCREENING
    seeds = OTHERS_SEEDS if stage == "others" else SEEDS
    begun = time.monotonic()
    for number, stream in enumerate(streams, 1):
      say(f"{stage}: {stream}, stream {number} of {len(streams)}")
      if stage == "lean":
        rules = LEAN_BY_STREAM.get(stream, LEAN)
      found = play(
        stage if stage in ("ablations", "lean") else "runs",
        stream, with_rate(rules, rates), seeds, WARM_STARTS, options,
      )  # fmt: skip
      close = {"headline": CLOSE_RULES, "lean": LEAN | LEAN_WIDE}.get(stage, ())
      for kind, among, further in (
        ("close", CLOSE, CLOSE_SEEDS),
        ("unresolved", UNRESOLVED, UNRESOLVED_SEEDS),
      ):
        if close and stream in among:
          more = play(
            f"{'lean' if stage == 'lean' else 'runs'}-{kind}", stream,
            with_rate({n: rules[n] for n in close if n in rules}, rates),
            further, WARM_STARTS, options,
          )  # fmt: skip
          for name, runs in more.items():
            found[name] |= runs
      key = stage if stage in ("ablations", "lean") else "streams"
      data.setdefault(key, {}).setdefault(stream, {}).update(found)
      save()
      left = (time.monotonic() - begun) / number * (len(streams) - number)
      say(f"{stream}: done, about {left / 60:.0f} minutes of {stage} left")


def quick() -> dict:
  """Short cells through the same code, and the tables against the file."""
  with tempfile.TemporaryDirectory() as folder:
    options = argparse.Namespace(workdir=pathlib.Path(folder), quick=True)
    rules = {"uniform 32 x 8": "uniform", "eb_widening": "eb_widening"}
    rules = with_rate(rules, dict.fromkeys(rules, RATES[1]))
    found = play("runs", "sparse_signal", rules, "0", (0,), options)
  figures = {"cells": sum(map(len, found.values()))}
  figures["points"] = min(
    len(run["accuracy"]) for runs in found.values() for run in runs.values()
  )
  page = (ROOT / "docs" / "results.md").read_text()
  data = json.loads((ROOT / "docs" / "claims.json").read_text())
  figures["tables_agree"] = int(tables.fill(page, data) == page)
  return figures


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--workdir", type=pathlib.Path, default="runs/claims")
  parser.add_argument("--write", type=pathlib.Path, metavar="DOCS")
  parser.add_argument(
    "--stages", default="headline,lab,others,ablations,lean",
    help="in this order",
  )
  parser.add_argument(
    "--streams", default="", help="of the headline, separated by ';'"
  )
  parser.add_argument(
    "--shared", action="store_true",
    help="the machine does other work too: seconds are not reported",
  )  # fmt: skip
  options = parser.parse_args()
  if options.quick:
    figures = quick()
    targets = {"cells": {"min": 2}, "points": {"min": 4},
               "tables_agree": {"min": 1}}  # fmt: skip
  else:
    options.workdir = options.workdir.absolute()
    options.stages = [s for s in options.stages.split(",") if s]
    options.streams = options.streams.split(";") if options.streams else STREAMS
    store = options.workdir / "claims.json"
    data = (
      json.loads(store.read_text())
      if store.exists()
      else {"screening": {}, "rates": {}, "streams": {}, "lab": {}}
    )
    data["shared"] = options.shared or data.get("shared", False)
    measure(options, data)
    data = json.loads(tables.dump(data))  # in the file's order
    print(tables.as_text(data))
    figures, targets = tables.figures(data)
    if options.write:
      (options.write / "claims.json").write_text(tables.dump(data))
      page = options.write / "results.md"
      page.write_text(tables.fill(page.read_text(), data))
  ok = all(
    figures.get(k) is not None and figures[k] >= t["min"]
    for k, t in targets.items()
  )
  print(
    json.dumps(
      {"name": "claims", "figures": figures, "targets": targets, "ok": ok}
    )
  )
  # A claim that does not hold is a result, not a failure; the line above says
  # so, and `make bench` goes on.
  return 0 if ok or not options.quick else 1


if __name__ == "__main__":
  sys.exit(main())
