"""How much of a saving in rollouts or tokens is one in seconds.

  python benchmarks/gain_in_seconds.py [--quick]

A rule that needs fewer rollouts to a target gains as many times in seconds
only if its rollouts cost the same. They cost more: it opens more prompts,
decodes in rounds, and updates on more rollouts, since fewer of them are without
signal. These ratios say what is left of a gain:

  demo_wall_...   seconds per rollout, uniform 64 x 4 / rule of the house, the
                  demo's model and stream from the demo's warm start, by the
                  clock with all cores: gain in seconds = this x gain in
                  rollouts
  demo_rollouts   the same in processor seconds of one core, where nothing of
                  the host's work goes on beside the device's
  54m_tokens      seconds per generated token, the same two, a model of 54M
                  parameters on the same stream: gain in seconds = this x gain
                  in tokens; beside it the same for generation alone
  54m_long_...    the same with outputs of up to 17 tokens

The rule in its lean form (common/lean.py). Beside it the rule as it is by
default, eb_effective, whose host work is less, and a lean uniform split.

Every rule with its tuned learning rate, over its own way to the late target:
as many steps as its runs took in docs/claims.json (median). Whole steps, the
rules taking turns in one process on one core; CPU seconds, but for
demo_wall_... On the demo's model each step of the way is the least of PASSES
passes over it, which are the same steps, and the way is their sum. The
large model is the small one laid into large matrices (common/widened.py), so
that it says what a policy in training says: at POINTS steps of the small run's
way, the midpoints of equal parts, policy, history and place in the stream are
handed to it, and that step is done by both. Sums of these steps. About 25
minutes; --quick takes a small model in place of the large one.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

# Before NumPy: its BLAS is to have one thread, as in a run.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import lean, widened

# Name -> (rule, prompts per step, name in docs/claims.json, where "lean" says
# that it is so).
RULES = {
  "uniform": ("uniform", 64, "uniform 64 x 4"),
  "lean_uniform": ("uniform", 64, "lean uniform 64 x 4"),
  "eb_effective": ("eb_effective", 32, "eb_effective"),
  "lean_eb_effective": ("eb_effective", 32, "lean eb_effective"),
  "eb_predicted": ("eb_predicted", 32, "eb_predicted"),
  "lean_eb_predicted": ("eb_predicted", 32, "lean eb_predicted"),
}
UNIFORM, HOUSE = "uniform", "lean_eb_predicted"
# Of the large model, in which the demo's trained policy is laid.
LARGE = dict(layers=13, width=640, heads=8, kv_heads=4, head_dim=64, ffn=1792)
SMALL = dict(layers=3, width=128, heads=8, kv_heads=4, head_dim=32, ffn=256)
STREAMS = {"54m": "sparse_signal", "54m_long": "sparse_signal, long"}
POINTS = 6
PASSES = 5
ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGETS = {"demo_wall_rollouts": {"min": 0.8}, "54m_tokens": {"min": 0.95}}


def ways(stream):
  """{name: steps of a rule to the late target}: medians, docs/claims.json."""
  import numpy as np

  from vigor_jax.reporting import paired

  data = json.loads((ROOT / "docs" / "claims.json").read_text())
  played = data["streams"][stream] | data["lean"][stream]
  goal = paired.goals(played[paired.PUBLISHED])
  found = {}
  for name, (*_, its) in RULES.items():
    reached = paired.spent(played[its], goal, 1, "rollouts").values()
    found[name] = round(float(np.median([r.at for r in reached])) / 256)
  return found


def configs_of(config):
  """{name: configuration} of RULES, each with its tuned learning rate."""
  from vigor_jax import config as configuration

  rates = json.loads((ROOT / "docs" / "claims.json").read_text())["rates"]
  found = {}
  for name, (rule, prompts, its) in RULES.items():
    own = {
      "allocation.name": rule,
      "prompts_per_step": prompts,
      "optimizer.learning_rate": rates[its.removeprefix("lean ")],
    } | (lean.overrides(rule) if its.startswith("lean") else {})
    found[name] = configuration.with_overrides(config, own)
  return found


def runs_of(config, folder):
  """{name: run} of RULES, all from the config's warm start."""
  import step_overhead

  from vigor_jax import experiment, starting

  parts = experiment.build(config)
  params = starting.initial_params(parts, os.path.join(folder, "start"))[0]
  return {
    name: step_overhead.Real(own, params, os.path.join(folder, name))
    for name, own in configs_of(config).items()
  }


def timed(run, number, clock=time.process_time):
  """(seconds, those of generation, tokens, rollouts, trained on) of a step."""
  begun, used = clock(), time.process_time()
  tokens, line = run.step(number)
  spent = clock() - begun
  return (spent, run.generation - used, tokens, run.config.rollout_budget,
          line["policy/active_rollouts"])  # fmt: skip


def taken(config, folder, steps, clock=time.process_time):
  """Per rule, a row of `timed` for each step of its way.

  Every pass does the same steps, so that the least seconds of each are those
  that other work on the machine disturbed least.

  steps: {name: how many}.
  """
  found = {name: [] for name in steps}
  for turn in range(PASSES):
    runs = runs_of(config, os.path.join(folder, f"pass {turn}"))
    for number in range(max(steps.values()) + 2):
      for name, run in runs.items():
        if number >= steps[name] + 2:
          continue
        row = timed(run, number, clock)
        at = number - 2  # Everything is compiled by then.
        if at >= 0 and turn == 0:
          found[name].append(row)
        elif at >= 0:
          before = found[name][at]
          assert row[2:] == before[2:], (name, number)
          found[name][at] = (*map(min, row[:2], before[:2]), *row[2:])
    for run in runs.values():
      run.record.close()
  return found


def taken_large(config, folder, sizes, at, say):
  """Per rule, a row of `timed` for steps `at` of the demo's run, done large.

  Before each of them the small run's policy, history and place in the stream
  are given to the large one.

  Args:
    sizes: fields of model.sizes; `norm_eps` is added.
    at: {name: its steps}.
  """
  import jax
  import step_overhead

  small, large = runs_of(config, os.path.join(folder, "small")), {}
  found = {name: [] for name in small}
  its = next(iter(small.values())).parts.sizes
  sizes = sizes | {"norm_eps": its.norm_eps * its.width / sizes["width"]}
  last = max(map(max, at.values()))
  for number in range(last + 1):
    for name, run in small.items():
      if number > max(at[name]):
        continue
      if number in at[name]:
        wide = widened.widened(
          run.state.params, its, dataclasses.replace(its, **sizes)
        )
        if name not in large:
          difference = widened.disagreement(
            run.state.params, its, wide, dataclasses.replace(its, **sizes)
          )
          if difference > 1e-4:
            raise SystemExit(f"the widened policy differs by {difference}")
          own = run.config.copy_and_resolve_references()
          own.model.sizes.update(sizes)
          large[name] = step_overhead.Real(
            own, wide, os.path.join(folder, name)
          )
          times = 2  # The first compiles.
        else:
          times = 1
        for _ in range(times):
          it = large[name]
          for part in ("allocator", "stream"):
            mine, its_part = getattr(run.parts, part), getattr(it.parts, part)
            its_part.load_state_dict(json.loads(json.dumps(mine.state_dict())))
          it.state = None  # Frees it before the next one is made.
          it.state = it.parts.updater.init(
            jax.tree.map(jax.numpy.asarray, wide)
          )
          row = timed(it, number)
        found[name].append(row)
      run.step(number)
    if any(number in steps for steps in at.values()):
      say(f"step {number} of {last}")
  for run in (*small.values(), *large.values()):
    run.record.close()
  return found


def ratio(found, rule, what, unit):
  """Cost per unit of UNIFORM / that of a rule: sums of `timed`'s columns."""
  import numpy as np

  def cost(name):
    rows = np.array(found[name])
    return rows[:, what].sum() / rows[:, unit].sum()

  return float(cost(UNIFORM) / cost(rule))


def by_the_clock(cores, quick, cache, folder):
  """`taken` for the demo in a process with all cores, in seconds that pass."""
  rows = os.path.join(folder, "wall.json")
  command = [sys.executable, __file__, f"--wall={rows}", f"--cache={cache}"]
  own = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  subprocess.run(command + ["--quick"] * quick, check=True)
  os.sched_setaffinity(0, own)
  return json.loads(pathlib.Path(rows).read_text())


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--wall", default="", help=argparse.SUPPRESS)
  parser.add_argument(
    "--cache", default="", help="folder of warm starts; empty: one of its own"
  )
  args = parser.parse_args()
  cores = os.sched_getaffinity(0)
  if not args.wall:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # Before JAX loads.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
  from common import streams
  import numpy as np

  from vigor_jax import host_memory

  host_memory.keep()
  say = lambda text: print(f"[gain_in_seconds] {text}", flush=True)
  way = {label: ways(stream) for label, stream in STREAMS.items()}
  steps = dict.fromkeys(RULES, 8) if args.quick else way["54m"]
  found = {}
  with tempfile.TemporaryDirectory() as folder:
    cache = args.cache or os.path.join(folder, "warm_starts")
    config_of = lambda stream: streams.config_of(stream, cache, args.quick)
    demo = lambda *clock: taken(
      config_of("sparse_signal"), os.path.join(folder, "demo"), steps, *clock
    )
    if args.wall:
      pathlib.Path(args.wall).write_text(json.dumps(demo(time.perf_counter)))
      return
    found["demo"] = demo()
    found["demo_wall"] = by_the_clock(cores, args.quick, cache, folder)
    say("the demo's model is done")
    for label, stream in list(STREAMS.items())[: 1 if args.quick else 2]:
      points = {
        name: tuple(int((k + 0.5) * n / POINTS) for k in range(POINTS))
        for name, n in way[label].items()
      }
      found[label] = taken_large(
        config_of(stream), os.path.join(folder, label),
        SMALL if args.quick else LARGE,
        dict.fromkeys(RULES, (1, 3)) if args.quick else points,
        lambda text, label=label: say(f"{label}: {text}"),
      )  # fmt: skip
  figures = {}
  for label, rows in found.items():
    for rule in list(RULES)[1:]:
      ending = "" if rule == HOUSE else f"_{rule}"
      for measure, what, unit in (
        ("rollouts", 0, 3), ("tokens", 0, 2), ("tokens_generation", 1, 2)
      ):  # fmt: skip
        if label != "demo_wall" or measure == "rollouts":
          figures[f"{label}_{measure}{ending}"] = ratio(rows, rule, what, unit)
  for label, by_rule in found.items():
    for name, rows in by_rule.items():
      spent, _, tokens, _, active = np.mean(rows, axis=0)
      figures[f"{label}_ms_a_step_{name}"] = 1e3 * float(spent)
      figures[f"{label}_active_a_step_{name}"] = float(active)
      figures[f"{label}_tokens_a_step_{name}"] = float(tokens)
  for name, value in figures.items():
    print(f"{name:36s} {value:.4g}")
  targets = {} if args.quick else TARGETS
  ok = all(figures[n] >= t["min"] for n, t in targets.items())
  rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
  print(
    json.dumps(
      {"name": "gain_in_seconds", "figures": rounded, "targets": targets,
       "ok": ok}
    )
  )  # fmt: skip


if __name__ == "__main__":
  main()
