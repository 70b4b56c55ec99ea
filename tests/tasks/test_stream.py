"""The prompt stream: order, hand-back, epochs, shards, resume."""

import json

import numpy as np
import pytest

from vigor_jax.tasks import stream


def fixed(n):
  ids = np.arange(n)
  return stream.FixedSource(
    stream.Prompts(
      ids,
      ids + 100,
      [np.array([i], np.int32) for i in ids],
      [f"p{i}" for i in ids],
      [f"a{i}" for i in ids],
      [{"level": int(i)} for i in ids],
    )
  )


def fresh():
  def draw(seed, block):
    values = stream.addressed_rng(seed, "t", block).integers(
      0, 10**9, stream.BLOCK
    )
    positions = np.arange(stream.BLOCK) + block * stream.BLOCK
    return stream.Prompts(
      positions,
      positions,
      [np.array([v], np.int32) for v in values],
      [str(v) for v in values],
      [str(v) for v in values],
      [{} for _ in values],
    )

  return stream.FreshSource(draw)


def take_all(s, k):
  prompts = s.peek(k)
  s.advance(np.ones(k, bool))
  return prompts


def test_addressed_rng_is_a_function_of_its_address():

  def draw(*a):
    return stream.addressed_rng(*a).integers(0, 2**62, 4).tolist()

  assert draw(1, "train", 5) == draw(1, "train", 5)
  seen = {
    tuple(draw(*a))
    for a in [(1, "train", 5), (2, "train", 5), (1, "warm", 5), (1, "train", 6)]
  }
  seen |= {tuple(draw(1, "train", 5, 1)), tuple(draw(1, "train", 0, 5))}
  assert len(seen) == 6


def test_addressed_rng_neighbours_do_not_overlap():
  a = stream.addressed_rng(0, "train", 0).integers(0, 2**62, 5000)
  b = stream.addressed_rng(0, "train", 1).integers(0, 2**62, 5000)
  assert not set(a.tolist()) & set(b.tolist())


@pytest.mark.parametrize("bad", [-1, 2**64])
def test_addressed_rng_refuses_what_it_cannot_address(bad):
  with pytest.raises(ValueError, match=f"seed.*{bad}"):
    stream.addressed_rng(bad, "train")
  with pytest.raises(ValueError, match="at most 8 letters"):
    stream.addressed_rng(0, "warm_start")


def test_unopened_prompts_return_to_the_head_in_order():
  s = stream.PromptStream(fresh(), seed=3)
  first = s.peek(5)
  assert first.positions.tolist() == [0, 1, 2, 3, 4]
  s.advance(np.array([1, 0, 1, 0, 0], bool))
  second = s.peek(4)
  assert second.positions.tolist() == [1, 3, 4, 5]
  assert second.texts[:3] == [first.texts[1], first.texts[3], first.texts[4]]
  s.advance(np.array([0, 1, 1, 0], bool))
  assert s.peek(4).positions.tolist() == [1, 5, 6, 7]
  assert s.state_dict()["next"] == 5
  assert s.state_dict()["returned"] == [1]


def test_a_shorter_peek_leaves_the_rest_of_the_returned():
  s = stream.PromptStream(fresh(), seed=3)
  s.peek(6)
  s.advance(np.array([0, 0, 0, 0, 0, 1], bool))
  assert s.peek(2).positions.tolist() == [0, 1]
  s.advance(np.array([0, 1], bool))
  assert s.peek(5).positions.tolist() == [0, 2, 3, 4, 6]


def test_peek_consumes_nothing():
  s = stream.PromptStream(fresh(), seed=0)
  assert s.peek(300).texts == s.peek(300).texts
  assert s.state_dict()["next"] == 0


def test_advance_takes_one_flag_per_peeked_prompt():
  s = stream.PromptStream(fresh(), seed=0)
  with pytest.raises(ValueError, match="last peek"):
    s.advance(np.ones(3, bool))
  s.peek(3)
  with pytest.raises(ValueError, match=r"\(3\).*\(4,\)"):
    s.advance(np.ones(4, bool))


def test_nothing_is_lost_or_doubled_under_random_consumption():
  rng = np.random.default_rng(0)
  s = stream.PromptStream(fresh(), seed=0)
  taken = []
  for _ in range(200):
    k = int(rng.integers(1, 40))
    prompts = s.peek(k)
    flags = rng.random(k) < 0.6
    taken += prompts.positions[flags].tolist()
    s.advance(flags)
  state = s.state_dict()
  assert len(set(taken)) == len(taken)
  assert sorted(taken + state["returned"]) == list(range(state["next"]))


def test_an_epoch_is_a_permutation_and_the_next_one_differs():
  s = stream.PromptStream(fixed(50), seed=1)
  epochs = [take_all(s, 50).uids.tolist() for _ in range(3)]
  for uids in epochs:
    assert sorted(uids) == list(range(100, 150))
  assert len({tuple(e) for e in epochs}) == 3
  assert s.epoch == 3.0
  other = stream.PromptStream(fixed(50), seed=2)
  assert take_all(other, 50).uids.tolist() != epochs[0]


def test_a_peek_across_an_epoch_boundary():
  s = stream.PromptStream(fixed(8), seed=1)
  joint = s.peek(20)
  again = stream.PromptStream(fixed(8), seed=1)
  parts = [take_all(again, n).uids for n in (8, 8, 4)]
  assert joint.uids.tolist() == np.concatenate(parts).tolist()
  assert joint.positions.tolist() == list(range(20))
  texts = [f"p{u - 100}" for u in joint.uids]
  assert joint.texts == texts


@pytest.mark.parametrize("before", [3, 8, 11, 16, 21])
@pytest.mark.parametrize("make", [lambda: fixed(8), fresh])
def test_resume_continues_the_same_row(make, before):
  """In the first epoch, exactly at its end, and in later ones."""
  rng = np.random.default_rng(before)
  undisturbed = stream.PromptStream(make(), seed=9)
  for _ in range(before):
    undisturbed.peek(1)
    undisturbed.advance(np.array([True]))
  flags = rng.random(5) < 0.5
  undisturbed.peek(5)
  undisturbed.advance(flags)
  undisturbed.peek(4)  # a step that was killed half way
  state = json.loads(json.dumps(undisturbed.state_dict()))
  resumed = stream.PromptStream(make(), seed=9)
  resumed.load_state_dict(state)
  for _ in range(4):
    a, b = undisturbed.peek(7), resumed.peek(7)
    assert a.texts == b.texts
    assert a.positions.tolist() == b.positions.tolist()
    flags = rng.random(7) < 0.5
    undisturbed.advance(flags)
    resumed.advance(flags)
  assert undisturbed.state_dict() == resumed.state_dict()


def test_a_record_of_another_run_is_refused():
  state = stream.PromptStream(fresh(), seed=1).state_dict()
  with pytest.raises(ValueError, match="seed is 1, this run's is 2"):
    stream.PromptStream(fresh(), seed=2).load_state_dict(state)
  with pytest.raises(ValueError, match="shard"):
    stream.PromptStream(fresh(), 1, 0, 2).load_state_dict(state)


@pytest.mark.parametrize("size,shards", [(8, 2), (7, 2), (12, 5), (3, 4)])
def test_shards_are_disjoint_and_complete(size, shards):
  streams = [
    stream.PromptStream(fixed(size), 4, i, shards) for i in range(shards)
  ]
  parts = [take_all(s, size) for s in streams]  # size * shards: whole epochs
  positions = np.concatenate([p.positions for p in parts])
  assert sorted(positions.tolist()) == list(range(size * shards))
  whole = stream.PromptStream(fixed(size), 4).peek(size * shards)
  uids = dict(zip(whole.positions.tolist(), whole.uids.tolist()))
  for part in parts:
    assert [uids[p] for p in part.positions.tolist()] == part.uids.tolist()


def test_shard_out_of_range():
  with pytest.raises(ValueError, match="shard=2 num_shards=2"):
    stream.PromptStream(fresh(), 0, 2, 2)


def test_an_empty_set_is_refused():
  with pytest.raises(ValueError, match="at least one prompt"):
    fixed(0)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("size", [100, 20_000])
def test_what_is_fetched_ahead_is_what_the_next_peek_draws(shards, size):
  """Also of peeks that take more blocks than are kept otherwise."""
  drawn, seen = [], []
  for ahead in (False, True):
    source = fresh()
    draw, own = source._draw, []
    source._draw = lambda *a, own=own, draw=draw: own.append(a) or draw(*a)
    s = stream.PromptStream(source, 5, shards - 1, shards)
    s.prefetch()  # Nothing was looked at: nothing to do.
    rng, texts = np.random.default_rng(0), []
    for _ in range(4):
      before = len(own)
      prompts = s.peek(size)
      assert not ahead or not before or len(own) == before
      if ahead:
        s.prefetch()
      texts.append(prompts.texts)
      s.advance(rng.random(size) < 0.9)
    drawn.append(own)
    seen.append(texts)
  assert seen[0] == seen[1]
  for own in drawn:
    assert len(own) == len(set(own))  # No block is drawn twice.
  only_fixed = stream.PromptStream(fixed(10), seed=0)
  only_fixed.peek(3)
  only_fixed.prefetch()
