"""Run folders as training writes them, from a simulated policy.

The real allocators spend the budget on prompts whose pass rates rise with the
number of distinct mixed prompts seen, so the folders look like real ones.
"""

import json
import os
import pathlib
import signal
import time
import types

import numpy as np

from vigor_jax import allocation

LEVELS = {  # shares of prompts that are easy, in between, hopeless
    "sparse_signal": (0.75, 0.10, 0.15),
    "plain": (0.15, 0.65, 0.20),
}


class _Stream:
  def __init__(self, seed, step):
    self._start = step * 1000
    self.seed = seed

  def peek(self, k):
    positions = np.arange(self._start, self._start + k, dtype=np.int64)
    return types.SimpleNamespace(positions=positions, uids=positions)


def config(name="uniform", seed=0, steps=40, prompts=32, budget=256,
           difficulty="sparse_signal"):
  return {
      "seed": seed, "total_steps": steps, "prompts_per_step": prompts,
      "rollout_budget": budget,
      "task": {"name": "arithmetic", "difficulty": difficulty},
      "allocation": {"name": name, "train_on": "all",
                     "vigor": {"rounds": 4}, "eb_widening": {"cap": 12}},
      "evaluation": {"num_prompts": 1024, "samples_per_prompt": 1},
  }


def write(folder, values=None, *, until=None, noise=0.01, gain=1.0):
  """Writes a run folder; `until` stops it at that step. Returns its path."""
  values = values or config()
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(values))
  (folder / "command.txt").write_text("python -m vigor_jax.train --config=c.py")
  rng = np.random.Generator(np.random.Philox(
      key=values["seed"] + 1000 * (values["prompts_per_step"] % 7)))
  name = values["allocation"]["name"]
  allocator = allocation.make(
      name, values["allocation"].get(name, {}), prompts_per_step=values["prompts_per_step"],
      budget=values["rollout_budget"], seed=values["seed"])
  shares = LEVELS[values["task"]["difficulty"]]
  total = values["total_steps"]
  skill, rollouts, tokens, seconds = -1.6, 0, 0, 0.0
  lines, groups_lines, samples = [], [], []

  def evaluate(step):
    p = 1 / (1 + np.exp(-skill))
    accuracy = 0.15 + 0.6 * p + noise * rng.normal()
    lines.append({
        "step": step, "rollouts": rollouts, "tokens": tokens,
        "seconds": seconds, "eval/accuracy": round(accuracy, 4)})
    if step:
      lines[-1] |= {
          "allocation/variance_per_rollout_fresh": fresh
          * (1 + 0.05 * rng.normal()),
          "allocation/variance_per_rollout_predicted": fresh * 1.02,
          "allocation/variance_per_rollout_pareto": fresh * 1.3}
    for i in range(4):
      samples.append({
          "step": step, "prompt": f"{i}*7+3-{step}=",
          "completion": f"{i * 7},{i * 7 + 3}<eos>", "answer": str(i * 7 + 3),
          "reward": float(i % 2), "advantage": round(0.5 - i % 2, 3)})

  fresh = 0.0
  evaluate(0)
  for step in range(1, (until or total) + 1):
    groups = allocator.begin(_Stream(values["seed"], step), step)
    kind = rng.choice(3, size=len(groups), p=shares)
    level = np.where(kind == 0, 1, np.where(kind == 1, rng.integers(2, 6,
                     len(groups)), 6))
    logit = np.where(kind == 0, 4.5, np.where(kind == 1, skill + 3.5 - level
                     * 0.8, -6.0)) + 0.5 * rng.normal(size=len(groups))
    p = 1 / (1 + np.exp(-logit))
    for request in allocator.rounds(groups):
      ids = np.repeat(np.arange(len(groups)), request.counts)
      groups.add(ids, (rng.random(len(ids)) < p[ids]).astype(float))
    allocator.end(groups)
    n, total_reward = groups.n, groups.reward_sum
    opened = groups.opened
    mixed = opened & (total_reward > 0) & (total_reward < n)
    skill += gain * 0.012 * np.sqrt(mixed.sum()) * min(
        1.0, (2.6 - skill) / 3) * 40 / total
    rollouts += int(n.sum())
    tokens += int(n.sum() * (14 + 1.5 * (level[opened] * n[opened]).sum()
                             / n.sum()))
    decode = 0.015 + 0.004 * len(groups.round_counts) + 0.002 * rng.random()
    compiled = step == 1
    times = {"prefill": 0.004, "decode": decode + 3.0 * compiled,
             "reward": 0.002, "allocate": 0.0012,
             "update": 0.018 + 0.0001 * n[mixed].sum(), "other": 0.002}
    seconds += sum(times.values())
    v = p * (1 - p)
    fresh = float((n * v).sum() / n.sum())
    lines.append({
        "step": step, "rollouts": rollouts, "tokens": tokens,
        "seconds": seconds, "reward/mean": float(total_reward.sum() / n.sum()),
        "groups/zero_variance_share": float(1 - mixed.sum() / opened.sum()),
        "groups/mixed": int(mixed.sum()),
        "rollouts/zero_variance_share": float(1 - n[mixed].sum() / n.sum()),
        "allocation/rounds": [int(c.sum()) for c in groups.round_counts],
        "allocation/variance_per_rollout": fresh * 1.15,
        "slots/utilisation": 0.9 - 0.05 * rng.random(), "compiles": 14,
        **{f"time/{k}": t for k, t in times.items()},
        "policy/loss": 0.0, "policy/entropy": 0.4})
    groups_lines.append({
        "step": step, "n": n[opened].astype(int).tolist(),
        "sum": total_reward[opened].tolist(),
        "round_counts": [c[opened].tolist() for c in groups.round_counts],
        "levels": level[opened].tolist()})
    if step % max(1, total // 10) == 0:
      evaluate(step)
  for file, rows in (("metrics", lines), ("groups", groups_lines),
                     ("samples", samples)):
    (folder / f"{file}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows))
  return folder


def until_stopped(task, report):
  """A run that goes on until SIGTERM, saves, and says so."""
  stopped = []
  signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
  report({"step": 1})
  for _ in range(6000):
    if stopped:
      pathlib.Path(task).write_text("saved")
      raise KeyboardInterrupt
    time.sleep(0.05)
  raise TimeoutError("nobody stopped this run")


def run_cell(task, report, *, workdir):
  """In place of compare.run_cell: writes the run without training it.

  A file named in the workdir makes a cell misbehave, once: "<cell>.fail"
  raises, "<cell>.stop" is an interruption, "<cell>.kill" ends the process.
  """
  kind, cell = task
  root = pathlib.Path(workdir)
  with open(root / "calls.txt", "a") as file:
    file.write(f"{kind} {cell.name}\n")
  for word in ("fail", "stop", "kill"):
    wish = root / f"{cell.name}.{word}"
    if wish.exists():
      wish.unlink()
      if word == "fail":
        raise ValueError("the reward returned 3, outside [0, 1]")
      if word == "stop":
        raise KeyboardInterrupt
      os.kill(os.getpid(), signal.SIGKILL)
  if kind == "warm start":
    return "warm_starts/fake"
  values = json.loads(cell.config)
  folder = write(root / "cells" / cell.name, values)
  report({"step": values["total_steps"] // 2, "accuracy": 0.3})
  curve = [json.loads(line) for line in open(folder / "metrics.jsonl")]
  summary = {"total_steps": values["total_steps"],
             "rollouts": curve[-1]["rollouts"],
             "curve": [c for c in curve if "eval/accuracy" in c]}
  # As a run does: whole, or not there. A worker may be ended at any instant.
  (folder / "summary.new").write_text(json.dumps(summary))
  (folder / "summary.new").rename(folder / "summary.json")
  return summary
