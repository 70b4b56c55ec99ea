"""eb_predicted: eb_effective that looks at prompts before it opens them.

A rule of this project (docs/allocation.md, section 8). Verdicts alone find the
informative prompts by spending rollouts on the others. What a prompt looks
like tells something about how hard it is, and looking is free: the rule looks
at `window` times as many prompts as it may open, predicts their success from
their features (predictor.py), gives each its own prior of p and opens those
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
  predictor,
)
from vigor_jax.allocation.addressed import addressed_uniform
from vigor_jax.allocation.eb_widening import GRID


SHUFFLING = 1  # purpose of the addressed numbers
# Of the price, below which a prompt is passed over: values are estimates.
MARGIN = 0.5
# EM for the priors by forecast takes longer than for the common one: rare
# successes are told from none by many iterations only. These are once a step.
PATIENCE = 12
NEWTON = 1  # iterations of the predictor per round


@dataclasses.dataclass(frozen=True)
class EbPredictedOptions(eb_effective.EbEffectiveOptions):
  """EbEffectiveOptions, and

  Attributes:
    window: prompts looked at per step, as a multiple of max_prompts.
    explore: share of the openings that goes by the stream's order.
    refits: rounds of a step, the first ones, before which the prediction and
      the priors learn from the step's verdicts so far; 0: once a step only.
    looks: what the prediction sees of a prompt: "tokens"; "bag", the same but
      for their order; "module:function" of the prompts, see features.source; or
      "shuffled", another prompt's tokens, a control.
  """

  window: float = 4.0
  explore: float = 0.125
  refits: int = 1000
  looks: str = features.TOKENS

  def validate(self) -> None:
    super().validate()
    base.check_float("window", self.window, low=1, high=1000)
    base.check_float("explore", self.explore, low=0, high=1)
    base.check_int("refits", self.refits, low=0)
    features.source(self.looks)


@dataclasses.dataclass
class Look:
  """What the rule saw of a step's groups.

  Attributes:
    design: float64 [max_prompts, r + 1], see Predictor.design.
    forecast: float64 [max_prompts], logits, made from the verdicts so far but
      for the prompt's own.
    ahead: for the next fit of the predictor, once the round is under way.
    first: the one of the opening.
    fit: the predictor after the last round.
    value: (A, D) of the last round.
  """

  design: np.ndarray
  forecast: np.ndarray
  ahead: predictor.Ahead | None = None
  first: predictor.Ahead | None = None
  fit: predictor.Fit | None = None
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
    self.predictor = predictor.Predictor()
    self.conditional = difficulty.Conditional(len(GRID), o.history)
    self.graded = difficulty.Spread()
    self.price = 0.0  # value of the best rollout that the last step left out
    self.seen = -1  # last position of the stream that was looked at
    self._designs = None  # stream, positions and designs of the last peek
    self._planned = None  # what `plan` found for the next step
    self.behind = False  # whether the last step's counts are to be fitted

  def begin(self, stream, step: int) -> base.Groups:
    prompts = stream.peek(self.window)
    plan = self._planned
    if plan is None or plan[0] is not prompts:
      plan = self.plan(stream, prompts, step)
    if plan is None:
      return super().begin(stream, step)
    _, rows, skipped, look = plan
    positions = prompts.positions[rows]
    self._planned = None
    self.seen = max(self.seen, int(positions.max()))
    groups = base.Groups(
      step, self.seed, positions, prompts.uids[rows], rows=rows,
      skipped=skipped,
    )  # fmt: skip
    groups.plan = look
    return groups

  def plan(self, stream, prompts, step: int):
    """(prompts, rows, skipped as `choose` has them, Look); None: no looks."""
    z = self.designs(stream, prompts)
    if z is None:
      return None
    if self.options.looks == features.SHUFFLED:
      keys = addressed_uniform(
        self.seed, step, 0, prompts.positions, SHUFFLING
      )
      z = z[np.argsort(keys)]
    forecast = self.predictor.forecast(z)
    rows, skipped = self.choose(prompts, forecast)
    return prompts, rows, skipped, Look(z[rows], forecast[rows])

  def look_ahead(self, stream) -> None:
    if not self.predictor.mean.size:  # Prompts have no looks to go by.
      return
    prompts = stream.peek(self.window)
    if self.options.looks == features.SHUFFLED:  # by the step's number
      self.designs(stream, prompts)
    else:
      self._planned = self.plan(stream, prompts, 0)

  def meanwhile(self, groups: base.Groups) -> None:
    look = groups.plan
    if look is not None:
      self.catch_up(groups.step)
      o, done = self.options, len(groups.round_counts)
      if done <= o.refits or (o.refits and done > o.rounds):
        look.ahead = self.expecting(look, groups.counts, 1 < done <= o.rounds)

  def catch_up(self, step: int) -> None:
    """Learns priors from the steps before, once in a step.

    Before its first verdicts are needed, so that it can be done while the
    device decodes; its prompts were chosen by what was known until then.
    """
    if not self.behind:
      return
    self.behind = False
    # From the first step on: as long as it believes wrong verdicts it seeks out
    # hopeless prompts, whose successes are all false, and the policy unlearns.
    self.estimate(step, wait=1)
    none = np.zeros(0)
    self.fit(none, none)
    self.conditional.fit(
      self.likelihood,
      self.weights,
      PATIENCE * max(1, self.options.em_iterations),
    )

  def designs(self, stream, prompts) -> np.ndarray | None:
    """Designs of what was peeked: float64 [k, r + 1]; None if all look alike.

    Most prompts are looked at step after step. Their rows are kept, where the
    features of a prompt depend on that prompt alone.
    """
    known, positions = self._designs, prompts.positions
    z = None
    if known is not None and known[0] is stream:
      _, before, rows = known
      at = np.minimum(before.searchsorted(positions), len(before) - 1)
      new = (before[at] != positions).nonzero()[0]
      z = rows.take(at, 0)
      if len(new):
        x = self.features(prompts.take(new))
        self.predictor.look(x)
        if len(self.predictor.mean) == z.shape[1]:
          z[new] = self.predictor.design(x)
        else:  # They show what none before them did.
          z = None
    if z is None:
      x = self.features(prompts)
      if x is None or not self.predictor.look(x):
        return None
      z = self.predictor.design(x)
    if getattr(self.features, "by_row", False) and hasattr(prompts, "take"):
      ascending = (positions[1:] > positions[:-1]).all()
      self._designs = (stream, positions, z) if ascending else None
    return z

  def worth(self, forecast: np.ndarray) -> np.ndarray:
    """Value of opening a prompt, before any verdict: float64 [k]."""
    v, noise, _ = self.table.T
    worth = self.conditional.tables @ (v - self.rho / 2 * noise)
    worth = np.interp(forecast, difficulty.KNOTS, worth)
    spread = self.own_spread(forecast)
    return worth if spread is None else worth * spread[1]

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
    again = np.zeros(len(worth), bool)
    uids = prompts.uids
    if not (uids[1:] > uids[:-1]).all():
      again[:] = True
      again[np.unique(uids, return_index=True)[1]] = False
    # A prompt whose next epoch has begun waits.
    new = np.flatnonzero(~again & (prompts.positions > self.seen))
    explored = new[: self.explored]
    poor = worth < MARGIN * self.price
    # The best of each level first among those that have the same turn.
    turns = difficulty.turns(forecast, poor)
    turns += (2 * again + poor) * len(turns)
    order = np.lexsort((-worth, turns))
    rest = np.ones(len(worth), bool)
    rest[explored] = False
    chosen = order[rest[order]][: self.max_prompts - len(explored)]
    skipped = poor & ~again
    skipped[explored] = skipped[chosen] = False
    skipped[chosen.max() :] = False
    return np.concatenate([explored, chosen]), skipped

  def marginal(self, groups: base.Groups):
    if groups.plan is None:
      return super().marginal(groups)
    self.catch_up(groups.step)
    opened, look = groups.opened, groups.plan
    n, k = groups.n[opened], groups.reward_sum[opened]
    learns = len(groups.round_counts) <= self.options.refits
    if learns:
      # Forecasts anew, from the verdicts on other prompts.
      look.fit = self.fit_of(look, groups, NEWTON)
      look.forecast = look.fit.without
    place = difficulty.Place(look.forecast)
    mine, others = place.take(opened), place.take(~opened)
    like = self.likelihood(n, k)
    if learns:
      self.conditional.update(mine, like, self.weights)
    look.value = self.values(
      n, k, opened, self.conditional.prior(mine),
      self.conditional.mean(others, self.table),
      self.own_spread(look.forecast, groups), like,
    )  # fmt: skip
    return look.value

  def own_spread(self, forecast, groups=None):
    """Each prompt's phi / the common one, as `moments` takes them.

    A group that got the same partial reward twice has a mean inside (0, 1) and
    nothing to learn from: what decides is how far its rewards spread, and
    those of prompts that look alike.

    Args:
      forecast: float64 [k].
      groups: k of them; None: prompts none of which is opened.

    Returns:
      (float64 [opened], float64 [others]), or None where rewards are 0/1.
    """
    if self.phi >= eb_effective.BINARY:
      return None
    if groups is None:
      phi = difficulty.Spread.of(forecast, self.graded.sums, self.phi)
      return np.zeros(0), phi / self.phi
    opened = groups.opened
    mine, others = forecast[opened], forecast[~opened]
    own = eb_effective.spreads(groups, opened)
    own *= (groups.n[opened] - 1)[:, None]
    sums = self.graded.after(mine, own)
    phi = difficulty.Spread.of(mine, sums, self.phi)
    phi = (difficulty.PAIR * phi + own[:, 0]) / (difficulty.PAIR + own[:, 1])
    new = difficulty.Spread.of(others, sums, self.phi)
    return phi / self.phi, new / self.phi

  def expecting(self, look, n, between: bool) -> predictor.Ahead:
    """What the next fit needs but the verdicts.

    Most verdicts of a step are the opening's and those before its end: the
    rounds between go by the opening's curvature.

    Args:
      n: int [max_prompts], verdicts there will be.
      between: whether it is for such a round.
    """
    found = self.predictor.ahead(
      look.design, n.copy(), look.fit.mean if look.fit else None,
      look.first if between else None,
    )  # fmt: skip
    look.first = look.first or found
    return found

  def fit_of(self, look, groups, newton: int) -> predictor.Fit:
    """The predictor with the verdicts so far."""
    ahead, look.ahead = look.ahead, None
    known = ahead is not None and np.array_equal(ahead.n, groups.n)
    if not known or (newton > NEWTON and not ahead.curved):
      between = newton == NEWTON and len(groups.round_counts) > 1
      ahead = self.expecting(look, groups.n, between)
    return self.predictor.fit(ahead, groups.reward_sum, newton)

  def tally(self, n, k, forecast) -> np.ndarray:
    return difficulty.tally(n, k, forecast, eb_widening.HISTORY_QUANTUM)

  def end(self, groups: base.Groups) -> None:
    if groups.plan is not None and groups.plan.value is None:
      self.marginal(groups)  # The opening was all.
    own = self.record(groups)
    if groups.plan is None:
      self.estimate(groups.step)
      return
    done, look = groups.n > 0, groups.plan
    n, k = groups.n[done], groups.reward_sum[done]
    value, slope = look.value
    # A prompt at its cap has no next rollout.
    rest = (value - groups.counts * slope)[groups.counts < self.options.cap]
    self.price = float(rest.max(initial=0.0))
    if self.options.refits:
      look.fit = self.fit_of(look, groups, predictor.NEWTON)
      look.forecast = look.fit.without
    else:
      # The forecasts were made before any of these verdicts, and one iteration
      # begins where the last step's ended.
      look.fit = self.fit_of(look, groups, 1)
    self.predictor.commit(look.fit)
    self.graded.sums = self.graded.after(look.forecast[done], own)
    self.conditional.remember(self.tally(n, k, look.forecast[done]))
    self.behind = True

  def tallies(self) -> np.ndarray:
    """By the forecast's level, by which prompts were chosen and spent on."""
    rows = self.conditional.pooled()
    return rows if len(rows) else super().tallies()

  def state_dict(self) -> dict:
    return {
      **super().state_dict(),
      "rho": self.rho,
      "price": self.price,
      "seen": self.seen,
      "behind": self.behind,
      "predictor": self.predictor.state_dict(),
      "conditional": self.conditional.state_dict(),
      "graded": self.graded.sums.tolist(),
    }

  def restore(self, state: dict) -> None:
    super().restore(state)
    self._designs = self._planned = None
    self.rho = float(state["rho"])
    self.price = float(state["price"])
    self.seen = int(state["seen"])
    self.behind = bool(state["behind"])
    self.predictor.load_state_dict(state["predictor"])
    self.conditional.load_state_dict(state["conditional"])
    self.graded.sums = np.asarray(state["graded"], np.float64)
