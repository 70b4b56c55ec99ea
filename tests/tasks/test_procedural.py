"""reasoning_gym tasks: generation, split, verdicts."""

import json
import re

import pytest

from vigor_jax import tasks
from vigor_jax.tasks import procedural

NAMES = ["arc_agi", "chain_sum", "countdown", "gcd", "prime_factorization"]


def make(dataset, **options):
  return tasks.make(
    {
      "name": "reasoning_gym",
      "dataset": dataset,
      "max_prompt_length": 30_000,
      "max_completion_length": 5000,
      **options,
    }
  )


@pytest.mark.parametrize("dataset", NAMES)
def test_gold_answers_pass_and_others_do_not(dataset):
  task = make(dataset, num_prompts=3, held_out_share=0.0)
  assert task.reward == "vigor_jax.tasks.procedural:score"
  prompts = task.stream(0).peek(task.stream(0).num_examples)
  for answer, metadata in zip(prompts.answers, prompts.metadata):
    metadata = json.loads(json.dumps(metadata))
    assert procedural.score(answer, answer, **metadata) == 1.0
    tagged = f"<think>{answer}?</think> so <answer>{answer}</answer>"
    assert procedural.score(tagged, answer, **metadata) == 1.0
    for wrong in ("", "nonsense", "-98765"):
      assert procedural.score(wrong, answer, **metadata) == 0.0


def test_partial_credit_is_no_success():
  """The package itself gives an answer with the gold inside some credit."""
  import reasoning_gym

  data = reasoning_gym.create_dataset("letter_counting", size=1, seed=0)
  item = data[0]
  assert 0 < data.score_answer(f"{item['answer']} or so", item) < 1
  task = make("sentence_reordering", num_prompts=2, held_out_share=0.0)
  prompts = task.stream(0).peek(1)
  answer, metadata = prompts.answers[0], prompts.metadata[0]
  assert procedural.score(answer + " maybe", answer, **metadata) == 0.0
  assert procedural.score(answer, answer, **metadata) == 1.0


@pytest.mark.parametrize(
  "completion,answer,found",
  [
    ("7", "7", "7"),
    ("2 + 5 = 7", "7", "7"),
    ("The answer is 7.\nNext question: 8", "7", "7"),
    ("Answer: 7 apples", "7", "7"),
    ("I get \\boxed{1,007}", "1007", "1007"),
    ("<answer>3</answer> or <answer>7</answer> 9", "7", "7"),
    ("<think>maybe 8</think>7", "7", "7"),
    ("it is -7", "-7", "-7"),
    ("the answer is cat.", "cat", "cat"),
    ("  cat \n", "cat", "cat"),
    ("no number", "7", "no number"),
    ("final answer: x = 3\nthat is all", "x = 3", "x = 3"),
  ],
)
def test_what_is_judged(completion, answer, found):
  assert procedural.extract(completion, answer) == found


def test_a_verifier_that_accepts_nonsense_is_refused():
  with pytest.raises(ValueError, match="game_of_life_halting.*accepts"):
    make("game_of_life_halting", num_prompts=4)


def test_tasks_with_many_right_answers_name_none():
  task = make("rubiks_cube", num_prompts=2, held_out_share=0.0)
  prompts = task.stream(0).peek(1)
  assert prompts.answers == [""]
  assert not prompts.metadata[0]["has_answer"]
  verdict = procedural.score("R", prompts.answers[0], **prompts.metadata[0])
  assert verdict in (0.0, 1.0)
  with pytest.raises(ValueError, match="no completions"):
    task.sft_batches(0, 0, 1)


def test_items_of_neighbouring_seeds_are_split_by_text():
  """Item i of seed s is item 0 of seed s + i, so seeds cannot split."""
  task = make("chain_sum", num_prompts=600, difficulty=0)
  size = task.stream(0).num_examples
  train = task.stream(0).peek(size)
  held_out = task.evaluation(10**6)
  assert not set(train.texts) & set(held_out.texts)
  assert len(set(train.texts)) == size
  assert task.counts["train/doubles"] == 600 - size - len(held_out)
  later = make("chain_sum", num_prompts=600, difficulty=0, data_seed=100)
  assert not set(later.stream(0).peek(20).texts) & set(held_out.texts)


def test_difficulty_and_settings():

  def level(**o):
    return make("chain_sum", num_prompts=40, **o).evaluation(9).texts

  easy = level(difficulty=0)
  assert easy == level(settings="max_terms=2, max_digits=1, min_digits=1")
  assert easy != level(difficulty=3)
  both = level(difficulty=0, settings="min_digits=4, max_digits=4")
  assert all(len(n) == 4 for text in both for n in re.findall(r"\d+", text))


@pytest.mark.parametrize(
  "options,words",
  [
    ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
    ({"settings": "terms=2"}, "no 'terms'.*min_terms"),
    ({"settings": "min_terms"}, "name=value"),
    ({"settings": "min_terms=f()"}, "name=value"),
    ({"settings": "size=3"}, "no 'size'"),
    ({"dataset": "gsm_symbolic", "difficulty": 2}, "has no levels; use -1"),
    ({"difficulty": -2}, ">= -1"),
    ({"num_prompts": 0}, ">= 1"),
    ({"dataset": ""}, "dataset"),
  ],
)
def test_bad_options(options, words):
  with pytest.raises(ValueError, match=words):
    tasks.make({"name": "reasoning_gym", **options})


@pytest.mark.parametrize(
  "value",
  [
    {"a": (1, 2), "b": [(3,), None]},
    {1: "x", (2, 3): True},
    ((("deep", 1.5),),),
    {"tuple": [1], "items": {}},
    [],
  ],
)
def test_metadata_survives_json(value):
  packed = json.loads(json.dumps(procedural.pack(value)))
  assert procedural.unpack(packed) == value
