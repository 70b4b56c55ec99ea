"""How much of a saving in rollouts or tokens is one in seconds.

  python benchmarks/gain_in_seconds.py [--quick]

A rule that needs fewer rollouts to a target gains as many times in seconds
only if its rollouts cost the same. They cost more: it opens more prompts,
decodes in rounds, and updates on more rollouts, since fewer of them are without
signal. Two ratios say what is left of a gain:

  demo_rollouts   seconds per rollout, uniform 64 x 4 / rule of the house, the
                  demo's model and stream from the demo's warm start: gain in
                  seconds = this x gain in rollouts
  54m_tokens      seconds per generated token, the same two, a model of 54M
                  parameters on the same stream: gain in seconds = this x gain
                  in tokens; beside it the same for generation alone
  54m_long_...    the same with outputs of up to 17 tokens

Both in the lean form (common/lean.py): no more than 32 rollouts in the update.
Beside them the rule as it is by default, with one round less, eb_effective,
whose host work is less, and a lean uniform split.

Whole steps, the rules taking turns in one process on one core; CPU seconds. On
the demo's model the lower quartile of 60 steps. The large model is the small
one laid into large matrices (common/widened.py), so that it says what a policy
in training says: at steps AT of the small run, policy, history and place in the
stream are handed to it, and that step is done by both. Sums of these steps.
About 15 minutes; --quick takes a small model in place of the large one.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time

from common import lean, widened

# Name -> (rule, prompts per step, settings beside).
LEAN = lean.overrides()
RULES = {
  "uniform": ("uniform", 64, {}),
  "lean_uniform": ("uniform", 64, LEAN),
  "eb_effective": ("eb_effective", 32, {}),
  "lean_eb_effective": ("eb_effective", 32, LEAN),
  "eb_predicted": ("eb_predicted", 32, {}),
  "lean_eb_predicted": ("eb_predicted", 32, LEAN),
  "two_rounds": (
    "eb_predicted", 32, LEAN | {"allocation.eb_predicted.rounds": 2}
  ),
}  # fmt: skip
UNIFORM, HOUSE = "uniform", "lean_eb_predicted"
# Of the large model, in which the demo's trained policy is laid.
LARGE = dict(layers=13, width=640, heads=8, kv_heads=4, head_dim=64, ffn=1792)
SMALL = dict(layers=3, width=128, heads=8, kv_heads=4, head_dim=32, ffn=256)
STREAMS = {"54m": "sparse_signal", "54m_long": "sparse_signal, long"}
# Steps of the demo's run that are timed: it has learned the most by then.
AT = (1, 4, 8, 12, 16, 20)
TARGETS = {"demo_rollouts": {"min": 0.8}, "54m_tokens": {"min": 0.95}}


def configs_of(config):
  """{name: configuration} of RULES."""
  from vigor_jax import config as configuration

  found = {}
  for name, (rule, prompts, beside) in RULES.items():
    own = {"allocation.name": rule, "prompts_per_step": prompts} | beside
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


def timed(run, number):
  """(seconds, those of generation, tokens, rollouts, trained on) of a step."""
  begun = time.process_time()
  tokens, line = run.step(number)
  spent = time.process_time() - begun
  return (spent, run.generation - begun, tokens, run.config.rollout_budget,
          line["policy/active_rollouts"])  # fmt: skip


def taken(config, folder, steps):
  """Per rule, a row of `timed` for each step."""
  runs = runs_of(config, folder)
  found = {name: [] for name in runs}
  for number in range(steps + 2):
    for name, run in runs.items():
      row = timed(run, number)
      if number >= 2:  # Everything is compiled by then.
        found[name].append(row)
  for run in runs.values():
    run.record.close()
  return found


def taken_large(config, folder, sizes, at, say):
  """Per rule, a row of `timed` for steps `at` of the demo's run, done large.

  Before each of them the small run's policy, history and place in the stream
  are given to the large one.

  Args:
    sizes: fields of model.sizes; `norm_eps` is added.
  """
  import jax
  import step_overhead

  small, large = runs_of(config, os.path.join(folder, "small")), {}
  found = {name: [] for name in small}
  its = next(iter(small.values())).parts.sizes
  sizes = sizes | {"norm_eps": its.norm_eps * its.width / sizes["width"]}
  for number in range(max(at) + 1):
    for name, run in small.items():
      if number in at:
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
    if number in at:
      say(f"step {number} of {max(at)}")
  for run in (*small.values(), *large.values()):
    run.record.close()
  return found


def ratio(found, rule, what, unit, summed):
  """Cost per unit of UNIFORM / that of a rule: columns of `timed`'s rows.

  summed: of all steps together; otherwise the lower quartile of steps.
  """
  import numpy as np

  def cost(name):
    rows = np.array(found[name])
    if summed:
      return rows[:, what].sum() / rows[:, unit].sum()
    return np.percentile(rows[:, what] / rows[:, unit], 25)

  return float(cost(UNIFORM) / cost(rule))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument(
    "--cache", default="", help="folder of warm starts; empty: one of its own"
  )
  args = parser.parse_args()
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # Before JAX loads.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
  from common import streams
  import numpy as np

  from vigor_jax import host_memory

  host_memory.keep()
  say = lambda text: print(f"[gain_in_seconds] {text}", flush=True)
  found = {}
  with tempfile.TemporaryDirectory() as folder:
    cache = args.cache or os.path.join(folder, "warm_starts")
    config_of = lambda stream: streams.config_of(stream, cache, args.quick)
    place = os.path.join(folder, "demo")
    steps = 8 if args.quick else 60
    found["demo"] = taken(config_of("sparse_signal"), place, steps)
    say("the demo's model is done")
    for label, stream in list(STREAMS.items())[: 1 if args.quick else 2]:
      found[label] = taken_large(
        config_of(stream), os.path.join(folder, label),
        SMALL if args.quick else LARGE, (1, 3) if args.quick else AT,
        lambda text, label=label: say(f"{label}: {text}"),
      )  # fmt: skip
  figures = {}
  for label, rows in found.items():
    for rule in list(RULES)[1:]:
      ending = "" if rule == HOUSE else f"_{rule}"
      for measure, what, unit in (
        ("rollouts", 0, 3), ("tokens", 0, 2), ("tokens_generation", 1, 2)
      ):  # fmt: skip
        figures[f"{label}_{measure}{ending}"] = ratio(
          rows, rule, what, unit, summed=label != "demo"
        )
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
