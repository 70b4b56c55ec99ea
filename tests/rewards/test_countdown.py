"""Countdown expressions: exact, bounded, every number once."""

import json
import time
from fractions import Fraction

import pytest

from vigor_jax.rewards import RewardError
from vigor_jax.rewards import countdown


def _right(expr, numbers, target):
  return countdown.verify(expr, "", numbers=numbers, target=target) == 1.0


def test_cases(data):
  for line in (data / "countdown_cases.jsonl").read_text().splitlines():
    case = json.loads(line)
    got = _right(case["expr"], case["numbers"], case["target"])
    assert got == case["right"], case


@pytest.mark.parametrize(
  "expr, numbers, target, right",
  [
    ("6/3*4", [6, 4, 3], 8, True),
    ("4/(1-2/3)", [4, 1, 2, 3], 12, True),
    ("8/(3-8/3)", [8, 3, 8, 3], 24, True),  # Floats miss 24 here.
    ("1/3+1/3+1/3", [1, 3, 1, 3, 1, 3], 1, True),
    ("3/2", [3, 2], 1, False),
    ("7//2", [7, 2], 3, False),
    ("2**3", [2, 3], 8, False),
    ("2^3", [2, 3], 8, False),
    ("5%3", [5, 3], 2, False),
    ("12", [1, 2], 12, False),
    ("1+2+2", [1, 2], 5, False),
    ("1+2", [1, 2, 3], 3, False),
    ("1+2+3*0", [1, 2, 3], 3, False),
    ("(1+2", [1, 2], 3, False),
    ("1+2)", [1, 2], 3, False),
    ("1/0", [1, 0], 1, False),
    ("1/(2-2)", [1, 2, 2], 1, False),
    ("", [1, 2], 3, False),
    ("()", [1, 2], 3, False),
    ("-1+4", [1, 4], 3, True),
    ("3--2", [3, 2], 5, True),
    ("3---2", [3, 2], 1, False),
    ("2(3)", [2, 3], 6, False),
    ("1.0+2", [1, 2], 3, False),
    ("1e1+2", [1, 2], 12, False),
    ("٣+٢", [3, 2], 5, False),
    ("__import__('os')", [1], 1, False),
    ("6 ÷ 3 × 4", [6, 3, 4], 8, True),
    ("6 \\div 3 \\times 4", [6, 3, 4], 8, True),
    ("\\frac{6}{3} \\cdot 4", [6, 3, 4], 8, True),
    ("\\left(6 − 3\\right) * 4", [6, 3, 4], 12, True),
    ("6/3*4 = 8", [6, 3, 4], 8, True),
    ("6/3*4 = 9", [6, 3, 4], 8, False),
    ("6/3*4 = 8 = 8", [6, 3, 4], 8, False),
    ("8 = 6/3*4", [6, 3, 4], 8, False),
  ],
)
def test_expressions(expr, numbers, target, right):
  assert _right(expr, numbers, target) == right


@pytest.mark.parametrize(
  "completion",
  [
    "<think>6*3*4</think><answer>6/3*4</answer>",
    "<answer>6+3+4</answer> no: <answer> 6/3*4 </answer>",
    "First \\boxed{6+3}, then \\boxed{6/3*4}.",
    "Let me see.\n**Final Answer:** 6/3*4",
    "The answer is: 6/3*4.",
    "$6/3*4$",
  ],
)
def test_where_the_expression_stands(completion):
  assert _right(completion, [6, 3, 4], 8)


def test_reasoning_that_never_ends_is_no_answer():
  assert not _right("<think>6/3*4", [6, 3, 4], 8)


@pytest.mark.parametrize(
  "bomb",
  [
    "9**9**9**9 - 1",
    "9" * 100_000,
    "(" * 100_000,
    "1+" * 100_000,
    "-" * 50_000 + "1",
    "\\frac{" * 300,
    "(" * 900 + "9" + ")" * 900,
    "\\boxed{" * 200_000,
    "<answer>" * 200_000,
  ],
)
def test_bombs_are_refused_quickly(bomb):
  start = time.process_time()
  assert not _right(bomb, [9, 9], 1)
  assert time.process_time() - start < 1


def test_values_are_exact():
  assert countdown.evaluate("1/3 - 1/7")[0] == Fraction(4, 21)


@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"numbers": [1, 2]},
    {"target": 3},
    {"numbers": [1.5, 2], "target": 3},
    {"numbers": ["x"], "target": 3},
    {"numbers": [1, 2], "target": None},
    {"numbers": [1, 2], "target": 2.5},
    {"numbers": [True, 2], "target": 3},
  ],
)
def test_faulty_data_is_an_error(kwargs):
  with pytest.raises(RewardError, match="countdown"):
    countdown.verify("1+2", "", **kwargs)


def test_numbers_may_be_strings_or_negative():
  assert _right("5-3", ["5", "3"], "2")
  assert _right("-3+5", [-3, 5], 2)
