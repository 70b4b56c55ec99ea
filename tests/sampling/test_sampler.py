"""The sampler as its callers see it: requests in, rows out."""

import heapq
import types

import jax
import numpy as np
import pytest
from sampling_helpers import (
  draw,
  gather,
  make,
  model,
  prompts,
  rollouts,
  same,
)

from vigor_jax import compilation
from vigor_jax.policy import transformer


@pytest.fixture(scope="module")
def policy():
  return model()


def uniform_model():
  """All logits equal: every token has probability 1 / 100."""
  sizes = transformer.Sizes(1, 8, 1, 1, 8, 8, 100, tied=True)
  graph, params = transformer.create(sizes, 0)
  params.embed[...] = params.embed[...] * 0
  return sizes, graph, params


def test_rows_of_a_uniform_distribution_differ_and_replay():
  sizes, graph, params = uniform_model()
  sampler = make(
    graph, sizes, stop_ids=(100,), slots=8, max_new_tokens=16, chunk=4
  )
  requests = [(np.zeros(8, int), np.zeros(8, int), np.arange(8))]
  one = draw(sampler, params, texts=prompts(1), requests=requests)
  again = draw(sampler, params, texts=prompts(1), requests=requests)
  later = draw(sampler, params, step=1, texts=prompts(1), requests=requests)
  rows = {tuple(r["tokens"]) for r in one.values()}
  assert len(rows) == 8
  assert all(len(row) == 16 for row in rows)
  same(one, again, atol=0)
  assert not rows & {tuple(r["tokens"]) for r in later.values()}
  for row in one.values():
    np.testing.assert_allclose(row["logprobs"], -np.log(100), atol=1e-5)


def test_rows_are_zero_past_their_ends():
  sizes, graph, params = uniform_model()
  sampler = make(
    graph, sizes, stop_ids=tuple(range(90, 100)), slots=4, max_new_tokens=16,
    chunk=4,
  )  # fmt: skip
  sampler.begin(0)
  sampler.prefill(params, [0], prompts(1))
  sampler.request(np.zeros(8, int), np.zeros(8, int), np.arange(8))
  lengths = []
  for rows in sampler.decode(params):
    past = np.arange(rows.tokens.shape[1]) >= rows.lengths[:, None]
    assert past.any()
    for name in ("tokens", "logprobs", "processed_logprobs"):
      values = getattr(rows, name)
      assert not values[past].any(), name
      assert (values[~past] != 0).all() or name == "tokens"
    lengths.extend(rows.lengths)
  assert len(lengths) == 8 and min(lengths) < 16


def test_a_stream_of_its_own_gives_other_numbers_at_the_same_step():
  sizes, graph, params = uniform_model()
  sampler = make(graph, sizes, stop_ids=(100,))
  drawn = []
  for stream in (0, 1):
    sampler.begin(3, stream=stream)
    sampler.prefill(params, [0], prompts(1))
    sampler.request(np.zeros(4, int), np.zeros(4, int), np.arange(4))
    drawn.append(gather(sampler.decode(params)))
  assert all(
    (drawn[0][k]["tokens"] != drawn[1][k]["tokens"]).any() for k in drawn[0]
  )


@pytest.mark.parametrize(
  "changes",
  [
    dict(slots=1),
    dict(slots=7, chunk=2, widths=(2, 4), chunks_per_dispatch=2),
    dict(slots=24, chunk=9),  # a completion fits one chunk: no cache
    dict(slots=3, chunk=1, prefill_batch=3, prompt_buckets=(2, 8)),
    dict(prefill_batch=4, few_prompts=1),
    dict(prefixes=17, queue=40, chunks_per_dispatch=1),
  ],
)
def test_the_same_rollout_whatever_the_shapes(policy, changes):
  graph, params = policy
  same(draw(make(graph), params), draw(make(graph, **changes), params))


def test_decode_steps_are_those_of_the_list_schedule():
  # A free slot takes the next rollout at once where a chunk is one step; a
  # round begins when the last row of the one before has ended.
  sizes, graph, params = uniform_model()
  sampler = make(
    graph, sizes, stop_ids=(100,), slots=5, chunk=1, max_new_tokens=16,
    queue=60,
  )  # fmt: skip
  rng, expected = np.random.default_rng(0), 0
  sampler.begin(0)
  sampler.prefill(params, [0], prompts(1))
  for part in np.split(np.arange(60), [20, 38]):
    lengths = np.minimum(rng.geometric(0.2, len(part)), 16)
    ends = [0] * 5
    for length in lengths:
      heapq.heappush(ends, heapq.heappop(ends) + int(length))
    expected += max(ends)
    zeros = np.zeros_like(part)
    sampler.request(zeros, zeros, part, max_new_tokens=lengths)
    assert sum(len(r.group) for r in sampler.decode(params)) == len(part)
    assert sampler.decode_steps == expected


def test_prompts_are_prefilled_with_the_least_padding(policy):
  graph, params = policy
  sampler, sizes = make(graph, prefill_batch=8, few_prompts=2), []
  run = sampler._prefill
  sampler._prefill = lambda *args: sizes.append(len(args[2])) or run(*args)
  for count, expected in {
    1: [2], 3: [2, 2], 6: [2, 2, 2], 7: [8], 8: [8]
  }.items():  # fmt: skip
    sampler.prefill(params, range(count), [np.array([5])] * count)
    assert sizes == expected
    sizes.clear()
  assert [sampler._batch(n) for n in (9, 20)] == [8, 8]


@pytest.mark.parametrize("committed", [False, True])
def test_nothing_compiles_after_the_warm_up(policy, committed):
  # Sizes of its own, so that no other test has compiled them.
  graph, params = policy
  if committed:  # as what comes out of a checkpoint is
    params = jax.device_put(params, jax.devices()[0])
  sampler = make(
    graph, prefill_batch=6, few_prompts=3, slots=11 + committed
  )  # fmt: skip
  sampler.warm_up(params)
  before = compilation.count()
  for count in (2, 6, 2, 6):
    sampler.prefill(params, range(count), [np.array([5])] * count)
    sampler.request(np.zeros(2, int), np.zeros(2, int), np.arange(2))
    gather(sampler.decode(params))
  assert compilation.count() == before


def test_weights_are_prepared_once_for_each_set_of_parameters(policy):
  graph, params = policy
  sampler, made = make(graph), []
  prepare = sampler._weights.prepare

  def counted(params):
    made.append(params)
    return prepare(params)

  others = jax.tree.map(lambda a: a * 1.5, params)
  expected = [draw(make(graph), p) for p in (params, others)]
  sampler._weights = types.SimpleNamespace(prepare=counted, small=True)
  sampler.look_ahead(params)
  assert made == [params]
  same(draw(sampler, params), expected[0])
  assert made == [params]
  same(draw(sampler, others), expected[1])
  sampler.look_ahead(others)
  # What lies in a tree may have changed by the next step.
  jax.tree.map(
    lambda to, a: to.set_value(a), others, params,
    is_leaf=lambda x: hasattr(x, "set_value"),
  )  # fmt: skip
  same(draw(sampler, others), expected[0])
  assert len(made) == 3
  sampler._weights.small = False
  sampler.look_ahead(jax.tree.map(lambda a: a * 2, params))
  assert len(made) == 3


def test_the_same_rollout_whatever_the_rounds_and_the_order(policy):
  graph, params = policy
  whole = draw(make(graph), params)
  prefix, position, sample = rollouts()
  sampler = make(graph)
  for seed in range(2):
    order = np.random.default_rng(seed).permutation(len(prefix))
    parts = np.split(order, [3, 4, 15])
    requests = [(prefix[p], position[p], sample[p]) for p in parts]
    same(whole, draw(sampler, params, requests=requests))


def test_the_same_rollout_whatever_row_its_prompt_is_kept_in(policy):
  graph, params = policy
  texts = prompts()
  prefix, position, sample = rollouts()
  whole = draw(make(graph), params)
  moved = draw(
    make(graph),
    params,
    texts=texts[::-1],
    requests=[(5 - prefix, position, sample)],
  )
  same(whole, {(5 - g, s): row for (g, s), row in moved.items()})


def test_mixed_lengths_equal_single_runs(policy):
  graph, params = policy
  texts = prompts()
  whole = draw(make(graph), params)
  single = {}
  sampler = make(graph, slots=1, prefill_batch=1)
  for i, text in enumerate(texts):
    request = (np.zeros(4, int), np.full(4, 1000 + i), np.arange(4))
    rows = draw(sampler, params, texts=[text], requests=[request])
    single.update({(i, s): row for (_, s), row in rows.items()})
  same(whole, single)


def test_nothing_compiles_on_a_second_pass(policy):
  graph, params = policy
  sampler = make(graph, slots=3, chunk=2, max_new_tokens=7)
  before = compilation.count()
  sampler.warm_up(params)
  # A prefill per bucket and decoding; the rest are the small programs that
  # empty the stores.
  warm = compilation.count() - before
  assert warm >= 3
  rng = np.random.default_rng(0)
  before = compilation.count()
  for step in range(4):
    count = int(rng.integers(1, 8))
    requests, used = [], 0
    for size in rng.integers(1, 8, 3):
      group = rng.integers(0, count, size)
      requests.append((group, group, np.arange(used, used + size)))
      used += size
    draw(
      sampler,
      params,
      step=step,
      texts=prompts(count),
      requests=requests,
      temperature=float(rng.random()),
      top_k=int(rng.integers(0, 4)),
      top_p=float(rng.random()),
      min_p=float(rng.random()) / 10,
    )
  assert compilation.count() == before


def test_a_prompt_of_the_limit_fits_and_one_more_token_is_refused(policy):
  graph, params = policy
  sampler = make(graph)
  sampler.begin(0)
  sampler.prefill(params, [0], [np.arange(2, 10, dtype=np.int32)])
  done = sampler.prefilled
  with pytest.raises(ValueError, match="group 3 has 9 tokens.*1 to 8"):
    sampler.prefill(
      params, [2, 3], [np.array([2]), np.arange(2, 11, dtype=np.int32)]
    )
  assert sampler.prefilled == done == 1
  with pytest.raises(ValueError, match="0 tokens"):
    sampler.prefill(params, [0], [np.zeros(0, np.int32)])


def test_more_rollouts_than_the_queue_holds_are_refused(policy):
  graph, params = policy
  sampler = make(graph, queue=8)
  sampler.begin(0)
  sampler.request(np.zeros(5, int), np.zeros(5, int), np.arange(5))
  with pytest.raises(ValueError, match="9 rollouts.*holds 8"):
    sampler.request(np.zeros(4, int), np.zeros(4, int), np.arange(4))


@pytest.mark.parametrize(
  "changes, match",
  [
    (dict(slots=-1), "slots"),
    (dict(chunk=0), "chunk"),
    (dict(prompt_buckets=()), "prompt_buckets"),
    (dict(prompt_buckets=(8, 4)), "prompt_buckets"),
    (dict(stop_ids=()), "stop id"),
  ],
)
def test_settings_that_cannot_work_are_refused(policy, changes, match):
  with pytest.raises(ValueError, match=match):
    make(policy[0], **changes)


def test_stop_tokens_end_a_row_and_belong_to_it(policy):
  graph, params = policy
  stops = (1, 4, 9, 17)
  whole = draw(make(graph, stop_ids=stops), params)
  ends = set()
  for row in whole.values():
    tokens, stopped = row["tokens"], np.isin(row["tokens"], stops)
    assert not stopped[:-1].any()
    assert row["truncated"] == (not stopped[-1])
    assert stopped[-1] or len(tokens) == 9
    if stopped[-1]:
      ends.add(int(tokens[-1]))
  assert len(ends) > 1, "several stop ids end rows"
  assert any(r["truncated"] for r in whole.values())
  # A stop id only cuts: up to there the rollout is the one without it.
  free = draw(make(graph, stop_ids=(99,)), params)
  for key, row in whole.items():
    n = len(row["tokens"])
    np.testing.assert_array_equal(row["tokens"], free[key]["tokens"][:n])


def test_a_stop_at_the_length_limit_is_not_a_truncation(policy):
  graph, params = policy
  free = draw(make(graph, stop_ids=(99,)), params)
  key, row = next(iter(free.items()))
  first = int(np.flatnonzero(row["tokens"] == row["tokens"][-1])[0])
  cut = draw(
    make(graph, stop_ids=(int(row["tokens"][-1]),), max_new_tokens=first + 1),
    params,
  )
  assert len(cut[key]["tokens"]) == first + 1
  assert not cut[key]["truncated"]


def test_settings_are_per_row(policy):
  graph, params = policy
  prefix, position, sample = rollouts()
  sampler = make(graph)
  plain = draw(sampler, params)
  greedy = np.arange(len(prefix)) == 5
  mixed = draw(
    sampler,
    params,
    temperature=np.where(greedy, 0.0, 1.0),
    top_k=np.where(np.arange(len(prefix)) == 9, 1, 0),
  )
  keys = list(zip(prefix.tolist(), sample.tolist()))
  odd = {keys[5], keys[9]}
  same(
    {k: v for k, v in plain.items() if k not in odd},
    {k: v for k, v in mixed.items() if k not in odd},
  )
  zero = draw(sampler, params, temperature=0.0)
  for key in odd:
    np.testing.assert_array_equal(zero[key]["tokens"], mixed[key]["tokens"])
    assert np.isfinite(mixed[key]["logprobs"]).all()
    np.testing.assert_array_equal(mixed[key]["processed"], 0.0)


def test_logical_time_is_the_chunk_in_which_a_row_ended(policy):
  graph, params = policy
  sampler = make(graph, slots=24, chunk=2, stop_ids=(1, 4, 9))
  for key, row in draw(sampler, params).items():
    # Everyone began in chunk 0 (24 slots, 24 rollouts; 2 steps a chunk).
    assert row["end_chunk"] == (len(row["tokens"]) - 1) // 2, key
    assert row["slot"] == 4 * key[0] + key[1]


def test_logical_time_does_not_depend_on_dispatches(policy):
  graph, params = policy
  plain = draw(make(graph), params)
  sampler, order = make(graph, chunks_per_dispatch=2), []
  dispatch, collect = sampler._dispatch, sampler._collect
  sampler._dispatch = lambda *a: order.append("run") or dispatch(*a)
  sampler._collect = lambda *a: order.append("read") or collect(*a)
  other = draw(sampler, params)
  for key in plain:
    assert plain[key]["end_chunk"] == other[key]["end_chunk"]
    assert plain[key]["slot"] == other[key]["slot"]
  # The device has the next chunks to run while the host reads the last ones.
  assert len(order) > 8
  assert order == ["run"] + ["run", "read"] * (len(order) // 2 - 1) + ["read"]


def test_utilisation_counts_useful_row_steps(policy):
  graph, params = policy
  sampler = make(graph)
  drawn = draw(sampler, params)
  tokens = sum(len(r["tokens"]) for r in drawn.values())
  assert sampler.useful_steps == tokens
  assert sampler.utilisation == pytest.approx(
    tokens / (4 * sampler.decode_steps)
  )
  assert 0.5 < sampler.utilisation <= 1


def test_a_prompt_is_prefilled_once_per_step(policy):
  graph, params = policy
  sampler = make(graph)
  prefix, position, sample = rollouts()
  draw(
    sampler,
    params,
    requests=[(prefix[s::2], position[s::2], sample[s::2]) for s in (0, 1)],
  )
  assert sampler.prefilled == 6


def test_raw_log_probs_do_not_know_the_truncation(policy):
  graph, params = policy
  sampler = make(graph)
  cut = draw(sampler, params, top_p=0.7)
  differ = 0
  for row in cut.values():
    assert (row["processed"] >= row["logprobs"] - 1e-6).all()
    differ += (row["processed"] > row["logprobs"] + 0.05).sum()
  assert differ > 20
