"""Your own data: one {"prompt": ..., "answer": ..., ...} record a line.

Further fields reach the reward function as keyword arguments; "completion",
where present, is what a supervised warm start imitates (else the answer is).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vigor_jax.tasks import base, records, text


@dataclasses.dataclass(frozen=True)
class Options(text.Options):
  """Fields of `config.task` for local files; see `text.Options` for more.

  Attributes:
    path: training records: a file, a folder or a pattern (.jsonl, .jsonl.gz,
      .parquet), local or gs://.
    eval_path: held-out records; empty: a share of `path`, by a hash of the
      prompt text.
    held_out_share: that share.
    reward: default reward function.
  """

  path: str = ""
  eval_path: str = ""
  held_out_share: float = 0.1
  reward: str = "exact"

  def validate(self) -> None:
    """Raises ValueError that names the field and the legal values."""
    super().validate()
    if not self.path:
      raise ValueError("path must name a file, a folder or a pattern, got ''")
    if not 0 <= self.held_out_share < 1:
      raise ValueError(
        f"held_out_share must lie in [0, 1), got {self.held_out_share}"
      )


def parse(record: Mapping[str, Any]) -> records.Example:
  """One record; raises records.DataError if it cannot be used."""
  prompt = records.text_field(record, "prompt")
  answer = records.text_field(record, "answer")
  completion = None
  if "completion" in record:
    completion = records.text_field(record, "completion")
  used = ("prompt", "answer", "completion")
  metadata = {k: v for k, v in record.items() if k not in used}
  return records.Example(prompt, answer, metadata, completion)


def build(options: Options) -> base.Task:
  """The task these options describe."""
  options.validate()
  settings = {
    "skip_malformed": options.skip_malformed,
    "problem": text.problem_of(options.reward),
  }
  train = records.load(options.path, parse, **settings)
  if options.eval_path:
    evaluation = records.load(options.eval_path, parse, **settings)
  else:
    kept, held_out = text.split_by_text(train.examples, options.held_out_share)
    if not kept:
      raise ValueError(
        f"held_out_share={options.held_out_share} leaves no training prompt of"
        f" {len(train.examples)}: lower it, or set eval_path"
      )
    train.examples = kept
    evaluation = records.Loaded(held_out)
  return text.build(
    "jsonl",
    options,
    train=train,
    evaluation=evaluation,
    template="raw",
    reward=options.reward,
  )
