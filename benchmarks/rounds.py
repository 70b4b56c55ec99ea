"""What rounds cost: seconds per generated token, by allocation rule.

  python benchmarks/rounds.py [--quick]

One model of 4.4M parameters, heavy-tailed completion lengths (mean a quarter
of the longest; the same for a rollout whoever asks for it), verdicts drawn by
pass rate, equal budget, slots = budget / 4 and budget / 8. Uniform, VIGOR and
eb_widening with barriers, and their streaming forms, alternate in one process,
collected by the Collector of training. Medians over steps of the process's CPU
seconds, so that other work on the machine stays out; ratios are taken step by
step. Beside VIGOR stand the decode steps of the same schedule simulated from
the lengths: slots refilled at once, a barrier per round.

host_between_chunks_54m is the host's share of a step's CPU time on a model of
54M parameters when a streaming rule is asked after every chunk: dispatches,
rows read and added, decisions.
"""

import argparse
import heapq
import json
import os
import statistics
import time

PROMPTS, PROMPT = 16, 16
RULES = ("uniform", "vigor", "eb_widening", "streaming_vigor", "eb_streaming")
STREAMING = ("streaming_vigor", "eb_streaming")
BARRIER_REPEATS = 5  # None of their targets is a ratio of times.
LARGE = dict(  # 54M parameters.
  layers=10, width=640, heads=10, kv_heads=2, head_dim=64, ffn=1792,
  vocab=16384,
)


class Work:
  """Lengths and verdicts of rollouts by address: (position, sample).

  It is task and scorer at once. A completion's text is its sample index and a
  prompt's answer its position: no text is read, no reward computed.
  """

  def __init__(self, budget, longest):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (512, budget)
    draw = np.exp(rng.normal(size=shape))
    scale = longest / 4 / draw.mean() * 1.25  # Clipping takes a fifth back.
    self.lengths = np.clip(np.ceil(draw * scale), 1, longest).astype(int)
    rates = rng.choice([0.0, 0.3, 0.7, 1.0], 512, p=[0.3, 0.2, 0.2, 0.3])
    self.verdicts = (rng.random(shape) < rates[:, None]).astype(np.float32)

  def finish(self, rows):
    return rows, rows.sample

  def submit(self, samples, positions, metadata):
    del metadata
    return self.verdicts[positions, samples]

  def collect(self, verdicts):
    return verdicts


class Stream:
  """A step's candidates: positions and random prompts."""

  num_examples = None

  def begin(self, step):
    self.step = step

  def prefetch(self):
    """They are made at once."""

  def peek(self, k):
    import types

    import numpy as np

    at = (64 * self.step + np.arange(k)) % 512
    rng = np.random.default_rng(self.step)
    tokens = rng.integers(2, 60, (k, PROMPT), np.int32)
    return types.SimpleNamespace(
      positions=at, uids=at, tokens=tokens, answers=at, metadata=[None] * k
    )


class Rule:
  """One allocator with a sampler of its own, collecting as in training."""

  def __init__(
    self, name, model, work, budget, slots, longest, chunk, **settings
  ):
    import types

    from vigor_jax import allocation, config, rollouts
    from vigor_jax.sampling import sampler as sampler_lib

    sizes, graph, self.params = model
    options = {"initial_rollouts": 2} if name != "uniform" else {}
    self.allocator = allocation.make(
      name, options, prompts_per_step=PROMPTS, budget=budget, seed=0,
      train_on="all",
    )
    self.work, self.budget, self.stream = work, budget, Stream()
    self.sampler = sampler_lib.Sampler(
      graph,
      sizes,
      sampler_lib.Settings(
        slots=slots, chunk=chunk, max_new_tokens=longest,
        prompt_buckets=(PROMPT,), prefill_batch=8,
        few_prompts=2 if self.allocator.streaming else 0,
        prefixes=self.allocator.max_prompts, queue=budget, **settings,
      ),
      stop_ids=(sizes.vocab,),  # No such token: lengths decide.
      seed=0,
    )
    self.sampler.warm_up(self.params)
    self._request, self.sampler.request = self.sampler.request, self.request
    run = config.default_config("arithmetic")
    run.rollout_budget = budget
    self.collector = rollouts.Collector(
      types.SimpleNamespace(
        config=run, task=work, scorer=work, allocator=self.allocator,
        stream=self.stream, sampler=self.sampler,
      )
    )

  def request(self, group, position, sample, **settings):
    """The sampler's, with the lengths of the rollouts."""
    limit = self.work.lengths[position, sample]
    self._request(group, position, sample, max_new_tokens=limit, **settings)
    self.requested.append(limit)
    # Until the budget is granted, slots have no reason to be idle.
    self.last_full = self.sampler.useful_steps, self.sampler.decode_steps

  def step(self, index):
    """One step's rollouts: a dict of what it took."""
    from vigor_jax import measure

    self.requested, sampler = [], self.sampler
    start = time.process_time()
    self.stream.begin(index)
    out = self.collector.collect(self.params, index, measure.PhaseTimer())
    tokens = out.tokens
    seconds = time.process_time() - start
    self.allocator.end(out.groups)
    assert out.buffer.size == self.budget
    assert out.prefilled == out.groups.opened.sum()
    taken = dict(
      token=1e6 * seconds / tokens, rollout=1e3 * seconds / self.budget,
      steps=out.decode_steps, utilisation=out.utilisation,
      rows=sampler.row_steps / tokens, before_tail=None,
      simulated=simulated_steps(self.requested, sampler.settings.slots),
    )
    if self.allocator.streaming and self.last_full[-1]:
      useful, steps = self.last_full
      taken["before_tail"] = useful / (sampler.settings.slots * steps)
    return taken


def simulated_steps(rounds, slots):
  """Decode steps when every free slot takes the next rollout at once."""
  total = 0
  for lengths in rounds:
    ends = [0] * slots
    for length in lengths:
      heapq.heappush(ends, heapq.heappop(ends) + int(length))
    total += max(ends)
  return total


def host_share(longest, repeats):
  """The main thread's share of the CPU time of a step of the 54M model."""
  from vigor_jax.policy import transformer

  sizes = transformer.Sizes(**LARGE, qkv_bias=True, tied=True)
  budget = 8 * PROMPTS
  rule = Rule(
    "streaming_vigor", (sizes, *transformer.create(sizes, 0)),
    Work(budget, longest), budget, budget // 4, longest, 4,
    chunks_per_dispatch=1,
  )
  shares = []
  for index in range(-1, repeats):
    host, everyone = time.thread_time(), time.process_time()
    rule.step(max(index, 0))
    host = time.thread_time() - host
    shares.append(host / (time.process_time() - everyone))
  share = statistics.median(shares[1:])
  print(
    f"{sizes.num_params / 1e6:.0f}M parameters, asked after each of"
    f" {rule.sampler.chunks} chunks: the host takes {100 * share:.2f} % of"
    " the time",
    flush=True,
  )
  return share


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--repeats", type=int, default=15)
  parser.add_argument("--chunk", type=int, default=4)
  args = parser.parse_args()
  # One core for everybody, before a runtime counts the cores.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  from vigor_jax import host_memory
  from vigor_jax.policy import transformer

  host_memory.keep()  # As in training.
  start = time.perf_counter()
  longest = 256  # Shorter ones would measure prompts and the host.
  repeats, few = (3, 1) if args.quick else (args.repeats, BARRIER_REPEATS)
  sizes = transformer.Sizes(6, 256, 8, 4, 32, 704, 512, tied=True)
  graph, params = transformer.create(sizes, 0)
  budget = 8 * PROMPTS
  work = Work(budget, longest)
  figures, targets = {}, {}
  for share in (4, 8):
    slots = budget // share
    print(f"budget {budget}, {slots} slots, lengths up to {longest}")
    rules = {
      name: Rule(
        name, (sizes, graph, params), work, budget, slots, longest, args.chunk
      )
      for name in RULES
    }
    taken = {name: [] for name in rules}
    for index in range(-1, repeats):
      for name, rule in rules.items():
        barriers = name in ("vigor", "eb_widening")
        if barriers and index >= few:
          continue
        result = rule.step(max(index, 0))
        if index >= 0:
          taken[name].append(result)
    middle = {
      name: {
        key: statistics.median(r[key] for r in results)
        for key in results[0]
        if results[0][key] is not None
      }
      for name, results in taken.items()
    }
    for name, m in middle.items():
      print(
        f"  {name:16s} {m['token']:7.1f} us/token {m['rollout']:6.2f}"
        f" ms/rollout {m['steps']:5.0f} steps, slots {m['utilisation']:.2f},"
        f" rows per token {m['rows']:.2f}"
      )
    over_uniform = {
      name: statistics.median(
        a["token"] / b["token"] for a, b in zip(results, taken["uniform"])
      )
      for name, results in taken.items()
    }
    for name in STREAMING:
      print(f"  {name}: {over_uniform[name]:.3f} of uniform's time per token")
    print(
      f"  vigor: {middle['vigor']['steps']:.0f} decode steps, its schedule"
      f" simulated {middle['vigor']['simulated']:.0f}", flush=True,
    )
    figures[f"streaming_vs_uniform_{share}"] = max(
      over_uniform[name] for name in STREAMING
    )
    figures[f"utilisation_before_tail_{share}"] = min(
      middle[name]["before_tail"] for name in STREAMING
    )
    figures[f"barriers_vs_simulated_{share}"] = max(
      r["steps"] / r["simulated"] for r in taken["vigor"]
    )
    figures[f"barriers_vs_uniform_{share}"] = over_uniform["vigor"]
    targets |= {
      f"streaming_vs_uniform_{share}": {"max": 1.05},
      f"utilisation_before_tail_{share}": {"min": 0.9},
      f"barriers_vs_simulated_{share}": {"max": 1.05},
    }
  figures["host_between_chunks_54m"] = host_share(
    32 if args.quick else 64, 2 if args.quick else 5
  )
  targets["host_between_chunks_54m"] = {"max": 0.05}
  ok = all(
    t.get("min", -1e9) <= figures[k] <= t.get("max", 1e9)
    for k, t in targets.items()
  )
  print(
    json.dumps(
      {
        "name": "rounds",
        "figures": {k: round(v, 4) for k, v in figures.items()},
        "targets": targets,
        "ok": ok,
        "seconds": round(time.perf_counter() - start, 1),
      }
    )
  )


if __name__ == "__main__":
  main()
