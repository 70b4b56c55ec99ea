"""Kills a run with SIGKILL at random instants and compares what is left.

  python benchmarks/resume.py [--quick]

A short run (arithmetic with two operations, a fixed set of prompts, the rule
eb_widening with its history) is trained once undisturbed. The same command is
then started, killed at a random instant and started again, 20 times (3 with
--quick): in start-up, in the warm start, in steps, in evaluations, in saves.
Where a run ends before its next kill, another one begins. Every run that was
killed has to end with the undisturbed one's numbers, bit for bit, times and
compile counts apart. About four minutes on 2
cores, one and a half with --quick.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Bit for bit is a CPU's word.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOLATILE = ("seconds", "time/", "compiles", "eval/seconds")
STEPS = 40
RECORDS = ("metrics.jsonl", "groups.jsonl", "samples.jsonl")
SETTINGS = f"""
  allocation.name=eb_widening task.operations=2 task.num_prompts=150
  prompts_per_step=8 rollout_budget=64 total_steps={STEPS} seed=3
  sft.steps=240 sft.batch_size=64 sft.warmup_steps=20
  model.sizes.layers=1 model.sizes.width=32 model.sizes.heads=2
  model.sizes.kv_heads=1 model.sizes.ffn=64
  policy.row_length=16 policy.rows_per_microbatch=16
  sampling.slots=16 sampling.chunk=3 sampling.prompt_buckets=4
  sampling.prefixes=64 sampling.max_new_tokens=3 sampling.prefill_batch=16
  evaluation.every_steps=5 evaluation.num_prompts=64
  evaluation.fresh_rollouts=2 checkpoint.every_steps=2
""".split()


class Process:
  """One start of the command, its output in a file."""

  def __init__(self, workdir: pathlib.Path):
    # Each run has a warm start of its own, so that kills fall on it too; the
    # compiled programs lie beside the runs and are shared.
    command = [
      sys.executable, "-m", "vigor_jax.train",
      f"--config={ROOT / 'configs' / 'arithmetic.py'}",
      f"--workdir={workdir}",
      *(f"--config.{setting}" for setting in SETTINGS),
      f"--config.sft.cache_dir={workdir.parent / (workdir.name + '-warm')}",
    ]  # fmt: skip
    self.log = workdir.parent / f"{workdir.name}.log"
    with open(self.log, "wb") as out:
      self.popen = subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
        start_new_session=True,
      )  # fmt: skip
    self.started = time.monotonic()

  def lines(self) -> list[str]:
    """What it has printed so far."""
    return self.log.read_text(errors="replace").splitlines()

  def wait_for_steps(self, count: int) -> bool:
    """Waits until it has printed that many steps; False if it ended first."""
    while self.steps() < count:
      if not self.wait(0.01):
        return False
    return self.popen.poll() is None

  def wait(self, seconds: float) -> bool:
    """Waits; False if the process ended first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      if self.popen.poll() is not None:
        return False
      time.sleep(min(0.01, max(0.0, end - time.monotonic())))
    return self.popen.poll() is None

  def kill(self) -> None:
    """SIGKILL: no handler, no clean-up."""
    os.killpg(self.popen.pid, signal.SIGKILL)
    self.popen.wait()

  def finish(self) -> None:
    """Waits for the end.

    Raises:
      RuntimeError: it failed; with the end of what it printed.
    """
    if self.popen.wait():
      tail = "\n".join(self.lines()[-15:])
      raise RuntimeError(f"exit code {self.popen.returncode}:\n{tail}")

  def steps(self) -> int:
    """Steps of the run itself that it has printed."""
    return sum(line.startswith("step ") and "reward" in line
               for line in self.lines())  # fmt: skip

  def resumed_from(self) -> int | None:
    """The step it said it resumed the run from."""
    for line in self.lines():
      if line.startswith("resumed from step ") and "-warm" not in line:
        return int(line.split()[3])
    return None


def saved_steps(workdir: pathlib.Path) -> list[int]:
  """Checkpoints under their final names."""
  folder = workdir / "checkpoints"
  if not folder.exists():
    return []
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def final_arrays(workdir: pathlib.Path) -> tuple[dict, dict]:
  """({path: array} of parameters and moments, the host's record)."""
  from vigor_jax import checkpoints
  from vigor_jax import experiment
  from vigor_jax.config import loading
  from vigor_jax.policy import build
  from vigor_jax.policy import transformer
  from vigor_jax.policy import update

  path = workdir / "config.json"
  config = loading.from_json(path.read_text(), str(path))
  task = experiment.make_task(config)
  sizes = build.sizes_of(config, task.vocabulary.vocab_size)
  graph, params = transformer.abstract(sizes)
  updater = update.Updater(graph, build.objective_of(config),
                           build.optimizer_of(config))  # fmt: skip
  store = checkpoints.Checkpoints(str(workdir), keep=config.checkpoint.keep)
  try:
    params, moments, host = store.restore(
      store.latest(), params, updater.abstract_opt(params)
    )
  finally:
    store.close()
  host["counters"].pop("seconds")
  trees = {"params": params, "moments": moments}
  return {
    f"{name}/{path}": np.asarray(array)
    for name, tree in trees.items()
    for path, array in checkpoints.flatten(tree).items()
  }, host


def record(workdir: pathlib.Path, name: str) -> list[dict]:
  """A record's lines without times and compile counts."""
  lines = (workdir / name).read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(VOLATILE)}
    for line in lines
  ]


def differences(a: pathlib.Path, b: pathlib.Path) -> list[str]:
  """Where two runs' numbers differ; empty if nowhere."""
  found = []
  for name in RECORDS:
    first, second = record(a, name), record(b, name)
    if len(first) != len(second):
      found.append(f"{name}: {len(first)} and {len(second)} lines")
    for x, y in zip(first, second):
      keys = [k for k in {*x, *y} if x.get(k) != y.get(k)]
      found += [f"{name} step {x['step']}: {k} {x.get(k)} {y.get(k)}"
                for k in keys]  # fmt: skip
  (left, host), (right, other) = final_arrays(a), final_arrays(b)
  if left.keys() != right.keys():
    found.append("arrays have other names")
  for path in left.keys() & right.keys():
    if left[path].tobytes() != right[path].tobytes():
      found.append(f"{path} differs")
  if host != other:
    found.append("the host's record differs")
  return found


def seconds_of(workdir: pathlib.Path) -> float:
  return json.loads((workdir / "summary.json").read_text())["seconds"]


class Campaign:
  """Kills and restarts, until there were enough."""

  def __init__(self, folder, kills: int, seed: int, start_up: float):
    """Sets the aim.

    Args:
      folder: where runs go.
      kills: how many.
      seed: of the instants.
      start_up: seconds from a start to the first step; the shortest seen.
    """
    self.folder, self.wanted, self.start_up = folder, kills, start_up
    self.rng = random.Random(seed)
    self.kills = 0
    self.faults: list[str] = []
    self.runs: list[pathlib.Path] = []
    self.idle = 0.0  # Seconds of downtime and start-up between steps.
    self.counted = 0.0  # Seconds that the killed runs have on record.

  def run(self) -> None:
    """Kills until there were enough; the last run is left to end."""
    while self.kills < self.wanted:
      workdir = self.folder / f"killed{len(self.runs)}"
      self.runs.append(workdir)
      self._one(workdir)
      self.counted += seconds_of(workdir)

  def _one(self, workdir) -> None:
    saved, stopped = [], None
    while True:
      process = Process(workdir)
      if stopped is not None:
        self.idle += process.started - stopped
      if self.kills == self.wanted:
        alive = False
      elif self.rng.random() < 0.3:
        # Somewhere between the start and the first steps.
        alive = process.wait(self.rng.random() * self.start_up)
      else:
        # Some steps on: counted, so that a busy machine changes nothing; a
        # moment later, to fall anywhere in a step, a save or an evaluation.
        more = self.rng.randrange(STEPS // 5)
        alive = process.wait_for_steps(1)
        began = time.monotonic() - process.started
        if alive:
          self.idle += began
          self.start_up = min(self.start_up, began)
          alive = process.wait_for_steps(1 + more)
        if alive:
          alive = process.wait(self.rng.random() * 0.5)
      if alive:
        process.kill()
        self.kills += 1
        stopped = time.monotonic()
      else:
        process.finish()
      self._check(process, workdir, saved)
      if not alive:
        return
      saved = saved_steps(workdir)
      lines = process.lines()
      last = lines[-1][:60] if lines else "nothing printed yet"
      print(f"kill {self.kills} after {stopped - process.started:.1f} s; "
            f"saved {saved or 'nothing'}; last line: {last}",
            flush=True)  # fmt: skip
      time.sleep(self.rng.random())

  def _check(self, process, workdir, saved) -> None:
    """No checkpoint that was there before may be lost or passed over."""
    now = saved_steps(workdir)
    if saved and (not now or now[-1] < saved[-1]):
      self.faults.append(f"{workdir.name}: checkpoints {saved} became {now}")
    resumed = process.resumed_from()
    if resumed is not None and resumed != (saved[-1] if saved else None):
      self.faults.append(f"{workdir.name}: resumed from {resumed}, saved were "
                         f"{saved}")  # fmt: skip
    if process.steps() and saved and resumed is None:
      self.faults.append(f"{workdir.name}: began anew beside {saved}")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true", help="3 kills, not 20")
  parser.add_argument("--seed", type=int, default=0, help="of the instants")
  parser.add_argument("--keep", action="store_true", help="keep the runs")
  args = parser.parse_args()
  kills = 3 if args.quick else 20
  folder = pathlib.Path(tempfile.mkdtemp(prefix="resume-"))
  try:
    whole = folder / "undisturbed"
    process = Process(whole)
    process.wait_for_steps(1)
    start_up = time.monotonic() - process.started
    process.finish()
    print(f"undisturbed: {start_up:.1f} s to the first step, with warm start "
          f"and compilation; {time.monotonic() - process.started:.1f} s in all",
          flush=True)  # fmt: skip
    campaign = Campaign(folder, kills, args.seed, start_up)
    campaign.run()
    wrong, seconds = list(campaign.faults), seconds_of(whole)
    for workdir in campaign.runs:
      wrong += [f"{workdir.name}: {d}" for d in differences(whole, workdir)]
    for line in wrong[:20]:
      print(f"wrong: {line}", flush=True)
  finally:
    if args.keep:
      print(f"kept in {folder}")
    else:
      shutil.rmtree(folder, ignore_errors=True)
  return report(campaign, kills, wrong, seconds)


def report(campaign: Campaign, kills: int, wrong: list[str], seconds: float
           ) -> int:  # fmt: skip
  """Prints the JSON line; the exit code.

  What a killed run has on record beyond the undisturbed one is the reloading
  of programs in its first steps; downtime and start-up, which last far longer,
  must not be in it.
  """
  excess = campaign.counted - len(campaign.runs) * seconds
  figures = {
    "kills": campaign.kills,
    "runs": len(campaign.runs),
    "differences": len(wrong),
    "undisturbed_seconds": round(seconds, 2),
    "recorded_seconds": round(campaign.counted, 2),
    "idle_seconds": round(campaign.idle, 2),
    "share_of_idle_on_record": round(max(0.0, excess / campaign.idle), 3),
  }
  targets = {
    "kills": {"min": kills},
    "differences": {"max": 0},
    "share_of_idle_on_record": {"max": 0.5},
  }
  ok = (figures["kills"] >= kills and not wrong
        and figures["share_of_idle_on_record"] <= 0.5)  # fmt: skip
  print(json.dumps({"name": "resume", "figures": figures, "targets": targets,
                    "ok": ok}))  # fmt: skip
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
