"""GRESO (arXiv 2506.02177): skip prompts that were all right or all wrong.

z is a prompt's latest run of zero-variance groups; it is skipped with
probability 1 - max(p_c^z, .01), c being easy (mean above 1/2, in the paper
>= .98) or hard (<= .11). After each step p_c moves by .01, down if the share of
zero-variance groups of that class is above its target, else up. What is left
goes through dynamic sampling with an adaptive batch. Paper: 256 prompts x 8,
first batch 384, later ones 64 to 384; targets 1/12 easy and 1/6 hard.
Inert until prompts come again.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from vigor_jax.allocation import base, dynamic_sampling, history
from vigor_jax.allocation.groups import Groups, Request

SKIP = 1  # purpose of the addressed numbers
LARGEST_BATCH = 1.5  # 384 / 256, of the target
SMALLEST_BATCH = 0.25  # 64 / 256
OVERSHOOT = 1.25
KEEP_FLOOR = 0.01
CLAMP = (0.05, 0.95)


@dataclasses.dataclass(frozen=True)
class GresoOptions(dynamic_sampling.DynamicSamplingOptions):
  """Options of greso; `generation` bounds the adaptive batch from above.

  Attributes:
    initial: p_easy and p_hard at the start.
    change: by which they move per step.
    easy_target, hard_target: shares of zero-variance groups aimed at.
    pool: prompts looked at per step, as a multiple of prompts_per_step.
  """

  generation: float = LARGEST_BATCH
  initial: float = 0.5
  change: float = 0.01
  easy_target: float = 1 / 12
  hard_target: float = 1 / 6
  pool: float = 3.0

  def validate(self) -> None:
    super().validate()
    base.check_float("initial", self.initial, low=CLAMP[0], high=CLAMP[1])
    for field in ("change", "easy_target", "hard_target"):
      base.check_float(field, getattr(self, field), low=0, high=1)
    base.check_float("pool", self.pool, low=1, high=100)


class Greso(dynamic_sampling.DynamicSampling):
  """History-based skipping, then dynamic sampling."""

  name = "greso"
  Options = GresoOptions

  def setup(self) -> None:
    super().setup()
    self.max_prompts = math.ceil(self.options.pool * self.prompts_per_step)
    self.keep = {"easy": self.options.initial, "hard": self.options.initial}
    self.streaks = history.History(("streak", "easy"), (0, 0))

  def skip_probability(self, uids) -> np.ndarray:
    """1 - max(p_c^z, .01); 0 for z = 0: float64 [k]."""
    rows = self.streaks.get(uids)
    streak, easy = rows[:, 0], rows[:, 1]
    p = np.where(easy > 0, self.keep["easy"], self.keep["hard"])
    return np.where(streak > 0, 1 - np.maximum(p**streak, KEEP_FLOOR), 0.0)

  def candidates(self, groups: Groups) -> np.ndarray:
    margin = groups.uniforms(0, SKIP) - self.skip_probability(groups.uids)
    kept = margin >= 0
    # The pool is all this step can look at: where less than a batch is left
    # of it, the prompts nearest to being kept are drawn after all.
    short = self.target - int(kept.sum())
    if short > 0:
      kept[base.top(margin, -groups.positions, short, ~kept)] = True
    groups.plan = ~kept
    return np.flatnonzero(kept)

  def rounds(self, groups: Groups) -> Iterator[Request]:
    yield from super().rounds(groups)
    # Prompts skipped on the way are used up for this epoch; those behind the
    # last one drawn were never looked at.
    last = int(np.flatnonzero(groups.opened)[-1])
    groups.consumed[:last] |= groups.plan[:last]

  def batch_size(self, groups: Groups, missing: int) -> int:
    largest = max(1, round(self.options.generation * self.target))
    if not groups.round_counts:
      return largest
    mixed = max(1 - groups.zero_variance_share(), 1e-6)
    wanted = math.ceil(OVERSHOOT * missing / mixed)
    smallest = max(1, round(SMALLEST_BATCH * self.target))
    return int(np.clip(wanted, min(smallest, largest), largest))

  def end(self, groups: Groups) -> None:
    done = groups.n > 0
    zero = groups.zero_variance()
    easy = groups.mean() > 0.5
    uids = groups.uids
    self.streaks.drop(uids[done & ~zero])
    rows = self.streaks.get(uids[zero])
    self.streaks.put(uids[zero], np.stack([rows[:, 0] + 1, easy[zero]], axis=1))
    number = max(int(done.sum()), 1)
    for name, members, target in (
      ("easy", zero & easy, self.options.easy_target),
      ("hard", zero & ~easy, self.options.hard_target),
    ):
      above = members.sum() / number >= target
      moved = self.keep[name] + (-1 if above else 1) * self.options.change
      self.keep[name] = float(np.clip(moved, *CLAMP))

  def state_dict(self) -> dict:
    return {"keep": dict(self.keep), "streaks": self.streaks.state_dict()}

  def restore(self, state: dict) -> None:
    self.keep = {k: float(v) for k, v in state["keep"].items()}
    self.streaks.load_state_dict(state["streaks"])
