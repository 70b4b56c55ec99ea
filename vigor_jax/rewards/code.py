"""Verdicts on programs: run in a sandbox, compared outside of it."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from vigor_jax.rewards import answer_text
from vigor_jax.rewards import outputs
from vigor_jax.rewards import sandbox
from vigor_jax.rewards.verdict import RewardError, shorten

MODES = ("binary", "fraction", "binary-unsafe", "fraction-unsafe")
# Starts of a failing sandbox before the machine is put to the test.
_ATTEMPTS = 3
_MAX_PROGRAM = 1_000_000

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.M)


def extract_program(completion: str) -> str:
  """The program in a completion.

  It is the last closed fenced block after the reasoning (of those marked as
  Python, if any is); a text without fences is taken as the program itself. A
  block that is not closed was cut off and is none.
  """
  text = answer_text.after_reasoning(completion)
  tagged = answer_text.tagged(text)
  if tagged is not None and _FENCE.search(tagged):
    text = tagged
  blocks: list[tuple[str, str]] = []
  opened = None
  for match in _FENCE.finditer(text):
    mark, language = match[1], match[2].strip().lower()
    if opened is None:
      opened = mark, language, match.end() + 1
    elif (
      mark[0] == opened[0][0] and len(mark) >= len(opened[0]) and (not language)
    ):
      blocks.append((opened[1], text[opened[2] : match.start()]))
      opened = None
  if not blocks:
    return "" if opened is not None else text
  python = [
    b
    for lang, b in blocks
    if lang.split()[:1]
    and lang.split()[0] in ("python", "py", "python3", "python2")
  ]
  return (python or [block for _, block in blocks])[-1]


def check_tests(tests: Any) -> list[dict[str, Any]]:
  """The tests, or RewardError naming the one at fault."""
  if not isinstance(tests, (list, tuple)) or not tests:
    raise RewardError(
      f"code: a task needs a non-empty list of tests, got {shorten(tests)}"
    )
  for i, test in enumerate(tests):
    keys = set(test) if isinstance(test, dict) else None
    if keys is None or not (
      keys == {"stdin", "stdout"} or keys == {"call", "expected"}
    ):
      raise RewardError(
        f"code: test {i} must have stdin and stdout, or call and expected,"
        f" got {shorten(test)}"
      )
    for key in keys - {"expected"}:
      if not isinstance(test[key], str):
        raise RewardError(
          f"code: test {i}: {key} must be a string, got {shorten(test[key])}"
        )
    if "stdout" in test and len(test["stdout"]) > sandbox.Limits.output:
      raise RewardError(
        f"code: test {i} expects {len(test['stdout'])} characters, more than"
        f" the output limit of {sandbox.Limits.output}"
      )
  return list(tests)


def _passed(test: dict[str, Any], run: sandbox.Run) -> bool:
  """Exit status 0 is needed and is not enough: the parent compares."""
  if run.reason != "exit" or run.code != 0:
    return False
  if "call" in test:
    return outputs.same_result(test["expected"], run.result)
  return outputs.same_output(test["stdout"], run.stdout)


def judge_tests(
  program: str,
  tests: Sequence[dict[str, Any]],
  limits: sandbox.Limits | None = None,
  unsafe: bool = False,
  stop_at_failure: bool = False,
) -> list[bool]:
  """One verdict per test: bool [len(tests)].

  Args:
    program: Python source.
    tests: {"stdin", "stdout"} or {"call", "expected"} each.
    limits: per test; None: the defaults.
    unsafe: see `sandbox.check`.
    stop_at_failure: skip the tests behind the first failure (they count as
      failed).

  Raises:
    RewardError: malformed tests, or a fault of the judge that several tries do
      not cure.
  """
  tests = check_tests(tests)
  limits = limits or sandbox.Limits()
  verdicts: list[bool] = []
  if len(program) > _MAX_PROGRAM or not program.strip():
    return [False] * len(tests)
  failures = 0
  while len(verdicts) < len(tests):
    rest = tests[len(verdicts) :]
    runs = sandbox.run(program, rest, limits, unsafe)
    try:
      for test, run in zip(rest, runs):
        verdicts.append(_passed(test, run))
        failures = 0
        if stop_at_failure and not verdicts[-1]:
          return verdicts + [False] * (len(tests) - len(verdicts))
    except sandbox.SandboxUnavailable:
      raise
    except sandbox.SandboxError as error:
      failures += 1
      time.sleep(0.2 * failures)
      if failures < _ATTEMPTS:
        continue
      if not sandbox.healthy(unsafe):
        raise RewardError(
          f"code: the judge failed {failures} times: {error}"
        ) from error
      # Other programs run: this one breaks its sandbox, each time.
      logging.warning("a program breaks its sandbox (test failed): %s", error)
      verdicts.append(False)
      failures = 0
    finally:
      runs.close()
  return verdicts


def run_tests(
  completion: str,
  answer: str,
  *,
  mode: str = "binary",
  tests: Sequence[dict[str, Any]] | None = None,
  time_limit: float | None = None,
  memory_limit: int | None = None,
  **metadata,
) -> float:
  """The verdict on the program in a completion.

  Args:
    completion: model text (see `extract_program`).
    answer: JSON list of the tests, if `tests` is not given.
    mode: "binary" (1.0 if every test passes, else 0.0) or "fraction" (the share
      that passes); with "-unsafe", without a sandbox where there is none.
    tests: {"stdin", "stdout"} or {"call", "expected"} each.
    time_limit: CPU seconds per test; None: 6.
    memory_limit: bytes; None: 1 GiB.

  Raises:
    RewardError: unknown mode, malformed tests, no sandbox, or a failing judge.
  """
  del metadata
  if mode not in MODES:
    raise RewardError(f"code: mode {mode!r} is not one of {', '.join(MODES)}")
  if tests is None:
    try:
      tests = json.loads(answer)
    except ValueError as error:
      raise RewardError(
        "code: neither metadata 'tests' nor an answer that is a JSON list of"
        f" tests: {shorten(answer)}"
      ) from error
  limits = {"cpu": time_limit, "memory": memory_limit}
  verdicts = judge_tests(
    extract_program(completion),
    tests,
    sandbox.Limits(**{k: v for k, v in limits.items() if v is not None}),
    unsafe=mode.endswith("-unsafe"),
    stop_at_failure=mode.startswith("binary"),
  )
  if mode.startswith("binary"):
    return float(all(verdicts))
  return sum(verdicts) / len(verdicts)


# The sandbox enforces the limits; the pool must not.
run_tests.time_limit = None
run_tests.modes = MODES
