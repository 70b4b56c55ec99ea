"""The arithmetic task: rules, splits, difficulty, warm start, seqio."""

import re
import subprocess
import sys

import numpy as np
import pytest

from vigor_jax import tasks
from vigor_jax.tasks import arithmetic, drawn


HELD_OUT = ["0+6.....=", "0+7.....=", "0-3.....=", "0*5.....=", "1+1.....=", "1+8.....="]
HELD_OUT_OF_300 = 39


def trace(text):
  """The rules again, one character at a time."""
  value, out = int(text[0]), ""
  for op, operand in re.findall(r"([-+*])(\d)", text[1:-1]):
    a = int(operand)
    value = {"+": value + a, "-": value - a, "*": value * a}[op] % 10
    out += str(value)
  return out


def test_by_hand():
  assert trace("3+4*2....=") == "74"
  assert trace("2-9*7*0+1=") == "3101"


@pytest.mark.parametrize("difficulty", sorted(drawn.DIFFICULTIES))
def test_answers_are_the_partial_results(difficulty):
  task = tasks.make({"name": "arithmetic", "difficulty": difficulty})
  prompts = task.stream(0).peek(600)
  for i, text in enumerate(prompts.texts):
    assert prompts.answers[i] == trace(text)
    assert prompts.metadata[i] == {"level": text.count("*")}
    assert prompts.tokens[i].tolist() == task.vocabulary.encode(text)
    assert len(prompts.tokens[i]) <= task.max_prompt_length
    assert len(prompts.answers[i]) + 1 <= task.max_completion_length
  assert arithmetic.score(prompts.answers[0], prompts.answers[0]) == 1.0
  assert arithmetic.score(prompts.answers[0] + "1", prompts.answers[0]) == 0.0


def test_lengths_and_operators_are_uniform():
  prompts = tasks.make("arithmetic").stream(1).peek(6000)
  lengths = np.bincount([len(a) for a in prompts.answers], minlength=7)[1:]
  assert abs(lengths / 6000 - 1 / 6).max() < 0.02
  text = "".join(prompts.texts)
  operators = np.array([text.count(c) for c in "+-*"])
  assert abs(operators / operators.sum() - 1 / 3).max() < 0.02


@pytest.mark.parametrize(
  "difficulty,easy,hard",
  [("sparse_signal", 0.75, 0.15), ("hard_junk", 0.15, 0.75)],
)
def test_shares_of_the_mixtures(difficulty, easy, hard):
  task = tasks.make({"name": "arithmetic", "difficulty": difficulty})
  prompts = task.stream(5).peek(8000)
  level = np.array([m["level"] for m in prompts.metadata])
  # A plain prompt has no multiplication with chance mean (2/3)^1..6, and six
  # of them with chance 1/6 (1/3)^6.
  none = easy + 0.1 * np.mean([(2 / 3) ** n for n in range(1, 7)])
  assert abs((level == 0).mean() - none) < 0.015
  assert abs((level == 6).mean() - hard - 0.1 / 6 / 3**6) < 0.015
  held_out = task.evaluation(1024)
  plain = tasks.make("arithmetic").evaluation(1024)
  assert held_out.texts == plain.texts
  training = tasks.make(
    {"name": "arithmetic", "difficulty": difficulty, "eval_on": "training"}
  ).evaluation(2000)
  level = np.array([m["level"] for m in training.metadata])
  assert abs((level == 0).mean() - none) < 0.04


def test_a_prompt_is_a_function_of_seed_and_position():
  task, again = tasks.make("arithmetic"), tasks.make("arithmetic")
  stream = again.stream(7)
  stream.load_state_dict({"next": 1000, "returned": [3]})
  some = stream.peek(5)
  everything = task.stream(7).peek(1010)
  assert some.texts == [everything.texts[i] for i in (3, 1000, 1001, 1002, 1003)]
  assert everything.texts != tasks.make("arithmetic").stream(8).peek(1010).texts


@pytest.mark.parametrize("operations", [1, 2, 6])
def test_held_out_prompts_never_train(operations):
  task = tasks.make({"name": "arithmetic", "operations": operations})
  held_out = set(task.evaluation(3000).texts)
  assert not held_out & set(task.stream(0).peek(3000).texts)
  warm = set()
  for step in range(10):
    rows, _ = task.sft_batches(0, step, 256)
    warm |= {task.vocabulary.decode(r) for r in rows}
  assert not held_out & warm
  # The split is by text: about one in eight of the 300 one-step prompts.
  if operations == 1:
    assert 20 <= len(held_out) <= 60


def test_evaluation_is_fixed_and_nested():
  first = tasks.make("arithmetic").evaluation(300)
  assert tasks.make("arithmetic").evaluation(1024).texts[:300] == first.texts
  with pytest.raises(ValueError, match="n=0"):
    tasks.make("arithmetic").evaluation(0)


def test_warm_start_labels():
  """Sums are right; products are right with .2 + .8 / 10 = .28."""
  task = tasks.make("arithmetic")
  right = {"+": [], "-": [], "*": []}
  for step in range(60):
    prompts, completions = task.sft_batches(3, step, 128)
    assert len(prompts) == len(completions) == 128
    for prompt, completion in zip(prompts, completions):
      assert completion[-1] == task.vocabulary.eos_id
      text = task.vocabulary.decode(prompt)
      out = task.vocabulary.decode(completion)
      value = text[0]
      steps = re.findall(r"([-+*])(\d)", text[1:-1])
      assert len(out) == len(steps) == len(completion) - 1
      for (op, operand), label in zip(steps, out):
        right[op].append(trace(f"{value}{op}{operand}=") == label)
        value = label
  assert all(right["+"]) and all(right["-"])
  assert abs(np.mean(right["*"]) - 0.28) < 0.02


def test_warm_start_is_a_function_of_seed_and_step():

  def flat(rows):
    return np.concatenate(rows).tolist()

  task = tasks.make("arithmetic")
  a = task.sft_batches(1, 4, 32)
  b = tasks.make("arithmetic").sft_batches(1, 4, 32)
  assert flat(a[0]) == flat(b[0]) and flat(a[1]) == flat(b[1])
  assert flat(a[0]) != flat(task.sft_batches(1, 5, 32)[0])
  assert flat(a[0]) != flat(task.sft_batches(2, 4, 32)[0])


def test_a_fixed_set_is_materialised_through_seqio():
  options = {"name": "arithmetic", "num_prompts": 300}
  task = tasks.make(options)
  stream = task.stream(0)
  prompts = stream.peek(300)
  assert stream.num_examples == 300
  assert len(set(prompts.texts)) == 300
  assert sorted(prompts.uids.tolist()) == list(range(300))
  assert all(a == trace(t) for a, t in zip(prompts.answers, prompts.texts))
  other = tasks.make(options | {"data_seed": 1}).stream(0).peek(300)
  assert set(other.texts) != set(prompts.texts)
  assert not set(task.evaluation(2000).texts) & set(prompts.texts)


def test_seqio_serves_the_same_prompts():
  from vigor_jax.tasks import seqio_tasks

  task = tasks.make({"name": "arithmetic", "difficulty": "hard_junk"})
  held_out = task.evaluation(400)
  through = seqio_tasks.read(task.seqio_task, "evaluation", 400)[0]
  assert through.texts == held_out.texts
  assert through.answers == held_out.answers
  assert through.metadata == held_out.metadata
  for a, b in zip(through.tokens, held_out.tokens):
    np.testing.assert_array_equal(a, b)
  train = seqio_tasks.read(task.seqio_task, "train", 300)[0]
  assert train.texts == task.stream(0).peek(300).texts


def test_it_is_a_registered_seqio_task():
  from vigor_jax.tasks import seqio_tasks

  seqio = seqio_tasks.seqio
  task = tasks.make("arithmetic")
  assert task.seqio_task is task.seqio_task
  registered = seqio.TaskRegistry.get(task.name)
  vocabulary = registered.output_features["inputs"].vocabulary
  assert isinstance(vocabulary, seqio.Vocabulary)
  assert vocabulary.decode(vocabulary.encode("3+4..=")) == "3+4..="
  example = next(
    registered.get_dataset(
      {"inputs": 16, "targets": 16}, "train", shuffle=False
    ).as_numpy_iterator()
  )
  assert example["targets"][-1] == vocabulary.eos_id
  decoded = vocabulary.decode_tf(example["targets"][None]).numpy()
  assert decoded.tolist() == [example["answer"]]


def test_too_many_distinct_prompts():
  # 300 exist; a wish far beyond is refused as soon.
  for wanted in (400, 10**6):
    with pytest.raises(ValueError, match=f"num_prompts={wanted}.*operations=1"):
      tasks.make(
        {"name": "arithmetic", "operations": 1, "num_prompts": wanted}
      )


@pytest.mark.parametrize(
  "field,value,words",
  [
    ("difficulty", "easy", "hard_junk"),
    ("eval_on", "test", "training"),
    ("operations", 0, "1..64"),
    ("num_prompts", -1, ">= 0"),
    ("label_noise", 1.5, r"\[0, 1\]"),
    ("dificulty", "plain", "did you mean 'difficulty'"),
  ],
)
def test_bad_options_name_the_field_and_the_legal_values(field, value, words):
  with pytest.raises(ValueError, match=f"{field}.*{words}"):
    tasks.make({"name": "arithmetic", field: value})


def test_an_unknown_task_gets_the_nearest_name():
  with pytest.raises(ValueError, match="did you mean 'arithmetic'"):
    tasks.make("aritmetic")


def test_a_fresh_run_imports_neither_tensorflow_nor_jax():
  program = (
    "import sys; from vigor_jax import tasks; t = tasks.make('arithmetic');"
    "t.stream(0).peek(9); t.evaluation(9); t.sft_batches(0, 0, 9);"
    "print(sorted({'jax', 'seqio', 'tensorflow'} & set(sys.modules)))"
  )
  out = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "[]"


def test_the_splits_hash_is_stable():
  """A saved run must find the same split in later versions."""
  texts = [
    f"{i}{op}{j}.....=" for i in range(10) for op in "+-*" for j in range(10)
  ]
  ids = np.array([arithmetic.VOCABULARY.encode(t) for t in texts])
  padded = np.pad(ids, ((0, 0), (0, 10)))
  held_out = drawn.is_held_out(ids)
  np.testing.assert_array_equal(held_out, drawn.is_held_out(padded))
  assert [t for t, h in zip(texts, held_out) if h][:6] == HELD_OUT
  assert held_out.sum() == HELD_OUT_OF_300
