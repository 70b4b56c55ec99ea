"""What is added to a verdict before the loss sees it.

Shaped rewards train the policy; they never reach the allocation, which ranks
raw verdicts only. Lengths are counted in tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

_THINK = re.compile(r"\A\s*(?:<think>)?(?:(?!</?think>).)*</think>\s*\S", re.S)

FORMATS = {
  # At least one \boxed{...} whose braces close.
  "boxed": lambda text: _has_box(text),
  # One closed <think> block (the template may have opened it), then text.
  "think": lambda text: (
    bool(_THINK.match(text)) and text.count("</think>") == 1
  ),
}


def _has_box(text: str) -> bool:
  start = text.rfind("\\boxed{")
  if start < 0:
    return False
  depth = 0
  for char in text[start + len("\\boxed") :]:
    depth += (char == "{") - (char == "}")
    if depth == 0:
      return True
  return False


@dataclasses.dataclass(frozen=True)
class Shaping:
  r"""shaped = verdict + format bonus - length penalty - overlong penalty.

  Attributes:
    format: name in FORMATS, or "" for none.
    format_bonus: added where the completion has that format.
    length_penalty: subtracted per 1000 tokens of a completion.
    overlong_buffer: L_cache > 0 turns on DAPO's soft overlong punishment
      (Yu et al. 2025, arXiv:2503.14476, equation 13): with L_max the limit,
      0 for L <= L_max - L_cache, (L_max - L_cache - L) / L_cache up to L_max,
      -1 beyond and where the completion was cut off.
    overlong_weight: factor on that term.
  """

  format: str = ""
  format_bonus: float = 0.0
  length_penalty: float = 0.0
  overlong_buffer: int = 0
  overlong_weight: float = 1.0

  def __post_init__(self) -> None:
    if self.format and self.format not in FORMATS:
      raise ValueError(
        f"shaping.format {self.format!r} is not one of"
        f" {', '.join(sorted(FORMATS))}"
      )
    if self.format_bonus and not self.format:
      raise ValueError("shaping.format_bonus is set but shaping.format is not")
    for field in ("length_penalty", "overlong_buffer", "overlong_weight"):
      if not 0 <= getattr(self, field) < np.inf:
        raise ValueError(
          f"shaping.{field} must be >= 0, got {getattr(self, field)!r}"
        )

  def apply(
    self,
    verdicts: np.ndarray,
    lengths: np.ndarray,
    truncated: np.ndarray,
    max_tokens: int,
    completions: Sequence[str] | None = None,
  ) -> np.ndarray:
    """Returns shaped rewards; `verdicts` stay as they are.

    Args:
      verdicts: [k] raw verdicts.
      lengths: [k] tokens of each completion, EOS included.
      truncated: [k] bool, cut off at the limit.
      max_tokens: L_max, the limit.
      completions: [k] texts; needed only with a format.

    Returns:
      float32 [k].

    Raises:
      ValueError: a shape differs, or the overlong buffer exceeds the limit.
    """
    verdicts = np.asarray(verdicts, np.float64)
    lengths = np.asarray(lengths, np.float64)
    truncated = np.asarray(truncated, bool)
    if not verdicts.shape == lengths.shape == truncated.shape:
      raise ValueError(
        f"{verdicts.shape=}, {lengths.shape=} and {truncated.shape=} differ"
      )
    shaped = verdicts - self.length_penalty * lengths / 1000.0
    if self.overlong_buffer:
      if self.overlong_buffer > max_tokens:
        raise ValueError(
          f"shaping.overlong_buffer {self.overlong_buffer} is longer than"
          f" the completion limit {max_tokens}"
        )
      over = (max_tokens - lengths) / self.overlong_buffer - 1.0
      over = np.where(truncated, -1.0, np.clip(over, -1.0, 0.0))
      shaped = shaped + self.overlong_weight * over
    if self.format_bonus:
      if completions is None or len(completions) != len(verdicts):
        raise ValueError("shaping with a format needs the completions' texts")
      has = FORMATS[self.format]
      shaped = shaped + self.format_bonus * np.array(
        [has(text) for text in completions], np.float64
      )
    return shaped.astype(np.float32)
