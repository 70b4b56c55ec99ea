"""Tokens per second against google-tunix's sampler and transformers' generate.

  python benchmarks/sampler.py [--quick] [--repeats=5]

Random Qwen2-like models of 4.5M and 54M parameters with the same weights,
prompts and lengths everywhere, greedy, so that tokens can be compared. One
process pinned to one core, the contenders alternating; medians. `equal`: 64
rollouts of one length. `mixed`: 256 rollouts of heavy-tailed lengths whose
mean is a quarter of the longest; the others decode 64 at a time until the
longest has ended. All figures are ratios of tokens per second.

Needs the `interop` extra (pip install "vigor-jax[interop]"). --quick does
without: it measures the refilled slots against the same sampler in batches.
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time

PROMPT, ROWS, BOS = 32, 64, 1
MODELS = {
  "4m": dict(
    layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=704, vocab=512
  ),
  "54m": dict(
    layers=10, width=640, heads=10, kv_heads=2, head_dim=64, ffn=1792,
    vocab=16384,
  ),
}
TARGETS = {
  "equal_4m_vs_tunix": 1.3,
  "equal_4m_vs_hf": 1.3,
  "equal_54m_vs_tunix": 1.15,
  "equal_54m_vs_hf": 1.15,
  "mixed_4m_vs_tunix": 2.0,
  "mixed_4m_vs_hf": 2.0,
  "mixed_4m_vs_batches": 1.2,
}


def heavy_tailed(count, longest, seed=0):
  """Log-normal lengths (sigma 1), clipped; their mean is longest / 4."""
  import numpy as np

  draw = np.exp(np.random.default_rng(seed).normal(size=count))
  low, high = 0.0, float(longest)
  for _ in range(60):  # The scale by bisection: clipping moves the mean.
    scale = (low + high) / 2
    lengths = np.clip(np.ceil(draw * scale), 1, longest)
    low, high = (scale, high) if lengths.mean() < longest / 4 else (low, scale)
  return lengths.astype(int)


class Ours:
  """The slot sampler; `batches` waits for each 64 rollouts to end."""

  def __init__(self, model, longest, rollouts, batches=False):
    from vigor_jax.sampling import sampler as sampler_lib

    sizes, graph, self.params = model
    self.batches = batches
    self.sampler = sampler_lib.Sampler(
      graph,
      sizes,
      sampler_lib.Settings(
        slots=ROWS,
        chunk=8,
        max_new_tokens=longest,
        prompt_buckets=(PROMPT,),
        prefill_batch=ROWS,
        prefixes=rollouts,
        queue=rollouts,
      ),
      stop_ids=(sizes.vocab,),  # No such token: lengths decide.
      seed=0,
    )

  def __call__(self, prompts, lengths):
    import numpy as np

    sampler, out = self.sampler, {}
    sampler.begin(0)
    step = ROWS if self.batches else len(prompts)
    for first in range(0, len(prompts), step):
      rows = np.arange(first, min(first + step, len(prompts)))
      sampler.prefill(self.params, rows, [prompts[i] for i in rows])
      sampler.request(
        rows, rows, np.zeros_like(rows), temperature=0.0,
        max_new_tokens=lengths[rows],
      )
      for done in sampler.decode(self.params):
        for i, group in enumerate(done.group):
          out[int(group)] = done.tokens[i, : done.lengths[i]]
    return [out[i] for i in range(len(prompts))]


class Tunix:
  """google-tunix's vanilla Sampler, 64 rows at a time."""

  def __init__(self, folder, sizes, longest):
    from tunix.generate import sampler as tunix_sampler
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen2 import params as qwen2_params

    config = qwen2.ModelConfig(
      num_layers=sizes.layers, vocab_size=sizes.vocab, embed_dim=sizes.width,
      hidden_dim=sizes.ffn, num_heads=sizes.heads, head_dim=sizes.head_dim,
      num_kv_heads=sizes.kv_heads, rope_theta=int(sizes.rope_theta),
      norm_eps=sizes.norm_eps, use_tied_embedding=True,
    )
    model = qwen2_params.create_model_from_safe_tensors(folder, config)
    self.longest = longest
    self.sampler = tunix_sampler.Sampler(
      model,
      Words(),
      tunix_sampler.CacheConfig(
        cache_size=PROMPT + longest, num_layers=sizes.layers,
        num_kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
      ),
    )

  def __call__(self, prompts, lengths):
    out = []
    for first in range(0, len(prompts), ROWS):
      part = prompts[first : first + ROWS]
      result = self.sampler(
        [" ".join(map(str, p.tolist())) for p in part],
        max_generation_steps=self.longest, max_prompt_length=PROMPT,
        eos_tokens=[10**6], pad_output=True,
      )
      out += list(result.tokens)
    return [t[:n] for t, n in zip(out, lengths)]


class Words:
  """The tokenizer Tunix asks for: ids as words.

  It puts a BOS before every prompt that has none, so all prompts begin with it.
  """

  def encode(self, text, **kwargs):
    return [int(word) for word in text.split()]

  def decode(self, ids, **kwargs):
    return ""

  def bos_id(self):
    return BOS

  def eos_id(self):
    return 10**6

  def pad_id(self):
    return 0


class HuggingFace:
  """transformers' generate on torch, 64 rows at a time."""

  def __init__(self, folder):
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    self.torch = torch
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    ).eval()

  def __call__(self, prompts, lengths):
    import numpy as np

    out = []
    for first in range(0, len(prompts), ROWS):
      ids = self.torch.tensor(np.stack(prompts[first : first + ROWS])).long()
      steps = int(max(lengths[first : first + ROWS]))
      with self.torch.inference_mode():
        done = self.model.generate(
          input_ids=ids, attention_mask=self.torch.ones_like(ids),
          do_sample=False, max_new_tokens=steps, min_new_tokens=steps,
          eos_token_id=None, pad_token_id=0,
        )
      out += list(done[:, PROMPT:].numpy())
    return [t[:n] for t, n in zip(out, lengths)]


def race(contenders, prompts, lengths, repeats):
  """{name: tokens per second}, medians of alternating runs."""
  import numpy as np

  seconds = {name: [] for name in contenders}
  answers = {name: run(prompts, lengths) for name, run in contenders.items()}
  first = answers["vigor_jax"]
  for name, other in answers.items():
    same = np.mean([np.array_equal(a, b) for a, b in zip(first, other)])
    print(f"    {name}: {100 * same:.0f} % as ours", flush=True)
  for _ in range(repeats):
    for name, run in contenders.items():
      start = time.perf_counter()
      run(prompts, lengths)
      seconds[name].append(time.perf_counter() - start)
  total = int(sum(lengths))
  speeds = {n: total / statistics.median(s) for n, s in seconds.items()}
  for name, speed in speeds.items():
    spread = [total / s for s in (max(seconds[name]), min(seconds[name]))]
    print(
      f"    {name}: {speed:.0f} tokens/s ({spread[0]:.0f} to {spread[1]:.0f})",
      flush=True,
    )
  return speeds


def measure(label, longest, repeats, peers, mixed):
  """Ratios of one model: {figure: value}."""
  import numpy as np

  from vigor_jax.policy import transformer

  sizes = transformer.Sizes(
    **MODELS[label], qkv_bias=True, tied=True, rope_theta=1e6
  )
  graph, params = transformer.create(sizes, 0)
  print(f"{label}: {sizes.num_params / 1e6:.1f}M parameters", flush=True)
  model = sizes, graph, params
  rng = np.random.default_rng(0)
  prompts = rng.integers(2, sizes.vocab, (4 * ROWS, PROMPT), np.int32)
  prompts[:, 0] = BOS
  prompts = list(prompts)
  figures = {}
  with tempfile.TemporaryDirectory() as folder:
    others = {}
    if peers:
      from vigor_jax.policy import weights

      weights.to_folder(params, sizes, folder)
      others = dict(
        tunix=Tunix(folder, sizes, longest), hf=HuggingFace(folder)
      )
      print(f"  {ROWS} rollouts of {longest} tokens", flush=True)
      ours = dict(vigor_jax=Ours(model, longest, ROWS))
      speeds = race(
        {**ours, **others}, prompts[:ROWS], np.full(ROWS, longest), repeats
      )
      for name in others:
        figures[f"equal_{label}_vs_{name}"] = speeds["vigor_jax"] / speeds[name]
    if mixed:
      print(f"  {4 * ROWS} rollouts, heavy-tailed lengths", flush=True)
      lengths = heavy_tailed(4 * ROWS, longest)
      ours = dict(
        vigor_jax=Ours(model, longest, 4 * ROWS),
        batches=Ours(model, longest, 4 * ROWS, batches=True),
      )
      speeds = race({**ours, **others}, prompts, lengths, repeats)
      for name in speeds:
        if name != "vigor_jax":
          figures[f"mixed_{label}_vs_{name}"] = (
            speeds["vigor_jax"] / speeds[name]
          )
  return figures


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--models", default="4m,54m")
  args = parser.parse_args()
  # One core for everybody, before a runtime counts the cores.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  peers = not args.quick
  missing = [
    n for n in ("tunix", "torch", "transformers")
    if peers and importlib.util.find_spec(n) is None
  ]
  if missing:
    raise SystemExit(
      f"benchmarks/sampler.py: {', '.join(missing)} not installed; pip install"
      ' "vigor-jax[interop]", or use --quick'
    )
  start, figures = time.perf_counter(), {}
  labels = ["4m"] if args.quick else args.models.split(",")
  for label in labels:
    # With shorter completions prompts would be most of the work.
    repeats = 3 if args.quick else args.repeats
    figures |= measure(label, 128, repeats, peers, label == "4m")
  targets = {k: {"min": v} for k, v in TARGETS.items() if k in figures}
  print(
    json.dumps(
      {
        "name": "sampler",
        "figures": {k: round(v, 3) for k, v in figures.items()},
        "targets": targets,
        "ok": all(figures[k] >= t["min"] for k, t in targets.items()),
        "seconds": round(time.perf_counter() - start, 1),
      }
    )
  )


if __name__ == "__main__":
  main()
