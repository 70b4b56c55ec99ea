"""The supervised warm start: stage=sft, and the cache behind init_from=auto.

A warm start imitates a task's (possibly wrong) completions with the same
packed update as RL: the loss is -log p, every advantage 1, the token mean. It
is an ordinary run folder with checkpoints and metrics, killed and continued
like any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os

import numpy as np

from vigor_jax import distributed
from vigor_jax import workdirs
from vigor_jax.config import loading
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import objective as objective_lib
from vigor_jax.policy import packing
from vigor_jax.policy import sizes as sizes_lib
from vigor_jax.policy import update as update_lib


def config_of(config):
  """The stage=sft configuration that `init_from="auto"` stands for.

  Fields that only matter to RL go back to their defaults, so that runs which
  differ in them share a warm start.
  """
  from vigor_jax.config import default_config
  sft = default_config(config.task.name)
  with sft.unlocked():
    sft.stage = "sft"
    sft.total_steps = config.sft.steps
    sft.seed = config.sft.seed
    for section in ("task", "model", "mesh", "sft", "sampling"):
      sft[section] = config[section].copy_and_resolve_references()
    sft.model.lora.update(dataclasses.asdict(sizes_lib.Adapters()))
    sft.policy.row_length = config.policy.row_length
    sft.policy.rows_per_microbatch = config.policy.rows_per_microbatch
    sft.optimizer = config.optimizer.copy_and_resolve_references()
    sft.optimizer.learning_rate = config.sft.learning_rate
    sft.optimizer.warmup_steps = config.sft.warmup_steps
    if config.evaluation.every_steps:
      sft.evaluation.every_steps = max(1, config.sft.steps // 4)
    else:  # Perhaps the task has nothing to evaluate on.
      sft.evaluation.every_steps = 0
    sft.checkpoint.every_steps = max(1, config.sft.steps // 4)
    sft.sft.cache_dir = ""
  return sft


def check(config, task) -> None:
  """Refuses a warm start that would fail at one of its steps.

  Raises:
    ValueError: the task has no completions, or one does not fit a row.
  """
  if task.warm_start is None:
    task.sft_batches(config.seed, 0, 1)  # Raises, and says what to do.
  longest, row = task.longest_warm_start, config.policy.row_length
  if longest > row:
    raise ValueError(
        f"policy.row_length: {row} tokens cannot hold the longest supervised "
        f"example of task {task.name}, {longest} tokens of prompt and "
        f"completion; legal: {longest} or more, or shorter examples "
        "(task.max_completion_length)")


def key_of(config, task) -> str:
  """Names a warm start by what decides it: model, schedule and data.

  The data enter by their content (the first batch), so that settings of the
  task which only change the RL stream do not matter.
  """
  prompts, completions = task.sft_batches(config.sft.seed, 0, 16)
  digest = hashlib.sha256()
  for tokens in (*prompts, *completions):
    digest.update(np.asarray(tokens, np.int32).tobytes() + b"|")
  settings = {
      "model": {k: v for k, v in config.model.to_dict().items()
                if k != "lora"},  # A warm start trains all parameters.
      "sft": {k: v for k, v in config.sft.to_dict().items()
              if k != "cache_dir"},
      "optimizer": {k: v for k, v in config.optimizer.to_dict().items()
                    if k not in ("learning_rate", "warmup_steps")},
      "vocabulary": task.vocabulary.vocab_size,
  }
  digest.update(json.dumps(settings, sort_keys=True, default=list).encode())
  return digest.hexdigest()[:12]


@contextlib.contextmanager
def _lock(path: str):
  """Holds a file lock: two runs that share a warm start train it once.

  Of a job's processes the first holds it. Object stores have no locks: runs
  that start together there may train a warm start twice, to the same numbers.
  """
  if workdirs.is_remote(path) or not distributed.cluster().primary:
    yield
    return
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def cached(config, task, workdir: str, say=print) -> str:
  """Folder of the finished warm start, trained first if it is not there.

  Args:
    config: an RL configuration with init_from="auto".
    task: its task.
    workdir: the run's folder; the cache is `sft.cache_dir`, or
      "warm_starts" beside this folder (of a comparison's runs: beside the
      comparison's).
    say: prints a line.
  """
  from vigor_jax import train as train_lib
  cache = config.sft.cache_dir or workdirs.beside(workdir, "warm_starts")
  folder = workdirs.join(cache, f"{config.task.name}-{key_of(config, task)}")
  with _lock(folder + ".lock"):
    found = distributed.cluster().from_first(
        "the warm start", lambda: _found(folder))
    if found != "complete":
      say(f"warm start: {config.sft.steps} supervised steps in {folder}, "
          "trained once and reused by every run with these settings")
      begun = loading.from_json(found, folder) if found else None
      train_lib.train(begun or config_of(config), folder)
  return folder


def _found(folder: str) -> str:
  """"complete", the configuration of a warm start that was stopped, or "".

  The key says it is the same warm start; fields that do not matter to it (the
  difficulty of the RL stream) may differ between the runs that share it.
  """
  from vigor_jax import record
  if workdirs.exists(folder, record.SUMMARY_FILE):
    return "complete"
  if workdirs.exists(folder, record.CONFIG_FILE):
    return workdirs.read(folder, record.CONFIG_FILE)
  return ""


def make_updater(config, graph, placement) -> update_lib.Updater:
  """-log p of the completions: reinforce with advantage 1."""
  objective = objective_lib.Objective(loss="reinforce", old="current",
                                   remat=config.policy.remat)
  return update_lib.Updater(graph, objective, build_lib.optimizer_of(config),
                            placement)


def packed_batch(config, task, step: int) -> tuple[packing.Packed, int, float]:
  """(micro-batches, how many are used, tokens) of one supervised step.

  Raises:
    ValueError: the task has no completions, or one does not fit a row.
  """
  size = config.sft.batch_size
  prompts, completions = task.sft_batches(config.seed, step, size)
  lengths = np.array([len(c) for c in completions], np.int64)
  tokens = np.zeros((size, int(lengths.max())), np.int32)
  for row, completion in zip(tokens, completions):
    row[: len(completion)] = completion
  ones = np.ones(size, np.float32)
  rows = config.policy.rows_per_microbatch
  packed, num_micro = packing.pack(
      np.arange(size), prompts, tokens, lengths, ones, ones,
      np.zeros(tokens.shape, np.float32),
      row_length=config.policy.row_length, rows_per_micro=rows,
      max_micro=-(-size // rows))
  return packed, num_micro, float(lengths.sum())


