"""eb_effective: its value against S itself, noise, graded rewards, state."""

import json

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax.allocation import eb_effective, eb_widening, wrong_verdicts
from vigor_jax.allocation.eb_widening import GRID


def rule(**options):
  return helpers.make("eb_effective", options)


def effective(v, noise, square, m, c):
  """S of docs/allocation.md, section 7, written out."""
  signal = sum(vi * mi for vi, mi in zip(v, m))
  total = sum(ui * mi for ui, mi in zip(noise, m))
  total += c * sum(si * mi**2 for si, mi in zip(square, m))
  return signal**2 / total


class TestValue:
  @pytest.mark.parametrize("noise", [0.0, 0.1])
  @pytest.mark.parametrize("breadth", [0.5, 1.0, 3.0])
  def test_is_the_slope_of_log_s(self, noise, breadth):
    r = rule(noise=noise, breadth=breadth)
    n = np.array([2.0, 2.0, 5.0, 3.0, 8.0])
    k = np.array([1.0, 0.0, 2.0, 3.0, 7.0])
    (v, seen, square), _ = r.moments(n, k)
    m = n - 1
    opened = np.arange(7) < 5
    value, slope = r.values(n, k, opened)
    got = (value[:5] - n * slope[:5]) * 2 / (v @ m)
    assert len(set(value[5:])) == len(set(slope[5:])) == 1
    for x in range(5):
      step = np.zeros(5)
      step[x] = 1e-5
      up, down = (
        np.log(effective(v, seen, square, m + s, breadth))
        for s in (step, -step)
      )
      assert got[x] == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-9)

  def test_moments_by_bayes(self):
    r = rule(noise=0.1)
    (v, noise, square), new = r.moments(np.array([4.0]), np.array([3.0]))
    seen = 0.1 + 0.8 * GRID
    post = seen**3 * (1 - seen)
    post /= post.sum()
    u = 0.8 * GRID * (1 - GRID)
    assert v[0] == pytest.approx(post @ (u * 2 * (1 - GRID)))
    assert noise[0] == pytest.approx(post @ (seen * (1 - seen)))
    assert square[0] == pytest.approx(post @ u**2)
    assert new[0] == pytest.approx(np.mean(u * 2 * (1 - GRID)))

  def test_noise_lowers_the_value_of_a_stray_failure(self):
    """Where most prompts are solved, a failure among four means less."""
    prior = np.zeros(len(GRID))
    prior[[8, -1]] = 0.25, 0.75  # p = .3 and .997
    value = []
    for noise in (0.0, 0.2):
      r = rule(noise=noise)
      r.weights = prior
      value.append(r.moments(np.array([4.0]), np.array([3.0]))[0][0, 0])
    assert value[1] < 0.2 * value[0]


def counts_of(p, n, noise, rng):
  """Rows (n, k, 1) of prompts with success p, verdicts turned round."""
  k = rng.binomial(n, noise + (1 - 2 * noise) * p)
  return np.stack([n, k, np.ones(len(p))], axis=1).astype(float)


def plain_evidence(rows, noise, iterations=60):
  """Log likelihood after EM from flat weights, kind by kind."""
  found = 0.0
  seen = noise + (1 - 2 * noise) * eb_widening.GRID
  for kind in np.unique(rows[:, 2]):
    n, k, _, number = rows[rows[:, 2] == kind].T
    like = seen ** k[:, None] * (1 - seen) ** (n - k)[:, None]
    weights = np.full(len(seen), 1 / len(seen))
    for _ in range(iterations):
      weights = weights * (number / (like @ weights) @ like) / number.sum()
    found += number @ np.log(like @ weights)
  return found


def counts_by_kind(seed, kinds):
  """Of 300 prompts, many nearly sure, up to .12 of the verdicts wrong."""
  rng = np.random.default_rng(seed)
  p = np.where(rng.random(300) < 0.6, 0.997, rng.random(300) ** 2)
  rows = counts_of(p, rng.choice([2, 6, 12], 300), seed % 4 * 0.04, rng)
  return np.insert(rows, 2, rng.integers(0, kinds, 300), axis=1)


class TestNoise:
  @pytest.mark.parametrize("noise", [0.0, 0.05, 0.1, 0.2])
  def test_is_found_where_prompts_are_nearly_sure(self, noise):
    rng = np.random.default_rng(3)
    p = np.where(rng.random(900) < 0.7, 0.997, rng.random(900))
    rows = counts_of(p, rng.choice([2, 6, 12], 900), noise, rng)
    assert wrong_verdicts.estimate_noise(rows) == pytest.approx(noise, abs=0.026)

  def test_never_says_more_than_the_surest_prompts_allow(self):
    rng = np.random.default_rng(4)
    rows = counts_of(np.full(500, 0.92), np.full(500, 12), 0.0, rng)
    assert wrong_verdicts.estimate_noise(rows) <= 0.1

  def test_evidence_falls_with_refuted_noise(self):
    rng = np.random.default_rng(5)
    rows = counts_of(np.full(400, 0.997), np.full(400, 8), 0.0, rng)
    found = [wrong_verdicts.evidence(rows, q) for q in wrong_verdicts.NOISES]
    assert all(a > b for a, b in zip(found, found[1:]))

  @pytest.mark.parametrize("kinds", [1, 4])
  def test_stopping_early_judges_as_all_iterations_do(self, kinds):
    judged = []
    for seed in range(12):
      rows = counts_by_kind(seed, kinds)
      slack = wrong_verdicts.SLACK @ np.array([kinds, kinds**0.5])
      least = wrong_verdicts.evidence(rows, 0.0) - slack
      refuted = [q for q in wrong_verdicts.NOISES
                 if wrong_verdicts.evidence(rows, q) < least]  # fmt: skip
      largest = max(q for q in wrong_verdicts.NOISES if q < min([1, *refuted]))
      judged.append(wrong_verdicts.estimate_noise(rows) == largest)
    assert np.mean(judged) > 0.9  # a close one may go the other way

  @pytest.mark.parametrize("kinds", [1, 4])
  def test_judges_as_sixty_steps_of_em(self, kinds):
    same = []
    for seed in range(12):
      rows = counts_by_kind(seed, kinds)
      noises = wrong_verdicts.NOISES
      found = [plain_evidence(rows, q) for q in noises]
      leaping = [wrong_verdicts.evidence(rows, q) for q in noises]
      assert leaping == pytest.approx(found, abs=0.2)
      slack = wrong_verdicts.SLACK @ np.array([kinds, kinds**0.5])
      refuted = np.array(found) < found[0] - slack
      last = np.argmax(refuted) - 1 if refuted.any() else -1
      same.append(wrong_verdicts.estimate_noise(rows) == noises[last])
    assert np.mean(same) > 0.9  # a close one may go the other way

  def test_order_and_numbers_of_kinds_do_not_matter(self):
    rng = np.random.default_rng(7)
    rows = counts_of(rng.random(200), rng.choice([2, 6, 40], 200), 0.1, rng)
    rows = np.insert(rows, 2, rng.integers(0, 3, 200), axis=1)
    pooled = np.unique(rows, axis=0, return_counts=True)
    pooled = np.column_stack([pooled[0][:, :3], pooled[1]])
    pooled[:, 2] = np.array([1, 4, 9])[pooled[:, 2].astype(int)]
    for some in (slice(None), rows[:, 0] < 40):  # The others are looked up.
      found = wrong_verdicts.evidence(rows[some], 0.05)
      assert found == pytest.approx(plain_evidence(rows[some], 0.05), abs=0.2)
      assert found == pytest.approx(wrong_verdicts.evidence(
        pooled if isinstance(some, slice) else pooled[pooled[:, 0] < 40], 0.05
      ))  # fmt: skip

  def test_waits_and_can_be_given(self):
    stream = helpers.Stream()
    unknown, given = rule(), rule(noise=0.1)
    reward = helpers.bernoulli(
      lambda uid: np.where(uid % 4 == 0, 0.5, 0.9)  # noise .1 on sure ones
    )
    for r in (unknown, given):
      for step in range(eb_effective.WAIT + 3):
        assert r.noise == (0.1 if r is given else 0.0) or step > 4
        groups = r.begin(stream, step)
        helpers.play(r, groups, reward)
        r.end(groups)
    assert 0.04 < unknown.noise < 0.16 and given.noise == 0.1

  def test_a_rule_that_stops_by_looks_must_tell_them_apart(self):
    """Hard-looking prompts get two verdicts, others go on until one is wrong:
    together they refute the true share, by kinds they do not."""
    rng = np.random.default_rng(0)
    noise, size = 0.1, 600
    kind = (np.arange(size) % 2).astype(float)
    p = np.where(kind == 0, 0.002, 0.5)
    first = counts_of(p, np.full(size, 2), noise, rng)
    more = counts_of(p, np.full(size, 6), noise, rng)
    go_on = (kind == 1) | (first[:, 1] > 0) & (rng.random(size) < 0.1)
    first[go_on, :2] += more[go_on, :2]
    by_kind = np.insert(first, 2, kind, axis=1)
    found = wrong_verdicts.estimate_noise(by_kind)
    assert found == pytest.approx(noise, abs=0.03)
    assert wrong_verdicts.estimate_noise(first) < found

  def test_pooled_counts_say_the_same(self):
    rng = np.random.default_rng(6)
    rows = counts_of(rng.random(200), rng.choice([2, 5], 200), 0.1, rng)
    pooled = eb_effective.pool([rows[:50], rows[50:]])
    assert len(pooled) < 12 and pooled[:, 2].sum() == 200
    assert wrong_verdicts.evidence(pooled, 0.05) == pytest.approx(
      wrong_verdicts.evidence(rows, 0.05)
    )


class TestGraded:
  def test_phi_is_one_for_binary_rewards(self):
    r = rule()
    stream = helpers.Stream()
    groups = r.begin(stream, 0)
    helpers.play(r, groups, helpers.bernoulli(lambda uid: (uid % 7) / 6))
    r.end(groups)
    assert r.phi == pytest.approx(1.0, abs=1e-9)

  def test_phi_of_rewards_with_less_variance(self):
    """Means of two verdicts have half of a verdict's variance."""
    r = rule()
    stream = helpers.Stream()

    def reward(groups, group, sample):
      one, two = (
        helpers.bernoulli(np.full(len(groups), 0.5))(groups, group, s)
        for s in (sample, sample + 1000)
      )
      return (one + two) / 2

    for step in range(10):
      groups = r.begin(stream, step)
      helpers.play(r, groups, reward)
      r.end(groups)
    assert r.phi == pytest.approx(0.5, abs=0.06)
    assert r.noise == 0.0


  def test_a_prior_for_every_prompt(self):
    """The same prior for all is no prior; another one moves its prompt only."""
    r = rule(noise=0.0)
    n, k = np.array([2.0, 2.0]), np.array([1.0, 1.0])
    opened = np.array([True, True, False, False])
    prior = np.tile(r.weights, (4, 1))
    ask = lambda: r.values(n, k, opened, prior[:2], prior[2:] @ r.table)
    plain, same = r.values(n, k, opened), ask()
    np.testing.assert_allclose(plain, same)
    prior[3] = np.eye(len(GRID))[9]  # p = .4
    value, slope = ask()
    assert value[2] == same[0][2] and value[3] > value[2]
    assert slope[3] == pytest.approx(r.rho * 0.24**2)


class TestRun:
  def test_medium_prompts_get_most(self):
    """Once the prior is known, more than the solved and the hopeless."""
    r = rule(noise=0.0)
    stream = helpers.Stream()
    p = lambda uid: np.choose(uid % 4, [0.4, 0.997, 0.001, 0.997])
    share, opened = np.zeros(4), np.zeros(4)
    for step in range(12):
      groups = r.begin(stream, step)
      helpers.play(r, groups, helpers.bernoulli(p))
      r.end(groups)
      assert groups.counts.sum() == 256
      if step >= 4:  # the prior is known
        share += np.bincount(groups.uids % 4, groups.counts, 4)
        opened += np.bincount(groups.uids % 4, groups.counts > 0, 4)
    each = share / opened
    assert each[0] > 1.8 * max(each[1], each[3])
    assert each[0] > 1.15 * each[2]  # two failures do not settle it

  def test_noise_is_estimated_as_often_as_asked(self, monkeypatch):
    steps = []
    monkeypatch.setattr(
      eb_effective, "estimate_noise", lambda _: steps.append(step) or 0.1
    )
    r, stream = rule(noise_every=4), helpers.Stream()
    for step in range(13):
      helpers.run_step(r, stream, helpers.bernoulli(lambda uid: uid % 2), step)
      assert r.noise == (0.1 if step >= 7 else 0.0)
    assert steps == [7, 11]  # Not at 3: five steps come first.

  def test_state_goes_on(self):
    stream = helpers.Stream()
    reward = helpers.bernoulli(lambda uid: (uid % 9) / 8)
    first = rule()
    for step in range(7):
      groups = first.begin(stream, step)
      helpers.play(first, groups, reward)
      first.end(groups)
    second = rule()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    a, b = (r.begin(stream, 7) for r in (first, second))
    helpers.play(first, a, reward)
    helpers.play(second, b, reward)
    assert a.counts.tolist() == b.counts.tolist()
    assert first.noise == second.noise and first.phi == second.phi

  def test_options_are_checked(self):
    for options, word in (
      ({"noise": 0.6}, "noise"),
      ({"breadth": -1.0}, "breadth"),
      ({"open_share": 0.9}, "open_share"),
      ({"rounds": 0}, "rounds"),
      ({"noise_every": 0}, "noise_every"),
    ):
      with pytest.raises(ValueError, match=word):
        rule(**options)
