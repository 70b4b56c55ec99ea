"""The laboratory's world: skills, prompts, streams, addressed rollouts."""

import numpy as np
import pytest
from vigor_jax.lab import world as world_lib
from vigor_jax.lab.world import STEPS, Stream, World
from vigor_jax.tasks import drawn


def test_presets_are_those_of_the_drawn_tasks():
  assert world_lib.PRESETS == drawn.DIFFICULTIES


def test_shares_of_easy_and_hard_prompts():
  world = World.preset("sparse_signal")
  chains = world.draw(np.random.default_rng(0), 20_000)
  fact = chains < world.facts
  inside = chains < world.skills
  six_facts = fact.sum(1) == STEPS
  no_fact = ~fact.any(1)
  # Plain prompts have no fact with probability mean (2/3)^d = .3041, and six
  # facts with 1/6 (1/3)^6 = .0002.
  assert no_fact.mean() == pytest.approx(0.75 + 0.1 * 0.3041, abs=0.01)
  assert six_facts.mean() == pytest.approx(0.15, abs=0.01)
  # Padding is a tail.
  assert (np.diff(inside.astype(int), axis=1) <= 0).all()


def test_warm_start_masters_what_it_should():
  world = World()
  logits = world.initial(3)
  p = np.exp(logits[:, 0]) / np.exp(logits).sum(1)
  assert p[world.facts :].min() > 0.95
  assert 0.15 < p[: world.facts].mean() < 0.45
  assert np.array_equal(logits, World().initial(3))


def test_success_is_the_product_of_the_steps():
  world = World(facts=2, mastered=1)
  right = np.array([0.5, 0.2, 0.9])
  chains = np.array([[0, 1, 2, 3, 3, 3], [2, 2, 3, 3, 3, 3]])
  np.testing.assert_allclose(world.success(right, chains), [0.09, 0.81])


def test_prompts_that_were_not_consumed_come_again():
  stream = Stream(World(), 0)
  first = stream.peek(6)
  stream.advance(np.array([True, False, True, False]))
  after = stream.peek(4)
  assert after.positions.tolist() == [1, 3, 4, 5]
  np.testing.assert_array_equal(after.chains, first.chains[[1, 3, 4, 5]])
  stream.advance(np.ones(4, bool))
  assert stream.peek(2).positions.tolist() == [6, 7]


def test_a_fixed_set_comes_again_in_another_order():
  stream = Stream(World(num_prompts=10), 0)
  view = stream.peek(30)
  assert view.positions.tolist() == list(range(30))
  epochs = view.uids.reshape(3, 10)
  assert (np.sort(epochs, axis=1) == np.arange(10)).all()
  assert (epochs[0] != epochs[1]).any()
  for uid in range(10):
    rows = view.chains[view.uids == uid]
    assert (rows == rows[0]).all()


def test_a_stream_without_end_does_not_repeat_positions():
  stream = Stream(World(), 1)
  seen = []
  for _ in range(5):
    seen.append(stream.peek(2000).positions.copy())
    stream.advance(np.ones(2000, bool))
  assert np.concatenate(seen).tolist() == list(range(10_000))


def test_uniforms_are_addressed_and_uniform():
  seeds, positions = np.arange(400) % 7, np.arange(400)
  samples = np.arange(400) % 5
  u = world_lib.uniforms(seeds, positions, samples, 50)
  alone = world_lib.uniforms(seeds[[9]], positions[[9]], samples[[9]], 50)
  np.testing.assert_array_equal(u[[9]], alone)
  assert len(np.unique(u)) == u.size
  # 20000 numbers: mean within 5 standard errors, cells within 5 sigma.
  assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * u.size)
  counts = np.histogram(u, 20, (0, 1))[0]
  assert np.abs(counts - u.size / 20).max() < 5 * np.sqrt(u.size / 20)
  # Neighbouring addresses are not correlated.
  for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
    rho = np.corrcoef(a.ravel(), b.ravel())[0, 1]
    assert abs(rho) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize(
  "fields, text",
  [
    ({"easy": 0.8, "hard": 0.3}, "easy=0.8"),
    ({"reward": "dense"}, "dense"),
    ({"noise": 0.7}, "noise=0.7"),
    ({"facts": 0}, "facts"),
    ({"num_prompts": -1}, "num_prompts=-1"),
    ({"features": -2}, "features=-2"),
  ],
)
def test_wrong_worlds_are_refused(fields, text):
  with pytest.raises(ValueError, match=text):
    World(**fields)


def test_an_unknown_preset_is_refused():
  with pytest.raises(ValueError, match="sparse_signal"):
    World.preset("sparse")
