"""Measured variance per rollout against the finite-sample prediction.

    python benchmarks/variance.py [--quick] [--workdir=DIR]

Trains VIGOR (and eb_widening, unless --quick) on the plain arithmetic stream,
measures V = sum n v / sum n with 16 fresh, uncharged rollouts per prompt every
second step, and compares the mean over run and seeds with the prediction made
from the deconvolved distribution of pass rates. Targets: the ratio within 10 %
of 1, the standard error of the measured mean below 3 % (neither is asserted
for --quick's single short run, whose error is larger).

About two minutes on 2 cores, --quick about one, most of it the warm start.
"""

import argparse
import json
import os
import tempfile

import numpy as np

from vigor_jax import metrics
from vigor_jax import train
from vigor_jax.config import loading

KEY = "allocation/variance_per_rollout_"
HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = os.path.join(HERE, "..", "configs", "arithmetic.py")


def measure(rule: str, seeds, steps: int, workdir: str) -> dict[str, float]:
  """Pooled figures of one rule: ratio, relative error, mean variances."""
  fresh, error, predicted = [], [], []
  for seed in seeds:
    config = loading.load_file(f"{CONFIG}:plain")
    with config.unlocked():
      config.allocation.name = rule
      config.seed = seed
      config.total_steps = steps
      config.evaluation.update(
        dict(
          every_steps=2, num_prompts=64, fresh_rollouts=16, fresh_prompts=256
        )
      )
    folder = os.path.join(workdir, f"{rule}-{seed}")
    train.train(config, folder, quiet=True)
    for line in metrics.read_lines(os.path.join(folder, "metrics.jsonl")):
      if line.get(KEY + "predicted") is not None:
        fresh.append(line[KEY + "fresh"])
        error.append(line[KEY + "fresh_error"])
        predicted.append(line[KEY + "predicted"])
  mean = float(np.mean(fresh))
  return {
    "ratio": float(np.mean(predicted)) / mean,
    "relative_error": float(np.linalg.norm(error)) / len(error) / mean,
    "fresh": mean,
    "predicted": float(np.mean(predicted)),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--workdir", default="")
  args = parser.parse_args()
  workdir = args.workdir or tempfile.mkdtemp(prefix="variance-")
  rules = ("vigor",) if args.quick else ("vigor", "eb_widening")
  figures, ok = {}, True
  for rule in rules:
    seeds, steps = ((0,), 40) if args.quick else ((0, 1, 2), 100)
    result = measure(rule, seeds, steps, workdir)
    figures.update({f"{rule}_{k}": round(v, 4) for k, v in result.items()})
    print(
      f"{rule}: measured {result['fresh']:.4f} "
      f"(+- {result['relative_error']:.1%}), predicted "
      f"{result['predicted']:.4f}, ratio {result['ratio']:.3f}",
      flush=True,
    )
    # A short run's error is several times the long one's.
    slack = 2 * result["relative_error"] if args.quick else 0.0
    ok &= abs(result["ratio"] - 1) <= 0.10 + slack
    ok &= args.quick or result["relative_error"] < 0.03
  targets = {"ratio": "0.9 to 1.1", "relative_error": "below 0.03"}
  result = dict(name="variance", figures=figures, targets=targets, ok=bool(ok))
  print(json.dumps(result))


if __name__ == "__main__":
  main()
