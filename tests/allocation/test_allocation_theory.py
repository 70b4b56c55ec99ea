"""Theorem 2, Pareto fit, finite-sample prediction, deconvolution."""

import itertools
import math

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax.allocation import prediction, theory
from vigor_jax.allocation.population import Population
from vigor_jax.allocation.population import deconvolve
from vigor_jax.allocation.population import fit_beta

SPARSE = Population.binary([0.999, 0.01, 0.3], [0.75, 0.15, 0.1])


class TestTheorem2:
  def test_published_values(self):
    assert theory.variance_gain(1.5, 4) == pytest.approx(2.277, abs=5e-4)
    assert theory.speedup(1.5, 4) == pytest.approx(1.316, abs=5e-4)
    for rounds, value in ((2, 1.294), (3, 1.702), (5, 3.091)):
      assert theory.variance_gain(1.5, rounds) == pytest.approx(value, abs=5e-4)

  def test_limits(self):
    assert theory.variance_gain(math.inf, 4) == 1
    assert theory.variance_gain(1.5, 1) == 1
    assert theory.variance_gain(1e9, 4) == pytest.approx(1)

  def test_geometric_form_when_rounds_cost_the_same(self):
    # alpha gamma = 1: (alpha^(-T/k) - 1) / (T (alpha^(-1/k) - 1)).
    for alpha, k, t in itertools.product((0.25, 0.5), (1.2, 2.0), (2, 5)):
      closed = (alpha ** (-t / k) - 1) / (t * (alpha ** (-1 / k) - 1))
      assert theory.variance_gain(k, t, alpha, 1 / alpha) == pytest.approx(
        closed
      )

  def test_grows_with_rounds_and_with_the_tail(self):
    by_rounds = [theory.variance_gain(1.5, t) for t in range(1, 8)]
    assert (np.diff(by_rounds) > 0).all()
    by_tail = [theory.variance_gain(k, 4) for k in (1.1, 1.5, 3, 10)]
    assert (np.diff(by_tail) < 0).all()

  @pytest.mark.parametrize("k", [1.0, 0.5, math.nan])
  def test_no_mean(self, k):
    with pytest.raises(ValueError, match="above 1"):
      theory.variance_gain(k, 4)

  @pytest.mark.parametrize("rounds", [2, 3, 4, 5])
  def test_monte_carlo(self, rounds):
    drawn = [theory.monte_carlo_gain(1.5, rounds, seed=s) for s in range(60)]
    # 4096 prompts lose a little of the infinite tail.
    assert np.mean(drawn) == pytest.approx(
      theory.variance_gain(1.5, rounds), rel=0.025
    )


class TestPareto:
  @pytest.mark.parametrize("k", [1.5, 3.0])
  def test_recovers_a_pareto_law(self, k):
    rng = np.random.default_rng(0)
    u = 0.02 * (1 - rng.random(20000)) ** (-1 / k)
    fit = theory.fit_pareto(u, u_min=0.02)
    assert fit.tail_index == pytest.approx(k, rel=0.03)
    assert fit.ks < 0.01 and fit.describes
    assert fit.tail_share == pytest.approx(1)
    assert fit.hill_low == pytest.approx(fit.hill_high, rel=0.06)

  def test_finds_the_threshold(self):
    rng = np.random.default_rng(1)
    u = np.concatenate(
      [
        rng.uniform(0.001, 1, 10000),
        (1 - rng.random(10000)) ** (-1 / 2),
      ]
    )
    fit = theory.fit_pareto(u)
    # Any threshold from 1 on is a right one; below 1 the law is another.
    assert 0.95 < fit.u_min < 2
    assert fit.tail_index == pytest.approx(2, rel=0.1)
    assert fit.ks < 0.02
    assert theory.fit_pareto(u, u_min=0.01).ks > 0.2

  def test_binary_reward_variance_is_not_pareto(self):
    population = Population.beta(0.5, 0.5)
    fit = theory.fit_pareto(population.variance, population.weights, u_min=0.01)
    assert not fit.describes
    # Bounded by 1/4: the higher the threshold, the lighter the tail looks.
    assert fit.hill_high > 2 * fit.hill_low

  def test_hill_by_hand(self):
    # log 2 + log 4 over 1, 2, 4: 3 / (3 log 2).
    k = theory.hill([0.5, 1, 2, 4], np.ones(4), 1.0)
    assert k == pytest.approx(1 / math.log(2))

  def test_weights_are_multiplicities(self):
    u = np.array([1.0, 1.5, 2.0, 5.0])
    one = theory.fit_pareto(np.repeat(u, [4, 3, 2, 1]))
    other = theory.fit_pareto(u, np.array([4.0, 3.0, 2.0, 1.0]))
    for field in ("tail_index", "u_min", "ks", "tail_share", "hill_low"):
      assert getattr(one, field) == pytest.approx(getattr(other, field))

  def test_nothing_positive(self):
    with pytest.raises(ValueError, match="positive"):
      theory.fit_pareto(np.zeros(4))


class TestKeepProbability:
  @pytest.mark.parametrize(
    "above, tied, prompts, kept",
    [(0.2, 0.5, 5, 2), (0, 1, 4, 2), (0.7, 0.1, 6, 3)],
  )
  def test_by_brute_force(self, above, tied, prompts, kept):
    # Every assignment of {better, tied, worse} to the other prompts.
    total = 0.0
    for others in itertools.product(range(3), repeat=prompts - 1):
      probability = np.prod(
        [(above, tied, 1 - above - tied)[o] for o in others]
      )
      a, t = others.count(0), others.count(1)
      total += probability * min(max((kept - a) / (1 + t), 0), 1)
    assert prediction.keep_probability(
      above, tied, prompts, kept
    ) == pytest.approx(total)

  def test_binomial_table(self):
    table = prediction.binomial_table(3, [0.0, 0.25, 1.0])
    np.testing.assert_allclose(
      table,
      [[1, 0, 0, 0], [27 / 64, 27 / 64, 9 / 64, 1 / 64], [0, 0, 0, 1]],
      atol=1e-12,
    )


class TestPrediction:
  def test_zero_variance_figures_of_the_default_schedule(self):
    population = Population.beta(0.5, 0.5)
    vigor = prediction.predict(helpers.make("vigor", prompts=256, budget=2048),
                               population)  # fmt: skip
    assert vigor.zero_variance_share == pytest.approx(0.65, abs=0.006)
    assert vigor.zero_variance_rollout_share == pytest.approx(0.24, abs=0.006)
    uniform = prediction.predict(
      helpers.make("uniform", prompts=256, budget=2048),
      population,
      steps=100,
    )
    # P(zero variance) = E[p^8 + (1 - p)^8], the same for groups and rollouts.
    exact = population.weights @ (
      population.mean**8 + (1 - population.mean) ** 8
    )
    assert exact == pytest.approx(0.393, abs=0.001)
    assert uniform.zero_variance_share == pytest.approx(exact, abs=0.01)
    assert uniform.zero_variance_rollout_share == pytest.approx(exact, abs=0.01)

  @pytest.mark.parametrize("n, share", [(2, .7024), (4, .4490), (8, .2007),
                                        (16, .0403)])  # fmt: skip
  def test_zero_variance_at_one_p(self, n, share):
    allocator = helpers.make("uniform", prompts=64, budget=64 * n)
    # Standard error at most .5 / sqrt(64 * 400) = .003.
    found = prediction.predict(
      allocator, Population.binary([0.1819]), steps=400
    )
    assert found.zero_variance_share == pytest.approx(share, abs=0.012)

  def test_rollouts_by_p(self):
    # literature: E[N] 3.8, 6.1, 10.5, 15.6 for p in .02-.05, .1-.2, .2-.35,
    # .35-.5 under the default schedule, P = 256, Beta(1/2, 1/2).
    population = Population.beta(0.5, 0.5, 2000)
    allocator = helpers.make("vigor", prompts=256, budget=2048)
    found = prediction.enumerate_halving(allocator, population)
    p, w = population.mean, population.weights
    for low, high, n in (
      (0.02, 0.05, 3.8),
      (0.1, 0.2, 6.1),
      (0.2, 0.35, 10.5),
      (0.35, 0.5, 15.6),
    ):
      inside = (p > low) & (p < high)
      mean = found.rollouts_by_kind[inside] @ w[inside] / w[inside].sum()
      assert mean == pytest.approx(n, abs=0.15)

  def test_one_round_is_uniform(self):
    allocator = helpers.make("vigor", {"rounds": 1}, prompts=8, budget=16)
    found = prediction.predict(allocator, SPARSE)
    plain = SPARSE.weights @ SPARSE.variance
    assert found.variance_per_rollout == pytest.approx(plain)
    np.testing.assert_allclose(found.rollouts_by_kind, 2)

  def test_two_rounds_by_hand(self):
    # Two prompts, m0 = 2, one goes on with 4 more. Kinds p = 0 and p = 1/2,
    # half each. Mixed after two: probability q = 1/4. A p = 1/2 prompt that
    # is mixed goes on surely against an unmixed one, else at random:
    # P(on | mixed) = 3/4 + 1/8 = 7/8, P(on | not) = (3/4) / 2 = 3/8.
    # E[n | 1/2] = 2 + 4 (1/2 7/8 + 1/2 3/8) = 4.5; V = (1/2 4.5 / 4) / 4.
    allocator = helpers.make("vigor", {"rounds": 2}, prompts=2, budget=8)
    found = prediction.predict(allocator, Population.binary([0.0, 0.5]))
    np.testing.assert_allclose(found.rollouts_by_kind, [3.5, 4.5])
    assert found.variance_per_rollout == pytest.approx(4.5 / 32)

  @pytest.mark.parametrize("name", ["vigor", "low_success_first", "random_top"])
  @pytest.mark.parametrize("population", [Population.beta(0.5, 0.5), SPARSE])
  def test_enumeration_agrees_with_the_allocator(self, name, population):
    exact = prediction.predict(helpers.make(name), population)
    played = prediction.simulate(
      helpers.make(name), population, steps=600, seed=5
    )
    tolerance = 4 * played.standard_error
    tolerance += 0.01 * exact.variance_per_rollout
    assert exact.variance_per_rollout == pytest.approx(
      played.variance_per_rollout, abs=tolerance
    )
    assert exact.zero_variance_rollout_share == pytest.approx(
      played.zero_variance_rollout_share, abs=0.015
    )
    assert exact.mixed == pytest.approx(played.mixed, rel=0.05)

  def test_graded_rewards_are_simulated(self):
    population = Population(
      [0.5, 0.5], [[0.2, 0.4], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]
    )
    np.testing.assert_allclose(population.variance, [0.01, 0.25])
    with pytest.raises(ValueError, match="simulate"):
      prediction.enumerate_halving(helpers.make("vigor"), population)
    found = prediction.predict(helpers.make("vigor"), population, steps=50)
    assert 0.16 < found.variance_per_rollout < 0.25
    assert found.rollouts_by_kind[1] > found.rollouts_by_kind[0]


class TestDeconvolution:
  def test_from_adaptive_counts(self):
    truth = Population.beta(0.4, 0.6)
    allocator = helpers.make("vigor", prompts=256, budget=2048)
    rng = np.random.default_rng(0)
    stream = prediction.FreshStream(truth, rng)
    n, k = [], []
    for step in range(8):
      groups = allocator.begin(stream, step)
      kinds = stream.kinds[:256]
      for request in allocator.rounds(groups):
        ids = np.repeat(np.arange(256), request.counts)
        groups.add(ids, truth.draw_rewards(rng, kinds[ids]))
      stream.advance(groups.taken)
      n.append(groups.n)
      k.append(groups.reward_sum)
    n, k = np.concatenate(n), np.concatenate(k)
    found = deconvolve(n, k)
    assert found.weights @ found.mean == pytest.approx(0.4, abs=0.02)
    fresh = truth.weights @ truth.variance
    assert found.weights @ found.variance == pytest.approx(fresh, rel=0.05)
    # The raw pass rates are far off.
    raw = (k / n * (1 - k / n)).mean()
    assert abs(raw / fresh - 1) > 0.2
    expected = prediction.predict(allocator, truth).variance_per_rollout
    assert prediction.predict(
      allocator, found
    ).variance_per_rollout == pytest.approx(expected, rel=0.03)

  def test_extremes(self):
    found = deconvolve([8, 8], [0, 8], [30, 10])
    # Eight rollouts cannot tell p = 0 from .01.
    low, high = found.mean < 0.05, found.mean > 0.95
    assert found.weights[low].sum() == pytest.approx(0.75, abs=0.01)
    assert found.weights[high].sum() == pytest.approx(0.25, abs=0.01)

  def test_likelihood_never_falls(self):
    rng = np.random.default_rng(2)
    n = rng.integers(2, 10, 200)
    k = rng.binomial(n, rng.beta(0.5, 0.5, 200))

    def likelihood(population):
      rows = np.array(
        [
          prediction.binomial_table(a, population.mean)[:, b]
          for a, b in zip(n, k)
        ]
      )
      return np.log(rows @ population.weights).sum()

    values = [
      likelihood(deconvolve(n, k, iterations=i)) for i in (0, 1, 5, 50, 500)
    ]
    assert (np.diff(values) > 0).all()

  def test_bad_counts(self):
    with pytest.raises(ValueError, match="at least one"):
      deconvolve([0], [0])
    with pytest.raises(ValueError, match="between 0 and n"):
      deconvolve([2], [3])

  def test_beta_fit(self):
    a, b = fit_beta(Population.beta(0.7, 2.0, 4000))
    assert (a, b) == (pytest.approx(0.7, rel=0.01), pytest.approx(2, rel=0.01))
    with pytest.raises(ValueError, match="differ"):
      fit_beta(Population.binary([0.5]))


def test_population_checks_shapes():
  with pytest.raises(ValueError, match="outcomes"):
    Population([1.0], [[0.0, 1.0]], [[1.0]])
  with pytest.raises(ValueError, match="sum to 1"):
    Population([0.5], [[0.0, 1.0]], [[0.5, 0.5]])
