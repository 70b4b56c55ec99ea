"""Truncation rules, inverse CDF and log-probs on hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax.sampling import logits as logits_lib


def kept(probs, *, top_k=0, top_p=1.0, min_p=0.0, dtype=jnp.float32):
  logits = jnp.log(jnp.asarray([probs], jnp.float32)).astype(dtype)
  logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
  mask = logits_lib.keep_mask(
    logprobs,
    jnp.array([top_k], jnp.int32),
    jnp.array([top_p], jnp.float32),
    jnp.array([min_p], jnp.float32),
  )
  return np.flatnonzero(np.asarray(mask)[0]).tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  "probs, top_p, survivors",
  [
    ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
    ([0.5, 0.41, 0.09], 0.9, 2),
    ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
    ([0.5, 0.3, 0.15, 0.05], 1e-8, 1),
    ([0.5, 0.3, 0.15, 0.05], 1.0, 4),
    ([0.25] * 4, 0.5, 2),
  ],
)
def test_top_p_keeps_tokens_while_the_mass_before_them_is_below_p(
  probs, top_p, survivors, dtype
):
  # The best come first here, and ties go to the smaller id.
  assert kept(probs, top_p=top_p, dtype=dtype) == list(range(survivors))


def test_top_p_does_not_depend_on_the_order_of_ids():
  assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.8) == [1, 2, 3]


def test_top_k_keeps_exactly_k_even_with_ties():
  assert kept([0.2, 0.2, 0.2, 0.2, 0.2], top_k=2) == [0, 1]
  assert kept([0.1, 0.2, 0.3, 0.4], top_k=1) == [3]
  assert kept([0.1, 0.2, 0.3, 0.4], top_k=9) == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_best_token():
  # .5 * .4 = .2: .3 and .4 stay.
  assert kept([0.1, 0.19, 0.31, 0.4], min_p=0.5) == [2, 3]
  assert kept([0.1, 0.2, 0.3, 0.4], min_p=1.0) == [3]


def row_settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  full = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (rows,))
  return (
    full(temperature, jnp.float32),
    full(top_k, jnp.int32),
    full(top_p, jnp.float32),
    full(min_p, jnp.float32),
  )


def test_log_probs_before_and_after_truncation():
  # [.6, .3, .1] with top_p .8 keeps .6 and .3: drawn from 2/3 and 1/3.
  logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 2))
  token, raw, processed = logits_lib.sample(
    logits, jnp.array([0.1, 0.9]), *row_settings(2, top_p=0.8)
  )
  assert token.tolist() == [0, 1]
  np.testing.assert_allclose(raw, np.log([0.6, 0.3]), atol=1e-6)
  np.testing.assert_allclose(processed, np.log([2 / 3, 1 / 3]), atol=1e-6)


def test_the_temperature_divides_logits():
  # logits [2, 0], T = .5: log p0 = -.01815.
  token, raw, processed = logits_lib.sample(
    jnp.array([[2.0, 0.0]]), jnp.array([0.5]), *row_settings(1, 0.5)
  )
  assert token[0] == 0
  np.testing.assert_allclose(raw, [-0.01815], atol=1e-5)
  np.testing.assert_allclose(processed, raw)


def test_temperature_zero_in_one_row_leaves_the_others_alone():
  logits = jax.random.normal(jax.random.key(0), (3, 40)) * 3
  uniform = jnp.array([0.2, 0.7, 0.99])
  plain = logits_lib.sample(logits, uniform, *row_settings(3))
  mixed = logits_lib.sample(
    logits, uniform, *row_settings(3, jnp.array([1.0, 0.0, 1.0]))
  )
  for a, b in zip(plain, mixed):
    np.testing.assert_array_equal(a[jnp.array([0, 2])], b[jnp.array([0, 2])])
  assert mixed[0][1] == jnp.argmax(logits[1])
  assert np.isfinite(np.asarray(mixed[1])).all()
  assert mixed[2][1] == 0.0


@pytest.mark.parametrize("vocab", [5, 128, 129, 1000])
def test_inverse_cdf_picks_the_token_whose_interval_holds_the_number(vocab):
  rng = np.random.default_rng(vocab)
  logits = rng.normal(size=(64, vocab)).astype(np.float32) * 2
  uniform = rng.random(64).astype(np.float32)
  logprobs = jax.nn.log_softmax(jnp.asarray(logits))
  token = np.asarray(logits_lib.inverse_cdf(logprobs, jnp.asarray(uniform)))
  probs = np.exp(np.asarray(logprobs, np.float64))
  sums = np.cumsum(probs / probs.sum(-1, keepdims=True), -1)
  high = sums[np.arange(64), token]
  low = high - probs[np.arange(64), token]
  # Within the rounding of float32 sums.
  assert (low - 2e-6 <= uniform).all() and (uniform <= high + 2e-6).all()


def test_tokens_of_probability_zero_are_never_drawn():
  logprobs = jnp.log(jnp.array([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3))
  uniform = jnp.array([0.0, 0.5, 1 - 2.0**-24])
  assert logits_lib.inverse_cdf(logprobs, uniform).tolist() == [1, 3, 3]


def test_frequencies_follow_the_distribution():
  probs = np.array([0.5, 0.25, 0.15, 0.1])
  n = 4000
  uniform = (np.arange(n) + 0.5) / n  # one number per stratum: exact counts
  token = logits_lib.inverse_cdf(
    jnp.log(jnp.broadcast_to(jnp.asarray(probs), (n, 4))),
    jnp.asarray(uniform, jnp.float32),
  )
  counts = np.bincount(np.asarray(token), minlength=4)
  np.testing.assert_allclose(counts / n, probs, atol=2 / n)
