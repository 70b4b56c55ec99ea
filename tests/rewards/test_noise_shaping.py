"""Noise is addressed; shaping stays apart from the verdict."""

import numpy as np
import pytest

from vigor_jax.rewards import FORMATS, Noise, Shaping


def _batch(n=4000):
  rng = np.random.default_rng(0)
  return (
    rng.integers(0, 2, n).astype(np.float32),
    rng.integers(0, 10**6, n),
    rng.integers(0, 64, n),
  )


def test_noise_is_the_same_in_any_order():
  verdicts, positions, samples = _batch(200)
  noise = Noise(seed=3, flip_right=0.3, flip_wrong=0.2, sigma=0.1)
  first = noise.apply(verdicts, positions, samples)
  order = np.random.default_rng(1).permutation(200)
  second = noise.apply(verdicts[order], positions[order], samples[order])
  np.testing.assert_array_equal(first[order], second)
  other = Noise(seed=4, flip_right=0.3, flip_wrong=0.2, sigma=0.1)
  assert (first != other.apply(verdicts, positions, samples)).any()


def test_flip_rates():
  verdicts, positions, samples = _batch()
  out = Noise(seed=0, flip_right=0.3, flip_wrong=0.1).apply(
    verdicts, positions, samples
  )
  right = verdicts == 1
  # Four standard errors of a rate over about 2000 draws.
  assert abs((out[right] == 0).mean() - 0.3) < 0.042
  assert abs((out[~right] == 1).mean() - 0.1) < 0.028
  assert set(np.unique(out)) == {0.0, 1.0}


def test_flip_one_and_zero():
  verdicts, positions, samples = _batch(50)
  np.testing.assert_array_equal(
    Noise(0, flip_right=1, flip_wrong=1).apply(verdicts, positions, samples),
    1 - verdicts,
  )
  np.testing.assert_array_equal(
    Noise(0).apply(verdicts, positions, samples), verdicts
  )


def test_sigma_perturbs_and_clips_and_leaves_flips_alone():
  _, positions, samples = _batch(4000)
  half = np.full(4000, 0.5, np.float32)
  out = Noise(seed=1, sigma=0.05).apply(half, positions, samples)
  assert abs(out.mean() - 0.5) < 0.004
  assert abs(out.std() - 0.05) < 0.004
  wide = Noise(seed=1, sigma=5.0).apply(half, positions, samples)
  assert wide.min() == 0.0 and wide.max() == 1.0


@pytest.mark.parametrize(
  "kwargs, field",
  [
    ({"seed": -1}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 0, "flip_right": 1.5}, "flip_right"),
    ({"seed": 0, "flip_wrong": float("nan")}, "flip_wrong"),
    ({"seed": 0, "sigma": -1}, "sigma"),
  ],
)
def test_noise_options(kwargs, field):
  with pytest.raises(ValueError, match=field):
    Noise(**kwargs)


def test_noise_shapes():
  with pytest.raises(ValueError, match="differ"):
    Noise(0).apply(np.ones(3), np.ones(2, int), np.ones(3, int))


def test_overlong_by_hand():
  # L_max 10, L_cache 4: 0 up to 6, then -1/4 a token, -1 when cut off.
  shaping = Shaping(overlong_buffer=4)
  verdicts = np.array([1, 1, 1, 1, 1, 0], np.float32)
  out = shaping.apply(
    verdicts, [3, 6, 7, 9, 10, 10], [0, 0, 0, 0, 0, 1], max_tokens=10
  )
  np.testing.assert_allclose(out, [1, 1, 0.75, 0.25, 0.0, -1.0])
  np.testing.assert_array_equal(verdicts, [1, 1, 1, 1, 1, 0])


def test_length_penalty_counts_tokens_and_format_adds():
  shaping = Shaping(format="boxed", format_bonus=0.1, length_penalty=0.5)
  out = shaping.apply(
    np.array([1.0, 0.0]),
    [200, 1000],
    [False, False],
    4096,
    ["so \\boxed{\\frac{1}{2}}", "so \\boxed{1"],
  )
  np.testing.assert_allclose(out, [1 - 0.1 + 0.1, -0.5], rtol=1e-6)


@pytest.mark.parametrize(
  "text, has",
  [
    ("<think>a</think> 5", True),
    ("a</think>\n5", True),
    ("<think>a</think>", False),
    ("5", False),
    ("<think>a</think>b</think>5", False),
    ("<think>a", False),
  ],
)
def test_think_format(text, has):
  assert FORMATS["think"](text) is has


@pytest.mark.parametrize(
  "kwargs, field",
  [
    ({"format": "boxd"}, "format"),
    ({"format_bonus": 0.1}, "format"),
    ({"length_penalty": -1}, "length_penalty"),
    ({"overlong_buffer": -1}, "overlong_buffer"),
  ],
)
def test_shaping_options(kwargs, field):
  with pytest.raises(ValueError, match=field):
    Shaping(**kwargs)


def test_shaping_inputs():
  with pytest.raises(ValueError, match="longer than"):
    Shaping(overlong_buffer=20).apply(np.ones(1), [1], [False], 10)
  with pytest.raises(ValueError, match="texts"):
    Shaping(format="boxed", format_bonus=1).apply(np.ones(1), [1], [False], 10)
  with pytest.raises(ValueError, match="differ"):
    Shaping().apply(np.ones(2), [1], [False], 10)
