"""PODS (arXiv 2504.13818): generate n, train on the m that differ most.

The kept subset has the largest reward variance; the maximum is always attained
by the i highest and the m - i lowest rewards, so i is scanned. Paper: 64 kept
16, or 128 kept 32; here n = budget / prompts_per_step and m = n / 4. It saves
update time, not rollouts. Advantages are taken within the kept subset.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import base, uniform


@dataclasses.dataclass(frozen=True)
class PodsOptions:
  """keep: m / n; at least two rollouts are kept."""

  keep: float = 0.25

  def validate(self) -> None:
    base.check_float("keep", self.keep, low=0, high=1, open_low=True)


def max_variance_subset(rewards, m: int) -> np.ndarray:
  """The m rewards of each row with the largest variance.

  Args:
    rewards: float [P, n].
    m: 1 to n.

  Returns:
    bool [P, n]. Among equally good splits the most balanced one; among equal
    rewards the first ones from the top and the last ones from the bottom.
  """
  rewards = np.asarray(rewards, np.float64)
  n = rewards.shape[1]
  order = np.argsort(-rewards, axis=1, kind="stable")
  ranked = np.take_along_axis(rewards, order, axis=1)
  zero = np.zeros((len(rewards), 1))
  totals = [
    np.concatenate([zero, np.cumsum(x, axis=1)], axis=1)
    for x in (ranked, ranked**2)
  ]
  i = np.arange(m + 1)  # taken from the top
  total, square = (t[:, i] + t[:, -1:] - t[:, n - m + i] for t in totals)
  spread = np.round(m * square - total**2, 9)
  spread = spread - 1e-10 * np.abs(i - m / 2)
  best = spread.argmax(1)[:, None]
  rank = np.arange(n)
  chosen = (rank < best) | (rank >= n - m + best)
  keep = np.zeros_like(chosen)
  np.put_along_axis(keep, order, chosen, axis=1)
  return keep


class Pods(uniform.Uniform):
  """Uniform generation, maximum-variance down-sampling."""

  name = "pods"
  Options = PodsOptions

  def setup(self) -> None:
    super().setup()
    wanted = max(2, round(self.options.keep * self.group_size))
    self.kept = min(wanted, self.group_size)

  def keep_rollouts(self, groups, group, sample, reward) -> np.ndarray:
    group, reward = np.asarray(group), np.asarray(reward)
    order = np.lexsort((sample, group))
    # Every group has group_size rollouts, so the sorted rows are a table.
    table = reward[order].reshape(-1, self.group_size)
    keep = np.zeros(len(group), bool)
    keep[order] = max_variance_subset(table, self.kept).reshape(-1)
    return keep & self.select(groups)[group]
