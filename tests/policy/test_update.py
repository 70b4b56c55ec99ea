"""The update as a whole: gradients, ratios, clips, KL, minibatches, donation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax.config import default_config
from vigor_jax.policy import aggregators
from vigor_jax.policy import batch as batch_lib
from vigor_jax.policy import optimizer, packing, thinning, transformer, update
from vigor_jax.policy.sizes import Sizes

SIZES = Sizes(layers=1, width=8, heads=2, kv_heads=1, head_dim=4, ffn=8,
              vocab=11, tied=False)  # fmt: skip
GRAPH = transformer.abstract(SIZES)[0]
# A trace without decay that matters: after one update it is the gradient.
PLAIN = optimizer.OptimizerOptions(name="sgd", b1=0.5, clip_norm=0.0)


@functools.cache
def initial():
  params = transformer.create(SIZES, 0)[1]
  params.head[...] = params.head[...] * 30  # Far from a uniform distribution.
  return jax.device_get(params)


def fresh():
  """Parameters of their own: an update takes them."""
  return jax.tree.map(jnp.array, initial())


@dataclasses.dataclass
class Rollouts:
  """Rollouts of three groups, one of them without a difference."""

  group: np.ndarray
  prompts: list
  tokens: np.ndarray
  lengths: np.ndarray
  advantages: np.ndarray
  weights: np.ndarray
  logprobs: np.ndarray

  def pack(self, row_length=20, rows=2, keep=None, max_micro=None):
    keep = np.ones(len(self.group), bool) if keep is None else keep
    return packing.pack(
      self.group[keep],
      self.prompts,
      self.tokens[keep],
      self.lengths[keep],
      self.advantages[keep],
      self.weights[keep],
      self.logprobs[keep],
      row_length=row_length,
      rows_per_micro=rows,
      max_micro=max_micro or -(-len(self.group) // rows),
    )


def make_rollouts():
  rng = np.random.default_rng(0)
  group = np.repeat([0, 1, 2], [5, 2, 3])
  n = len(group)
  advantages = rng.normal(size=n).astype(np.float32)
  advantages[group == 1] = 0
  return Rollouts(
    group=group,
    prompts=[rng.integers(0, 11, k).astype(np.int32) for k in (3, 6, 4)],
    tokens=rng.integers(0, 11, (n, 8), np.int32),
    lengths=rng.integers(1, 9, n),
    advantages=advantages,
    weights=rng.random(n).astype(np.float32) + 0.2,
    logprobs=(-2.4 + 0.2 * rng.normal(size=(n, 8))).astype(np.float32),
  )


ROLLOUTS = make_rollouts()


def flat(tree):
  return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])


def step(packed, used, objective=None, denominator=3.0, params=None, **inputs):
  """(gradient, metrics) of one update."""
  updater = update.Updater(GRAPH, objective or update.Objective(), PLAIN)
  state = updater.init(fresh() if params is None else params)
  state, metrics = updater.update(state, packed, used, denominator, 0.0, **inputs)
  return flat(state.opt_state), update.to_host(metrics)


@pytest.fixture(scope="module")
def whole():
  return step(*ROLLOUTS.pack())


def close(a, b):
  """Equal to 1e-6 of the largest gradient."""
  np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1, np.abs(b).max()))


# Packing and micro-batches.


@pytest.mark.parametrize("row_length, rows", [(20, 1), (64, 1), (14, 10)])
def test_micro_batches_and_packing_never_change_the_gradient(
  whole, row_length, rows
):
  packed, used = ROLLOUTS.pack(row_length, rows)
  gradient, metrics = step(packed, used)
  assert np.abs(whole[0]).max() > 0.01
  close(gradient, whole[0])
  for name, value in metrics.items():
    assert value == pytest.approx(whole[1][name], rel=1e-4, abs=1e-6), name


def test_the_order_of_rollouts_does_not_change_the_gradient(whole):
  order = np.random.default_rng(1).permutation(len(ROLLOUTS.group))
  mixed = dataclasses.replace(ROLLOUTS, **{
    f.name: getattr(ROLLOUTS, f.name)[order]
    for f in dataclasses.fields(Rollouts) if f.name != "prompts"
  })  # fmt: skip
  close(step(*mixed.pack())[0], whole[0])


def test_rollouts_without_advantage_may_be_left_out(whole):
  keep = ROLLOUTS.advantages != 0
  assert keep.sum() == 8
  packed, used = ROLLOUTS.pack(keep=keep, max_micro=5)
  close(step(packed, used)[0], whole[0])


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_equal_rollouts_may_be_one_with_the_sum_of_their_weights(loss):
  many = [0, 2, 2, 2, 7, 8, 8]
  each = {
    f.name: getattr(ROLLOUTS, f.name)[many]
    for f in dataclasses.fields(Rollouts) if f.name != "prompts"
  }  # fmt: skip
  several = dataclasses.replace(ROLLOUTS, **each)
  first, inverse = thinning.equal(
    several.group, several.advantages, several.tokens, several.lengths
  )
  np.testing.assert_array_equal(first, [0, 1, 4, 5])
  weights = np.bincount(inverse, several.weights).astype(np.float32)
  one = dataclasses.replace(
    ROLLOUTS, **{k: v[first] for k, v in each.items()} | {"weights": weights}
  )
  objective = update.Objective(loss=loss)
  close(step(*one.pack(), objective)[0], step(*several.pack(), objective)[0])


def test_the_gradient_is_the_derivative_of_the_loss(whole):
  packed, used = ROLLOUTS.pack()
  norm, losses = np.linalg.norm(whole[0]), []
  leaves, tree = jax.tree.flatten(initial())
  ends = np.cumsum([a.size for a in leaves])[:-1]
  parts = np.split(whole[0] / norm, ends)
  for size in (1e-3, -1e-3):
    moved = [jnp.array(a + size * d.reshape(a.shape)) for a, d in
             zip(leaves, parts)]  # fmt: skip
    moved = jax.tree.unflatten(tree, moved)
    losses.append(step(packed, used, params=moved)[1]["loss"])
  slope = (losses[0] - losses[1]) / 2e-3
  assert slope == pytest.approx(norm, rel=0.01)


def test_nan_where_nothing_counts_changes_nothing(whole):
  packed, used = ROLLOUTS.pack()
  nothing = packed.segment == 0
  floats = {
    name: np.where(nothing, bad, getattr(packed, name))
    for name, bad in [
      ("advantages", np.nan), ("sampler_logprobs", -np.inf),
      ("weights", np.nan),
    ]
  }  # fmt: skip
  assert not packed.prompt.reshape(-1, 20).any(-1).all()  # An empty row too.
  gradient, metrics = step(packed._replace(**floats), used)
  np.testing.assert_array_equal(gradient, whole[0])
  assert metrics == whole[1]


def test_a_step_without_rollouts_is_harmless():
  packed, used = ROLLOUTS.pack(keep=np.zeros(10, bool), max_micro=5)
  assert used == 0
  updater = update.Updater(GRAPH, update.Objective(), optimizer.OptimizerOptions())
  before = flat(fresh())
  state, metrics = updater.update(updater.init(fresh()), packed, 0, 1.0, 1e-2)
  np.testing.assert_array_equal(flat(state.params), before)
  assert not np.isnan(flat(state.opt_state)).any()
  assert set(update.to_host(metrics).values()) == {0.0}
  # One real step later the state is as usable as ever.
  packed, used = ROLLOUTS.pack()
  state, metrics = updater.update(state, packed, used, 3.0, 1e-2)
  assert np.isfinite(flat(state.params)).all()
  assert np.abs(flat(state.params) - before).max() > 1e-3


# Aggregators: terms 1, 1 and eight times .5.


@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize(
  "aggregator, expected",
  [("token_mean", 0.6), ("rollout_mean", 0.75), ("constant", 0.3)],
)
def test_aggregators_by_hand_in_one_micro_batch_or_two(
  aggregator, expected, rows
):
  lengths = np.array([2, 8])
  weights, denominator = aggregators.weights(
    aggregator, np.array([0, 1]), lengths, budget=2, max_new_tokens=10,
    num_prompts=2,
  )  # fmt: skip
  # At ratio 1 a token's term is minus its rollout's advantage.
  packed, used = packing.pack(
    np.array([0, 1]), [np.array([1], np.int32)] * 2,
    np.ones((2, 8), np.int32), lengths, np.array([-1, -0.5], np.float32),
    weights, np.zeros((2, 8), np.float32),
    row_length=10, rows_per_micro=rows, max_micro=2,
  )  # fmt: skip
  assert used == 2 // rows
  _, metrics = step(packed, used, update.Objective(old="current"), denominator)
  assert metrics["loss"] == pytest.approx(expected, rel=1e-6)


# Ratios.


def centered():
  """Advantages that sum to 0 in a group, and rollout-mean weights."""
  advantages = ROLLOUTS.advantages.copy()
  for g in range(3):
    advantages[ROLLOUTS.group == g] -= advantages[ROLLOUTS.group == g].mean()
  return dataclasses.replace(
    ROLLOUTS,
    advantages=advantages,
    weights=(1 / ROLLOUTS.lengths).astype(np.float32),
  )


def test_first_update_has_ratio_one_and_no_loss_but_a_gradient():
  packed, used = centered().pack()
  objective = update.Objective(old="current")
  gradient, metrics = step(packed, used, objective, 10.0)
  assert metrics["ratio_max_deviation"] == 0.0
  assert abs(metrics["loss"]) < 1e-6 and metrics["clip_share"] == 0
  assert np.abs(gradient).max() > 0.01
  assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
  # The same with old log-probs that the trainer scored, or the sampler sent.
  updater = update.Updater(GRAPH, update.Objective(), PLAIN)
  scored = np.asarray(updater.score(fresh(), packed, used))
  for inputs in (
    (packed, dict(old=scored)),
    (packed._replace(sampler_logprobs=scored), {}),
  ):
    other, values = step(inputs[0], used, update.Objective(), 10.0, **inputs[1])
    assert values["ratio_max_deviation"] < 1e-4
    assert abs(values["loss"]) < 1e-5
    close(other, gradient)
  assert values["sampler_trainer_logprob_gap"] < 1e-5


def test_gap_and_ratio_are_measured(whole):
  packed, used = ROLLOUTS.pack()
  updater = update.Updater(GRAPH, update.Objective(), PLAIN)
  scored = np.asarray(updater.score(fresh(), packed, used))
  live = packed.segment > 0
  difference = (scored - packed.sampler_logprobs)[live]
  assert whole[1]["sampler_trainer_logprob_gap"] == pytest.approx(
    np.abs(difference).max(), rel=1e-5
  )
  assert whole[1]["ratio_max_deviation"] == pytest.approx(
    np.abs(np.exp(difference) - 1).max(), rel=1e-4
  )
  ratio, a = np.exp(difference), packed.advantages[live]
  bound = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
  assert 0.05 < bound.mean() < 0.9
  assert whole[1]["clip_share"] == pytest.approx(bound.mean(), rel=1e-5)
  # No entropy is larger than that of the uniform distribution.
  assert 0.5 < whole[1]["entropy"] < np.log(11)


@pytest.mark.parametrize("gap, weight", [(1.5, 1.5), (3.0, 2.0), (0.5, 0.5)])
def test_importance_weights_of_the_sampler_are_capped(gap, weight):
  packed, used = centered().pack()
  updater = update.Updater(GRAPH, update.Objective(), PLAIN)
  scored = np.asarray(updater.score(fresh(), packed, used))
  # The trainer finds every token `gap` times as likely as the sampler did.
  packed = packed._replace(sampler_logprobs=scored - np.float32(np.log(gap)))
  plain, _ = step(packed, used, update.Objective(old="current"))
  capped, _ = step(
    packed, used, update.Objective(old="current", importance_cap=2.0)
  )
  np.testing.assert_allclose(capped, weight * plain, atol=2e-5)


def test_the_state_is_donated():
  packed, used = ROLLOUTS.pack()
  updater = update.Updater(GRAPH, update.Objective(), PLAIN)
  state = updater.init(fresh())
  new, _ = updater.update(state, packed, used, 3.0, 0.1)
  leaves = [a for a in jax.tree.leaves(state) if a.size > 1]
  assert leaves and all(a.is_deleted() for a in leaves)
  assert not any(a.is_deleted() for a in jax.tree.leaves(new))


# Several updates of a step: run_updates.


def batch_of(parts):
  """A Batch of packed minibatches."""
  minibatches = [
    batch_lib.Minibatch(packed, used, denominator)
    for packed, used, denominator in parts
  ]
  nothing = np.zeros(0)
  return batch_lib.Batch(minibatches, nothing, nothing, 10, 10, 1.0)


def config_of(rate=0.05, **policy):
  config = default_config("arithmetic")
  config.policy.update(**policy)
  config.optimizer.learning_rate = rate
  config.total_steps = 10
  return config


def test_the_clip_binds_in_the_second_update():
  packed, used = centered().pack()
  batch = batch_of([(packed, used, 10.0)])
  objective = update.Objective(old="trainer")
  adam = optimizer.OptimizerOptions(name="adam", clip_norm=0.0)
  updater = update.Updater(GRAPH, objective, adam)
  results = {}
  for updates in (1, 2):
    state, metrics = update.run_updates(
      updater, updater.init(fresh()), batch,
      config_of(updates_per_step=updates), 0, None,
    )  # fmt: skip
    assert len(metrics) == updates
    results[updates] = update.averaged(metrics)
    results[updates]["params"] = flat(state.params)
  one, two = results[1], results[2]
  assert one["clip_share"] == 0 and one["ratio_max_deviation"] < 1e-4
  # Old log-probs are those from before the first update.
  assert two["clip_share"] > 0.05 and two["ratio_max_deviation"] > 0.2
  # By hand: score in between, against the first scores.
  state = updater.init(fresh())
  old = np.asarray(updater.score(state.params, packed, used))
  state, first = updater.update(state, packed, used, 10.0, 0.05, old=old)
  now = np.asarray(updater.score(state.params, packed, used))
  state, second = updater.update(state, packed, used, 10.0, 0.05, old=old)
  np.testing.assert_array_equal(flat(state.params), two["params"])
  live = packed.segment > 0
  ratio, a = np.exp(now - old)[live], packed.advantages[live]
  bound = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
  assert float(second["clip_share"]) == pytest.approx(bound.mean(), abs=1e-6)
  assert two["clip_share"] == pytest.approx(bound.mean() / 2, abs=1e-6)
  # Clipped tokens carry no gradient: the same step without them.
  weights = packed.weights.copy()
  where = np.argwhere(live)[bound]
  weights[tuple(where.T)] = 0
  state = updater.init(fresh())
  state, _ = updater.update(state, packed, used, 10.0, 0.05, old=old)
  state, _ = updater.update(
    state, packed._replace(weights=weights), used, 10.0, 0.05, old=old
  )
  np.testing.assert_allclose(flat(state.params), two["params"], atol=1e-6)


def test_minibatches_are_optimiser_steps_with_old_log_probs_of_the_first():
  r = centered()
  first = np.arange(10) % 2 == 0
  parts = [r.pack(keep=k, max_micro=5) for k in (first, ~first)]
  batch = batch_of([(*part, 5.0) for part in parts])
  adam = optimizer.OptimizerOptions(name="adam", clip_norm=0.0)
  updater = update.Updater(GRAPH, update.Objective(old="trainer"), adam)
  state, metrics = update.run_updates(
    updater, updater.init(fresh()), batch, config_of(minibatches=2), 0, None
  )
  metrics = update.averaged(metrics)
  assert metrics["ratio_max_deviation"] > 0.1
  (count,) = [a for a in jax.tree.leaves(state.opt_state) if a.ndim == 0]
  assert int(count) == 2
  by_hand = updater.init(fresh())
  olds = [updater.score(by_hand.params, *part) for part in parts]
  for part, old in zip(parts, olds):
    by_hand, _ = updater.update(by_hand, *part, 5.0, 0.05, old=old)
  np.testing.assert_array_equal(flat(state.params), flat(by_hand.params))


def test_a_larger_kl_coefficient_lowers_the_measured_kl():
  packed, used = centered().pack()
  batch = batch_of([(packed, used, 10.0)])
  reference = fresh()
  measured = []
  for coefficient in (0.02, 2.0):
    objective = update.Objective(old="current", kl_coef=coefficient)
    updater = update.Updater(
      GRAPH, objective, optimizer.OptimizerOptions(name="adam", clip_norm=0.0)
    )
    state = updater.init(fresh())
    kls = []
    for i in range(8):
      state, metrics = update.run_updates(
        updater, state, batch, config_of(0.02), i, reference
      )
      kls.append(update.averaged(metrics)["kl"])
    assert kls[0] == pytest.approx(0, abs=1e-6) and min(kls) >= 0
    measured.append(kls[-1])
    # The measured KL is k3 against the reference, token by token.
    before = state.params
    scored = np.asarray(updater.score(before, packed, used))
    ref = np.asarray(updater.score(reference, packed, used))
    _, metrics = update.run_updates(
      updater, state, batch, config_of(0.02), 9, reference
    )
    delta = (ref - scored)[packed.segment > 0].astype(np.float64)
    k3 = np.exp(delta) - delta - 1
    kl = update.averaged(metrics)["kl"]
    assert kl == pytest.approx(k3.mean(), rel=1e-3)
  assert measured[1] < 0.5 * measured[0]


# The optimiser.


def test_schedules_by_hand():
  rate = lambda step, schedule: optimizer.learning_rate(
    step, peak=1.0, warmup_steps=4, total_steps=12, schedule=schedule
  )
  assert [rate(i, "constant") for i in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
  assert [rate(i, "linear") for i in (4, 6, 8, 12)] == [1, 0.75, 0.5, 0]
  assert rate(8, "cosine") == pytest.approx(0.5)
  assert rate(6, "cosine") == pytest.approx(0.5 * (1 + np.cos(np.pi / 4)))
  assert rate(100, "cosine") == pytest.approx(0)
  with pytest.raises(ValueError, match="optimizer.schedule='sine'"):
    rate(6, "sine")


def test_the_schedule_counts_optimiser_steps():
  seen = []

  class Spy:
    objective = update.Objective()

    def update(self, state, packed, used, denominator, rate, **inputs):
      seen.append(rate)
      return state, {"loss": np.float32(0)}

  config = config_of(1.0, updates_per_step=2, minibatches=2)
  config.optimizer.update(warmup_steps=2, schedule="linear")
  batch = batch_of([(None, 0, 1.0)] * 2)
  for i in (0, 2, 9):
    update.run_updates(Spy(), None, batch, config, i, None)
  np.testing.assert_allclose(
    seen, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 1, 31 / 32, 30 / 32, 29 / 32,
           4 / 32, 3 / 32, 2 / 32, 1 / 32],
  )  # fmt: skip


def trees():
  one = lambda *shape: np.ones(shape, np.float32)
  params = {"blocks": {"q": one(2, 2), "norm": {"scale": one(2)},
                       "q_bias": one(2)}}  # fmt: skip
  return params, jax.tree.map(lambda a: 3 * a, params)


def test_weight_decay_leaves_norms_and_biases_alone():
  params, _ = trees()
  tx = optimizer.chain(optimizer.OptimizerOptions(weight_decay=0.1))
  zero = jax.tree.map(np.zeros_like, params)
  updates, _ = tx.update(zero, tx.init(params), params)
  assert np.allclose(updates["blocks"]["q"], 0.1)
  assert not np.any(updates["blocks"]["norm"]["scale"])
  assert not np.any(updates["blocks"]["q_bias"])


def test_the_gradient_norm_is_clipped():
  params, grads = trees()
  norm = np.sqrt(8 * 9.0)
  for limit, scale in ((1.0, 1 / norm), (100.0, 1.0), (0.0, 1.0)):
    options = optimizer.OptimizerOptions(name="sgd", b1=0.0, clip_norm=limit)
    tx = optimizer.chain(options)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["blocks"]["q"], 3 * scale, rtol=1e-6)


def test_adams_first_step_is_the_sign_of_the_gradient():
  params, grads = trees()
  tx = optimizer.chain(optimizer.OptimizerOptions(name="adam", clip_norm=0.0))
  updates, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_allclose(updates["blocks"]["q"], 1.0, rtol=1e-6)


def test_names_that_do_not_exist_are_refused():
  with pytest.raises(ValueError, match="optimizer.name='lion'"):
    optimizer.chain(optimizer.OptimizerOptions(name="lion"))
  with pytest.raises(ValueError, match="grpo"):
    update.Updater(GRAPH, update.Objective(loss="grp"), PLAIN)
