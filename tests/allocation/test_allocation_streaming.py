"""streaming_vigor and eb_streaming on simulated slots."""

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax.allocation import streaming

STREAMING = ["streaming_vigor", "eb_streaming"]


def at_once(groups, group, sample):
  return 1


def heavy_tail(groups, group, sample):
  rng = np.random.default_rng([5, groups.step, groups.uids[group], sample])
  return 1 + int(min(rng.pareto(1.2) * 2, 30))


def mixture(uids):
  kind = np.random.default_rng(3).random(100_000)[uids]
  return np.where(kind < 0.5, 0.99, np.where(kind < 0.8, 0.02, 0.4))


class TestStreamingVigor:
  @pytest.mark.parametrize("seed", range(4))
  @pytest.mark.parametrize("p", ["mixture", 0.0, 0.5])
  @pytest.mark.parametrize(
      "options, prompts",
      [
          ({}, 32),
          ({"rounds": 2, "initial_rollouts": 4, "keep": 0.25, "growth": 4.0},
           32),
          ({"rounds": 3, "keep": 1 / 3, "growth": 3.0}, 36),
      ],
  )  # fmt: skip
  def test_equals_vigor_with_verdicts_at_once(self, seed, p, options, prompts):
    reward = helpers.bernoulli(
      mixture if p == "mixture" else (lambda u: np.full(len(u), p))
    )
    sizes = {"prompts": prompts, "seed": seed}
    sizes["budget"] = 256 if prompts == 32 else 216
    expected = helpers.run_step(
      helpers.make("vigor", options, **sizes), helpers.Stream(), reward, seed
    )
    # In rounds of the whole round's slots...
    rule = helpers.make("streaming_vigor", options, **sizes)
    found = helpers.run_step(rule, helpers.Stream(), reward, seed)
    assert found.counts.tolist() == expected.counts.tolist()
    # ...and asked by the scheduler, every row one chunk long.
    groups = rule.begin(helpers.Stream(), seed)
    helpers.stream_step(
      rule, groups, reward, slots=rule.barrier_slots(), lengths=at_once, lag=0
    )
    assert groups.counts.tolist() == expected.counts.tolist()
    assert (rule.survivors(groups) == (groups.counts == max(
        expected.counts))).all()  # fmt: skip

  def test_first_to_finish_goes_on(self):
    # promoted 0 < 1/2 x 1.
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 8)
    groups.add([0, 0], [0, 0])
    rule.grant(groups, 2)
    assert groups.plan.stage[:2].tolist() == [1, 0]

  def test_promotes_the_best_of_the_finished(self):
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 16)
    groups.add(np.repeat(np.arange(4), 2), [1, 1, 0, 1, 0, 0, 1, 0])
    rule.grant(groups, 8)
    assert np.flatnonzero(groups.plan.stage == 1).tolist() == [1, 3]

  def test_unfinished_stage_comes_first(self):
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    assert rule.grant(groups, 3).counts[:3].tolist() == [2, 1, 0]
    assert rule.grant(groups, 2).counts[:3].tolist() == [0, 1, 1]

  def test_waits_when_everything_is_in_flight(self):
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    assert rule.grant(groups, 1000).total == 64
    assert rule.grant(groups, 1000) is None

  def test_nothing_idles_while_a_prompt_can_go_on(self):
    # Only two of 32 have finished and both are promoted beyond the share.
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 64)
    groups.add([0, 0, 1, 1], [1, 1, 0, 0])
    assert rule.grant(groups, 100).total == 8
    assert groups.plan.stage[:2].tolist() == [1, 1]

  def test_idle_slots_begin_the_next_stage_early(self):
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 64)
    # Prompts 3 and 5 disagree, but a verdict of each stage is in flight.
    for group in (3, 5):
      groups.add([group, group], [0, 1])
    assert rule.grant(groups, 8).counts[[3, 5]].tolist() == [4, 4]
    groups.add([3] * 3, [0, 1, 1])
    # Places that wait for a slot are not worth a guess; an idle slot is.
    assert rule.grant(groups, 10) is None
    early = rule.grant(groups, 10, 3).counts
    assert np.flatnonzero(early)[:2].tolist() == [3, 5]
    assert early.max() == 1 and early.sum() == 3
    # Promoted, prompt 3 takes the seven it lacks of stage 2's eight.
    groups.add([3, 3], [0, 1])
    rule.grant(groups, 7)
    assert groups.plan.stage[3] == 2
    assert groups.counts[3] == 14

  def test_no_more_begins_early_than_the_next_stage_has(self):
    rule = helpers.make("streaming_vigor")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 64)
    assert rule.grant(groups, 1000, 1000).counts.tolist() == [4] * 32
    assert rule.grant(groups, 1000, 1000) is None
    groups.add(np.repeat(np.arange(32), 6), np.tile([0.0, 1.0], 96))
    assert rule.grant(groups, 1000, 0).total == 64
    assert groups.counts.max() <= rule.largest_group()


class TestEbStreaming:
  def test_breadth_first(self):
    rule = helpers.make("eb_streaming")
    groups = rule.begin(helpers.Stream(), 0)
    assert rule.grant(groups, 127).counts[:64].sum() == 127
    assert rule.grant(groups, 1).counts[63] == 1
    assert groups.counts[:64].tolist() == [2] * 64

  def test_a_new_prompt_may_be_opened_through_one_slot(self):
    rule = helpers.make("eb_streaming")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 128)
    groups.add(np.repeat(np.arange(64), 2), np.ones(128))
    # All solved: the next prompt is worth more than any of them.
    assert rule.grant(groups, 1).counts[64] == 1
    assert rule.grant(groups, 1).counts[64] == 1
    assert groups.counts[64] == 2

  def test_goes_to_the_mixed(self):
    rule = helpers.make("eb_streaming")
    groups = rule.begin(helpers.Stream(), 0)
    rule.grant(groups, 128)
    rewards = np.ones(128)
    rewards[0] = 0
    groups.add(np.repeat(np.arange(64), 2), rewards)
    assert rule.grant(groups, 1).counts[0] == 1

  def test_decisions_use_only_what_was_added(self):
    a, b = (helpers.make("eb_streaming") for _ in range(2))
    ga, gb = a.begin(helpers.Stream(), 0), b.begin(helpers.Stream(), 0)
    for groups, rule in ((ga, a), (gb, b)):
      rule.grant(groups, 128)
    ga.add([0, 0], [1, 0])
    assert a.grant(ga, 2).counts[0] == 2
    assert b.grant(gb, 2).counts[0] == 0

  def test_the_opening_is_granted_whatever_the_verdicts(self):
    rule = helpers.make("eb_streaming")
    at_once = rule.begin(helpers.Stream(), 0)
    assert rule.grant(at_once, rule.opening()).total == rule.opening() == 128
    for verdict in (0.0, 1.0):
      groups = rule.begin(helpers.Stream(), 0)
      while groups.spent < rule.opening():
        request = rule.grant(groups, 1)
        group = np.flatnonzero(request.counts)
        groups.add(group[:1], [verdict])
      assert groups.counts.tolist() == at_once.counts.tolist()


@pytest.mark.parametrize("name", STREAMING)
class TestBoth:
  @pytest.mark.parametrize("slots", [1, 7, 32, 64, 300])
  @pytest.mark.parametrize("lag", [0, 1, 5])
  def test_budget_is_exact_with_late_verdicts(self, name, slots, lag):
    rule = helpers.make(name)
    stream = helpers.Stream()
    for step in range(2):
      groups = rule.begin(stream, step)
      chunks, busy, waits = helpers.stream_step(
          rule, groups, helpers.bernoulli(mixture), slots=slots,
          lengths=heavy_tail, lag=lag,
      )  # fmt: skip
      rule.end(groups)
      stream.advance(groups.taken)
      assert groups.spent == 256 == groups.n.sum()
      assert groups.counts.max() <= rule.largest_group()
      assert (groups.opened == (groups.counts > 0)).all()

  def test_slots_stay_full(self, name):
    rule = helpers.make(name)
    groups = rule.begin(helpers.Stream(), 0)
    _, _, waits = helpers.stream_step(
      rule, groups, helpers.bernoulli(mixture), slots=32, lengths=heavy_tail
    )
    assert waits == 0

  def test_same_decisions_whatever_the_order_within_a_chunk(self, name):
    seen = set()
    for seed in (None, 0, 1):
      rule = helpers.make(name)
      stream = helpers.Stream()
      shuffle = None if seed is None else np.random.default_rng(seed)
      for step in range(3):
        groups = rule.begin(stream, step)
        helpers.stream_step(
            rule, groups, helpers.bernoulli(mixture), slots=32,
            lengths=heavy_tail, shuffle=shuffle,
        )  # fmt: skip
        rule.end(groups)
        stream.advance(groups.taken)
      seen.add((tuple(groups.counts), str(rule.state_dict())))
    assert len(seen) == 1

  def test_none_when_the_budget_is_granted(self, name):
    rule = helpers.make(name)
    groups = helpers.run_step(
      rule, helpers.Stream(), helpers.bernoulli(mixture)
    )
    assert rule.grant(groups, 5) is None
    assert rule.grant(groups, 0) is None


def carried(name, slots=None, count=25):
  """Mean variance per rollout over `count` steps, true p(1 - p)."""
  rule, stream = helpers.make(name), helpers.Stream()
  total = 0.0
  for step in range(count):
    groups = rule.begin(stream, step)
    reward = helpers.bernoulli(mixture)
    if slots:
      helpers.stream_step(rule, groups, reward, slots=slots, lengths=heavy_tail)
    else:
      helpers.play(rule, groups, reward)
    rule.end(groups)
    stream.advance(groups.taken)
    p = mixture(groups.uids)
    total += float(groups.n @ (p * (1 - p))) / 256
  return total / count


def test_what_streaming_keeps_of_the_rules_with_rounds():
  uniform, vigor = carried("uniform"), carried("vigor")
  assert uniform < carried("streaming_vigor", 32) < vigor
  widening = carried("eb_widening")
  assert widening > uniform
  assert carried("eb_streaming", 32) == pytest.approx(widening, rel=0.1)


def test_dues_are_served_in_order():
  dues = streaming.Dues()
  dues.put(2, 3)
  dues.put(0, 2)
  counts = np.zeros(3, int)
  assert dues.serve(counts, 4) == 0
  assert counts.tolist() == [1, 0, 3]
  assert dues.serve(counts, 4) == 3
  assert counts.tolist() == [2, 0, 3]
