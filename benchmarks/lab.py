"""Steps per second of the laboratory, for every allocator.

  python benchmarks/lab.py [--quick]

Trains runs on the stream with sparse signal, 32 prompts and 256 rollouts a
step, with the allocators that training uses, and counts seed-steps per second
of CPU time: with 16 runs at a time, and for uniform and vigor with one.
Rewards, advantages, exact gradients, Adam and the exact evaluation are
included. Half a minute.
"""

import argparse
import json
import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from vigor_jax import allocation
from vigor_jax.lab import learner
from vigor_jax.lab.world import World

LEAST = 200.0  # seed-steps per second, for the rules below
HELD = ("uniform", "vigor")


def speed(name, runs, steps):
  """Seed-steps per second of CPU time."""
  world = World.preset("sparse_signal")
  rule = learner.Rule(name)
  play = lambda steps: learner.train(
    world, rule, np.arange(runs), np.full(runs, 0.2), steps=steps
  )
  play(2)
  start = time.process_time()
  play(steps)
  return runs * steps / (time.process_time() - start)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  quick = parser.parse_args().quick
  figures, targets = {}, {}
  for name in allocation.REGISTRY:
    figures[f"{name}_steps_per_s"] = speed(name, 16, 8 if quick else 30)
    line = f"{name:20s} {figures[f'{name}_steps_per_s']:8.0f} with 16 runs"
    if name in HELD:
      alone = speed(name, 1, 40 if quick else 200)
      figures[f"{name}_alone_steps_per_s"] = alone
      for key in (f"{name}_steps_per_s", f"{name}_alone_steps_per_s"):
        targets[key] = {"min": LEAST}
      line += f"{alone:8.0f} with one"
    print(line, flush=True)
  ok = all(figures[name] >= targets[name]["min"] for name in targets)
  print(
    json.dumps(
      {
        "name": "lab",
        "figures": {k: round(float(v), 1) for k, v in figures.items()},
        "targets": targets,
        "ok": ok,
      }
    )
  )
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
