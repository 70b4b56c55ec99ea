"""The supervised warm start: what names it, what it trains on, its cache."""

import dataclasses
import json
import threading

import numpy as np
import pytest
import tiny_runs

from vigor_jax import experiment, metrics, train, warm_start, workdirs
from vigor_jax.config import default_config, validate
from vigor_jax.policy import packing


def config(**changes):
  return tiny_runs.config("uniform", **{
    "init_from": "auto", "sft__steps": 45, "sft__batch_size": 24,
    "sft__learning_rate": 1e-2, "sft__warmup_steps": 5, **changes,
  })  # fmt: skip


def folder_name(made):
  return warm_start.key_of(made, experiment.make_task(made))


# What names a warm start.


def test_runs_that_differ_in_rl_share_a_warm_start():
  key = folder_name(config())
  for changes in (
    dict(seed=4),
    dict(task__difficulty="sparse_signal"),
    dict(task__num_prompts=32),
    dict(optimizer__learning_rate=1e-5, optimizer__warmup_steps=3),
    dict(policy__loss="gspo", policy__kl__coef=0.1),
    dict(total_steps=9, evaluation__num_prompts=8),
    dict(sft__cache_dir="/elsewhere"),
  ):
    assert folder_name(config(**changes)) == key, changes


@pytest.mark.parametrize(
  "changes",
  [
    dict(sft__steps=46),
    dict(sft__seed=1),
    dict(sft__learning_rate=2e-2),
    dict(model__sizes__width=24),
    dict(task__operations=3, sampling__prompt_buckets=(5,)),
    dict(task__label_noise=0.1),
    dict(optimizer__b2=0.9),
  ],
)
def test_what_decides_its_numbers_names_it(changes):
  assert folder_name(config(**changes)) != folder_name(config())


def test_its_configuration_is_a_legal_one():
  made = config(seed=4, policy__loss="gspo", reward__noise=0.1)
  sft = validate(warm_start.config_of(made))
  assert sft.stage == "sft" and sft.seed == made.sft.seed == 0
  assert sft.sft.steps == sft.total_steps == 45
  assert sft.optimizer.learning_rate == 1e-2
  assert sft.optimizer.warmup_steps == 5
  assert sft.model == made.model and sft.task == made.task
  default = default_config("arithmetic")
  assert sft.policy.loss == default.policy.loss
  assert sft.reward == default.reward and sft.allocation == default.allocation
  assert made.stage == "rl" and made.seed == 4  # The original is untouched.


# What it trains on.


def test_a_batch_is_the_tasks_solutions():
  made = warm_start.config_of(config())
  task = experiment.make_task(made)
  packed, used, tokens = warm_start.packed_batch(made, task, 3)
  prompts, completions = task.sft_batches(made.seed, 3, 24)
  assert tokens == sum(map(len, completions))
  live = packed.segment > 0
  assert live.sum() == tokens and packed.prompt[used:].sum() == 0
  assert (packed.weights[live] == 1).all() and (packed.advantages[live] == 1).all()
  found = []
  for tokens, prompt, segment in zip(
    *(a.reshape(-1, a.shape[-1]) for a in packed[:1] + packed[2:4])
  ):
    for number in range(1, prompt.max() + 1):
      found.append((
        tuple(tokens[(prompt == number) & (segment == 0)]),
        tuple(tokens[(prompt == number) & (segment > 0)]),
      ))
  expected = [(tuple(p), tuple(c)) for p, c in zip(prompts, completions)]
  assert sorted(found) == sorted(expected)
  again = warm_start.packed_batch(made, task, 3)[0]
  other = warm_start.packed_batch(made, task, 4)[0]
  np.testing.assert_array_equal(packed.tokens, again.tokens)
  assert not np.array_equal(packed.tokens, other.tokens)
  assert packed.tokens.shape == other.tokens.shape
  assert packing.useful_share(packed) > 0.5


def test_a_task_without_solutions_is_refused():
  made = warm_start.config_of(config())
  task = dataclasses.replace(experiment.make_task(made), warm_start=None)
  with pytest.raises(ValueError, match="has no completions .* warm start"):
    warm_start.packed_batch(made, task, 0)


def test_completions_that_do_not_fit_a_row_are_refused_first(tmp_path):
  lines = [{"prompt": "x" * 9, "answer": "y" * n} for n in (4, 21, 30)]
  path = tmp_path / "data.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  made = default_config("jsonl")
  made.task.update(path=str(path), held_out_share=0.0, max_prompt_length=16,
                   max_completion_length=25)
  task = experiment.make_task(made)
  # 9 + 21 + EOS; the longest completion is left out by its limit.
  made.policy.row_length = 31
  warm_start.check(made, task)
  made.policy.row_length = 30
  with pytest.raises(ValueError, match="policy.row_length: 30 .* 31 or more"):
    warm_start.check(made, task)
  task = dataclasses.replace(task, warm_start=None)
  with pytest.raises(ValueError, match="no completions"):
    warm_start.check(made, task)


# Training it.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """(folder of the warm start, what was said, folder of a run from it)."""
  root, said = tmp_path_factory.mktemp("warm"), []
  made = config(total_steps=1, optimizer__learning_rate=0.0)
  task = experiment.make_task(made)
  folder = warm_start.cached(made, task, str(root / "a"), said.append)
  train.train(made, str(root / "a"), quiet=True)
  return folder, said, root / "a"


@pytest.mark.parametrize("run", ["runs/a", "runs/a/", "runs/demo/cells/a"])
def test_single_runs_and_comparisons_share_it(run, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  found = workdirs.beside(run, "warm_starts")
  assert found == str(tmp_path / "runs" / "warm_starts")
  remote = workdirs.beside(f"gs://bucket/{run}", "warm_starts")
  assert remote == "gs://bucket/runs/warm_starts"


def test_it_is_trained_once(trained, monkeypatch):
  folder, said, run = trained
  assert len(said) == 1 and "45 supervised steps" in said[0]
  assert folder.startswith(str(run.parent / "warm_starts" / "arithmetic-"))
  monkeypatch.setattr(train, "train", None)  # Nothing is trained again.
  made = config(seed=3)
  again = warm_start.cached(
    made, experiment.make_task(made), str(run.parent / "b"), said.append
  )
  assert again == folder and len(said) == 1


def test_its_record(trained, is_documented):
  lines = metrics.read_lines(f"{trained[0]}/metrics.jsonl")
  losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
  assert [line["step"] for line in lines if "sft/loss" in line] == [1, 21, 41, 45]
  # A fresh policy is close to uniform over the vocabulary.
  vocabulary = experiment.make_task(config()).vocabulary.vocab_size
  assert losses[0] == pytest.approx(np.log(vocabulary), abs=0.2)
  assert losses[-1] < 0.75 * losses[0]
  assert not [k for line in lines for k in line if not is_documented(k)]
  assert [line["step"] for line in lines if "eval/accuracy" in line] == [
    11, 22, 33, 44, 45,
  ]  # fmt: skip


def test_a_run_starts_from_its_parameters(trained):
  folder, _, run = trained
  start, _ = tiny_runs.arrays(folder)
  end, host = tiny_runs.arrays(run)  # One step at learning rate 0.
  assert host["counters"]["rollouts"] == tiny_runs.BUDGET
  for path in start:
    if path.startswith("params/"):
      np.testing.assert_array_equal(start[path], end[path], path)


def test_killed_it_ends_with_the_same_numbers(trained, tmp_path):
  made = warm_start.config_of(config())
  for step in (21, 41):
    with pytest.raises(tiny_runs.Killed):
      train.train(made, str(tmp_path), quiet=True,
                  progress=tiny_runs.KilledAt(step))  # fmt: skip
  # A run that shares it, on other prompts, goes on with what was begun.
  other = config(task__difficulty="sparse_signal")
  task = experiment.make_task(other)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(warm_start, "key_of", lambda config, task: "x")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "arithmetic-x").symlink_to(tmp_path)
    other.sft.cache_dir = str(tmp_path / "cache")
    warm_start.cached(other, task, "unused", lambda text: None)
  tiny_runs.same(trained[0], tmp_path)


def test_two_runs_do_not_train_it_at_once(tmp_path):
  path, order = str(tmp_path / "a" / "x.lock"), []
  entered, leave = threading.Event(), threading.Event()

  def first():
    with warm_start._lock(path):
      order.append("first in")
      entered.set()
      leave.wait(10)
      order.append("first out")

  def second():
    entered.wait(10)
    with warm_start._lock(path):
      order.append("second in")

  threads = [threading.Thread(target=f) for f in (first, second)]
  for thread in threads:
    thread.start()
  entered.wait(10)
  threads[1].join(0.2)
  assert order == ["first in"]
  leave.set()
  for thread in threads:
    thread.join(10)
  assert order == ["first in", "first out", "second in"]
