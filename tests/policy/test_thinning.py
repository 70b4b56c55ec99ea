"""Fewer rollouts in the update: chances by hand, exact draws, no bias."""

import numpy as np
import pytest

from vigor_jax.policy import packing
from vigor_jax.policy import thinning


def test_equal_rollouts_by_hand():
  tokens = np.array([[5, 6, 0], [5, 6, 9], [5, 6, 0], [5, 6, 0], [5, 0, 0]])
  first, inverse = thinning.equal(
    # The second differs past its end only; the third has another prompt, the
    # fourth another advantage, the fifth another length.
    np.array([0, 0, 1, 0, 0]),
    np.array([0.5, 0.5, 0.5, -0.5, 0.5]),
    tokens,
    np.array([2, 2, 2, 2, 1]),
  )
  np.testing.assert_array_equal(first, [0, 2, 3, 4])
  np.testing.assert_array_equal(inverse, [0, 0, 1, 2, 3])
  none = np.zeros(0, np.int64)
  first, inverse = thinning.equal(none, none, np.zeros((0, 3), int), none)
  assert first.shape == inverse.shape == (0,)


def test_chances_by_hand():
  # c = 1 / 4: 4 would be drawn surely, the rest share one draw by size.
  np.testing.assert_allclose(
    thinning.probabilities([4, 1, 1, 2], 2), [1, 0.25, 0.25, 0.5]
  )
  np.testing.assert_allclose(thinning.probabilities([3, 3, 3], 1), [1 / 3] * 3)
  np.testing.assert_allclose(thinning.probabilities([1, 9], 2), [1, 1])
  np.testing.assert_allclose(thinning.probabilities([1, 9], 5), [1, 1])
  assert thinning.probabilities([], 3).shape == (0,)


def test_draws_by_hand():
  chance = np.array([1, 0.25, 0.25, 0.5])
  for start, kept in (
    (0.0, [1, 1, 0, 0]),
    (0.2, [1, 1, 0, 0]),
    (0.25, [1, 0, 1, 0]),
    (0.6, [1, 0, 0, 1]),
    (0.99, [1, 0, 0, 1]),
  ):
    np.testing.assert_array_equal(thinning.draw(chance, start), kept)


@pytest.mark.parametrize("seed", range(20))
def test_as_many_as_asked_each_with_its_chance(seed):
  rng = np.random.default_rng(seed)
  total = int(rng.integers(1, 40))
  number = int(rng.integers(1, total + 1))
  size = rng.exponential(size=total) ** 3  # Some far above the others.
  chance = thinning.probabilities(size, number)
  assert chance.max() <= 1 and np.isclose(chance.sum(), number)
  ratio = (chance / size)[chance < 1 - 1e-12]
  if ratio.size:
    np.testing.assert_allclose(ratio, ratio[0])
    assert (size[chance > 1 - 1e-12] * ratio[0] >= 1 - 1e-9).all()
  starts = (np.arange(4000) + 0.5) / 4000
  kept = np.stack([thinning.draw(chance, s) for s in starts])
  assert set(kept.sum(1)) == {number}
  np.testing.assert_allclose(kept.mean(0), chance, atol=1e-3)


def test_surprise_by_hand():
  logprobs = np.log(np.array([[0.5, 0.9, 0.1], [1.0, 1.0, 0.2]]))
  found = thinning.surprise(logprobs, np.array([2, 2]))
  # (1 - .5)^2 + (1 - .9)^2 + .05; a rollout that was sure has the floor only.
  np.testing.assert_allclose(found, [0.31**0.5, 0.05**0.5])


def test_chances_by_surprise_leave_less_variance():
  """Tokens of a softmax policy, some sure, some not: exact variances."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(300, 9)) * rng.choice([0.5, 4.0], (300, 1))
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  token = np.array([rng.choice(9, p=row) for row in p])
  drawn = p[np.arange(300), token]
  square = ((np.eye(9)[token] - p) ** 2).sum(1)  # of grad log p by the logits
  weight = rng.choice([0.05, 0.2, 0.95], 300)
  surprise = thinning.surprise(np.log(drawn)[:, None], np.ones(300, int))

  def variance(size):
    chance = thinning.probabilities(size, 60)
    return ((1 / chance - 1) * weight**2 * square).sum()

  best = variance(weight * np.sqrt(square))
  assert variance(weight * surprise) < 0.75 * variance(weight)
  assert variance(weight * surprise) < 1.5 * best


@pytest.mark.parametrize("seed", range(20))
def test_as_few_draws_as_are_enough(seed):
  rng = np.random.default_rng(seed)
  size = rng.exponential(size=int(rng.integers(1, 40))) ** 3

  def variance(number):
    chance = thinning.probabilities(size, number)
    return ((1 / chance - 1) * size**2).sum()

  for share in (1e-6, 0.1, 1.0, 10.0):
    allowed = share * (size**2).sum()
    number = thinning.enough(size, allowed)
    assert 1 <= number <= len(size)
    assert variance(number) <= allowed * (1 + 1e-9)
    assert number == 1 or variance(number - 1) > allowed * (1 - 1e-9)


def test_filling_by_hand():
  # Ten prompts of 4 tokens with two rollouts of 3 each: n draws, from one prompt
  # after another, take 3 n tokens and 4 for each prompt.
  size, group = np.ones(20), np.repeat(np.arange(10), 2)
  lengths, prompts = np.full(20, 3), np.full(20, 4)
  tokens = [3 * n + 4 * min(n, 10) for n in range(21)]
  for slots in (20, 50, 1000):
    for least in (1, 5, 12, 20):
      number = thinning.filling(
        size, group, lengths, prompts, least, 20, slots
      )
      room = -(-tokens[least] // (thinning.PACKED * slots))
      fit = [
        n for n in range(21) if tokens[n] <= room * thinning.FULL * slots
      ]
      assert number == max(least, *fit)


@pytest.mark.parametrize("row_length", [32, 512])
def test_what_is_filled_nearly_always_fits(row_length):
  rng, more, filled = np.random.default_rng(row_length), 0, 0
  for _ in range(150):
    total = int(rng.integers(40, 90))
    group = np.sort(rng.integers(0, 30, total))
    of_group = rng.integers(row_length // 8, row_length // 4, 30)
    lengths = rng.integers(row_length // 16, row_length // 4, total)
    size, start = rng.exponential(size=total), rng.random()
    least = int(rng.integers(4, 40))
    number = thinning.filling(
      size, group, lengths, of_group[group], least, total, 8 * row_length
    )
    used = []
    for n in (least, number):
      kept = thinning.draw(thinning.probabilities(size, n), start)
      layout = packing.plan(group[kept], lengths[kept], of_group, row_length)
      used.append(-(-layout.rows // 8))
    more += used[1] > used[0]
    filled += number > least
  assert filled > 75 and more < 0.25 * 150
