"""Decode attention as XLA compiles it, against JAX's own Pallas TPU kernels.

  python benchmarks/attention_kernels.py [--quick] [--parts=3b,8b]

Compiles, without a TPU, what one layer attends to in one decode step on one
chip: 32 slots of one kv head with 8 queries (Qwen2.5-3B on v5e:4x4, columns of
the prompts apart) and 128 slots of one kv head with 4 (Qwen3-8B on
v5p:2x2x2), prompts of 512 and completions of 1024 tokens at full length,
bfloat16. The XLA form is the sampler's (vigor_jax/sampling/spread.py). The
kernels are jax.experimental.pallas.ops.tpu's paged_attention and
ragged_paged_attention, over pages of several sizes.

  hbm_mb_*      bytes that one call moves. A kernel is counted as its operands
                and results, each once: what it says it needs
  floor_us_*    those bytes at the chip's bandwidth: the least it can take
  modelled_us_* the compiler's own cycle estimate, of XLA's form only. A kernel
                has none

Nothing is run, so nothing here says how fast a kernel is; the floor is a bound.
Needs Python 3.12 and the `tpu` extra; a minute. --quick compares what the two
compute, with the kernel interpreted on a CPU, small, and compiles nothing.
"""

import argparse
import functools
import json
import os
import subprocess
import sys

PARTS = {
  # topology, slots, kv heads, queries of each
  "3b": ("v5e:4x4", 32, 1, 8),
  "8b": ("v5p:2x2x2", 128, 1, 4),
}
PROMPT, COMPLETION, WIDTH = 512, 1024, 128
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
  out, _ = spread._attended(
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


def compiled(part):
  """Figures by form. Imports jax: in a process of its own."""
  from vigor_jax.aot import chips

  name, *shape = PARTS[part]
  chips.prepare(name)
  import jax
  import numpy as np
  from vigor_jax.aot import cost

  topology = chips.topology(name)
  # Every chip of the slice does the same.
  mesh = jax.sharding.Mesh(np.array(topology.devices), "x")
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  spec = jax.sharding.PartitionSpec()
  found = {}
  for form, function, arguments in forms(*shape):
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec,
                        check_vma=False)
    placed = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
      arguments)
    try:
      text = jax.jit(run).trace(*placed).lower().compile().as_text()
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


def largest_difference():
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
  parser.add_argument("--parts", default="3b,8b")
  parser.add_argument("--child", default="")
  args = parser.parse_args()
  if args.child:
    print(json.dumps(compiled(args.child)))
    return 0
  figures, targets = {}, {}
  if args.quick:
    figures["largest_difference"] = largest_difference()
    targets["largest_difference"] = {"max": 1e-4}
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
