"""Groups, RolloutBuffer, variance estimators, addressed numbers."""

import types

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax import allocation
from vigor_jax.allocation import variance
from vigor_jax.allocation.addressed import addressed_uniform


def make_groups(size=4, seed=0, step=0):
  return allocation.Groups(step, seed, np.arange(size), np.arange(size))


def add(groups, rewards_by_group):
  counts = np.zeros(len(groups), int)
  for g, rewards in rewards_by_group.items():
    counts[g] = len(rewards)
  groups.request(counts)
  for g, rewards in rewards_by_group.items():
    groups.add([g] * len(rewards), rewards)


class TestAddressedUniform:
  def test_same_address_same_number_in_any_company(self):
    positions = np.array([5, 900, 17, 3])
    together = addressed_uniform(1, 2, 3, positions)
    alone = [addressed_uniform(1, 2, 3, [p])[0] for p in positions]
    np.testing.assert_array_equal(together, alone)

  def test_far_apart_positions_agree_with_close_ones(self):
    far = addressed_uniform(1, 2, 3, [7, 10**12])
    assert far[0] == addressed_uniform(1, 2, 3, [7, 8])[0]
    some = [9000, 3, 300, 8, 12_000, 9001]
    for rounds in (3, range(1, 4)):
      whole = addressed_uniform(1, 2, rounds, np.arange(13_000))
      found = addressed_uniform(1, 2, rounds, some)
      np.testing.assert_array_equal(found, whole[..., some])

  @pytest.mark.parametrize(
    "address", [(9, 2, 3, 0), (1, 9, 3, 0), (1, 2, 9, 0), (1, 2, 3, 9)]
  )
  def test_every_part_of_the_address_counts(self, address):
    one = addressed_uniform(1, 2, 3, np.arange(8))
    other = addressed_uniform(*address[:3], np.arange(8), address[3])
    assert not np.isin(one, other).any()

  def test_is_uniform(self):
    x = addressed_uniform(0, 0, 1, np.arange(20000))
    # Standard errors: mean .0020, each tenth of the unit interval .0021.
    assert abs(x.mean() - 0.5) < 0.008
    shares = np.histogram(x, 10, (0, 1))[0] / len(x)
    assert np.abs(shares - 0.1).max() < 0.009

  def test_no_positions(self):
    assert addressed_uniform(0, 0, 0, []).shape == (0,)


class TestVariance:
  def test_hand_worked(self):
    # Rewards 1, 0, 0, 1, 1: n 5, sum 3: plug-in 6/25, unbiased 3/10,
    # posterior Beta(4, 3): 12 / (7 * 8).
    assert variance.plugin(5, 3, 3) == pytest.approx(0.24)
    assert variance.unbiased(5, 3, 3) == pytest.approx(0.3)
    assert variance.beta_posterior(5, 3) == pytest.approx(12 / 56)

  def test_graded_equals_numpy(self):
    r = np.array([0.25, 0.5, 1.0, 0.0, 0.125])
    sums = (len(r), r.sum(), (r * r).sum())
    assert variance.plugin(*sums) == pytest.approx(r.var())
    assert variance.unbiased(*sums) == pytest.approx(r.var(ddof=1))

  def test_small_groups(self):
    for kind in ("plugin", "unbiased"):
      np.testing.assert_array_equal(
        variance.estimate(kind, [0, 1], [0, 1], [0, 1]), [0, 0]
      )
    # No data: Beta(1, 1) has E[p (1 - p)] = 1/6.
    assert variance.estimate("beta", 0, 0, 0) == pytest.approx(1 / 6)

  def test_symmetric_to_the_last_bit(self):
    for n in range(2, 40):
      k = np.arange(n + 1)
      v = variance.plugin(n, k, k)
      np.testing.assert_array_equal(v, v[::-1])

  def test_unknown_kind(self):
    with pytest.raises(ValueError, match="plugin, unbiased, beta"):
      variance.estimate("plug", 1, 1, 1)


class TestGroups:
  def test_request_books_and_opens(self):
    groups = make_groups()
    first = groups.request([0, 2, 0, 1])
    assert first.opened.tolist() == [1, 3]
    assert first.opened.dtype == np.int32 and first.counts.dtype == np.int32
    assert first.total == 3
    second = groups.request([1, 2, 0, 0])
    assert second.opened.tolist() == [0]
    assert groups.counts.tolist() == [1, 4, 0, 1]
    assert groups.opened.tolist() == [True, True, False, True]
    assert groups.consumed.tolist() == groups.opened.tolist()
    assert [c.tolist() for c in groups.round_counts] == [
      [0, 2, 0, 1],
      [1, 2, 0, 0],
    ]
    assert groups.spent == 6

  def test_eight_rewards_of_a_tenth_have_zero_variance(self):
    groups = make_groups(2)
    add(groups, {0: np.full(8, 0.1, np.float32), 1: [1.0, 0.99999]})
    assert groups.zero_variance().tolist() == [True, False]
    assert groups.mixed().tolist() == [False, True]

  def test_seven_thirds_have_zero_variance(self):
    groups = make_groups(1)
    add(groups, {0: np.full(7, 1 / 3)})
    assert groups.variance()[0] == 0.0

  def test_statistics(self):
    groups = make_groups(5)
    add(groups, {0: [1, 1], 1: [0, 1, 0, 1], 2: [0, 0, 0], 3: [1]})
    assert groups.mixed_count() == 1
    assert groups.zero_variance_share() == pytest.approx(3 / 4)
    assert groups.zero_variance_rollout_share() == pytest.approx(6 / 10)
    assert groups.variance_per_rollout() == pytest.approx(4 * (1 / 3) / 10)
    np.testing.assert_allclose(groups.mean(), [1, 0.5, 0, 1, 0])

  def test_uniform_groups_share_is_one(self):
    groups = make_groups(3)
    add(groups, {0: [1] * 4, 1: [0.1] * 8, 2: [0.0]})
    assert groups.zero_variance_share() == 1.0
    assert groups.zero_variance_rollout_share() == 1.0

  def test_empty_statistics_are_zero(self):
    groups = make_groups()
    assert groups.zero_variance_share() == 0
    assert groups.zero_variance_rollout_share() == 0
    assert groups.variance_per_rollout() == 0

  def test_sums_do_not_depend_on_the_order(self):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, 500)
    rewards = rng.random(500).astype(np.float32)
    sums = []
    for _ in range(5):
      order = rng.permutation(500)
      groups = make_groups()
      groups.request(np.bincount(ids, minlength=4))
      for part in np.array_split(order, 7):
        groups.add(ids[part], rewards[part])
      sums.append((groups.reward_sum.tolist(), groups.reward_sq.tolist()))
    assert all(s == sums[0] for s in sums)
    exact = [rewards[ids == g].astype(float).var() for g in range(4)]
    np.testing.assert_allclose(groups.variance(), exact, atol=2e-6)

  @pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.5, float("inf")])
  def test_bad_reward_is_named_and_nothing_is_added(self, bad):
    groups = make_groups()
    groups.request([2, 0, 0, 0])
    with pytest.raises(ValueError, match=r"of group 0 .*\[0, 1\]"):
      groups.add([0, 0], [1.0, bad])
    assert groups.n.sum() == 0

  def test_more_rollouts_than_requested(self):
    groups = make_groups()
    groups.request([1, 0, 0, 0])
    with pytest.raises(ValueError, match="group 0 got 2 .* only 1"):
      groups.add([0, 0], [1, 1])

  def test_unknown_group(self):
    groups = make_groups()
    with pytest.raises(ValueError, match="group 4 does not exist"):
      groups.add([4], [1])

  def test_negative_counts(self):
    with pytest.raises(ValueError, match="non-negative"):
      make_groups(2).request([1, -1])


def make_rows(group, sample, length=3, width=4):
  k = len(group)
  live = np.arange(width) < length
  return types.SimpleNamespace(
    tokens=(np.arange(k * width).reshape(k, width) + 1) * live,
    logprobs=-np.ones((k, width), np.float32) * live,
    processed_logprobs=-np.full((k, width), 0.5, np.float32) * live,
    lengths=np.full(k, length),
    group=np.array(group),
    sample=np.array(sample),
    truncated=np.zeros(k, bool),
    end_chunk=np.zeros(k, int),
    slot=np.arange(k),
  )


class TestBuffer:
  def setup_method(self):
    self.groups = make_groups(3)
    self.groups.request([2, 2, 0])
    self.buffer = allocation.RolloutBuffer(4, 6, self.groups)

  def test_add_fills_and_updates_groups(self):
    self.buffer.add(make_rows([1, 0], [0, 1]), [1.0, 0.0])
    assert self.buffer.size == 2
    assert self.buffer.tokens[0].tolist() == [1, 2, 3, 0, 0, 0]
    assert self.buffer.logprobs[1].tolist() == [-1, -1, -1, 0, 0, 0]
    assert self.buffer.reward[:2].tolist() == [1, 0]
    assert self.buffer.shaped[:2].tolist() == [1, 0]
    assert self.groups.n.tolist() == [1, 1, 0]
    assert self.groups.reward_sum.tolist() == [0, 1, 0]

  def test_canonical_order(self):
    self.buffer.add(make_rows([1, 0, 1, 0], [1, 1, 0, 0]), [0, 1, 1, 0])
    order = self.buffer.order()
    assert self.buffer.group[order].tolist() == [0, 0, 1, 1]
    assert self.buffer.sample[order].tolist() == [0, 1, 0, 1]

  def test_a_row_twice(self):
    self.buffer.add(make_rows([0, 0], [1, 1]), [0, 1])
    with pytest.raises(ValueError, match="group 0 sample 1 .* twice"):
      self.buffer.order()

  @pytest.mark.parametrize(
    "rewards, message",
    [
      (None, "returned None; expected 2 numbers"),
      ("01", "returned '01'; expected 2 numbers"),
      (0.5, "returned 0.5; expected 2 numbers"),
      ([1.0], "returned 1 rewards, but 2 were expected"),
      ([1.0, 0.0, 1.0], "returned 3 rewards, but 2"),
      ([1.0, "0"], "reward '0' of group 0, sample 1 .* is a str"),
      ([1.0, None], "reward None of group 0, sample 1"),
      ([1.0, [0.5]], "is a list"),
      ([1.0, float("nan")], "reward nan of group 0, sample 1"),
      (np.array([1.0, 1.01]), "reward 1.01 of group 0, sample 1"),
      (np.zeros((2, 1)), "expected 2 numbers"),
    ],
  )
  def test_bad_rewards(self, rewards, message):
    with pytest.raises(ValueError, match=message):
      self.buffer.add(make_rows([1, 0], [0, 1]), rewards)
    assert self.buffer.size == 0 and self.groups.n.sum() == 0

  def test_bools_are_numbers(self):
    self.buffer.add(make_rows([1, 0], [0, 1]), [True, False])
    assert self.buffer.reward[:2].tolist() == [1, 0]

  def test_beyond_the_budget(self):
    buffer = allocation.RolloutBuffer(1, 6, self.groups)
    with pytest.raises(ValueError, match="budget of 1"):
      buffer.add(make_rows([1, 0], [0, 1]), [1, 0])

  def test_too_long(self):
    with pytest.raises(ValueError, match="7 tokens .* max_new_tokens=6"):
      self.buffer.add(make_rows([0], [0], length=7, width=7), [1])


class TestRegistry:
  def test_names_match(self):
    for name, cls in allocation.REGISTRY.items():
      assert cls.name == name

  def test_unknown_name(self):
    with pytest.raises(ValueError, match="did you mean 'vigor'"):
      helpers.make("vigour")

  def test_unknown_option(self):
    with pytest.raises(ValueError, match="allocation.vigor.round .*'rounds'"):
      helpers.make("vigor", {"round": 3})

  @pytest.mark.parametrize(
    "options, message",
    [
      ({"rounds": 2.5}, "rounds=2.5"),
      ({"rounds": True}, "rounds=True"),
      ({"rounds": 0}, "rounds=0"),
      ({"keep": 0.0}, "keep=0.0"),
      ({"keep": "half"}, "keep='half'"),
      ({"variance": "unbias"}, "did you mean 'unbiased'"),
      ({"ties": "rand"}, "ties='rand'"),
    ],
  )
  def test_bad_option_values(self, options, message):
    with pytest.raises(ValueError, match=message):
      helpers.make("vigor", options)

  def test_bad_common_values(self):
    with pytest.raises(ValueError, match="budget=0"):
      helpers.make("uniform", budget=0)
    with pytest.raises(ValueError, match="seed=-1"):
      helpers.make("uniform", seed=-1)
    with pytest.raises(ValueError, match="train_on='some'"):
      helpers.make("uniform", train_on="some")

  def test_wrong_state(self):
    with pytest.raises(ValueError, match="expected"):
      helpers.make("eb_widening").load_state_dict({"priors": []})
