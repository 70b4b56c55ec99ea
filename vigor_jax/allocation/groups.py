"""A step's groups: the prompts a rule may draw from, and their rewards so far.

Decisions depend on (seed, step, what has been added), never on the order in
which rollouts arrived: sums of rewards are exact (see `Groups.add`) and ties
are broken by addressed random numbers (`addressed_uniform`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vigor_jax.allocation import variance
from vigor_jax.allocation.addressed import addressed_uniform

# Rewards enter the statistics as multiples of 2**-20 (about 1e-6). Sums of up
# to 2**13 of them and of their squares are then exact in float64, so they do
# not depend on the order of arrival.
REWARD_QUANTUM = 2.0**-20
MAX_GROUP_SIZE = 2**13


@dataclasses.dataclass
class Request:
  """What a round asks for.

  Attributes:
    opened: int32 [k], group indices opened by this request, ascending. They
      need a prefill.
    counts: int32 [max_prompts], rollouts to draw now per group.
  """

  opened: np.ndarray
  counts: np.ndarray

  @property
  def total(self) -> int:
    return int(self.counts.sum())


class Groups:
  """One step's candidate prompts and the rewards seen so far.

  A group is a prompt's rollouts. Its index is the prompt's index in the pool
  peeked from the stream, unless the rule looked at more prompts and chose: then
  `rows` says where it lay. Arrays are [max_prompts] but for `skipped`
  and `taken`.

  Attributes:
    step, seed: the address of this step's random numbers.
    positions: int64, position of each prompt in the stream.
    uids: int64, identity of the prompt in its data set (history goes by it).
    chosen: the prompts were chosen out of a larger peek.
    opened: bool, the prompt has been granted a rollout.
    consumed: bool, opened or skipped for good; the others return to the stream.
    counts: int64, rollouts granted so far, in flight included.
    n: float64, rollouts finished.
    reward_sum, reward_sq: float64, sums of finished rewards and squares.
    round_counts: counts of each request, for the report.
    messages: what the allocator had to warn about.
    plan: the allocator's own working notes for this step.
  """

  def __init__(
    self, step: int, seed: int, positions, uids, rows=None, skipped=None
  ):
    self.step = int(step)
    self.seed = int(seed)
    self.positions = np.asarray(positions, np.int64)
    self.uids = np.asarray(uids, np.int64)
    if self.positions.shape != self.uids.shape or self.positions.ndim != 1:
      raise ValueError(
        "positions and uids must be vectors of one length, got shapes"
        f" {self.positions.shape} and {self.uids.shape}"
      )
    size = len(self.positions)
    self.chosen = rows is not None
    self._rows = rows
    self._skipped = skipped
    self.opened = np.zeros(size, bool)
    self.consumed = np.zeros(size, bool)
    self.counts = np.zeros(size, np.int64)
    self.n = np.zeros(size)
    self.reward_sum = np.zeros(size)
    self.reward_sq = np.zeros(size)
    self.round_counts: list[np.ndarray] = []
    self.messages: list[str] = []
    self.plan: Any = None

  def __len__(self) -> int:
    return len(self.positions)

  @property
  def rows(self) -> np.ndarray:
    """int64 [max_prompts], index of each prompt in the peek."""
    return np.asarray(self._rows) if self.chosen else np.arange(len(self))

  @property
  def skipped(self) -> np.ndarray:
    """bool [prompts peeked], looked at and rejected for good."""
    none = np.zeros(len(self), bool)
    return none if self._skipped is None else self._skipped

  @property
  def taken(self) -> np.ndarray:
    """bool [prompts peeked]: used up, as the stream's `advance` takes it."""
    if not self.chosen:
      return self.consumed
    taken = self.skipped.copy()
    taken[self.rows] = self.consumed
    return taken

  @property
  def passed_over(self) -> int:
    """Prompts used up without a rollout."""
    return int(self.taken.sum() - self.opened.sum())

  def request(self, counts) -> Request:
    """Grants `counts` [max_prompts] more rollouts and books them."""
    counts = np.asarray(counts)
    if counts.shape != self.counts.shape or counts.min(initial=0) < 0:
      raise ValueError(
        f"counts must be {len(self)} non-negative integers, got {counts}"
      )
    new = (counts > 0) & ~self.opened
    self.counts += counts
    self.opened |= new
    self.consumed |= new
    booked = counts.astype(np.int32)
    self.round_counts.append(booked)
    return Request(np.flatnonzero(new).astype(np.int32), booked.copy())

  def add(self, group_ids, rewards) -> None:
    """Adds finished rollouts: group_ids int [k], rewards float [k] in [0, 1].

    Raises:
      ValueError: for a group that does not exist, a reward outside [0, 1], or
        more rollouts of a group than were requested. Nothing is added then.
    """
    ids = np.asarray(group_ids, np.int64)
    rewards = np.asarray(rewards, np.float64)
    if ids.shape != rewards.shape or ids.ndim != 1:
      raise ValueError(f"{ids.size} group ids came with {rewards.size} rewards")
    if not ids.size:
      return
    if ids.min() < 0:
      raise ValueError(f"group {ids.min()} does not exist: they count from 0")
    # Written so that NaN fails.
    if not (rewards.min() >= 0 and rewards.max() <= 1):
      bad = ~((rewards >= 0) & (rewards <= 1))
      i = int(np.flatnonzero(bad)[0])
      raise ValueError(
        f"reward {rewards[i]} of group {ids[i]} (stream position"
        f" {self.positions[ids[i]]}) is not a number in [0, 1]"
      )
    self.book(ids, rewards)

  def book(self, ids: np.ndarray, rewards: np.ndarray) -> None:
    """`add` of ids >= 0 and of rewards that are known to lie in [0, 1].

    Raises:
      ValueError: for a group that does not exist, or more rollouts of a group
        than were requested. Nothing is added then.
    """
    size = len(self)
    arrived = np.bincount(ids, minlength=size)
    if len(arrived) > size:
      raise ValueError(
        f"group {len(arrived) - 1} does not exist: there are {size}"
      )
    over = self.n + arrived > self.counts
    if over.any():
      g = int(np.flatnonzero(over)[0])
      raise ValueError(
        f"group {g} got {int(self.n[g] + arrived[g])} rollouts, but only"
        f" {self.counts[g]} were requested"
      )
    units = np.rint(np.asarray(rewards, np.float64) / REWARD_QUANTUM)
    self.n += arrived
    self.reward_sum += np.bincount(ids, units, size) * REWARD_QUANTUM
    self.reward_sq += np.bincount(ids, units * units, size) * REWARD_QUANTUM**2

  @property
  def spent(self) -> int:
    """Rollouts granted so far in this step."""
    return int(self.counts.sum())

  def mean(self) -> np.ndarray:
    """Mean reward per group, 0 where nothing has finished: [max_prompts]."""
    return self.reward_sum / np.maximum(self.n, 1)

  def variance(self, kind: str = "plugin") -> np.ndarray:
    """Estimated reward variance per group [max_prompts], see variance.py."""
    return variance.estimate(kind, self.n, self.reward_sum, self.reward_sq)

  def mixed(self) -> np.ndarray:
    """bool [max_prompts]: finished rollouts disagree."""
    return self.variance() > variance.ZERO_TOLERANCE

  def zero_variance(self) -> np.ndarray:
    """bool [max_prompts]: some rollout finished, and all rewards agree."""
    return (self.n > 0) & ~self.mixed()

  def mixed_count(self) -> int:
    """Distinct groups whose rewards disagree."""
    return int(self.mixed().sum())

  def zero_variance_share(self) -> float:
    """Zero-variance groups / groups with a finished rollout."""
    return float(self.zero_variance().sum() / max((self.n > 0).sum(), 1))

  def zero_variance_rollout_share(self) -> float:
    """Rollouts in zero-variance groups / all finished rollouts."""
    return float(self.n[self.zero_variance()].sum() / max(self.n.sum(), 1))

  def variance_per_rollout(self) -> float:
    """V = sum n v / sum n with v the sample variance (ddof 1).

    Unbiased under uniform. Biased up under adaptive rules: the rollouts that
    chose a prompt also measure it. Fresh rollouts give the unbiased figure.
    """
    v = self.variance("unbiased")
    return float((self.n * v).sum() / max(self.n.sum(), 1))

  def uniforms(self, round_index, purpose: int = 0) -> np.ndarray:
    """Addressed uniform numbers, one per group: float64 [max_prompts].

    For a range of R rounds [R, max_prompts], at less than R times the cost.
    """
    return addressed_uniform(
      self.seed, self.step, round_index, self.positions, purpose
    )

  def warn(self, message: str) -> None:
    """Keeps a message for the trainer, which prints it."""
    self.messages.append(message)
