"""uniform, vigor, random_top, low_success_first."""

import time

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax.allocation import base, halving

HALVING = ["vigor", "random_top", "low_success_first"]


class TestUniform:
  def test_counts(self):
    allocator = helpers.make("uniform", prompts=32, budget=256)
    groups = helpers.run_step(
      allocator, helpers.Stream(), helpers.bernoulli(np.full(32, 0.5))
    )
    assert groups.counts.tolist() == [8] * 32
    assert len(groups.round_counts) == 1
    assert allocator.select(groups).all()

  def test_indivisible_budget_lists_the_legal_values(self):
    with pytest.raises(
      ValueError,
      match="budget=256 .* prompts_per_step=30; .* 16 or 32 works.*"
      "budget = 240 or 270",
    ):
      helpers.make("uniform", prompts=30, budget=256)


class TestSchedule:
  def test_published_group_sizes(self):
    schedule = halving.make_schedule(32, 4, 2, 0.5, 2)
    assert schedule.sizes == (2, 6, 14, 30)
    assert schedule.prompts == (32, 16, 8, 4)
    assert schedule.total == 256
    assert [p * m for p, m in zip(schedule.prompts, schedule.new)] == [64] * 4

  def test_the_other_published_schedule(self):
    schedule = halving.make_schedule(32, 2, 4, 0.25, 4)
    assert schedule.sizes == (4, 20)
    assert schedule.total == 256

  @pytest.mark.parametrize("name", HALVING)
  def test_fractional_round(self, name):
    with pytest.raises(ValueError) as error:
      helpers.make(name, prompts=36, budget=288)
    message = str(error.value)
    assert "fractional" in message
    assert "prompts_per_step=32 with budget=256" in message
    assert "prompts_per_step=40 with budget=320" in message

  @pytest.mark.parametrize("keep, growth, rounds, initial", [
    (0.5, 2.0, 4, 2), (0.25, 4.0, 2, 4), (2 / 3, 1.5, 3, 4), (1.0, 1.0, 2, 1),
    (0.4, 2.5, 3, 4), (0.6, 2.0, 2, 3),
  ])  # fmt: skip
  def test_legal_values_are_those_a_search_finds(
    self, keep, growth, rounds, initial
  ):
    options = {"keep": keep, "growth": growth, "rounds": rounds,
               "initial_rollouts": initial}  # fmt: skip
    plan = lambda p: halving.make_schedule(p, rounds, initial, keep, growth)
    whole = [p for p in range(1, 2000) if plan(p) is not None]
    for prompts, budget in ((60, plan(whole[2]).total), (whole[1], 1009)):
      with pytest.raises(ValueError) as error:
        helpers.make("vigor", options, prompts=prompts, budget=budget)
      exact = [p for p in whole if plan(p).total == budget]
      near = sorted(whole, key=lambda p: (abs(p - prompts), p))[:2]
      said = str(error.value).split("Legal: ")[1].split("; ")
      assert [f"prompts_per_step={p} with this budget" for p in exact] == [
        s for s in said if s.startswith("prompts") and "this budget" in s]
      assert [f"prompts_per_step={p} with budget={plan(p).total}"
              for p in sorted(near) if p not in exact] == [
        s for s in said if " with budget=" in s]

  @pytest.mark.parametrize("name", ["uniform", *HALVING])
  def test_large_numbers_are_refused_as_fast(self, name):
    begun = time.process_time()
    with pytest.raises(ValueError):
      helpers.make(name, prompts=99_991, budget=10**9 + 7)
    assert time.process_time() - begun < 0.5

  def test_unspendable_budget(self):
    with pytest.raises(ValueError) as error:
      helpers.make("vigor", prompts=32, budget=192)
    message = str(error.value)
    assert "spends 256 rollouts, not 192" in message
    assert "prompts_per_step=24 with this budget" in message
    assert "prompts_per_step=32 with budget=256" in message
    assert "rounds=3 with these prompts" in message

  def test_thirds(self):
    allocator = helpers.make(
      "vigor",
      {"rounds": 3, "keep": 1 / 3, "growth": 3, "initial_rollouts": 2},
      prompts=36,
      budget=216,
    )
    assert allocator.schedule.prompts == (36, 12, 4)

  def test_growth_one_and_a_half(self):
    schedule = halving.make_schedule(9, 2, 2, 2 / 3, 1.5)
    assert schedule.prompts == (9, 6) and schedule.new == (2, 3)


def spread_p(size=32):
  return np.linspace(0, 1, size)


@pytest.mark.parametrize("name", HALVING)
class TestHalving:
  def test_budget_is_exact_and_rounds_are_static(self, name):
    allocator = helpers.make(name)
    groups = helpers.run_step(
      allocator, helpers.Stream(), helpers.bernoulli(spread_p())
    )
    assert groups.spent == 256
    assert [int(c.sum()) for c in groups.round_counts] == [64] * 4
    sizes, number = np.unique(groups.counts, return_counts=True)
    assert sizes.tolist() == [2, 6, 14, 30]
    assert number.tolist() == [16, 8, 4, 4]

  def test_survivors(self, name):
    groups = helpers.run_step(
      helpers.make(name), helpers.Stream(), helpers.bernoulli(spread_p())
    )
    kept = helpers.make(name, train_on="survivors").select(groups)
    assert kept.tolist() == (groups.counts == 30).tolist()
    assert helpers.make(name).select(groups).all()
    rows = helpers.make(name, train_on="survivors").keep_rollouts(
      groups, [0, 1, 2], [0, 0, 0], [1, 0, 1]
    )
    assert rows.tolist() == kept[:3].tolist()

  def test_order_of_arrival_does_not_matter(self, name):
    seen = set()
    for seed in range(6):
      groups = helpers.run_step(
        helpers.make(name),
        helpers.Stream(),
        helpers.bernoulli(spread_p()),
        shuffle=np.random.default_rng(seed),
        pieces=seed + 1,
      )
      seen.add(tuple(groups.counts))
    assert len(seen) == 1

  def test_ties_differ_between_steps_and_seeds(self, name):
    nothing = helpers.bernoulli(np.zeros(32))
    counts = {
      tuple(
        helpers.run_step(
          helpers.make(name, seed=seed), helpers.Stream(), nothing, step
        ).counts
      )
      for seed in (0, 1)
      for step in (0, 1)
    }
    assert len(counts) == 4


def all_wrong(groups, group, sample):
  del groups, sample
  return np.zeros(len(group))


class TestRanking:
  def test_only_mixed_prompts_survive_while_there_are_enough(self):
    # Prompts 0..7 alternate 1, 0, 1, 0...; the others always fail.
    def reward(groups, group, sample):
      del groups
      return ((group < 8) & (sample % 2 == 0)).astype(float)

    groups = helpers.run_step(helpers.make("vigor"), helpers.Stream(), reward)
    assert set(np.flatnonzero(groups.counts == 30)) <= set(range(8))
    assert (groups.counts[:8] >= 14).all()

  def test_ties_by_index(self):
    groups = helpers.run_step(
      helpers.make("vigor", {"ties": "index"}),
      helpers.Stream(),
      helpers.bernoulli(np.zeros(32)),
    )
    assert groups.counts.tolist() == [30] * 4 + [14] * 4 + [6] * 8 + [2] * 16

  def test_ties_do_not_favour_an_index(self):
    total = np.zeros(32)
    stream = helpers.Stream()
    allocator = helpers.make("vigor")
    for step in range(400):
      total += helpers.run_step(allocator, stream, all_wrong, step).counts
    # One step: sizes 2 6 14 30 with shares 1/2 1/4 1/8 1/8, mean 8, var 86.
    # Five standard errors of the mean over 400 steps.
    assert np.abs(total / 400 - 8).max() < 5 * np.sqrt(86 / 400)

  def test_variance_kinds_rank_alike_under_nested_halving(self):
    counts = {
      tuple(
        helpers.run_step(
          helpers.make("vigor", {"variance": kind}),
          helpers.Stream(),
          helpers.bernoulli(spread_p()),
        ).counts
      )
      for kind in ("plugin", "unbiased", "beta")
    }
    assert len(counts) == 1

  def test_graded_rewards(self):
    def reward(groups, group, sample):
      del groups
      wide = np.where(sample % 2, 0.75, 0.25)
      narrow = np.where(sample % 2, 0.55, 0.45)
      return np.where(group < 4, wide, np.where(group < 16, narrow, 0.5))

    groups = helpers.run_step(helpers.make("vigor"), helpers.Stream(), reward)
    assert (groups.counts[:4] == 30).all()
    assert (groups.counts[4:16] >= 6).all()
    assert (groups.counts[16:] == 2).all()

  def test_low_success_first_order(self):
    # After two rollouts: 0..3 mixed, 4..7 all wrong, 8..15 all right.
    def reward(groups, group, sample):
      del groups
      return np.where(group < 4, sample % 2, group >= 8).astype(float)

    allocator = helpers.make(
      "low_success_first", {"rounds": 2}, prompts=16, budget=64
    )
    groups = helpers.run_step(allocator, helpers.Stream(), reward)
    assert groups.counts.tolist() == [6] * 8 + [2] * 8

  def test_low_success_first_prefers_fewer_successes(self):
    def reward(groups, group, sample):
      del groups
      # In 4 rollouts: group g has g % 4 + 1 successes out of 4 when mixed.
      return (sample < group % 4 + 1).astype(float)

    allocator = helpers.make(
      "low_success_first",
      {"rounds": 2, "initial_rollouts": 4, "keep": 0.25, "growth": 4.0},
      prompts=8,
      budget=64,
    )
    groups = helpers.run_step(allocator, helpers.Stream(), reward)
    assert np.flatnonzero(groups.counts == 20).tolist() == [0, 4]

  def test_random_top_ignores_rewards(self):
    counts = {
      tuple(
        helpers.run_step(
          helpers.make("random_top"),
          helpers.Stream(),
          helpers.bernoulli(p),
        ).counts
      )
      for p in (np.zeros(32), spread_p(), np.ones(32))
    }
    assert len(counts) == 1


def test_top_orders_by_score_then_key():
  chosen = base.top([1, 3, 3, 2], [0.1, 0.2, 0.9, 0.5], 3)
  assert chosen.tolist() == [2, 1, 3]
  eligible = np.array([True, True, False, True])
  assert base.top([1, 3, 3, 2], [0] * 4, 2, eligible).tolist() == [1, 3]
