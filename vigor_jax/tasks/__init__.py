"""Tasks: prompts with verifiable rewards, by name.

`REGISTRY` holds one line per task: its options (a frozen dataclass, filled
from `config.task`) and the function that builds it. Importing this package
imports NumPy and nothing heavier.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vigor_jax.tasks import (
  arithmetic,
  datasets,
  jsonl,
  mixture,
  procedural,
  stack_language,
)
from vigor_jax.tasks.base import Task, TaskDef, nearest
from vigor_jax.tasks.stream import Prompts, PromptStream

REGISTRY: dict[str, TaskDef] = {
  "arithmetic": TaskDef(arithmetic.Options, arithmetic.build),
  "jsonl": TaskDef(jsonl.Options, jsonl.build),
  "mixture": TaskDef(mixture.Options, mixture.build),
  "reasoning_gym": TaskDef(procedural.Options, procedural.build),
  "stack_language": TaskDef(stack_language.Options, stack_language.build),
  **{name: datasets.definition(name) for name in datasets.SOURCES},
}

__all__ = ["REGISTRY", "Prompts", "PromptStream", "Task", "TaskDef", "make"]


def make(spec: str | Mapping[str, Any]) -> Task:
  """Builds the task a config section describes.

  Args:
    spec: a task's name, or a mapping (an ml_collections ConfigDict will do)
      with "name" and the task's options beside it.

  Raises:
    ValueError: an unknown task or option (with the nearest one), or an option
      outside its range.
  """
  spec = {"name": spec} if isinstance(spec, str) else dict(spec)
  name = spec.pop("name", None)
  if name not in REGISTRY:
    raise ValueError(
      f"no task {name!r}: {nearest(str(name), list(REGISTRY))}"
    )
  definition = REGISTRY[name]
  legal = [f.name for f in dataclasses.fields(definition.options)]
  for field in spec:
    if field not in legal:
      raise ValueError(
        f"task {name!r} has no option {field!r}: {nearest(field, legal)}"
      )
  options = definition.options(**spec)
  options.validate()
  return definition.build(options)
