"""What a reward function may return, and the error for anything else."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


class RewardError(ValueError):
  """A reward function, or the judge behind it, is at fault.

  It stops the run: a fault is never turned into a reward of 0.
  """


def shorten(text: Any, limit: int = 120) -> str:
  """`repr(text)`, cut in the middle to at most `limit` characters."""
  try:
    shown = repr(text)
  except Exception as error:  # A broken __repr__ must not hide the fault.
    shown = f"<{type(text).__name__} whose repr() raises {error!r}>"
  if len(shown) <= limit:
    return shown
  half = (limit - 5) // 2
  return f"{shown[:half]} ... {shown[-half:]}"


def check_verdict(
  value: Any, name: str, completion: str, index: int | None = None
) -> float:
  """Returns the verdict as a float, or raises.

  Args:
    value: what the reward function returned: a real number (Python or NumPy
      scalar, bool included) that is finite and in [0, 1].
    name: the reward function's name, for the message.
    completion: the completion it judged, for the message.
    index: the completion's position in the batch, for the message.

  Raises:
    RewardError: the value is anything else (a list, None, a string, NaN, ...).
  """
  if isinstance(value, (bool, np.bool_)):
    return float(value)
  if not isinstance(value, numbers.Real):
    problem = f"a {type(value).__name__}, not one number"
  else:
    try:
      verdict = float(value)
      problem = "outside [0, 1]" if math.isfinite(verdict) else "not finite"
      if 0.0 <= verdict <= 1.0:
        return verdict
    except OverflowError:  # An integer beyond any float.
      problem = "outside [0, 1]"
  where = "" if index is None else f" {index}"
  raise RewardError(
    f"reward {name} returned {shorten(value)} ({problem}) for completion"
    f"{where} {shorten(completion)}; a reward is one finite float in [0, 1]"
    " per completion"
  )
