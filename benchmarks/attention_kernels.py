"""Attention as XLA compiles it, against JAX's own Pallas TPU kernels.

  python benchmarks/attention_kernels.py [--quick]
      [--parts=3b,8b,3b_train,3b_rows,3b_long,8b_train]

Compiles, without a TPU, one layer's attention on one chip, bfloat16.

3b, 8b: one decode step. 32 slots of one kv head with 8 queries (Qwen2.5-3B on
v5e:4x4, columns of the prompts apart) and 128 slots of one kv head with 4
(Qwen3-8B on v5p:2x2x2), prompts of 512 and completions of 1024 tokens at full
length. The XLA form is the sampler's (vigor_jax/sampling/spread.py). The
kernels are jax.experimental.pallas.ops.tpu's paged_attention and
ragged_paged_attention, over pages of several sizes.

*_train, *_rows, *_long: an update, forward and then backward with the forward
pass computed again, as with policy.remat. Two packed rows of 512 + 1024 tokens,
two of the configuration's 4096, one of 8192; 8b_train: two of 10240. The XLA
form is the update's (vigor_jax/policy/attention.py). The kernels are
splash_attention with the packed rows' mask, and with a causal mask alone (it,
and flash_attention, could serve rows of one rollout each, not packed ones).

  hbm_mb_*      bytes that one call moves. A kernel is counted as its operands
                and results, each once: what it says it needs. Splash reads its
                mask once a head: that is not in here
  floor_us_*    those bytes at the chip's bandwidth: the least it can take
  modelled_us_* the compiler's own cycle estimate. A kernel has none: of
                kernels it is what happens around them, and is left out where
                there is nothing else
  temp_mb_*     (training) memory beside arguments and results
  cpu_s_*       (training) CPU seconds to trace and compile
  peak_us_*     (training) products at the chip's peak: another floor

Nothing is run, so nothing here says how fast a kernel is; the floors are
bounds. Needs Python 3.12 and the `tpu` extra; minutes. --quick compares what
the decoding forms compute, with the kernels interpreted on a CPU, small, and
compiles nothing; tests/policy/test_splash.py does so for training.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time

PARTS = {
  # topology, slots, kv heads, queries of each
  "3b": ("v5e:4x4", 32, 1, 8),
  "8b": ("v5p:2x2x2", 128, 1, 4),
}
PROMPT, COMPLETION, WIDTH = 512, 1024, 128
TRAINING = {
  # topology, rows, tokens of each, heads, kv heads
  "3b_train": ("v5e:4x4", 2, PROMPT + COMPLETION, 8, 1),
  "3b_rows": ("v5e:4x4", 2, 4096, 8, 1),
  "3b_long": ("v5e:4x4", 1, 8192, 8, 1),
  "8b_train": ("v5p:2x2x2", 2, 10240, 16, 4),
}
LAYERS = 36  # Of the stores: one layer's would be taken into VMEM first.
PAGES = {"paged": (32, 128, 512), "ragged": (32, 128)}
BLOCK = 512  # Columns that a kernel reads at once.


def xla(q, prompts, completions, index, base, began):
  """[S, K * G, hd] of queries like it; stores are [layers, S, K, L, hd]."""
  import jax.numpy as jnp
  from vigor_jax.sampling import cache, spread

  (pk, pv), (ck, cv) = ([cache.columns(a, index, a.shape[3]) for a in pair]
                        for pair in (prompts, completions))  # fmt: skip
  slots, heads, *_, hd = pk.shape
  masks = [jnp.arange(pk.shape[2])[None] < base[:, None],
           jnp.arange(ck.shape[2])[None] >= began[:, None]]  # fmt: skip
  queries = q.reshape(slots, heads, -1, hd)
  out, _ = spread.attended(
    cache.scores_of(queries, [pk, ck]), [pv, cv], masks, q.dtype)
  return out.astype(q.dtype).reshape(q.shape)


def paged(q, k, v, lengths, pages, *, page, block=BLOCK):
  """The same of pages [K, pages, page, hd], `pages` [S, .] of each slot."""
  from jax.experimental.pallas.ops.tpu import paged_attention as lib

  return lib.paged_attention(q * q.shape[-1] ** -0.5, k, v, lengths, pages,
                             pages_per_compute_block=block // page)


def ragged(q, kv, lengths, pages, *, page):
  """The same of pages [pages, page, 2 K, hd], one query row a slot."""
  import jax.numpy as jnp
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as lib

  slots = q.shape[0]
  return lib.ragged_paged_attention(
    q, kv, lengths, pages, jnp.arange(slots + 1), jnp.array([slots]),
    sm_scale=q.shape[-1] ** -0.5, num_kv_pages_per_block=BLOCK // page,
    num_queries_per_block=8)


def forms(slots, heads, group):
  """(name, function, shapes and dtypes of its arguments) of one chip."""
  import jax
  import jax.numpy as jnp

  half = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  ints = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
  q = half(slots, heads * group, WIDTH)
  store = lambda n: (half(LAYERS, slots, heads, n, WIDTH),) * 2
  yield "xla", xla, (q, store(PROMPT), store(COMPLETION), ints(), ints(slots),
                     ints(slots))  # fmt: skip
  for page in PAGES["paged"]:
    each = (PROMPT + COMPLETION) // page
    pages = half(heads, slots * each, page, WIDTH)
    yield f"paged_{page}", functools.partial(paged, page=page), (
      q, pages, pages, ints(slots), ints(slots, each))
  for page in PAGES["ragged"]:
    each = (PROMPT + COMPLETION) // page
    yield f"ragged_{page}", functools.partial(ragged, page=page), (
      q, half(slots * each, page, 2 * heads, WIDTH), ints(slots),
      ints(slots, each))


# ------------------------------------------------------------------- training


def pulled(attend):
  """The backward pass of `attend(*fixed, q, k, v)`, forward included."""
  import jax

  def run(*arguments):
    *fixed, q, k, v, do = arguments
    return jax.vjp(functools.partial(attend, *fixed), q, k, v)[1](do)
  return run


def training_forms(rows, length, heads, kv_heads):
  """(name, "forward" or "backward", function, arguments) of one chip."""
  import jax
  from jax.experimental.pallas.ops.tpu import flash_attention
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks)  # fmt: skip
  import jax.numpy as jnp
  from vigor_jax.policy import attention, splash

  array = jax.ShapeDtypeStruct
  q, kv = (array((rows, length, n, WIDTH), jnp.bfloat16)
           for n in (heads, kv_heads))  # fmt: skip
  mask = array((rows, length, length), bool)
  norms = array((rows, heads, length), jnp.float32)

  def again(mask, norms, q, k, v):
    return attention.again(q, k, v, mask, norms)

  def packed(kernels, q, k, v):
    return splash.by_rows(map(splash.known, kernels), q, k, v)

  def causal(q, k, v):
    rule = masks.MultiHeadMask([masks.CausalMask((length,) * 2)] * heads)
    return splash.by_rows([splash.kernel(rule, kv_heads)] * rows, q, k, v)

  def flash(q, k, v):
    per_head = lambda a: jnp.repeat(
      jnp.swapaxes(a, 1, 2), heads // a.shape[2], 1)
    sizes = flash_attention.BlockSizes(
      BLOCK, BLOCK, BLOCK, 1, *[BLOCK] * 7)
    return jnp.swapaxes(flash_attention.flash_attention(
      *map(per_head, (q, k, v)), causal=True, sm_scale=WIDTH**-0.5,
      block_sizes=sizes), 1, 2)

  kernels = jax.eval_shape(lambda m: splash.kernels(m, kv_heads), mask)
  yield "xla", "forward", attention.by_blocks, (q, kv, kv, mask)
  yield "xla", "backward", pulled(again), (mask, norms, q, kv, kv, q)
  for name, attend, fixed in (("splash_packed", packed, (kernels,)),
                              ("splash_causal", causal, ()),
                              ("flash_causal", flash, ())):
    yield name, "forward", attend, (*fixed, q, kv, kv)
    yield name, "backward", pulled(attend), (*fixed, q, kv, kv, q)


def products(name, direction, rows, length, heads):
  """FLOPs: half of the scores are needed, in so many products."""
  count = 2 if direction == "forward" else 7 if name == "xla" else 9
  return count * rows * heads * length**2 * WIDTH


# -------------------------------------------------------------------- compile


def on_topology(name):
  """(topology, function that compiles for every chip of it alike)."""
  from vigor_jax.aot import chips

  chips.prepare(name)
  import jax
  import numpy as np

  topology = chips.topology(name)
  mesh = jax.sharding.Mesh(np.array(topology.devices), "x")
  spec = jax.sharding.PartitionSpec()
  whole = jax.sharding.NamedSharding(mesh, spec)

  def build(function, arguments):
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec,
                        check_vma=False)
    placed = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
      arguments)
    return jax.jit(run).trace(*placed).lower().compile()
  return topology, build


def trained(part):
  """Figures by form and direction. Imports jax: in a process of its own."""
  name, *shape = TRAINING[part]
  topology, build = on_topology(name)
  from vigor_jax.aot import cost

  found = {}
  for form, direction, function, arguments in training_forms(*shape):
    start = time.process_time()
    built = build(function, arguments)
    seconds = time.process_time() - start
    counted = cost.of_text(built.as_text(), len(topology.devices))
    chip = topology.chip
    flops = products(form, direction, *shape[:3])
    at = found[f"{form}_{direction}"] = {
      "hbm_mb": counted.hbm_bytes / 1e6,
      "floor_us": counted.hbm_bytes / chip.bandwidth * 1e6,
      "peak_us": flops / chip.flops * 1e6,
      "temp_mb": built.memory_analysis().temp_size_in_bytes / 1e6,
      "cpu_s": seconds,
    }
    if form == "xla":
      at["modelled_us"] = counted.cycles / chip.clock * 1e6
  return found


def compiled(part):
  """Figures by form. Imports jax: in a process of its own."""
  if part in TRAINING:
    return trained(part)
  name, *shape = PARTS[part]
  topology, build = on_topology(name)
  from vigor_jax.aot import cost

  found = {}
  for form, function, arguments in forms(*shape):
    try:
      text = build(function, arguments).as_text()
    except Exception as error:  # Whatever a kernel's compiler says.
      found[form] = {"error": str(error).splitlines()[0][:200]}
      continue
    counted = cost.of_text(text, len(topology.devices))
    found[form] = {
      "hbm_mb": counted.hbm_bytes / 1e6,
      "floor_us": counted.hbm_bytes / topology.chip.bandwidth * 1e6,
    }
    if form == "xla":
      found[form]["modelled_us"] = counted.cycles / topology.chip.clock * 1e6
  return found


def decode_difference():
  """Of the XLA form and the interpreted kernel, prompts of 6 and 16 columns.

  The kernel's pages must be filled up to the end of a prompt, so one prompt
  is whole, and the other's slot sees nothing behind it.
  """
  import jax
  from jax.experimental.pallas import tpu as pltpu
  import jax.numpy as jnp

  slots, heads, group, hd, page = 2, 1, 8, 128, 8
  keys = jax.random.split(jax.random.key(0), 5)
  # The kernel rounds keys and values to bfloat16: they are rounded already.
  draw = lambda key, *s: jax.random.normal(key, s, jnp.bfloat16).astype(
    jnp.float32)
  q = draw(keys[0], slots, heads * group, hd)
  prompts = [draw(k, 1, slots, heads, 16, hd) for k in keys[1:3]]
  completions = [draw(k, 1, slots, heads, 16, hd) for k in keys[3:]]
  base, began = jnp.array([6, 16]), jnp.array([16, 0])
  ours = xla(q, prompts, completions, 0, base, began)
  stored = [
    jnp.concatenate([p[0], c[0]], 2).reshape(slots, heads, -1, page, hd)
    .swapaxes(0, 1).reshape(heads, -1, page, hd)
    for p, c in zip(prompts, completions)]  # fmt: skip
  pages = jnp.arange(slots * 32 // page, dtype=jnp.int32).reshape(slots, -1)
  with pltpu.force_tpu_interpret_mode():
    theirs = paged(q, *stored, jnp.array([6, 32]), pages, page=page, block=16)
  return float(jnp.max(jnp.abs(ours - theirs)))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--parts", default=",".join([*PARTS, *TRAINING]))
  parser.add_argument("--child", default="")
  args = parser.parse_args()
  if args.child:
    print(json.dumps(compiled(args.child)))
    return 0
  figures, targets = {}, {}
  if args.quick:
    figures["decode_difference"] = decode_difference()
    targets = dict.fromkeys(figures, {"max": 1e-4})
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  for part in () if args.quick else args.parts.split(","):
    # One process a topology: a process compiles for one kind of chip.
    done = subprocess.run(
      [sys.executable, os.path.abspath(__file__), f"--child={part}"],
      env={**os.environ, "PYTHONPATH": root}, text=True,
      stdout=subprocess.PIPE, check=True)
    for form, at in json.loads(done.stdout.splitlines()[-1]).items():
      print(part, form, at.get("error") or ", ".join(
        f"{k} {v:.1f}" for k, v in at.items()), flush=True)
      figures.update({f"{k}_{part}_{form}": v for k, v in at.items()
                      if k != "error"})
  ok = all(figures[k] <= t["max"] for k, t in targets.items())
  print(json.dumps(dict(
    name="attention_kernels", targets=targets, ok=ok,
    figures={k: float(f"{v:.4g}") for k, v in figures.items()})))
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
