"""Losses on packed rows: worked numbers, a loop reference, clips, masks, KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax.policy import advantages, aggregators, losses

RATIO_LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
ONE = np.ones((1, 1), np.int32)


def one_token(name, ratio, advantage, **clips):
  """(term, clipped, d term / d logprob) of one token with this ratio."""
  low, high = losses.default_clips(name)
  clips = {"clip_low": low, "clip_high": high} | clips
  old = jnp.full((1, 1), -1.0)

  def term(logprob):
    terms, clipped = losses.token_loss(
      name,
      jnp.reshape(logprob, (1, 1)),
      old,
      jnp.full((1, 1), float(advantage)),
      ONE,
      ONE,
      **clips,
    )
    return terms[0, 0], clipped[0, 0]

  (value, clipped), grad = jax.value_and_grad(term, has_aux=True)(
    -1.0 + jnp.log(ratio)
  )
  return float(value), bool(clipped), float(grad)


# ---------------------------------------------------------- worked numbers


@pytest.mark.parametrize("name", RATIO_LOSSES[:4])
def test_ratio_one_is_minus_the_advantage(name):
  for advantage in (1.5, -0.5, 0.0):
    value, clipped, grad = one_token(name, 1.0, advantage)
    assert value == pytest.approx(-advantage)
    assert grad == pytest.approx(-advantage)
    assert not clipped


@pytest.mark.parametrize(
  "ratio, advantage, value, clipped",
  [
    (1.1, 2.0, -2.2, False),
    (1.5, 2.0, -2.4, True),  # held at 1.2
    (1.5, -2.0, 3.0, False),  # moving back is never clipped
    (0.5, 2.0, -1.0, False),
    (0.5, -2.0, 1.6, True),  # held at .8
  ],
)
def test_the_clip_binds(ratio, advantage, value, clipped):
  result = one_token("grpo", ratio, advantage)
  assert result[0] == pytest.approx(value, rel=1e-5)
  assert result[1] == clipped
  gradient = 0.0 if clipped else -ratio * advantage
  assert result[2] == pytest.approx(gradient, rel=1e-5)


def test_dapo_clips_higher():
  assert one_token("grpo", 1.25, 1.0)[:2] == (pytest.approx(-1.2), True)
  assert one_token("dapo", 1.25, 1.0)[:2] == (pytest.approx(-1.25), False)
  assert one_token("dapo", 1.5, 1.0)[:2] == (pytest.approx(-1.28), True)
  assert one_token("dapo", 0.5, -1.0)[:2] == (pytest.approx(0.8), True)


def test_clips_are_arguments():
  value, clipped, _ = one_token("grpo", 1.5, 1.0, clip_high=0.6)
  assert value == pytest.approx(-1.5) and not clipped
  value, clipped, _ = one_token("grpo", 0.5, -1.0, clip_low=0.4)
  assert value == pytest.approx(0.6) and clipped


def test_default_clips():
  expected = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "reinforce": (0.0, 0.0),
  }
  assert {n: losses.default_clips(n) for n in losses.LOSSES} == expected


def test_each_loss_names_an_aggregator_and_a_level_that_exist():
  for loss in losses.LOSSES.values():
    assert loss.aggregator in aggregators.AGGREGATORS
    assert loss.level in aggregators.LEVELS
  assert [n for n, x in losses.LOSSES.items() if x.level == "sequence"] == [
    "gspo"
  ]


def test_gspo_takes_one_ratio_per_rollout():
  # Ratios .5 and 2 in one rollout: exp(mean log) = 1, nothing is clipped,
  # although both tokens are far outside.
  log_ratio = jnp.log(jnp.array([[0.5, 2.0]]))
  terms, clipped = losses.token_loss(
    "gspo",
    log_ratio - 1.0,
    jnp.full((1, 2), -1.0),
    jnp.full((1, 2), 3.0),
    np.ones((1, 2)),
    np.ones((1, 2), np.int32),
    clip_low=3e-4,
    clip_high=4e-4,
  )
  np.testing.assert_allclose(terms, [[-1.5, -1.5]], rtol=1e-5)
  assert not clipped.any()


@pytest.mark.parametrize(
  "log_mean, advantage, clipped",
  [(5e-4, 1.0, True), (3.5e-4, 1.0, False), (-3.5e-4, -1.0, True)],
)
def test_gspo_clips(log_mean, advantage, clipped):
  value, is_clipped, grad = one_token(
    "gspo", float(np.exp(log_mean)), advantage
  )
  assert is_clipped == clipped
  assert (grad == 0) == clipped
  held = float(np.clip(np.exp(log_mean), 1 - 3e-4, 1 + 4e-4))
  assert value == pytest.approx(-held * advantage, rel=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
  value, clipped, grad = one_token("cispo", 8.0, 2.0)
  # Weight held at 5, log-probability -1 + log 8.
  assert grad == pytest.approx(-5.0 * 2.0)
  assert value == pytest.approx(-5.0 * 2.0 * (-1 + np.log(8)), rel=1e-5)
  assert clipped
  value, clipped, grad = one_token("cispo", 0.01, 2.0)
  assert grad == pytest.approx(-0.01 * 2.0, rel=1e-4) and not clipped


def test_reinforce_ignores_the_old_policy():
  value, clipped, grad = one_token("reinforce", 8.0, 2.0)
  assert value == pytest.approx(-2.0 * (-1 + np.log(8)), rel=1e-5)
  assert grad == pytest.approx(-2.0) and not clipped


# ------------------------------------------------ packed rows against a loop


def packed(seed=0, rows=3, width=12, spread=0.4):
  """Random packed rows: prompt tokens, rollouts, padding. NumPy arrays."""
  rng = np.random.default_rng(seed)
  segment = np.zeros((rows, width), np.int32)
  advantage = np.zeros((rows, width), np.float32)
  for r in range(rows):
    at, k = int(rng.integers(1, 3)), 0
    while at < width - 1:
      length, k = int(rng.integers(1, 5)), k + 1
      segment[r, at : at + length] = k
      advantage[r, at : at + length] = rng.normal()
      at += length + int(rng.integers(0, 2))
  logprobs = rng.normal(-1.5, 0.5, (rows, width)).astype(np.float32)
  old = (logprobs + spread * rng.normal(size=(rows, width))).astype(np.float32)
  return logprobs, old, advantage, (segment > 0), segment


def loop_terms(name, logprobs, old, advantage, mask, segment, low, high):
  """Each rollout on its own, in float64, spread over its tokens."""
  terms = np.zeros(logprobs.shape)
  clipped = np.zeros(logprobs.shape, bool)
  for r in range(len(segment)):
    for k in set(segment[r]) - {0}:
      at = np.flatnonzero((segment[r] == k) & mask[r])
      if not len(at):
        continue
      new = logprobs[r, at].astype(np.float64)
      a = advantage[r, at].astype(np.float64)
      ratio = np.exp(new - old[r, at])
      share = 1.0
      if name == "gspo":
        ratio = np.full(len(at), np.exp(np.mean(new - old[r, at])))
        share = 1 / len(at)
      held = np.clip(ratio, 1 - low, 1 + high)
      if name == "cispo":
        value, is_clipped = held * a * new, held != ratio
      elif name == "reinforce":
        value, is_clipped = a * new, np.zeros(len(at), bool)
      else:
        value = np.minimum(ratio * a, held * a)
        is_clipped = held * a < ratio * a
      terms[r, at] = -value * share
      clipped[r, at] = is_clipped
  return terms, clipped


@pytest.mark.parametrize("name", losses.LOSSES)
def test_packed_rows_equal_the_loop(name):
  low, high = (0.05, 0.1) if name != "cispo" else losses.default_clips(name)
  seen = 0
  for seed in range(8):
    batch = packed(seed, spread=1.2 if name == "cispo" else 0.4)
    terms, clipped = losses.token_loss(
      name, *batch, clip_low=low, clip_high=high
    )
    expected, expected_clipped = loop_terms(name, *batch, low, high)
    np.testing.assert_allclose(terms, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(clipped, expected_clipped)
    assert terms.dtype == jnp.float32 and clipped.dtype == bool
    seen += int(clipped.sum())
  assert (seen > 0) == (name != "reinforce")  # the clip binds in this test


def test_gspo_gradient_is_the_sequence_forms():
  logprobs, old, advantage, mask, segment = packed(2, spread=0.05)

  def spread_loss(logprobs):
    terms, _ = losses.token_loss(
      "gspo", logprobs, old, advantage, mask, segment,
      clip_low=0.02, clip_high=0.02,
    )  # fmt: skip
    return terms.sum()

  # By hand: -min(s A, clip(s) A) per rollout; its derivative is -s A / |o| for
  # each of the rollout's tokens, 0 where the clip binds.
  expected, expected_grad, binds = 0.0, np.zeros(logprobs.shape), 0
  for r in range(len(segment)):
    for k in set(segment[r]) - {0}:
      at = np.flatnonzero(segment[r] == k)
      s = np.exp(np.mean(np.float64(logprobs[r, at]) - old[r, at]))
      a = advantage[r, at[0]]
      expected -= min(s * a, np.clip(s, 0.98, 1.02) * a)
      if np.clip(s, 0.98, 1.02) * a < s * a:
        binds += 1
      else:
        expected_grad[r, at] = -s * a / len(at)
  value, grad = jax.value_and_grad(spread_loss)(jnp.asarray(logprobs))
  assert value == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-6)
  assert binds and expected_grad.any()


def test_segment_sum():
  values = jnp.array([[1.0, 2, 4, 8], [1, 1, 1, 1]])
  segment = jnp.array([[0, 1, 2, 1], [4, 4, 4, 4]])
  np.testing.assert_array_equal(
    losses.segment_sum(values, segment), [[1, 10, 4, 10], [4, 4, 4, 4]]
  )


@pytest.mark.parametrize("name", losses.LOSSES)
def test_first_update_has_a_gradient_though_its_loss_is_about_zero(name):
  # Ratio 1 and advantages that sum to 0: loss 0 (but for the forms with
  # log pi as a factor), gradient -A.
  rewards = np.array([1.0, 0.0, 0.0, 1.0])
  advantage = advantages.compute("grpo", rewards, np.zeros(4, int))
  old = jnp.full((4, 3), -0.7)
  segment = np.ones((4, 3), np.int32)
  weight, denominator = aggregators.weights(
    "rollout_mean",
    np.zeros(4, int),
    np.full(4, 3),
    budget=4,
    max_new_tokens=3,
    num_prompts=1,
    level=losses.LOSSES[name].level,
  )
  low, high = losses.default_clips(name)

  def loss(logprobs):
    terms, _ = losses.token_loss(
      name, logprobs, old, jnp.tile(advantage[:, None], 3), segment, segment,
      clip_low=low, clip_high=high,
    )  # fmt: skip
    return (terms.sum(axis=1) * weight).sum() / denominator

  value, grad = jax.value_and_grad(loss)(old)
  assert abs(float(value)) < 1e-6
  expected = -advantage[:, None] / (4 * 3) * np.ones((1, 3))
  np.testing.assert_allclose(grad, expected, rtol=1e-5)


@pytest.mark.parametrize(
  "aggregator, expected",
  [("token_mean", 0.6), ("rollout_mean", 0.75), ("constant", 0.3)],
)
def test_accumulation_over_micro_batches(aggregator, expected):
  # Rollout A is [1, 1], B is [.5] * 8: reinforce terms with log pi = -term.
  logprobs = np.full((2, 10), np.nan, np.float32)
  logprobs[0, :2], logprobs[1, :8] = -1.0, -0.5
  segment = np.isfinite(logprobs).astype(np.int32)
  weight, denominator = aggregators.weights(
    aggregator,
    np.array([0, 1]),
    np.array([2, 8]),
    budget=2,
    max_new_tokens=10,
    num_prompts=2,
  )

  def total(rows):
    terms, _ = losses.token_loss(
      "reinforce", logprobs[rows], logprobs[rows], np.ones((len(rows), 10)),
      segment[rows], segment[rows], clip_low=0.0, clip_high=0.0,
    )  # fmt: skip
    return float((terms * weight[rows][:, None]).sum())

  assert total([0, 1]) / denominator == pytest.approx(expected, rel=1e-6)
  split = (total([0]) + total([1])) / denominator
  assert split == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------- masks


def spoil(values, mask, rng):
  """`values` with NaN and infinities where masked."""
  junk = rng.choice([np.nan, -np.inf, np.inf], values.shape)
  return np.where(mask, values, junk).astype(np.float32)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_junk_in_masked_positions_changes_nothing(name):
  rng = np.random.default_rng(0)
  logprobs, old, advantage, mask, segment = packed(4)
  low, high = losses.default_clips(name)

  def loss(logprobs, old, advantage, mask, segment):
    terms, clipped = losses.token_loss(
      name, logprobs, old, advantage, mask, segment,
      clip_low=low, clip_high=high,
    )  # fmt: skip
    return terms.sum(), clipped

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, clipped), grad = run(logprobs, old, advantage, mask, segment)
  # The same rows with junk, and one more row that is all padding.
  pad = [(0, 1), (0, 0)]
  mask2 = np.pad(mask, pad)
  clean = [np.pad(x, pad) for x in (logprobs, old, advantage)]
  dirty = [spoil(x, mask2, rng) for x in clean]
  (value2, clipped2), grad2 = run(*dirty, mask2, np.pad(segment, pad))
  assert np.isfinite(value2) and np.isfinite(grad2).all()
  assert float(value2) == pytest.approx(float(value), rel=1e-6)
  np.testing.assert_allclose(grad2[:-1], grad, rtol=1e-6, atol=1e-9)
  np.testing.assert_array_equal(grad2[-1], 0)
  np.testing.assert_array_equal(np.asarray(grad)[~mask], 0)
  np.testing.assert_array_equal(clipped2[:-1], clipped)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_all_masked_is_zero(name):
  logprobs, old, advantage, mask, segment = packed(1)

  def loss(logprobs, mask, segment):
    terms, clipped = losses.token_loss(
      name, logprobs, old, advantage, mask, segment,
      clip_low=0.2, clip_high=0.2,
    )  # fmt: skip
    return terms.sum(), clipped.sum()

  for m, s in ((0 * mask, segment), (mask, 0 * segment)):
    (value, clipped), grad = jax.value_and_grad(loss, has_aux=True)(
      jnp.asarray(logprobs), m, s
    )
    assert value == 0 and clipped == 0
    np.testing.assert_array_equal(grad, np.zeros_like(grad))


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_group_of_one_has_no_gradient(name):
  advantage = advantages.compute("grpo", np.array([1.0]), np.array([3]))
  value, clipped, grad = one_token(name, 1.3, advantage[0])
  assert value == 0 and grad == 0 and not clipped


@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_policy_that_ran_away_stays_finite(name, advantage, log_ratio):
  low, high = losses.default_clips(name)

  def loss(logprob):
    terms, _ = losses.token_loss(
      name, jnp.reshape(logprob, (1, 1)), jnp.full((1, 1), -100.0),
      jnp.full((1, 1), advantage), ONE, ONE, clip_low=low, clip_high=high,
    )  # fmt: skip
    return terms.sum()

  value, grad = jax.value_and_grad(loss)(-100.0 + log_ratio)
  assert np.isfinite(value) and np.isfinite(grad)


# ---------------------------------------------- KL, importance weight, ratio


@pytest.mark.parametrize(
  "name, expected", [("k1", 0.6931), ("k2", 0.2402), ("k3", 0.1931)]
)
def test_kl_by_hand(name, expected):
  value = losses.kl(name, jnp.log(0.5), jnp.log(0.25))
  assert float(value) == pytest.approx(expected, abs=5e-5)


def test_kl_signs():
  rng = np.random.default_rng(0)
  policy, reference = rng.normal(-2, 1, (2, 500)).astype(np.float32)
  assert (losses.kl("k3", policy, reference) >= 0).all()
  assert (losses.kl("k2", policy, reference) >= 0).all()
  signs = np.sign(losses.kl("k1", policy, reference))
  np.testing.assert_array_equal(signs, np.sign(policy - reference))
  for name in losses.KLS:
    assert float(losses.kl(name, jnp.log(0.3), jnp.log(0.3))) == 0


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_kl_forms_average_to_the_divergence(name):
  policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
  exact = (policy * np.log(policy / reference)).sum()
  forms = losses.kl(name, jnp.log(policy), jnp.log(reference))
  assert (policy * forms).sum() == pytest.approx(exact, rel=1e-5)


def test_k2_gradient_is_the_divergences():
  # E_pi[grad k2] = grad KL(pi, ref), enumerated on a softmax.
  logits, reference = jnp.array([0.5, -0.2, 1.0]), jnp.array([0.1, 0.4, -0.3])
  policy = jax.nn.softmax(logits)

  def estimate(logits):
    forms = losses.kl(
      "k2", jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    )
    return (jax.lax.stop_gradient(policy) * forms).sum()

  def exact(logits):
    delta = jax.nn.log_softmax(logits) - jax.nn.log_softmax(reference)
    return (jax.nn.softmax(logits) * delta).sum()

  np.testing.assert_allclose(
    jax.jit(jax.grad(estimate))(logits),
    jax.jit(jax.grad(exact))(logits),
    rtol=1e-4,
    atol=1e-6,
  )


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_larger_kl_coefficient_lowers_the_measured_kl(name):
  reference = jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.5, 0.2]))
  rewards = jnp.array([1.0, 0.0, 0.0, 0.0])

  @jax.jit
  def train(coefficient):
    def loss(logits):
      logprobs = jax.nn.log_softmax(logits)
      policy = jax.lax.stop_gradient(jnp.exp(logprobs))
      gain = (rewards - (policy * rewards).sum()) * logprobs
      forms = losses.kl(name, logprobs, reference)
      return (policy * (coefficient * forms - gain)).sum()

    def step(logits, _):
      return logits - 0.5 * jax.grad(loss)(logits), None

    logits, _ = jax.lax.scan(step, reference, None, length=200)
    final = jax.nn.log_softmax(logits)
    return (jnp.exp(final) * (final - reference)).sum()

  measured = [float(train(c)) for c in (0.0, 0.5, 2.0)]
  assert measured[0] > 1.2 * measured[1] > 1.44 * measured[2] > 0


def test_kl_masks_before_use():
  policy = jnp.array([[-1.0, -jnp.inf, jnp.nan]])
  reference = jnp.array([[-2.0, jnp.nan, -1.0]])
  mask = np.array([[1, 0, 0]])
  for name in losses.KLS:

    def total(policy, name=name):
      return losses.kl(name, policy, reference, mask).sum()

    value, grad = jax.value_and_grad(total)(policy)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert float(value) == pytest.approx(float(losses.kl(name, -1.0, -2.0)))


def test_importance_weight_is_truncated_and_has_no_gradient():
  trainer = jnp.log(jnp.array([[0.5, 0.9, 0.1, 0.5]]))
  sampler = jnp.log(jnp.array([[0.25, 0.3, 0.2, 0.5]]))
  mask = np.array([[1, 1, 1, 0]])
  weight = losses.truncated_importance_weight(trainer, sampler, mask, 2.5)
  np.testing.assert_allclose(weight, [[2.0, 2.5, 0.5, 1.0]], rtol=1e-6)
  junk = sampler.at[0, 3].set(jnp.nan)

  def total(trainer):
    return losses.truncated_importance_weight(trainer, junk, mask, 2.5).sum()

  np.testing.assert_array_equal(jax.grad(total)(trainer), np.zeros((1, 4)))
  assert np.isfinite(total(trainer))


def test_importance_weight_corrects_a_top_p_sampler_only_up_to_its_support():
  # [.6, .3, .1] at top_p .8 samples [2/3, 1/3]: raw log-probs agree (weight
  # 1), processed ones give .9.
  raw, processed = np.log([[0.6, 0.3]]), np.log([[2 / 3, 1 / 3]])
  mask = np.ones((1, 2))
  same = losses.truncated_importance_weight(raw, raw, mask, 2.0)
  np.testing.assert_allclose(same, [[1, 1]])
  off = losses.truncated_importance_weight(raw, processed, mask, 2.0)
  np.testing.assert_allclose(off, [[0.9, 0.9]], rtol=1e-5)


def test_ratio_max_deviation():
  old = jnp.zeros((1, 3))
  new = jnp.log(jnp.array([[1.1, 0.7, 9.0]]))
  mask = np.array([[1, 1, 0]])
  value = losses.ratio_max_deviation(new, old, mask)
  assert float(value) == pytest.approx(0.3, rel=1e-5)
  junk = new.at[0, 2].set(jnp.nan)
  assert float(losses.ratio_max_deviation(junk, old, mask)) == float(value)
  assert float(losses.ratio_max_deviation(junk, old, 0 * mask)) == 0
  assert float(losses.ratio_max_deviation(old, old, mask)) == 0


def test_unknown_names_are_named():
  with pytest.raises(ValueError, match="did you mean 'grpo'"):
    one_token("gprpo", 1.0, 1.0, clip_low=0.2)
  with pytest.raises(ValueError, match="did you mean 'dr_grpo'"):
    losses.token_loss(
      "dr.grpo", ONE, ONE, ONE, ONE, ONE, clip_low=0.2, clip_high=0.2
    )
  with pytest.raises(ValueError, match="no KL form named 'k4'"):
    losses.kl("k4", 0.0, 0.0)
