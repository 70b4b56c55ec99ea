"""How much of the update's rows is work, on completions of heavy-tailed length.

  python benchmarks/packing.py [--quick] [--update | --ahead=3b:768,1536]

Packs steps of the published configurations (their budget, row length and rows
per micro-batch) with the trainer's own code. Completions are lognormal, cut at
the limit, with a mean of a quarter of it; prompts are log-uniform; rollouts are
shared out unevenly. Per configuration, means over the steps:

  useful_share_*    tokens / tokens of the micro-batches that are computed
  padded_share_*    the same if every rollout had a row of the longest length
  informative_*     useful share when half of the groups are left out, as those
                    without a difference are
  micro_*           micro-batches; micro_halves_* with policy.row_buckets of
                    half the row length, of which short_* have short rows
  attention_*       what their attention costs, over that without short rows;
                    attention_eighth_* with a mean of an eighth of the limit

and seconds_a_step, the largest processor time of packing. Takes seconds.

--update takes CPU seconds of updates of a 4.5M model instead, one core, two
steps of 64 rollouts, in rows of one length (1024 tokens), of two (and 512) and,
where that makes a difference, of three (and 256), taking turns; smallest of
two. Means of a quarter (*_4) and an eighth (*_8) of the limit. 6 minutes.

--ahead=3b:768,1536 asks the TPU compiler (the `tpu` extra; Python 3.12) what a
micro-batch of qwen2p5_3b_math's update costs a chip of its topology in rows of
768 and in rows of 1536 tokens, and what one program with both needs; 8b: is
qwen3_8b_livecodebench. 5 minutes or more.
"""

import argparse
import json
import os
import pathlib
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = {"3b": "qwen2p5_3b_math", "8b": "qwen3_8b_livecodebench"}
LEAST = 0.85
SMALL, ROW = 64, 1024  # Rollouts and row length of the 4.5M model.


def step_of(config, seed, part=4):
  """(group, prompt lengths, completion lengths) of a step.

  part: of the longest completion the mean one is 1 / part.
  """
  from vigor_jax.aot import programs

  rng = np.random.default_rng(seed)
  count, budget = config.prompts_per_step, config.rollout_budget
  short, *_, long = config.sampling.prompt_buckets
  prompts = np.exp(rng.uniform(np.log(short / 4), np.log(long), count))
  sizes = rng.multinomial(budget, rng.dirichlet(np.ones(count)))
  group = np.repeat(np.arange(count), sizes)
  longest = config.sampling.max_new_tokens
  return (group, prompts.astype(np.int64),
          programs.heavy_tailed(rng, budget, longest, longest / part))


def packed(config, shapes, group, prompts, lengths):
  """(micro-batches by bucket, useful share, seconds to pack)."""
  from vigor_jax.policy import buckets, packing

  ones = np.ones(len(group), np.float32)
  tokens = np.zeros((len(group), lengths.max()), np.int32)
  begun = time.process_time()
  rows, used = buckets.pack(
    group, [np.zeros(n, np.int32) for n in prompts], tokens, lengths, ones,
    ones, tokens.astype(np.float32), shapes=shapes,
    rollouts=config.rollout_budget)
  seconds = time.process_time() - begun
  return np.array(packing.each(used)), packing.useful_share(rows), seconds


def shares(config, seed):
  """Figures of one step, by name."""
  from vigor_jax.policy import build, buckets

  group, prompts, lengths = step_of(config, seed)
  estimator = build.estimator_of(config)
  one, length = estimator.shapes, estimator.row_length
  two = buckets.shapes(length, estimator.rows_per_micro, (length // 2,))
  micro, useful, seconds = packed(config, one, group, prompts, lengths)
  half = group % 2 == 0
  _, informative, _ = packed(config, one, group[half], prompts, lengths[half])
  found = dict(
    useful_share=useful, informative=informative,
    padded_share=(lengths + prompts[group]).mean() / length,
    micro=micro.sum(), seconds=seconds)

  def with_halves(group, prompts, lengths, alone):
    used, useful, seconds = packed(config, two, group, prompts, lengths)
    attention = used @ np.array(two.lengths) / (alone.sum() * length)
    return used, attention, useful, seconds

  used, found["attention"], found["useful_share_halves"], seconds = (
    with_halves(group, prompts, lengths, micro))
  found.update(micro_halves=used.sum(), short=used[0],
               seconds_halves=seconds)
  other = step_of(config, seed, part=8)
  alone, _, _ = packed(config, one, *other)
  _, found["attention_eighth"], _, _ = with_halves(*other, alone)
  return found


def plans(quick):
  """Figures of both configurations."""
  from vigor_jax.config import load_file

  figures, slowest = {}, 0.0
  for label, name in CONFIGS.items():
    config = load_file(str(ROOT / "configs" / f"{name}.py"))
    steps = [shares(config, seed) for seed in range(2 if quick else 10)]
    least = min(step["useful_share"] for step in steps)
    figures[f"useful_share_least_{label}"] = float(least)
    for key in steps[0]:
      values = [float(step[key]) for step in steps]
      if key.startswith("seconds"):
        slowest = max(slowest, *values)
      else:
        figures[f"{key}_{label}"] = float(np.mean(values))
  figures["seconds_a_step"] = slowest
  return figures


# ------------------------------------------------------------------ seconds


def update_seconds(quick):
  """CPU seconds of updates with rows of one, two and three lengths."""
  # Before JAX loads, which counts the cores.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  from vigor_jax import host_memory
  from vigor_jax.policy import buckets, optimizer, packing, transformer, update

  host_memory.keep()
  sizes = transformer.Sizes(
    layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=704, vocab=512,
    qkv_bias=True, tied=True)
  graph, params = transformer.create(sizes, 0)
  updater = update.Updater(graph, update.Objective(),
                           optimizer.OptimizerOptions(name="adam"))
  state, figures = updater.init(params), {}
  for part in (8,) if quick else (4, 8):
    packs = {}
    for name, shorter in (("one", ()), ("two", (512,)), ("three", (256, 512))):
      steps = [
        buckets.pack(**small_step(seed, part), rollouts=SMALL,
                     shapes=buckets.shapes(ROW, 1, shorter))
        for seed in range(1 if quick else 2)]
      used = np.array([packing.each(used) for _, used in steps])
      print(f"a mean of 1/{part}, {name}: micro-batches {used.tolist()}, the "
            "shortest rows first", flush=True)
      figures[f"update_useful_{name}_{part}"] = float(np.mean(
        [packing.useful_share(rows) for rows, _ in steps]))
      figures[f"update_micro_{name}_{part}"] = float(used.sum())
      if name != "three" or used[:, 0].any():  # Else it is the same again.
        packs[name] = steps
    seconds = {name: 0.0 for name in packs}
    for name, steps in packs.items():  # Compiles, and gradients are compared.
      state, metrics = updater.update(state, *steps[0], float(SMALL), 0.0)
      figures[f"grad_norm_{name}_{part}"] = update.to_host(metrics)["grad_norm"]
    for steps in zip(*packs.values()):
      best = np.full(len(steps), np.inf)
      for _ in range(1 if quick else 2):
        for i, (rows, used) in enumerate(steps):
          begun = time.process_time()
          state, metrics = updater.update(state, rows, used, float(SMALL), 0.0)
          update.to_host(metrics)
          best[i] = min(best[i], time.process_time() - begun)
      for name, value in zip(packs, best):
        seconds[name] += value
    for name, value in seconds.items():
      figures[f"update_s_{name}_{part}"] = float(value)
      if name != "one":
        figures[f"{name}_over_one_{part}"] = float(value / seconds["one"])
  return figures


def small_step(seed, part):
  """Rollouts of the 4.5M model in groups of 8, with a heavy tail."""
  from vigor_jax.aot import programs

  rng = np.random.default_rng(seed)
  prompt = 64
  longest = ROW - prompt
  lengths = programs.heavy_tailed(rng, SMALL, longest, longest / part)
  return dict(
    group=np.arange(SMALL) // 8,
    prompts=list(rng.integers(1, 512, (SMALL // 8, prompt), np.int32)),
    tokens=rng.integers(1, 512, (SMALL, longest), np.int32), lengths=lengths,
    advantages=rng.normal(size=SMALL).astype(np.float32),
    weights=(1 / lengths).astype(np.float32),
    sampler_logprobs=np.full((SMALL, longest), -6.2, np.float32))


# ------------------------------------------------------------- ahead of time


def ahead(what, quick):
  """What the compiler says of micro-batches of rows of several lengths.

  what: "3b:768,1536", configuration and lengths, ascending.
  """
  from vigor_jax.aot import chips
  from vigor_jax.config import load_file

  label, _, lengths = what.partition(":")
  config = load_file(str(ROOT / "configs" / f"{CONFIGS[label]}.py"))
  chips.prepare(config.topology)  # Before jax is imported.
  return compiled(config.copy_and_resolve_references(),
                  [int(length) for length in lengths.split(",")], quick)


def compiled(config, lengths, quick):
  """Figures of the update with rows of these lengths, by name."""
  from vigor_jax.aot import chips, cost, estimate, programs
  from vigor_jax.policy import packing

  topology = chips.topology(config.topology)
  *shorter, longest = lengths
  if longest < config.policy.row_length:
    config.sampling.prompt_buckets = (512,)
    config.sampling.max_new_tokens = longest - 512
  config.policy.row_length = longest
  config.policy.row_buckets = tuple(shorter)
  if quick:
    config.model.sizes.layers = 6
  devices, chip = topology.devices, topology.chip
  plan = programs.Plan(config, devices, programs.workload_of(config, 0.25), 1)
  program = next(p for p in plan.programs() if p.name == "update")
  begun = time.process_time()
  traced = program.function.trace(*program.arguments)
  with chips.uncached():
    made = traced.lower().compile(compiler_options=estimate.WINDOWED_OFF)
  seconds = time.process_time() - begun
  memory, text = made.memory_analysis(), made.as_text()
  label = "_".join(map(str, lengths))
  figures = {
    f"compile_cpu_s_{label}": seconds,
    f"temporary_gib_{label}": memory.temp_size_in_bytes / 2**30,
    f"alive_gib_{label}": memory.peak_memory_in_bytes / 2**30,
  }
  scopes = [packing.scope(rows) for rows in packing.each(plan.batch())]

  def costs(counts):
    trips = (dict(zip(scopes, counts)),)
    found = cost.of_text(text, len(devices), trips)
    return np.array([
      found.cycles / chip.clock * 1e3, found.hbm_bytes / 1e9,
      found.wire_total / 1e9,
      cost.flops(traced.jaxpr, trips) / len(devices) / 1e12])

  nothing, each = costs([0] * len(scopes)), np.eye(len(scopes), dtype=int)
  for scope, counts in zip(scopes, each):
    for what, value in zip(("modelled_ms", "hbm_gb", "collectives_gb",
                            "tflop"), costs(counts) - nothing):
      figures[f"{what}_{scope}_in_{label}"] = float(value)
  return figures


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--update", action="store_true")
  parser.add_argument("--ahead", default="")
  args = parser.parse_args()
  if args.ahead:
    figures = ahead(args.ahead, args.quick)
  else:
    figures = (update_seconds if args.update else plans)(args.quick)
  # Of half of the groups the last micro-batch is a larger part.
  judged = ("useful_share", "update_useful")
  if not args.quick:
    judged += ("informative",)
  targets = {k: {"min": LEAST} for k in figures if k.startswith(judged)}
  ok = all(figures[k] >= t["min"] for k, t in targets.items())
  for name, value in figures.items():
    print(f"{name}: {value:.3g}")
  print(json.dumps(dict(
    name="packing", figures={k: round(v, 4) for k, v in figures.items()},
    targets=targets, ok=ok)))
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
