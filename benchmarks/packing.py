"""How much of the update's rows is work, on completions of heavy-tailed length.

  python benchmarks/packing.py [--quick]

Packs steps of the published configurations (their budget, row length and rows
per micro-batch) with the trainer's own code. Completions are lognormal, cut at
the limit, with a mean of a quarter of it; prompts are log-uniform; rollouts are
shared out unevenly. Per configuration, means over the steps:

  useful_share_*    tokens / tokens of the micro-batches that are computed
  padded_share_*    the same if every rollout had a row of the longest length
  informative_*     useful share when half of the groups are left out, as those
                    without a difference are

and seconds_a_step, the largest processor time of packing. Takes seconds.
"""

import argparse
import json
import pathlib
import time

import numpy as np

from vigor_jax.config import load_file
from vigor_jax.policy import build, packing

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = {"3b": "qwen2p5_3b_math", "8b": "qwen3_8b_livecodebench"}
LEAST = 0.85


def heavy_tailed(rng, count, longest, mean):
  """Lognormal lengths (sigma 1), cut at `longest`, with this mean."""
  drawn = rng.lognormal(0, 1, count)
  low, high = 1e-6, float(longest)
  for _ in range(60):
    scale = (low * high) ** 0.5
    found = np.clip(np.ceil(scale * drawn), 1, longest)
    low, high = (scale, high) if found.mean() < mean else (low, scale)
  return found.astype(np.int64)


def step_of(config, seed):
  """(group, prompt lengths, completion lengths) of a step."""
  rng = np.random.default_rng(seed)
  count, budget = config.prompts_per_step, config.rollout_budget
  short, *_, long = config.sampling.prompt_buckets
  prompts = np.exp(rng.uniform(np.log(short / 4), np.log(long), count))
  sizes = rng.multinomial(budget, rng.dirichlet(np.ones(count)))
  group = np.repeat(np.arange(count), sizes)
  longest = config.sampling.max_new_tokens
  return (group, prompts.astype(np.int64),
          heavy_tailed(rng, budget, longest, longest / 4))


def shares(config, seed):
  """(useful share, that of half of the groups, padded, seconds to pack)."""
  group, prompts, lengths = step_of(config, seed)
  estimator = build.estimator_of(config)

  def pack(keep):
    ones = np.ones(keep.sum(), np.float32)
    tokens = np.zeros((keep.sum(), lengths.max()), np.int32)
    begun = time.process_time()
    packed, _ = packing.pack(
      group[keep], [np.zeros(n, np.int32) for n in prompts], tokens,
      lengths[keep], ones, ones, tokens.astype(np.float32),
      row_length=estimator.row_length,
      rows_per_micro=estimator.rows_per_micro,
      max_micro=estimator.max_micro(config.rollout_budget))
    seconds = time.process_time() - begun
    return packing.useful_share(packed), seconds

  everything = np.ones(len(group), bool)
  useful, seconds = pack(everything)
  half, _ = pack(group % 2 == 0)
  padded = (lengths + prompts[group]).mean() / estimator.row_length
  return useful, half, padded, seconds


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  quick = parser.parse_args().quick
  figures, slowest = {}, 0.0
  for label, name in CONFIGS.items():
    config = load_file(str(ROOT / "configs" / f"{name}.py"))
    steps = np.array([shares(config, s) for s in range(2 if quick else 10)])
    useful, half, padded, seconds = steps.T
    figures[f"useful_share_{label}"] = float(useful.mean())
    figures[f"useful_share_least_{label}"] = float(useful.min())
    figures[f"informative_{label}"] = float(half.mean())
    figures[f"padded_share_{label}"] = float(padded.mean())
    slowest = max(slowest, float(seconds.max()))
  figures["seconds_a_step"] = slowest
  # Of half of the groups the last micro-batch is a larger part.
  judged = ("useful_share",) if quick else ("useful_share", "informative")
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
