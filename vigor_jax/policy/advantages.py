"""Advantages of rollouts, grouped by prompt id. NumPy, on the host.

Groups are ids: any integers, in any order, interleaved, of any sizes. Sums run
over a canonical order (group, round, reward), so permuting the rows permutes
the result bit for bit.

Adding one: a function from Grouped to float64 [B], in canonical order, and a
line in ADVANTAGES; see docs/extending.md.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from vigor_jax.policy import registry

# A group whose rewards span less than this (times the largest magnitude, if
# above 1) is constant and has advantage exactly 0: a mean of equal rewards is
# off by rounding (eight times .1 sums to .7999...), float32 verdicts by 6e-8.
CONSTANT_TOLERANCE = 1e-7


@dataclasses.dataclass(frozen=True)
class Grouped:
  """Rollouts in canonical order, with the statistics of their groups.

  Row-wise fields have shape [B]; group statistics are gathered to the rows.
  """

  rewards: np.ndarray  # float64
  ids: np.ndarray  # int64, group 0..G-1, ascending
  rounds: np.ndarray | None  # int64, ascending inside a group
  history: np.ndarray | None  # float64, mean reward from elsewhere
  entropy: np.ndarray | None  # float64 [B, 2], mean and maximum over tokens
  eps: float
  ddof: int

  @functools.cached_property
  def size(self) -> np.ndarray:
    """Rollouts in the row's group."""
    return np.bincount(self.ids)[self.ids]

  @functools.cached_property
  def mean(self) -> np.ndarray:
    """Mean reward of the row's group."""
    return _cell_mean(self.ids, self.rewards)

  @functools.cached_property
  def constant(self) -> np.ndarray:
    """Whether the row's group has one reward only (or one rollout)."""
    starts = np.flatnonzero(np.diff(self.ids, prepend=-1))
    return _cell_constant(self.rewards, starts)[self.ids]

  @functools.cached_property
  def deviation(self) -> np.ndarray:
    """Reward minus the group's mean; exactly 0 in a constant group."""
    return np.where(self.constant, 0.0, self.rewards - self.mean)

  @functools.cached_property
  def std(self) -> np.ndarray:
    """Standard deviation of the row's group (two passes, `ddof`)."""
    squares = np.bincount(self.ids, self.deviation**2)[self.ids]
    return np.sqrt(squares / np.maximum(self.size - self.ddof, 1))


def _cell_mean(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
  return (np.bincount(ids, values) / np.bincount(ids))[ids]


def _cell_constant(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
  """Whether each cell has one value: bool [cells]. Cells are runs of rows."""
  low = np.minimum.reduceat(values, starts)
  high = np.maximum.reduceat(values, starts)
  scale = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
  return high - low <= CONSTANT_TOLERANCE * scale


def _grpo(g: Grouped) -> np.ndarray:
  """(r - mean) / (std + eps), eps outside the root. arXiv 2402.03300."""
  return g.deviation / (g.std + g.eps)


def _dr_grpo(g: Grouped) -> np.ndarray:
  """r - mean. arXiv 2503.20783."""
  return g.deviation


def _rloo(g: Grouped) -> np.ndarray:
  """r - mean of the others = n / (n - 1) (r - mean). arXiv 2402.14740."""
  return g.deviation * g.size / np.maximum(g.size - 1, 1)


def _predictable(g: Grouped) -> np.ndarray:
  """r - a baseline known before the row's round was drawn (this project's).

  The baseline of round t is the mean reward of the group's earlier rounds. The
  group's first round uses `history` where it is finite, else leave-one-out
  within the round (0 for a round of one). Summed over the group the gradient's
  expectation is E[N_x] grad p: a martingale, whatever the stopping rule.
  """
  # Cells are (group, round); rows are sorted by both.
  new_group = np.diff(g.ids, prepend=-1) != 0
  starts = new_group | (np.diff(g.rounds, prepend=0) != 0)
  cell = np.cumsum(starts) - 1
  first = np.flatnonzero(starts)
  total = np.bincount(cell, g.rewards)
  size = np.bincount(cell)
  # Sums over earlier cells of the same group. One running sum over the batch
  # would let one group's rounding reach another: reduce inside the group.
  before_sum, before_size = np.zeros_like(total), np.zeros_like(size)
  opens = new_group[first]
  rank = np.arange(len(first)) - np.flatnonzero(opens)[np.cumsum(opens) - 1]
  for t in range(1, int(rank.max()) + 1):
    now = np.flatnonzero(rank == t)
    before_sum[now] = before_sum[now - 1] + total[now - 1]
    before_size[now] = before_size[now - 1] + size[now - 1]
  baseline = before_sum / np.maximum(before_size, 1)
  # Leave-one-out is n / (n - 1) (r - mean), exactly 0 in a constant cell.
  loo = size / np.maximum(size - 1, 1)
  loo = np.where(_cell_constant(g.rewards, first), 0.0, loo)
  scale = np.where(opens, loo, 1.0)
  center = np.where(opens, total / size, baseline)
  result = (g.rewards - center[cell]) * scale[cell]
  if g.history is None:
    # Without a prior a constant group has no signal in any round.
    return np.where(g.constant, 0.0, result)
  prior = opens[cell] & np.isfinite(g.history)
  return np.where(prior, g.rewards - g.history, result)


def _global_mean(g: Grouped) -> np.ndarray:
  """r - mean over all samples of the prompt, those not kept included, no std.

  Reinforce-Ada, arXiv 2510.04996: `history` is that mean, since the samples
  that were dropped are not in the batch.
  """
  difference = g.rewards - g.history
  return np.where(np.abs(difference) <= CONSTANT_TOLERANCE, 0.0, difference)


def _gvm(g: Grouped) -> np.ndarray:
  """r / p, without a baseline: RAFT's accepted samples. arXiv 2505.02391.

  The paper weighs an accepted sample 1 / (n p); 1 / n is the aggregator
  prompt_mean. p is `history` where given (the paper's pilots), else the group's
  mean; 0 where p is 0. An all-correct group is not silent here.
  """
  p = g.mean if g.history is None else g.history
  return np.where(p > 0, g.rewards / np.where(p > 0, p, 1.0), 0.0)


ZVP_SCALE = 0.1


def _rl_zvp(g: Grouped) -> np.ndarray:
  """grpo, and constant groups pushed by their entropy. arXiv 2509.21880.

  The paper gives a token of a solved group ZVP_SCALE * H_t and of a failed one
  -ZVP_SCALE * (max H - H_t). This is the mean of that over the rollout's
  tokens: `entropy[:, 0]` is the mean over tokens, `entropy[:, 1]` the maximum.
  A graded constant group counts as solved from .5. In training H_t is estimated
  by -log p of the drawn token (batch.surprisal).
  """
  mean, maximum = g.entropy[:, 0], g.entropy[:, 1]
  push = np.where(g.rewards >= 0.5, mean, mean - maximum)
  return np.where(g.constant, ZVP_SCALE * push, _grpo(g))


@dataclasses.dataclass(frozen=True)
class Advantage:
  """An advantage's entry: its function, and the optional inputs it needs."""

  values: Callable[[Grouped], np.ndarray]
  needs: tuple[str, ...] = ()


ADVANTAGES: dict[str, Advantage] = {
  "grpo": Advantage(_grpo),
  "dr_grpo": Advantage(_dr_grpo),
  "rloo": Advantage(_rloo),
  "predictable": Advantage(_predictable, needs=("round_index",)),
  "global_mean": Advantage(_global_mean, needs=("history",)),
  "gvm": Advantage(_gvm),
  "rl_zvp": Advantage(_rl_zvp, needs=("entropy",)),
}


def compute(
  name: str,
  rewards: np.ndarray,
  group: np.ndarray,
  *,
  round_index: np.ndarray | None = None,
  eps: float = 1e-6,
  ddof: int = 0,
  history: np.ndarray | None = None,
  entropy: np.ndarray | None = None,
) -> np.ndarray:
  """Advantages of a batch of rollouts, by prompt id.

  Args:
    name: a key of ADVANTAGES.
    rewards: [B], finite.
    group: int [B], the prompt (row of the step's batch) of each rollout.
    round_index: int [B], the round that drew each rollout; for predictable.
    eps: added to the standard deviation, outside the root.
    ddof: 0 or 1; divides the squares by n - ddof.
    history: [B], mean reward of each rollout's prompt from elsewhere.
    entropy: [B, 2], mean and maximum token entropy (nats) of each rollout.

  Returns:
    float32 [B]. Exactly 0 for groups of one and for constant groups, except
    where the method says otherwise.

  Raises:
    ValueError: unknown name, shapes that differ, rewards that are not finite,
      a missing input.
  """
  advantage = registry.find("advantage", name, ADVANTAGES)
  if ddof not in (0, 1):
    raise ValueError(f"advantage ddof is 0 or 1, got {ddof=}")
  rewards = np.asarray(rewards, np.float64)
  batch = len(rewards)
  group = _rows("group", group, batch, integer=True)
  round_index = _rows("round_index", round_index, batch, integer=True)
  history = _rows("history", history, batch)
  if entropy is not None:
    entropy = np.asarray(entropy, np.float64)
    if entropy.shape != (batch, 2):
      raise ValueError(f"entropy is [B, 2] = [{batch}, 2], {entropy.shape=}")
  given = {
    "round_index": round_index,
    "history": history,
    "entropy": entropy,
  }
  for need in advantage.needs:
    if given[need] is None:
      raise ValueError(f"advantage {name!r} needs {need}, got None")
  if not np.isfinite(rewards).all():
    bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
    raise ValueError(f"reward of row {bad} is not finite: {rewards[bad]}")
  if batch == 0:
    return np.zeros(0, np.float32)

  order = _canonical_order(rewards, group, round_index)
  sorted_group = group[order]
  changes = sorted_group[1:] != sorted_group[:-1]
  grouped = Grouped(
    rewards=rewards[order],
    ids=np.concatenate([[0], np.cumsum(changes)]),
    rounds=None if round_index is None else round_index[order],
    history=None if history is None else history[order],
    entropy=None if entropy is None else entropy[order],
    eps=eps,
    ddof=ddof,
  )
  result = np.empty(batch, np.float32)
  result[order] = advantage.values(grouped)
  return result


def informative(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
  """Whether each rollout's group has rewards that differ: bool [B]."""
  rewards = np.asarray(rewards, np.float64)
  if rewards.size == 0:
    return np.zeros(0, bool)
  _, ids = np.unique(np.asarray(group), return_inverse=True)
  order = np.argsort(ids, kind="stable")
  starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
  return ~_cell_constant(rewards[order], starts)[ids]


def _canonical_order(
  rewards: np.ndarray, group: np.ndarray, rounds: np.ndarray | None
) -> np.ndarray:
  """Rows by (group, round, reward): int64 [B]."""
  key = group
  if rounds is not None:
    # Dense first: ids may be so large that the product would overflow.
    key = _dense(group) * (_dense(rounds).max() + 1) + _dense(rounds)
  key = _dense(key)
  if key.max() < 2**16:
    key = key.astype(np.uint16)  # NumPy sorts these by radix
  by_reward = np.argsort(rewards, kind="stable")  # also faster on ties
  return by_reward[np.argsort(key[by_reward], kind="stable")]


def _dense(values: np.ndarray) -> np.ndarray:
  """Small non-negative integers in the same order as `values`."""
  low = int(values.min())
  if int(values.max()) - low < 2**16:
    return values - low
  return np.unique(values, return_inverse=True)[1]


def _rows(name, values, batch, *, integer=False):
  """`values` as an array of shape [batch], or None."""
  if values is None:
    return None
  values = np.asarray(values)
  if values.shape != (batch,):
    raise ValueError(f"{name} is [B] = [{batch}], got shape {values.shape}")
  if integer and not np.issubdtype(values.dtype, np.integer):
    raise ValueError(f"{name} holds integers, got {values.dtype}")
  return values.astype(np.int64 if integer else np.float64)
