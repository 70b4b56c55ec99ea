"""From the records of published data sets to examples, one small parser each.

Every parser takes a record as its publisher wrote it and returns an Example,
or raises records.DataError without file and line (`records.load` adds them).
"""

import ast
import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from typing import Any

from vigor_jax.rewards import answer_text
from vigor_jax.tasks.records import DataError, Example, text_field

Record = Mapping[str, Any]


def _first_text(record: Record, *names: str) -> str:
  """The first of these fields that the record has."""
  for name in names:
    if record.get(name) is not None:
      return text_field(record, name)
  raise DataError(f"none of the fields {names} is there: {sorted(record)}")


def _answer(record: Record, *names: str) -> str:
  """A gold answer; published sets write whole numbers in many ways."""
  for name in names:
    value = record.get(name)
    if value is None:
      continue
    if isinstance(value, list | tuple):
      if not value:
        raise DataError(f"field {name!r} is empty")
      return ", ".join(_answer({name: v}, name) for v in value)
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
      return str(value)
    if isinstance(value, float):
      return repr(value)
    return text_field(record, name).strip()
  raise DataError(f"none of the fields {names} is there: {sorted(record)}")


def boxed_answer(solution: str) -> str:
  r"""Content of the last \boxed{} of a worked solution."""
  boxes = answer_text.boxes(solution)
  if not boxes or not boxes[-1][2].strip():
    raise DataError(f"no boxed answer in the solution {solution[-60:]!r}")
  return boxes[-1][2].strip()


def gsm8k(record: Record) -> Example:
  """The answer stands after "####", thousands separators and all."""
  solution = text_field(record, "answer")
  head, mark, tail = solution.rpartition("####")
  answer = tail.strip().replace(",", "")
  if not mark or not answer:
    raise DataError(f"no '#### answer' at the end of {solution[-60:]!r}")
  # Calculator annotations such as <<48/2=24>> are not meant to be read.
  steps = re.sub(r"<<[^>]*>>", "", head).strip()
  completion = f" {steps}\nThe answer is \\boxed{{{answer}}}."
  return Example(text_field(record, "question"), answer, {}, completion)


def competition_math(record: Record) -> Example:
  """MATH: the answer is boxed in the solution, or has its own field."""
  solution = text_field(record, "solution")
  if record.get("answer") is None:
    answer = boxed_answer(solution)
  else:
    answer = _answer(record, "answer")
  metadata = {}
  level = re.search(r"\d+", str(record.get("level", "")))
  if level:
    metadata["level"] = int(level[0])
  subject = record.get("subject") or record.get("type")
  if subject:
    metadata["subject"] = str(subject)
  return Example(text_field(record, "problem"), answer, metadata, solution)


_DAPO_HEAD = re.compile(
  r"^Solve the following math problem step by step\..*?\n\n", re.S
)
_DAPO_TAIL = re.compile(
  r"\n\nRemember to put your answer on its own line after \"Answer:\"\.?\s*$"
)


def dapo_math(record: Record) -> Example:
  """DAPO-Math-17k, the original layout or the processed one.

  The original wraps every question in its own instructions; they are taken
  off, since the prompt template is the run's choice.
  """
  prompt = record.get("prompt")
  if isinstance(prompt, list):
    turns = [t.get("content") for t in prompt if isinstance(t, Mapping)]
    if len(turns) != 1 or not isinstance(turns[0], str):
      raise DataError(f"field 'prompt' must hold one user turn, got {prompt!r}")
    question = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", turns[0])).strip()
    if not question:
      raise DataError("field 'prompt' is empty")
    reward = record.get("reward_model")
    if not isinstance(reward, Mapping):
      raise DataError("field 'reward_model' must be an object")
    return Example(question, _answer(reward, "ground_truth"))
  return Example(text_field(record, "prompt"), _answer(record, "solution"))


def question_answer(record: Record) -> Example:
  """AIME, AMC, Minerva, OlympiadBench, GaoKao: a question and its answer."""
  question = _first_text(record, "problem", "question")
  return Example(question, _answer(record, "answer", "final_answer"))


def _is_plain(value: Any) -> bool:
  """Whether JSON keeps the value as it is."""
  if isinstance(value, list):
    return all(_is_plain(v) for v in value)
  if isinstance(value, dict):
    return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
  return value is None or isinstance(value, bool | int | float | str)


def assertion(source: str, setup: str = "") -> dict[str, Any]:
  """A test in the form of `rewards.code` from an assert statement.

  "assert f(2) == 4" calls f(2) and expects 4, so that the comparison is made
  by the judge and not by an object the program returned; what cannot be
  written that way is called whole and expected to be True.
  """
  try:
    statement = ast.parse(source.strip()).body[0]
  except (SyntaxError, IndexError):
    raise DataError(f"not an assert statement: {source[:80]!r}") from None
  if not isinstance(statement, ast.Assert):
    raise DataError(f"not an assert statement: {source[:80]!r}")
  test = statement.test
  call, expected = f"bool({ast.unparse(test)})", True
  if (
    isinstance(test, ast.Compare)
    and len(test.ops) == 1
    and isinstance(test.ops[0], ast.Eq)
  ):
    try:
      value = ast.literal_eval(test.comparators[0])
    except ValueError:
      value = ...
    if _is_plain(value):
      call, expected = ast.unparse(test.left), value
  if setup.strip():
    call = f"exec({setup!r}, globals()) or {call}"
  return {"call": call, "expected": expected}


def mbpp(record: Record) -> Example:
  """MBPP, full or sanitized: the tests tell the function's name, so the
  prompt shows them, as in the paper (Austin et al., 2021)."""
  tests = record.get("test_list")
  if not isinstance(tests, list) or not tests:
    raise DataError("field 'test_list' must hold at least one assert")
  setup = record.get("test_setup_code") or ""
  imports = record.get("test_imports")
  if isinstance(imports, list) and imports:
    setup = "\n".join([*imports, setup])
  question = _first_text(record, "text", "prompt")
  shown = "\n".join(tests)
  prompt = f"{question}\nYour code should pass these tests:\n\n{shown}"
  code = text_field(record, "code")
  metadata = {"tests": [assertion(t, setup) for t in tests]}
  return Example(prompt, code, metadata, f"```python\n{code.strip()}\n```")


def human_eval(record: Record) -> Example:
  """HumanEval: one test, the published check of the function.

  Some checks call helpers that the prompt defines before the function; they
  are defined anew, so that a program cannot pass by changing them.
  """
  name = text_field(record, "entry_point")
  check = text_field(record, "test")
  prompt = text_field(record, "prompt")
  code = prompt + text_field(record, "canonical_solution")
  helpers, found, _ = prompt.rpartition(f"def {name}(")
  if not found:
    raise DataError(f"the prompt does not define {name!r}")
  source = helpers + check
  call = f"exec({source!r}, globals()) or check({name})"
  metadata = {"tests": [{"call": call, "expected": None}]}
  return Example(prompt, code, metadata, f"```python\n{code.strip()}\n```")


class _TextUnpickler(pickle.Unpickler):
  """Reads a pickled text; any other object could run code."""

  def find_class(self, module, name):
    raise DataError(f"private tests hold an object {module}.{name}")


def _unpacked_tests(raw: Any) -> list[Mapping[str, Any]]:
  """A test list: a list, JSON, or LiveCodeBench's packed private tests."""
  if isinstance(raw, list):
    return raw
  if not isinstance(raw, str):
    raise DataError(f"tests must be a list or a text, got {type(raw).__name__}")
  try:
    tests = json.loads(raw)
  except ValueError:
    try:
      data = zlib.decompress(base64.b64decode(raw, validate=True))
      tests = json.loads(_TextUnpickler(io.BytesIO(data)).load())
    except (ValueError, TypeError, zlib.error, pickle.UnpicklingError) as error:
      raise DataError(f"tests cannot be unpacked: {error}") from None
  if not isinstance(tests, list | dict):
    raise DataError(f"tests must be a list, got {type(tests).__name__}")
  return tests


def _info(raw: Any) -> Mapping[str, Any]:
  """A metadata field: an object, the JSON of one, or nothing."""
  if isinstance(raw, str) and raw.strip():
    try:
      raw = json.loads(raw)
    except ValueError:
      raise DataError(f"field 'metadata' is not JSON: {raw[:60]!r}") from None
  return raw if isinstance(raw, Mapping) else {}


def _function_call(function: str, arguments: list[Any]) -> str:
  return f"{function}({', '.join(map(repr, arguments))})"


def _lines_of_json(text: str) -> list[Any]:
  try:
    return [json.loads(line) for line in text.split("\n") if line.strip()]
  except ValueError:
    raise DataError(f"arguments are not JSON lines: {text[:60]!r}") from None


def _code_tests(tests: Any, function: str, owner: str) -> list[dict[str, Any]]:
  """Tests of rewards.code from the layouts that code sets use.

  Args:
    tests: rows of input and output, or {"inputs": [...], "outputs": [...]}.
    function: what function tests call; empty for programs on stdin.
    owner: "Solution()." where the function is a method.
  """
  if isinstance(tests, Mapping) and "input" in tests:
    tests = [tests]
  if isinstance(tests, Mapping):
    function = tests.get("fn_name") or function
    rows = zip(tests.get("inputs", []), tests.get("outputs", []))
    tests = [{"input": i, "output": o} for i, o in rows]
  found = []
  for test in tests:
    if not isinstance(test, Mapping) or not {"input", "output"} <= set(test):
      raise DataError(f"a test needs 'input' and 'output', got {test!r:.80}")
    given, wanted = test["input"], test["output"]
    kind = str(test.get("testtype") or test.get("type") or "")
    own = _info(test.get("metadata")).get("func_name")
    name = test.get("fn_name") or own or function
    if name and kind not in ("stdin", "stdin_stdout"):
      if isinstance(given, str):
        given, wanted = _lines_of_json(given), _lines_of_json(wanted)
      single = isinstance(wanted, list) and len(wanted) == 1
      call = _function_call(owner + name, list(given))
      found.append({"call": call, "expected": wanted[0] if single else wanted})
    else:
      join = "\n".join
      given = join(given) if isinstance(given, list) else given
      wanted = join(wanted) if isinstance(wanted, list) else wanted
      found.append({"stdin": given, "stdout": wanted})
  if not found:
    raise DataError("the problem has no tests")
  return found


_STARTER = (
  "\n\nYou will use the following starter code to write the solution:\n\n"
  "```python\n{starter}\n```"
)
_STDIN = "\n\nRead the input from stdin and write the answer to stdout."


def _livecodebench(record: Record, private: bool) -> Example:
  question = text_field(record, "question_content")
  starter = record.get("starter_code") or ""
  info = _info(record.get("metadata"))
  tests = list(_unpacked_tests(record.get("public_test_cases")))
  if private:
    tests += _unpacked_tests(record.get("private_test_cases"))
  function = info.get("func_name") or ""
  owner = "Solution()." if "class Solution" in starter else ""
  end = _STARTER.format(starter=starter) if starter.strip() else _STDIN
  metadata = {"tests": _code_tests(tests, function, owner)}
  if record.get("difficulty"):
    metadata["difficulty"] = str(record["difficulty"])
  return Example(question + end, "", metadata)


def livecodebench_public(record: Record) -> Example:
  """LiveCodeBench with the public tests: what the reward may see."""
  return _livecodebench(record, private=False)


def livecodebench_private(record: Record) -> Example:
  """LiveCodeBench with public and private tests: for evaluation."""
  return _livecodebench(record, private=True)


def deepcoder(record: Record) -> Example:
  """DeepCoder's four subsets; solutions are not imitated."""
  question = _first_text(record, "problem", "question", "description")
  info = _info(record.get("metadata"))
  starter = record.get("starter_code") or ""
  tests = _unpacked_tests(record.get("tests"))
  function = info.get("func_name") or ""
  owner = "Solution()." if "class Solution" in starter else ""
  end = _STARTER.format(starter=starter) if starter.strip() else ""
  return Example(
    question + end, "", {"tests": _code_tests(tests, function, owner)}
  )
