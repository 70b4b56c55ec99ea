"""Weights, saturation and missed prompts, against enumeration."""

import itertools
import math

import numpy as np
import pytest
from vigor_jax.lab import estimators, saturation
from vigor_jax.lab.learner import Estimator, Rule
from vigor_jax.lab.world import World

SMALL = estimators.Bandits(np.array([0.15, 0.4, 0.8]), np.full(3, 1 / 3))


def binomial(n, k, p):
  return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize("advantage", ["rloo", "dr_grpo", "grpo"])
def test_uniform_weights_are_the_enumerated_ones(advantage):
  m = estimators.measure(
    SMALL, Rule("uniform", 4), Estimator(advantage, "rollout_mean"),
    steps=300, runs=4, budget=32, warmup=0,
  )  # fmt: skip
  expected = [estimators.uniform_weight(advantage, p, 8) for p in SMALL.p]
  assert (np.abs(m.weight - expected) < 4.5 * m.weight_error).all()
  assert (m.weight_error < 0.08 * m.weight).all()
  assert m.sideways.max() < 4.5


def test_uniform_closed_forms():
  for p in (0.03, 0.5, 0.9):
    assert estimators.uniform_weight("rloo", p, 5) == pytest.approx(1)
    assert estimators.uniform_weight("dr_grpo", p, 5) == pytest.approx(0.8)
  # n = 2: mixed with 2 p q, then A = +-1: w = 2 p q (1 / p + 1 / q) / 2 = 1.
  assert estimators.uniform_weight("grpo", 0.3, 2) == pytest.approx(1, rel=1e-4)


def test_vigors_weights_are_the_enumerated_ones():
  """Two prompts, two rounds: 2 each, then the better one draws 4 more."""
  rule = Rule("vigor", 2, (("initial_rollouts", 2), ("rounds", 2)))
  budget = 8
  shares = SMALL.weights
  total = np.zeros(len(SMALL.p))
  spread = lambda n, k: k * (n - k) / n**2

  def term(n, k, p):  # sum of (r - mean)(r / p - (1 - r) / (1 - p)), / B
    mean = k / n
    return (k * (1 - mean) / p + (n - k) * mean / (1 - p)) / budget

  for (i, p), (j, q) in itertools.product(enumerate(SMALL.p), repeat=2):
    for k, k2 in itertools.product(range(3), repeat=2):
      chance = shares[j] * binomial(2, k, p) * binomial(2, k2, q)
      mine, other = spread(2, k), spread(2, k2)
      stays = 0.5 if mine == other else float(mine > other)
      total[i] += chance * (1 - stays) * term(2, k, p)
      for more in range(5):
        total[i] += chance * stays * binomial(4, more, p) * term(6, k + more, p)
  # One prompt of the published split for a budget of 8.
  m = estimators.measure(
    SMALL, rule, Estimator("dr_grpo", "rollout_mean"), steps=1200, runs=4,
    budget=budget, warmup=0,
  )  # fmt: skip
  assert (np.abs(m.weight - total) < 4.5 * m.weight_error).all()
  assert (m.weight_error < 0.08 * m.weight).all()
  assert m.sideways.max() < 4.5


def test_predictable_baseline_weighs_by_the_rollouts():
  m = estimators.measure(
    SMALL, Rule("vigor", 8), Estimator("predictable", "rollout_mean"),
    steps=400, runs=4, budget=64, warmup=0,
  )  # fmt: skip
  assert (np.abs(m.weight - m.rollouts / 8) < 4.5 * m.weight_error).all()


# ------------------------------------------------------------------ saturation


def test_moments_of_a_coin_by_hand():
  # Two arms, p = 1/4: s = (1 - p, p - 1) or (-p, p), |s|^2 = 2 q^2 or 2 p^2.
  m = saturation.moments(np.array([[0.25, 0.75]]))
  assert m.mean == pytest.approx(0.25)
  assert m.variance == pytest.approx(3 / 16)
  assert m.signal == pytest.approx(2 * (3 / 16) ** 2)
  assert m.fisher == pytest.approx(2 * 3 / 16)
  # p q^2 2 q^2 + q p^2 2 p^2
  assert m.mixed == pytest.approx(2 * (0.25 * 0.75**4 + 0.75 * 0.25**4))


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_energy_of_a_group_against_simulation(n, graded):
  policies = np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]])
  m = saturation.moments(policies, graded)
  rng = np.random.default_rng(n)
  groups = 60_000
  arms = np.stack(
    [rng.choice(3, (groups, n), p=row) for row in policies], axis=-1
  )
  right = arms == 0
  reward = right.mean(-1) if graded else right.all(-1).astype(float)
  score = np.eye(3)[arms] - policies
  a = (reward - reward.mean(1, keepdims=True)) * n / (n - 1)
  g = np.einsum("gn,gnda->gda", a, score) / n
  energy = (g**2).sum((1, 2))
  error = energy.std() / np.sqrt(groups)
  assert abs(energy.mean() - m.energy(n)) < 4.5 * error


def test_saturation_finds_what_was_put_in():
  class Exact:
    def energy(self, n):
      return 0.5 + 4.5 / (n - 1)

  s = saturation.saturation([Exact()])
  assert (s.b, s.w) == pytest.approx((0.5, 4.5))
  assert s.best == pytest.approx(4)
  assert s.exact == 4  # n (b + w / (n - 1)) is least at 1 + sqrt(w / b)
  assert s.fit_error < 1e-9


def test_rare_successes_saturate_later():
  best = [
    saturation.saturation(
      [saturation.moments(np.array([[p, (1 - p) * 0.6, (1 - p) * 0.4]]))]
    ).best
    for p in (0.5, 0.1, 0.02)
  ]
  assert best[0] < best[1] < best[2]


def test_false_negatives():
  world = World.preset("sparse_signal")
  m = saturation.false_negatives(world, Rule("vigor"), runs=4, steps=3)
  assert m.dropped == pytest.approx(0.5)
  assert 0 < m.high < m.mixed < 1
  random = saturation.false_negatives(
    world, Rule("random_top"), runs=4, steps=3
  )
  # Dropping at random drops half of the high-variance prompts.
  assert random.of_all_high == pytest.approx(0.5, abs=0.15)
  assert m.of_all_high < random.of_all_high
