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

Both of the lean form: two rounds after the opening one, at most 24 rollouts in
the update (`policy.update_rollouts`). Beside them the rule as it is by
default, eb_effective, whose host work is less, and a lean uniform split.

Whole steps, the rules taking turns in one process on one core; CPU seconds,
lower quartiles. The large model is random, so its verdicts are drawn by the
prompt's level, a pure function of what was asked and answered, and its learning
rate is next to none, so that all rules keep the same outputs: a share of mixed
groups as in `sparse_signal`, outputs of up to 25 tokens. About 9 minutes;
--quick takes a small model in place of the large one.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import zlib

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
LEAN_ROLLOUTS, LEAN_ROUNDS = 24, 2
OPERATIONS = 24
LARGE = dict(layers=13, width=640, heads=10, kv_heads=2, head_dim=64, ffn=1792)
SMALL = dict(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
TARGETS = {"demo_rollouts": {"min": 0.8}, "54m_tokens": {"min": 0.95}}


def verdict(completion: str, answer: str, level: int = 0, **metadata) -> float:
  """A coin by the prompt's level: solved, out of reach, or in between."""
  del metadata
  rate = {0: 0.97, OPERATIONS: 0.01}.get(int(level), 0.5)
  coin = zlib.crc32(f"{answer}/{completion}".encode()) / 2**32
  return float(coin < rate)


verdict.cheap = True


def taken(config, params, folder, steps, say):
  """Per rule, lists over steps: CPU seconds, those of generation, tokens."""
  import step_overhead

  runs = {}
  for name, (rule, prompts, lean) in RULES.items():
    own = config.copy_and_resolve_references()
    own.allocation.name, own.prompts_per_step = rule, prompts
    if lean:
      own.policy.update_rollouts = LEAN_ROLLOUTS
      if "rounds" in own.allocation[rule]:
        own.allocation[rule].rounds = LEAN_ROUNDS
    place = os.path.join(folder, name)
    real = step_overhead.Real(own, params, place)
    if params is None:
      params = starting_params(real.parts, place)
      real.state = real.parts.updater.init(step_overhead.copy(params))
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


def starting_params(parts, place):
  """The warm start if the config names one, else fresh parameters."""
  from vigor_jax import starting

  if not parts.config.init_from:
    return parts.fresh_params(0)
  return starting.initial_params(parts, place)[0]


def per(found, name, what, unit=None):
  """Lower quartile of seconds per step, or per token."""
  import numpy as np

  rows = np.array(found[name])
  cost = rows[:, what] / (1 if unit is None else rows[:, unit])
  return float(np.percentile(cost, 25))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  args = parser.parse_args()
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # Before JAX loads.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
  sys.modules.setdefault("gain_in_seconds", sys.modules["__main__"])
  import numpy as np

  from vigor_jax import host_memory
  from vigor_jax.config import loading

  host_memory.keep()
  say = lambda text: print(f"[gain_in_seconds] {text}", flush=True)
  demo = loading.load_file("configs/arithmetic.py")
  demo.task.difficulty = "sparse_signal"
  large = demo.copy_and_resolve_references()
  large.init_from = ""
  large.task.operations = OPERATIONS
  large.reward.name = "gain_in_seconds:verdict"
  # Coins teach nothing but drift, and outputs of another length: hold still.
  large.optimizer.learning_rate = 1e-9
  large.model.sizes.update(SMALL if args.quick else LARGE)
  large.sampling.prompt_buckets = (OPERATIONS + 2,)
  large.sampling.max_new_tokens = OPERATIONS + 1
  large.policy.row_length = 64  # Prompt and output are 51 tokens at most.
  with tempfile.TemporaryDirectory() as folder:
    if args.quick:
      demo.sft.steps = 20
    place = os.path.join(folder, "demo")
    first = taken(demo, None, place, 8 if args.quick else 60, lambda _: None)
    say("the demo's model is done")
    place = os.path.join(folder, "large")
    second = taken(large, None, place, 2 if args.quick else 4, say)
  figures = {}
  for label, found in (("demo", first), ("54m", second)):
    for rule in list(RULES)[1:]:
      over = lambda *what, f=found, r=rule: per(f, UNIFORM, *what) / per(
        f, r, *what
      )
      ending = "" if rule == HOUSE else f"_{rule}"
      figures[f"{label}_rollouts{ending}"] = over(0)
      figures[f"{label}_tokens{ending}"] = over(0, 2)
      figures[f"{label}_tokens_generation{ending}"] = over(1, 2)
  for label, found in (("demo", first), ("54m", second)):
    for name in found:
      rows = np.array(found[name])
      figures[f"{label}_ms_a_step_{name}"] = 1e3 * per(found, name, 0)
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
