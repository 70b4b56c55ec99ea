"""Rollouts as the sampler hands them out."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rollouts that ended, in logical time: by chunk, then slot.

  Attributes:
    tokens: int32 [k, L]; entries past `lengths` are 0.
    logprobs: float32 [k, L] at the sampling temperature, before truncation.
    processed_logprobs: float32 [k, L] of the distribution drawn from.
    lengths: int32 [k], stop token included.
    truncated: bool [k], hit the limit without a stop token.
    group: int32 [k] prefix row; sample: int32 [k] index in the group.
    end_chunk: int32 [k] logical time; slot: int32 [k].
    entry: int32 [k] queue entry.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  processed_logprobs: np.ndarray
  lengths: np.ndarray
  truncated: np.ndarray
  group: np.ndarray
  sample: np.ndarray
  end_chunk: np.ndarray
  slot: np.ndarray
  entry: np.ndarray

  def take(self, chosen: np.ndarray) -> Rows:
    """The rows at an index or boolean array."""
    return Rows(*[getattr(self, f.name)[chosen]
                  for f in dataclasses.fields(self)])
