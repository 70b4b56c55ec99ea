"""Training runs small enough for tests: a tiny policy, rewards without skill.

A reward that depends on the text alone gives an untrained policy groups that
disagree, so that every part of a step has work to do from the first one.
"""

import json
import os
import pathlib
import shutil
import signal

import numpy as np

from vigor_jax import checkpoints, metrics, progress
from vigor_jax.config import default_config, fields, validate

# What differs between two equal runs: clocks, and what the process compiled.
VOLATILE = ("seconds", "time/", "compiles", "eval/seconds")
BUDGET, PROMPTS = 64, 8


def parity(completion, answer, **metadata):
  """1 where the completion's characters sum to an even number."""
  return float(sum(map(ord, completion)) % 2 == 0)


parity.cheap = True


def never_a_number(completion, answer, **metadata):
  return float("nan")


never_a_number.cheap = True


def a_list(completion, answer, **metadata):
  return [1.0]


a_list.cheap = True


def stopping(completion, answer, **metadata):
  """parity; sends the signal of STOP_SIGNAL on the call STOP_CALL."""
  left = int(os.environ.get("STOP_CALL", "0"))
  os.environ["STOP_CALL"] = str(left - 1)
  if left == 1:
    os.kill(os.getpid(), int(os.environ["STOP_SIGNAL"]))
  return parity(completion, answer)


stopping.cheap = True


def config(name="vigor", **changes):
  """A validated configuration; changes are {"section.field": value}."""
  made = default_config("arithmetic")
  made.allocation.name = name
  values = {
    "total_steps": 3,
    "prompts_per_step": PROMPTS,
    "rollout_budget": BUDGET,
    "task.operations": 2,
    "reward.name": "tiny_runs:parity",
    "model.sizes.layers": 1,
    "model.sizes.width": 16,
    "model.sizes.heads": 2,
    "model.sizes.kv_heads": 1,
    "model.sizes.head_dim": 8,
    "model.sizes.ffn": 16,
    "policy.row_length": 16,
    "policy.rows_per_microbatch": 16,
    "optimizer.name": "adam",
    "optimizer.learning_rate": 3e-3,
    "sampling.slots": 16,
    "sampling.chunk": 3,
    "sampling.prompt_buckets": (4,),
    "sampling.prefill_batch": 16,
    "sampling.prefixes": 64,
    "sampling.max_new_tokens": 4,
    "evaluation.every_steps": 2,
    "evaluation.num_prompts": 16,
    "checkpoint.every_steps": 100,
    **{path.replace("__", "."): value for path, value in changes.items()},
  }
  for path, value in values.items():
    fields.assign(made, path, value)
  return validate(made)


class Killed(BaseException):
  """Stands for a kill: nothing in a run handles it."""


class KilledAt(progress.Progress):
  """Ends the run when the line of a step has just been written."""

  def __init__(self, step):
    super().__init__(100, file=open(os.devnull, "w"))
    self._at = step

  def step(self, step, values):
    super().step(step, values)
    if step == self._at:
      raise Killed


def lines(folder, name=metrics.METRICS_FILE):
  """A record's lines without what differs between equal runs."""
  return [
    {k: v for k, v in line.items() if not k.startswith(VOLATILE)}
    for line in metrics.read_lines(str(pathlib.Path(folder) / name))
  ]


def steps_of(folder):
  """The training lines of a run."""
  return [line for line in metrics.read_lines(str(folder / "metrics.jsonl"))
          if "reward/mean" in line]  # fmt: skip


def targets(folder):
  """(params, opt_state) to restore of a run's checkpoints, its config."""
  from vigor_jax.policy import build, transformer
  from vigor_jax import experiment
  from vigor_jax.config import loading

  text = (pathlib.Path(folder) / "config.json").read_text()
  made = loading.from_json(text)
  task = experiment.make_task(made)
  sizes = build.sizes_of(made, task.vocabulary.vocab_size)
  graph, abstract = transformer.abstract(sizes)
  updater = build.updater_of(made, graph, sizes, None)
  return abstract, updater.saved_targets(abstract)[1], made


def arrays(folder, step=None):
  """({path: array} of a checkpoint's params and moments, its host record)."""
  *wanted, made = targets(folder)
  store = checkpoints.Checkpoints(str(folder), keep=made.checkpoint.keep)
  try:
    params, opt_state, host = store.restore(step or store.latest(), *wanted)
  finally:
    store.close()
  flat = {
    f"{kind}/{path}": np.asarray(a)
    for kind, tree in (("params", params), ("opt", opt_state))
    for path, a in checkpoints.flatten(tree).items()
  }
  host["counters"].pop("seconds")
  return flat, host


def same(a, b):
  """Asserts that two runs left the same numbers behind, bit for bit."""
  for name in ("metrics.jsonl", "groups.jsonl", "samples.jsonl"):
    first, second = lines(a, name), lines(b, name)
    assert [x["step"] for x in first] == [x["step"] for x in second], name
    for x, y in zip(first, second):
      assert x == y, (name, x["step"], difference(x, y))
  (left, host), (right, other) = arrays(a), arrays(b)
  assert left.keys() == right.keys()
  for path in left:
    np.testing.assert_array_equal(left[path], right[path], path)
  assert host == other, difference(host, other)


def difference(x, y):
  return {k: (x.get(k), y.get(k)) for k in {*x, *y} if x.get(k) != y.get(k)}


def summary(folder):
  return json.loads((pathlib.Path(folder) / "summary.json").read_text())


def empty(folder):
  """Removes a run."""
  shutil.rmtree(folder)


SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
