"""The published rules, each against its formula or a brute force."""

import itertools

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax.allocation import cero, gvm, history, knapsack, pods
from vigor_jax.allocation import screening, vip


def constant(p):
  return helpers.bernoulli(lambda uids: np.full(len(uids), float(p)))


def pattern(rule):
  """Rewards from rule(uid, sample), deterministic."""

  def reward(groups, group, sample):
    return np.array(
      [float(rule(int(groups.uids[g]), int(s))) for g, s in zip(group, sample)]
    )

  return reward


def finish(allocator, groups, log):
  group, sample, reward = log
  return allocator.keep_rollouts(groups, group, sample, reward)


class TestDynamicSampling:
  def test_refills_until_the_batch_is_full(self):
    # Every third prompt is mixed; target 8 of 32, batches of 8.
    allocator = helpers.make("dynamic_sampling")
    groups = helpers.run_step(
      allocator,
      helpers.Stream(),
      pattern(lambda uid, s: uid % 3 == 0 and s % 2),
    )
    # Mixed after each batch: uids 0 3 6 | 9 12 15 | 18 21: full after three.
    assert [int(c.sum()) for c in groups.round_counts] == [64, 64, 64]
    kept = np.flatnonzero(allocator.select(groups))
    assert kept.tolist() == [0, 3, 6, 9, 12, 15, 18, 21]

  def test_surplus_is_dropped(self):
    allocator = helpers.make("dynamic_sampling", {"generation": 3.0})
    groups = helpers.run_step(
      allocator, helpers.Stream(), pattern(lambda uid, s: s % 2)
    )
    assert groups.spent == 24 * 8 and groups.mixed_count() == 24
    assert np.flatnonzero(allocator.select(groups)).tolist() == list(range(8))

  def test_bound_on_batches(self):
    allocator = helpers.make("dynamic_sampling", {"max_batches": 2})
    groups = helpers.run_step(allocator, helpers.Stream(), constant(1))
    assert "none of 16 groups in 2 batches" in groups.messages[0]
    assert groups.spent == 128 and len(groups.messages) == 1
    assert not allocator.select(groups).any()

  def test_last_refill_is_cut_to_fit(self):
    allocator = helpers.make("dynamic_sampling", {"generation": 1.5})
    groups = helpers.run_step(allocator, helpers.Stream(), constant(0))
    assert "nothing to train on" in groups.messages[0]
    assert [int(c.sum()) for c in groups.round_counts] == [96, 96, 64]


class TestPods:
  @pytest.mark.parametrize("case", range(30))
  def test_brute_force(self, case):
    rng = np.random.default_rng(case)
    n = int(rng.integers(2, 8))
    m = int(rng.integers(1, n + 1))
    rewards = rng.choice([0, 0.25, 0.5, 1], (3, n)) + (case % 2) * rng.random(
      (3, n)
    )
    keep = pods.max_variance_subset(rewards, m)
    assert (keep.sum(1) == m).all()
    for row, chosen in zip(rewards, keep):
      best = max(
        row[list(c)].var() for c in itertools.combinations(range(n), m)
      )
      assert row[chosen].var() == pytest.approx(best, abs=1e-8)

  def test_binary_takes_half_of_each(self):
    keep = pods.max_variance_subset([[1, 0, 1, 1, 1, 0, 0, 1]], 4)
    assert np.array([1, 0, 1, 1, 1, 0, 0, 1])[keep[0]].sum() == 2

  def test_in_a_step_whatever_the_order_of_rows(self):
    allocator = helpers.make("pods", prompts=8, budget=256)
    groups = allocator.begin(helpers.Stream(), 0)
    group, sample, reward = helpers.play(
      allocator, groups, pattern(lambda uid, s: s < uid)
    )
    keep = allocator.keep_rollouts(groups, group, sample, reward)
    assert np.bincount(group[keep]).tolist() == [8] * 8
    mixed = group[keep] >= 4
    assert reward[keep][mixed].mean() == 0.5
    order = np.random.default_rng(0).permutation(256)
    again = allocator.keep_rollouts(
      groups, group[order], sample[order], reward[order]
    )
    assert (again == keep[order]).all()


class TestGreso:
  def test_skip_probability(self):
    allocator = helpers.make("greso")
    allocator.keep = {"easy": 0.5, "hard": 0.9}
    allocator.streaks.put([1, 2, 3, 4], [[1, 1], [3, 1], [2, 0], [9, 1]])
    # 1 - .5, 1 - .125, 1 - .81, floor 1 - .01, never seen 0.
    np.testing.assert_allclose(
      allocator.skip_probability([1, 2, 3, 4, 5]),
      [0.5, 0.875, 0.19, 0.99, 0],
    )

  def test_streaks(self):
    allocator = helpers.make("greso", {"target": 1.0})
    stream = helpers.Stream(data_set=32)
    # Even uids always right, odd ones mixed.
    reward = pattern(lambda uid, s: uid % 2 == 0 or s % 2)
    helpers.run_step(allocator, stream, reward)
    assert set(allocator.streaks.rows) == set(range(0, 32, 2))
    assert (allocator.streaks.get([0, 2])[:, 0] == 1).all()
    # All zero-variance groups were easy, half of them: above 1/12.
    assert allocator.keep["easy"] == pytest.approx(0.49)
    assert allocator.keep["hard"] == pytest.approx(0.51)
    before = {u: allocator.streaks.rows[u][0] for u in range(0, 32, 2)}
    groups = helpers.run_step(allocator, stream, reward, 1)
    for g in np.flatnonzero(groups.opened):
      uid = int(groups.uids[g])
      if uid % 2 == 0 and (groups.uids[groups.opened] == uid).sum() == 1:
        assert allocator.streaks.rows[uid][0] == before[uid] + 1

  def test_mixed_group_ends_a_streak(self):
    allocator = helpers.make("greso")
    allocator.streaks.put([0], [[5, 0]])
    groups = allocator.begin(helpers.Stream(), 0)
    groups.request(np.eye(1, len(groups), dtype=int)[0] * 8)
    groups.plan = np.zeros(len(groups), bool)
    groups.add([0] * 8, [0, 1] * 4)
    allocator.end(groups)
    assert 0 not in allocator.streaks.rows

  def test_skipped_prompts_are_consumed(self):
    allocator = helpers.make("greso")
    allocator.streaks.put(range(0, 96, 2), [[50, 1]] * 48)
    groups = allocator.begin(helpers.Stream(), 0)
    helpers.play(allocator, groups, pattern(lambda uid, s: s % 2))
    last = np.flatnonzero(groups.opened)[-1]
    assert groups.consumed[: last + 1].all()
    assert not groups.consumed[last + 1 :].any()
    assert groups.opened.sum() < groups.consumed.sum()

  def test_clamp(self):
    allocator = helpers.make("greso", {"change": 1.0})
    helpers.run_step(allocator, helpers.Stream(), constant(1))
    assert allocator.keep == {"easy": 0.05, "hard": 0.95}

  def test_everything_skipped_still_draws(self):
    allocator = helpers.make("greso")
    allocator.streaks.put(range(96), [[99, 1]] * 96)
    groups = allocator.begin(helpers.Stream(), 0)
    helpers.play(allocator, groups, pattern(lambda uid, s: s % 2))
    assert groups.mixed_count() >= allocator.target

  def test_adaptive_batch(self):
    # First batch 1.5 x 8; one in four mixed: 3; then ceil(1.25 5 / .25) = 25,
    # cut to the largest, 12; then what is affordable.
    allocator = helpers.make("greso")
    groups = helpers.run_step(
        allocator, helpers.Stream(),
        pattern(lambda uid, s: uid % 4 == 0 and s % 2),
    )  # fmt: skip
    assert [int(c.sum()) // 8 for c in groups.round_counts] == [12, 12, 8]


class TestVip:
  @pytest.mark.parametrize("form, low", [("rloo", 2), ("dr_grpo", 3)])
  @pytest.mark.parametrize("case", range(12))
  def test_brute_force(self, form, low, case):
    rng = np.random.default_rng(case)
    size, high = 4, 9
    a = rng.random(size) ** 2 * 0.25
    budget = int(rng.integers(size * low, size * high + 1))
    n = vip.allocate(a, budget, low, high, form, rng.random(size))
    assert n.sum() == budget and n.min() >= low and n.max() <= high
    best = min(
      (a * vip.objective(form, c)).sum()
      for c in itertools.product(range(low, high + 1), repeat=size)
      if sum(c) == budget
    )
    assert (a * vip.objective(form, n)).sum() == pytest.approx(best, rel=2e-3)

  def test_relaxed_rule_by_hand(self):
    # sqrt(a) 1 : 2 : 3 and 12 rollouts beyond one each: 1 + 2, 1 + 4, 1 + 6.
    n = vip.allocate([1, 4, 9], 15, 2, 32, "rloo", np.zeros(3))
    assert n.tolist() == [3, 5, 7]

  def test_relaxed_cubic_is_stationary(self):
    a = np.array([0.05, 0.1, 0.2, 0.25])
    n = vip.relaxed(a, 40, 3, 32, "dr_grpo")
    assert n.sum() == pytest.approx(40, abs=0.01)
    multipliers = a * (n - 2) / n**3
    np.testing.assert_allclose(multipliers, multipliers[0], rtol=1e-3)

  def test_no_variance_anywhere_is_even(self):
    n = vip.allocate(np.zeros(4), 22, 2, 32, "rloo", [0.1, 0.4, 0.3, 0.2])
    assert n.tolist() == [5, 6, 6, 5]

  def test_first_step_is_uniform_then_follows_history(self):
    allocator = helpers.make("vip")
    stream = helpers.Stream(data_set=32)
    reward = pattern(lambda uid, s: s % 2 if uid < 8 else 1)
    first = helpers.run_step(allocator, stream, reward)
    assert first.counts.tolist() == [8] * 32
    second = helpers.run_step(allocator, stream, reward, 1)
    assert second.spent == 256
    assert second.counts[:8].min() > second.counts[8:].max()

  def test_prediction_by_hand(self):
    allocator = helpers.make("vip", {"discount": 0.5, "shrinkage": 2.0})
    allocator.counts.put([7], [[1.0, 4.0]])
    allocator.total = np.array([19.5, 39.0])
    # Mean rate 20 / 40; (1 + 2 / 2) / (4 + 2).
    np.testing.assert_allclose(allocator.predicted([7, 8]), [1 / 3, 0.5])

  def test_bounds(self):
    with pytest.raises(ValueError, match="must be 8 to 128, or budget 14 to"):
      helpers.make("vip", prompts=7)
    with pytest.raises(ValueError, match="lowest=2 must be .* at least 3"):
      helpers.make("vip", {"form": "dr_grpo"})


class TestKnapsack:
  @pytest.mark.parametrize("case", range(15))
  def test_greedy_is_the_optimum(self, case):
    rng = np.random.default_rng(case)
    size, low, high = 4, 2, 8
    p = rng.choice([0.02, 0.125, 0.25, 0.5, 0.75, 0.875], size)
    budget = int(rng.integers(size * low, size * high + 1))
    n = knapsack.allocate(p, budget, low, high, rng.random(size))
    assert n.sum() == budget and n.min() >= low and n.max() <= high
    best = max(
      knapsack.value(np.array(c), p).sum()
      for c in itertools.product(range(low, high + 1), repeat=size)
      if sum(c) == budget
    )
    assert knapsack.value(n, p).sum() == pytest.approx(best, abs=1e-12)

  def test_equals_the_dynamic_program(self):
    rng = np.random.default_rng(0)
    p, budget, low, high = rng.random(12), 150, 2, 40
    best = np.full(budget + 1, -np.inf)
    best[0] = 0
    for x in p:
      values = [knapsack.value(n, x) for n in range(low, high + 1)]
      new = np.full(budget + 1, -np.inf)
      for n, v in zip(range(low, high + 1), values):
        new[n:] = np.maximum(new[n:], best[: budget + 1 - n] + v)
      best = new
    n = knapsack.allocate(p, budget, low, high, rng.random(12))
    assert knapsack.value(n, p).sum() == pytest.approx(best[budget])

  def test_fallback_goes_to_the_unsolved(self):
    p = np.array([0.0, 0.5, 1.0, 0.0])
    n = knapsack.allocate(p, 60, 2, 128, np.arange(4.0), minimum_gain=1e-3)
    # 0.5: gain 2^-N / 8 > .001 up to N = 6, so seven rollouts; p = 1 gets the
    # minimum, the rest is split between the two unsolved.
    assert n[1] == 7 and n[2] == 2
    assert sorted(n[[0, 3]].tolist()) == [25, 26]

  def test_unseen_prompts_get_the_uniform_share(self):
    allocator = helpers.make("knapsack")
    stream = helpers.Stream(data_set=48)
    reward = pattern(lambda uid, s: s == 0 if uid % 2 else 1)
    first = helpers.run_step(allocator, stream, reward)
    assert first.counts.tolist() == [8] * 32
    second = helpers.run_step(allocator, stream, reward, 1)
    assert second.spent == 256
    assert (second.counts[:16] == 8).all()
    known = second.uids[16:]
    assert (second.counts[16:][known % 2 == 0] == 2).all()
    assert (second.counts[16:][known % 2 == 1] > 8).all()

  def test_uneven_budget_is_spent(self):
    groups = helpers.run_step(
      helpers.make("knapsack", prompts=30), helpers.Stream(), constant(0.5)
    )
    assert sorted(set(groups.counts.tolist())) == [8, 9]
    assert groups.spent == 256


class TestCero:
  def test_best_response_maximises(self):
    # max over z of 1 - exp(-c z) - theta z on [0, Z].
    z = np.linspace(0, 12, 120001)
    for theta, c in ((0.1, 0.5), (0.5, 0.5), (0.9, 0.5), (0.001, 0.5),
                     (0.0, 2.0)):  # fmt: skip
      best = z[np.argmax(1 - np.exp(-c * z) - theta * z)]
      assert cero.best_response(theta, c, 12) == pytest.approx(best, abs=1e-3)

  def test_continuous_at_the_breaks(self):
    c, most = 0.5, 8.0
    for theta in (c, c * np.exp(-c * most)):
      near = cero.best_response([theta * 0.999999, theta * 1.000001], c, most)
      assert abs(near[0] - near[1]) < 1e-4

  def test_price_update_by_hand(self):
    allocator = helpers.make("cero", {"horizon": 4}, prompts=2, budget=16)
    allocator.data_set = 8
    # R = 4 steps 2 prompts 2 units / 8 = 2; Beta(1, 1): q = 1/6, c = 1/3.
    # theta = .2: z* = 3 log(5/3), step (2 - z*/4) / (2 sqrt 4).
    new = allocator.step_prices(np.array([[1.0, 1.0, 0.2]]), np.array([0.0]))
    want = 3 * np.log(5 / 3) / 4
    assert new[0] == pytest.approx(0.2 + want / 4)
    new = allocator.step_prices(np.array([[1.0, 1.0, 0.9]]), np.array([2.0]))
    assert new[0] == pytest.approx(0.9 - 2 / 4)

  def test_solved_prompts_are_passed_over(self):
    # As in the paper, the pool is the whole data set.
    allocator = helpers.make(
      "cero", {"horizon": 40, "pool": 8.0}, prompts=8, budget=64
    )
    stream = helpers.Stream(data_set=64)
    stream.num_examples = 64
    reward = pattern(lambda uid, s: s % 2 if uid < 16 else 1)
    total = np.zeros(64)
    for step in range(40):
      groups = helpers.run_step(allocator, stream, reward, step)
      assert groups.spent == 64 and groups.consumed.all()
      np.add.at(total, groups.uids, groups.counts)
    assert total[:16].mean() > 1.5 * total[16:].mean()
    assert total.min() > 0  # prices of those passed over rise again

  def test_units_must_divide(self):
    with pytest.raises(ValueError, match="units must divide 8"):
      helpers.make("cero", {"units": 3})


class TestGvm:
  def test_weights_by_hand(self):
    # p = .25: 1 / sqrt(.25 + .001 / .25).
    weights = gvm.gvm_weights([0.0, 0.25, 1.0], np.ones(3))
    np.testing.assert_allclose(
      weights, [0, 1 / np.sqrt(0.254), 1 / np.sqrt(1.001)]
    )

  @pytest.mark.parametrize("case", range(20))
  def test_largest_remainders(self, case):
    rng = np.random.default_rng(case)
    weights = rng.random(5) * (rng.random(5) < 0.8)
    n = gvm.largest_remainders(weights, 23, rng.random(5))
    share = weights if weights.sum() else np.ones(5)
    exact = 23 * share / share.sum()
    assert n.sum() == 23
    assert (np.abs(n - exact) < 1).all()
    # Minimal sum of |n - exact| over all integer vectors with this sum.
    low = np.floor(exact)
    best = min(
      np.abs(low + up - exact).sum()
      for up in itertools.product((0, 1), repeat=5)
      if (low + up).sum() == 23
    )
    assert np.abs(n - exact).sum() == pytest.approx(best)

  def test_pilots_then_the_hard_ones(self):
    allocator = helpers.make("gvm")
    groups = allocator.begin(helpers.Stream(), 0)
    log = helpers.play(
      allocator,
      groups,
      pattern(lambda uid, s: uid % 3 > 0 and (uid % 3 == 1 or s % 4 == 0)),
    )
    assert [int(c.sum()) for c in groups.round_counts] == [128, 128]
    kind = np.arange(32) % 3
    assert (groups.counts[kind == 0] == 4).all()
    assert groups.counts[kind == 2].min() > groups.counts[kind == 1].max()
    keep = finish(allocator, groups, log)
    assert keep.sum() == 128
    assert log[1][keep].min() == 4
    kept_all = helpers.make("gvm", {"keep_pilots": True})
    assert finish(kept_all, groups, log).all()

  def test_all_wrong_is_even(self):
    groups = helpers.run_step(
      helpers.make("gvm"), helpers.Stream(), constant(0)
    )
    assert (groups.counts == 8).all()


class TestReinforceAda:
  def test_balance_stops_with_two_of_each(self):
    allocator = helpers.make("reinforce_ada")
    groups = allocator.begin(helpers.Stream(), 0)
    # Prompt 0: first four 1 0 1 0; prompt 1: one success in four; others fail.
    log = helpers.play(
      allocator,
      groups,
      pattern(
        lambda uid, s: s % 2 == 0 if uid == 0 else uid == 1 and s % 4 == 0
      ),
    )
    assert groups.spent == 256
    assert groups.counts[0] == 4 and groups.counts[1] == 8
    assert (groups.counts[2:16] == 16).all()
    # 16 prompts take 4 + 8 + 14 x 16 = 236; the next batch is cut to fit 20.
    assert groups.counts[16:21].tolist() == [4] * 5
    assert not groups.opened[21:].any()
    keep = finish(allocator, groups, log)
    assert np.bincount(log[0][keep])[:2].tolist() == [4, 4]
    for g in (0, 1):
      assert log[2][keep & (log[0] == g)].sum() == 2

  def test_positive(self):
    allocator = helpers.make("reinforce_ada", {"rule": "positive"})
    groups = helpers.run_step(allocator, helpers.Stream(), constant(1))
    assert "nothing to train on" in groups.messages[0]
    assert (groups.counts[groups.opened] == 4).all()

  @pytest.mark.parametrize("rewards, kept", [
      ([1, 1, 1, 1, 0, 1], [0, 1, 2, 4]),  # one wrong: the rest is filled
      ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3]),
      ([0, 1, 0, 1, 1, 0], [0, 1, 2, 3]),
      ([1, 1, 1, 0, 0, 0], [0, 1, 3, 4]),
  ])  # fmt: skip
  def test_down_sampling(self, rewards, kept):
    allocator = helpers.make("reinforce_ada")
    groups = allocator.begin(helpers.Stream(), 0)
    groups.request(np.eye(1, len(groups), dtype=int)[0] * 6)
    sample = np.array([3, 0, 5, 2, 1, 4])
    keep = allocator.keep_rollouts(
      groups, np.zeros(6, int), sample, np.array(rewards, float)[sample]
    )
    assert sorted(sample[keep].tolist()) == kept

  def test_odd_keep(self):
    with pytest.raises(ValueError, match="must be even: 4 or 6"):
      helpers.make("reinforce_ada", {"keep": 5})


class TestScreening:
  def test_cut(self):
    assert screening.cut([4, 0, 4, 4], 9).tolist() == [4, 0, 4, 1]

  def test_speed(self):
    allocator = helpers.make("speed")
    groups = helpers.run_step(
        allocator, helpers.Stream(),
        pattern(lambda uid, s: uid % 8 == 0 and s % 2),
    )  # fmt: skip
    # 16 screened (64): 0 and 8 mixed, 20 more each; 16 screened: 16 and 24;
    # then 256 - 208 = 48 left: 12 prompts, none to pay for.
    assert [int(c.sum()) for c in groups.round_counts] == [64, 40, 64, 40, 48]
    assert np.flatnonzero(allocator.select(groups)).tolist() == [0, 8, 16, 24]
    assert (groups.counts[[0, 8, 16, 24]] == 24).all()

  def test_last_extension_is_cut(self):
    allocator = helpers.make("speed")
    groups = helpers.run_step(
      allocator, helpers.Stream(), pattern(lambda uid, s: s % 2)
    )
    assert groups.spent == 256
    # 64 screening, 192 left: nine whole extensions and 12 more.
    assert groups.counts[:16].tolist() == [24] * 9 + [16] + [4] * 6
    assert np.flatnonzero(allocator.select(groups)).tolist() == list(range(10))

  def test_pilot_commit_range_and_eviction(self):
    # Successes among four pilots: uid % 5, so p = 0, .25, .5, .75, 1.
    allocator = helpers.make("pilot_commit")
    stream = helpers.Stream(data_set=40)
    reward = pattern(lambda uid, s: s % 4 < uid % 5)
    groups = helpers.run_step(allocator, stream, reward)
    committed = groups.uids[allocator.select(groups)]
    assert set((committed % 5).tolist()) == {1, 2, 3}
    assert allocator.evicted.rows and all(
      u % 5 == 4 for u in allocator.evicted.rows
    )
    again = helpers.run_step(allocator, stream, reward, 1)
    evicted_before = [4, 9, 14]
    assert not np.isin(again.uids[again.opened], evicted_before).any()

  @pytest.mark.parametrize("name", ["speed", "pilot_commit"])
  @pytest.mark.parametrize("p", [0, 1])
  def test_nothing_qualifies(self, name, p):
    allocator = helpers.make(name)
    groups = helpers.run_step(allocator, helpers.Stream(), constant(p))
    assert "none of 64 screened prompts" in groups.messages[0]
    assert groups.spent == 256
    assert not allocator.select(groups).any()

  def test_all_evicted(self):
    allocator = helpers.make("pilot_commit")
    stream = helpers.Stream(data_set=16)
    helpers.run_step(allocator, stream, constant(1), 0)
    groups = helpers.run_step(allocator, stream, constant(1), 1)
    assert "were solved before" in groups.messages[0]
    assert "nothing to train on" in groups.messages[1]
    assert groups.spent == 256

  def test_screen_beyond_the_budget(self):
    with pytest.raises(ValueError, match="screen=4 rollouts exceed budget=2"):
      helpers.make("speed", budget=2, prompts=1)


class TestHistory:
  def test_oldest_rows_go_first(self):
    table = history.History(("x",), (0,), limit=2)
    table.put([1, 2], [[1], [2]])
    table.put([1], [[5]])
    table.put([3], [[3]])
    assert table.get([1, 2, 3])[:, 0].tolist() == [5, 0, 3]

  def test_merge(self):
    uids, k, n = history.merge_by_uid(
      np.array([5, 3, 5]), np.array([1.0, 2, 3]), np.array([4.0, 5, 6])
    )
    assert uids.tolist() == [3, 5]
    assert k.tolist() == [2, 4] and n.tolist() == [5, 10]
