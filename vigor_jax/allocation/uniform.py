"""Uniform allocation: n rollouts for every prompt (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Iterator
import math

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation.groups import MAX_GROUP_SIZE, Groups, Request


class Uniform(base.Allocator):
  """One round, budget / prompts_per_step rollouts for every prompt."""

  name = "uniform"

  def setup(self) -> None:
    self.group_size = per_prompt(self.name, self.budget, self.prompts_per_step)

  def largest_group(self) -> int:
    return self.group_size

  def rounds(self, groups: Groups) -> Iterator[Request]:
    yield groups.request(np.full(len(groups), self.group_size))


def per_prompt(name: str, budget: int, prompts: int) -> int:
  """budget / prompts, or a ValueError with the legal values around it."""
  if budget % prompts == 0:
    return budget // prompts
  small = [d for d in range(1, math.isqrt(budget) + 1) if budget % d == 0]
  divisors = small + [budget // d for d in small]
  nearest = (
    max((d for d in divisors if d < prompts), default=None),
    min((d for d in divisors if d > prompts), default=None),
  )
  sizes = [
    str(d) for d in nearest
    if d is not None and budget // d <= MAX_GROUP_SIZE
  ]
  with_budget = (
    f" with this budget prompts_per_step = {' or '.join(sizes)} works,"
    if sizes else ""
  )
  low = budget // prompts * prompts
  budgets = [b for b in (low, low + prompts) if b > 0]
  raise ValueError(
    f"{name}: budget={budget} is not a multiple of"
    f" prompts_per_step={prompts};{with_budget} with these prompts budget ="
    f" {' or '.join(map(str, budgets))}"
  )
