"""The update as compiled for TPU slices, against google-tunix's.

  python benchmarks/preflight_vs_tunix.py [--quick] [--parts=3b,8b]
      [--tunix_python=/path/to/venv/bin/python] [--tunix_layers=2,4]

Compiles a GRPO update of 16 x (512 + 1024) tokens with libtpu, without a TPU:
Qwen2.5-3B for v5e:4x4 on the mesh (fsdp 8, tensor 2) and Qwen3-8B for
v5p:2x2x2 on (4, 2), bfloat16 parameters and moments; `3b_f32` and `8b_f32`
have float32 master weights and moments, `3b_lora` a frozen bfloat16 base and
adapters of rank 16 beside all matrices. Both sides are counted by this
project's walker (vigor_jax/aot). Per chip:

  peak_gib_*              most bytes alive at once, as the compiler says
  allocated_gib_*         what it reserves for them
  modelled_over_bound_*   its own cycle estimates over 8 FLOPs per parameter
                          and token at the chip's peak
  collectives_gb_*        bytes that leave a chip
  compile_cpu_s_*         processor seconds of tracing and compiling
  vocabulary_f32_gib_*    the largest float32 array in HBM that has the
                          vocabulary, or a chip's piece of it, as an axis
  donated_*               share of parameters and optimiser state in whose
                          place the new ones are written

Needs Python 3.12 and the `tpu` extra; google-tunix, in an environment of its
own (--tunix_python), the `interop` extra. Tunix unrolls its layers, which takes
a quarter of an hour to compile at full depth: --tunix_layers compiles shallow
models and extends the straight line through them; 0 is full depth. 5 minutes
for both parts. --quick compiles two layers of the 3B and compares nothing;
where the TPU compiler is not installed it compiles them for 8 CPU devices, and
the figures are that compiler's.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

PARTS = {
  "3b": ("qwen2.5-3b", "v5e:4x4", (1, 8, 2), "bfloat16"),
  "8b": ("qwen3-8b", "v5p:2x2x2", (1, 4, 2), "bfloat16"),
  "3b_f32": ("qwen2.5-3b", "v5e:4x4", (1, 8, 2), "float32"),
  "8b_f32": ("qwen3-8b", "v5p:2x2x2", (1, 4, 2), "float32"),
  "3b_lora": ("qwen2.5-3b", "v5e:4x4", (1, 8, 2), "bfloat16"),
}
RANK = 16
CPU = "cpu:8", (1, 4, 2)  # What --quick compiles for without libtpu.
ROWS, PROMPT, COMPLETION = 16, 512, 1024
TARGETS = {
  "peak_gib_3b": {"max": 2.2},
  "modelled_over_bound_3b": {"max": 1.5},
  "collectives_gb_3b": {"max": 11.0},
  "compile_cpu_s_3b": {"max": 120.0},
  "peak_gib_3b_f32": {"max": 4.1},
  "modelled_over_bound_3b_f32": {"max": 1.5},
  "peak_gib_8b": {"max": 10.0},
  "modelled_over_bound_8b": {"max": 1.5},
  "peak_gib_8b_f32": {"max": 17.0},
  "vocabulary_f32_gib_3b": {"max": 0.0},
  "donated_3b": {"min": 0.999},
}


def measured(result, arrays, state, sizes, topology):
  """The figures of a compiled program (estimate.Result).

  Args:
    arrays: that it holds in HBM.
    state: parameters and optimiser state, as shapes.
  """
  from vigor_jax.aot import decoding

  pieces = {sizes.vocab // n for n in range(1, len(topology.devices) + 1)
            if sizes.vocab % n == 0}
  logits = max((a.size for a in arrays
                if a.dtype == "f32" and pieces & set(a.shape)), default=0)
  tokens = ROWS * (PROMPT + COMPLETION)
  bound = 8 * sizes.num_params * tokens / (
    len(topology.devices) * topology.chip.flops)
  return {
    "peak_gib": result.alive / 2**30,
    "allocated_gib": result.peak / 2**30,
    "modelled_ms": result.model_s * 1e3,
    "modelled_over_bound": result.model_s / bound,
    "hbm_gb": result.hbm_bytes / 1e9,
    "collectives_gb": result.wire_bytes / 1e9,
    "compile_cpu_s": result.compile_s,
    "vocabulary_f32_gib": logits / 2**30,
    "donated": result.donated / decoding.per_chip(state),
  }


def compiled(part, layers, side, flags, cpu=False):
  """Figures of one program. Imports jax: in a process of its own."""
  from vigor_jax.aot import chips

  model, name, mesh, dtype = PARTS[part]
  if cpu:
    name, mesh = CPU
  chips.prepare(name)
  from vigor_jax.aot import estimate
  from vigor_jax.policy import families, sharding
  from vigor_jax.policy.sizes import Adapters, Sizes

  topology = chips.topology(name)
  values = families.published(model)
  values["layers"] = layers or values["layers"]
  values["rope_scaling"] = families.rope_from_text(values["rope_scaling"])
  sizes = Sizes(**values, dtype="bfloat16", param_dtype=dtype)
  grid = sharding.make_mesh(mesh, topology.devices)
  make = our_update if side == "ours" else tunix_update
  if part.endswith("lora"):
    sizes = dataclasses.replace(sizes, adapters=Adapters(RANK))
  plain = cpu or flags == "default"
  options = None if plain else estimate.WINDOWED_OFF
  arrays, program = set(), make(sizes, grid)
  result = estimate.compile_program(program, topology, options, arrays.update)
  if not result.fits:
    raise SystemExit(f"{part}: {result.error}")
  if side == "ours":
    occupied(part, result, program)
  state = program.arguments[:1 if side == "ours" else 2]
  return measured(result, arrays, state, sizes, topology)


def occupied(part, result, program):
  """Prints what a chip's memory holds."""
  from vigor_jax.aot import decoding

  gib = lambda size: f"{size / 2**30:6.2f}"
  state, *rest = program.arguments
  print(f"{part}, GiB a chip:")
  for what, size in (
      ("parameters", decoding.per_chip(state.params)),
      ("optimiser state", decoding.per_chip(state.opt_state)),
      ("the batch", decoding.per_chip(rest)),
      ("temporaries, as reserved", result.temporary),
      ("alive at once", result.alive)):
    print(f"  {gib(size)}  {what}")
  print("  largest arrays: " + ", ".join(result.biggest))


def our_update(sizes, grid):
  """The trainer's own program, one micro-batch of packed rows."""
  import jax
  import numpy as np

  from vigor_jax.aot import programs
  from vigor_jax.policy import (
    objective, optimizer, packing, sharding, transformer, update)

  objective.UNROLLED = 0  # A shallow model as a deep one.
  plain = dataclasses.replace(sizes, adapters=None)
  graph, params = transformer.abstract(plain)
  placement = sharding.Placement(grid)
  updater = update.Updater(
    graph, update.Objective(old="current", remat=True),
    optimizer.OptimizerOptions(), placement,
    adapted=sizes if sizes.adapters else None)
  params = placement.abstract(params)
  state = update.TrainState(updater.abstract_params(params),
                            updater.abstract_opt(params))
  array = lambda dtype: jax.ShapeDtypeStruct(
    (1, ROWS, PROMPT + COMPLETION), dtype, sharding=placement.batch)
  number = lambda dtype: jax.ShapeDtypeStruct(
    (), dtype, sharding=placement.replicated)
  batch = packing.Packed(*[array(np.int32)] * 5, *[array(np.float32)] * 3)
  old = batch.sampler_logprobs
  return programs.Program(
    "update", updater.programs.update,
    (state, batch, old, old, number(np.int32), number(np.float32),
     number(np.float32)), (1,), "one micro-batch", 1)


def tunix_update(sizes, grid):
  """Its trainer's step (PeftTrainer._train_step, GRPO loss without KL).

  Its models' default sharding; every layer recomputed, as ours are.
  """
  import types

  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from flax import nnx
  from tunix.models.qwen2 import model as qwen2
  from tunix.models.qwen3 import model as qwen3
  from tunix.rl import algo_core, common

  from vigor_jax.aot import programs

  module = qwen3 if sizes.qk_norm else qwen2
  family = module.ModelConfig
  make = family.qwen3_8b if sizes.qk_norm else family.qwen2p5_3b
  config = make()
  config.num_layers = sizes.layers
  config.dtype = jnp.dtype(sizes.dtype)
  config.param_dtype = jnp.dtype(sizes.param_dtype)
  config.remat_config = module.RematConfig.DECODER
  kind = next(c for c in (getattr(module, n, None) for n in (
    "Qwen3", "Qwen2")) if c is not None)
  mesh = jax.sharding.Mesh(grid.devices[0], ("fsdp", "tp"))
  placed = lambda *axes: jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(*axes))
  # Its own constraints are left out where jax's first device is a CPU.
  module.shard = lambda x, axes: jax.lax.with_sharding_constraint(
    x, placed(*axes))
  model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
  optimizer = nnx.eval_shape(
    lambda m: nnx.Optimizer(m, optax.adamw(1e-6), wrt=nnx.Param), model)
  graph, params = nnx.split(model)
  rest_graph, rest = nnx.split(optimizer)

  def with_sharding(state):
    specs = nnx.get_partition_spec(state)

    def one(leaf, spec):
      axes = tuple(spec) if len(tuple(spec)) <= leaf.ndim else ()
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype,
                                  sharding=placed(*axes))
    return jax.tree.map(one, state, specs)

  options = types.SimpleNamespace(
    beta=0.0, epsilon=0.2, epsilon_high=0.2, loss_algo="grpo",
    loss_agg_mode="sequence-mean-token-mean", temperature=1.0,
    kl_loss_mode="kl", num_generations=8, num_iterations=1)

  def step(params, rest, prompt, completion, advantages):
    model = nnx.merge(graph, params)
    optimizer = nnx.merge(rest_graph, rest)
    example = common.TrainExample(
      prompt_ids=prompt, prompt_mask=prompt > 0, completion_ids=completion,
      completion_mask=(completion > 0).astype(jnp.float32),
      advantages=advantages, ref_per_token_logps=None,
      old_per_token_logps=None)
    loss = lambda model: algo_core.grpo_loss_fn(model, example, options, 0, 1)
    (value, _), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    norm = optax.global_norm(grads)
    optimizer.update(model, grads)
    return nnx.state(model), nnx.state(optimizer), value, norm

  array = lambda shape, dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=placed("fsdp"))

  return programs.Program(
    "update", jax.jit(step, donate_argnums=(1,)),
    (with_sharding(params), with_sharding(rest),
     array((ROWS, PROMPT), np.int32), array((ROWS, COMPLETION), np.int32),
     array((ROWS,), np.float32)), (1,), "one batch", 1)


def child(python, *arguments):
  """Figures of `compiled` with these arguments, from its own process."""
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  done = subprocess.run(
    [python, os.path.abspath(__file__), "--child", json.dumps(arguments)],
    env={**os.environ, "PYTHONPATH": root}, text=True, stdout=subprocess.PIPE,
    check=True)
  *said, last = done.stdout.splitlines()
  print("\n".join(said), flush=True)
  return json.loads(last)


def extended(part, layers, python, flags):
  """Tunix's figures at full depth, from those of a few shallow models."""
  depths = [int(n) for n in layers.split(",")]
  found = [child(python, part, n, "tunix", flags) for n in depths]
  if depths == [0]:
    return found[0]
  from vigor_jax.policy import families
  full = families.published(PARTS[part][0])["layers"]
  (a, b), (low, high) = depths, found
  line = lambda key: low[key] + (high[key] - low[key]) * (full - a) / (b - a)
  # A ratio is no straight line; the milliseconds are.
  return {key: line(key) for key in low if key != "modelled_over_bound"}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--parts", default="3b,8b")
  parser.add_argument("--flags", default="windowed_off",
                      choices=["windowed_off", "default"])
  parser.add_argument("--tunix_python", default="")
  parser.add_argument("--tunix_layers", default="2,4")
  parser.add_argument("--child", default="")
  args = parser.parse_args()
  if args.child:
    print(json.dumps(compiled(*json.loads(args.child))))
    return 0
  figures = {}
  parts = "3b" if args.quick else args.parts
  for part in parts.split(","):
    layers = 2 if args.quick else 0
    cpu = args.quick and importlib.util.find_spec("libtpu") is None
    sides = {"": child(sys.executable, part, layers, "ours", args.flags, cpu)}
    if args.tunix_python and not args.quick:
      sides["tunix_"] = extended(part, args.tunix_layers, args.tunix_python,
                                 args.flags)
    for prefix, side in sides.items():
      for key, value in side.items():
        figures[f"{prefix}{key}_{part}"] = value
        print(f"{prefix}{key}_{part:10s} {value:.4g}", flush=True)
  targets = {} if args.quick else {
    k: t for k, t in TARGETS.items() if k in figures}
  ok = all(t.get("min", figures[k]) <= figures[k] <= t.get("max", figures[k])
           for k, t in targets.items())
  rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
  print(json.dumps(dict(name="preflight_vs_tunix", figures=rounded,
                        targets=targets, ok=ok)))
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
