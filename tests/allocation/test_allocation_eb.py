"""eb_widening: the greedy against a loop, EM, budget, history."""

import json

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax.allocation import eb_widening, widening


def slow_greedy(n, opened, value, slope, keys, budget, cap, m0):
  """One rollout at a time, as the rule is worded."""
  have = np.array(n, int)
  counts = np.zeros(len(n), int)
  opened = list(np.flatnonzero(opened))
  left = budget
  while left:
    best, best_key = None, None
    for x in opened:
      if have[x] < cap:
        key = (value[x] - have[x] * slope[x], keys[x])
        if best is None or key > best_key:
          best, best_key = x, key
    closed = [x for x in range(len(n)) if x not in opened]
    new = max(closed, key=lambda x: (value[x], -x), default=None)
    may_open = new is not None and left >= m0
    if may_open and (best is None or value[new] > best_key[0]):
      have[new] += m0
      counts[new] += m0
      opened.append(new)
      left -= m0
    elif best is None:
      cap += 1
    else:
      have[best] += 1
      counts[best] += 1
      left -= 1
  return counts, cap


class TestGreedy:
  @pytest.mark.parametrize("alike", [True, False])
  @pytest.mark.parametrize("case", range(150))
  def test_equals_one_at_a_time(self, case, alike):
    """Unopened prompts behind the others and of one value, or anyhow."""
    rng = np.random.default_rng(case)
    size = int(rng.integers(1, 12))
    opened = np.arange(size) < rng.integers(1, size + 1)
    if not alike:
      rng.shuffle(opened)
    m0 = int(rng.integers(1, 4))
    n = np.where(opened, rng.integers(1, 6, size), 0)
    value = rng.choice([0.05, 0.1, 0.2, 0.3], size) + (
      rng.random(size) * (case % 2)
    )
    slope = value * rng.uniform(0.002, 0.2, size)
    if alike:
      value[~opened] = rng.choice([0.0, 0.1, 0.15, 0.5])
      slope[~opened] = 0.05 * value[~opened] + 1e-6
    arguments = (
      n,
      opened,
      value,
      slope,
      rng.random(size),
      int(rng.integers(0, 80)),
      int(rng.integers(1, 9)),
      m0,
    )
    fast, fast_cap = widening.greedy(*arguments)
    slow, slow_cap = slow_greedy(*arguments)
    assert fast.tolist() == slow.tolist()
    assert fast_cap == slow_cap
    assert fast.sum() == arguments[5]

  @pytest.mark.parametrize("case", range(20))
  def test_equals_one_at_a_time_with_many_prompts(self, case):
    """Most pairs and most unopened prompts are out of the budget's reach."""
    rng = np.random.default_rng(case)
    opened = rng.random(120) < rng.choice([0.4, 0.8])
    value = rng.random(120) if case % 2 else rng.integers(1, 30, 120) / 30
    arguments = (
      np.where(opened, rng.integers(2, 9, 120), 0), opened, value,
      value * rng.choice([0.003, 0.03, 0.1], 120), rng.random(120),
      int(rng.integers(1, 90)), 8, 2,
    )  # fmt: skip
    fast, fast_cap = widening.greedy(*arguments)
    slow, slow_cap = slow_greedy(*arguments)
    assert fast.tolist() == slow.tolist()
    assert fast_cap == slow_cap

  def test_by_hand(self):
    # Prompt 0: .20 - .02 n from n = 2: .16 .14 .12 ...; a new prompt is worth
    # .13 and takes two; budget 5: 0, 0, new, then one left for prompt 0.
    counts, cap = widening.greedy(
        np.array([2, 0, 0]), np.array([True, False, False]),
        np.array([0.2, 0.13, 0.13]), np.array([0.02, 0.01, 0.01]), np.zeros(3),
        5, 12, 2,
    )  # fmt: skip
    assert counts.tolist() == [3, 2, 0] and cap == 12

  def test_unopened_prompts_by_their_own_values(self):
    # As above, but the last prompt is worth .15 and the second .05: two for
    # prompt 0 (.16; .14 comes after .15), then the last one opens, then .14.
    counts, _ = widening.greedy(
        np.array([2, 0, 0]), np.array([True, False, False]),
        np.array([0.2, 0.05, 0.15]), np.array([0.02, 0.01, 0.01]), np.zeros(3),
        4, 12, 2,
    )  # fmt: skip
    assert counts.tolist() == [2, 0, 2]

  def test_an_opened_prompt_goes_first_among_equals(self):
    # .5 - 2 / 16 is what the second prompt is worth; one is left, too few for it.
    counts, _ = widening.greedy(
        np.array([2, 0, 0]), np.array([True, False, False]),
        np.array([0.5, 0.375, 0.25]), np.full(3, 1 / 16), np.zeros(3), 2, 12, 2,
    )  # fmt: skip
    assert counts.tolist() == [2, 0, 0]

  @pytest.mark.parametrize("other", [0.15, 0.05])
  def test_the_last_opening_may_overdraw(self, other):
    # .16 goes first; of the opening's two one is due beyond the budget.
    counts, _ = widening.greedy(
        np.array([2, 0, 0]), np.array([True, False, False]),
        np.array([0.2, 0.15, other]), np.array([0.02, 0.01, 0.01]), np.zeros(3),
        2, 12, 2, 1,
    )  # fmt: skip
    assert counts.tolist() == [1, 2, 0]


class TestPrior:
  def test_posterior_by_hand(self):
    prior = eb_widening.Prior(10)
    post = prior.posterior([2], [1])[0]
    grid = eb_widening.GRID
    expected = grid * (1 - grid)
    np.testing.assert_allclose(post, expected / expected.sum())

  def test_em_equals_the_plain_formula(self):
    rng = np.random.default_rng(0)
    n = rng.integers(2, 9, 300).astype(float)
    k = rng.binomial(n.astype(int), rng.random(300)).astype(float)
    prior = eb_widening.Prior(10)
    prior.remember(n[:200], k[:200])
    prior.fit(n[200:], k[200:], 3)
    pi = np.full(19, 1 / 19)
    grid = eb_widening.GRID
    for _ in range(3):
      post = grid ** k[:, None] * (1 - grid) ** (n - k)[:, None] * pi
      post /= post.sum(1, keepdims=True)
      pi = post.sum(0) + 0.5
      pi /= pi.sum()
    np.testing.assert_allclose(prior.weights, pi, rtol=1e-10)

  def test_em_finds_a_two_point_distribution(self):
    rng = np.random.default_rng(1)
    p = np.where(rng.random(4000) < 0.75, 0.997, 0.3)
    k = rng.binomial(8, p)
    prior = eb_widening.Prior(10)
    prior.fit(np.full(4000, 8.0), k, 300)
    high = prior.weights[eb_widening.GRID > 0.95].sum()
    middle = prior.weights[np.abs(eb_widening.GRID - 0.3) < 0.11].sum()
    assert high == pytest.approx(0.75, abs=0.03)
    assert middle == pytest.approx(0.25, abs=0.03)

  def test_forgets(self):
    prior = eb_widening.Prior(2)
    for step in range(4):
      prior.remember([2.0], [float(step % 3)])
    assert [rows.tolist() for rows in prior.recent] == [
      [[2, 2, 1]],
      [[2, 0, 1]],
    ]
    none = eb_widening.Prior(0)
    none.remember([2.0], [1.0])
    assert none.recent == []

  def test_many_rollouts_do_not_underflow(self):
    prior = eb_widening.Prior(1)
    assert np.isfinite(prior.posterior([8000.0], [4000.0])).all()


def mixture(uids):
  kind = np.random.default_rng(3).random(100_000)[uids]
  return np.where(kind < 0.75, 0.99, np.where(kind < 0.9, 0.01, 0.3))


class TestEbWidening:
  def test_shape_of_a_step(self):
    allocator = helpers.make("eb_widening")
    assert allocator.max_prompts == 64 + 160
    groups = helpers.run_step(
      allocator, helpers.Stream(), helpers.bernoulli(mixture)
    )
    assert [int(c.sum()) for c in groups.round_counts] == [128, 42, 42, 44]
    assert (groups.counts[:64] >= 2).all()
    # Opened prompts are the first ones of the stream, each with at least two.
    opened = groups.opened.sum()
    assert groups.opened[:opened].all() and not groups.opened[opened:].any()
    assert groups.counts[:opened].min() >= 2

  @pytest.mark.parametrize("budget", [7, 30, 100, 256, 1000])
  @pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
  def test_budget_is_exact(self, budget, p):
    allocator = helpers.make("eb_widening", budget=budget, prompts=4)
    stream = helpers.Stream()
    for step in range(2):
      groups = helpers.run_step(
          allocator, stream, helpers.bernoulli(lambda u: np.full(len(u), p)),
          step,
      )  # fmt: skip
      assert groups.spent == budget

  def test_small_pool_raises_the_cap(self):
    allocator = helpers.make(
      "eb_widening", {"open_share": 1 / 64, "pool": 0.0, "cap": 3}, budget=128
    )
    assert allocator.max_prompts == 2
    groups = helpers.run_step(
      allocator, helpers.Stream(), helpers.bernoulli(np.array([0.5, 0.5]))
    )
    assert groups.spent == 128
    assert groups.counts.min() >= 60

  def test_prompts_not_opened_come_again(self):
    allocator = helpers.make("eb_widening")
    stream = helpers.Stream()
    groups = helpers.run_step(allocator, stream, helpers.bernoulli(mixture))
    opened = int(groups.opened.sum())
    assert allocator.begin(stream, 1).positions[0] == opened

  def test_goes_to_mixed_and_hard_prompts(self):
    allocator = helpers.make("eb_widening")
    stream = helpers.Stream()
    for step in range(8):
      groups = helpers.run_step(
        allocator, stream, helpers.bernoulli(mixture), step
      )
    solved = groups.opened & ~groups.mixed() & (groups.mean() == 1)
    assert groups.counts[solved].mean() < 2.3
    assert groups.counts[groups.mixed()].mean() > 3

  def test_order_of_arrival_does_not_matter(self):
    seen = set()
    for seed in range(4):
      allocator = helpers.make("eb_widening")
      stream = helpers.Stream()
      rng = np.random.default_rng(seed)
      for step in range(3):
        groups = helpers.run_step(
            allocator, stream, helpers.bernoulli(mixture), step,
            shuffle=rng, pieces=seed + 1,
        )  # fmt: skip
      seen.add((tuple(groups.counts), tuple(allocator.prior.weights)))
    assert len(seen) == 1

  def test_state_round_trip_through_json(self):
    one, other = helpers.make("eb_widening"), helpers.make("eb_widening")
    streams = helpers.Stream(), helpers.Stream()
    for step in range(3):
      helpers.run_step(one, streams[0], helpers.bernoulli(mixture), step)
      helpers.run_step(other, streams[1], helpers.bernoulli(mixture), step)
    fresh = helpers.make("eb_widening")
    fresh.load_state_dict(json.loads(json.dumps(one.state_dict())))
    a = helpers.run_step(fresh, streams[0], helpers.bernoulli(mixture), 3)
    b = helpers.run_step(other, streams[1], helpers.bernoulli(mixture), 3)
    assert a.counts.tolist() == b.counts.tolist()
    assert fresh.state_dict() == other.state_dict()

  def test_graded_rewards(self):
    def reward(groups, group, sample):
      del groups
      return (group * 7 + sample * 3) % 9 / 8

    groups = helpers.run_step(
      helpers.make("eb_widening"), helpers.Stream(), reward
    )
    assert groups.spent == 256

  def test_too_many_prompts_opened(self):
    with pytest.raises(ValueError, match="opens 192 prompts.*must be 1 to 128"):
      helpers.make("eb_widening", {"open_share": 0.75})
    with pytest.raises(ValueError, match="budget of at least 2"):
      helpers.make("eb_widening", budget=1)
