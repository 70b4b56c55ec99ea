"""Every configuration that names a TPU slice, compiled for it whole.

  python benchmarks/preflight_configs.py [--quick] [--only=1p5b,3b,...]

Runs `python -m vigor_jax.preflight` on each file in configs/ that names a
topology, on the 3B and the 8B also for a v6e slice, and on the 3B for a slice
that is too small, which must end with exit code 1 and name what does not fit.
Per case:

  gib_*       of a chip at the fullest moment of a step
  room_*      share of the chip that is then free
  seconds_*   of a step, as estimated
  cpu_s_*     processor seconds of the whole preflight

Needs Python 3.12 and the `tpu` extra. A quarter of an hour. --quick compiles
the arithmetic example for 8 CPU devices.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Case: (file in configs/, further flags). Without --topology: the file's own.
CASES = {
  "1p5b": ("qwen2p5_1p5b_math", ()),
  "3b": ("qwen2p5_3b_math", ()),
  "7b": ("qwen2p5_7b_math_dapo", ()),
  "8b": ("qwen3_8b_livecodebench", ()),
  "3b_v6e": ("qwen2p5_3b_math", ("--topology=v6e:4x4",)),
  "8b_v6e": ("qwen3_8b_livecodebench", (
    "--topology=v6e:4x4", "--config.mesh.fsdp=8")),
  "3b_lora": ("qwen2p5_3b_math", (
    "--topology=v5e:2x4", "--config.mesh.fsdp=4", "--config.model.lora.rank=16",
    "--config.model.param_dtype=bfloat16", "--config.sampling.slots=128")),
  "too_small": ("qwen2p5_3b_math", (
    "--topology=v5e:2x2", "--config.mesh.fsdp=2")),
}
QUICK = {"arithmetic": ("arithmetic", (
  "--topology=cpu:8", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"))}
LEAST_ROOM, MOST_CPU_S = 0.05, 720.0  # 6 minutes on two cores.


def named():
  """Files in configs/ that name a topology."""
  found = set()
  for path in sorted((ROOT / "configs").glob("*.py")):
    if 'config.topology = "v' in path.read_text():
      found.add(path.stem)
  return found


def preflight(name, flags):
  """(exit code, console text, report, processor seconds)."""
  with tempfile.TemporaryDirectory() as folder:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
      [sys.executable, "-m", "vigor_jax.preflight",
       f"--config=configs/{name}.py", f"--workdir={folder}", *flags],
      cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
      stdout=subprocess.PIPE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = pathlib.Path(folder) / "preflight.json"
    report = json.loads(path.read_text())[0] if path.exists() else None
  spent = (after.ru_utime + after.ru_stime) - (before.ru_utime
                                               + before.ru_stime)
  return done.returncode, done.stdout, report, spent


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--only", default="")
  args = parser.parse_args()
  cases = QUICK if args.quick else CASES
  missing = named() - {name for name, _ in CASES.values()}
  assert not missing, f"configurations that no case covers: {missing}"
  for case in filter(None, args.only.split(",")):
    assert case in cases, f"--only: {case} is none of {', '.join(cases)}"
  figures, targets, ok = {}, {}, True
  for case, (name, flags) in cases.items():
    if args.only and case not in args.only.split(","):
      continue
    code, text, report, spent = preflight(name, flags)
    print(text[text.find("GiB a chip at the fullest moment"):] or text)
    figures[f"cpu_s_{case}"] = spent
    targets[f"cpu_s_{case}"] = {"max": MOST_CPU_S}
    if report is None:
      raise SystemExit(f"{case}: no report, exit code {code}")
    figures[f"gib_{case}"] = report["peak"] / 2**30
    if case == "too_small":
      ok &= code == 1 and report["culprit"] in text and "does not fit" in text
      continue
    ok &= code == 0
    figures[f"room_{case}"] = 1 - report["peak"] / report["limit"]
    figures[f"seconds_{case}"] = report["seconds"]
    if not args.quick:
      targets[f"room_{case}"] = {"min": LEAST_ROOM}
  for key, target in targets.items():
    ok &= (figures[key] <= target["max"] if "max" in target
           else figures[key] >= target["min"])
  print(json.dumps(dict(
    name="preflight_configs",
    figures={k: float(f"{v:.4g}") for k, v in figures.items()},
    targets=targets, ok=bool(ok))))
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
