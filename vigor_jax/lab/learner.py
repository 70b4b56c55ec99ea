"""Training in the laboratory: many runs at a time, the product's allocators.

Rewards, advantages and gradients of all runs are computed together; every run
has its own allocator, made by `allocation.make` and driven as `train.py`
drives it (begin, rounds, add, keep_rollouts, end). Advantages and weights are
those of `vigor_jax.policy`, a rollout counting as one token.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax import allocation
from vigor_jax.lab import world as world_lib
from vigor_jax.policy import advantages, aggregators

BUDGET = 256


@dataclasses.dataclass(frozen=True)
class Rule:
  """An allocator with its options and its number of prompts per step."""

  name: str
  prompts: int = 32
  options: tuple = ()
  train_on: str = "all"

  @property
  def label(self) -> str:
    if self.name == "uniform":
      return f"uniform {self.prompts} x {BUDGET // self.prompts}"
    extra = [f"{k}={v}" for k, v in self.options]
    extra += ["survivors"] if self.train_on != "all" else []
    return " ".join([self.name, *extra])

  def make(self, seed: int, budget: int = BUDGET) -> allocation.Allocator:
    return allocation.make(
      self.name,
      dict(self.options),
      prompts_per_step=self.prompts,
      budget=budget,
      seed=seed,
      train_on=self.train_on,
    )


@dataclasses.dataclass(frozen=True)
class Estimator:
  """advantage: key of advantages.ADVANTAGES; aggregator: of AGGREGATORS."""

  advantage: str = "dr_grpo"
  aggregator: str = "rollout_mean"


@dataclasses.dataclass
class Rollouts:
  """One step's rollouts of all runs; arrays [N].

  Attributes:
    run, group, sample, round: where each one belongs.
    chains, arms: int [N, STEPS], skill and arm of each step.
    reward: the verdict that was seen, noise included.
  """

  run: np.ndarray
  group: np.ndarray
  sample: np.ndarray
  round: np.ndarray
  chains: np.ndarray
  arms: np.ndarray
  reward: np.ndarray

  def keep(self, rows) -> Rollouts:
    return Rollouts(
      *(getattr(self, f.name)[rows] for f in dataclasses.fields(self))
    )

  @staticmethod
  def concatenate(parts) -> Rollouts:
    return Rollouts(
      *(
        np.concatenate([getattr(p, f.name) for p in parts])
        for f in dataclasses.fields(Rollouts)
      )
    )


def softmax(logits: np.ndarray) -> np.ndarray:
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def draw(world, policy, run, group, sample, round_index, views, seeds):
  """Draws rollouts: policy [R, skills, ARMS], the rest int [N]."""
  table = np.stack([v.chains for v in views])
  places = np.stack([v.positions for v in views])
  chains = table[run, group]
  u = world_lib.uniforms(
    seeds[run], places[run, group], sample, world_lib.STEPS + 1
  )
  edges = np.concatenate(
    [
      policy.cumsum(-1)[..., :-1],
      np.ones((len(policy), 1, world_lib.ARMS - 1)),
    ],
    axis=1,
  )
  # A padded step has all its edges at 1, minus nothing: arm 0, always right.
  edges[:, -1] = 1.0
  flat = edges.reshape(-1, world_lib.ARMS - 1)
  rows = run[:, None] * (world.skills + 1) + chains
  arms = np.zeros(chains.shape, np.int64)
  for a in range(world_lib.ARMS - 1):
    arms += u[:, :-1] >= flat[:, a][rows]
  wrong = arms > 0
  if world.reward == "sparse":
    reward = 1.0 - wrong.any(1)
  else:
    reward = 1.0 - wrong.sum(1) / (chains < world.skills).sum(1)
  if world.noise:
    reward = np.where(u[:, -1] < world.noise, 1 - reward, reward)
  return Rollouts(run, group, sample, round_index, chains, arms, reward)


def success(world, policy, run, chains) -> np.ndarray:
  """p of each rollout's prompt, all steps right: float64 [N]."""
  right = np.ones((len(policy), world.skills + 1))
  right[:, :-1] = policy[:, :, 0]
  return right[run[:, None], chains].prod(1)


def collect(world, policy, rules, streams, step, seeds):
  """Plays one step of every run.

  Args:
    world: the population.
    policy: float64 [R, skills, ARMS].
    rules, streams: one allocator and one stream per run.
    step: index of the step.
    seeds: int64 [R].

  Returns:
    (Rollouts of all runs, list of Groups). Streams have advanced.
  """
  groups = [a.begin(s, step) for a, s in zip(rules, streams)]
  views = [
    s.peek(len(g.skipped)).take(g.rows) for s, g in zip(streams, groups)
  ]
  plays = [a.rounds(g) for a, g in zip(rules, groups)]
  width = len(groups[0])
  granted = np.zeros((len(rules), width), np.int64)
  parts, round_index = [], 0
  active = list(range(len(rules)))
  while active:
    counts = np.zeros((len(rules), width), np.int64)
    going = []
    for r in active:
      request = next(plays[r], None)
      if request is not None:
        counts[r] = request.counts
        going.append(r)
    active = going
    if not active:
      break
    flat = counts.reshape(-1)
    cell = np.repeat(np.arange(flat.size), flat)
    first = np.cumsum(flat) - flat
    sample = np.arange(len(cell)) - first[cell] + granted.reshape(-1)[cell]
    granted += counts
    run, group = np.divmod(cell, width)
    rows = draw(
      world, policy, run, group, sample,
      np.full(len(cell), round_index), views, seeds,
    )  # fmt: skip
    bounds = np.searchsorted(run, np.arange(len(rules) + 1))
    for r in active:
      part = slice(bounds[r], bounds[r + 1])
      groups[r].add(group[part], rows.reward[part])
    parts.append(rows)
    round_index += 1
  rollouts = Rollouts.concatenate(parts)
  for allocator, stream, g in zip(rules, streams, groups):
    allocator.end(g)
    stream.advance(g.taken)
  return rollouts, groups


def coefficients(rollouts, groups, rules, estimator: Estimator):
  """What each trained rollout's score is multiplied with.

  Returns:
    (rows that are trained on, int [K]; coefficients float64 [K]).
  """
  width = len(groups[0])
  keep = np.zeros(len(rollouts.run), bool)
  order = np.argsort(rollouts.run, kind="stable")
  bounds = np.searchsorted(rollouts.run[order], np.arange(len(rules) + 1))
  parts = [order[bounds[r] : bounds[r + 1]] for r in range(len(rules))]
  for r, rows in enumerate(parts):
    keep[rows] = rules[r].keep_rollouts(
      groups[r], rollouts.group[rows], rollouts.sample[rows],
      rollouts.reward[rows],
    )  # fmt: skip
  code = rollouts.run * width + rollouts.group
  extra = {}
  needs = advantages.ADVANTAGES[estimator.advantage].needs
  if "round_index" in needs:
    extra["round_index"] = rollouts.round[keep]
  if "history" in needs:
    # Over all rollouts of the prompt, those not trained on included.
    mean = np.bincount(code, rollouts.reward) / np.maximum(np.bincount(code), 1)
    extra["history"] = mean[code][keep]
  value = np.zeros(len(keep))
  value[keep] = advantages.compute(
    estimator.advantage, rollouts.reward[keep], code[keep], **extra
  )
  for rows in parts:
    rows = rows[keep[rows]]
    if not len(rows):
      continue
    group = rollouts.group[rows]
    weight, total = aggregators.weights(
      estimator.aggregator,
      group,
      np.ones(len(rows), np.int64),
      budget=len(rows),
      max_new_tokens=1,
      num_prompts=int((np.bincount(group) > 0).sum()),
    )
    value[rows] *= weight / total
  rows = np.flatnonzero(keep & (value != 0))
  return rows, value[rows]


def gradient(rollouts, rows, coefficient, policy) -> np.ndarray:
  """sum_j c_j grad log pi(y_j): float64 [R, skills, ARMS], exact scores."""
  runs, skills, arms = policy.shape
  chains = rollouts.chains[rows]
  inside = chains < skills
  cell = (rollouts.run[rows][:, None] * skills + chains)[inside]
  arm = rollouts.arms[rows][inside]
  c = np.repeat(coefficient, inside.sum(1))
  size = runs * skills
  hit = np.bincount(cell * arms + arm, c, size * arms)
  total = np.bincount(cell, c, size).reshape(runs, skills, 1)
  return hit.reshape(policy.shape) - total * policy


@dataclasses.dataclass
class Adam:
  """Adam (arXiv 1412.6980) on logits, ascent; a learning rate per run."""

  rate: np.ndarray
  b1: float = 0.9
  b2: float = 0.99
  eps: float = 1e-8
  m: np.ndarray | float = 0.0
  v: np.ndarray | float = 0.0
  t: int = 0

  def step(self, grad: np.ndarray) -> np.ndarray:
    self.t += 1
    self.m = self.b1 * self.m + (1 - self.b1) * grad
    self.v = self.b2 * self.v + (1 - self.b2) * grad**2
    m = self.m / (1 - self.b1**self.t)
    v = self.v / (1 - self.b2**self.t)
    return self.rate[:, None, None] * m / (np.sqrt(v) + self.eps)


@dataclasses.dataclass
class Curves:
  """Learning curves of R runs.

  Attributes:
    rollouts: float [E], spent at the evaluations (mean over runs).
    accuracy: float [R, E], exact, on the plain mixture.
    mixed: float [R], distinct mixed groups per step, mean over the run.
    variance: float [R], sum n p (1 - p) / sum n with the true p of 0/1
      verdicts, mean over the run.
  """

  rollouts: np.ndarray
  accuracy: np.ndarray
  mixed: np.ndarray
  variance: np.ndarray


def train(
  world,
  rule: Rule,
  seeds,
  rates,
  *,
  steps: int = 100,
  every: int = 2,
  budget: int = BUDGET,
  estimator: Estimator = Estimator(),
) -> Curves:
  """Trains len(seeds) runs with learning rates `rates` [R] (Adam)."""
  seeds = np.asarray(seeds, np.int64)
  rules = [rule.make(int(s), budget) for s in seeds]
  streams = [world_lib.Stream(world, int(s)) for s in seeds]
  start = np.stack([world.initial(int(s)) for s in seeds])
  phi = np.stack([world.embedding(int(s)) for s in seeds])
  weights = np.zeros((len(seeds), phi.shape[2], world_lib.ARMS))
  chains = [world.evaluation_chains(int(s)) for s in seeds]
  optimizer = Adam(np.broadcast_to(np.asarray(rates, float), seeds.shape))
  policy = softmax(start)
  score = lambda: [
    world.success(policy[r, :, 0], chains[r]).mean() for r in range(len(seeds))
  ]
  spent, accuracy = [0.0], [score()]
  mixed, variance = np.zeros(len(seeds)), np.zeros(len(seeds))
  total = 0.0
  for step in range(1, steps + 1):
    rollouts, groups = collect(world, policy, rules, streams, step, seeds)
    rows, c = coefficients(rollouts, groups, rules, estimator)
    slope = gradient(rollouts, rows, c, policy)
    weights = weights + optimizer.step(phi.transpose(0, 2, 1) @ slope)
    total += len(rollouts.run) / len(seeds)
    p = success(world, policy, rollouts.run, rollouts.chains)
    number = np.bincount(rollouts.run, minlength=len(seeds))
    variance += np.bincount(rollouts.run, p * (1 - p), len(seeds)) / number
    mixed += [g.mixed_count() for g in groups]
    policy = softmax(start + phi @ weights)
    if step % every == 0 or step == steps:
      spent.append(total)
      accuracy.append(score())
  return Curves(
    np.array(spent), np.array(accuracy).T, mixed / steps, variance / steps
  )
