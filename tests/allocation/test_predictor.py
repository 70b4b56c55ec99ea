"""The regression behind eb_predicted, and the features that it looks at."""

import json

import numpy as np
import pytest
from vigor_jax.allocation import predictor as predicting
from vigor_jax.allocation.span import Span


def logistic(t):
  return 1 / (1 + np.exp(-t))


def learned(seed=0, prompts=60, width=5):
  """A predictor, the designs of a step's prompts, and their counts."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((prompts, width)) * [1, 10, 0.1, 1, 0][:width]
  p = logistic(2 * x[:, 0] - 1)
  n = rng.integers(1, 9, prompts).astype(float)
  predictor = predicting.Predictor()
  assert predictor.look(x)
  return predictor, predictor.design(x), n, rng.binomial(n.astype(int), p) * 1.0


def fit(predictor, z, n, k, newton=predicting.NEWTON):
  return predictor.fit(predictor.ahead(z, n), k, newton)


def step(predictor, z, n, k):
  """A step that ends with one iteration."""
  predictor.commit(fit(predictor, z, n, k, 1))


class TestPredictor:
  def test_fit_is_the_mode_of_the_posterior(self):
    predictor, z, n, k = learned()
    found = fit(predictor, z, n, k)
    worth = 1 / (1 + (n - 1) * predicting.ALIKE)
    slope = z.T @ (worth * (k - n * logistic(z @ found.mean)))
    slope -= predictor.precision @ found.mean  # nothing is forgotten of a prior
    assert np.abs(slope).max() < 1e-6

  def test_finds_what_tells(self):
    predictor, z, n, k = learned(prompts=400)
    found = fit(predictor, z, n, k)
    assert found.mean[0] == pytest.approx(2, abs=0.4)
    assert np.abs(found.mean[1:4]).max() < 0.4 and len(found.mean) == 4 + 1
    logit = found.forecast(z)
    assert np.corrcoef(logit, z[:, 0])[0, 1] > 0.98

  @pytest.mark.parametrize("seed", range(3))
  def test_left_out_forecasts_do_not_know_their_own_verdicts(self, seed):
    predictor, z, n, k = learned(seed)
    found = fit(predictor, z, n, k)
    for i in (0, 7, 31):
      rest = np.arange(len(n)) != i
      alone = fit(predictor, z[rest], n[rest], k[rest]).forecast(z[i : i + 1])
      assert found.without[i] == pytest.approx(alone[0], abs=0.12)

  def test_prompts_without_verdicts_are_forecast_only(self):
    predictor, z, n, k = learned()
    n[40:], k[40:] = 0, 0
    found = fit(predictor, z, n, k)
    alone = fit(predictor, z[:40], n[:40], k[:40])
    np.testing.assert_allclose(found.mean, alone.mean)
    np.testing.assert_allclose(found.without[:40], alone.without)
    np.testing.assert_allclose(found.without[40:], alone.forecast(z[40:]))

  def test_knows_little_at_first(self):
    predictor, z, *_ = learned()
    assert np.abs(predictor.forecast(z)).max() == 0
    with pytest.raises(ValueError, match="3 features"):
      predictor.look(np.ones((4, 3)))

  def test_one_iteration_a_step_comes_to_the_same_soon(self):
    predictor, z, n, k = learned()
    other = learned()[0]
    for _ in range(40):
      predictor.commit(fit(predictor, z, n, k))
      step(other, z, n, k)
    np.testing.assert_allclose(
      other.forecast(z), predictor.forecast(z), rtol=0.02, atol=0.02
    )

  def test_an_iteration_does_not_overshoot(self):
    predictor, z, n, _ = learned()
    for _ in range(20):
      step(predictor, z, n, n)  # All right: logits are far out.
    for _ in range(4):
      step(predictor, z, n, 0 * n)  # And now none.
    found = predictor.forecast(z)
    assert -9 < found.min() and found.max() < 0

  def test_forgets(self):
    predictor, z, n, k = learned()
    predictor.commit(fit(predictor, z, n, k))
    before = np.trace(predictor.precision)
    for _ in range(80):
      predictor.commit(fit(predictor, z[:0], n[:0], k[:0]))
    assert np.trace(predictor.precision) < before
    fresh, *_ = learned()
    np.testing.assert_allclose(predictor.precision, fresh.precision, atol=0.02)

  def test_features_that_do_not_vary_are_none(self):
    assert not predicting.Predictor().look(np.tile([3.0, 0.1], (9, 1)))


def dependent(rows, rank=7, seed=0):
  """Features of prompts that differ in `rank` ways: float [rows, 30]."""
  ways = np.random.default_rng(99).standard_normal((12, 30))
  x = np.random.default_rng(seed).standard_normal((rows, rank)) @ ways[:rank]
  x[:, 3] = 0  # tells nothing
  return x * np.logspace(-1, 1, 30) + 1.5


def verdicts(x, seed=0):
  rng = np.random.default_rng(seed)
  n = rng.integers(1, 9, len(x)).astype(float)
  p = logistic((x[:, 0] - 1.5) * 5)
  return n, rng.binomial(n.astype(int), p) * 1.0


def unreduced(x, monkeypatch):
  """A predictor that first saw x and computes with every feature."""
  with monkeypatch.context() as patched:
    everything = Span(np.arange(x.shape[1]), np.eye(x.shape[1]))
    patched.setattr(Span, "of", lambda z: everything)
    predictor = predicting.Predictor()
    predictor.look(x)
  return predictor


class TestSpan:
  def test_columns_tell_the_others(self):
    x = dependent(100)
    span = Span.of(x)
    assert len(span.columns) == 7 + 1  # and the one thing in common
    np.testing.assert_allclose(x[:, span.columns] @ span.basis, x, atol=1e-9)
    assert not span.outside(x).any()
    assert len(Span.of(np.zeros((5, 4))).columns) == 0
    assert len(Span.of(x[:3]).columns) == 3

  def test_full_rank_is_all_columns_as_they_are(self):
    x = np.random.default_rng(0).standard_normal((50, 6))
    span = Span.of(x)
    assert span.columns.tolist() == list(range(6))
    np.testing.assert_array_equal(span.basis, np.eye(6))

  def test_rows_outside_are_seen_and_join(self):
    x = dependent(100)
    span, more = Span.of(x), x[:9].copy()
    more[4, 11] += 1e-3
    more[6, 2] += 1.0
    assert np.flatnonzero(span.outside(more)).tolist() == [4, 6]
    joined, turn = span.joined(more)
    assert joined.columns[:8].tolist() == span.columns.tolist()
    for z in (x, more):
      columns = z[:, joined.columns]
      np.testing.assert_allclose(columns @ joined.basis, z, atol=1e-6)
    assert not joined.outside(more).any()
    # Weights of the new columns say the same of prompts in the old span.
    u = np.random.default_rng(1).standard_normal(10)
    np.testing.assert_allclose(
      x[:, joined.columns] @ u, x[:, span.columns] @ turn @ u
    )

  def test_state(self):
    span = Span.of(dependent(100))
    span, _ = span.joined(np.random.default_rng(2).standard_normal((3, 30)))
    again = Span.from_state(json.loads(json.dumps(span.state_dict())), 30)
    np.testing.assert_array_equal(again.columns, span.columns)
    np.testing.assert_array_equal(again.basis, span.basis)


class TestReduced:
  @pytest.mark.parametrize("whole", [True, False])
  def test_says_what_the_one_with_all_features_says(self, monkeypatch, whole):
    """Over several steps, of prompts that leave the span of those before."""
    first = dependent(200)
    mine, theirs = predicting.Predictor(), unreduced(first, monkeypatch)
    mine.look(first)
    sizes = []
    for seed, rank in enumerate((7, 7, 9, 9, 12, 7)):
      x = dependent(80, rank, seed=seed)
      n, k = verdicts(x, seed)
      said = []
      for predictor in (mine, theirs):
        predictor.look(x)
        z = predictor.design(x)
        said.append([predictor.forecast(z)])
        if whole:
          found = fit(predictor, z[:50], n[:50], k[:50])
          said[-1] += [found.without, found.forecast(z[50:])]
          predictor.commit(found)
        else:
          step(predictor, z[:50], n[:50], k[:50])
        said[-1].append(predictor.forecast(z))
      for a, b in zip(*said):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
      sizes.append(len(mine.mean))
    assert sizes == [8, 8, 10, 10, 13, 13] and len(theirs.mean) == 31
    assert np.abs(said[0][-1]).max() > 1

  def test_few_prompts_at_first(self, monkeypatch):
    mine, theirs = predicting.Predictor(), unreduced(dependent(4), monkeypatch)
    mine.look(dependent(4))
    assert len(mine.mean) == 3 + 1  # four prompts, less their mean
    for seed in range(3):
      x = dependent(4, seed=seed)
      for predictor in (mine, theirs):
        predictor.look(x)
        z = predictor.design(x)
        predictor.commit(fit(predictor, z, *verdicts(x, seed)))
    assert len(mine.mean) == 7 + 1
    x = dependent(50)
    np.testing.assert_allclose(
      mine.forecast(mine.design(x)), theirs.forecast(theirs.design(x)),
      rtol=1e-9, atol=1e-9,
    )  # fmt: skip

  def test_goes_on_from_its_state_to_the_last_bit(self):
    first, second = predicting.Predictor(), predicting.Predictor()
    for step, rank in enumerate((7, 9, 9, 12)):
      if step:
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
      x = dependent(80, rank, seed=step)
      for predictor in (first, second):
        predictor.look(x)
        z = predictor.design(x)
        predictor.commit(fit(predictor, z, *verdicts(x, step)))
      assert first.state_dict() == second.state_dict()
      np.testing.assert_array_equal(first.forecast(z), second.forecast(z))
