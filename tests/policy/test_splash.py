"""The Pallas kernel, interpreted on a CPU, against the update's attention."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax import experiment
from vigor_jax.config import default_config, validate
from vigor_jax.policy import attention, build, packing, sharding, splash

# Two prompts with two rollouts each, and padding: (copy, rollout, tokens).
ROW = [(1, 0, 20), (1, 1, 60), (1, 2, 50), (2, 0, 10), (2, 3, 70), (2, 4, 30),
       (0, 0, 16)]  # fmt: skip


def packed_row(parts):
  return tuple(
    np.repeat([p[i] for p in parts], [p[2] for p in parts])[None]
    for i in range(2))  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_values_and_gradients_are_the_references(kv_heads):
  prompt, segment = packed_row(ROW)
  mask = jnp.asarray(packing.packed_mask(prompt, segment))
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, do = (
    jax.random.normal(key, (1, prompt.shape[1], n, 128))
    for key, n in zip(keys, (4, kv_heads, kv_heads, 4)))
  real = (prompt > 0)[..., None, None]
  do = do * real  # Padding counts for nothing.

  @functools.partial(jax.jit, static_argnums=0)
  def pulled(kind, mask, q, k, v, do):
    attend = {
      "splash": lambda *a: splash.attention_of(mask, kv_heads, True)(*a),
      "xla": lambda *a: attention.blocked_attention(*a, mask),
    }[kind]
    out, pull = jax.vjp(attend, q, k, v)
    return jnp.where(real, out, 0), *pull(do)

  with jax.default_matmul_precision("highest"):
    theirs = pulled("splash", mask, q, k, v, do)
    ours = pulled("xla", mask, q, k, v, do)
  for a, b in zip(theirs, ours):
    assert np.isfinite(a).all() and np.abs(b).max() > 0.1
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_what_does_not_fit_is_named():
  assert splash.misfit(128, 4096, "tpu") is None
  assert splash.block_of(4096) == splash.block_of(10240) == 512
  assert splash.block_of(1152) == 384
  assert "a TPU, not on 'cpu'" in splash.misfit(128, 4096, "cpu")
  assert "heads of 64" in splash.misfit(64, 4096, "tpu")
  assert "4000, not a multiple of 128 (nearest: 3968 or 4096)" in (
    splash.misfit(128, 4000, "tpu"))


def test_a_mesh_wants_rematerialised_layers_that_split_evenly():
  config = default_config("arithmetic")
  config.policy.attention, config.policy.row_length = "splash", 256
  sizes = dataclasses.replace(
    build.sizes_of(config, 13), heads=4, kv_heads=2, head_dim=128, vocab=16)
  placement = sharding.Placement(sharding.make_mesh((1, 1, 1), jax.devices()[:1]))
  check = functools.partial(build.check_attention, config, sizes, "tpu")
  check()  # Without a mesh nothing is asked.
  with pytest.raises(ValueError, match="policy.remat=True"):
    check(placement)
  config.policy.remat = True
  check(placement)


def test_a_run_without_a_tpu_is_refused_before_it_begins():
  config = default_config("arithmetic")
  config.policy.attention = "splash"
  with pytest.raises(ValueError, match="policy.attention: 'splash' cannot be"):
    experiment.build(validate(config))


_UPDATE = """
import functools
import jax, numpy as np
from vigor_jax.policy import (
  optimizer, packing, sharding, splash, transformer, update)

splash.attention_of = functools.partial(splash.attention_of, interpret=True)
rng = np.random.default_rng(0)
n, length = 12, 40
lengths = rng.integers(1, length + 1, n)
prompts = [rng.integers(1, 20, 9) for _ in range(4)]
f = lambda *s: rng.normal(size=s).astype(np.float32)
packed, micros = packing.pack(
  np.sort(rng.integers(0, 4, n)), prompts, rng.integers(1, 20, (n, length)),
  lengths, f(n), np.abs(f(n)), -np.abs(f(n, length)), row_length=128,
  rows_per_micro=2, max_micro=3)
placement = sharding.Placement(sharding.make_mesh((1, 2, 2)))
for kv, where in ((1, placement), (4, None)):
  sizes = transformer.Sizes(layers=5, width=16, heads=4, kv_heads=kv,
                            head_dim=128, ffn=32, vocab=24, tied=True)
  graph, params = transformer.create(sizes, 0)
  host = jax.tree.map(np.asarray, params)
  results = []
  for kind, where in (("xla", None), ("splash", where)):
    updater = update.Updater(
      graph, update.Objective(remat=True, attention=kind),
      optimizer.OptimizerOptions(eps=1e-2), where)
    state = updater.init(jax.tree.map(jax.numpy.array, host))
    scores = np.asarray(updater.score(state.params, packed, micros))
    state, _ = updater.update(state, packed, micros, 12.0, 0.1)
    results.append((scores, *map(np.asarray, jax.tree.leaves(state))))
  for a, b in zip(*results):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
try:
  update.Updater(
    graph, update.Objective(attention="splash"), optimizer.OptimizerOptions(),
    placement).score(state.params, packed, micros)
except ValueError as error:
  assert "needs policy.remat=True" in str(error), error
else:
  raise SystemExit("a mesh without pieces was accepted")
print("same")
"""


@pytest.mark.slow
def test_an_update_is_that_of_the_reference_on_one_device_and_four():
  environ = {
    **os.environ, "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  done = subprocess.run([sys.executable, "-c", _UPDATE], env=environ,
                        text=True, capture_output=True, timeout=600)
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout == "same\n"
