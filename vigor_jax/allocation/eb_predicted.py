"""eb_predicted: eb_effective that looks at prompts before it opens them.

A rule of this project (docs/allocation.md, section 8). Verdicts alone find the
informative prompts by spending rollouts on the others. What a prompt looks
like tells something about how hard it is, and looking is free: the rule looks
at `window` times as many prompts as it may open, predicts their success from
their features (difficulty.py), gives each its own prior of p and opens those
whose first rollouts are worth most. A share of the openings goes to prompts in
the stream's order, so that the prediction is tested on what it would reject.

Prompts that are rejected are skipped for good; chosen ones that were not
opened are looked at again. From there on it is eb_effective with a prior per
prompt, and with graded rewards a spread per prompt: partial credit that every
rollout gets alike is nothing to learn from. Where prompts have no features, or
features that do not vary, it is eb_effective.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import (
  base,
  difficulty,
  eb_effective,
  eb_widening,
  features,
)
from vigor_jax.allocation.addressed import addressed_uniform
from vigor_jax.allocation.eb_widening import GRID


SHUFFLING = 1  # purpose of the addressed numbers
# Of the price, below which a prompt is passed over: values are estimates.
MARGIN = 0.5
# EM for the priors by forecast takes longer than for the common one: rare
# successes are told from none by many iterations only.
PATIENCE = 4
NEWTON = 2  # iterations of the predictor per round


@dataclasses.dataclass(frozen=True)
class EbPredictedOptions(eb_effective.EbEffectiveOptions):
  """EbEffectiveOptions, and

  Attributes:
    window: prompts looked at per step, as a multiple of max_prompts.
    explore: share of the openings that goes by the stream's order.
    looks: what the prediction sees of a prompt: "tokens"; "module:function" of
      the prompts, see features.source; or "shuffled", another prompt's tokens,
      a control.
  """

  window: float = 4.0
  explore: float = 0.125
  looks: str = features.TOKENS

  def validate(self) -> None:
    super().validate()
    base.check_float("window", self.window, low=1, high=1000)
    base.check_float("explore", self.explore, low=0, high=1)
    features.source(self.looks)


@dataclasses.dataclass
class Look:
  """What the rule saw of a step's groups.

  Attributes:
    design: float64 [max_prompts, D + 1], see Predictor.design.
    forecast: float64 [max_prompts], logits, made from the verdicts so far but
      for the prompt's own.
    fit: the predictor after the last round.
    value: (A, D) of the last round.
  """

  design: np.ndarray
  forecast: np.ndarray
  fit: difficulty.Fit | None = None
  value: tuple[np.ndarray, np.ndarray] | None = None


class EbPredicted(eb_effective.EbEffective):
  """Greedy ascent of effective rollouts with a prior per prompt."""

  name = "eb_predicted"
  Options = EbPredictedOptions

  def setup(self) -> None:
    super().setup()
    o = self.options
    self.window = round(o.window * self.max_prompts)
    self.explored = round(o.explore * self.first)
    self.features = features.source(o.looks)
    self.predictor = difficulty.Predictor()
    self.conditional = difficulty.Conditional(len(GRID), o.history)
    self.graded = difficulty.Spread()
    self.price = 0.0  # value of the best rollout that the last step left out
    self.seen = -1  # last position of the stream that was looked at

  def begin(self, stream, step: int) -> base.Groups:
    prompts = stream.peek(self.window)
    x = self.features(prompts)
    if x is None or not self.predictor.look(x):
      return super().begin(stream, step)
    if self.options.looks == features.SHUFFLED:
      keys = addressed_uniform(
        self.seed, step, 0, prompts.positions, SHUFFLING
      )
      x = x[np.argsort(keys)]
    z = self.predictor.design(x)
    forecast = self.predictor.forecast(z)
    rows, skipped = self.choose(prompts, forecast)
    self.seen = max(self.seen, int(prompts.positions[rows].max()))
    groups = base.Groups(
      step,
      self.seed,
      prompts.positions[rows],
      prompts.uids[rows],
      rows=rows,
      skipped=skipped,
    )
    groups.plan = Look(z[rows], forecast[rows])
    return groups

  def worth(self, forecast: np.ndarray) -> np.ndarray:
    """Value of opening a prompt, before any verdict: float64 [k]."""
    none = np.zeros(0)
    prior = self.conditional.prior(forecast)
    spread = self.own_spread(none, np.zeros((0, 2)), forecast, self.graded.sums)
    _, (v, noise, _) = self.moments(none, none, prior[:0], prior, spread)
    return v - self.rho / 2 * noise

  def choose(self, prompts, forecast: np.ndarray):
    """Which prompts become groups, in the order in which they are opened.

    First `explored` new ones in the stream's order, then those nearly worth the
    price of a rollout, then others; both in turn from all levels of the
    forecast, and in the stream's order from one level: little is known of a
    level's worth at first, and prompts of one level have much in common.

    Returns:
      (rows int64 [max_prompts] of the peek, bool [prompts peeked]: skipped for
      good, being passed over and not worth that).
    """
    worth = self.worth(forecast)
    first = np.unique(prompts.uids, return_index=True)[1]
    again = np.ones(len(worth), bool)
    again[first] = False  # a prompt whose next epoch has begun waits
    new = np.flatnonzero(~again & (prompts.positions > self.seen))
    explored = new[: self.explored]
    poor = worth < MARGIN * self.price
    # The best of each level first among those that have the same turn.
    order = np.lexsort((-worth, difficulty.turns(forecast, poor), poor, again))
    order = order[~np.isin(order, explored)]
    chosen = order[: self.max_prompts - len(explored)]
    skipped = poor & ~again
    skipped[explored] = skipped[chosen] = False
    skipped[chosen.max() :] = False
    return np.concatenate([explored, chosen]), skipped

  def marginal(self, groups: base.Groups):
    if groups.plan is None:
      return super().marginal(groups)
    opened, look = groups.opened, groups.plan
    n, k = groups.n[opened], groups.reward_sum[opened]
    self.fit(n, k)
    self.forecast(look, opened, n, k, NEWTON)
    phi, noise = self.phi, self.noise
    self.conditional.fit(
      self.tally(n, k, look.forecast[opened]),
      lambda n, k: eb_effective.likelihood(n / phi, k / phi, noise),
      self.weights,
      PATIENCE * self.options.em_iterations,
    )
    own = (n - 1)[:, None] * eb_effective.spreads(groups, opened)
    mine, others = look.forecast[opened], look.forecast[~opened]
    look.value = self.values(
      n, k, opened, self.conditional.prior(look.forecast),
      self.own_spread(mine, own, others, self.graded.after(mine, own)),
    )  # fmt: skip
    return look.value

  def own_spread(self, forecast, own, others, sums):
    """Each prompt's phi / the common one, as `moments` takes them.

    A group that got the same partial reward twice has a mean inside (0, 1) and
    nothing to learn from: what decides is how far its rewards spread, and
    those of prompts that look alike.

    Args:
      forecast: float64 [m], of opened prompts.
      own: float64 [m, 2], their variances, see difficulty.Spread.
      others: float64 [q], forecasts of the others.
      sums: of difficulty.Spread.

    Returns:
      (float64 [m], float64 [q]), or None where rewards are 0/1.
    """
    if self.phi >= eb_effective.BINARY:
      return None
    phi = difficulty.Spread.of(forecast, sums, self.phi)
    phi = (difficulty.PAIR * phi + own[:, 0]) / (difficulty.PAIR + own[:, 1])
    new = difficulty.Spread.of(others, sums, self.phi)
    return phi / self.phi, new / self.phi

  def forecast(self, look, seen, n, k, newton) -> None:
    """Forecasts anew from the verdicts n, k of the groups `seen`."""
    start = look.fit.mean if look.fit else None
    look.fit = self.predictor.fit(look.design[seen], n, k, start, newton)
    look.forecast[seen] = look.fit.without
    look.forecast[~seen] = look.fit.forecast(look.design[~seen])

  def tally(self, n, k, forecast) -> np.ndarray:
    return difficulty.tally(n, k, forecast, eb_widening.HISTORY_QUANTUM)

  def end(self, groups: base.Groups) -> None:
    self.record(groups)
    if groups.plan is None:
      self.estimate()
      return
    done, look = groups.n > 0, groups.plan
    n, k = groups.n[done], groups.reward_sum[done]
    value, slope = look.value
    # A prompt at its cap has no next rollout.
    rest = (value - groups.counts * slope)[groups.counts < self.options.cap]
    self.price = float(rest.max(initial=0.0))
    self.forecast(look, done, n, k, difficulty.NEWTON)
    self.predictor.commit(look.fit)
    self.graded.sums = self.graded.after(
      look.forecast[done],
      (n - 1)[:, None] * eb_effective.spreads(groups, done),
    )
    self.conditional.remember(self.tally(n, k, look.forecast[done]))
    # At once: as long as it believes wrong verdicts it seeks out hopeless
    # prompts, whose successes are all false, and the policy unlearns.
    self.estimate(wait=1)

  def tallies(self) -> np.ndarray:
    """By the forecast's level, by which prompts were chosen and spent on."""
    rows = self.conditional.pooled
    return rows if len(rows) else super().tallies()

  def state_dict(self) -> dict:
    return {
      **super().state_dict(),
      "rho": self.rho,
      "price": self.price,
      "seen": self.seen,
      "predictor": self.predictor.state_dict(),
      "conditional": self.conditional.state_dict(),
      "graded": self.graded.sums.tolist(),
    }

  def restore(self, state: dict) -> None:
    super().restore(state)
    self.rho = float(state["rho"])
    self.price = float(state["price"])
    self.seen = int(state["seen"])
    self.predictor.load_state_dict(state["predictor"])
    self.conditional.load_state_dict(state["conditional"])
    self.graded.sums = np.asarray(state["graded"], np.float64)
