"""What a step of a rule is worth before training with it.

A step gives prompt x n_x rollouts whose rewards have true variance u_x. Its
gradient, r - mean summed over rollouts, has per prompt (theory.md, section 2;
saturation.py) a signal in proportion to n u, noise that grows like n u, and a
part of its own that n does not average away, in proportion to (n u)^2. The
squared signal over the second moment, the progress of a step at its best
learning rate, is then

  S = (sum n u)^2 / (sum n u + c sum (n u)^2),    c u = b / w = 1 / (n* - 1)^2

the step's number of effective rollouts. c = 0 gives S = sum n u, which VIGOR
maximises; c -> infinity gives the participation number of the prompts that
have signal, which is breadth. c is measured by `saturation`: n* = 3, 3.6 and
5 to 6 at p = .5, .1 and .02 to .05 is c = 1 to 2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation import prediction as allocation_prediction
from vigor_jax.lab import learner
from vigor_jax.lab import world as world_lib

COUPLING = 1.0  # c


@dataclasses.dataclass(frozen=True)
class Figures:
  """Expected figures of one step.

  Attributes:
    variance: V = E[sum n u] / E[sum n], variance per rollout.
    mixed: distinct groups whose rewards disagree.
    effective: S per 256 rollouts.
    rollouts: spent.
    prompts: opened.
  """

  variance: float
  mixed: float
  effective: float
  rollouts: float
  prompts: float


def effective_rollouts(n, u, coupling: float = COUPLING) -> float:
  """S of one step: n, u float [groups]."""
  carried = np.asarray(n, float) * u
  total = carried.sum()
  second = total + coupling * (carried**2).sum()
  return float(total**2 / second) if total > 0 else 0.0


def summarise(steps, coupling: float = COUPLING) -> Figures:
  """Figures of played steps, a list of (n, u, mixed) arrays over groups."""
  carried = np.mean([n @ u for n, u, _ in steps])
  spread = np.mean([((n * u) ** 2).sum() for n, u, _ in steps])
  spent = np.mean([n.sum() for n, _, _ in steps])
  second = carried + coupling * spread
  effective = carried**2 / second if carried > 0 else 0.0
  return Figures(
    float(carried / spent),
    float(np.mean([m.sum() for _, _, m in steps])),
    float(effective * learner.BUDGET / spent),
    float(spent),
    float(np.mean([(n > 0).sum() for n, _, _ in steps])),
  )


def play_population(
  allocator: base.Allocator, population, *, steps: int, warmup: int, seed=0
):
  """Plays a rule on independent prompts: list of (n, u, mixed)."""
  rng = np.random.Generator(np.random.Philox(key=[seed, 2]))
  stream = allocation_prediction.FreshStream(population, rng)
  variance = population.variance
  found = []
  for step in range(warmup + steps):
    groups = allocator.begin(stream, step)
    kinds = stream.kinds[: len(groups)]
    for request in allocator.rounds(groups):
      ids = np.repeat(np.arange(len(groups)), request.counts)
      groups.add(ids, population.draw_rewards(rng, kinds[ids]))
    allocator.end(groups)
    stream.advance(groups.consumed)
    if step >= warmup:
      found.append((groups.n.copy(), variance[kinds], groups.mixed()))
  return found


def play_world(
  world, rule: learner.Rule, *, runs: int = 4, steps: int = 12, warmup: int = 6
):
  """Plays a rule on a world's warm start: list of (n, u, mixed).

  u is the true variance of what the rule sees, p (1 - p) of 0/1 verdicts with
  their noise; of graded ones the mean over steps of p_i (1 - p_i) / d.
  """
  seeds = np.arange(runs)
  rules = [rule.make(int(s)) for s in seeds]
  streams = [world_lib.Stream(world, int(s)) for s in seeds]
  policy = learner.softmax(np.stack([world.initial(int(s)) for s in seeds]))
  found = []
  for step in range(warmup + steps):
    views = [s.peek(a.max_prompts).chains for s, a in zip(streams, rules)]
    _, groups = learner.collect(world, policy, rules, streams, step, seeds)
    if step < warmup:
      continue
    for r, g in enumerate(groups):
      run = np.full(len(g), r)
      u = true_variance(world, policy, run, views[r])
      found.append((g.n.copy(), u, g.mixed()))
  return found


def true_variance(world, policy, run, chains) -> np.ndarray:
  """Variance of the noiseless verdict of each prompt: float64 [N]."""
  if world.reward == "sparse":
    p = learner.success(world, policy, run, chains)
    return p * (1 - p)
  right = np.ones((len(policy), world.skills + 1))
  right[:, :-1] = policy[:, :, 0]
  p = right[run[:, None], chains]
  return (p * (1 - p)).sum(1) / (chains < world.skills).sum(1) ** 2
