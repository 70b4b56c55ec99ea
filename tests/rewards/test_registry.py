"""Names, signatures, combinations and verdict validation."""

import decimal
import fractions
import importlib
import math
import sys

import numpy as np
import pytest

from vigor_jax import rewards
from vigor_jax.rewards import exact

import sample_rewards


def test_resolve_by_full_and_short_name():
  assert rewards.resolve("vigor_jax.rewards.exact:verify") is exact.verify
  assert rewards.resolve("exact") is exact.verify
  assert rewards.resolve(exact.verify) is exact.verify
  assert rewards.reward_name(exact.verify) == "vigor_jax.rewards.exact:verify"


@pytest.mark.parametrize(
  "body, words",
  [
    ("x = 1\nraise ValueError('own words')", ["line 2", "own words"]),
    ("import sys\nsys.exit(0)", ["line 2", "SystemExit"]),
    ("def verify(:", ["SyntaxError", "line 1"]),
  ],
)
def test_a_module_that_fails_is_named(tmp_path, monkeypatch, body, words):
  (tmp_path / "failing_reward.py").write_text(body)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(rewards.RewardError) as caught:
    rewards.resolve("failing_reward:verify")
  for word in ["importing 'failing_reward' failed", *words]:
    assert word in str(caught.value)


def test_every_alias_resolves():
  for name, target in rewards.ALIASES.items():
    module, _, function = target.partition(":")
    expected = getattr(importlib.import_module(module), function)
    assert rewards.resolve(name) is expected


@pytest.mark.parametrize(
  "name, words",
  [
    ("exat", ["'exat'", "'exact'"]),
    ("vigor_jax.rewards.exact:verfy", ["'verfy'", "nearest", "'verify'"]),
    ("vigor_jax.rewards.exat:verify", ["vigor_jax.rewards.exat", "exact"]),
    ("no_such_module_here:verify", ["no_such_module_here"]),
    ("sample_rewards:no_metadata", ["**metadata", "(completion, answer)"]),
    ("sample_rewards:one_argument", ["signature", "completion, **metadata"]),
    ("sample_rewards:__name__", ["not callable"]),
    ("", ["''"]),
    (None, ["None"]),
    ("a..b:c", ["'a..b'", "not a module name"]),
    (".:c", ["'.'", "not a module name"]),
    ("../a:c", ["'../a'", "not a module name"]),
    (":c", ["''", "not a module name"]),
    ("exact + math", ["'exact'", "weight*reward"]),
  ],
)
def test_bad_names_say_what_is_wrong(name, words):
  with pytest.raises(rewards.RewardError) as error:
    rewards.resolve(name)
  for word in words:
    assert word in str(error.value)


def test_missing_import_inside_a_reward_module_is_named(tmp_path, monkeypatch):
  (tmp_path / "broken_reward.py").write_text("import not_installed_thing\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(rewards.RewardError, match="not_installed_thing"):
    rewards.resolve("broken_reward:verify")


@pytest.mark.parametrize(
  "code, words",
  [
    ("def verify(:\n", ["SyntaxError", "broken_code.py, line 1"]),
    ("x = 1\nx.y\n", ["AttributeError", "broken_code.py, line 2"]),
    ("\nimport sys\nsys.exit(0)\n", ["SystemExit", "broken_code.py, line 3"]),
  ],
)
def test_a_reward_module_that_cannot_be_imported(
  tmp_path, monkeypatch, code, words
):
  (tmp_path / "broken_code.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(rewards.RewardError) as error:
    rewards.resolve("broken_code:verify")
  for word in ["'broken_code:verify'", *words]:
    assert word in str(error.value)


def test_exact():
  verify = rewards.resolve("exact")
  assert verify.cheap
  assert verify(" 12\n", "12") == 1.0
  assert verify("12", "012") == 0.0
  assert verify("", "") == 0.0
  assert verify("a", "a", level=3) == 1.0


@pytest.mark.parametrize(
  "value, expected",
  [
    (1, 1.0),
    (0.25, 0.25),
    (True, 1.0),
    (False, 0.0),
    (np.float32(0.5), 0.5),
    (np.int64(1), 1.0),
    (np.bool_(True), 1.0),
    (fractions.Fraction(1, 4), 0.25),
  ],
)
def test_verdicts_accepted(value, expected):
  assert rewards.check_verdict(value, "m:f", "text") == expected


@pytest.mark.parametrize(
  "value, shown",
  [
    ([1.0], "[1.0]"),
    (None, "None"),
    ("1", "'1'"),
    (math.nan, "nan"),
    (math.inf, "inf"),
    (1.0001, "1.0001"),
    (-0.5, "-0.5"),
    (2, "2"),
    (np.array(1.0), "array(1.)"),
    (np.array([1.0, 0.0]), "array"),
    ({"score": 1}, "score"),
    (1j, "1j"),
    ((1.0,), "(1.0,)"),
    (10**400, "outside [0, 1]"),
    (decimal.Decimal("0.5"), "Decimal"),
  ],
)
def test_verdicts_refused_name_function_value_and_completion(value, shown):
  with pytest.raises(rewards.RewardError) as error:
    rewards.check_verdict(value, "my.module:score", "the text", 7)
  message = str(error.value)
  for word in ("my.module:score", shown, "completion 7", "the text"):
    assert word in message


def test_combined_is_a_weighted_sum():
  fn = rewards.resolve("0.75*exact + 0.25*sample_rewards:graded")
  assert fn("12345", "12345") == pytest.approx(0.75 + 0.25 * 0.5)
  assert fn("12345", "x") == pytest.approx(0.125)
  assert not fn.cheap
  assert rewards.resolve("1*exact").cheap
  assert rewards.reward_name(fn) == (
    "0.75*vigor_jax.rewards.exact:verify + 0.25*sample_rewards:graded"
  )


@pytest.mark.parametrize(
  "parts, words",
  [
    ([], "at least one"),
    ([(exact.verify, 0.5)], "sum to 1"),
    ([(exact.verify, 1.5), (sample_rewards.good, -0.5)], "positive"),
    ([(exact.verify, math.nan)], "positive"),
  ],
)
def test_combined_refuses(parts, words):
  with pytest.raises(rewards.RewardError, match=words):
    rewards.Combined(parts)


def test_combined_checks_each_part():
  fn = rewards.Combined([(exact.verify, 0.5), (sample_rewards.echo, 0.5)])
  with pytest.raises(rewards.RewardError, match="sample_rewards:echo"):
    fn("[1]", "x")


def test_importing_rewards_is_light():
  import subprocess

  code = (
    "import sys, vigor_jax.rewards;"
    "print({'jax', 'tensorflow', 'sympy', 'math_verify'} & set(sys.modules))"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert out.stdout.strip() == "set()"
