"""Evaluation: scores, votes, suites, the protocol, and the command."""

import dataclasses
import json
import re

import numpy as np
import pytest

from vigor_jax import config as config_lib
from vigor_jax import evaluate
from vigor_jax import experiment
from vigor_jax import rewards as rewards_lib
from vigor_jax import statistics
from vigor_jax.sampling import layout
from vigor_jax.tasks import suites


def small(task="jsonl", **task_options):
  """A tiny byte-level policy that is evaluated on short completions."""
  config = config_lib.default_config(task)
  config.model.sizes.update(layers=1, width=16, heads=2, kv_heads=2, head_dim=8,
                            ffn=32)
  config.sampling.update(slots=8, chunk=4, max_new_tokens=6, prefill_batch=4,
                         prompt_buckets=(32,))
  config.update(rollout_budget=32, prompts_per_step=4)
  config.policy.row_length = 64
  config.allocation.name = "uniform"
  config.evaluation.update(num_prompts=6, every_steps=1)
  if "max_prompt_length" in config.task:
    config.task.max_prompt_length = 32
  config.task.update(task_options)
  return config


def write_lines(path, count, answer=lambda i: str(i)):
  path.write_text("".join(
    json.dumps({"prompt": f"say {i}", "answer": answer(i)}) + "\n"
    for i in range(count)
  ))
  return str(path)


# Scores.


def test_scores_by_hand():
  rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0.5]], np.float32)
  found = evaluate.scores(rewards, pass_at=(1, 2, 8))
  assert found["accuracy"] == pytest.approx(3.5 / 8)
  assert found["full_pass"] == pytest.approx(3 / 8)
  # 1 - C(n-c, k) / C(n, k): 1 of 4 and 2 of 4 right.
  assert found["pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 2)
  assert found["pass@2"] == pytest.approx((1 - 3 / 6 + 1 - 1 / 6) / 2)
  assert found["pass@4"] == 1.0
  assert "pass@8" not in found and "cons@4" not in found
  assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"]


def test_one_sample_of_one_prompt_has_neither_spread_nor_pass_at_k():
  assert evaluate.scores(np.ones((1, 1)), pass_at=(1,)) == {
    "accuracy": 1.0, "full_pass": 1.0
  }


def test_cons_counts_right_answers_as_one():
  rewards = np.array([[1, 1, 0, 0, 0]], np.float32)
  # Two right ones in two spellings against wrong ones that differ.
  answers = [["1/2", "0.5", "3", "4", None]]
  assert evaluate.scores(rewards, answers=answers)["cons@5"] == 1.0
  # Three equal wrong ones win.
  answers = [["1/2", "0.5", "3", "3", "3"]]
  assert evaluate.scores(rewards, answers=answers)["cons@5"] == 0.0
  # A tie is shared.
  answers = [["1/2", "0.5", "3", "3", None]]
  assert evaluate.scores(rewards, answers=answers)["cons@5"] == 0.5


@pytest.mark.parametrize(
  "text, answer",
  [
    (r"so \boxed{\frac{1}{2}}", "1/2"), (r"\boxed{0.50}", "1/2"),
    (r"\boxed{\frac12}", "1/2"), (r"\boxed{1,234}", "1234"),
    (r"\boxed{-\dfrac{6}{8}}", "-3/4"), ("The answer is 007.", "7"),
    (r"\boxed{(1,2)}", "(1,2)"), (r"\boxed{\frac123}", r"\frac123"),
    (r"\boxed{x + 1}", "x+1"), (r"\boxed{1/0}", "1/0"), (r"\boxed{ }", None),
    ("I do not know", None),
  ],
)
def test_answers_that_are_voted_on(text, answer):
  verify = rewards_lib.resolve("math")
  assert verify.final_answer(text, "") == answer


def test_answers_of_rewards_that_name_none():
  with rewards_lib.Scorer("countdown") as scorer:
    assert evaluate.answers_of(scorer, [["1+1"]], None) is None


def test_a_suite_interval_resamples_inside_each_task():
  one, other = np.array([0.0, 1.0]), np.array([0.5, 0.5, 0.5])
  low, high = statistics.stratified_interval([one, other], resamples=4000)
  assert (low, high) == (0.25, 0.75)
  assert np.isnan(statistics.stratified_interval([one, one[:1]])).all()
  with pytest.raises(ValueError, match="no strata"):
    statistics.stratified_interval([])


# Suites.


def test_a_suite_is_read():
  math, mine = suites.parse(
    'math(samples=4, prompts=500, folder="x"), jsonl(path="a.jsonl", label="b")'
  )
  assert (math.task, math.label, math.prompts, math.samples) == (
    "math", "math", 500, 4
  )
  assert dict(math.options) == {"folder": "x"}
  assert (mine.task, mine.label, mine.prompts, mine.samples) == (
    "jsonl", "b", 0, 0
  )


@pytest.mark.parametrize(
  "suite, words",
  [
    ("maths", "did you mean 'math'"),
    ("math(folde=1)", "did you mean 'folder'"),
    ("math, math", "'math' is there twice.*label"),
    ("math(samples=0.5)", "samples must be >= 1"),
    ("math(samples=True)", "samples must be >= 1"),
    ("math(4)", "option=value"),
    ("math(folder=open)", "option=value"),
    ("math(label='a/b')", "label"),
    ("math(", "expected names of tasks"),
    ("jsonl", "path"),
  ],
)
def test_suites_that_are_refused(suite, words):
  with pytest.raises(ValueError, match=words):
    suites.parse(suite)
  config = small("arithmetic")
  config.evaluation.suite = suite
  with pytest.raises(config_lib.ConfigError, match="evaluation.suite"):
    config_lib.validate(config)


def test_fields_of_the_evaluation():
  config = small("arithmetic")
  config.evaluation.update(pass_at=(1, 4), samples_per_prompt=4)
  config_lib.validate(config)
  config.evaluation.pass_at = (8,)
  with pytest.raises(config_lib.ConfigError, match="pass@8 .* are 4"):
    config_lib.validate(config)
  config.evaluation.pass_at = ()
  config.evaluation.suite_folder = "x"
  with pytest.raises(config_lib.ConfigError, match="suite_folder.*no effect"):
    config_lib.validate(config)


# On a policy.


def test_one_task(tmp_path):
  config = small(path=write_lines(tmp_path / "mine.jsonl", 40))
  config.evaluation.update(samples_per_prompt=4, pass_at=(2,))
  with experiment.build(config) as parts:
    evaluator = evaluate.Evaluator(parts)
    params = parts.fresh_params(0)
    metrics, samples = evaluator(params, 0)
    again, _ = evaluator(params, 0)
  prompts = len(parts.held_out[0].prompts)
  assert 2 <= prompts <= 6
  assert {"eval/accuracy", "eval/pass@2", "eval/pass@4", "eval/cons@4",
          "eval/full_pass", "eval/truncated_share"} <= set(metrics)
  assert len(samples) == min(4, prompts) and "task" not in samples[0]
  del metrics["eval/seconds"], again["eval/seconds"]
  assert metrics == again
  protocol = evaluator.protocol()
  assert protocol["temperature"] == 1.0 and protocol["max_new_tokens"] == 6
  (task,) = protocol["tasks"]
  assert (task["prompts"], task["samples_per_prompt"]) == (prompts, 4)
  text = evaluate.protocol_text(protocol)
  assert f"jsonl: {prompts} prompts, avg@4" in text
  assert "temperature 1, top-p 1, at most 6 new tokens" in text


def test_top_p_and_temperature_reach_the_sampler(tmp_path):
  config = small(path=write_lines(tmp_path / "mine.jsonl", 40))
  config.evaluation.update(samples_per_prompt=6, temperature=1.0, top_p=1e-6)
  with experiment.build(config) as parts:
    params = parts.fresh_params(0)
    _, record = evaluate.sample_rewards(
      parts.sampler, params, parts.task, parts.scorer.score,
      parts.held_out[0].prompts, 3, step=0, stream=1,
      settings=evaluate.Evaluator(parts)._settings,
    )
  # Almost no mass is left: all samples of a prompt are its likeliest.
  assert all(len(set(texts)) == 1 for texts in record["texts"])


@pytest.mark.parametrize("training", [True, False])
def test_a_suite_on_a_policy(tmp_path, training, is_documented):
  main = write_lines(tmp_path / "main.jsonl", 40)
  held = write_lines(tmp_path / "held.jsonl", 7)
  config = small(path=main)
  config.evaluation.suite = (
    f"jsonl(path={main!r}, label='own', samples=2, prompts=3),"
    f"jsonl(path={main!r}, eval_path={held!r}, label='other')"
  )
  config_lib.validate(config)
  with experiment.build(config, training=training) as parts:
    metrics, samples = evaluate.Evaluator(parts)(parts.fresh_params(0), 0)
  own, other = parts.held_out
  assert own.scorer is other.scorer is parts.scorer
  assert (own.samples, other.samples, len(other.prompts)) == (2, 1, 6)
  a, b = metrics["eval/own/accuracy"], metrics["eval/other/accuracy"]
  n, m = len(own.prompts), len(other.prompts)
  assert metrics["eval/accuracy"] == pytest.approx((a + b) / 2)
  assert metrics["eval/accuracy_weighted"] == pytest.approx(
    (n * a + m * b) / (n + m)
  )
  assert "eval/own/pass@2" in metrics and "eval/other/pass@2" not in metrics
  assert {s["task"] for s in samples} == {"own", "other"}
  assert not [key for key in metrics if not is_documented(key)]


def test_a_task_without_training_part_is_evaluated(tmp_path):
  (tmp_path / "test").mkdir()
  with open(tmp_path / "test" / "test.jsonl", "w") as file:
    for i in range(5):
      file.write(json.dumps({"question": f"What is {i}?", "answer": str(i)}))
      file.write("\n")
  config = small("aime24", folder=str(tmp_path), template="raw")
  with experiment.build(config, training=False) as parts:
    assert parts.stream is None
    metrics, _ = evaluate.Evaluator(parts)(parts.fresh_params(0), 0)
  assert metrics["eval/accuracy"] == 0.0
  with pytest.raises(ValueError, match="evaluation only"):
    experiment.build(config)


def test_a_suite_of_another_vocabulary_is_refused(tmp_path):
  config = small("stack_language")
  config.evaluation.suite = (
    f"jsonl(path={write_lines(tmp_path / 'a.jsonl', 40)!r})"
  )
  with pytest.raises(ValueError, match="another vocabulary"):
    experiment.build(config)


# Stop strings and shaping in the loop.


@dataclasses.dataclass(frozen=True)
class Drawn:
  """Rows as the sampler hands them out, as far as a task looks at them."""

  tokens: np.ndarray
  logprobs: np.ndarray
  processed_logprobs: np.ndarray
  lengths: np.ndarray
  truncated: np.ndarray


def test_stop_strings_end_their_row_only(tmp_path):
  config = small(path=write_lines(tmp_path / "a.jsonl", 40),
                 stop_strings="\n\n|END")
  task = experiment.make_task(config)
  texts = ["a\n\nb", "abc", "xENDEND", "EN D\n"]
  tokens = np.zeros((4, 8), np.int32)
  for row, text in zip(tokens, texts):
    row[: len(text)] = task.vocabulary.encode(text)
  tokens[1, 3] = task.vocabulary.eos_id
  rows = Drawn(tokens.copy(), np.full((4, 8), -1, np.float32),
               np.full((4, 8), -2, np.float32),
               np.array([4, 4, 7, 5], np.int32),
               np.array([True, False, True, True]))
  cut, shown = task.finish(rows)
  assert shown == ["a\n\n", "abc", "xEND", "EN D\n"]
  assert cut.lengths.tolist() == [3, 4, 4, 5]
  assert cut.truncated.tolist() == [False, False, False, True]
  for i, n in enumerate(cut.lengths):
    np.testing.assert_array_equal(cut.tokens[i, :n], tokens[i, :n])
    assert not cut.tokens[i, n:].any() and not cut.logprobs[i, n:].any()
    assert (cut.processed_logprobs[i, :n] == -2).all()
  assert rows.lengths.tolist() == [4, 4, 7, 5]  # What was drawn is kept.


def _collected(config, step=0):
  from vigor_jax import measure
  from vigor_jax import rollouts

  with experiment.build(config) as parts:
    return parts, rollouts.Collector(parts).collect(
      parts.fresh_params(0), step, measure.PhaseTimer()
    )


def test_stop_strings_in_the_loop(tmp_path):
  path = write_lines(tmp_path / "a.jsonl", 40)
  config = small(path=path)
  parts, plain = _collected(config)
  # A character that many of these rollouts hold before their end.
  texts = parts.task.decode(plain.buffer.tokens, plain.buffer.lengths)
  stop = max({c for t in texts for c in t[:-1] if c not in "|\ufffd"},
             key=lambda c: sum(c in t[:-1] for t in texts))
  config.task.stop_strings = stop
  parts, stopped = _collected(config)
  order, other = plain.buffer.order(), stopped.buffer.order()
  cut = 0
  for i, j in zip(order, other):
    n, m = plain.buffer.lengths[i], stopped.buffer.lengths[j]
    assert m <= n
    np.testing.assert_array_equal(plain.buffer.tokens[i, :m],
                                  stopped.buffer.tokens[j, :m])
    if m < n:
      cut += 1
      assert not stopped.buffer.truncated[j]
  assert cut >= 1
  assert stopped.buffer.size == 32


def test_shaped_rewards_reach_the_loss_and_no_one_else(tmp_path):
  config = small(path=write_lines(tmp_path / "a.jsonl", 40))
  _, plain = _collected(config)
  np.testing.assert_array_equal(plain.buffer.shaped, plain.buffer.reward)
  assert "reward/shaped_mean" not in plain.metrics()
  config.reward.shaping.update(length_penalty=100.0, overlong_buffer=2)
  _, shaped = _collected(config)
  b = shaped.buffer
  np.testing.assert_array_equal(b.reward, plain.buffer.reward)
  over = np.where(b.truncated, -1.0, np.clip((6 - b.lengths) / 2 - 1, -1, 0))
  np.testing.assert_allclose(
    b.shaped, b.reward - 0.1 * b.lengths + over, rtol=1e-6
  )
  metrics = shaped.metrics()
  assert metrics["reward/mean"] == plain.metrics()["reward/mean"]
  assert metrics["reward/shaped_mean"] == pytest.approx(b.shaped.mean())
  # Allocation saw the raw verdicts.
  np.testing.assert_allclose(
    shaped.groups.reward_sum[shaped.groups.opened].sum(), b.reward.sum()
  )


@pytest.mark.parametrize(
  "fields, words",
  [
    ({"format": "boxd"}, "'boxed'"),
    ({"format": "boxed"}, "no effect without .*format_bonus"),
    ({"format_bonus": 0.1}, "reward.shaping.format"),
    ({"overlong_buffer": 99}, "more than sampling.max_new_tokens=6"),
    ({"overlong_weight": 0.5}, "no effect"),
    ({"length_penalty": -1.0}, "length_penalty"),
  ],
)
def test_shaping_that_is_refused(fields, words):
  config = small("arithmetic")
  config.reward.shaping.update(fields)
  with pytest.raises(config_lib.ConfigError, match=words):
    config_lib.validate(config)


# The command.


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
  """A finished run of one step."""
  from vigor_jax import train

  folder = tmp_path_factory.mktemp("run")
  config = small(path=write_lines(folder / "a.jsonl", 60))
  config.total_steps = 1
  config.evaluation.every_steps = 0
  workdir = folder / "run"
  train.train(config_lib.validate(config), str(workdir), quiet=True)
  return workdir


def test_a_task_without_held_out_prompts_trains(tmp_path, capsys):
  from vigor_jax import train

  path = write_lines(tmp_path / "a.jsonl", 12)
  config = small(path=path, held_out_share=0.0)
  config.total_steps = 1
  with pytest.raises(ValueError, match="held_out_share.*every_steps=0"):
    experiment.build(config_lib.validate(config))
  config.evaluation.every_steps = 0
  workdir = str(tmp_path / "run")
  assert train.train(config, workdir, quiet=True)["curve"] == []
  groups = [json.loads(x) for x in open(f"{workdir}/groups.jsonl")]
  assert groups[0]["levels"] is None
  # Other data under the same path do not continue it.
  write_lines(tmp_path / "a.jsonl", 13)
  config.total_steps = 2
  with pytest.raises(ValueError, match="data are not those the run began with"):
    train.train(config, workdir, quiet=True)
  write_lines(tmp_path / "a.jsonl", 12)
  capsys.readouterr()
  assert train.train(config, workdir)["step"] == 2
  assert "data train: 12 records, 12 prompts\n" in capsys.readouterr().out


def test_a_run_is_evaluated_without_its_configuration(a_run, tmp_path, capsys,
                                                       monkeypatch):
  asked = []
  monkeypatch.setattr(layout, "fallback_line",
                      lambda *args: asked.append(args) or "sampler: plain")
  output = tmp_path / "scores.json"
  evaluate.main([
    "evaluate", f"--checkpoint={a_run}", f"--output={output}",
    "--config.evaluation.samples_per_prompt=3",
    "--config.evaluation.top_p=0.9", "--config.evaluation.pass_at=2",
  ])
  done = capsys.readouterr()
  result = json.loads(output.read_text())
  assert json.loads(done.out) == result
  assert result["protocol"]["top_p"] == 0.9
  assert {"eval/pass@2", "eval/pass@3", "eval/cons@3"} <= set(result["metrics"])
  assert "avg@3" in done.err and "top-p 0.9" in done.err
  assert "eval/accuracy" in done.err
  # What a mesh does not divide is told, as in training.
  assert "sampler: plain\n" in done.err
  (placement, sizes, settings), = asked
  assert placement is None or placement.mesh.size
  assert sizes.vocab and settings.slots
  # One step of it, by path.
  step = max((a_run / "checkpoints").glob("[0-9]*"))
  assert evaluate._with_config(["evaluate", f"--checkpoint={step}"])[-1] == (
    f"--config={a_run}/config.json"
  )


def test_a_place_for_the_scores_is_checked_first(a_run, tmp_path, capsys):
  (tmp_path / "file").touch()
  for output, words in [
    (tmp_path, "--output: .* is a folder"),
    (tmp_path / "file" / "a.json", "--output: .*file' is a file"),
  ]:
    with pytest.raises(SystemExit) as stop:
      evaluate.main(["evaluate", f"--checkpoint={a_run}", f"--output={output}"])
    assert stop.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_pretrained_weights_need_a_configuration(root):
  folder = root / "tests" / "data" / "models" / "qwen2_tiny"
  argv = ["evaluate", f"--checkpoint={folder}"]
  assert evaluate._with_config(argv) == argv


def test_a_command_that_names_nothing_is_told_what_to_name():
  with pytest.raises(ValueError, match="--checkpoint is missing"):
    evaluate._with_config(["evaluate", "--output=x"])
  assert evaluate._with_config(["evaluate", "--help"]) == ["evaluate", "--help"]
