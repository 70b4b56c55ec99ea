"""Adapters: they start as the base, learn its projected gradient, and resume."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from vigor_jax import checkpoints, train, warm_start
from vigor_jax.config import ConfigError
from vigor_jax.policy import lora, optimizer, packing, transformer, update
from vigor_jax.policy.sizes import Adapters, Sizes

SIZES = Sizes(layers=2, width=8, heads=2, kv_heads=1, head_dim=4, ffn=12,
              vocab=11, qkv_bias=True)  # fmt: skip
ADAPTERS = Adapters(rank=2, alpha=6.0)
GRAPH = transformer.abstract(SIZES)[0]
STEEP = optimizer.OptimizerOptions(name="sgd", b1=0.0, clip_norm=0.0)


@functools.cache
def batch():
  rng = np.random.default_rng(0)
  n = 8
  f = lambda *s: rng.normal(size=s).astype(np.float32)
  return packing.pack(
    np.repeat([0, 1], 4), [rng.integers(0, 11, k) for k in (3, 5)],
    rng.integers(0, 11, (n, 6)), rng.integers(1, 7, n), f(n), np.abs(f(n)),
    -np.abs(f(n, 6)), row_length=16, rows_per_micro=2, max_micro=4)


def made(sizes=SIZES, adapters=ADAPTERS, moved=True, **objective):
  """(updater of adapters, plain one, state whose B are not 0 if `moved`)."""
  objective = update.Objective(**objective)
  graph, base = transformer.create(sizes, 0)
  with_them = dataclasses.replace(sizes, adapters=adapters)
  updater = update.Updater(graph, objective, STEEP, adapted=with_them)
  plain = update.Updater(graph, objective, STEEP)
  state = updater.init(base, seed=3)
  if moved:
    trained, frozen = lora.split(state.params)
    trained = jax.tree.map(lambda a: a + 0.1 * jnp.cos(
      jnp.arange(a.size, dtype=jnp.float32)).reshape(a.shape), trained)
    state = update.TrainState(lora.join(trained, frozen), state.opt_state)
  return updater, plain, state


def flat(tree):
  return {k: np.asarray(a) for k, a in checkpoints.flatten(tree).items()}


def copy(tree):
  return jax.tree.map(jnp.array, tree)


def test_at_the_start_it_is_the_base():
  updater, plain, state = made(moved=False)
  base = transformer.create(SIZES, 0)[1]
  jax.tree.map(np.testing.assert_array_equal, updater.policy(state), base)
  np.testing.assert_array_equal(updater.score(state.params, *batch()),
                                plain.score(base, *batch()))
  # B is 0, A is not: the first gradient is of B alone.
  for path, a in flat(lora.split(state.params)[0]).items():
    assert a.dtype == np.float32 and a.any() == path.endswith("/a"), path


@pytest.mark.parametrize("dtype, param_dtype, remat", [
  pytest.param("float32", "float32", False, marks=pytest.mark.slow),
  ("bfloat16", "float32", True),
  pytest.param("bfloat16", "bfloat16", False, marks=pytest.mark.slow)])
def test_the_merged_policy_is_what_is_trained(dtype, param_dtype, remat):
  sizes = dataclasses.replace(SIZES, dtype=dtype, param_dtype=param_dtype,
                              layers=5 if remat else 2)
  updater, plain, state = made(sizes, remat=remat)
  merged = updater.policy(state)
  assert jax.tree.leaves(merged)[0].dtype == param_dtype
  ours = updater.score(state.params, *batch())
  np.testing.assert_array_equal(ours, plain.score(merged, *batch()))
  # The base, which a KL term refers to, is there too.
  base = transformer.create(sizes, 0)[1]
  np.testing.assert_array_equal(
    updater.score(updater.reference(state), *batch()),
    plain.score(base, *batch()))
  assert not np.array_equal(ours, plain.score(base, *batch()))


def test_merging_by_hand():
  a = np.arange(6, dtype=np.float32).reshape(3, 2)
  b = np.array([[1, 0], [0, 2]], np.float32)
  w = np.full((3, 2), 10, np.float32)
  np.testing.assert_array_equal(
    lora.merge(w, a, b, 0.5), [[10, 11], [11, 13], [12, 15]])


@pytest.mark.parametrize("targets", [
  pytest.param("q,k,v,o,gate,up,down", marks=pytest.mark.slow), "o,gate"])
def test_the_gradient_is_the_full_one_projected(targets):
  adapters = dataclasses.replace(ADAPTERS, targets=targets)
  updater, plain, state = made(adapters=adapters)
  before = flat(state.params)
  merged = updater.policy(state)
  old = flat(merged)
  moved, metrics = plain.update(plain.init(copy(merged)), *batch(), 3.0, 1.0)
  full = {k: old[k] - v for k, v in flat(moved.params).items()}
  state, ours = updater.update(state, *batch(), 3.0, 1.0)
  after, scale = flat(state.params), adapters.scale
  assert float(ours["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
  adapted = [p for p in before if p.endswith("_adapter/a")]
  assert len(adapted) == len(targets.split(","))
  for path in adapted:
    stem = path.removesuffix("/a")
    dw = full[stem.removesuffix("_adapter")]
    layers, rank = dw.shape[0], adapters.rank
    a, b = (before[f"{stem}/{k}"] for k in "ab")
    inputs = int(np.prod(a.shape[1:-1]))
    dw, a, b = (dw.reshape(layers, inputs, -1), a.reshape(layers, inputs, rank),
                b.reshape(layers, rank, -1))
    want = {"a": scale * np.einsum("lio,lro->lir", dw, b),
            "b": scale * np.einsum("lir,lio->lro", a, dw)}
    for k, gradient in want.items():
      found = (before[f"{stem}/{k}"] - after[f"{stem}/{k}"]).reshape(
        gradient.shape)
      np.testing.assert_allclose(
        found, gradient, rtol=0, atol=3e-6 * max(1, np.abs(gradient).max()))
  # The base has not moved, nor has it moments.
  for path in before:
    if "_adapter" not in path:
      np.testing.assert_array_equal(before[path], after[path], path)
  moments = update.Updater(
    GRAPH, update.Objective(), optimizer.OptimizerOptions(),
    adapted=updater.adapted).abstract_opt(merged)
  kept = [p for p in checkpoints.flatten(moments) if "count" not in p]
  assert len(kept) == 4 * len(adapted)
  assert all("_adapter/" in path for path in kept)


def test_the_size_of_the_change():
  updater, _, state = made()
  base, merged = (flat(tree) for tree in (
    transformer.create(SIZES, 0)[1], updater.policy(state)))
  names = [f"blocks/{n}" for n in ADAPTERS.names]
  norm = lambda trees: np.sqrt(sum(np.sum(np.square(t)) for t in trees))
  want = norm([merged[n] - base[n] for n in names]) / norm(
    [base[n] for n in names])
  assert float(lora.change(state.params, ADAPTERS.scale)) == pytest.approx(
    want, rel=1e-4)


@pytest.mark.parametrize("changes, message", [
  ({"rank": 2, "targets": "q,embed"}, "model.lora.targets: unknown.*'embed'"),
  ({"rank": 2, "targets": "q,q"}, "names a matrix twice"),
  ({"alpha": 8.0}, "model.lora.alpha=8.0 has no effect without"),
  ({"targets": "q"}, "model.lora.targets='q' has no effect without"),
])
def test_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    tiny_runs.config(**{f"model__lora__{k}": v for k, v in changes.items()})


def test_refused_where_nothing_is_low_about_the_rank(tmp_path):
  with pytest.raises(ConfigError, match="adapters are trained by stage=rl"):
    tiny_runs.config(model__lora__rank=2, stage="sft")
  with pytest.raises(ValueError, match="model.lora.rank: 8 .*legal: 1 to 7"):
    train.train(tiny_runs.config(model__lora__rank=8), str(tmp_path / "run"),
                quiet=True)


def test_a_warm_start_is_that_of_runs_without_adapters():
  plain, adapted = (tiny_runs.config(model__lora__rank=r, init_from="auto")
                    for r in (0, 2))
  assert warm_start.config_of(adapted).model == plain.model
  from vigor_jax import experiment
  task = experiment.make_task(plain)
  assert warm_start.key_of(plain, task) == warm_start.key_of(adapted, task)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
  config = tiny_runs.config(
    model__lora__rank=2, policy__kl__coef=0.05, total_steps=4,
    checkpoint__every_steps=2)
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  train.train(config, str(whole), quiet=True)
  with pytest.raises(tiny_runs.Killed):
    train.train(config, str(cut), progress=tiny_runs.KilledAt(3))
  train.train(config, str(cut), quiet=True)
  tiny_runs.same(whole, cut)
  steps = tiny_runs.steps_of(whole)
  change = [s["policy/adapter_change"] for s in steps]
  assert 0 < change[0] < change[-1]
  assert steps[0]["policy/kl"] < 1e-9 < 1e-6 < steps[-1]["policy/kl"]
  assert max(s["policy/sampler_trainer_logprob_gap"] for s in steps) < 1e-5
  # Its checkpoint is the merged policy: a plain model's, for any program.
  from vigor_jax import export
  _, files = export.export(str(whole), str(tmp_path / "folder"))
  assert "config.json" in files
  kept = checkpoints.Checkpoints(str(whole)).restore(
    4, None, tiny_runs.targets(whole)[1])[1]
  assert {*kept} == {"adapters", "moments"}


@pytest.mark.slow
def test_it_learns_from_a_warm_start(tmp_path):
  """A drawn base would not do: its frozen output matrix is all but uniform."""
  config = tiny_runs.config(
    model__lora__rank=4, model__lora__alpha=8.0, total_steps=40,
    optimizer__learning_rate=1e-2, evaluation__every_steps=0,
    init_from="auto", sft__steps=200, sft__learning_rate=1e-2,
    sft__batch_size=32)
  train.train(config, str(tmp_path / "run"), quiet=True)
  rewards = [s["reward/mean"] for s in tiny_runs.steps_of(tmp_path / "run")]
  assert np.mean(rewards[:3]) < 0.8 < 0.95 < np.mean(rewards[-10:])
