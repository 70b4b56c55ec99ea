"""Suites: several tasks to evaluate one policy on, written in one line.

    math(prompts=500), aime24(samples=32), jsonl(path="my.jsonl", label="my")

A member is a task's name, with what differs from the run's own settings.
"""

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from vigor_jax import tasks
from vigor_jax.tasks import base, text

_OWN = ("label", "prompts", "samples")


@dataclasses.dataclass(frozen=True)
class Member:
  """One task of a suite.

  Attributes:
    task: its registered name.
    label: what its metrics are called; the name unless it says otherwise.
    prompts: held-out prompts; 0: as many as the evaluation says.
    samples: completions of each; 0: as many as the evaluation says.
    options: what was written of the task's own options.
  """

  task: str
  label: str
  prompts: int
  samples: int
  options: Mapping[str, Any]


def parse(suite: str) -> tuple[Member, ...]:
  """The members of a suite.

  Args:
    suite: names separated by commas, each with `(option=value, ...)` or not;
      values are Python literals. Beside the task's options there are `prompts`,
      `samples` and `label`.

  Raises:
    ValueError: it cannot be read, names no task or option (the nearest is
      named), or uses a label twice.
  """
  try:
    nodes = ast.parse(f"[{suite}]", mode="eval").body.elts
  except SyntaxError:
    nodes = []
  if not nodes:
    raise ValueError(
      "expected names of tasks like 'math, aime24(samples=32)', got"
      f" {suite!r}"
    )
  members = [_member(node) for node in nodes]
  labels = [m.label for m in members]
  for label in labels:
    if labels.count(label) > 1:
      raise ValueError(
        f"{label!r} is there twice: give one of them a label, as in"
        f" {label}(label='{label}_2', ...)"
      )
  return tuple(members)


def _member(node: ast.expr) -> Member:
  call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
  name = ast.unparse(call.func)
  if name not in tasks.REGISTRY:
    near = base.nearest(name, [*tasks.REGISTRY])
    raise ValueError(f"no task {name!r}: {near}")
  try:
    if call.args:
      raise ValueError
    given = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
  except ValueError:
    raise ValueError(
      f"{ast.unparse(node)}: what stands in brackets must be option=value with"
      " plain values"
    ) from None
  options = tasks.REGISTRY[name].options
  legal = [*_OWN, *(f.name for f in dataclasses.fields(options))]
  for field in given:
    if field not in legal:
      raise ValueError(
        f"task {name!r} has no option {field!r}: {base.nearest(field, legal)}"
      )
  label = given.pop("label", name)
  # It becomes a part of metrics' keys and of file names.
  if not isinstance(label, str) or not re.fullmatch(r"[\w.-]+", label):
    raise ValueError(
      f"label must be letters, digits, '_', '.' or '-', got {label!r}"
    )
  counts = [given.pop(field, 0) for field in ("prompts", "samples")]
  for field, count in zip(("prompts", "samples"), counts):
    if type(count) is not int or count < 0:
      raise ValueError(f"{name}: {field} must be >= 1, got {count!r}")
  try:
    options(**given).validate()
  except TypeError as error:
    raise ValueError(f"{ast.unparse(node)}: {error}") from error
  return Member(name, label, *counts, given)


def build(member: Member, shared: Mapping[str, Any], folder: str) -> base.Task:
  """The task of a member.

  Args:
    member: see `Member`.
    shared: options of the run's own task; those that every text task has
      (tokenizer, template, lengths, stop strings) hold here too.
    folder: a folder with a sub-folder for each set, or "".
  """
  options = tasks.REGISTRY[member.task].options
  common = {f.name for f in dataclasses.fields(text.Options)}
  legal = {f.name for f in dataclasses.fields(options)}
  given = {k: v for k, v in shared.items() if k in common & legal}
  if folder and "folder" in legal:
    given["folder"] = f"{folder.rstrip('/')}/{member.task}"
  return tasks.make({"name": member.task, **given, **member.options})
