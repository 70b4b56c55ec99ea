"""RolloutBuffer: the rollouts of one step, on the host, preallocated."""

from __future__ import annotations

from collections.abc import Sequence
import numbers

import numpy as np

from vigor_jax.allocation.groups import Groups


class RolloutBuffer:
  """Rows of one step in order of arrival; `order()` gives the canonical one.

  Attributes (first dimension `budget`, rows `[:size]` are filled):
    tokens: int32 [budget, L], completions, zero after their end.
    logprobs: float32 [budget, L], at the sampling temperature, before top-k,
      top-p and min-p.
    processed_logprobs: float32 [budget, L], after them.
    lengths: int32 [budget], tokens of the completion, EOS included.
    group, sample: int32 [budget], the prompt's group and the sample's index.
    reward: float32 [budget], the raw verdict: what allocation ranks.
    shaped: float32 [budget], what the loss uses; the reward until changed.
    truncated: bool [budget], ended by the length limit.
    size: rows filled.
  """

  def __init__(self, budget: int, max_new_tokens: int, groups: Groups):
    self.groups = groups
    self.tokens = np.zeros((budget, max_new_tokens), np.int32)
    self.logprobs = np.zeros((budget, max_new_tokens), np.float32)
    self.processed_logprobs = np.zeros((budget, max_new_tokens), np.float32)
    self.lengths = np.zeros(budget, np.int32)
    self.group = np.zeros(budget, np.int32)
    self.sample = np.zeros(budget, np.int32)
    self.reward = np.zeros(budget, np.float32)
    self.shaped = np.zeros(budget, np.float32)
    self.truncated = np.zeros(budget, bool)
    self.size = 0

  @property
  def budget(self) -> int:
    return len(self.lengths)

  def add(self, rows, rewards) -> None:
    """Appends finished rows with their rewards and updates the groups.

    Args:
      rows: has tokens, logprobs, processed_logprobs [k, L], zero past their
        ends as the sampler's are, lengths, group, sample, truncated [k].
      rewards: k numbers in [0, 1].

    Raises:
      ValueError: wrong count, type or range of a reward (it names the row's
        prompt and sample), a row longer than the buffer, or more rows than
        the budget or the requests allow. Nothing is added then.
    """
    group = np.asarray(rows.group)
    sample = np.asarray(rows.sample)
    count = len(group)
    rewards = check_rewards(rewards, count, self._describe(group, sample))
    if self.size + count > self.budget:
      raise ValueError(
        f"{self.size} + {count} rollouts exceed the budget of {self.budget}"
      )
    lengths = np.asarray(rows.lengths)
    width = self.tokens.shape[1]
    if count and lengths.max() > width:
      raise ValueError(
        f"a completion of {lengths.max()} tokens does not fit the buffer's"
        f" max_new_tokens={width}"
      )
    self.groups.book(group, rewards)
    new = slice(self.size, self.size + count)
    columns = min(width, rows.tokens.shape[1])
    self.tokens[new, :columns] = rows.tokens[:, :columns]
    self.logprobs[new, :columns] = rows.logprobs[:, :columns]
    self.processed_logprobs[new, :columns] = rows.processed_logprobs[
      :, :columns
    ]
    self.lengths[new] = lengths
    self.group[new] = group
    self.sample[new] = sample
    self.reward[new] = rewards
    self.shaped[new] = rewards
    self.truncated[new] = rows.truncated
    self.size += count

  def order(self) -> np.ndarray:
    """Row indices by (group, sample): int64 [size], whatever came first.

    Raises:
      ValueError: if one (group, sample) is in the buffer twice.
    """
    group, sample = self.group[: self.size], self.sample[: self.size]
    order = np.lexsort((sample, group))
    twice = (np.diff(group[order]) == 0) & (np.diff(sample[order]) == 0)
    if twice.any():
      row = order[int(np.flatnonzero(twice)[0])]
      raise ValueError(
        f"group {group[row]} sample {sample[row]} is in the buffer twice"
      )
    return order

  def _describe(self, group, sample):
    def describe(i: int) -> str:
      return (
        f"group {group[i]}, sample {sample[i]} (stream position"
        f" {self.groups.positions[group[i]]})"
      )

    return describe


def check_rewards(rewards, count: int, describe=str) -> np.ndarray:
  """Returns rewards as float32 [count] or raises a ValueError that names one.

  Args:
    rewards: what the reward function returned for `count` completions.
    count: how many were expected.
    describe: row index -> words for the message.
  """
  if hasattr(rewards, "__array__"):
    rewards = np.asarray(rewards)
  vector = isinstance(rewards, np.ndarray) and rewards.ndim == 1
  if not vector and (
    not isinstance(rewards, Sequence) or isinstance(rewards, (str, bytes))
  ):
    raise ValueError(
      f"the reward function returned {rewards!r}; expected {count} numbers"
      " in [0, 1]"
    )
  if len(rewards) != count:
    raise ValueError(
      f"the reward function returned {len(rewards)} rewards, but {count}"
      " were expected"
    )
  if vector and count and rewards.dtype.kind in "biuf":
    if rewards.min() >= 0 and rewards.max() <= 1:  # NaN fails
      return rewards.astype(np.float32)
  for i, value in enumerate(rewards):
    if not isinstance(value, (numbers.Real, np.bool_)):
      raise ValueError(
        f"reward {value!r} of {describe(i)} is a {type(value).__name__};"
        " expected a number in [0, 1]"
      )
    if not 0 <= value <= 1:  # also refuses NaN
      raise ValueError(
        f"reward {float(value)} of {describe(i)} is not in [0, 1]"
      )
  return np.asarray(rewards, np.float32)
