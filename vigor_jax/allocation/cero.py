"""CERO (arXiv 2606.05606): a budget over epochs, by dual variables.

Each prompt keeps a Beta posterior of p and a dual variable theta, the shadow
price of its share of the whole run's budget; nu is the price of a step's.

  q = E[p (1 - p)] = ab / ((a + b)(a + b + 1)),   c = 4 lambda q / R
  margin d = theta - nu; prompts go by margin, N_max units each
  z*(theta; c) = 0 if theta >= c;  Z if theta <= c exp(-c Z);
                 else log(c / theta) / c
  theta <- clip(theta - (N - z* / K) / (N_max sqrt(K)), 0, 1)   all prompts
  nu    <- clip(nu - (B_step - demand) / (G sqrt(K)), 0, 1)

with K steps, Z = K N_max, R units per prompt over the run. Start: theta = 4q,
nu = 1/2, Beta(1, 1), lambda = 1. Paper: units of 4 responses, N_max = 2,
K = 500. Here a unit is budget / (N_max prompts_per_step) rollouts, and each
step spends its budget on the prompts_per_step best margins of the pool, so
`demand` counts the prompts with a positive margin in place of the spending.
Those passed over come again in the next epoch. The paper chooses from the whole
data set at every step: the larger the pool, the closer; with a small one all
take turns. Inert until prompts come again.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

import numpy as np

from vigor_jax.allocation import base, history, uniform, variance
from vigor_jax.allocation.groups import Groups, Request


@dataclasses.dataclass(frozen=True)
class CeroOptions:
  """Options of cero.

  Attributes:
    units: N_max, units per chosen prompt.
    horizon: K, steps of the run.
    pool: prompts looked at per step, as a multiple of prompts_per_step.
    utility: lambda.
    memory: rho, what remains of the old posterior counts at each visit.
  """

  units: int = 2
  horizon: int = 500
  pool: float = 4.0
  utility: float = 1.0
  memory: float = 1.0

  def validate(self) -> None:
    base.check_int("units", self.units, low=1)
    base.check_int("horizon", self.horizon, low=1)
    base.check_float("pool", self.pool, low=1, high=100)
    base.check_float("utility", self.utility, low=0, high=1e6, open_low=True)
    base.check_float("memory", self.memory, low=0, high=1)


def best_response(theta, c, most: float) -> np.ndarray:
  """z*(theta; c), the units a prompt wants over the run at price theta."""
  theta, c = np.asarray(theta, np.float64), np.asarray(c, np.float64)
  inner = np.log(c / np.maximum(theta, 1e-300)) / c
  return np.clip(np.where(theta >= c, 0.0, inner), 0.0, most)


class Cero(base.Allocator):
  """Primal-dual allocation over epochs."""

  name = "cero"
  Options = CeroOptions

  def setup(self) -> None:
    o = self.options
    self.group_size = uniform.per_prompt(
      self.name, self.budget, self.prompts_per_step
    )
    if self.group_size % o.units:
      raise ValueError(
        f"{self.name}: {self.group_size} rollouts per prompt (budget="
        f"{self.budget} / prompts_per_step={self.prompts_per_step}) are not"
        f" units={o.units} equal units; units must divide {self.group_size}"
      )
    self.max_prompts = math.ceil(o.pool * self.prompts_per_step)
    self.nu = 0.5
    self.data_set = 0  # prompts in the data set, 0 until a stream tells
    self.table = history.History(
      ("a", "b", "theta"), (1, 1, 4 * variance.beta_posterior(0, 0))
    )

  def largest_group(self) -> int:
    return self.group_size

  def begin(self, stream, step: int) -> Groups:
    # A stream of fresh prompts counts as one that shows each prompt once.
    size = getattr(stream, "num_examples", None)
    self.data_set = int(size or self.options.horizon * self.max_prompts)
    return super().begin(stream, step)

  def margins(self, uids) -> np.ndarray:
    """theta - nu: float64 [k]."""
    return self.table.get(uids)[:, 2] - self.nu

  def rounds(self, groups: Groups) -> Iterator[Request]:
    margins = self.margins(groups.uids)
    chosen = base.top(
      np.round(margins, 12), groups.uniforms(0), self.prompts_per_step
    )
    counts = np.zeros(len(groups), np.int64)
    counts[chosen] = self.group_size
    groups.plan = int((margins > 0).sum()) * self.options.units
    yield groups.request(counts)
    groups.consumed[:] = True

  def end(self, groups: Groups) -> None:
    o = self.options
    uids, successes, rollouts = history.merge_by_uid(
      groups.uids, groups.reward_sum, groups.n
    )
    rows = self.table.get(uids)
    visited = rollouts > 0
    failures = rollouts - successes
    for column, new in ((0, successes), (1, failures)):
      old = 1 + o.memory * (rows[:, column] - 1)
      rows[visited, column] = (old + new)[visited]
    self.table.put(uids, rows)
    units = dict(zip(uids.tolist(), rollouts / self.group_size * o.units))
    # Every prompt's price moves, those never seen included (the default row).
    known = np.array(list(self.table.rows), np.int64)
    every = np.concatenate([self.table.get(known), [self.table.default]])
    spent = np.array([units.get(u, 0.0) for u in known.tolist()] + [0.0])
    every[:, 2] = self.step_prices(every, spent)
    self.table.rows = dict(zip(known.tolist(), map(tuple, every[:-1].tolist())))
    self.table.default = tuple(every[-1].tolist())
    per_step = self.prompts_per_step * o.units
    scale = max(per_step, self.max_prompts * o.units - per_step)
    moved = (per_step - groups.plan) / (scale * math.sqrt(o.horizon))
    self.nu = float(np.clip(self.nu - moved, 0, 1))

  def step_prices(self, rows, spent) -> np.ndarray:
    """theta after a step in which each prompt got `spent` units."""
    o = self.options
    a, b, theta = rows[:, 0], rows[:, 1], rows[:, 2]
    q = a * b / ((a + b) * (a + b + 1))
    per_prompt = o.horizon * self.prompts_per_step * o.units / self.data_set
    c = 4 * o.utility * q / per_prompt
    want = best_response(theta, c, o.horizon * o.units) / o.horizon
    moved = (spent - want) / (o.units * math.sqrt(o.horizon))
    return np.clip(theta - moved, 0, 1)

  def state_dict(self) -> dict:
    return {
      "nu": self.nu,
      "table": self.table.state_dict(),
      "default": list(self.table.default),
    }

  def restore(self, state: dict) -> None:
    self.nu = float(state["nu"])
    self.table.load_state_dict(state["table"])
    self.table.default = tuple(map(float, state["default"]))
