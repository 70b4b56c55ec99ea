"""The stack language: interpreter, reward, difficulty, warm start."""

import numpy as np
import pytest

from vigor_jax import tasks
from vigor_jax.tasks import stack_language


def test_interpreter_by_hand():
  tests = [[3, 4], [9, 9]]
  assert stack_language.run("xy+", tests) == [7, 8]
  assert stack_language.run("xy-", tests) == [9, 0]
  assert stack_language.run("x3*y>2<", tests) == [2, 2]
  assert stack_language.run("x", tests) == [3, 9]
  assert stack_language.run("12-", tests) == [9, 9]


@pytest.mark.parametrize("program", ["", "+", "x+", "xy", "xy++", "xA+", "x9+"])
def test_what_is_no_program(program):
  assert stack_language.run(program, [[1, 2]]) is None
  assert stack_language.score(program, "xy+", tests=[[1, 2, 3]]) == 0.0


def test_score_is_the_share_of_tests_passed():
  tests = [[1, 2, 3], [2, 2, 4], [0, 0, 0], [5, 5, 0]]
  assert stack_language.score("xy+", "xy+", tests=tests, level=0) == 1.0
  assert stack_language.score("xy*", "xy+", tests=tests) == 0.5
  assert stack_language.score("yx+", "xy+", tests=tests) == 1.0
  assert stack_language.score("1", "xy+", tests=tests) == 0.0


def program_of(text):
  text = text.replace(".", "")
  out = text[0]
  for symbol, leaf in zip(text[1:-1:2], text[2:-1:2]):
    row = stack_language.SYMBOLS.index(symbol)
    column = stack_language.LEAVES.index(leaf)
    out += leaf + stack_language.OPERATORS[stack_language.TABLE[row, column]]
  return out


def test_answers_pass_their_tests_and_carry_the_table():
  prompts = tasks.make("stack_language").stream(0).peek(500)
  for text, answer, metadata in zip(
    prompts.texts, prompts.answers, prompts.metadata
  ):
    tests = metadata["tests"]
    assert answer == program_of(text)
    assert len(tests) == 8
    assert stack_language.run(answer, tests) == [t[2] for t in tests]
    assert metadata["level"] == sum(c in "DEF" for c in text)
    assert 1 <= len(text) // 2 - 0 and text[0] in "xy"


def test_every_operator_occurs_in_both_halves_of_the_table():
  for half in (stack_language.TABLE[:3], stack_language.TABLE[3:]):
    assert set(half.ravel().tolist()) == set(range(5))


def test_shares_of_sparse_signal():
  task = tasks.make({"name": "stack_language", "difficulty": "sparse_signal"})
  prompts = task.stream(1).peek(4000)
  level = np.array([m["level"] for m in prompts.metadata])
  plain_none = 0.1 * np.mean([0.5, 0.25, 0.125])
  assert abs((level == 0).mean() - 0.75 - plain_none) < 0.02
  assert abs((level == 3).mean() - 0.15 - 0.1 / 24) < 0.02
  assert not set(task.evaluation(1000).texts) & set(prompts.texts)


def test_warm_start_teaches_half_of_the_symbols():
  task = tasks.make("stack_language")
  right = {False: [], True: []}
  for step in range(30):
    for prompt, completion in zip(*task.sft_batches(0, step, 128)):
      text = task.vocabulary.decode(prompt)
      taught = task.vocabulary.decode(completion)
      gold = program_of(text)
      assert len(taught) == len(gold) == len(completion) - 1
      for i, symbol in enumerate(text.replace(".", "")[1:-1:2]):
        badly = symbol in "DEF"
        right[badly].append(taught[2 + 2 * i] == gold[2 + 2 * i])
  assert all(right[False])
  # Right by the 20 % kept and by a fifth of the random ones.
  assert abs(np.mean(right[True]) - (0.2 + 0.8 / 5)) < 0.03


def test_operations_have_a_limit():
  with pytest.raises(ValueError, match="operations must lie in 1..6, got 7"):
    tasks.make({"name": "stack_language", "operations": 7})
