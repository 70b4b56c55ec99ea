"""What a training step costs over a bare loop, and its host time.

  python benchmarks/step_overhead.py [--quick] [--config=configs/arithmetic.py]

The bare loop is what one file would hold (common/bare.py): a jitted sampling
scan over a fixed [B] batch with a cache, verdicts, advantages by reshape, a
jitted update of the padded [B, L] batch; and the same with the rollouts of zero
advantage dropped to a static half. It and the real step (rounds, packing,
record, files) under uniform, vigor and eb_widening train the same policy on
the same prompts, taking turns in one process on one core. Seconds are the
process's CPU seconds, lower quartiles over steps, so that other work on the
machine stays out; wall seconds are printed beside them. Generation with
uniform is also timed at other slot counts than the demo's.

Host time in allocation and buffers is time/allocate's share of a step, for
the demo's model and for one of 4.5M parameters (whose verdicts are noise, so
that it has something to train on). The warm start takes most
of the time: about 2 minutes, less with --quick.
"""

import argparse
import json
import os
import tempfile
import time

from common import bare

RULES = ("uniform", "vigor", "eb_widening")
LARGER = dict(layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=704)
SLOTS = (32, 64, 96, 128, 256)
TARGETS = {
  **{f"{rule}_over_bare": {"max": 2.0} for rule in RULES},
  "generation_per_token_vigor_over_uniform": {"max": 1.15},
  "demo_slots_over_best": {"max": 1.1},
  "compiles_after_two_steps": {"max": 0},
  **{f"allocate_share_{rule}": {"max": 0.05} for rule in RULES},
  "allocate_share_4m": {"max": 0.01},
}


class Real:
  """The training step of vigor_jax.train, its record included."""

  def __init__(self, config, params, folder):
    from vigor_jax import experiment, record, step

    self.parts = experiment.build(config)
    self.config = config
    self.params = params if params is not None else self.parts.fresh_params(0)
    self.train = step.TrainingStep(self.parts)
    self.state = self.parts.updater.init(copy(self.params))
    self.record = record.Record(config, folder, quiet=True, total_steps=10**6)
    self.parts.sampler.warm_up(self.state.params)

  def step(self, number, scorer=None):
    """(tokens, line of metrics.jsonl) of one training step."""
    from vigor_jax import compilation, measure

    record, begun = self.record, time.perf_counter()
    timer = measure.PhaseTimer()
    rollouts = self.train.collect(self.state.params, number, timer)
    self.generation = time.process_time()
    self.state, done = self.train.learn(self.state, rollouts, number, timer)
    tokens = rollouts.tokens
    record.counters.add(rollouts.buffer.size, tokens)
    line = {
      **record.counters.values(),
      **done.metrics(),
      "compiles": compilation.count(),
      **timer.metrics(time.perf_counter() - begun),
    }
    record.train_line(number + 1, line)
    record.group_line(number + 1, done.group_record)
    return tokens, line


def copy(params):
  import jax

  return jax.tree.map(jax.numpy.copy, params)


def measured(step, number, scorer):
  """Seconds of a step (CPU and wall), and what it returned."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = step(number, scorer)
  return time.process_time() - cpu, time.perf_counter() - wall, cpu, result


def demo(config, folder, steps):
  """Figures of the demo's model: bare loops and rules taking turns."""
  import numpy as np
  from flax import nnx

  from vigor_jax import compilation, starting

  runs, params = {}, None
  for rule in RULES:
    own = config.copy_and_resolve_references()
    own.allocation.name = rule
    real = Real(own, params, os.path.join(folder, rule))
    if params is None:
      params = starting.initial_params(
        real.parts, os.path.join(folder, rule))[0]
      real.state = real.parts.updater.init(copy(params))
    runs[rule] = real
  parts = runs["uniform"].parts
  plain = nnx.to_pure_dict(params)
  for name, half in (("bare", False), ("bare_half", True)):
    runs[name] = bare.Bare(config, parts.task, parts.sizes, plain, half)

  times = {name: [] for name in runs}
  compiled = None
  for number in range(steps + 2):
    if number == 2:
      compiled = compilation.count()
    for name, run in runs.items():
      cpu, wall, begun, result = measured(run.step, number, parts.scorer)
      row = dict(cpu=cpu, wall=wall)
      if name in RULES:
        tokens, line = result
        row.update(
          per_token=(run.generation - begun) / tokens,
          allocate=share(line),
          active=line["policy/active_rollouts"],
          useful=line["policy/useful_share"],
          utilisation=line["slots/utilisation"],
        )
      if number >= 2:
        times[name].append(row)
  compiles = compilation.count() - compiled
  for run in runs.values():
    if isinstance(run, Real):
      run.record.close()

  def low(name, key):
    return float(np.percentile([r[key] for r in times[name]], 25))

  figures = {"compiles_after_two_steps": compiles}
  for name in runs:
    figures[f"{name}_cpu_ms"] = 1e3 * low(name, "cpu")
    figures[f"{name}_wall_ms"] = 1e3 * low(name, "wall")
  for rule in RULES:
    figures[f"{rule}_over_bare"] = low(rule, "cpu") / low("bare", "cpu")
    figures[f"{rule}_over_bare_half"] = low(rule, "cpu") / low(
      "bare_half", "cpu"
    )
    figures[f"allocate_share_{rule}"] = float(
      np.median([r["allocate"] for r in times[rule]])
    )
    for key in ("active", "useful", "utilisation"):
      figures[f"{key}_{rule}"] = float(np.mean([r[key] for r in times[rule]]))
  figures["generation_per_token_vigor_over_uniform"] = low(
    "vigor", "per_token"
  ) / low("uniform", "per_token")
  return figures | slot_counts(config, params, steps)


def share(line):
  """time/allocate's share of a step."""
  phases = ("prefill", "decode", "reward", "allocate", "update", "other")
  return line["time/allocate"] / sum(line[f"time/{p}"] for p in phases)


class Generation:
  """Uniform's rollouts alone, with a slot count of its own."""

  def __init__(self, config, params, slots):
    from vigor_jax import experiment, rollouts

    config = config.copy_and_resolve_references()
    config.allocation.name = "uniform"
    config.sampling.slots = slots
    self.parts = experiment.build(config)
    self.params = copy(params)
    self.collector = rollouts.Collector(self.parts)
    self.parts.sampler.warm_up(self.params)

  def per_token(self, number):
    """CPU seconds per generated token of one step."""
    from vigor_jax import measure

    begun = time.process_time()
    rollouts = self.collector.collect(
      self.params, number, measure.PhaseTimer()
    )
    spent = time.process_time() - begun
    self.parts.stream.advance(rollouts.groups.taken)
    return spent / rollouts.tokens


def slot_counts(config, params, steps):
  """Uniform's generation at the demo's slot count and at others."""
  import numpy as np

  own = config.sampling.slots
  runs = {n: Generation(config, params, n) for n in sorted({own, *SLOTS})}
  times = {n: [] for n in runs}
  for number in range(steps + 1):
    for n, run in runs.items():
      times[n].append(run.per_token(number))
  cost = {n: float(np.percentile(t[1:], 25)) for n, t in times.items()}
  return {
    **{f"generation_us_per_token_{n}": 1e6 * c for n, c in cost.items()},
    "demo_slots_over_best": cost[own] / min(cost.values()),
  }


def larger(config, folder, steps):
  """Share of allocation and buffers in a step of a 4.5M model."""
  import numpy as np

  config = config.copy_and_resolve_references()
  config.allocation.name = "vigor"
  config.model.sizes.update(LARGER)
  config.reward.noise = 0.3
  real = Real(config, None, os.path.join(folder, "larger"))
  lines = [real.step(number)[1] for number in range(steps + 1)][1:]
  real.record.close()
  return {
    "parameters_4m": real.parts.sizes.num_params,
    "allocate_share_4m": float(np.median([share(line) for line in lines])),
    "active_4m": float(np.mean([r["policy/active_rollouts"] for r in lines])),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--config", default="configs/arithmetic.py")
  args = parser.parse_args()
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # Before JAX loads.
  from vigor_jax import host_memory
  from vigor_jax.config import loading

  host_memory.keep()
  config = loading.load_file(args.config)
  with tempfile.TemporaryDirectory() as folder:
    figures = demo(config, folder, 10 if args.quick else 60)
    figures |= larger(config, folder, 2 if args.quick else 8)
  for name, value in figures.items():
    print(f"{name:44s} {value:.4g}")
  ok = all(figures[n] <= t["max"] for n, t in TARGETS.items())
  rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
  print(
    json.dumps(
      dict(name="step_overhead", figures=rounded, targets=TARGETS, ok=ok)
    )
  )
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
