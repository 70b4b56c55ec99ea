"""Records as their publishers lay them out."""

import base64
import json
import os
import pickle
import zlib

import pytest

from vigor_jax.tasks import parsers
from vigor_jax.tasks.records import DataError


def test_gsm8k():
  example = parsers.gsm8k(
    {
      "question": "How many?",
      "answer": "She sold 48/2 = <<48/2=24>>24.\nIn all 1,048.\n#### 1,048",
    }
  )
  assert example.prompt == "How many?" and example.answer == "1048"
  assert example.completion == (
    " She sold 48/2 = 24.\nIn all 1,048.\nThe answer is \\boxed{1048}."
  )
  for bad in ("no mark", "steps ####", "steps #### "):
    with pytest.raises(DataError, match="####"):
      parsers.gsm8k({"question": "q", "answer": bad})


def test_competition_math():
  record = {
    "problem": "p",
    "level": "Level 5",
    "type": "Algebra",
    "solution": r"First \boxed{1}, so $\boxed{\frac{1}{2}}$.",
  }
  example = parsers.competition_math(record)
  assert example.answer == r"\frac{1}{2}"
  assert example.metadata == {"level": 5, "subject": "Algebra"}
  assert example.completion == record["solution"]
  test = parsers.competition_math(
    {**record, "answer": "3", "level": 2, "subject": "Geometry"}
  )
  assert test.answer == "3"
  assert test.metadata == {"level": 2, "subject": "Geometry"}
  odd = parsers.competition_math({**record, "level": "Level ?"})
  assert "level" not in odd.metadata
  for solution in ("no box", r"\boxed{}", r"\boxed{1"):
    with pytest.raises(DataError, match="no boxed answer"):
      parsers.competition_math({**record, "solution": solution})


def test_dapo_math_in_both_layouts():
  original = {
    "prompt": [
      {
        "role": "user",
        "content": "Solve the following math problem step by step. The last"
        " line of your response should be of the form Answer: $Answer (without"
        " quotes) where $Answer is the answer to the problem.\n\nIn triangle"
        ' ABC,\n\nfind x.\n\nRemember to put your answer on its own line after'
        ' "Answer:".',
      }
    ],
    "reward_model": {"ground_truth": "34", "style": "rule"},
  }
  example = parsers.dapo_math(original)
  assert example.prompt == "In triangle ABC,\n\nfind x."
  assert example.answer == "34"
  processed = parsers.dapo_math({"prompt": "Find x.", "solution": "34"})
  assert (processed.prompt, processed.answer) == ("Find x.", "34")
  with pytest.raises(DataError, match="one user turn"):
    parsers.dapo_math({**original, "prompt": []})
  with pytest.raises(DataError, match="reward_model"):
    parsers.dapo_math({**original, "reward_model": "34"})


@pytest.mark.parametrize(
  "value,text",
  [(33, "33"), (27.0, "27"), (0.5, "0.5"), (" 7 ", "7"), (["2", "3"], "2, 3")],
)
def test_answers_as_numbers_texts_and_lists(value, text):
  record = {"question": "q", "final_answer": value}
  assert parsers.question_answer(record).answer == text


@pytest.mark.parametrize("value", ["", " ", [], None, True, {"a": 1}])
def test_answers_that_are_none(value):
  with pytest.raises(DataError, match="answer"):
    parsers.question_answer({"problem": "p", "answer": value})


def test_a_question_that_is_missing():
  with pytest.raises(DataError, match="problem.*question"):
    parsers.question_answer({"answer": "1"})


@pytest.mark.parametrize(
  "source,call,expected",
  [
    ("assert f(2) == 4", "f(2)", 4),
    ("assert f('a', [1]) == [1, 'x', None]", "f('a', [1])", [1, "x", None]),
    # JSON knows no tuples and no sets: the program compares.
    ("assert f(1) == (1, 2)", "bool(f(1) == (1, 2))", True),
    ("assert set(f(1)) == {1}", "bool(set(f(1)) == {1})", True),
    ("assert not f(1)", "bool(not f(1))", True),
    ("assert f(1) == g(2)", "bool(f(1) == g(2))", True),
    ("assert 1 < f(1) < 3", "bool(1 < f(1) < 3)", True),
  ],
)
def test_assertions(source, call, expected):
  assert parsers.assertion(source) == {"call": call, "expected": expected}


@pytest.mark.parametrize("bad", ["", "f(1) == 2", "assert ("])
def test_what_is_no_assertion(bad):
  with pytest.raises(DataError, match="not an assert"):
    parsers.assertion(bad)


def test_assertion_with_setup():
  test = parsers.assertion("assert f(X) == 5", "X = 3")
  scope = {"f": lambda x: x + 2}
  assert eval(test["call"], scope) == test["expected"] == 5


def test_mbpp_full_and_sanitized():
  full = parsers.mbpp(
    {
      "text": "Write a function to double.",
      "code": "def double(x):\n  return 2 * x",
      "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
      "test_setup_code": "",
    }
  )
  assert full.prompt.endswith("assert double(2) == 4\nassert double(0) == 0")
  assert full.metadata["tests"][0] == {"call": "double(2)", "expected": 4}
  assert full.completion == "```python\ndef double(x):\n  return 2 * x\n```"
  sanitized = parsers.mbpp(
    {
      "prompt": "Double.",
      "code": "def double(x): return 2 * x",
      "test_imports": ["import math"],
      "test_list": ["assert double(math.floor(2.5)) == 4"],
    }
  )
  (test,) = sanitized.metadata["tests"]
  scope = {}
  exec(sanitized.answer, scope)
  assert eval(test["call"], scope) == 4
  with pytest.raises(DataError, match="test_list"):
    parsers.mbpp({"text": "x", "code": "y", "test_list": []})


LCB = {
  "question_content": "Add two numbers.",
  "starter_code": "",
  "public_test_cases": json.dumps(
    [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
  ),
  "metadata": "{}",
  "difficulty": "easy",
}


def packed(tests):
  raw = pickle.dumps(json.dumps(tests))
  return base64.b64encode(zlib.compress(raw)).decode()


def test_livecodebench_public_rewards_and_private_validates():
  private = [{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]
  for raw in (packed(private), json.dumps(private)):
    record = {**LCB, "private_test_cases": raw}
    public = parsers.livecodebench_public(record)
    assert public.metadata == {
      "tests": [{"stdin": "1 2\n", "stdout": "3\n"}],
      "difficulty": "easy",
    }
    assert "stdin" in public.prompt
    both = parsers.livecodebench_private(record)
    assert both.prompt == public.prompt
    assert both.metadata["tests"][1:] == [{"stdin": "5 5\n", "stdout": "10\n"}]


def test_livecodebench_functions():
  tests = [
    {
      "input": '[1, 2]\n"ab"',
      "output": "[2, 1]",
      "testtype": "functional",
    }
  ]
  record = {
    **LCB,
    "starter_code": "class Solution:\n    def turn(self, a, b):",
    "public_test_cases": json.dumps(tests),
    "metadata": json.dumps({"func_name": "turn"}),
  }
  example = parsers.livecodebench_public(record)
  assert example.metadata["tests"] == [
    {"call": "Solution().turn([1, 2], 'ab')", "expected": [2, 1]}
  ]
  assert "class Solution" in example.prompt


class Hostile:
  def __reduce__(self):
    return os.system, ("true",)


def test_packed_tests_cannot_run_code():
  raw = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
  with pytest.raises(DataError, match="object .*system"):
    parsers.livecodebench_private({**LCB, "private_test_cases": raw})


@pytest.mark.parametrize("raw", ["not packed", "AAAA", None, 3, "7"])
def test_tests_that_cannot_be_unpacked(raw):
  with pytest.raises(DataError, match="tests"):
    parsers.livecodebench_private({**LCB, "private_test_cases": raw})


def test_deepcoder_layouts():
  rows = [{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}]
  stdin = [{"stdin": "1\n", "stdout": "2\n"}]
  taco = {"inputs": ["1\n"], "outputs": ["2\n"]}
  calls = [
    {"type": "function_call", "fn_name": "f", "input": [1, "x"], "output": [3]}
  ]
  for tests, expected in [
    (rows, stdin),
    (taco, stdin),
    ({"inputs": [["1"]], "outputs": [["2"]]}, [{"stdin": "1", "stdout": "2"}]),
    (calls, [{"call": "f(1, 'x')", "expected": 3}]),
    (
      {"fn_name": "f", "inputs": [[1, "x"]], "outputs": [[3]]},
      [{"call": "f(1, 'x')", "expected": 3}],
    ),
  ]:
    record = {"problem": "p", "tests": json.dumps(tests)}
    assert parsers.deepcoder(record).metadata == {"tests": expected}
  functional = {"input": "[1, 2]", "output": "3", "testtype": "functional"}
  record = {
    "problem": "p",
    "starter_code": "class Solution:\n  def add(self, a):",
    "tests": [{**functional, "metadata": {"func_name": "add"}}],
    "metadata": "{}",
  }
  assert parsers.deepcoder(record).metadata["tests"] == [
    {"call": "Solution().add([1, 2])", "expected": 3}
  ]
  with pytest.raises(DataError, match="'metadata' is not JSON"):
    parsers.deepcoder({**record, "metadata": "{"})
  for bad in ([], [{"input": "1"}], ["x"]):
    with pytest.raises(DataError, match="test"):
      parsers.deepcoder({"problem": "p", "tests": json.dumps(bad)})
