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
                  parameters: gain in seconds = this x gain in tokens; beside
                  it the same for generation alone

Both in the lean form (lean.py). Beside them the rule as it is by default,
eb_effective, whose host work is less, and a lean uniform split.

Whole steps, the rules taking turns in one process on one core; CPU seconds,
lower quartiles. The large model has a warm start of its own, so that its
outputs and verdicts are a policy's; its learning rate is next to none, so that
all rules keep the same outputs. About @@ minutes, of which @@ for that warm
start (kept in --cache); --quick takes a small model in place of the large one.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time

import lean
import widened

# Name -> (rule, prompts per step, whether it is lean).
RULES = {
  "uniform": ("uniform", 64, False),
  "lean_uniform": ("uniform", 64, True),
  "eb_effective": ("eb_effective", 32, False),
  "lean_eb_effective": ("eb_effective", 32, True),
  "eb_predicted": ("eb_predicted", 32, False),
  "lean_eb_predicted": ("eb_predicted", 32, True),
}
UNIFORM, HOUSE = "uniform", "lean_eb_predicted"
# Of the large model, in which the demo's trained policy is laid.
LARGE = dict(layers=13, width=640, heads=8, kv_heads=4, head_dim=64, ffn=1792)
SMALL = dict(layers=3, width=128, heads=8, kv_heads=4, head_dim=32, ffn=256)
STREAMS = {"54m": "sparse_signal, long", "54m_short": "sparse_signal"}
TARGETS = {"demo_rollouts": {"min": 0.8}, "54m_tokens": {"min": 0.95}}


def taken(config, folder, steps, say, sizes=None):
  """Per rule, lists over steps: CPU seconds, those of generation, tokens."""
  import step_overhead

  from vigor_jax import config as configuration

  runs, params = {}, None
  for name, (rule, prompts, is_lean) in RULES.items():
    own = config.copy_and_resolve_references()
    own.allocation.name, own.prompts_per_step = rule, prompts
    if is_lean:
      own = configuration.with_overrides(own, lean.overrides(rule))
    if params is None:
      params = starting_params(own, folder, sizes)
    if sizes:
      own.model.sizes.update(sizes)
      # Outputs of a policy that learns at its own pace would differ by rule.
      own.optimizer.learning_rate = 1e-9
    real = step_overhead.Real(own, params, os.path.join(folder, name))
    runs[name] = real
  found = {name: [] for name in runs}
  for number in range(steps + 2):
    for name, run in runs.items():
      begun = time.process_time()
      tokens, line = run.step(number)
      spent = time.process_time() - begun
      if number >= 2:  # Everything is compiled by then.
        found[name].append(
          (spent, run.generation - begun, tokens,
           line["policy/active_rollouts"])
        )  # fmt: skip
    say(f"step {number + 1} of {steps + 2}")
  for run in runs.values():
    run.record.close()
  return found


def starting_params(config, folder, sizes):
  """The warm start of `config`, laid into a model of `sizes` if they are given.

  sizes: fields of model.sizes; `norm_eps` is added.
  """
  import jax

  from vigor_jax import experiment, starting

  parts = experiment.build(config)
  params = starting.initial_params(parts, os.path.join(folder, "small"))[0]
  if not sizes:
    return params
  small = parts.sizes
  sizes["norm_eps"] = small.norm_eps * small.width / sizes["width"]
  large = dataclasses.replace(small, **sizes)
  wide = widened.widened(params, small, large)
  difference = widened.disagreement(params, small, wide, large)
  if difference > 1e-4:
    raise SystemExit(f"the widened policy differs by {difference}")
  return jax.tree.map(jax.numpy.asarray, wide)


def per(found, name, what, unit=None):
  """Lower quartile of seconds per step, or per token."""
  import numpy as np

  rows = np.array(found[name])
  cost = rows[:, what] / (1 if unit is None else rows[:, unit])
  return float(np.percentile(cost, 25))


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
  import numpy as np
  import streams

  from vigor_jax import host_memory

  host_memory.keep()
  say = lambda text: print(f"[gain_in_seconds] {text}", flush=True)
  steps = 8 if args.quick else 60
  found = {}
  with tempfile.TemporaryDirectory() as folder:
    cache = args.cache or os.path.join(folder, "warm_starts")

    config_of = lambda stream: streams.config_of(stream, cache, args.quick)
    place = os.path.join(folder, "demo")
    config = config_of("sparse_signal")
    found["demo"] = taken(config, place, steps, lambda _: None)
    say("the demo's model is done")
    for label, stream in list(STREAMS.items())[: 1 if args.quick else 2]:
      place = os.path.join(folder, label)
      found[label] = taken(
        config_of(stream), place, 2 if args.quick else 4,
        lambda text, label=label: say(f"{label}: {text}"),
        SMALL if args.quick else LARGE,
      )  # fmt: skip
  figures = {}
  for label, rows in found.items():
    for rule in list(RULES)[1:]:
      over = lambda *what, f=rows, r=rule: per(f, UNIFORM, *what) / per(
        f, r, *what
      )
      ending = "" if rule == HOUSE else f"_{rule}"
      figures[f"{label}_rollouts{ending}"] = over(0)
      figures[f"{label}_tokens{ending}"] = over(0, 2)
      figures[f"{label}_tokens_generation{ending}"] = over(1, 2)
  for label, by_rule in found.items():
    for name in by_rule:
      rows = np.array(by_rule[name])
      figures[f"{label}_ms_a_step_{name}"] = 1e3 * per(by_rule, name, 0)
      figures[f"{label}_active_a_step_{name}"] = float(rows[:, 3].mean())
      figures[f"{label}_tokens_a_step_{name}"] = float(rows[:, 2].mean())
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
