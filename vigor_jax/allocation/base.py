"""The base of every allocator, and what rules check and choose with.

An allocator decides which prompt gets the next rollout. It runs on the host,
in NumPy, sees rewards only, and never a token. `train.py` drives it so:

  groups = allocator.begin(stream, step)
  for request in allocator.rounds(groups):
    ...draw request.counts[g] rollouts of every group g; while the device does,
    allocator.meanwhile(groups); groups.add(...) them
  keep = allocator.select(groups)
  allocator.end(groups)

A step's groups and a round's request are in groups.py.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import difflib
import numbers
from typing import ClassVar

import numpy as np

from vigor_jax.allocation.groups import MAX_GROUP_SIZE, Groups, Request

TRAIN_ON = ("all", "survivors")


@dataclasses.dataclass(frozen=True)
class NoOptions:
  """Options of an allocator that has none."""

  def validate(self) -> None:
    """Nothing to check."""


class Allocator:
  """Base class. A subclass sets `name`, `Options` and writes `rounds`.

  It also sets `streaming` if it writes `grant` instead, and `opens_later` if
  requests after a step's first may open prompts: these are usually few, and a
  sampler then has a small batch for them beside its large one.

  Args:
    options: an instance of `Options`.
    prompts_per_step: prompts a fixed-size method takes per step.
    budget: rollouts per step. Round and history methods spend exactly this,
      filter and stopping methods at most this.
    seed: of the addressed random numbers.
    train_on: "all" opened groups, or the "survivors" of the rule only.

  Raises:
    ValueError: naming the field, its value, and the nearest legal values.
  """

  name: ClassVar[str] = ""
  Options: ClassVar[type] = NoOptions
  streaming: ClassVar[bool] = False
  opens_later: ClassVar[bool] = False

  def __init__(
    self,
    options,
    *,
    prompts_per_step: int,
    budget: int,
    seed: int,
    train_on: str = "all",
  ):
    for field, value in (
      ("prompts_per_step", prompts_per_step),
      ("budget", budget),
    ):
      check_int(field, value, low=1)
    check_int("seed", seed, low=0)
    if train_on not in TRAIN_ON:
      raise ValueError(f"{train_on=} must be one of {', '.join(TRAIN_ON)}")
    options.validate()
    self.options = options
    self.prompts_per_step = int(prompts_per_step)
    self.budget = int(budget)
    self.seed = int(seed)
    self.train_on = train_on
    self.max_prompts = self.prompts_per_step
    self.setup()
    largest = self.largest_group()
    if largest > MAX_GROUP_SIZE:
      raise ValueError(
        f"{self.name} can give one prompt {largest} rollouts; the limit is"
        f" {MAX_GROUP_SIZE}"
      )

  def setup(self) -> None:
    """Checks the budget and sets `max_prompts`; raises ValueError."""

  def largest_group(self) -> int:
    """Upper bound on the rollouts of one group."""
    return self.budget

  def begin(self, stream, step: int) -> Groups:
    """Peeks at the next `max_prompts` prompts; consumes nothing."""
    prompts = stream.peek(self.max_prompts)
    if len(prompts.positions) != self.max_prompts:
      raise ValueError(
        f"{self.name} needs {self.max_prompts} prompts a step, the stream"
        f" has {len(prompts.positions)}"
      )
    return Groups(step, self.seed, prompts.positions, prompts.uids)

  def rounds(self, groups: Groups) -> Iterator[Request]:
    """Requests of this step, in order.

    When the generator is resumed, every rollout it asked for has been added.
    """
    raise NotImplementedError(f"{self.name} has no rounds")

  def grant(
    self, groups: Groups, free: int, idle: int = 0
  ) -> Request | None:
    """Streaming rules: what `free` decode slots should draw now.

    Args:
      groups: the step's groups.
      free: rollouts wanted: for slots without work, and for the places in
        the queue before them.
      idle: those of them without which slots have or soon will have no work.

    Returns:
      A request of at most `free` rollouts; None when there is nothing to draw
      now: either the budget is granted, or verdicts in flight must come first.
    """
    raise NotImplementedError(f"{self.name} does not stream")

  def meanwhile(self, groups: Groups) -> None:
    """Does what the next decision can have done for it before the verdicts.

    Rules with rounds only: called after each request, while the device
    decodes. Whether it is called changes no decision.
    """

  def select(self, groups: Groups) -> np.ndarray:
    """bool [max_prompts]: groups that are trained on."""
    if self.train_on == "all":
      return groups.opened.copy()
    return groups.opened & self.survivors(groups)

  def survivors(self, groups: Groups) -> np.ndarray:
    """bool [max_prompts]: groups the rule kept to its end."""
    return groups.opened.copy()

  def keep_rollouts(self, groups: Groups, group, sample, reward) -> np.ndarray:
    """bool [k]: rollouts that are trained on.

    Args:
      groups: the step's groups.
      group: int [k], group of each rollout.
      sample: int [k], sample index within the group.
      reward: float [k].
    """
    del sample, reward
    return self.select(groups)[np.asarray(group)]

  def end(self, groups: Groups) -> None:
    """Updates the history once the step's rewards are complete."""

  def look_ahead(self, stream) -> None:
    """Does what the next `begin` can have done for it in advance.

    Called after `end`, while the device updates the policy; a checkpoint may
    be written between it and `begin`. It consumes nothing, and of what
    `state_dict` holds it changes only what `begin` would change alike.
    """
    stream.peek(self.max_prompts)

  def state_dict(self) -> dict:
    """History as lists and numbers (JSON-able)."""
    return {}

  def load_state_dict(self, state: dict) -> None:
    """Restores `state_dict`'s value."""
    expected = set(self.state_dict())
    if set(state) != expected:
      raise ValueError(
        f"state of allocator {self.name} has fields {sorted(state)},"
        f" expected {sorted(expected)}"
      )
    self.restore(state)

  def restore(self, state: dict) -> None:
    """Sets the history from a checked `state`."""


def check_int(field: str, value, *, low: int, high: int | None = None) -> None:
  """Raises ValueError unless value is an integer in [low, high]."""
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole or value < low or (high is not None and value > high):
    upper = "" if high is None else f" and at most {high}"
    raise ValueError(
      f"{field}={value!r} must be an integer of at least {low}{upper}"
    )


def check_float(
  field: str, value, *, low: float, high: float, open_low: bool = False
) -> None:
  """Raises ValueError unless low <= value <= high (low < if open_low)."""
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not real or not low <= value <= high or (open_low and value == low):
    bracket = "(" if open_low else "["
    raise ValueError(
      f"{field}={value!r} must be a number in {bracket}{low}, {high}]"
    )


def check_choice(field: str, value, choices) -> None:
  """Raises ValueError unless value is one of choices; names the nearest."""
  if value not in choices:
    raise ValueError(
      f"{field}={value!r} must be one of {', '.join(choices)}"
      + nearest(str(value), choices)
    )


def nearest(name: str, choices) -> str:
  """' (did you mean x?)' for the closest name, or ''."""
  close = difflib.get_close_matches(name, list(choices), n=1)
  return f" (did you mean {close[0]!r}?)" if close else ""


def top(score, keys, count: int, eligible=None) -> np.ndarray:
  """Indices of the `count` best scores; equal scores by the largest key."""
  order = np.lexsort((-np.asarray(keys), -np.asarray(score)))
  if eligible is not None:
    order = order[np.asarray(eligible)[order]]
  return order[:count]
