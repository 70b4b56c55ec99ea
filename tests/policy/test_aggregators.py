"""Aggregators: worked numbers, a loop reference, micro-batches, empty steps."""

import numpy as np
import pytest

from vigor_jax.policy import aggregators

TERMS = [[1.0, 1.0], [0.5] * 8]  # two rollouts' per-token terms


def total(name, group, terms, **kwargs):
  """The loss that the weights give, term by term."""
  lengths = np.array([len(t) for t in terms])
  call = {"budget": len(terms), "max_new_tokens": 10}
  call["num_prompts"] = len(np.unique(group))
  weight, denominator = aggregators.weights(
    name, np.array(group), lengths, **(call | kwargs)
  )
  assert weight.dtype == np.float32 and isinstance(denominator, float)
  return sum(w * sum(t) for w, t in zip(weight, terms)) / denominator


@pytest.mark.parametrize(
  "name, expected",
  [
    ("token_mean", 0.6),
    ("rollout_mean", 0.75),
    ("prompt_mean", 0.75),
    ("constant", 0.3),
  ],
)
def test_by_hand(name, expected):
  assert total(name, [0, 1], TERMS) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", aggregators.AGGREGATORS)
def test_micro_batches_add_up_to_the_whole(name):
  weight, denominator = aggregators.weights(
    name,
    np.array([0, 1]),
    np.array([2, 8]),
    budget=2,
    max_new_tokens=10,
    num_prompts=2,
  )
  sums = [w * sum(t) for w, t in zip(weight, TERMS)]  # one rollout each
  assert sum(sums) / denominator == pytest.approx(total(name, [0, 1], TERMS))


def test_groups_of_different_sizes():
  # Prompt 7 has 3 rollouts, prompt 2 one; all terms 1 on 4, 2, 1 and 3 tokens.
  group, terms = [7, 7, 2, 7], [[1] * 4, [1] * 2, [2] * 3, [1]]
  assert total("prompt_mean", group, terms) == pytest.approx((1 + 2) / 2)
  assert total("rollout_mean", group, terms) == pytest.approx((3 + 2) / 4)
  assert total("token_mean", group, terms) == pytest.approx((7 + 6) / 10)
  assert total("constant", group, terms) == pytest.approx((7 + 6) / 40)


def loop_reference(name, group, terms, budget, limit, prompts):
  """The formulas, written out."""
  if name == "prompt_mean":
    return (
      sum(
        np.mean([np.mean(t) for t, h in zip(terms, group) if h == g])
        for g in set(group)
      )
      / prompts
    )
  if name == "rollout_mean":
    return sum(np.mean(t) for t in terms) / budget
  if name == "token_mean":
    return sum(sum(t) for t in terms) / sum(len(t) for t in terms)
  return sum(sum(t) for t in terms) / (budget * limit)


@pytest.mark.parametrize("name", aggregators.AGGREGATORS)
def test_equals_the_loop(name):
  for seed in range(20):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 30))
    group = [int(g) for g in rng.choice([-2, 5, 900], size)]
    terms = [rng.normal(size=rng.integers(1, 10)) for _ in range(size)]
    # The budget and the prompts may be more than what is in the batch.
    budget, prompts = size + 3, len(set(group)) + 2
    result = total(name, group, terms, budget=budget, num_prompts=prompts)
    expected = loop_reference(name, group, terms, budget, 10, prompts)
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", aggregators.AGGREGATORS)
def test_informative_denominators_count_informative_rollouts(name):
  # Prompt 0 agrees (its terms are 0), prompt 1 does not.
  group = [0, 0, 1, 1, 1]
  terms = [[0.0] * 3, [0.0], [2.0, 2.0], [-1.0], [3.0] * 4]
  informative = np.array([False, False, True, True, True])
  result = total(
    name, group, terms, denominator="informative", informative=informative
  )
  alone = total(name, group[2:], terms[2:])
  assert result == pytest.approx(alone, rel=1e-6)
  assert abs(total(name, group, terms)) < abs(result)
  weight, _ = aggregators.weights(
    name,
    np.array(group),
    np.array([3, 1, 2, 1, 4]),
    budget=5,
    max_new_tokens=10,
    num_prompts=2,
    denominator="informative",
    informative=informative,
  )
  np.testing.assert_array_equal(weight[:2], [0, 0])


@pytest.mark.parametrize(
  "name, expected",
  [
    ("prompt_mean", [1 / 2, 1 / 2, 1]),
    ("rollout_mean", [1, 1, 1]),
    ("token_mean", [2, 8, 4]),
    ("constant", [2, 8, 4]),
  ],
)
def test_sequence_losses_have_one_term_per_rollout(name, expected):
  weight, denominator = aggregators.weights(
    name,
    np.array([0, 0, 1]),
    np.array([2, 8, 4]),
    budget=3,
    max_new_tokens=10,
    num_prompts=2,
    level="sequence",
  )
  np.testing.assert_allclose(weight, expected, rtol=1e-6)
  denominators = {"prompt_mean": 2, "rollout_mean": 3}
  denominators |= {"token_mean": 14, "constant": 30}
  assert denominator == denominators[name]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", aggregators.AGGREGATORS)
def test_a_rollout_without_tokens_weighs_nothing(name, level):
  call = {"budget": 2, "max_new_tokens": 10, "num_prompts": 1, "level": level}
  group = np.array([0, 0])
  weight, denominator = aggregators.weights(
    name, group, np.array([0, 4]), **call
  )
  assert weight[0] == 0 and weight[1] > 0 and denominator > 0
  weight, denominator = aggregators.weights(
    name, group, np.array([0, 0]), **call
  )
  np.testing.assert_array_equal(weight, [0, 0])
  assert denominator > 0
  # Nothing informative, and nothing at all.
  for kept in (group, group[:0]):
    weight, denominator = aggregators.weights(
      name,
      kept,
      np.full(len(kept), 4),
      denominator="informative",
      informative=np.zeros(len(kept), bool),
      **call,
    )
    assert not weight.any() and denominator == 1.0


def test_the_order_of_rows_does_not_matter():
  rng = np.random.default_rng(1)
  group, lengths = rng.integers(0, 5, 40), rng.integers(0, 9, 40)
  order = rng.permutation(40)
  for name in aggregators.AGGREGATORS:
    call = {"budget": 40, "max_new_tokens": 9, "num_prompts": 5}
    weight, total_ = aggregators.weights(name, group, lengths, **call)
    permuted = aggregators.weights(name, group[order], lengths[order], **call)
    np.testing.assert_array_equal(permuted[0], weight[order])
    assert permuted[1] == total_


@pytest.mark.parametrize(
  "kwargs, match",
  [
    ({"name": "promt_mean"}, "did you mean 'prompt_mean'"),
    ({"denominator": "informativ"}, "did you mean 'informative'"),
    ({"denominator": "informative"}, "needs informative"),
    (
      {"denominator": "informative", "informative": np.ones(3)},
      "informative is",
    ),
    ({"level": "rollout"}, "loss level"),
    ({"lengths": np.array([1, 11])}, "row 1 is 11, outside 0..max"),
    ({"lengths": np.array([-1, 1])}, "row 0 is -1"),
    ({"lengths": np.array([1])}, "group and lengths"),
  ],
)
def test_bad_arguments_are_named(kwargs, match):
  call = {"name": "prompt_mean", "group": np.zeros(2, int)}
  call |= {"lengths": np.array([1, 2]), "budget": 2, "num_prompts": 1}
  with pytest.raises(ValueError, match=match):
    aggregators.weights(**(call | {"max_new_tokens": 10} | kwargs))
