"""What every registered allocator must do."""

import functools
import json

import allocation_helpers as helpers
import numpy as np
import pytest
from vigor_jax import allocation

NAMES = sorted(allocation.REGISTRY)
# They may end before the budget does.
AT_MOST = {"dynamic_sampling", "greso", "pilot_commit"}


def population(uids):
  kind = np.random.default_rng(3).random(100_000)[uids]
  return np.where(kind < 0.4, 0.99, np.where(kind < 0.7, 0.02, 0.4))


def look(uids):
  """Noise, and something that tells the solved prompts from the others."""
  p = population(uids)
  noise = [helpers.uniform_of(uids, salt) for salt in range(3)]
  return np.column_stack([p + noise[0], *noise])


def steps(allocator, stream, reward, first, last, **kwargs):
  out = []
  for step in range(first, last):
    groups = allocator.begin(stream, step)
    log = helpers.play(allocator, groups, reward, **kwargs)
    allocator.end(groups)
    stream.advance(groups.taken)
    out.append((groups, log))
  return out


@pytest.mark.parametrize("name", NAMES)
class TestEvery:
  @pytest.mark.parametrize("data_set", [None, 80])
  @pytest.mark.parametrize("p", [0.0, 0.3, 1.0, None])
  def test_budget(self, name, data_set, p):
    allocator = helpers.make(name)
    reward = helpers.bernoulli(
      population if p is None else (lambda uids: np.full(len(uids), p))
    )
    for groups, (group, sample, rewards) in steps(
      allocator, helpers.Stream(data_set), reward, 0, 3
    ):
      assert len(groups) == allocator.max_prompts
      assert groups.spent <= 256
      if name not in AT_MOST:
        assert groups.spent == 256
      np.testing.assert_array_equal(
        groups.counts, np.sum(groups.round_counts, axis=0)
      )
      assert groups.counts.max() <= allocator.largest_group()
      assert (groups.n == groups.counts).all()
      assert (groups.opened == (groups.counts > 0)).all()
      assert (groups.consumed | ~groups.opened).all()
      for mode in allocation.base.TRAIN_ON:
        allocator.train_on = mode
        selected = allocator.select(groups)
        assert selected.dtype == bool and (selected <= groups.opened).all()
        kept = allocator.keep_rollouts(groups, group, sample, rewards)
        assert kept.dtype == bool and (kept <= selected[group]).all()

  def test_a_rule_says_whether_it_opens_prompts_later(self, name):
    later = False
    for p in (0.0, 0.3, 1.0, None):
      same = functools.partial(np.full_like, fill_value=p, dtype=float)
      reward = helpers.bernoulli(population if p is None else same)
      for groups, _ in steps(
        helpers.make(name), helpers.Stream(None, look), reward, 0, 3
      ):
        opened = np.count_nonzero(np.cumsum(groups.round_counts, 0), axis=1)
        later |= bool(opened[-1] > opened[0])
    assert allocation.REGISTRY[name].opens_later == later

  def test_working_ahead_changes_no_decision(self, name):
    def new_kind(uids):  # Later prompts show what none did before.
      seen = look(uids)
      twice = np.where(uids < 1000, seen[:, 0], -seen[:, 0])
      return np.column_stack([seen, twice])

    seen, known = set(), set()
    for meanwhile, ahead, restarts in (
      (False, False, False), (False, True, False), (True, False, False),
      (True, True, False), (True, True, True),
    ):  # fmt: skip
      allocator, stream = helpers.make(name), helpers.Stream(None, new_kind)
      decisions = []
      for step in range(5):
        groups = allocator.begin(stream, step)
        helpers.play(
          allocator, groups, helpers.bernoulli(population), meanwhile=meanwhile
        )
        allocator.end(groups)
        stream.advance(groups.taken)
        if ahead:
          allocator.look_ahead(stream)
        if restarts:
          state = json.dumps(allocator.state_dict())
          allocator = helpers.make(name)
          allocator.load_state_dict(json.loads(state))
        decisions.append(groups.counts.tolist())
        if name == "eb_predicted":
          known.add(len(allocator.predictor.mean))
      seen.add(json.dumps(decisions))
    assert len(seen) == 1
    assert known == ({5, 6} if name == "eb_predicted" else set())

  def test_order_of_arrival_does_not_matter(self, name):
    seen = set()
    for seed in range(3):
      allocator = helpers.make(name)
      out = steps(
          allocator, helpers.Stream(80), helpers.bernoulli(population), 0, 3,
          shuffle=np.random.default_rng(seed), pieces=seed + 1,
      )  # fmt: skip
      decisions = [g.counts.tolist() for g, _ in out]
      seen.add(json.dumps([decisions, allocator.state_dict()]))
    assert len(seen) == 1

  def test_state_goes_through_json(self, name):
    reward = helpers.bernoulli(population)
    whole, stream = helpers.make(name), helpers.Stream(80)
    expected = steps(whole, stream, reward, 0, 5)
    first, stream = helpers.make(name), helpers.Stream(80)
    steps(first, stream, reward, 0, 3)
    second = helpers.make(name)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = steps(second, stream, reward, 3, 5)
    for (a, _), (b, _) in zip(expected[3:], found):
      assert a.counts.tolist() == b.counts.tolist()
      assert a.consumed.tolist() == b.consumed.tolist()
    assert whole.state_dict() == second.state_dict()

  def test_graded_rewards(self, name):
    def reward(groups, group, sample):
      return (groups.uids[group] * 5 + sample * 3) % 9 / 8

    for groups, _ in steps(
      helpers.make(name), helpers.Stream(80), reward, 0, 2
    ):
      assert 0 < groups.spent <= 256

  def test_options_survive_a_mapping(self, name):
    cls = allocation.REGISTRY[name].Options
    values = vars(cls())
    assert allocation.make_options(name, values) == cls()
    assert cls.__doc__ and allocation.REGISTRY[name].__doc__

  def test_two_allocators_do_not_share_state(self, name):
    reward = helpers.bernoulli(population)
    one = helpers.make(name)
    before = json.dumps(helpers.make(name).state_dict())
    steps(one, helpers.Stream(80), reward, 0, 2)
    assert json.dumps(helpers.make(name).state_dict()) == before


# A legal other value for every option that the generic tests do not cover
# (the schedule of the halving rules is tested with its group sizes).
OTHER = {
  "eb_widening": {
    "open_share": 0.125,
    "initial_rollouts": 3,
    "pool": 0.5,
    "rounds": 2,
    "cap": 4,
    "saturation": 1.0,
    "low_success_exponent": 0.0,
    "em_iterations": 0,
    "history": 1,
  },
  "eb_streaming": {
    "open_share": 0.125,
    "initial_rollouts": 3,
    "pool": 0.5,
    "cap": 4,
    "saturation": 1.0,
    "low_success_exponent": 0.0,
    "em_iterations": 0,
    "history": 1,
    "refit": 0.6,
  },
  "dynamic_sampling": {"target": 0.5, "generation": 2.0, "max_batches": 1},
  "pods": {"keep": 0.5},
  "greso": {
    "target": 0.5,
    "generation": 1.0,
    "max_batches": 1,
    "initial": 0.9,
    "change": 0.1,
    "easy_target": 1.0,
    "hard_target": 0.0,
    "pool": 1.0,
  },
  "vip": {
    "form": "dr_grpo",
    "lowest": 7,
    "highest": 9,
    "discount": 0.0,
    "shrinkage": 5.0,
  },
  "eb_effective": {
    "open_share": 0.125,
    "initial_rollouts": 3,
    "pool": 0.0,
    "cap": 4,
    "breadth": 4.0,
    "low_success_exponent": 0.0,
    "noise": 0.2,
    "em_iterations": 1,
    "history": 1,
    "rounds": 1,
  },
  "eb_predicted": {
    "open_share": 0.125,
    "initial_rollouts": 3,
    "pool": 0.5,
    "cap": 4,
    "breadth": 4.0,
    "low_success_exponent": 0.0,
    "noise": 0.2,
    "em_iterations": 1,
    "history": 1,
    "rounds": 1,
    "refits": 0,
    "window": 1.0,
    "explore": 0.5,
    "looks": "shuffled",
  },
  "cero": {
    "units": 4,
    "horizon": 20,
    "pool": 2.0,
    "utility": 20.0,
    "memory": 0.0,
  },
  "knapsack": {"lowest": 4, "highest": 12, "minimum_gain": 0.01},
  "gvm": {
    "pilot": 0.25,
    "alpha": 0.5,
    "beta": 4.0,
    "norm": "deviation",
    "keep_pilots": True,
  },
  "reinforce_ada": {
    "round_size": 2,
    "max_rounds": 2,
    "keep": 2,
    "rule": "positive",
    "batch": 1.0,
    "threshold": 0.2,
    "positives": 3,
  },
  "pilot_commit": {
    "screen": 6,
    "extra": 6,
    "batch": 0.5,
    "low": 0.3,
    "high": 0.4,
    "evict": False,
    "pool": 0.0,
  },
  "speed": {"screen": 6, "extra": 6, "batch": 0.5},
}
# What an option needs beside it to matter.
BESIDE = {
  "form": {"lowest": 3},
  "positives": {"rule": "positive"},
  "alpha": {"beta": 4.0},
}


# Tested with noise itself: rewards here are graded, and such are believed.
ELSEWHERE = {"noise_every"}


def graded(groups, group, sample):
  """Thirds, so that thresholds and ranges matter."""
  draws = helpers.uniform_of(groups.step, groups.uids[group], sample)
  p = population(groups.uids)[group]
  return np.where(draws < p, 1.0, np.where(draws > 0.95, 1 / 3, 0.0))


def signature(name, options):
  allocator = helpers.make(name, options)
  out = []
  # Rules of history need prompts that come again, eb_predicted more of them.
  stream = helpers.Stream(800 if name == "eb_predicted" else 80, look=look)
  for groups, (group, sample, rewards) in steps(
    allocator, stream, graded, 0, 8
  ):
    keep = allocator.keep_rollouts(groups, group, sample, rewards)
    counts = [c.tolist() for c in groups.round_counts]
    out.append((counts, groups.uids.tolist(), keep.tolist()))
  return json.dumps(out)


@pytest.mark.parametrize(
  "name, field", [(n, f) for n, fields in OTHER.items() for f in fields]
)
def test_every_option_changes_something(name, field):
  beside = BESIDE.get(field, {})
  plain = signature(name, beside)
  assert signature(name, {**beside, field: OTHER[name][field]}) != plain


def test_every_option_is_covered():
  for name, cls in allocation.REGISTRY.items():
    fields = set(vars(cls.Options()))
    schedule = {"rounds", "initial_rollouts", "keep", "growth", "ties"}
    if fields <= schedule | {"variance"}:
      continue
    assert fields - ELSEWHERE == set(OTHER[name])
