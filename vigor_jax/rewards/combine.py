"""A weighted sum of reward functions, itself a reward function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vigor_jax.rewards.verdict import RewardError, check_verdict


def _name(fn) -> str:
  return f"{fn.__module__}:{fn.__qualname__}"


class Combined:
  """verdict = sum of weight * part; weights are positive and sum to 1.

  The sum stays in [0, 1], so it is a verdict like any other. Use it for
  verified parts (say .8 * all tests pass + .2 * the program compiles); what
  is not verified belongs in `shaping`, which allocation never sees.

  Attributes:
    parts: tuple of (reward function, weight). `Scorer` judges the parts one by
      one, so that a time limit of one costs no other.
    cheap: every part is cheap.
  """

  def __init__(
    self, parts: Sequence[tuple[Callable[..., float], float]]
  ) -> None:
    self.parts = tuple((fn, float(weight)) for fn, weight in parts)
    if not self.parts:
      raise RewardError("a combined reward needs at least one part")
    for fn, weight in self.parts:
      if isinstance(fn, Combined):
        raise RewardError("a combined reward cannot contain another one")
      if not (math.isfinite(weight) and weight > 0):
        raise RewardError(
          f"weight of reward {_name(fn)} must be positive, got {weight}"
        )
    total = math.fsum(weight for _, weight in self.parts)
    if abs(total - 1.0) > 1e-6:
      raise RewardError(
        f"the weights of a combined reward must sum to 1, got {total:g} from"
        f" {[weight for _, weight in self.parts]}"
      )
    self.cheap = all(getattr(fn, "cheap", False) for fn, _ in self.parts)
    self.reward_name = " + ".join(f"{w:g}*{_name(fn)}" for fn, w in self.parts)

  def __call__(self, completion: str, answer: str, **metadata) -> float:
    return self.mix(
      [
        check_verdict(fn(completion, answer, **metadata), _name(fn), completion)
        for fn, _ in self.parts
      ]
    )

  def mix(self, verdicts: Sequence[float]) -> float:
    """The weighted sum of one verdict per part, clipped against rounding."""
    total = math.fsum(w * v for (_, w), v in zip(self.parts, verdicts))
    return min(1.0, max(0.0, total))
