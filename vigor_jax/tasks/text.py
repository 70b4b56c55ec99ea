"""Tasks made of texts: options, rendering, lengths, splits, warm start.

Loaders (`jsonl.py`, `datasets.py`, `procedural.py`) bring lists of examples;
this module renders them, registers a seqio Task that tokenises and filters
them, and reads it into memory once.
"""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vigor_jax.tasks import base, records, templates, vocabularies
from vigor_jax.tasks.characters import Vocabulary
from vigor_jax.tasks.stream import FixedSource, Prompts


@dataclasses.dataclass(frozen=True)
class Options:
  """Fields of `config.task` that all text tasks share.

  Attributes:
    tokenizer: a folder with tokenizer.json, that file, or a .gguf file;
      empty: bytes.
    template: a name in `templates.TEMPLATES`; empty: the task's own.
    max_prompt_length: in tokens of the rendered prompt; exactly as many are
      kept, longer prompts are dropped and counted.
    max_completion_length: in tokens, EOS included.
    skip_malformed: count records that cannot be used instead of stopping.
    stop_strings: texts that end a completion, besides EOS; separated by "|".
  """

  tokenizer: str = ""
  template: str = ""
  max_prompt_length: int = 1024
  max_completion_length: int = 1024
  skip_malformed: bool = False
  stop_strings: str = ""

  def validate(self) -> None:
    """Raises ValueError that names the field and the legal values."""
    if self.template:
      templates.check(self.template)
    for name in ("max_prompt_length", "max_completion_length"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
    if self.stop_strings and not all(self.stop_strings.split("|")):
      raise ValueError(
        f"stop_strings must not hold an empty one, got {self.stop_strings!r}"
      )


def problem_of(reward: str) -> Callable[[str], str | None] | None:
  """A reward's own check of gold answers, where it has one.

  A reward's module may define `problem(answer) -> str | None`: what is wrong
  with a gold answer that could never be judged. A name that does not resolve
  is not this function's to report: the run does, before it loads any data.
  """
  from vigor_jax.rewards import registry

  module, _, _ = registry.ALIASES.get(reward, reward).partition(":")
  if not all(part.isidentifier() for part in module.split(".")):
    return None  # a weighted sum
  try:
    return getattr(importlib.import_module(module), "problem", None)
  except ModuleNotFoundError:
    return None


def split_by_text(
  examples: list[records.Example], held_out_share: float
) -> tuple[list[records.Example], list[records.Example]]:
  """(training, held out), by a hash of the prompt: doubles fall together."""
  parts = ([], [])
  for example in examples:
    digest = hashlib.sha256(example.prompt.encode()).digest()
    value = int.from_bytes(digest[:8], "little") / 2**64
    parts[value < held_out_share].append(example)
  return parts


def _as_json(metadata: dict[str, Any]) -> str:
  """What JSON cannot hold (a date out of a .parquet) becomes its text."""
  return json.dumps(metadata, default=str)


def _as_seqio(
  examples: list[records.Example], texts: list[str]
) -> Iterator[dict[str, Any]]:
  for uid, (example, text) in enumerate(zip(examples, texts)):
    target = example.completion
    if target is None:
      target = example.answer
    yield {
      "inputs": text,
      "targets": target,
      "answer": example.answer,
      "metadata": _as_json(example.metadata),
      "uid": uid,
    }


@dataclasses.dataclass
class _Imitation:
  """Warm-start batches over the rows whose completion is short enough."""

  source: FixedSource
  prompts: list[np.ndarray]
  completions: list[np.ndarray]

  @property
  def longest(self) -> int:
    """Tokens of the longest prompt and completion together."""
    return max(len(p) + len(c) for p, c in zip(self.prompts, self.completions))

  def __call__(self, seed: int, step: int, batch: int) -> base.SftBatch:
    positions = np.arange(step * batch, (step + 1) * batch)
    rows = self.source.rows(seed, positions).tolist()
    return [self.prompts[i] for i in rows], [self.completions[i] for i in rows]


def _imitation(prompts, targets, limit) -> tuple[_Imitation | None, int]:
  """Rows with a completion of at most `limit` ids, and how many have not."""
  rows = [i for i, ids in enumerate(targets) if 1 < len(ids) <= limit]
  left_out = len(targets) - len(rows)
  if not rows:
    return None, left_out
  prompts = prompts.take(rows)
  completions = [targets[i] for i in rows]
  source = FixedSource(prompts)
  return _Imitation(source, prompts.tokens, completions), left_out


def first_of(prompts: Prompts) -> Callable[[int], Prompts]:
  """n -> the first n prompts."""

  def held_out(n: int) -> Prompts:
    # A finite benchmark is used whole; it has no more to give.
    return prompts.take(range(min(n, len(prompts))))

  return held_out


def _drop_all(name: str, split: str, texts, vocabulary: Vocabulary, limit: int):
  shortest = min(len(vocabulary.encode(t)) for t in texts)
  raise ValueError(
    f"task {name!r}: all {len(texts)} {split} prompts are longer than"
    f" max_prompt_length={limit}; the shortest rendered prompt has {shortest}"
    " tokens"
  )


def build(
  name: str,
  options: Options,
  *,
  train: records.Loaded | None,
  evaluation: records.Loaded | None,
  template: str,
  reward: str,
) -> base.Task:
  """The task of these examples.

  Args:
    name: the task's short name.
    options: the shared fields are read from it.
    train: training examples; None for a task that only evaluates.
    evaluation: held-out examples, if there are any.
    template: used unless the options name one.
    reward: default reward function.

  Raises:
    ValueError: a template the vocabulary cannot render, or no prompt that is
      short enough.
  """
  from vigor_jax.tasks import seqio_tasks

  vocabulary = vocabularies.load(options.tokenizer)
  template = options.template or template
  splits = {}
  if train is not None:
    splits["train"] = train
  if evaluation is not None and evaluation.examples:
    splits["evaluation"] = evaluation
  texts = {
    split: [
      templates.render(template, e.prompt, vocabulary) for e in loaded.examples
    ]
    for split, loaded in splits.items()
  }

  digest = hashlib.sha256(base.options_digest(options).encode())
  for split, loaded in splits.items():
    for example, text in zip(loaded.examples, texts[split]):
      rest = (example.answer, example.completion, _as_json(example.metadata))
      digest.update(repr((split, text, *rest)).encode())
  full_name = f"vigor_{name}_{digest.hexdigest()[:8]}"

  def seqio_builder():
    return seqio_tasks.register(
      full_name,
      vocabulary,
      lambda split, seed: _as_seqio(splits[split].examples, texts[split]),
      {split: len(texts[split]) for split in splits},
      options.max_prompt_length,
    )

  counts, kept, targets = {}, {}, {}
  for split, loaded in splits.items():
    read = seqio_tasks.read(seqio_builder(), split)
    kept[split], targets[split] = read
    counts[f"{split}/records"] = len(loaded.examples) + loaded.skipped
    counts[f"{split}/malformed"] = loaded.skipped
    counts[f"{split}/doubles"] = loaded.doubles
    counts[f"{split}/in_evaluation"] = loaded.in_evaluation
    counts[f"{split}/too_long"] = len(loaded.examples) - len(kept[split])
    counts[f"{split}/prompts"] = len(kept[split])
    if not len(kept[split]):
      limit = options.max_prompt_length
      _drop_all(name, split, texts[split], vocabulary, limit)

  imitation = None
  if train is not None:
    imitation, counts["warm_start/left_out"] = _imitation(
      kept["train"], targets["train"], options.max_completion_length
    )
  has_evaluation = "evaluation" in kept
  return base.Task(
    name=full_name,
    vocabulary=vocabulary,
    stop_ids=vocabulary.eos_ids,
    max_prompt_length=options.max_prompt_length,
    max_completion_length=options.max_completion_length,
    reward=reward,
    source=FixedSource(kept["train"]) if train is not None else None,
    held_out=(
      first_of(kept["evaluation"]) if has_evaluation else None
    ),
    seqio_builder=seqio_builder,
    warm_start=imitation,
    longest_warm_start=imitation.longest if imitation is not None else 0,
    stop_strings=tuple(s for s in options.stop_strings.split("|") if s),
    counts=counts,
  )
