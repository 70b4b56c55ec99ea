"""Runs a labelled file through a verifier before anyone trusts it.

  python -m vigor_jax.rewards.check --reward=math cases.jsonl

One JSON object per line:
  math: {"output", "gold", "verdict": bool}
  code: {"program", "tests": [...], "right": {"pass": bool, "fraction": float}}
  countdown: {"numbers", "target", "expr", "right": bool}
"id", "why" and "policy": true are optional; rows marked policy (either answer
can be defended) are listed apart and never fail the run.

Prints every disagreement and the share that is right. Exit status: 0 when all
agree, 1 when any does not, 2 when the file cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from vigor_jax import endings
from vigor_jax.rewards import code
from vigor_jax.rewards import countdown
from vigor_jax.rewards import sandbox
from vigor_jax.rewards.scorer import Scorer
from vigor_jax.rewards.verdict import RewardError, shorten


class CaseError(ValueError):
  """A line of the file is not a case; says which and why."""


@dataclasses.dataclass(frozen=True)
class Row:
  """One case: its place, its content, and the right verdict."""

  line: int
  case: dict[str, Any]
  right: Any

  @property
  def name(self) -> str:
    return str(self.case.get("id", f"line {self.line}"))


# Fields of a case by reward: the name and the types it may have.
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
  "math": {"output": (str,), "gold": (str,), "verdict": (bool,)},
  "code": {"program": (str,), "tests": (list,), "right": (dict,)},
  "countdown": {
    "numbers": (list,),
    "target": (int,),
    "expr": (str,),
    "right": (bool,),
  },
}


def _check_row(case: Any, reward: str, where: str) -> Any:
  """Returns the right verdict of a case, or raises CaseError."""
  if not isinstance(case, dict):
    raise CaseError(f"{where}: an object is needed, got {shorten(case)}")
  for field, types in _FIELDS[reward].items():
    if field not in case:
      raise CaseError(
        f"{where}: field {field!r} is missing; a {reward} case has"
        f" {', '.join(_FIELDS[reward])}"
      )
    value = case[field]
    boolean = isinstance(value, bool) and bool not in types
    if not isinstance(value, types) or boolean:
      raise CaseError(
        f"{where}: field {field!r} must be of type {types[0].__name__}, got"
        f" {shorten(value)}"
      )
  if not isinstance(case.get("policy", False), bool):
    raise CaseError(f"{where}: field 'policy' must be true or false")
  if reward == "math":
    return case["verdict"]
  try:  # Contents that the reward itself refuses.
    if reward == "countdown":
      countdown.verify("", "", numbers=case["numbers"], target=case["target"])
      return case["right"]
    code.check_tests(case["tests"])
  except RewardError as error:
    raise CaseError(f"{where}: {error}") from error
  right = case["right"]
  share = right.get("fraction")
  if not isinstance(right.get("pass"), bool) or (
    isinstance(share, bool)
    or not isinstance(share, (int, float))
    or not 0 <= share <= 1
  ):
    raise CaseError(
      f'{where}: field \'right\' must be {{"pass": bool, "fraction": 0 to'
      f" 1}}, got {shorten(right)}"
    )
  return {"pass": right["pass"], "fraction": float(share)}


def read(path: pathlib.Path, reward: str) -> list[Row]:
  """The rows of a file, in order; blank lines are skipped.

  Raises:
    OSError: the file cannot be read.
    CaseError: no text, or a line is no case (file and line).
  """
  try:
    text = path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise CaseError(f"{path}: not a text in UTF-8 ({error})") from error
  rows = []
  # Only line feeds separate lines: JSON strings may hold other separators.
  for number, line in enumerate(text.split("\n"), 1):
    if not line.strip():
      continue
    where = f"{path}:{number}"
    try:
      case = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise CaseError(f"{where}: not JSON: {error}") from error
    rows.append(Row(number, case, _check_row(case, reward, where)))
  if not rows:
    raise CaseError(f"{path}: no cases")
  return rows


def _math(rows: list[Row]) -> list[Any]:
  with Scorer("math") as scorer:
    out = scorer.score(
      [row.case["output"] for row in rows], [row.case["gold"] for row in rows]
    )
  return [bool(v) for v in out]


def _countdown(rows: list[Row]) -> list[Any]:
  return [
    bool(
      countdown.verify(
        row.case["expr"],
        "",
        numbers=row.case["numbers"],
        target=row.case["target"],
      )
    )
    for row in rows
  ]


def _code(rows: list[Row], limits: sandbox.Limits, unsafe: bool) -> list[Any]:
  out = []
  for row in rows:
    passed = code.judge_tests(
      row.case["program"], row.case["tests"], limits, unsafe
    )
    out.append({"pass": all(passed), "fraction": sum(passed) / len(passed)})
  return out


def _agree(right: Any, got: Any) -> bool:
  if isinstance(right, dict):
    return right["pass"] == got["pass"] and (
      abs(right["fraction"] - got["fraction"]) < 1e-6
    )
  return right == got


def report(
  rows: list[Row], verdicts: list[Any], show: Callable[[str], None] = print
) -> bool:
  """Prints the disagreements and the share right; True when all agree."""
  wrong: dict[bool, list[str]] = {False: [], True: []}
  count = {False: 0, True: 0}
  for row, got in zip(rows, verdicts):
    policy = bool(row.case.get("policy"))
    count[policy] += 1
    if not _agree(row.right, got):
      content = {
        key: value
        for key, value in row.case.items()
        if key in ("output", "gold", "program", "numbers", "target", "expr")
      }
      lines = [f"{row.name} (line {row.line}): got {got}, right is {row.right}"]
      lines += [f"    {k}: {shorten(v, 200)}" for k, v in content.items()]
      if row.case.get("why"):
        lines.append(f"    why: {row.case['why']}")
      wrong[policy].append("\n".join(lines))
  for text in wrong[False]:
    show(f"WRONG  {text}")
  right = count[False] - len(wrong[False])
  if count[False]:
    show(f"{right} of {count[False]} right ({right / count[False]:.1%})")
  if count[True]:
    for text in wrong[True]:
      show(f"policy {text}")
    agreed = count[True] - len(wrong[True])
    show(
      f"policy rows, either answer can be defended: {agreed} of {count[True]}"
      " as the file says"
    )
  return not wrong[False]


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog="python -m vigor_jax.rewards.check",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("file", type=pathlib.Path, metavar="FILE.jsonl")
  parser.add_argument("--reward", choices=sorted(_FIELDS), required=True)
  parser.add_argument(
    "--time_limit",
    type=float,
    default=sandbox.Limits.cpu,
    help="code: CPU seconds per test (default %(default)s)",
  )
  parser.add_argument(
    "--unsafe",
    action="store_true",
    help="code: run without a sandbox where this machine has none",
  )
  options = parser.parse_args(arguments)
  with endings.one_message():
    limits = sandbox.Limits(cpu=options.time_limit)
    rows = read(options.file, options.reward)
    if options.reward == "math":
      verdicts = _math(rows)
    elif options.reward == "countdown":
      verdicts = _countdown(rows)
    else:
      verdicts = _code(rows, limits, options.unsafe)
    return 0 if report(rows, verdicts) else 1


if __name__ == "__main__":
  sys.exit(main())
