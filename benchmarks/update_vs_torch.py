"""Seconds of a GRPO update on CPU against torch and transformers.

  python benchmarks/update_vs_torch.py [--quick] [--repeats=7]

Random Qwen2-like models of 4.5M and 54M parameters, the same weights on both
sides (safetensors), float32, Adam, gradient clipping, one process pinned to
one core, the two taking turns; CPU seconds, smallest of the repeats. `equal`:
rollouts of one length, each with a prompt of its own, so that both sides
compute the same tokens. `mixed`: groups of 8 with heavy-tailed lengths, padded
[B, L] for torch, packed rows that share prompts here. The figures are this
project's seconds over torch's; the two losses are compared as well. Needs the
`interop` extra (pip install "vigor-jax[interop]"); says so where it is
missing, and measures its own side alone. 3 minutes, 1 with --quick.
"""

import argparse
import importlib.util
import json
import os
import tempfile
import time

PROMPT = 32
MODELS = {
  "4m": (
    dict(layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=704),
    dict(vocab=512, rollouts=64, longest=128, micro=4),
  ),
  "54m": (
    dict(layers=10, width=640, heads=10, kv_heads=2, head_dim=64, ffn=1792),
    dict(vocab=16384, rollouts=16, longest=96, micro=4),
  ),
}
RATE, CLIP, NORM = 1e-6, 0.2, 1.0
TARGETS = {
  "equal_4m": {"max": 1.0},
  "equal_54m": {"max": 1.0},
  "mixed_4m": {"max": 1.0},
  "useful_share": {"min": 0.85},
}


def useful_share():
  """Slots of used micro-batches that hold a token, 64 groups of 8.

  Log-normal lengths (sigma 1) clipped at 1024, about a quarter of it on
  average; prompts of 64 to 200 tokens, rows of 2048, 8 of them at a time. A
  padded [B, L] batch has .31.
  """
  import numpy as np

  from vigor_jax.policy import packing

  rng = np.random.default_rng(0)
  group = np.repeat(np.arange(64), 8)
  lengths = np.clip(np.exp(rng.normal(5.2, 1.0, 512)), 1, 1024).astype(int)
  prompts = [np.ones(n, np.int32) for n in rng.integers(64, 200, 64)]
  shape = (512, 1024)
  packed, _ = packing.pack(
    group, prompts, np.ones(shape, np.int32), lengths, np.ones(512),
    np.ones(512), np.zeros(shape, np.float32), row_length=2048,
    rows_per_micro=8, max_micro=64,
  )  # fmt: skip
  return packing.useful_share(packed)


class Batch:
  """Rollouts with advantages and old log-probs, made up."""

  def __init__(self, vocab, rollouts, longest, group):
    import numpy as np

    rng = np.random.default_rng(0)
    self.longest = longest
    if group == 1:
      self.lengths = np.full(rollouts, longest)
    else:  # Log-normal, sigma 1, clipped; most are short.
      draw = np.exp(rng.normal(size=rollouts)) * longest / 6
      self.lengths = np.clip(np.ceil(draw), 1, longest).astype(int)
    self.group = np.arange(rollouts) // group
    prompts = rollouts // group
    self.prompts = list(rng.integers(1, vocab, (prompts, PROMPT), np.int32))
    shape = (rollouts, longest)
    self.tokens = rng.integers(1, vocab, shape).astype(np.int32)
    self.old = np.full(shape, -np.log(vocab), np.float32)
    self.advantages = rng.normal(size=rollouts).astype(np.float32)


class Ours:
  """policy.packing and policy.update."""

  def __init__(self, model, batch, micro):
    import jax
    import numpy as np

    from vigor_jax.policy import optimizer
    from vigor_jax.policy import packing
    from vigor_jax.policy import update

    _, graph, params = model
    self.np, self.update = np, update
    objective = update.Objective(clip_low=CLIP, clip_high=CLIP)
    options = optimizer.OptimizerOptions(name="adam", clip_norm=NORM)
    self.updater = update.Updater(graph, objective, options)
    # Updates donate their state.
    self.state = self.updater.init(jax.tree.map(jax.numpy.copy, params))
    self.rollouts = len(batch.lengths)
    self.pack = lambda: packing.pack(
      batch.group,
      batch.prompts,
      batch.tokens,
      batch.lengths,
      batch.advantages,
      (1.0 / batch.lengths).astype(np.float32),
      batch.old,
      row_length=PROMPT + batch.longest,
      rows_per_micro=micro,
      max_micro=-(-self.rollouts // micro),
    )
    self.useful = packing.useful_share(self.pack()[0])

  def __call__(self):
    packed, count = self.pack()
    self.state, metrics = self.updater.update(
      self.state, packed, count, float(self.rollouts), RATE
    )
    return self.update.to_host(metrics)["loss"]


class Torch:
  """A padded batch through transformers' Qwen2, in micro-batches."""

  def __init__(self, folder, batch, micro):
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(1)
    self.torch, self.micro = torch, micro
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    self.optimizer = torch.optim.Adam(
      self.model.parameters(), lr=RATE, betas=(0.9, 0.99), fused=True
    )
    tokens = np.concatenate(
      [np.stack(batch.prompts)[batch.group], batch.tokens], 1
    )
    self.mask = torch.from_numpy(
      np.arange(batch.longest) < batch.lengths[:, None]
    ).float()
    self.tokens = torch.from_numpy(tokens.astype(np.int64))
    self.old = torch.from_numpy(batch.old)
    self.advantages = torch.from_numpy(batch.advantages)[:, None]

  def __call__(self):
    torch, total = self.torch, 0.0
    count, longest = self.mask.shape
    for first in range(0, count, self.micro):
      rows = slice(first, first + self.micro)
      tokens, mask = self.tokens[rows], self.mask[rows]
      logits = self.model(
        input_ids=tokens, use_cache=False, logits_to_keep=longest + 1
      ).logits[:, :-1]
      targets = tokens[:, -longest:, None]
      logprobs = logits.log_softmax(-1).gather(-1, targets)[..., 0]
      ratio = (logprobs - self.old[rows]).exp()
      gain = torch.minimum(
        ratio * self.advantages[rows],
        ratio.clamp(1 - CLIP, 1 + CLIP) * self.advantages[rows],
      )
      loss = -((gain * mask).sum(1) / mask.sum(1)).sum() / count
      loss.backward()
      total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
    self.optimizer.step()
    self.optimizer.zero_grad()
    return total


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--repeats", type=int, default=7)
  args = parser.parse_args()
  # Before JAX and torch load, which count the cores.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  from vigor_jax import host_memory
  from vigor_jax.policy import transformer
  from vigor_jax.policy import weights

  host_memory.keep()
  modules = ("torch", "transformers")
  missing = [m for m in modules if not importlib.util.find_spec(m)]
  if missing:
    print(f"not installed: {', '.join(missing)}; only this project's side is "
          'measured (pip install "vigor-jax[interop]")')  # fmt: skip
  figures = {"useful_share": useful_share()}
  repeats = 3 if args.quick else args.repeats
  for name, (sizes, work) in MODELS.items():
    if args.quick and name != "4m":
      continue
    sizes = transformer.Sizes(
      vocab=work["vocab"], qkv_bias=True, tied=True, **sizes
    )
    model = (sizes, *transformer.create(sizes, 0))
    with tempfile.TemporaryDirectory() as folder:
      weights.to_folder(model[2], sizes, folder)
      for kind, group in (("equal", 1), ("mixed", 8)):
        key = f"{kind}_{name}"
        batch = Batch(work["vocab"], work["rollouts"], work["longest"], group)
        sides = {"ours": Ours(model, batch, work["micro"])}
        if not missing:
          sides["torch"] = Torch(folder, batch, work["micro"])
        figures |= compare(key, sides, repeats)
        figures[f"useful_{key}"] = sides["ours"].useful
  for key, value in figures.items():
    print(f"{key:24s} {value:.4g}")
  targets = {k: t for k, t in TARGETS.items() if k in figures}
  ok = all(
    t.get("min", 0.0) <= figures[k] <= t.get("max", 1.0)
    for k, t in targets.items()
  )
  rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
  print(json.dumps(
    dict(name="update_vs_torch", figures=rounded, targets=targets, ok=ok)
  ))  # fmt: skip
  return 0 if ok else 1


def compare(key, sides, repeats):
  """Smallest CPU seconds of each side, their ratio and their losses."""
  seconds, losses = {name: [] for name in sides}, {}
  for number in range(repeats + 1):
    for name, step in sides.items():
      start = time.process_time()
      loss = step()
      seconds[name].append(time.process_time() - start)
      if number == 0:
        losses[name] = loss
  best = {name: min(times[1:]) for name, times in seconds.items()}
  out = {f"{name}_{key}_s": value for name, value in best.items()}
  if "torch" in best:
    out[key] = best["ours"] / best["torch"]
    gap = abs(losses["ours"] - losses["torch"])
    out[f"loss_gap_{key}"] = gap
    if not gap < 1e-4:
      raise SystemExit(f"{key}: the two losses differ: {losses}")
  return out


if __name__ == "__main__":
  raise SystemExit(main())
