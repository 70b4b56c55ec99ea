"""Playing and training in the laboratory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vigor_jax import allocation
from vigor_jax.lab import learner
from vigor_jax.lab.learner import Estimator, Rule
from vigor_jax.lab.world import Stream, World
from vigor_jax.policy import losses

WORLD = World.preset("plain", facts=8, mastered=4, features=6, evaluation=64)


def play(rule, world=WORLD, seeds=(0, 1), step=1):
  seeds = np.asarray(seeds)
  rules = [rule.make(int(s)) for s in seeds]
  streams = [Stream(world, int(s)) for s in seeds]
  policy = learner.softmax(np.stack([world.initial(int(s)) for s in seeds]))
  rollouts, groups = learner.collect(world, policy, rules, streams, step, seeds)
  return rollouts, groups, rules, policy


@pytest.mark.parametrize("name", allocation.REGISTRY)
def test_every_allocator_plays(name):
  rollouts, groups, rules, policy = play(Rule(name))
  for r, g in enumerate(groups):
    mine = rollouts.run == r
    assert mine.sum() == g.spent <= learner.BUDGET
    np.testing.assert_array_equal(
      np.bincount(rollouts.group[mine], minlength=len(g)), g.n
    )
    np.testing.assert_allclose(
      np.bincount(rollouts.group[mine], rollouts.reward[mine], len(g)),
      g.reward_sum,
    )
    # Sample indices of a group count up from 0.
    for group in np.unique(rollouts.group[mine]):
      samples = np.sort(rollouts.sample[mine & (rollouts.group == group)])
      assert samples.tolist() == list(range(len(samples)))
  rows, c = learner.coefficients(rollouts, groups, rules, Estimator())
  slope = learner.gradient(rollouts, rows, c, policy)
  assert np.isfinite(slope).all() and np.abs(slope).max() > 0
  np.testing.assert_allclose(slope.sum(-1), 0, atol=1e-12)


def test_the_gradient_is_that_of_the_products_loss():
  rollouts, groups, rules, policy = play(Rule("vigor"))
  rows, c = learner.coefficients(rollouts, groups, rules, Estimator())
  own = learner.gradient(rollouts, rows, c, policy)
  kept = rollouts.keep(rows)
  padded = jnp.concatenate(
    [jnp.log(policy), jnp.zeros((len(policy), 1, policy.shape[2]))], axis=1
  )

  def loss(logits):
    logs = jax.nn.log_softmax(logits)[kept.run[:, None], kept.chains, kept.arms]
    inside = kept.chains < WORLD.skills
    total = jnp.where(inside, logs, 0.0).sum(1, keepdims=True)
    ones = np.ones(total.shape, np.int32)
    terms, _ = losses.token_loss(
      "grpo", total, jax.lax.stop_gradient(total), c[:, None], ones, ones,
      clip_low=0.2, clip_high=0.2,
    )  # fmt: skip
    return terms.sum()

  auto = -np.asarray(jax.grad(loss)(padded))[:, :-1]
  np.testing.assert_allclose(own, auto, atol=2e-6)


def test_rules_share_their_rollouts():
  one, *_ = play(Rule("uniform"))
  two, *_ = play(Rule("vigor"))
  table = {
    (r, g, s): tuple(a)
    for r, g, s, a in zip(one.run, one.group, one.sample, one.arms)
  }
  shared = 0
  for r, g, s, arms in zip(two.run, two.group, two.sample, two.arms):
    if (r, g, s) in table:
      shared += 1
      assert table[r, g, s] == tuple(arms)
  assert shared > 200


def test_a_run_does_not_depend_on_its_neighbours():
  train = lambda seeds: learner.train(
    WORLD, Rule("eb_widening"), seeds, np.full(len(seeds), 0.2), steps=4
  )
  together, alone = train([0, 1, 2]), train([1])
  np.testing.assert_allclose(
    together.accuracy[1], alone.accuracy[0], rtol=1e-12
  )


def test_weights_are_those_of_each_run():
  # By hand: (r - mean) / B, or / (n P).
  rollouts, groups, rules, _ = play(Rule("vigor"), seeds=(0,))
  for name, of in (
    ("rollout_mean", lambda n, prompts: 1 / learner.BUDGET),
    ("prompt_mean", lambda n, prompts: 1 / (n * prompts)),
  ):
    rows, c = learner.coefficients(
      rollouts, groups, rules, Estimator("dr_grpo", name)
    )
    for row, value in list(zip(rows, c))[:50]:
      g = rollouts.group[row]
      mean = groups[0].reward_sum[g] / groups[0].n[g]
      expected = (rollouts.reward[row] - mean) * of(groups[0].n[g], 32)
      assert value == pytest.approx(expected, rel=1e-5)


def test_survivors_only():
  rollouts, groups, rules, _ = play(Rule("vigor", train_on="survivors"))
  rows, _ = learner.coefficients(rollouts, groups, rules, Estimator())
  sizes = np.array(
    [groups[r].n[g] for r, g in zip(rollouts.run[rows], rollouts.group[rows])]
  )
  assert (sizes == 30).all()


def test_noise_turns_verdicts_round():
  clean, *_ = play(Rule("uniform"), WORLD, seeds=range(8))
  noisy_world = World.preset(
    "plain", facts=8, mastered=4, features=6, evaluation=64, noise=0.2
  )
  noisy, *_ = play(Rule("uniform"), noisy_world, seeds=range(8))
  np.testing.assert_array_equal(clean.arms, noisy.arms)
  turned = clean.reward != noisy.reward
  assert turned.mean() == pytest.approx(0.2, abs=0.03)


def test_graded_rewards_are_shares_of_right_steps():
  world = World(reward="graded")
  rollouts, *_ = play(Rule("uniform"), world)
  right = (rollouts.arms == 0) & (rollouts.chains < world.skills)
  length = (rollouts.chains < world.skills).sum(1)
  np.testing.assert_allclose(rollouts.reward, right.sum(1) / length)


def test_training_raises_accuracy():
  curves = learner.train(WORLD, Rule("uniform"), [0, 1], [0.2, 0.2], steps=20)
  assert curves.rollouts[-1] == 20 * learner.BUDGET
  assert (curves.accuracy[:, -1] > curves.accuracy[:, 0] + 0.1).all()


def test_adam_by_hand():
  adam = learner.Adam(np.array([0.1]))
  grad = np.full((1, 1, 1), 3.0)
  # The first step of Adam is the rate, whatever the gradient's size.
  assert adam.step(grad).item() == pytest.approx(0.1)
  # m = .9 * .3 - .1 * 3 = -.03, / .19; v = .99 * .09 + .01 * 9, / .0199.
  second = 0.1 * (-0.03 / 0.19) / np.sqrt(0.1791 / 0.0199)
  assert adam.step(-grad).item() == pytest.approx(second, rel=1e-6)
