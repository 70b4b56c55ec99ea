"""From rollouts to minibatches: order, weights, what is left out, shuffles."""

import collections
import dataclasses
import types

import numpy as np
import pytest

from vigor_jax import allocation
from vigor_jax.policy import advantages as advantages_lib
from vigor_jax.policy import batch as batch_lib
from vigor_jax.policy import thinning

ESTIMATOR = batch_lib.Estimator(
  loss="grpo",
  advantage="dr_grpo",
  aggregator="rollout_mean",
  denominator="all",
  eps=1e-6,
  ddof=0,
  keep_all=False,
  minibatches=1,
  update_rollouts=0,
  update_noise=0.0,
  row_length=24,
  rows_per_micro=2,
  max_new_tokens=8,
)


@dataclasses.dataclass
class Keep:
  """The part of an allocator that a batch asks: which rollouts to train on."""

  rollouts: object = None

  def keep_rollouts(self, groups, group, sample, reward):
    if self.rollouts is None:
      return np.ones(len(group), bool)
    return self.rollouts(group, sample, reward)


class Step:
  """A step whose groups got the given rewards, drawn in the given rounds."""

  def __init__(self, rewards, rounds=None, lengths=None, arrival=0, budget=None):
    counts = [len(r) for r in rewards]
    k = len(counts)
    self.groups = allocation.Groups(0, 0, 50 + np.arange(k), 50 + np.arange(k))
    for granted in rounds or [counts]:
      self.groups.request(np.array(granted))
    rng = np.random.default_rng(3)
    n = sum(counts)
    group = np.repeat(np.arange(k), counts)
    sample = np.concatenate([np.arange(c) for c in counts])
    reward = np.concatenate([np.array(r, float) for r in rewards])
    if lengths is None:
      lengths = rng.integers(1, 9, n)
    tokens = rng.integers(1, 11, (n, 8)).astype(np.int32)
    logprobs = -rng.random((n, 8)).astype(np.float32)
    self.buffer = allocation.RolloutBuffer(budget or n, 8, self.groups)
    self.prompts = [rng.integers(1, 11, 3 + g).astype(np.int32) for g in range(k)]
    order = np.random.default_rng(arrival).permutation(n)
    for part in np.array_split(order, min(3, max(n, 1))):
      rows = types.SimpleNamespace(
        tokens=tokens[part],
        logprobs=logprobs[part],
        processed_logprobs=logprobs[part],
        lengths=np.asarray(lengths)[part],
        group=group[part],
        sample=sample[part],
        truncated=np.zeros(len(part), bool),
      )
      self.buffer.add(rows, reward[part])

  def batch(self, keep=None, step=0, **changes):
    return batch_lib.make_batch(
      self.buffer,
      self.groups,
      keep or Keep(),
      self.prompts,
      dataclasses.replace(ESTIMATOR, **changes),
      seed=7,
      step=step,
    )


def rollouts_of(minibatch):
  """Sorted (completion, advantage, weight) of a packed minibatch."""
  found = []
  packed = minibatch.packed
  for m, r in np.ndindex(packed.tokens.shape[:2]):
    for segment in range(1, packed.segment[m, r].max(initial=0) + 1):
      at = packed.segment[m, r] == segment
      found.append((
        tuple(packed.tokens[m, r][at]),
        float(packed.advantages[m, r][at][0]),
        float(packed.weights[m, r][at][0]),
      ))
  return sorted(found)


def test_advantages_by_group_whatever_the_sizes():
  batch = Step([[1], [1, 0], [0, 0, 1, 0], [1, 1]]).batch()
  np.testing.assert_allclose(
    batch.advantages,
    [0, 0.5, -0.5, -0.25, -0.25, 0.75, -0.25, 0, 0],
    atol=1e-7,
  )
  # Groups of one and constant groups have no gradient and are left out.
  assert batch.active == 6
  (minibatch,) = batch.minibatches
  assert len(rollouts_of(minibatch)) == 6
  # But they count in the mean: 9 rollouts, not 6.
  assert minibatch.denominator == 9


def test_the_order_of_arrival_changes_nothing():
  rewards = [[1, 0, 0], [0, 1], [1, 1, 1, 0, 0]]
  lengths = [3, 1, 8, 2, 2, 5, 7, 4, 6, 1]
  a, b = (
    Step(rewards, lengths=lengths, arrival=i).batch() for i in (1, 2)
  )
  np.testing.assert_array_equal(a.advantages, b.advantages)
  for x, y in zip(a.minibatches[0].packed, b.minibatches[0].packed):
    np.testing.assert_array_equal(x, y)


def test_what_is_packed_is_what_was_sampled():
  step = Step([[1, 0, 0], [0, 1]])
  batch = step.batch()
  (minibatch,) = batch.minibatches
  buffer = step.buffer
  expected = sorted(
    (
      tuple(buffer.tokens[row, : buffer.lengths[row]]),
      float(a),
      float(np.float32(1 / buffer.lengths[row])),
    )
    for row, a in zip(batch.order, batch.advantages)
  )
  assert rollouts_of(minibatch) == expected
  # Sampler log-probs are there token by token.
  packed = minibatch.packed
  assert sorted(packed.sampler_logprobs[packed.segment > 0]) == sorted(
    np.concatenate([buffer.logprobs[r, : buffer.lengths[r]] for r in batch.order])
  )


@pytest.mark.parametrize(
  "aggregator, weights, denominator",
  [
    # Groups of 2 and 3; lengths 2, 4 | 1, 2, 8. L_max 8.
    ("prompt_mean", [1 / 4, 1 / 8, 1 / 3, 1 / 6, 1 / 24], 2),
    ("rollout_mean", [1 / 2, 1 / 4, 1, 1 / 2, 1 / 8], 5),
    ("token_mean", [1] * 5, 17),
    ("constant", [1] * 5, 40),
  ],
)
def test_weights_by_hand(aggregator, weights, denominator):
  step = Step([[1, 0], [0, 1, 0]], lengths=[2, 4, 1, 2, 8])
  batch = step.batch(aggregator=aggregator)
  (minibatch,) = batch.minibatches
  assert minibatch.denominator == pytest.approx(denominator)
  found = {(len(t), a): w for t, a, w in rollouts_of(minibatch)}
  lengths = step.buffer.lengths[batch.order]
  for n, a, w in zip(lengths, batch.advantages, weights):
    assert found[int(n), float(a)] == pytest.approx(w)


def test_sequence_losses_weigh_a_rollout_once():
  step = Step([[1, 0], [0, 1, 0]], lengths=[2, 4, 1, 2, 8])
  (minibatch,) = step.batch(loss="gspo").minibatches
  assert {w for *_, w in rollouts_of(minibatch)} == {1.0}
  assert minibatch.denominator == 5


def test_the_mean_may_run_over_informative_rollouts():
  step = Step([[1, 0], [1, 1, 1], [0]])
  (minibatch,) = step.batch(denominator="informative").minibatches
  assert minibatch.denominator == 2
  assert len(rollouts_of(minibatch)) == 2


def test_a_kl_term_keeps_rollouts_without_advantage():
  batch = Step([[1, 0], [1, 1, 1], [0]]).batch(keep_all=True)
  assert batch.active == 6
  advantages = [a for _, a, _ in rollouts_of(batch.minibatches[0])]
  assert advantages.count(0.0) == 4


def test_nothing_to_learn_from():
  batch = Step([[1, 1], [0, 0, 0]]).batch()
  (minibatch,) = batch.minibatches
  assert batch.active == 0 and minibatch.num_micro == 0
  assert batch.useful_share == 0
  assert minibatch.denominator == 5
  assert not batch.advantages.any()
  (minibatch,) = Step([[1, 1]]).batch(denominator="informative").minibatches
  assert minibatch.num_micro == 0 and minibatch.denominator == 1


# Rollouts that the allocator does not train on.


def test_rollouts_that_are_dropped_do_not_enter_the_mean():
  step = Step([[1, 0, 1, 0], [1, 1, 0]])
  keep = Keep(lambda group, sample, reward: (group == 1) | (sample < 2))
  batch = step.batch(keep)
  np.testing.assert_allclose(
    batch.advantages, [0.5, -0.5, 1 / 3, 1 / 3, -2 / 3], atol=1e-6
  )
  assert batch.minibatches[0].denominator == 5
  np.testing.assert_array_equal(step.buffer.sample[batch.order], [0, 1, 0, 1, 2])


def test_dropped_samples_stay_in_the_mean_of_all_samples():
  # Reinforce-Ada: r - mean over all four samples, two of which are kept.
  step = Step([[1, 0, 0, 0]])
  keep = Keep(lambda group, sample, reward: sample < 2)
  batch = step.batch(keep, advantage="global_mean")
  np.testing.assert_allclose(batch.advantages, [0.75, -0.25])


@pytest.mark.parametrize("train_on, trained", [("all", 4), ("survivors", 1)])
def test_survivors_only(train_on, trained):
  allocator = allocation.make(
    "vigor",
    {"rounds": 3, "initial_rollouts": 2},
    prompts_per_step=4,
    budget=24,
    seed=0,
    train_on=train_on,
  )
  stream = types.SimpleNamespace(
    peek=lambda k: types.SimpleNamespace(
      positions=np.arange(k), uids=np.arange(k)
    )
  )
  groups = allocator.begin(stream, 0)
  buffer = allocation.RolloutBuffer(24, 8, groups)
  given = np.zeros(4, int)
  for request in allocator.rounds(groups):
    group = np.repeat(np.arange(4), request.counts)
    sample = np.concatenate(
      [given[g] + np.arange(c) for g, c in enumerate(request.counts)]
    )
    given += request.counts
    zeros = np.zeros((len(group), 8))
    rows = types.SimpleNamespace(
      tokens=zeros.astype(np.int32), logprobs=zeros,
      processed_logprobs=zeros, lengths=np.full(len(group), 2),
      group=group, sample=sample, truncated=np.zeros(len(group), bool),
    )  # fmt: skip
    buffer.add(rows, (sample % 2).astype(float))
  prompts = [np.array([1, 2], np.int32)] * 4
  batch = batch_lib.make_batch(
    buffer, groups, allocator, prompts, ESTIMATOR, seed=0, step=0
  )
  assert len(np.unique(buffer.group[batch.order])) == trained
  assert len(batch.order) == (24 if train_on == "all" else 14)


def test_shaped_rewards_are_what_is_trained_on():
  step = Step([[1, 0], [1, 1]])
  step.buffer.shaped[:] = step.buffer.reward - 0.1 * (step.buffer.sample == 1)
  batch = step.batch()
  # The second group's verdicts agree; its shaped rewards do not.
  np.testing.assert_allclose(batch.advantages, [0.55, -0.55, 0.05, -0.05],
                             atol=1e-6)  # fmt: skip
  np.testing.assert_array_equal(np.sort(step.buffer.reward), [0, 1, 1, 1])


# Rounds.


def test_rounds_of_rollouts_by_hand():
  counts = [np.array([2, 2]), np.array([0, 3]), np.array([1, 0])]
  group = np.array([0, 0, 0, 1, 1, 1, 1, 1])
  sample = np.array([0, 1, 2, 0, 1, 2, 3, 4])
  np.testing.assert_array_equal(
    batch_lib.round_index(counts, group, sample), [0, 0, 2, 0, 0, 1, 1, 1]
  )


def test_predictable_baselines_come_from_earlier_rounds():
  step = Step([[1, 0, 1, 1]], rounds=[[2], [2]])
  batch = step.batch(advantage="predictable")
  # Leave-one-out in the first round; its mean is the second's baseline.
  np.testing.assert_allclose(batch.advantages, [1, -1, 0.5, 0.5], atol=1e-6)


# Minibatches.


def test_surprisal_by_hand():
  logprobs = np.array([[-1.0, -3.0, 9.0], [-0.5, 9.0, 9.0]], np.float32)
  result = batch_lib.surprisal(logprobs, np.array([2, 1]))
  np.testing.assert_allclose(result, [[2, 3], [0.5, 0.5]])


@pytest.mark.parametrize("name", sorted(advantages_lib.ADVANTAGES))
def test_every_advantage_gets_what_it_needs(name):
  batch = Step([[1, 0, 0], [0, 0, 0], [1, 1]]).batch(advantage=name)
  assert np.isfinite(batch.advantages).all()
  assert batch.advantages[:3].any()
  failed = batch.advantages[3:6]
  assert (failed < 0).any() if name == "rl_zvp" else not failed.any()


def test_minibatches_share_the_rollouts_and_the_denominator():
  step = Step([[1, 0, 0], [0, 1], [1, 1, 0, 0]], budget=12)
  (whole,) = step.batch().minibatches
  batch = step.batch(minibatches=2)
  assert len(batch.minibatches) == 2
  parts = [rollouts_of(mb) for mb in batch.minibatches]
  assert sorted(sum(parts, [])) == rollouts_of(whole)
  assert all(parts) and batch.active == 9
  assert [mb.denominator for mb in batch.minibatches] == [4.5, 4.5]
  again, later = step.batch(minibatches=2), step.batch(minibatches=2, step=1)
  assert [rollouts_of(mb) for mb in again.minibatches] == parts
  assert [rollouts_of(mb) for mb in later.minibatches] != parts


UNEVEN = [[1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0], [1, 1], [0, 1, 1]]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_thinned_update_is_the_whole_one_on_average(minibatches):
  step = Step(UNEVEN, lengths=[4] * 17)

  def sums(batch):
    """Completion -> what its log-prob is multiplied with, over the step."""
    total = {}
    for minibatch in batch.minibatches:
      for completion, advantage, weight in rollouts_of(minibatch):
        total[completion] = advantage * weight / minibatch.denominator
    return total

  whole = step.batch(minibatches=minibatches)
  assert whole.active == whole.signal == 15
  total = dict.fromkeys(sums(whole), 0.0)
  draws = 3000
  for number in range(draws):
    # Minibatches are dealt out anew in every step, and thinned by themselves.
    batch = step.batch(step=number, minibatches=minibatches, update_rollouts=6)
    assert batch.active == 6 and batch.signal == 15
    for completion, value in sums(batch).items():
      total[completion] += value / draws
  for completion, value in sums(whole).items():
    assert total[completion] == pytest.approx(value, rel=0.15)


def test_thinning_takes_rare_verdicts_first_and_is_addressed():
  step = Step(UNEVEN, lengths=[4] * 17)
  batch = step.batch(update_rollouts=6)
  # The only success of eight has seven times the advantage of a failure.
  kept = [a for _, a, _ in rollouts_of(batch.minibatches[0])]
  assert max(kept) == pytest.approx(0.875)
  again = step.batch(update_rollouts=6)
  for one, other in zip(batch.minibatches, again.minibatches):
    np.testing.assert_array_equal(one.packed.tokens, other.packed.tokens)
    np.testing.assert_array_equal(one.packed.weights, other.packed.weights)
  for number in (15, 99):  # There are no more than 15 with an advantage.
    loose = step.batch(update_rollouts=number)
    assert rollouts_of(loose.minibatches[0]) == rollouts_of(
      step.batch().minibatches[0]
    )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_thinned_update_takes_equal_rollouts_once(minibatches):
  # Seven equal failures, and others that only look alike.
  step = Step(UNEVEN, lengths=[4] * 17)
  at = (step.buffer.group == 0) & (step.buffer.reward == 0)
  step.buffer.tokens[at] = [3, 1, 4, 1, 0, 0, 0, 0]
  step.buffer.logprobs[:] = -1.0

  def sums(batch):
    total = collections.Counter()
    for minibatch in batch.minibatches:
      for completion, advantage, weight in rollouts_of(minibatch):
        total[completion, advantage] += weight / minibatch.denominator
    return total

  whole = step.batch(minibatches=minibatches)
  once = step.batch(minibatches=minibatches, update_rollouts=17)
  assert whole.active == once.signal == 15
  assert once.active == {1: 9, 2: 10}[minibatches]
  assert sums(once).keys() == sums(whole).keys()
  for key, value in sums(whole).items():
    assert sums(once)[key] == pytest.approx(value, rel=1e-6)
  if minibatches == 1:
    # Drawn by what they weigh together, which is as much as the only success:
    # alone, a failure would have a chance of 6 / 5.08 / 8.
    for number in range(10):
      few = step.batch(step=number, update_rollouts=6)
      assert few.active == 6
      assert (3, 1, 4, 1) in [c for c, *_ in rollouts_of(few.minibatches[0])]


def test_thinning_leaves_out_what_the_policy_was_sure_of():
  step = Step(UNEVEN, lengths=[4] * 17)
  sure = (step.buffer.group == 0) & (step.buffer.reward == 0)
  step.buffer.logprobs[:] = np.where(sure[:, None], -1e-4, -2.0)
  kept = [
    a
    for number in range(50)
    for _, a, _ in rollouts_of(
      step.batch(step=number, update_rollouts=6).minibatches[0]
    )
  ]
  # Seven of fifteen; by their weight alone they would be every seventh.
  assert 0 < kept.count(pytest.approx(-0.125)) < 0.1 * len(kept)


def test_an_update_takes_as_many_rollouts_as_its_noise_asks_for(monkeypatch):
  monkeypatch.setattr(  # No more than that.
    thinning, "filling", lambda *args: args[4]
  )
  step = Step(UNEVEN, lengths=[4] * 17)
  step.buffer.logprobs[:] = -1.0
  counts = []
  for noise in (1e-6, 0.5, 1.0, 100.0):
    batch = step.batch(update_noise=noise)
    assert batch.signal == 15
    counts.append(batch.active)
  assert counts[0] == 15 and counts[-1] == 1
  assert counts == sorted(counts, reverse=True) and len(set(counts)) == 4
  # By hand: with the m largest kept, the others add (1 / pi - 1) x square.
  size = np.abs(step.batch().advantages)
  size = size[size > 0]
  for noise, number in zip((0.5, 1.0), counts[1:3]):
    for fewer in (0, 1):
      chance = thinning.probabilities(size, number - fewer)
      added = ((1 / chance - 1) * size**2).sum()
      assert (added <= noise * (size**2).sum()) == (not fewer)
  both = step.batch(update_noise=1e-6, update_rollouts=6)
  assert both.active == 6


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_an_update_takes_what_its_micro_batches_hold(monkeypatch, noise):
  step = Step([[1, 0, 0, 1, 0.5, 0, 0] * 3] * 8)
  changes = dict(update_noise=noise, row_length=48)
  full = step.batch(**changes)
  with monkeypatch.context() as patched:
    patched.setattr(thinning, "filling", lambda *args: args[4])
    least = step.batch(**changes)
  used = [
    b.minibatches[0].num_micro
    for b in (least, full, step.batch(row_length=48))
  ]
  assert used[0] == used[1] < used[2]
  assert full.active > least.active and full.useful_share > least.useful_share
  assert full.useful_share > 0.7
  capped = step.batch(**changes, update_rollouts=least.active)
  assert capped.active == least.active


@pytest.mark.parametrize("full", [0.75, 1.5])
def test_a_filled_update_is_the_whole_one_on_average(monkeypatch, full):
  """Also where it was to fit and does not."""
  monkeypatch.setattr(thinning, "FULL", full)
  step, total, draws = Step(UNEVEN), collections.Counter(), 256
  taken = set()
  # Of a systematic draw the start is all that is random: every one in turn.
  starts = iter((np.arange(draws) + 0.5) / draws)
  monkeypatch.setattr(
    batch_lib.addressed, "addressed_uniform", lambda *_: [next(starts)]
  )
  for number in range(draws):
    batch = step.batch(step=number, update_noise=4.0, row_length=16)
    taken.add(batch.active)
    for completion, advantage, weight in rollouts_of(batch.minibatches[0]):
      total[completion] += advantage * weight / draws
  assert max(taken) < 13
  whole = collections.Counter()
  for completion, advantage, weight in rollouts_of(step.batch().minibatches[0]):
    whole[completion] += advantage * weight
  for completion, value in whole.items():
    assert total[completion] == pytest.approx(value, rel=0.1)


def test_a_thinned_update_takes_less_memory():
  step = Step(UNEVEN)
  whole = step.batch().minibatches[0].packed.tokens.shape
  less = step.batch(update_rollouts=6).minibatches[0].packed.tokens.shape
  assert whole[0] == 9 and less[0] == 3 and less[1:] == whole[1:]


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_the_static_shape_always_suffices(minibatches):
  # Nothing shares a row: prompts of 16 tokens and completions of 8.
  step = Step([[1, 0]] * 11, lengths=[8] * 22, budget=22)
  step.prompts = [np.arange(16, dtype=np.int32) % 11] * 11
  batch = step.batch(minibatches=minibatches)
  assert batch.active == 22
  shapes = {mb.packed.tokens.shape for mb in batch.minibatches}
  assert len(shapes) == 1
  few = Step([[1, 0]], lengths=[1, 1], budget=22).batch(minibatches=minibatches)
  assert {mb.packed.tokens.shape for mb in few.minibatches} == shapes


def test_a_rollout_longer_than_a_row_is_refused():
  step = Step([[1, 0]], lengths=[8, 8])
  step.prompts = [np.ones(17, np.int32)]
  with pytest.raises(ValueError, match="policy.row_length=24"):
    step.batch()
