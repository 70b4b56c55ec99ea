"""Evaluation and curve statistics against hand-worked numbers."""

import itertools
import math

import numpy as np
import pytest

from vigor_jax import statistics


def test_pass_at_k_by_hand():
  # 4 drawn, 1 right, pairs: 6, without the right one: 3. 1 - 3/6.
  assert statistics.pass_at_k(4, 1, 2) == pytest.approx(0.5)
  # 5 drawn, 2 right: 1 - C(3,2)/C(5,2) = 1 - 3/10.
  assert statistics.pass_at_k(5, 2, 2) == pytest.approx(0.7)
  assert statistics.pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
  assert statistics.pass_at_k(4, 0, 2) == 0.0
  assert statistics.pass_at_k(4, 3, 2) == 1.0  # only one wrong, two drawn
  assert statistics.pass_at_k(4, 4, 4) == 1.0


def test_pass_at_k_is_any_of_k_averaged_over_subsets():
  right = [1, 0, 0, 1, 0, 0]
  for k in range(1, 7):
    subsets = list(itertools.combinations(right, k))
    expected = sum(any(s) for s in subsets) / len(subsets)
    assert statistics.pass_at_k(6, 2, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_equals_binomials_for_mixed_sizes_and_large_n():
  n, c = np.array([10, 7, 3]), np.array([4, 0, 3])
  expected = [1 - math.comb(6, 3) / math.comb(10, 3), 0.0, 1.0]
  np.testing.assert_allclose(
      statistics.pass_at_k(n, c, 3), expected, atol=1e-12)
  expected = 1 - float(
      math.comb(9990, 100) / math.comb(10000, 100))  # exact integers
  assert statistics.pass_at_k(10000, 10, 100) == pytest.approx(
      expected, rel=1e-9)


def test_pass_at_k_refuses_more_than_was_drawn():
  with pytest.raises(ValueError, match="largest legal k is 4"):
    statistics.pass_at_k(np.array([8, 4]), np.array([1, 1]), 5)
  with pytest.raises(ValueError, match="k >= 1"):
    statistics.pass_at_k(4, 1, 0)
  with pytest.raises(ValueError, match="0..n"):
    statistics.pass_at_k(4, 5, 1)
  with pytest.raises(ValueError, match="integers"):
    statistics.pass_at_k(4, 0.5, 1)


def test_scores_per_prompt():
  fractions = [[1.0, 0.5, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
  np.testing.assert_allclose(statistics.avg_at_k(fractions), [0.625, 0.25])
  np.testing.assert_allclose(statistics.full_pass(fractions), [0.5, 0.0])
  np.testing.assert_allclose(
      statistics.average_test_pass(fractions), [0.625, 0.25])


def test_scores_refuse_nan_and_wrong_shapes():
  with pytest.raises(ValueError, match=r"rewards\[1, 0\] is nan"):
    statistics.avg_at_k([[1.0], [math.nan]])
  with pytest.raises(ValueError, match="prompts, completions"):
    statistics.full_pass([1.0, 0.0])


def test_consensus_majority_ties_and_missing_answers():
  answers = [
      ["4", "4", "5"],  # 4 wins and is right
      ["4", "5", None],  # a tie of a right and a wrong answer
      ["7", "7", "4"],  # the majority is wrong
      [None, None, None],  # nobody votes
  ]
  correct = [[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]]
  np.testing.assert_allclose(
      statistics.cons_at_k(answers, correct), [1.0, 0.5, 0.0, 0.0])


def test_bootstrap_interval_covers_and_is_reproducible():
  rng = np.random.Generator(np.random.Philox(key=3))
  hits = 0
  for trial in range(200):
    values = rng.normal(1.0, 2.0, size=60)
    low, high = statistics.bootstrap_interval(
        values, resamples=400, seed=trial)
    hits += low <= 1.0 <= high
  # 95 % aimed at; four standard errors of a binomial around 93 %.
  assert 0.86 < hits / 200 <= 1.0
  values = np.arange(10.0)
  assert (statistics.bootstrap_interval(values)
          == statistics.bootstrap_interval(values))
  assert statistics.bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
  assert all(map(math.isnan, statistics.bootstrap_interval([1.0])))


def test_bootstrap_of_another_statistic():
  low, high = statistics.bootstrap_interval(
      np.arange(101.0), lambda draws: np.median(draws, axis=1))
  assert 30 < low < 50 < high < 70


def test_smooth_keeps_lines_and_ends():
  np.testing.assert_allclose(
      statistics.smooth([0.0, 3.0, 0.0, 3.0], 3), [0.0, 1.0, 2.0, 3.0])
  line = np.linspace(2, 5, 9)
  for window in (1, 3, 5, 7):
    np.testing.assert_allclose(statistics.smooth(line, window), line)
  with pytest.raises(ValueError, match="odd"):
    statistics.smooth(line, 4)


def test_reach_interpolates_and_censors():
  x, y = [0, 100, 200, 300], [0.2, 0.3, 0.5, 0.4]
  assert statistics.reach(x, y, 0.4) == statistics.Reached(150.0, False)
  assert statistics.reach(x, y, 0.2) == statistics.Reached(0.0, False)
  assert statistics.reach(x, y, 0.6) == statistics.Reached(300.0, True)
  with pytest.raises(ValueError, match="decrease"):
    statistics.reach([0, 2, 1], [0, 0, 0], 1)


def test_mean_curve_uses_the_common_range():
  curve = statistics.mean_curve(
      [([0, 10, 20], [0.0, 1.0, 2.0]), ([0, 5, 10], [1.0, 1.5, 2.0])])
  np.testing.assert_allclose(curve.x, [0, 5, 10])
  np.testing.assert_allclose(curve.mean, [0.5, 1.0, 1.5])
  np.testing.assert_allclose(curve.low, [0.0, 0.5, 1.0])
  np.testing.assert_allclose(curve.high, [1.0, 1.5, 2.0])


def test_targets_are_fractions_of_the_rise_to_the_top():
  fixed = statistics.targets([0.2, 0.4, 0.6, 0.5])
  assert (fixed.start, fixed.top) == (0.2, 0.6)
  np.testing.assert_allclose(fixed.values, [0.4, 0.54])
  assert statistics.targets([0.5, 0.4]).values == ()


def _reached(*values):
  return [statistics.Reached(v, False) for v in values]


def test_paired_ratio_by_hand():
  ratio = statistics.paired_ratio(_reached(400, 200), _reached(100, 200))
  assert ratio.value == pytest.approx(2.0)  # sqrt(4 * 1)
  assert ratio.per_pair == pytest.approx((4.0, 1.0))
  assert (ratio.low, ratio.high) == pytest.approx((1.0, 4.0))
  assert ratio.bound == ""


def test_paired_ratio_of_one_pair_has_no_interval():
  ratio = statistics.paired_ratio(_reached(300), _reached(200))
  assert ratio.value == pytest.approx(1.5)
  assert math.isnan(ratio.low) and math.isnan(ratio.high)


def test_paired_ratio_with_censored_runs_is_a_bound():
  late = statistics.Reached(400, True)
  ratio = statistics.paired_ratio(_reached(200, 200), [late, late])
  assert (ratio.value, ratio.bound) == (pytest.approx(0.5), "at most")
  ratio = statistics.paired_ratio([late, late], _reached(200, 200))
  assert (ratio.value, ratio.bound) == (pytest.approx(2.0), "at least")
  ratio = statistics.paired_ratio([late], [late])
  assert ratio.bound == "unknown" and math.isnan(ratio.value)
  # A run that starts above the target spent nothing: no ratio exists.
  assert statistics.paired_ratio(
      _reached(0.0), _reached(10.0)).bound == "unknown"


def test_geometric_mean():
  assert statistics.geometric_mean([1, 4, 16]) == pytest.approx(4.0)
  with pytest.raises(ValueError, match="positive"):
    statistics.geometric_mean([1.0, 0.0])
