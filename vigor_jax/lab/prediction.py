"""What a step of a rule is worth before training with it.

A step gives prompt x n_x rollouts whose rewards have true variance u_x. The
sum over them of (r - mean) score is (n - 1) times the leave-one-out gradient,
whose energy is b + w / (n - 1) (saturation.py). With m = n - 1, b in
proportion to u^2 and w to u, signal and second moment of the step give

  S = (sum m v)^2 / (sum m u + c sum (m u)^2),     c u = b / w = 1 / (n* - 1)^2
  v = u (2 (1 - p))^s

the progress of the step at its best learning rate, in effective rollouts. v
counts what there is to gain: a prompt that is nearly solved has variance and
nothing left to learn (s = 1; s = 0 leaves it out). For uniform groups of equal
prompts S is largest at n = n* = 1 + 1 / sqrt(c u). c = s = 0 gives
S = sum m u, VIGOR's goal; c -> infinity the participation number of the
prompts that have signal: breadth. n* = 3, 4.2 and 5.5 at p = .5, .1 and .05,
measured on a small network, is c = 1.0 to 1.1 each time; the exact bandits of
the laboratory have c = 1 to 2. That a rule's n depends on the rewards is not in
S (adaptivity changes weights, docs/theory.md, section 5).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import base
from vigor_jax.allocation import prediction as allocation_prediction
from vigor_jax.lab import learner
from vigor_jax.lab import world as world_lib

COUPLING = 2.0  # c
ROOM = 1.0  # s
# d log(measured gain) / d log(ratio of S) over the laboratory's cells: training
# moves the pass rates, so a step's advantage is only part of a run's.
SHRINKAGE = 0.4


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


@dataclasses.dataclass(frozen=True)
class Step:
  """Groups of one played step, arrays [groups].

  Attributes:
    n: rollouts.
    mean, variance: of the prompt's true reward.
    mixed: bool, the verdicts disagree.
    seen: variance of the verdicts, wrong ones included; None: `variance`.
    noise: q, probability that a verdict is turned round.
  """

  n: np.ndarray
  mean: np.ndarray
  variance: np.ndarray
  mixed: np.ndarray
  seen: np.ndarray | None = None
  noise: float = 0.0


def summarise(
  steps: list[Step], coupling: float = COUPLING, room: float = ROOM
) -> Figures:
  """Figures of played steps.

  Args:
    steps: played with one rule.
    coupling: c.
    room: s, the exponent of 2 (1 - mean) in a prompt's value.
  """
  spent = np.mean([step.n.sum() for step in steps])
  signal = second = 0.0
  for step in steps:
    kept = 1 - 2 * step.noise  # of the signal
    m = np.maximum(step.n - 1, 0) * step.variance * kept
    signal += (m * (2 * (1 - step.mean)) ** room).sum() / len(steps)
    seen = step.variance if step.seen is None else step.seen
    noise = np.maximum(step.n - 1, 0) * seen
    second += (noise + coupling * m**2).sum() / len(steps)
  effective = signal**2 / second if signal > 0 else 0.0
  return Figures(
    float(np.mean([step.n @ step.variance for step in steps]) / spent),
    float(np.mean([step.mixed.sum() for step in steps])),
    float(effective * learner.BUDGET / spent),
    float(spent),
    float(np.mean([(step.n > 0).sum() for step in steps])),
  )


def gain(ratio):
  """Predicted rollouts to target, baseline / rule, from a ratio of S."""
  return np.maximum(ratio, 1e-9) ** SHRINKAGE


def play_population(
  allocator: base.Allocator, population, *, steps: int, warmup: int, seed=0
):
  """Plays a rule on independent prompts: a list of Step."""
  rng = np.random.Generator(np.random.Philox(key=[seed, 2]))
  stream = allocation_prediction.FreshStream(population, rng)
  found = []
  for step in range(warmup + steps):
    groups = allocator.begin(stream, step)
    kinds = stream.kinds[groups.rows]
    for request in allocator.rounds(groups):
      ids = np.repeat(np.arange(len(groups)), request.counts)
      groups.add(ids, population.draw_rewards(rng, kinds[ids]))
    allocator.end(groups)
    stream.advance(groups.taken)
    if step >= warmup:
      found.append(
        Step(
          groups.n.copy(),
          population.mean[kinds],
          population.variance[kinds],
          groups.mixed(),
        )
      )
  return found


def play_world(
  world, rule: learner.Rule, *, runs: int = 4, steps: int = 12, warmup: int = 6
):
  """Plays a rule on a world's warm start: a list of Step.

  The true variance is p (1 - p) of 0/1 verdicts, sum_i p_i (1 - p_i) / d^2 of
  graded ones.
  """
  seeds = np.arange(runs)
  rules = [rule.make(int(s)) for s in seeds]
  streams = [world_lib.Stream(world, int(s)) for s in seeds]
  policy = learner.softmax(np.stack([world.initial(int(s)) for s in seeds]))
  found = []
  for step in range(warmup + steps):
    rollouts, groups = learner.collect(
      world, policy, rules, streams, step, seeds
    )
    if step < warmup:
      continue
    for r, g in enumerate(groups):
      run = np.full(len(g), r)
      # Those of opened prompts; the others have no rollouts to count.
      chains, mine = np.zeros((len(g), world_lib.STEPS), int), rollouts.run == r
      chains[rollouts.group[mine]] = rollouts.chains[mine]
      mean, u = true_rewards(world, policy, run, chains)
      # E r'^2 - (E r')^2 for r' = r or, with probability q, 1 - r.
      q = world.noise
      seen = u + mean**2 + q * (1 - 2 * mean) - (q + (1 - 2 * q) * mean) ** 2
      found.append(Step(g.n.copy(), mean, u, g.mixed(), seen, q))
  return found


def true_rewards(world, policy, run, chains):
  """(mean, variance) of the noiseless verdict of each prompt, float64 [N]."""
  if world.reward == "sparse":
    p = learner.success(world, policy, run, chains)
    return p, p * (1 - p)
  right = np.ones((len(policy), world.skills + 1))
  right[:, :-1] = policy[:, :, 0]
  p = right[run[:, None], chains]
  inside = chains < world.skills
  length = inside.sum(1)
  return (p * inside).sum(1) / length, (p * (1 - p)).sum(1) / length**2
