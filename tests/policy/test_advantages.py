"""Advantages: worked numbers, a loop reference, and what must not matter."""

import math
import time

import numpy as np
import pytest

from vigor_jax.policy import advantages

BASIC = ("grpo", "dr_grpo", "rloo", "predictable")


def compute(name, rewards, group, rounds=None, **kwargs):
  if rounds is None and name == "predictable":
    rounds = np.zeros(len(group), np.int64)
  return advantages.compute(
    name,
    np.array(rewards, np.float64),
    np.array(group),
    round_index=None if rounds is None else np.array(rounds),
    **kwargs,
  )


def loop_reference(name, rewards, group, rounds, eps=1e-6, ddof=0):
  """One rollout at a time, exact sums, straight from the formulas."""
  result = []
  for j in range(len(rewards)):
    mine = [i for i in range(len(rewards)) if group[i] == group[j]]
    values = [float(rewards[i]) for i in mine]
    n = len(values)
    mean = math.fsum(values) / n
    if name == "predictable":
      earlier = [rewards[i] for i in mine if rounds[i] < rounds[j]]
      others = [rewards[i] for i in mine if rounds[i] == rounds[j] and i != j]
      known = earlier or others
      result.append(
        rewards[j] - math.fsum(known) / len(known) if known else 0.0
      )
    elif n == 1 or max(values) == min(values):
      result.append(0.0)
    elif name == "dr_grpo":
      result.append(rewards[j] - mean)
    elif name == "rloo":
      others = [rewards[i] for i in mine if i != j]
      result.append(rewards[j] - math.fsum(others) / (n - 1))
    else:
      squares = math.fsum((v - mean) ** 2 for v in values)
      std = math.sqrt(squares / (n - ddof))
      result.append((rewards[j] - mean) / (std + eps))
  return np.array(result)


# ---------------------------------------------------------- worked numbers


@pytest.mark.parametrize(
  "ddof, expected",
  [(0, [-0.7071, -0.7071, 1.4142]), (1, [-0.5774, -0.5774, 1.1547])],
)
def test_grpo_by_hand(ddof, expected):
  result = compute("grpo", [0, 0, 1], [4, 4, 4], ddof=ddof)
  np.testing.assert_allclose(result, expected, atol=1e-4)
  assert result.dtype == np.float32


def test_rloo_by_hand():
  result = compute("rloo", [1, 0, 0], [0, 0, 0])
  np.testing.assert_allclose(result, [1, -0.5, -0.5], rtol=1e-6)


def test_dr_grpo_by_hand():
  result = compute("dr_grpo", [1, 0, 0, 0], [0, 0, 0, 0])
  np.testing.assert_allclose(result, [0.75, -0.25, -0.25, -0.25])


def test_groups_of_three_and_five():
  rewards = [1, 0, 0, 1, 1, 1, 1, 0]
  result = compute("grpo", rewards, [0] * 3 + [1] * 5)
  expected = [1.414, -0.707, -0.707, 0.5, 0.5, 0.5, 0.5, -2]
  np.testing.assert_allclose(result, expected, atol=1e-3)


def test_eps_is_outside_the_root():
  result = compute("grpo", [1, 1.00001], [0, 0], ddof=1, eps=1e-6)
  np.testing.assert_allclose(result, [-0.6195, 0.6195], atol=1e-4)


def test_groups_across_devices_or_interleaved():
  # [1, 0 | 0, 0] as two shards of one group, ddof 0.
  result = compute("grpo", [1, 0, 0, 0], [3, 3, 3, 3])
  expected = [1.732, -0.577, -0.577, -0.577]
  np.testing.assert_allclose(result, expected, atol=1e-3)
  # The same four rows with another prompt's rows in between.
  mixed = compute("grpo", [1, 0, 0, 1, 0, 1, 0], [3, 8, 3, 8, 3, 8, 3])
  np.testing.assert_array_equal(mixed[[0, 2, 4, 6]], result)


def test_predictable_by_hand():
  # Group 5: round 2 draws (1, 0), leave-one-out +1, -1; round 3 draws
  # (1, 1, 0) against 1/2; round 7 draws 1 against 3/5. Group -1 opens late.
  rewards = [1, 0, 1, 1, 0, 1, 1, 0]
  group = [5, 5, 5, 5, 5, 5, -1, -1]
  rounds = [2, 2, 3, 3, 3, 7, 7, 9]
  result = compute("predictable", rewards, group, rounds)
  expected = [1, -1, 0.5, 0.5, -0.5, 0.4, 0, -1]
  np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_predictable_starts_from_history_where_there_is_one():
  result = compute(
    "predictable",
    [1, 0, 1, 1, 0],
    [0, 0, 0, 1, 1],
    [0, 0, 1, 0, 0],
    history=np.array([0.25, 0.25, 0.25, np.nan, np.nan]),
  )
  # The later round uses the group's own earlier rewards, 1/2.
  np.testing.assert_allclose(result, [0.75, -0.25, 0.5, 1, -1], rtol=1e-6)


def test_predictable_needs_rounds():
  with pytest.raises(ValueError, match="round_index"):
    advantages.compute("predictable", np.ones(2), np.zeros(2, int))


def test_global_mean_counts_samples_that_were_dropped():
  # Eight samples, two right; four kept, balanced: mean 1/4, not 1/2.
  result = compute(
    "global_mean", [1, 1, 0, 0], [0] * 4, history=np.full(4, 0.25)
  )
  np.testing.assert_allclose(result, [0.75, 0.75, -0.25, -0.25])
  with pytest.raises(ValueError, match="history"):
    compute("global_mean", [1, 0], [0, 0])


def test_gvm_weighs_accepted_samples_by_one_over_p():
  rewards, group = [1, 0, 0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 2 + [2] * 2
  result = compute("gvm", rewards, group)
  np.testing.assert_allclose(result, [4, 0, 0, 0, 1, 1, 0, 0])
  pilots = np.array([0.5] * 4 + [0.8] * 2 + [0.0] * 2)
  result = compute("gvm", rewards, group, history=pilots)
  np.testing.assert_allclose(result, [2, 0, 0, 0, 1.25, 1.25, 0, 0])


def test_rl_zvp_pushes_constant_groups_by_entropy():
  rewards, group = [1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2]
  entropy = np.array(
    [[0.5, 2], [1, 3], [0.5, 2], [1, 3], [9, 9], [9, 9]], float
  )
  result = compute("rl_zvp", rewards, group, entropy=entropy)
  expected = [0.05, 0.1, -0.15, -0.2, 1, -1]
  np.testing.assert_allclose(result, expected, atol=1e-5)
  with pytest.raises(ValueError, match="entropy"):
    compute("rl_zvp", rewards, group)
  with pytest.raises(ValueError, match=r"\[6, 2\]"):
    compute("rl_zvp", rewards, group, entropy=entropy[:, 0])


# ------------------------------------------------------------- exact zeros


@pytest.mark.parametrize("name", BASIC)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize(
  "rewards", [[0.7], [1] * 4, [0] * 4, [0.1] * 8, [0.1 + 0.2, 0.3, 0.3]]
)
def test_no_disagreement_is_exactly_zero(name, ddof, rewards):
  group = [11] * len(rewards)
  result = compute(name, rewards, group, ddof=ddof)
  np.testing.assert_array_equal(result, np.zeros(len(rewards), np.float32))


@pytest.mark.parametrize("name", BASIC)
def test_float32_verdicts_one_rounding_apart_are_constant(name):
  third = np.float32(1) / np.float32(3)
  rewards = np.array([third, np.nextafter(third, np.float32(1))], np.float32)
  assert rewards[0] != rewards[1]
  result = compute(name, rewards, [0, 0])
  np.testing.assert_array_equal(result, [0, 0])


@pytest.mark.parametrize("name", BASIC)
def test_a_group_of_one_beside_others(name):
  rewards, group = [1, 0, 1, 1], [2, 9, 2, 9]
  alone = compute(name, [*rewards, 0.5], [*group, 4])
  assert alone[-1] == 0
  np.testing.assert_array_equal(alone[:-1], compute(name, rewards, group))


def test_predictable_is_zero_in_every_round_of_a_constant_group():
  rounds = [0] * 2 + [1] * 4 + [2] * 3
  result = compute("predictable", [0.1] * 9, [0] * 9, rounds)
  np.testing.assert_array_equal(result, np.zeros(9))


def test_informative():
  rewards = np.array([0.1] * 8 + [0, 1, 0.5])
  group = np.array([7] * 8 + [2, 2, -4])
  result = advantages.informative(rewards, group)
  np.testing.assert_array_equal(result, [False] * 8 + [True, True, False])
  assert result.dtype == bool
  assert advantages.informative(np.zeros(0), np.zeros(0, int)).shape == (0,)


# ------------------------------------------------------------- properties


def random_batch(seed, graded=False):
  rng = np.random.default_rng(seed)
  size = int(rng.integers(1, 60))
  group = rng.choice([-3, 0, 7, 2**40, 12], size)
  rewards = rng.random(size) if graded else rng.integers(0, 2, size)
  rounds = rng.integers(0, 4, size)
  return rewards.astype(np.float64), group, rounds


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("name", BASIC)
def test_equals_the_loop(name, graded):
  for seed in range(25):
    rewards, group, rounds = random_batch(seed, graded)
    for ddof in (0, 1):
      result = compute(name, rewards, group, rounds, ddof=ddof)
      expected = loop_reference(name, rewards, group, rounds, ddof=ddof)
      np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", BASIC)
def test_the_order_of_rows_does_not_change_a_bit(name):
  for seed in range(25):
    rewards, group, rounds = random_batch(seed, graded=True)
    result = compute(name, rewards, group, rounds)
    order = np.random.default_rng(seed).permutation(len(rewards))
    permuted = compute(name, rewards[order], group[order], rounds[order])
    np.testing.assert_array_equal(permuted, result[order])


@pytest.mark.parametrize("name", BASIC)
def test_group_ids_and_other_groups_do_not_change_a_bit(name):
  rewards, group, rounds = random_batch(3, graded=True)
  result = compute(name, rewards, group, rounds)
  # -5 g + 1 leaves 16 bits; the last fills the 64 that there are.
  for ids in (-5 * group + 1, group % 100, (group - 2**40) * 2**22):
    relabelled = compute(name, rewards, ids, rounds * 2**40)
    np.testing.assert_array_equal(relabelled, result)
  for g in np.unique(group):
    rows = group == g
    alone = compute(name, rewards[rows], group[rows], rounds[rows])
    np.testing.assert_array_equal(alone, result[rows])


def test_the_same_prompt_text_in_two_rows_is_two_groups():
  # The group id is the row of the step's batch; text plays no part.
  texts = ["2+2=", "2+2="]
  rewards, group = [1, 1, 0, 0], [0, 0, 1, 1]
  assert texts[0] == texts[1]
  np.testing.assert_array_equal(compute("grpo", rewards, group), np.zeros(4))
  # One row is one group, whatever its text.
  np.testing.assert_allclose(
    compute("grpo", rewards, [0] * 4), [1, 1, -1, -1], rtol=1e-5
  )


def test_shift_and_scale():
  rewards, group, rounds = random_batch(5, graded=True)
  for name in BASIC:
    base = compute(name, rewards, group, rounds, eps=0)
    shifted = compute(name, rewards + 3, group, rounds, eps=0)
    doubled = compute(name, 2 * rewards, group, rounds, eps=0)
    np.testing.assert_allclose(shifted, base, atol=1e-5)
    factor = 1 if name == "grpo" else 2
    np.testing.assert_allclose(doubled, factor * base, atol=1e-5)


def test_group_sums_are_zero():
  rewards, group, _ = random_batch(8, graded=True)
  for name in ("grpo", "dr_grpo", "rloo"):
    result = compute(name, rewards, group).astype(np.float64)
    for g in np.unique(group):
      assert abs(result[group == g].sum()) < 1e-5


def test_a_step_of_4096_rollouts_is_not_a_loop():
  rng = np.random.default_rng(0)
  rewards = rng.random(4096).astype(np.float32)
  group, rounds = rng.integers(0, 512, 4096), rng.integers(0, 4, 4096)
  for name in BASIC:
    seconds = []
    for _ in range(100):
      start = time.perf_counter()
      advantages.compute(name, rewards, group, round_index=rounds)
      seconds.append(time.perf_counter() - start)
    # .2 to .8 ms on one core of a busy machine; the fastest of many is what
    # the code takes, and six times that leaves room for a slower one.
    assert min(seconds) < 5e-3, (name, min(seconds))


# --------------------------------------------------------------- bad input


def test_empty_batch():
  assert compute("grpo", [], np.zeros(0, int)).shape == (0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
  with pytest.raises(ValueError, match="row 2 is not finite"):
    compute("grpo", [0, 1, bad], [0, 0, 0])


@pytest.mark.parametrize(
  "kwargs, match",
  [
    ({"name": "grp0"}, "did you mean 'grpo'"),
    ({"group": np.zeros(2, int)}, r"group is \[B\] = \[3\]"),
    ({"group": np.zeros(3)}, "group holds integers"),
    ({"round_index": np.zeros((3, 1), int)}, "round_index"),
    ({"history": np.zeros(4)}, "history"),
    ({"ddof": 2}, "ddof=2"),
  ],
)
def test_bad_arguments_are_named(kwargs, match):
  call = {"name": "grpo", "rewards": np.ones(3), "group": np.zeros(3, int)}
  with pytest.raises(ValueError, match=match):
    advantages.compute(**(call | kwargs))
