"""Allocators without a barrier: asked whenever decode slots are free.

The sampler calls `grant(groups, free)` in logical time, after adding every
verdict that is visible by then. A rule answers from what has been added and
from what it has granted itself; rollouts in flight count as granted.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation.groups import Groups, Request


class Dues:
  """Rollouts decided on but not yet given a slot, first in first out."""

  def __init__(self):
    self.queue: collections.deque[list[int]] = collections.deque()

  def put(self, group: int, count: int) -> None:
    self.queue.append([int(group), int(count)])

  def serve(self, counts: np.ndarray, free: int) -> int:
    """Moves up to `free` rollouts into `counts`; returns the slots left."""
    while free and self.queue:
      due = self.queue[0]
      served = min(free, due[1])
      counts[due[0]] += served
      due[1] -= served
      free -= served
      if not due[1]:
        self.queue.popleft()
    return free


class Streaming(base.Allocator):
  """Base of streaming rules; a subclass writes `plan` and `fill`."""

  streaming = True

  def begin(self, stream, step: int) -> Groups:
    groups = super().begin(stream, step)
    groups.plan = self.plan(groups)
    return groups

  def plan(self, groups: Groups):
    """Working notes of a new step."""
    raise NotImplementedError

  def fill(self, groups: Groups, counts: np.ndarray, free: int) -> None:
    """Adds at most `free` rollouts to `counts`, in place."""
    raise NotImplementedError

  def occupy(
    self, groups: Groups, counts: np.ndarray, idle: int
  ) -> None:
    """Adds at most `idle` rollouts to `counts`, in place.

    Called when `fill` waits for verdicts while slots have nothing to do. A
    rule that does not write this leaves them idle.
    """

  def grant(
    self, groups: Groups, free: int, idle: int = 0
  ) -> Request | None:
    left = self.budget - groups.spent
    counts = np.zeros(len(groups), np.int64)
    if free > 0 and left > 0:
      self.fill(groups, counts, min(free, left))
      idle = min(idle, left) - int(counts.sum())
      if idle > 0:
        self.occupy(groups, counts, idle)
    return groups.request(counts) if counts.any() else None

  def opening(self) -> int:
    """Rollouts that a step begins with whatever the verdicts: none.

    A rule that has some says how many. The sampler then asks for all of them
    at once, beyond its slots and places: their prompts are prefilled together,
    and the rule need not be asked while they last.
    """
    return 0

  def barrier_slots(self) -> int:
    """Slots asked for at once when the rule is run in rounds."""
    raise NotImplementedError

  def rounds(self, groups: Groups) -> Iterator[Request]:
    """The rule with a barrier after every request, for samplers in rounds."""
    while (request := self.grant(groups, self.barrier_slots())) is not None:
      yield request
