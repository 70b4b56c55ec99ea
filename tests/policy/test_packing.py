"""Packing: every token once, prompts shared, the mask, the same log-probs."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax.policy import attention
from vigor_jax.policy import optimizer, packing, transformer, update
from vigor_jax.policy.sizes import Sizes

Rollouts = collections.namedtuple(
  "Rollouts", "group prompts tokens lengths advantages weights logprobs"
)


def make(counts, prompt_lengths, lengths=None, *, seed=0, vocab=19, longest=9):
  """Rollouts of groups of the given sizes, with numbers of their own.

  lengths: one per rollout in order of the groups; None draws 1 .. longest.
  """
  rng = np.random.default_rng(seed)
  group = np.repeat(np.arange(len(counts)), counts)
  if lengths is None:
    lengths = rng.integers(1, longest + 1, len(group))
  lengths = np.asarray(lengths)
  shape = (len(group), int(lengths.max(initial=1)))
  # Zero is a token like any other: nothing may be read off token ids.
  tokens = rng.integers(0, vocab, shape, np.int32)
  return Rollouts(
    group,
    [rng.integers(0, vocab, n).astype(np.int32) for n in prompt_lengths],
    tokens,
    lengths,
    rng.normal(size=len(group)).astype(np.float32),
    rng.random(len(group)).astype(np.float32) + 0.1,
    -rng.random(shape).astype(np.float32),
  )


def pack(r, row_length=24, rows_per_micro=3, max_micro=None):
  return packing.pack(
    r.group,
    r.prompts,
    r.tokens,
    r.lengths,
    r.advantages,
    r.weights,
    r.logprobs,
    row_length=row_length,
    rows_per_micro=rows_per_micro,
    max_micro=max_micro or max(1, -(-len(r.group) // rows_per_micro)),
  )


def shuffled(r, seed=5):
  """The same rollouts in another order: groups interleaved."""
  order = np.random.default_rng(seed).permutation(len(r.group))
  return r._replace(
    **{
      name: getattr(r, name)[order]
      for name in Rollouts._fields
      if name != "prompts"
    }
  )


def given(r):
  """The multiset of rollouts as (prompt, completion, numbers)."""
  return collections.Counter(
    (
      tuple(r.prompts[g]),
      tuple(r.tokens[i, :n]),
      float(r.advantages[i]),
      float(r.weights[i]),
      tuple(r.logprobs[i, :n]),
    )
    for i, (g, n) in enumerate(zip(r.group, r.lengths))
  )


def read_back(packed):
  """The same multiset, read off packed rows token by token.

  A row is cut at its prompt copies and rollouts by ids alone; positions and
  `source` are checked on the way.
  """
  found, copies = collections.Counter(), 0
  flat = [a.reshape(-1, a.shape[-1]) for a in packed]
  for line in zip(*flat):
    row = packing.Packed(*line)
    for number in range(1, row.prompt.max() + 1):
      mine = row.prompt == number
      at = np.flatnonzero(mine & (row.segment == 0))
      assert (np.diff(at) == 1).all()
      np.testing.assert_array_equal(row.positions[at], np.arange(len(at)))
      prompt = tuple(row.tokens[at])
      copies += 1
      rollouts = np.unique(row.segment[mine & (row.segment > 0)])
      assert len(rollouts), "a prompt copy without a rollout"
      for segment in rollouts:
        where = np.flatnonzero(row.segment == segment)
        # One rollout is one stretch of one row, after its prompt copy.
        assert (np.diff(where) == 1).all() and (row.prompt[where] == number).all()
        assert where[0] > at[-1]
        n = len(where)
        np.testing.assert_array_equal(
          row.positions[where], len(at) + np.arange(n)
        )
        assert row.source[where[0]] == at[-1]
        np.testing.assert_array_equal(row.source[where[1:]], where[:-1])
        (advantage,) = set(row.advantages[where].tolist())
        (weight,) = set(row.weights[where].tolist())
        found[
          prompt,
          tuple(row.tokens[where]),
          advantage,
          weight,
          tuple(row.sampler_logprobs[where]),
        ] += 1
    empty = row.prompt == 0
    for values in row:
      assert not values[empty].any()
    for values in (row.advantages, row.weights, row.sampler_logprobs):
      assert not values[row.segment == 0].any()
  return found, copies


CASES = {
  "odd sizes": make([1, 3, 7, 2, 5], [4, 1, 6, 3, 8]),
  "groups of one": make([1] * 6, [3, 3, 1, 5, 2, 9], seed=1),
  "one large group": make([40], [6], seed=2),
  "a group without rollouts": make([2, 0, 3], [4, 4, 4], seed=3),
  "exactly a row": make([1, 1], [4, 20], [20, 4], seed=4),
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_token_lands_once(case, mixed):
  r = shuffled(CASES[case]) if mixed else CASES[case]
  packed, used = pack(r)
  found, _ = read_back(packed)
  assert found == given(r)
  rows = packed.prompt.any(-1)
  assert used == rows.any(-1).sum() and not rows[used:].any()


def test_by_hand():
  # The picture of packing.py: two prompts, three rollouts, one row of 18.
  r = Rollouts(
    np.array([0, 0, 1]),
    [np.array([7, 8, 9], np.int32), np.array([1, 2, 3, 4], np.int32)],
    np.array([[11, 12, 13, 0], [21, 22, 0, 0], [31, 32, 33, 34]], np.int32),
    np.array([3, 2, 4]),
    np.array([1, -1, 2], np.float32),
    np.array([0.5, 0.25, 1], np.float32),
    np.full((3, 4), -0.5, np.float32),
  )
  packed, used = pack(r, row_length=18, rows_per_micro=1)
  assert used == 1
  row = packing.Packed(*(a[0, 0].tolist() for a in packed))
  assert row.tokens == [7, 8, 9, 11, 12, 13, 21, 22, 1, 2, 3, 4, 31, 32, 33,
                        34, 0, 0]  # fmt: skip
  assert row.prompt == [1] * 8 + [2] * 8 + [0] * 2
  assert row.segment == [0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 3, 3, 3, 3, 0, 0]
  assert row.positions == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 0, 0]
  assert row.source[3:8] == [2, 3, 4, 2, 6]
  assert row.source[12:16] == [11, 12, 13, 14]
  assert row.weights[:8] == [0, 0, 0, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_a_group_that_fits_a_row_has_one_copy_of_its_prompt():
  r = make([5, 4, 3, 6], [8, 8, 8, 8], [2] * 18)
  packed, _ = pack(r, row_length=20)
  _, copies = read_back(packed)
  assert copies == 4
  # 40 rollouts of one prompt and 12 a row: four copies, not forty.
  _, copies = read_back(pack(make([40], [4], [2] * 40), row_length=28)[0])
  assert copies == 4


def test_the_order_of_rollouts_does_not_matter():
  r = make([3, 5, 4], [4, 6, 2], seed=8)
  a, b = pack(r)[0], pack(shuffled(r))[0]
  assert read_back(a)[0] == read_back(b)[0]
  assert a.prompt.any(-1).sum() == b.prompt.any(-1).sum()


def brute_force_mask(prompt, segment):
  """packed_mask, written out pair by pair."""
  rows, t = prompt.shape
  mask = np.zeros((rows, t, t), bool)
  for r in range(rows):
    for i in range(t):
      for j in range(i + 1):
        if prompt[r, i] == 0 or prompt[r, i] != prompt[r, j]:
          continue
        mask[r, i, j] = segment[r, j] in (0, segment[r, i])
  return mask


@pytest.mark.parametrize("case", CASES)
def test_the_mask_equals_brute_force(case):
  packed, _ = pack(CASES[case])
  for prompt, segment in zip(packed.prompt, packed.segment):
    expected = brute_force_mask(prompt, segment)
    np.testing.assert_array_equal(
      packing.packed_mask(prompt, segment), expected
    )
    np.testing.assert_array_equal(
      packing.packed_mask(jnp.asarray(prompt), jnp.asarray(segment)), expected
    )


SIZES = Sizes(
  layers=2, width=16, heads=4, kv_heads=2, head_dim=8, ffn=24, vocab=19,
  qkv_bias=True, tied=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
  graph, params = transformer.create(SIZES, 3)
  # A fresh head is nearly flat: any attention would give the same numbers.
  params.head[...] = params.head[...] * 40
  return graph, params


def unpacked_logprobs(graph, params, r, temperature):
  """A plain causal forward over each prompt and completion on its own."""
  from flax import nnx

  net = nnx.merge(graph, params)
  longest = max(len(p) for p in r.prompts) + int(r.lengths.max())

  @jax.jit
  def forward(tokens):
    positions = jnp.arange(longest)[None]
    hidden, _ = net(tokens[None], positions, attention.causal_attend)
    return jax.nn.log_softmax(net.logits(hidden)[0] / temperature)

  for i, (g, n) in enumerate(zip(r.group, r.lengths)):
    sequence = np.concatenate([r.prompts[g], r.tokens[i, :n]])
    padded = np.zeros(longest, np.int32)
    padded[: len(sequence)] = sequence
    first = len(r.prompts[g])
    at = np.arange(first, len(sequence))
    yield np.asarray(forward(padded))[at - 1, sequence[at]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_an_unpacked_forward(model, temperature):
  graph, params = model
  r = shuffled(make([1, 3, 7, 2], [4, 1, 6, 3], seed=11))
  packed, used = pack(r)
  assert used > 1
  updater = update.Updater(
    graph,
    update.Objective(temperature=temperature),
    optimizer.OptimizerOptions(),
  )
  scored = np.asarray(updater.score(params, packed, used))
  assert not scored[packed.segment == 0].any()
  layout = packing.plan(
    r.group, r.lengths, np.array([len(p) for p in r.prompts]), 24
  )
  rows = scored.reshape(-1, 24)
  spread = []
  for i, expected in enumerate(unpacked_logprobs(graph, params, r, temperature)):
    start = layout.start[i]
    got = rows[layout.row[i], start : start + r.lengths[i]]
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)
    spread.extend(expected)
  assert np.ptp(spread) > 1  # The numbers compared are not all alike.


@pytest.mark.parametrize("sigma, prompt", [(1.0, 64), (1.5, 32), (0.6, 256)])
def test_heavy_tailed_lengths_fill_the_rows(sigma, prompt):
  rng = np.random.default_rng(0)
  # Group sizes of VIGOR's default schedule, log-normal completions to 1024.
  counts = np.array([2] * 32 + [6] * 16 + [14] * 8 + [30] * 8)
  n = int(counts.sum())
  lengths = np.clip(np.exp(rng.normal(4.5, sigma, n)), 1, 1024).astype(int)
  prompts = rng.integers(prompt // 2, prompt + 1, len(counts))
  group = np.repeat(np.arange(len(counts)), counts)
  layout = packing.plan(group, lengths, prompts, 2048)
  copies = np.zeros((layout.rows, 2048), bool)
  for row, start, size in zip(layout.row, layout.start, lengths):
    assert not copies[row, start : start + size].any()
    copies[row, start : start + size] = True
  for row, start, g in zip(layout.copy_row, layout.copy_start,
                           layout.copy_group):  # fmt: skip
    assert not copies[row, start : start + prompts[g]].any()
    copies[row, start : start + prompts[g]] = True
  assert copies.mean() >= 0.85
  # Unpacked, each rollout in a row of its own with its own prompt: far less.
  assert (lengths + prompts[group]).sum() / (n * (1024 + prompt)) < 0.4


def test_useful_share_counts_the_micro_batches_that_are_used():
  packed, used = pack(make([1, 1], [4, 4], [4, 4]), row_length=8,
                      rows_per_micro=2, max_micro=5)  # fmt: skip
  assert used == 1 and packing.useful_share(packed) == 1.0
  packed, used = pack(make([1], [2], [2]), row_length=8, rows_per_micro=2,
                      max_micro=5)  # fmt: skip
  assert used == 1 and packing.useful_share(packed) == 0.25


def test_no_rollouts():
  r = make([0], [3])
  packed, used = pack(r, max_micro=2)
  assert used == 0 and packing.useful_share(packed) == 0.0
  assert packed.tokens.shape == (2, 3, 24)
  assert not any(a.any() for a in packed)


def test_exactly_a_row_fits_and_one_token_more_is_refused():
  packed, _ = pack(make([1], [10], [14]), row_length=24)
  assert (packed.prompt > 0).sum() == 24
  with pytest.raises(
    ValueError, match="group 1 needs 25 tokens.*policy.row_length=24"
  ):
    pack(make([1, 1], [10, 10], [14, 15]), row_length=24)


def test_more_rows_than_the_micro_batches_hold_are_refused():
  with pytest.raises(ValueError, match="5 packed rows needed"):
    pack(make([1] * 5, [12] * 5, [12] * 5), row_length=24, max_micro=1)


@pytest.mark.parametrize("count, longest, row_length, rows_per_micro", [
  (1024, 3072, 4096, 16), (512, 8192, 10240, 8)])
def test_rows_are_full_on_heavy_tailed_lengths(count, longest, row_length,
                                               rows_per_micro):
  """The published shapes; a mean of a quarter of the longest completion."""
  rng = np.random.default_rng(0)
  groups = count // 8
  lengths = np.minimum(np.ceil(
    longest / 6 * rng.lognormal(0, 1, count)), longest).astype(int)
  assert 0.2 < lengths.mean() / longest < 0.3
  group = np.repeat(np.arange(groups), rng.multinomial(
    count, rng.dirichlet(np.ones(groups))))
  prompts = rng.integers(64, row_length - longest, groups)
  layout = packing.plan(group, lengths, prompts, row_length)
  used = lengths.sum() + prompts[layout.copy_group].sum()
  micro = -(-layout.rows // rows_per_micro)
  assert used / (micro * rows_per_micro * row_length) > 0.9
  assert (lengths + prompts[group]).mean() / row_length < 0.4  # Padded rows.
