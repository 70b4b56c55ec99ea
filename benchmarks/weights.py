"""Peak memory and time of loading weights; what transformers reads back.

  python benchmarks/weights.py [--quick] [--interop]

Loads a made bfloat16 checkpoint of 2 GiB (quick: 0.25 GiB), as one file and as
several, onto one device and onto a mesh of four, each in its own process. The
peak is the process's highest resident memory, Python and jax included; the
bound is what the mesh holds + twice the largest tensor + 200 MiB. The
alternative is the usual way: read all tensors, stack the layers, put them on
the device. About four minutes on two cores (quick: half a minute).

--interop (extra "interop": torch, transformers) writes the checkpoints of
tests/data/models again, reads them with transformers, and compares weights bit
by bit and logits of both implementations.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

from vigor_jax.policy import attention
from vigor_jax.policy import families
from vigor_jax.policy import layout
from vigor_jax.policy import safetensors
from vigor_jax.policy.sizes import Sizes

MIB = 1 << 20
FULL = Sizes(
  layers=26, width=1536, heads=12, kv_heads=4, head_dim=128, ffn=6144,
  vocab=65536, qk_norm=True,
)
QUICK = dataclasses.replace(FULL, layers=4, width=1024, ffn=4096, vocab=32768)
MODELS = pathlib.Path(__file__).parents[1] / "tests" / "data" / "models"


def write_checkpoint(folder: str, sizes: Sizes, max_file_bytes: int) -> None:
  """A checkpoint of finite, not constant, numbers."""
  plan = [
    safetensors.Planned(name, e.shape, np.dtype(ml_dtypes.bfloat16))
    for e in layout.entries(sizes)
    for name in e.names()
  ]
  largest = max(t.nbytes for t in plan) // 2
  numbers = np.linspace(-1, 1, largest, dtype=np.float32)
  numbers = numbers.astype(ml_dtypes.bfloat16)
  values = (numbers[: t.nbytes // 2].reshape(t.shape) for t in plan)
  os.makedirs(folder)
  safetensors.write_folder(folder, plan, values, max_file_bytes)
  with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump(families.write_config(sizes, 4096), file)


def peak_mib() -> float:
  """Highest resident memory of this process so far, in MiB."""
  with open("/proc/self/status") as file:
    line = next(line for line in file if line.startswith("VmHWM"))
  return int(line.split()[1]) / 1024


def load(folder: str, how: str, param_dtype: str) -> dict[str, float]:
  """Loads in this process; returns peak, time and what the mesh holds."""
  import jax
  from jax.sharding import NamedSharding, PartitionSpec

  from vigor_jax.policy import weights

  devices = jax.devices()
  _, sizes = weights.read_sizes(folder, param_dtype=param_dtype)
  mesh = jax.make_mesh((len(devices),), ("fsdp",))
  start, cpu = time.perf_counter(), time.process_time()
  before = peak_mib()
  if how == "vigor_jax":
    # The second axis of all stacked parameters, the first of the others.
    from vigor_jax.policy import transformer

    def sharding(leaf):
      axis = next(
        i for i in (1, 0, 2) if i < leaf.ndim
        and leaf.shape[i] % len(devices) == 0
      )
      return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    shardings = jax.tree.map(sharding, transformer.abstract(sizes)[1])
    params = weights.from_checkpoint(folder, sizes, shardings)
  else:
    tensors = {
      name: np.array(t.view())
      for name, t in safetensors.read_folder(folder).items()
    }
    dtype = jax.numpy.dtype(param_dtype)
    params = {}
    for entry in layout.entries(sizes):
      parts = [entry.to_param(tensors[n]).astype(dtype) for n in entry.names()]
      params[entry.path] = jax.device_put(
        np.stack(parts) if entry.layers else parts[0], devices[0]
      )
  jax.block_until_ready(params)
  return {
    "peak": peak_mib(),
    "before": before,
    "seconds": time.perf_counter() - start,
    "cpu": time.process_time() - cpu,
    "mesh": sum(a.nbytes for a in jax.tree.leaves(params)) / MIB,
  }


def measure(folder, how, param_dtype, devices) -> dict[str, float]:
  """`load` in a fresh process."""
  command = [sys.executable, __file__, "--load", folder, how, param_dtype]
  flags = f"--xla_force_host_platform_device_count={devices}"
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  done = subprocess.run(
    command, env=env, check=True, capture_output=True, text=True
  )
  return json.loads(done.stdout)


def memory(sizes: Sizes) -> bool:
  """Prints the table; whether every peak is within its bound."""
  good = True
  with tempfile.TemporaryDirectory() as root:
    for name, limit in (
      ("one file", 1 << 40), ("files", 2 * sizes.num_params // 5)
    ):
      folder = os.path.join(root, name)
      write_checkpoint(folder, sizes, limit)
      tensors = safetensors.read_folder(folder).values()
      count = len({t.file for t in tensors})
      size = {t.name: np.prod(t.shape) * t.dtype.itemsize for t in tensors}
      largest = max(size.values()) / MIB
      print(
        f"{name} ({count}): {sum(size.values()) / MIB:.0f} MiB in "
        f"{len(size)} tensors, the largest {largest:.0f} MiB"
      )
      for param_dtype, devices in (
        ("bfloat16", 1), ("bfloat16", 4), ("float32", 4)
      ):
        seen = measure(folder, "vigor_jax", param_dtype, devices)
        bound = seen["mesh"] + 2 * largest + 200
        good &= seen["peak"] <= bound
        print(
          f"  {param_dtype} on {devices}: peak {seen['peak']:.0f} MiB "
          f"({seen['before']:.0f} before loading), the mesh holds "
          f"{seen['mesh']:.0f}, bound {bound:.0f}, {seen['seconds']:.1f} s "
          f"(CPU {seen['cpu']:.1f} s)"
          + ("" if seen["peak"] <= bound else "  PASSES THE BOUND")
        )
        if param_dtype == "bfloat16" and devices == 1:
          ours = seen
    other = measure(folder, "alternative", "bfloat16", 1)
  print(
    f"read, stack, put: peak {other['peak']:.0f} MiB, "
    f"{other['seconds']:.1f} s (CPU {other['cpu']:.1f} s); vigor_jax / "
    f"alternative: memory {ours['peak'] / other['peak']:.2f}, CPU time "
    f"{ours['cpu'] / other['cpu']:.2f}"
  )
  return good


def interop() -> bool:
  """Compares with transformers; whether all weights are bit-equal."""
  import jax.numpy as jnp
  import torch
  import transformers
  from flax import nnx

  from vigor_jax.policy import transformer
  from vigor_jax.policy import weights

  good = True
  for source in sorted(MODELS.glob("*_tiny")):
    config = weights.config_of(str(source))
    dtype = config["dtype"]
    _, sizes = weights.read_sizes(str(source), param_dtype=dtype)
    params = weights.from_checkpoint(str(source), sizes)
    with tempfile.TemporaryDirectory() as root:
      for kept in (config, None):  # its own config.json, and one made anew
        folder = os.path.join(root, "kept" if kept else "made")
        weights.to_folder(params, sizes, folder, config=kept)
        load_torch = transformers.AutoModelForCausalLM.from_pretrained
        before = load_torch(source).state_dict()
        model, report = load_torch(folder, output_loading_info=True)
        after = model.state_dict()
        equal = set(before) == set(after) and all(
          before[n].dtype == after[n].dtype and torch.equal(before[n], after[n])
          for n in before
        )
        equal &= not any(report.values())
        model = load_torch(folder, dtype=torch.float32)
        tokens = np.load(source / "logits.npz")["tokens"]
        with torch.no_grad():
          theirs = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
        _, wide = weights.read_sizes(folder)
        mine = nnx.merge(
          transformer.abstract(wide)[0], weights.from_checkpoint(folder, wide)
        )
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = mine(tokens, positions, attention.causal_attend)
        gap = float(np.abs(np.asarray(mine.logits(hidden)) - theirs).max())
        good &= equal and gap < 1e-4
        print(
          f"{source.name}, {dtype}, config {'kept' if kept else 'made'}: "
          f"{len(after)} tensors read back by transformers "
          f"{transformers.__version__}, bit-equal: {equal}; largest difference "
          f"of logits {gap:.1e}"
        )
  return good


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--quick", action="store_true", help="a small one")
  parser.add_argument(
    "--interop", action="store_true", help="only against transformers"
  )
  parser.add_argument(
    "--load", nargs=3, metavar=("FOLDER", "HOW", "DTYPE"),
    help="what the processes that are measured do",
  )
  args = parser.parse_args()
  if args.load:
    print(json.dumps(load(*args.load)))
  else:
    sizes = QUICK if args.quick else FULL
    what = "interop" if args.interop else "memory"
    ok = bool(interop() if args.interop else memory(sizes))
    target = {"interop": "bit-equal, logits within 1e-4",
              "memory": "the mesh's bytes + twice the largest tensor + 200 MiB"}
    print(json.dumps(dict(name=f"weights_{what}", figures={"held": ok},
                          targets={"held": target[what]}, ok=ok)))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
  main()
