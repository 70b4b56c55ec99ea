"""A decode step as compiled for TPU slices: bytes against the ideal.

  python benchmarks/decode_hbm.py [--quick] [--parts=3b,8b]
      [--tensor=2,4,8,16] [--flags=windowed_off,default] [--tensor_only]

Compiles the sampler's own decode program with libtpu, without a TPU:
Qwen2.5-3B for v5e:4x4 (256 slots) and Qwen3-8B for v5p:2x2x2 (128 slots), in
bfloat16, prompts of 512 and completions of 1024 tokens, every slot with a
prompt of its own, at temperature 1 without truncation, on each mesh (fsdp,
tensor) of the slice. --tensor_only splits weights over tensor alone, not over
fsdp and tensor. Per chip and decode step, at full length, with a chunk's
refilling and merging spread over its steps:

  hbm_over_ideal_*   HBM bytes over (weights + filled cache, read once) / chips
  collectives_gb_*   bytes that leave a chip
  modelled_ms_*      the slowest of FLOPs, HBM and wire at the chip's peak and
                     the compiler's own cycle estimate

for the layout with the least modelled time, which is printed, as are all
others, with XLA's windowed einsums off and on (its default). Everything is the
compiler's figures, counted by this project's walker (vigor_jax/aot); nothing is
run. Needs Python 3.12 and the `tpu` extra; half a processor minute a layout.
--quick compiles a tiny model; where the TPU compiler is not installed, for 8
CPU devices.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

PARTS = {
  "3b": ("qwen2.5-3b", "v5e:4x4", 256),
  "8b": ("qwen3-8b", "v5p:2x2x2", 128),
}
PROMPT, COMPLETION, CHUNK = 512, 1024, 32
TINY = dict(layers=14, width=64, heads=8, kv_heads=2, head_dim=16, ffn=128,
            vocab=512, tied=True)
TINY_SHAPE = 64, 128, 16  # prompt, completion, chunk
TARGETS = {
  "hbm_over_ideal_3b": {"max": 1.15},
  "collectives_gb_3b": {"max": 0.25},
  "hbm_over_ideal_8b": {"max": 1.2},
}


def ideal_bytes(sizes, slots, columns, chips):
  """Weights and filled cache, each read once over the chips."""
  params = sizes.num_params
  if not sizes.tied:
    params -= sizes.vocab * sizes.width  # A row per token is read of these.
  cache = slots * columns * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim
  return 2 * (params + cache) / chips


def compiled(part, tensors, flags, quick, stationary):
  """Figures by tensor. Imports jax: in a process of its own."""
  from vigor_jax.aot import chips

  model, name, slots = PARTS[part]
  if quick and importlib.util.find_spec("libtpu") is None:
    name = "cpu:8"
  chips.prepare(name)
  from vigor_jax.aot import decoding, estimate, programs
  from vigor_jax.policy import families, sharding, transformer
  from vigor_jax.policy.sizes import Sizes
  from vigor_jax.sampling.settings import Settings

  topology = chips.topology(name)
  count = len(topology.devices)
  shape = (PROMPT, COMPLETION, CHUNK)
  if quick:
    values, shape = TINY, TINY_SHAPE
  else:
    values = families.published(model)
    values["rope_scaling"] = families.rope_from_text(values["rope_scaling"])
  prompt, completion, chunk = shape
  sizes = Sizes(**values, dtype="bfloat16", param_dtype="bfloat16")
  settings = Settings(
    slots=slots, chunk=chunk, max_new_tokens=completion,
    prompt_buckets=(prompt,), prefill_batch=16, prefixes=slots, queue=slots,
    cache_dtype="bfloat16")
  graph, params = transformer.abstract(sizes)
  options = estimate.WINDOWED_OFF if flags == "windowed_off" else None
  if name.startswith("cpu"):
    options = None
  found = {}
  for tensor in tensors:
    if count % tensor:
      continue
    placement = sharding.Placement(sharding.make_mesh(
      (1, count // tensor, tensor), topology.devices))
    made = decoding.Decoding(graph, placement.abstract(params), sizes,
                             settings, placement, stationary)
    result = estimate.compile_program(
      programs.Program("decode", *made.chunks(), (1, chunk), "", 1,
                       ("truncate", "greedy")),
      topology, options)
    if not result.fits:
      found[tensor] = {"error": result.error}
      continue
    ideal = ideal_bytes(sizes, slots, prompt + completion, count)
    found[tensor] = {
      "hbm_over_ideal": result.hbm_bytes / chunk / ideal,
      "hbm_gb": result.hbm_bytes / chunk / 1e9,
      "collectives_gb": result.wire_bytes / chunk / 1e9,
      "modelled_ms": result.seconds / chunk * 1e3,
      "schedule_ms": result.model_s / chunk * 1e3,
      "wire": {k: v / chunk / 1e9 for k, v in result.wire.items()},
      "binds": result.binds,
      "resident_gib": {
        k: decoding.per_chip(v) / 2**30 for k, v in dict(
          weights=made.leaves, prefixes=made.prefixes,
          slots=made.slots).items()},
      "alive_gib": result.alive / 2**30,
      "compile_cpu_s": result.compile_s,
    }
  return found


def child(*arguments):
  """`compiled` with these arguments, in its own process."""
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  done = subprocess.run(
    [sys.executable, os.path.abspath(__file__), "--child",
     json.dumps(arguments)],
    env={**os.environ, "PYTHONPATH": root}, text=True, stdout=subprocess.PIPE,
    check=True)
  return {int(k): v for k, v in json.loads(
    done.stdout.splitlines()[-1]).items()}


def show(part, flags, found):
  print(f"{part}, {flags}: per chip and decode step")
  print("tensor  HBM GB  x ideal  wire GB  modelled ms  schedule ms  binds"
        "     GiB alive (weights, prefixes, slots)")
  for tensor, at in found.items():
    if "error" in at:
      print(f"{tensor:6d}  {at['error']}")
      continue
    held = ", ".join(f"{v:.2f}" for v in at["resident_gib"].values())
    wire = ", ".join(f"{k} {v:.3g}" for k, v in at["wire"].items())
    print(f"{tensor:6d}  {at['hbm_gb']:6.3f}  {at['hbm_over_ideal']:7.3f}  "
          f"{at['collectives_gb']:7.3f}  {at['modelled_ms']:11.3f}  "
          f"{at['schedule_ms']:11.3f}  {at['binds']:8s}  "
          f"{at['alive_gib']:.2f} ({held})  {wire}", flush=True)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--parts", default="3b,8b")
  parser.add_argument("--tensor", default="2,4,8,16")
  parser.add_argument("--flags", default="windowed_off,default")
  parser.add_argument("--tensor_only", action="store_true")
  parser.add_argument("--child", default="")
  args = parser.parse_args()
  if args.child:
    print(json.dumps(compiled(*json.loads(args.child))))
    return 0
  parts = ["3b"] if args.quick else args.parts.split(",")
  tensors = [int(t) for t in args.tensor.split(",")]
  if args.quick:
    tensors = tensors[:1]
  figures = {}
  for part in parts:
    for flags in args.flags.split(",")[: 1 if args.quick else None]:
      found = child(part, tensors, flags, args.quick, not args.tensor_only)
      show(part, flags, found)
      fitting = {t: at for t, at in found.items() if "error" not in at}
      if not fitting:
        continue
      best = min(fitting, key=lambda t: fitting[t]["modelled_ms"])
      end = part if flags == "windowed_off" else f"{part}_{flags}"
      figures[f"tensor_{end}"] = best
      for key in ("hbm_over_ideal", "collectives_gb", "modelled_ms"):
        figures[f"{key}_{end}"] = fitting[best][key]
  targets = {} if args.quick else {
    k: t for k, t in TARGETS.items() if k in figures}
  ok = bool(figures) and all(
    figures[k] <= t["max"] for k, t in targets.items())
  rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
  print(json.dumps(dict(name="decode_hbm", figures=rounded, targets=targets,
                        ok=ok)))
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
