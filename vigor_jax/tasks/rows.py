"""Drawn examples: padded arrays, and prompts that are read out of them.

A rule that looks at many prompts and opens few needs the ids of all and the
text of none. So what else there is of a drawn prompt is made when it is first
asked for, and choosing among prompts indexes a few arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from vigor_jax.tasks import base
from vigor_jax.tasks.characters import Vocabulary
from vigor_jax.tasks.stream import Prompts


@dataclasses.dataclass
class Rows:
  """Drawn examples as padded arrays; pad is 0.

  Attributes:
    prompts: int32 [rows, n] prompt ids, 0 from prompt_lengths on.
    prompt_lengths: int [rows].
    completions: int32 [rows, m] gold ids, EOS included.
    completion_lengths: int [rows], EOS included.
    levels: int [rows] number of badly taught steps.
    metadata: further arrays [rows, ...], by keyword of the reward.
  """

  prompts: np.ndarray
  prompt_lengths: np.ndarray
  completions: np.ndarray
  completion_lengths: np.ndarray
  levels: np.ndarray
  metadata: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def keep(self, rows: np.ndarray | slice) -> "Rows":
    """The given rows of every array."""
    return Rows(
      self.prompts[rows],
      self.prompt_lengths[rows],
      self.completions[rows],
      self.completion_lengths[rows],
      self.levels[rows],
      {k: v[rows] for k, v in self.metadata.items()},
    )

  @staticmethod
  def concatenate(parts: list["Rows"]) -> "Rows":
    """All parts in one."""
    arrays = [
      np.concatenate([getattr(part, f.name) for part in parts])
      for f in dataclasses.fields(Rows)[:-1]
    ]
    keys = parts[0].metadata
    metadata = {k: np.concatenate([p.metadata[k] for p in parts]) for k in keys}
    return Rows(*arrays, metadata)

  def lists(self) -> base.SftBatch:
    """Prompt ids and completion ids without padding."""
    completions = zip(self.completions, self.completion_lengths.tolist())
    return self.prompt_lists(), [row[:n] for row, n in completions]

  def prompt_lists(self) -> list[np.ndarray]:
    """Prompt ids without padding."""
    prompts = zip(self.prompts, self.prompt_lengths.tolist())
    return [row[:n] for row, n in prompts]


class DrawnPrompts(Prompts):
  """Prompts over the arrays they were drawn as; see `Prompts`.

  Attributes:
    rows: what was drawn, a row per prompt.
    tokens, texts, answers, metadata: made when first asked for.
  """

  def __init__(self, positions, uids, rows: Rows, vocabulary: Vocabulary):
    self.positions, self.uids = positions, uids
    self.rows, self._vocabulary = rows, vocabulary

  @classmethod
  def at(cls, first: int, rows: Rows, vocabulary: Vocabulary):
    """Rows as prompts at the positions from `first` on."""
    positions = np.arange(first, first + len(rows.levels))
    return cls(positions, positions.copy(), rows, vocabulary)

  def __len__(self) -> int:
    return len(self.positions)

  @property
  def padded(self) -> tuple[np.ndarray, np.ndarray]:
    """Prompt ids int32 [k, n], and how many of a row are the prompt's: [k]."""
    return self.rows.prompts, self.rows.prompt_lengths

  @functools.cached_property
  def tokens(self) -> list[np.ndarray]:
    return self.rows.prompt_lists()

  @functools.cached_property
  def texts(self) -> list[str]:
    rows = self.rows
    return self._vocabulary.decode_batch(rows.prompts, rows.prompt_lengths)

  @functools.cached_property
  def answers(self) -> list[str]:
    rows = self.rows
    return self._vocabulary.decode_batch(
      rows.completions, rows.completion_lengths
    )

  @functools.cached_property
  def metadata(self) -> list[dict[str, Any]]:
    columns = {"level": self.rows.levels.tolist()}
    if not self.rows.metadata:
      return [{"level": level} for level in columns["level"]]
    columns |= {k: value.tolist() for k, value in self.rows.metadata.items()}
    names = list(columns)
    return [dict(zip(names, values)) for values in zip(*columns.values())]

  def take(self, rows: Sequence[int]) -> "DrawnPrompts":
    rows = np.asarray(rows, np.int64)
    return DrawnPrompts(
      self.positions[rows],
      self.uids[rows],
      self.rows.keep(rows),
      self._vocabulary,
    )

  def joined(self, others: Sequence[Prompts]) -> Prompts:
    parts = [self, *others]
    if any(
      not isinstance(p, DrawnPrompts) or p._vocabulary is not self._vocabulary
      for p in others
    ):
      return super().joined(others)
    return DrawnPrompts(
      np.concatenate([p.positions for p in parts]),
      np.concatenate([p.uids for p in parts]),
      Rows.concatenate([p.rows for p in parts]),
      self._vocabulary,
    )
