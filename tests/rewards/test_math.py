"""Math verdicts: the cases from the field, their kinds, and the limits."""

import concurrent.futures
import json
import threading
import time

import numpy as np
import pytest

from vigor_jax import rewards
from vigor_jax.rewards import extraction
from vigor_jax.rewards import judge
from vigor_jax.rewards import math as math_reward


def _cases(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def scorer():
  with rewards.Scorer("math", workers=2) as scorer:
    yield scorer


@pytest.mark.parametrize("name", ["math_cases", "math_kinds"])
def test_labelled_files(data, name, scorer):
  """All right, the policy rows too (docs/rewards.md states the choices)."""
  cases = _cases(data / f"{name}.jsonl")
  verdicts = scorer.score(
    [case["output"] for case in cases], [case["gold"] for case in cases]
  )
  wrong = [
    (case["id"], case["output"][:80], case["gold"][:80], case["verdict"])
    for case, verdict in zip(cases, verdicts)
    if bool(verdict) != case["verdict"]
  ]
  assert wrong == []
  assert len(cases) >= 42


def test_equality_is_symmetric(data):
  """Gold and answer may change places, but for statements with labels."""
  for case in _cases(data / "math_kinds.jsonl"):
    gold, output = case["gold"], case["output"]
    if not (output.startswith("\\boxed{") and output.endswith("}")):
      continue
    answer = extraction.final_answer(output)
    if not answer or not gold.strip() or len(answer) > 400:
      continue
    pair = judge.cleaned(gold, answer)
    assert judge.judge(*pair) == judge.judge(*pair[::-1]), (gold, answer)


def test_direct_call_from_a_thread():
  """No signal is used: m59, called where signals cannot be set."""
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    futures = [
      pool.submit(math_reward.verify, "\\boxed{\\frac{2}{6}}", "\\frac{1}{3}")
      for _ in range(4)
    ]
    assert [f.result(timeout=300) for f in futures] == [1.0] * 4
  assert threading.active_count() < 50


def test_pathological_costs_its_limit_and_no_other(scorer, monkeypatch):
  """The judge itself is slowed down here: its own guards refuse power towers."""
  scorer.score(["\\boxed{1}"], ["2"])
  start = time.monotonic()
  with rewards.Scorer("slow_math:verify", workers=2) as slow:
    out = slow.score(
      ["spin", "\\boxed{3}", "grow", "\\boxed{4}"], ["1", "3", "1", "5"]
    )
  np.testing.assert_array_equal(out, [0, 1, 0, 0])
  assert time.monotonic() - start < 200


@pytest.mark.parametrize(
  "answer",
  [
    "\\dfrac{7^{\\left(7^{\\left(7^{\\left(7^7\\right)}\\right)} - 4\\right)}}{6}",
    "2^{4^{8^{16}}}",
    "9^{9^{9^9}}",
    "9**9**9**9",
    "(10^9)!",
    "((10!)!)!",
    "\\binom{10^9}{10^8}",
    "\\sqrt{10^{10^{10}}}",
    "e^{e^{e^{e^e}}}",
    "10^{10^{10}} - 10^{10^{10}} + 43",
    "\\sin(10^{10^{10}})",
    "1e999999999",
    "\\frac{1}{10^{10^{10}}}",
    "2^{-10^{10}}",
    "x^{x^{x^{x^{x^x}}}}",
    "(1+\\sqrt{2})^{10^{12}}",
    "1." + "3" * 3900,
    "9" * 3900,
    "(" * 4000,
    "+".join(["x"] * 1900),
    "^".join(["2"] * 1900),
    "-" * 3000 + "1",
    "\\sqrt{" * 60 + "2" + "}" * 60,
    "1,2," * 900 + "3",
    "!" * 3000,
    "|" * 3999,
  ],
)
@pytest.mark.parametrize("gold", ["42", "x^2", "1,2,3"])
def test_bombs_end_quickly(answer, gold):
  start = time.process_time()
  assert math_reward._judge(f"\\boxed{{{answer}}}", gold) == 0.0
  assert time.process_time() - start < 3


@pytest.mark.parametrize(
  "text",
  [
    "\\boxed{" * 100_000,
    "$" * 500_001,
    "\\(" * 200_000,
    "answer is " * 50_000,
    "answer" + " " * 500_000,
    "#### \n" * 100_000,
    "<answer>" * 100_000,
    "}" * 500_000,
    "1 " * 300_000,
    "</think>" * 50_000,
    "\n" * 500_000,
    "answer: " + "\\(" * 100_000,
    "\\boxed{1} and " * 50_000,
    "*" * 300_000,
    "\\text{" * 100_000,
    "\\boxed{" + "a" * 500_000 + "}",
  ],
)
def test_long_outputs_are_read_in_linear_time(text):
  start = time.process_time()
  math_reward._judge(text, "17")
  assert time.process_time() - start < 3


def test_verdicts_are_cached(monkeypatch):
  math_reward.verify("\\boxed{0.5}", "\\frac{1}{2}")
  monkeypatch.setattr(math_reward, "_answers", None)  # Would fail if called.
  assert math_reward.verify("\\boxed{0.5}", "\\frac{1}{2}") == 1.0


@pytest.mark.parametrize(
  "text, answer",
  [
    ("\\boxed{a}\\boxed{b}", "a , b"),
    ("x \\boxed{1} y", "1"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("a \\boxed{1} and later, after a while, \\boxed{2}", "2"),
    ("<think>\\boxed{1}</think> so 2", "2"),
    ("#### 7\nthanks", "7"),
    ("The final answer is: $5$.", "5"),
    ("nothing here", None),
    ("\\boxed{1", None),
  ],
)
def test_extraction(text, answer):
  assert extraction.final_answer(text) == answer


@pytest.mark.parametrize(
  "answer, good",
  [
    ("42", True),
    ("\\frac{1}{2}", True),
    ("(C)", True),
    ("Monday", True),
    ("#### 18", True),
    ("\\boxed{x^2}", True),
    ("", False),
    ("  ", False),
    ("((", False),
    ("9" * 5000, False),
  ],
)
def test_gold_answers_a_loader_should_refuse(answer, good):
  assert (math_reward.problem(answer) is None) == good
