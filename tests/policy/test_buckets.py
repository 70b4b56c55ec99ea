"""Rows of several lengths: where rollouts go, and that nothing else changes."""

import collections
import functools
import types

import jax
import numpy as np
import pytest

from vigor_jax import compilation
from vigor_jax.aot import cost
from vigor_jax.policy import buckets, optimizer, packing, transformer, update
from vigor_jax.policy.sizes import Sizes

SIZES = Sizes(layers=1, width=8, heads=2, kv_heads=1, head_dim=4, ffn=8,
              vocab=11)  # fmt: skip
GRAPH = transformer.abstract(SIZES)[0]
# After one update its trace is the gradient.
PLAIN = optimizer.OptimizerOptions(name="sgd", b1=0.5, clip_norm=0.0)
MOST = 24  # Rollouts.
KL = 0.3
ONE, THREE = buckets.shapes(16, 1), buckets.shapes(16, 1, (4, 8))
assert THREE.lengths == (4, 8, 16) and THREE.rows == (4, 2, 1)
assert THREE.micro_batches(MOST) == ((6, 4, 4), (12, 2, 8), (24, 1, 16))

LENGTHS = {
  "short": lambda rng, n: np.ones(n, int),
  "long": lambda rng, n: np.full(n, 12),
  "mixed": lambda rng, n: rng.choice([1, 2, 3, 5, 12], n, p=[0.4, *[0.15] * 4]),
  "none": lambda rng, n: np.ones(0, int),
}


def rollouts(kind, seed=0, count=MOST, prompt=3):
  """What packing takes of rollouts, by name."""
  rng = np.random.default_rng(seed)
  lengths = LENGTHS[kind](rng, count)
  n = len(lengths)
  prompts = [rng.integers(0, 11, rng.integers(1, prompt + 1), np.int32)
             for _ in range(5)]
  shape = n, 12
  return dict(
    group=rng.integers(0, 5, n), prompts=prompts,
    tokens=rng.integers(0, 11, shape, np.int32), lengths=lengths,
    advantages=rng.normal(size=n).astype(np.float32),
    weights=rng.random(n).astype(np.float32) + 0.2,
    sampler_logprobs=(-2.4 + 0.2 * rng.normal(size=shape)).astype(np.float32))


def pack(given, shapes):
  return buckets.pack(**given, shapes=shapes, rollouts=MOST)


# ------------------------------------------------------------------ the plan


def heavy(seed, count=300, longest=96):
  """(group, lengths, prompt lengths) of a step with a heavy tail."""
  rng = np.random.default_rng(seed)
  group = np.sort(rng.integers(0, 40, count))
  lengths = np.clip(np.exp(rng.normal(2.3, 1, count)), 1, longest).astype(int)
  return group, lengths, rng.integers(4, 33, 40)


def micro_batches(found, shapes):
  return [-(-layout.rows // rows) for (_, layout), rows in zip(
    found, shapes.rows)]


@pytest.mark.parametrize("shorter", [(64,), (32, 64), (16, 32, 64)])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_shorter_rows_never_need_more_micro_batches(rows, shorter):
  shapes, moved = buckets.shapes(128, rows, shorter), 0
  for seed in range(8):
    group, lengths, prompts = heavy(seed)
    alone = packing.plan(group, lengths, prompts, 128)
    found = buckets.plan(group, lengths, prompts, shapes)
    used = micro_batches(found, shapes)
    assert sum(used) <= -(-alone.rows // rows)
    everyone = np.concatenate([members for members, _ in found])
    assert sorted(everyone) == list(range(len(group)))
    # Full ones, but for the shortest in use.
    partly = [bool(layout.rows % r) for (_, layout), r in zip(
      found, shapes.rows)]
    first = next(i for i, n in enumerate(used) if n)
    assert not any(partly[first + 1:])
    moved += sum(used[:-1])
  assert moved > 0


def test_a_rollout_lies_whole_in_a_row_of_its_bucket():
  group, lengths, prompts = heavy(3)
  shapes = buckets.shapes(128, 2, (32, 64))
  found = buckets.plan(group, lengths, prompts, shapes)
  assert sum(len(members) > 0 for members, _ in found) > 1
  for (members, layout), length in zip(found, shapes.lengths):
    taken = np.zeros((layout.rows, length), int)
    for c in range(len(layout.copy_group)):
      first = layout.copy_start[c]
      taken[layout.copy_row[c], first:first + prompts[layout.copy_group[c]]] += 1
    for i, member in enumerate(members):
      copy = layout.copy[i]
      assert layout.copy_group[copy] == group[member]
      assert layout.copy_row[copy] == layout.row[i]
      first = layout.start[i]
      assert first + lengths[member] <= length
      taken[layout.row[i], first:first + lengths[member]] += 1
    tokens = lengths[members].sum() + prompts[layout.copy_group].sum()
    assert taken.max(initial=0) <= 1 and taken.sum() == tokens
    assert taken.any(1).all()


def test_everything_goes_where_it_is_cheapest():
  # 8 rollouts of 4 tokens, prompts included: two micro-batches either way.
  group, prompts = np.arange(8), np.ones(8, int)
  lengths = np.full(8, 3)
  assert micro_batches(buckets.plan(group, lengths, prompts, THREE),
                       THREE) == [2, 0, 0]
  # Two of 7 fill a row of 16 to 14, and rows of 8 to 7.
  assert micro_batches(buckets.plan(group, lengths + 3, prompts, THREE),
                       THREE) == [0, 4, 0]
  # Three of 5 share a row of 16, each takes one of 8: two are left for those.
  assert micro_batches(buckets.plan(group, lengths + 1, prompts, THREE),
                       THREE) == [0, 1, 2]


def test_the_count_of_micro_batches_comes_before_attention():
  # A long rollout leaves room for the short one: no micro-batch of its own.
  found = buckets.plan(np.array([0, 1]), np.array([10, 2]), np.array([1, 1]),
                       buckets.shapes(16, 1, (4,)))
  assert [len(members) for members, _ in found] == [0, 2]


def test_one_length_is_packing_itself():
  given = rollouts("mixed", 17)
  packed, used = pack(given, ONE)
  alone, count = packing.pack(**given, row_length=16, rows_per_micro=1,
                              max_micro=MOST)
  assert used == count and isinstance(packed, packing.Packed)
  for a, b in zip(packed, alone):
    np.testing.assert_array_equal(a, b)
  assert packing.useful_share(packed) == (packed.prompt[:used] > 0).mean()


@pytest.mark.parametrize("kind", LENGTHS)
def test_every_token_is_in_one_bucket(kind):
  given = rollouts(kind)
  packed, used = pack(given, THREE)
  assert [rows.tokens.shape for rows in packed] == list(
    THREE.micro_batches(MOST))
  found = collections.Counter()
  for rows, count in zip(packed, used):
    assert rows.prompt[:count].any((1, 2)).all()
    assert not rows.prompt[count:].any()
    live = rows.segment > 0
    found.update(zip(rows.tokens[live].tolist(), rows.weights[live].tolist(),
                     rows.sampler_logprobs[live].tolist()))
  wanted = collections.Counter(
    (int(t), float(w), float(p))
    for row, w, logprobs, n in zip(given["tokens"], given["weights"],
                                   given["sampler_logprobs"], given["lengths"])
    for t, p in zip(row[:n], logprobs[:n]))
  assert found == wanted
  slots = sum(16 * count for count in used)
  held = sum(np.count_nonzero(rows.prompt) for rows in packed)
  assert packing.useful_share(packed) == (held / slots if slots else 0)


def test_what_cannot_be_a_bucket():
  assert buckets.misfit(128, (32, 64)) is None
  assert buckets.misfit(127, ()) is None
  for bad in ((64, 32), (32, 32), (48,), (128,), (256,), (1,), (0,), (-2,)):
    assert "policy.row_length=128" in buckets.misfit(128, bad)
  assert "legal: () or some of none" in buckets.misfit(127, (5,))


# ---------------------------------------------------------------- the update


@functools.cache
def initial():
  params = transformer.create(SIZES, 0)[1]
  params.embed[...] = params.embed[...] * 30
  return jax.device_get(params)


def fresh():
  return jax.tree.map(jax.numpy.array, initial())


def other():
  """Parameters of a reference."""
  return jax.tree.map(lambda a: a * 1.1, fresh())


def flat(tree):
  return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])


def step(updater, packed, used, reference=None):
  """(gradient, metrics) of one update, scored where there is a reference."""
  scored = {}
  if reference is not None:
    scored = dict(old=updater.score(fresh(), packed, used),
                  reference=updater.score(reference, packed, used))
  state, metrics = updater.update(updater.init(fresh()), packed, used, 3.0,
                                  0.0, **scored)
  return flat(state.opt_state), update.to_host(metrics)


@pytest.mark.parametrize("kl", [
  pytest.param(0.0, marks=pytest.mark.slow), KL])
def test_the_gradient_is_that_of_one_length_and_nothing_compiles(kl):
  objective = update.Objective(old="trainer", kl_coef=kl)
  updater = update.Updater(GRAPH, objective, PLAIN)
  reference = other() if kl else None
  cases = [("mixed", seed) for seed in (17, 2, 8, 13, 20)]
  cases += [(kind, 0) for kind in ("short", "long", "none")]
  packs = [[pack(rollouts(*case), shapes) for shapes in (ONE, THREE)]
           for case in cases]
  # All of them in use at once, some, one, and none.
  assert {tuple(n > 0 for n in used) for _, (_, used) in packs} == {
    (True, True, True), (False, True, True), (True, False, True),
    (True, True, False), (False, False, True), (False, False, False)}
  for found in packs[0]:
    step(updater, *found, reference)
  compiled = compilation.count()
  for one, three in packs:
    (wanted, before), (gradient, after) = (
      step(updater, *found, reference) for found in (one, three))
    size = max(1, np.abs(wanted).max())
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=2e-6 * size)
    for name, value in after.items():
      assert value == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
  assert np.abs(step(updater, *packs[0][1], reference)[0]).max() > 0.01
  assert compilation.count() == compiled


def test_scores_lie_where_the_tokens_do():
  updater = update.Updater(
    GRAPH, update.Objective(old="trainer", kl_coef=KL), PLAIN)
  found = []
  for shapes in (ONE, THREE):
    packed, used = pack(rollouts("mixed", 17), shapes)
    scored = updater.score(fresh(), packed, used)
    pairs = []
    for rows, logprobs in zip(packing.each(packed), packing.each(scored)):
      assert logprobs.shape == rows.tokens.shape
      live = rows.segment > 0
      assert not np.asarray(logprobs)[~live].any()
      # The sampler's log-prob says which token it is.
      pairs += zip(rows.sampler_logprobs[live], np.asarray(logprobs)[live])
    found.append(np.array(sorted(pairs)))
  np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


def test_minibatches_are_steps_of_their_own():
  given = rollouts("mixed", count=20)
  config = types.SimpleNamespace(
    total_steps=1,
    policy=types.SimpleNamespace(minibatches=2, updates_per_step=1),
    optimizer=types.SimpleNamespace(learning_rate=0.05, warmup_steps=0,
                                    schedule="constant"))
  results = []
  for shapes in (ONE, THREE):
    parts = []
    for part in (np.arange(20) % 2 == 0, np.arange(20) % 2 == 1):
      some = {k: v if k == "prompts" else v[part] for k, v in given.items()}
      packed, used = pack(some, shapes)
      parts.append(types.SimpleNamespace(packed=packed, num_micro=used,
                                         denominator=5.0))
    objective = update.Objective(old="trainer", kl_coef=KL)
    updater = update.Updater(GRAPH, objective, PLAIN)
    state, metrics = update.run_updates(
      updater, updater.init(fresh()),
      types.SimpleNamespace(minibatches=parts), config, 0, other())
    metrics = update.averaged(metrics)
    assert metrics["ratio_max_deviation"] > 0.01 and metrics["kl"] > 1e-4
    results.append(flat(state.params))
  np.testing.assert_allclose(*results, rtol=0, atol=1e-4)


# ------------------------------------------------------------ ahead of time


@pytest.mark.parametrize("program", [
  "score", pytest.param("update", marks=pytest.mark.slow)])
def test_the_cost_counts_each_length_by_itself(program):
  updater = update.Updater(GRAPH, update.Objective(), PLAIN)
  packed, used = pack(rollouts("mixed", 17), THREE)
  state, numbers = updater.init(fresh()), tuple(map(np.int32, used))
  if program == "score":
    traced = updater.programs.score.trace(state.params, packed, numbers)
  else:
    old = tuple(rows.sampler_logprobs for rows in packed)
    traced = updater.programs.update.trace(
      state, packed, old, old, numbers, np.float32(1), np.float32(1))
  text = traced.lower().compile().as_text()
  names = [packing.scope(rows) for rows in packed]

  def costs(*counts):
    trips = dict(zip(names, counts)),
    return np.array([cost.flops(traced.jaxpr, trips),
                     cost.of_text(text, 1, trips).hbm_bytes])

  nothing = costs(0, 0, 0)
  alone = [costs(*row) - nothing for row in np.eye(3, dtype=int)]
  # As many tokens: products cost the same, attention more in longer rows.
  assert (np.diff(np.array(alone)[:, 0]) > 0).all()
  np.testing.assert_allclose(costs(2, 0, 3) - nothing,
                             2 * alone[0] + 3 * alone[2], rtol=1e-6)
  with pytest.raises(ValueError, match="none of the scopes rows_of_4"):
    cost.of_text(text, 1, ({names[0]: 1},))
