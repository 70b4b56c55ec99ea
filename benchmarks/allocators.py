"""Decision time of every allocator, on one core.

  python benchmarks/allocators.py [--quick]

Plays steps of 512 prompts and 4096 rollouts (and of 32 and 256) with simulated
rewards, a fixed set of prompts so that histories fill, and times what the host
does per round: deciding, without drawing or adding rewards. The figure is the
slowest round of a step, median over steps, in milliseconds of CPU time; for
streaming rules also a call with 16 free slots. Some seconds.
"""

import argparse
import json
import os
import time
import types

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads

import numpy as np

from vigor_jax import allocation
from vigor_jax.allocation import features

LIMIT_MS = 10.0
LOOKS = features.UNIGRAMS + features.BIGRAMS + 1
SLOW_LIMIT_MS = {"knapsack": 50.0, "vip": 50.0}


class FixedSet:
  """`size` prompts in order, again and again; p ~ Beta(.3, .3).

  They look like as many numbers as features.hashed makes, one of which tells
  something.
  """

  def __init__(self, size):
    self.num_examples = size
    rng = np.random.default_rng(0)
    self.p = rng.beta(0.3, 0.3, size)
    self.looks = rng.standard_normal((size, LOOKS))
    self.looks[:, 0] += 4 * self.p
    self.next = 0

  def peek(self, count):
    positions = np.arange(self.next, self.next + count)
    uids = positions % self.num_examples
    return types.SimpleNamespace(
      positions=positions, uids=uids, features=self.looks[uids]
    )

  def advance(self, consumed):
    # Close enough for timing: the head moves by the prompts used.
    self.next += int(np.sum(consumed))


def play(allocator, stream, step, ask):
  """Slowest decision of one step, in CPU seconds."""
  rng = np.random.default_rng(step)
  groups = allocator.begin(stream, step)
  decisions = iter(ask(allocator, groups))
  slowest, log = 0.0, []
  while True:
    start = time.thread_time()
    request = next(decisions, None)
    slowest = max(slowest, time.thread_time() - start)
    if request is None:
      break
    ids = np.repeat(np.arange(len(groups)), request.counts)
    within = np.arange(len(ids)) - (np.cumsum(request.counts) -
                                    request.counts)[ids]  # fmt: skip
    samples = within + (groups.counts - request.counts)[ids]
    rewards = (rng.random(len(ids)) < stream.p[groups.uids[ids]]) * 1.0
    groups.add(ids, rewards)
    log.append((ids, samples, rewards))
  ids, samples, rewards = map(np.concatenate, zip(*log))
  start = time.thread_time()
  allocator.keep_rollouts(groups, ids, samples, rewards)
  allocator.end(groups)
  ending = time.thread_time() - start
  stream.advance(groups.taken)
  return slowest, ending


def in_rounds(allocator, groups):
  return allocator.rounds(groups)


def slot_by_slot(allocator, groups):
  while (request := allocator.grant(groups, 16)) is not None:
    yield request


def measure(name, options, prompts, budget, steps, ask=in_rounds):
  """(median slowest round, median end of step) in milliseconds."""
  allocator = allocation.make(
    name, options, prompts_per_step=prompts, budget=budget, seed=0
  )
  stream = FixedSet(prompts)  # every prompt is known from the second step on
  times = [play(allocator, stream, step, ask) for step in range(steps)]
  return 1e3 * np.median(times[1:], axis=0)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  steps = 6 if parser.parse_args().quick else 25
  figures, targets = {}, {}
  print("milliseconds: slowest round / end of step at 512 x 8 and at 32 x 8")
  cases = [(name, name, None) for name in allocation.REGISTRY]
  cases.append(("vip_dr_grpo", "vip", {"form": "dr_grpo", "lowest": 3}))
  for label, name, options in cases:
    large = measure(name, options, 512, 4096, steps)
    small = measure(name, options, 32, 256, steps)
    figures[f"{label}_round_ms"] = large[0]
    targets[f"{label}_round_ms"] = {"max": SLOW_LIMIT_MS.get(name, LIMIT_MS)}
    line = f"{label:20s} {large[0]:7.3f} / {large[1]:7.3f}"
    line += f"   {small[0]:7.3f} / {small[1]:7.3f}"
    if allocation.REGISTRY[name].streaming:
      call = measure(name, options, 512, 4096, 3, slot_by_slot)[0]
      figures[f"{name}_call_ms"] = call
      targets[f"{name}_call_ms"] = {"max": LIMIT_MS}
      line += f"   a call for 16 slots: {call:.3f}"
    print(line, flush=True)
  ok = all(figures[name] <= targets[name]["max"] for name in targets)
  print(
    json.dumps(
      {
        "name": "allocators",
        "figures": {k: round(float(v), 4) for k, v in figures.items()},
        "targets": targets,
        "ok": ok,
      }
    )
  )
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
