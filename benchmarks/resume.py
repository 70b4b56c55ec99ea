"""Kill -9 at random instants: does a run end with the same numbers?

    python benchmarks/resume.py [--quick] [--kills=20] [--workdir=DIR]

Trains eb_widening (it has history) on the arithmetic stream undisturbed, then
the same run killed again and again and started again with the same command.
Final parameters, optimiser state and every line of metrics.jsonl, groups.jsonl
and samples.jsonl must be equal bit for bit, times and compile counts apart; the
last checkpoint never goes back; the run's seconds leave out the downtime.

About five minutes on 2 cores, --quick (3 kills) about two, of which the
supervised warm start is one.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
STEPS = 60
RECORDS = ("metrics.jsonl", "groups.jsonl", "samples.jsonl")
# What may differ: times, and what a process compiled.
VARYING = ("time/", "seconds", "compiles", "eval/seconds")


def command(workdir: str) -> list[str]:
  """The command line of the run."""
  return [
    sys.executable, "-m", "vigor_jax.train",
    f"--config={os.path.join(ROOT, 'configs', 'arithmetic.py')}:plain",
    f"--workdir={workdir}", "--config.allocation.name=eb_widening",
    f"--config.total_steps={STEPS}", "--config.evaluation.every_steps=10",
    "--config.evaluation.num_prompts=256", "--config.checkpoint.every_steps=5",
  ]  # fmt: skip


def start(workdir: str) -> subprocess.Popen:
  """Starts, or continues, the run; its console goes to a file."""
  environment = {**os.environ, "PYTHONPATH": ROOT}
  environment.setdefault("JAX_PLATFORMS", "cpu")
  with open(workdir + ".log", "a") as log:
    return subprocess.Popen(
      command(workdir), stdout=log, stderr=log, env=environment
    )


def latest(workdir: str) -> int:
  """The last whole checkpoint's step, or -1."""
  folder = os.path.join(workdir, "checkpoints")
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return max([int(n) for n in names if n.isdigit()], default=-1)


def lines(workdir: str, name: str) -> list[dict]:
  """Records without what may differ."""
  with open(os.path.join(workdir, name)) as file:
    records = [json.loads(line) for line in file]
  return [
    {k: v for k, v in record.items() if not k.startswith(VARYING)}
    for record in records
  ]


def arrays(workdir: str) -> dict[str, np.ndarray]:
  """Parameters and optimiser state of the last checkpoint."""
  import orbax.checkpoint as ocp

  folder = os.path.join(workdir, "checkpoints", str(latest(workdir)))
  out = {}
  for item in ("params", "opt_state"):
    tree = ocp.StandardCheckpointer().restore(os.path.join(folder, item))
    out |= {f"{item}/{k}": np.asarray(v) for k, v in tree.items()}
  return out


def differences(first: str, second: str) -> list[str]:
  """What is not equal between two finished runs."""
  found = []
  for name in RECORDS:
    a, b = lines(first, name), lines(second, name)
    if len(a) != len(b):
      found.append(f"{name}: {len(a)} against {len(b)} lines")
    for x, y in zip(a, b):
      keys = [k for k in {*x, *y} if x.get(k) != y.get(k)]
      if keys:
        found.append(f"{name}, step {x['step']}: {', '.join(sorted(keys))}")
  a, b = arrays(first), arrays(second)
  found += [
    name
    for name in {*a, *b}
    if name not in a or name not in b or not np.array_equal(a[name], b[name])
  ]
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--kills", type=int, default=0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--workdir", default="")
  args = parser.parse_args()
  kills = args.kills or (3 if args.quick else 20)
  workdir = args.workdir or tempfile.mkdtemp(prefix="resume-")
  calm = os.path.join(workdir, "undisturbed")
  rough = os.path.join(workdir, "killed")

  print("warm start, then the undisturbed run", flush=True)
  for name in ("first", "undisturbed"):
    # Twice: the first pays for the warm start and the compilation.
    began = time.monotonic()
    process = start(os.path.join(workdir, name))
    if process.wait() != 0:
      sys.exit(f"the undisturbed run failed; see {workdir}/{name}.log")
    alone = time.monotonic() - began

  chance = random.Random(args.seed)
  alive, went_back, done, restarts = 0.0, 0, 0, []
  while done < kills:
    before = latest(rough)
    process, began = start(rough), time.monotonic()
    try:
      process.wait(chance.uniform(0.05, 1.0) * alone)
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      done += 1
    process.wait()
    alive += time.monotonic() - began
    went_back += latest(rough) < before
    restarts.append(latest(rough))
    print(f"kill {done} of {kills}: checkpoint {latest(rough)}", flush=True)
    if process.returncode == 0 and done < kills:
      # It was faster than the clock: begin again, so that kills go on.
      if differences(calm, rough):
        break
      os.rename(rough, f"{rough}-{done}")
  process, began = start(rough), time.monotonic()
  code = process.wait()
  alive += time.monotonic() - began
  found = differences(calm, rough) if code == 0 else [f"exit code {code}"]
  for line in found[:10]:
    print("differs:", line)
  with open(os.path.join(rough, "summary.json")) as file:
    seconds = json.load(file)["seconds"]
  ok = not found and not went_back and seconds < alive
  print(json.dumps({
    "name": "resume",
    "figures": {
      "kills": done, "differences": len(found),
      "checkpoints_lost": went_back, "seconds_recorded": round(seconds, 2),
      "seconds_alive": round(alive, 2),
    },
    "targets": {"differences": 0, "checkpoints_lost": 0},
    "ok": bool(ok),
  }))
  sys.exit(0 if ok else 1)


if __name__ == "__main__":
  main()
