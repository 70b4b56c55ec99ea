"""Measurements of a run on itself: time by phase, variance per rollout."""

from __future__ import annotations

import collections
import contextlib
import time
from typing import Any, Iterator

import jax
import numpy as np

from vigor_jax import allocation
from vigor_jax import evaluate
from vigor_jax.allocation import population as population_lib
from vigor_jax.allocation import prediction
from vigor_jax.allocation import theory
from vigor_jax.config import fields
from vigor_jax.rollouts import SAMPLED_AT

PHASES = ("prefill", "decode", "reward", "allocate", "update")
# Steps whose counts enter the estimated distribution of pass rates: few, since
# the policy moves and an old count says what it could do then.
_WINDOW = 4
# Simulated steps behind a prediction where there is no enumeration.
_SIMULATED_STEPS = 24


class PhaseTimer:
  """Host seconds of a step by phase; `with timer("decode"): ...`.

  A device trace shows the phases by name, too (profiling.py).
  """

  def __init__(self):
    self.seconds = dict.fromkeys(PHASES, 0.0)
    self._excluded = 0.0
    self._inner = 0.0
    self._open: list[tuple[Any, str, float, float]] = []

  def __call__(self, phase: str) -> PhaseTimer:
    """A context that books its time under `phase`."""
    self._phase = phase
    return self

  def __enter__(self) -> None:
    # A phase inside another (an allocator asked while decoding) is taken
    # from the outer one.
    mark = jax.profiler.TraceAnnotation(self._phase)
    mark.__enter__()
    self._open.append((mark, self._phase, self._inner, time.perf_counter()))
    self._inner = 0.0

  def __exit__(self, *exception) -> None:
    now = time.perf_counter()
    mark, phase, outer, start = self._open.pop()
    mark.__exit__(*exception)
    self.seconds[phase] += now - start - self._inner
    self._inner = outer + now - start

  @contextlib.contextmanager
  def excluded(self) -> Iterator[None]:
    """Time that belongs to no step (uncharged measurements)."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._excluded += time.perf_counter() - start

  def metrics(self, total: float) -> dict[str, float]:
    """time/* of a step that took `total` seconds; the rest is time/other."""
    other = total - self._excluded - sum(self.seconds.values())
    return {**{f"time/{k}": v for k, v in self.seconds.items()},
            "time/other": max(0.0, other)}


class VarianceMeter:
  """Variance per rollout: measured with fresh rollouts, and predicted.

  V = sum n v / sum n over a step's groups, n its rollouts and v its reward
  variance. The step's own rollouts chose the groups, so they overstate it
  (the winner's curse); fresh, uncharged ones do not.
  """

  def __init__(self, parts):
    self._parts = parts
    self._recent: collections.deque = collections.deque(maxlen=_WINDOW)

  def add(self, groups: allocation.Groups) -> None:
    """Remembers a step's counts (rollouts, reward sum) of opened groups."""
    seen = groups.n > 0
    self._recent.append((groups.n[seen], groups.reward_sum[seen]))

  def state_dict(self) -> list:
    """Recent counts as lists (JSON-able)."""
    return [[n.tolist(), k.tolist()] for n, k in self._recent]

  def load_state_dict(self, state: list) -> None:
    """Restores `state_dict`'s value."""
    self._recent.clear()
    self._recent.extend((np.array(n), np.array(k)) for n, k in state)

  def measure(self, params, step: int, rollouts) -> dict[str, Any]:
    """Measured and predicted V for the step whose rollouts these are.

    Args:
      params: the parameters that drew them.
      rollouts: rollouts.StepRollouts.

    Returns:
      allocation/variance_per_rollout_fresh, _fresh_error (standard error),
      _predicted and _pareto; None where a figure does not exist (graded
      rewards have no enumeration, other rules no Pareto formula).
    """
    parts, groups = self._parts, rollouts.groups
    config = parts.config.evaluation
    opened = np.flatnonzero(groups.n > 0)
    if len(opened) > config.fresh_prompts:
      draw = groups.uniforms(0, purpose=99)[opened]
      opened = np.sort(opened[np.argsort(draw)[: config.fresh_prompts]])
    rewards, _ = evaluate.sample_rewards(
        parts.sampler, params, parts.task, parts.scorer.score,
        rollouts.prompts.take(opened), config.fresh_rollouts, step=step,
        stream=evaluate.FRESH_STREAM,
        settings={name: parts.config.sampling[name] for name in SAMPLED_AT})
    variance = rewards.astype(np.float64).var(1, ddof=1)
    n = groups.n[opened]
    measured = float((n * variance).sum() / n.sum())
    spread = n * (variance - measured)
    error = float(np.sqrt((spread**2).sum()) / n.sum())
    out = {"allocation/variance_per_rollout_fresh": measured,
           "allocation/variance_per_rollout_fresh_error": error,
           "allocation/variance_per_rollout_predicted": None,
           "allocation/variance_per_rollout_pareto": None}
    out.update(self._predicted(groups))
    return out

  def _predicted(self, groups) -> dict[str, float]:
    counts = [*self._recent, (groups.n[groups.n > 0],
                              groups.reward_sum[groups.n > 0])]
    n = np.concatenate([c[0] for c in counts])
    k = np.concatenate([c[1] for c in counts])
    if not np.allclose(k, np.rint(k)):
      return {}  # Graded rewards: success counts do not exist.
    people = population_lib.deconvolve(n, np.rint(k))
    config, allocator = self._parts.config, self._parts.allocator
    name = allocator.name
    fresh = allocation.make(
        name, fields.options_of(config.allocation[name],
                                allocation.REGISTRY[name].Options),
        prompts_per_step=config.prompts_per_step,
        budget=config.rollout_budget, seed=config.seed,
        train_on=config.allocation.train_on)
    expected = prediction.predict(fresh, people, steps=_SIMULATED_STEPS,
                                  warmup=3)
    key = "allocation/variance_per_rollout_"
    out = {key + "predicted": expected.variance_per_rollout}
    if name == "vigor" and people.variance.max() > 0:
      used = people.weights > 0
      fit = theory.fit_pareto(people.variance[used], people.weights[used])
      options = fresh.options
      if fit.tail_index > 1:
        gain = theory.variance_gain(fit.tail_index, options.rounds,
                                    options.keep, options.growth)
        mean = float(people.weights @ people.variance)
        out[key + "pareto"] = gain * mean
        out["allocation/pareto_ks"] = fit.ks
    return out
