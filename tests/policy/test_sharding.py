"""Placement on a mesh, in a process of 8 fake devices."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from vigor_jax.config import ConfigError
from vigor_jax.config import default_config
from vigor_jax.policy import attention
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer

SIZES = transformer.Sizes(
  layers=2, width=16, heads=4, kv_heads=2, head_dim=8, ffn=32, vocab=24,
  qkv_bias=True, tied=False,
)


class _Mesh:
  shape = {"data": 2, "fsdp": 2, "tensor": 4}


def _spec(path, shape, rules=sharding.TRAIN_RULES):
  return tuple(sharding.Placement(_Mesh()).spec(path, shape, rules))


def test_every_parameter_has_axes():
  for sizes in (SIZES, transformer.Sizes(
    layers=1, width=8, heads=2, kv_heads=1, head_dim=4, ffn=8, vocab=8,
    qk_norm=True, tied=True,
  )):
    abstract = transformer.abstract(sizes)[1]
    from vigor_jax import checkpoints
    for path, leaf in checkpoints.flatten(abstract).items():
      assert len(sharding.AXES[path]) == leaf.ndim, path


def test_rules_and_what_does_not_divide():
  assert _spec("blocks/q", (2, 16, 4, 8)) == (None, "fsdp", "tensor", None)
  # 2 kv heads do not split over tensor=4: whole.
  assert _spec("blocks/k", (2, 16, 2, 8)) == (None, "fsdp", None, None)
  assert _spec("blocks/down", (2, 32, 16)) == (None, "tensor", "fsdp")
  assert _spec("embed", (24, 16)) == ("tensor", "fsdp")
  # A moment is split like its parameter; a step count is not split.
  assert _spec("1/mu/blocks/q", (2, 16, 4, 8)) == (
    None, "fsdp", "tensor", None)
  assert _spec("1/count", ()) == ()
  # Sampling never gathers over fsdp.
  assert _spec("blocks/q", (2, 16, 4, 8), sharding.SAMPLE_RULES) == (
    None, None, "tensor", None)
  with pytest.raises(ValueError, match="no entry for 'blocks/router'"):
    _spec("blocks/router", (2, 16, 4))


def test_one_device_has_no_placement():
  assert sharding.placement_of(default_config(), devices=[object()]) is None


@dataclasses.dataclass(frozen=True)
class _Chip:
  id: int
  slice_index: int
  process_index: int
  coords: tuple[int, int, int]
  core_on_chip: int = 0
  platform: str = "tpu"
  device_kind: str = "TPU v5 lite"


def _chips(slices, side=2):
  """Chips of some v5e slices, as jax describes them; one host each."""
  return [
    _Chip((k * side + x) * side + y, k, k, (x, y, 0))
    for k in range(slices) for x in range(side) for y in range(side)]


@pytest.mark.parametrize("shape", [(2, 4, 1), (2, 2, 2), (4, 2, 1)])
def test_only_the_data_axis_crosses_between_slices(shape):
  grid = sharding.make_mesh(shape, _chips(2)).devices
  assert grid.shape == shape
  slices = np.vectorize(lambda chip: chip.slice_index)(grid)
  half = shape[0] // 2
  assert (slices[:half] == slices[0, 0, 0]).all()
  assert (slices[half:] != slices[0, 0, 0]).all()


def test_slices_that_the_data_axis_does_not_divide_into_are_refused():
  with pytest.raises(ConfigError, match="mesh.data: 1 must be .* 2 slices"):
    sharding.make_mesh((1, 8, 1), _chips(2))


def test_constrain_does_nothing_without_a_placement():
  x = np.ones((4, 2))
  assert sharding.constrain(x, sharding.BATCH, None) is x


def _on_eight_devices(code: str, *arguments: str) -> str:
  environ = {
    **os.environ, "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
  }
  done = subprocess.run(
    [sys.executable, "-c", code, *arguments], env=environ, text=True,
    capture_output=True, timeout=600,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


_UPDATE = """
import dataclasses, json, sys
import jax, numpy as np
from vigor_jax import checkpoints
from vigor_jax.config import ConfigError, default_config
from vigor_jax.policy import (
  buckets, optimizer, pieces, sharding, transformer, update)
from vigor_jax.policy.sizes import Adapters

rng = np.random.default_rng(0)
config = default_config()
config.mesh.fsdp, config.mesh.tensor = 2, 2
config.policy.rows_per_microbatch = 3
try:
  sharding.placement_of(config)
  raise SystemExit("a row that does not split was accepted")
except ConfigError as error:
  assert "policy.rows_per_microbatch: 3" in str(error), error
  assert "nearest: 4" in str(error), error
config.policy.rows_per_microbatch = config.sampling.slots = 8
config.sampling.prefill_batch = 8
config.policy.row_length, config.policy.row_buckets = 126, (63,)
try:
  sharding.placement_of(config)
  raise SystemExit("a bucket that does not split was accepted")
except ConfigError as error:
  assert "policy.row_buckets: 63 must be a multiple" in str(error), error
config.policy.row_buckets = ()
shorter = (8,) if "buckets" in sys.argv[2:] else ()
placement = sharding.placement_of(config)
assert dict(placement.mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}

def batch(n=48, length=6):
  group = np.sort(rng.integers(0, 8, n))
  lengths = rng.integers(1, length + 1, n)
  prompts = [rng.integers(1, 20, rng.integers(1, 5)) for _ in range(8)]
  f = lambda *s: rng.normal(size=s).astype(np.float32)
  return buckets.pack(
    group, prompts, rng.integers(1, 20, (n, length)), lengths, f(n),
    np.abs(f(n)), -np.abs(f(n, length)),
    shapes=buckets.shapes(16, 8, shorter), rollouts=n)

packed, micros = batch(64 if shorter else 48)
assert np.all(micros), "a length of rows is not in use"
for tied, layers, kv, width, *rank in json.loads(sys.argv[1]):
  sizes = transformer.Sizes(layers=layers, width=width, heads=4, kv_heads=kv,
                            head_dim=8, ffn=32, vocab=24, qkv_bias=True,
                            qk_norm=kv == 1, tied=tied)
  adapted = rank and dataclasses.replace(sizes, adapters=Adapters(rank[0]))
  graph, params = transformer.create(sizes, 0)
  host = jax.tree.map(np.asarray, params)
  objective = update.Objective(remat=layers > 1, temperature=0.7)
  assert pieces.supported(sizes, placement, 16)
  options = optimizer.OptimizerOptions(eps=1e-2)
  results = []
  for where in (None, placement):
    updater = update.Updater(graph, objective, options, where,
                             adapted or None)
    state = updater.init(jax.tree.map(jax.numpy.array, host))
    scores = np.concatenate([np.ravel(a) for a in jax.tree.leaves(
      updater.score(state.params, packed, micros))])
    for _ in range(2):
      before = jax.tree.leaves(state)
      state, metrics = updater.update(state, packed, micros, 48.0, 0.1)
      assert all(a.is_deleted() for a in before), "not donated"
    results.append((scores, {k: float(v) for k, v in metrics.items()},
                    jax.tree.map(np.asarray, state)))
    if where is not None:
      for path, leaf in checkpoints.flatten(state).items():
        want = where.spec(path, leaf.shape)
        assert leaf.sharding.is_equivalent_to(
          jax.sharding.NamedSharding(where.mesh, want), leaf.ndim), path
  one, eight = results
  np.testing.assert_allclose(one[0], eight[0], rtol=1e-5, atol=1e-5)
  for key in one[1]:
    np.testing.assert_allclose(one[1][key], eight[1][key], rtol=2e-4,
                               atol=1e-5, err_msg=key)
  for a, b in zip(jax.tree.leaves(one[2]), jax.tree.leaves(eight[2])):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)

if "bfloat16" in sys.argv[2:]:
  # Parameters and moments in bfloat16 keep their dtype, and are donated.
  half = dataclasses.replace(sizes, width=16, dtype="bfloat16",
                             param_dtype="bfloat16")
  graph, params = transformer.create(half, 0)
  updater = update.Updater(graph, objective, options, placement)
  state = updater.init(params)
  before = jax.tree.leaves(state)
  state, _ = updater.update(state, packed, micros, 48.0, 0.1)
  for a, b in zip(before, jax.tree.leaves(state)):
    assert a.dtype == b.dtype and a.is_deleted(), (a.dtype, b.dtype)
print("same")
"""


@pytest.mark.parametrize(
  "shapes, more",
  [
    # Laid out by the compiler; by pieces.
    ([(True, 1, 2, 16), (False, 6, 2, 16)], []),
    # By pieces: one kv head for two devices; a width that does not divide.
    pytest.param([(True, 6, 1, 16), (True, 6, 1, 15)], ["bfloat16"],
                 marks=pytest.mark.slow),
    # Adapters of rank 3, laid out by the compiler and by pieces.
    pytest.param([(True, 1, 2, 16, 3), (False, 6, 1, 16, 3)], [],
                 marks=pytest.mark.slow),
    # Rows of two lengths, laid out by the compiler and by pieces.
    pytest.param([(True, 1, 2, 16), (False, 6, 1, 16)], ["buckets"],
                 marks=pytest.mark.slow),
  ],
)
def test_update_and_scores_equal_those_of_one_device(shapes, more):
  done = _on_eight_devices(_UPDATE, json.dumps(shapes), *more)
  assert done.endswith("same\n")


_VOCABULARY = """
import jax, jax.numpy as jnp, numpy as np
from vigor_jax.policy import sharding, vocabulary
vocabulary.BLOCK_ELEMENTS = 64  # Several blocks.
placement = sharding.Placement(sharding.make_mesh((2, 2, 2)))
rng = np.random.default_rng(1)
h = rng.normal(size=(4, 3, 8)).astype(np.float32)
y = rng.integers(0, 40, (4, 3)).astype(np.int32)
g = rng.normal(size=(4, 3)).astype(np.float32)
for tied in (True, False):
  w = rng.normal(size=(40, 8) if tied else (8, 40)).astype(np.float32)
  def plain(h, w):
    z = jnp.einsum("rtd,vd->rtv" if tied else "rtd,dv->rtv", h, w) / 1.3
    p = jax.nn.log_softmax(z)
    return jnp.take_along_axis(p, y[..., None], -1)[..., 0], -(
      jnp.exp(p) * p).sum(-1)
  def split(h, w):
    return vocabulary.token_logprobs(h, w, y, 1.3, placement, tied)
  for a, b in zip(jax.jit(plain)(h, w), jax.jit(split)(h, w)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  loss = lambda f: lambda h, w: jnp.sum(f(h, w)[0] * g)
  for a, b in zip(jax.jit(jax.grad(loss(plain), (0, 1)))(h, w),
                  jax.jit(jax.grad(loss(split), (0, 1)))(h, w)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
print("same")
"""


def test_split_vocabulary_equals_the_plain_softmax():
  assert _on_eight_devices(_VOCABULARY).endswith("same\n")


def test_a_mesh_that_does_not_fit_is_refused_with_what_would():
  config = default_config()
  config.mesh.fsdp = 3
  with pytest.raises(ConfigError, match="8 devices"):
    sharding.placement_of(config, devices=[None] * 8)


def _set_blocks(monkeypatch, forward, backward, long):
  for name, size in (("FORWARD_BLOCK", forward), ("BACKWARD_BLOCK", backward),
                     ("LONG", long), ("LONG_BLOCK", 5)):
    monkeypatch.setattr(attention, name, size)


@pytest.mark.parametrize("blocks", [(2, 3, 11), (1, 4, 11), (2, 3, 10)])
def test_blocked_attention_equals_the_whole(monkeypatch, blocks):
  import jax
  import jax.numpy as jnp
  _set_blocks(monkeypatch, *blocks)
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(2, 11, 4, 8), draw(2, 11, 2, 8), draw(2, 11, 2, 8)
  mask = np.tril(rng.random((2, 11, 11)) < 0.7) | np.eye(11, dtype=bool)
  both = [
    jax.value_and_grad(
      lambda *a, f=f: jnp.sum(jnp.sin(f(*a, mask))), (0, 1, 2))(q, k, v)
    for f in (attention.grouped_attention, attention.blocked_attention)
  ]
  for a, b in zip(*map(jax.tree.leaves, both)):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_attention_with_known_norms_equals_the_whole(monkeypatch):
  import jax
  import jax.numpy as jnp
  _set_blocks(monkeypatch, 4, 3, 9)
  rng = np.random.default_rng(1)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(2, 9, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8)
  mask = np.tril(rng.random((2, 9, 9)) < 0.7) | np.eye(9, dtype=bool)
  _, lse = attention.by_blocks(q, k, v, mask)
  scores = np.einsum("bthd,buhd->bhtu", q, np.repeat(k, 2, 2)) / np.sqrt(8)
  scores = np.where(mask[:, None], scores, -np.inf)
  np.testing.assert_allclose(
    lse, np.log(np.exp(scores).sum(-1)), rtol=1e-5, atol=1e-6)
  loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))
  again = lambda *a: attention.again(*a, mask, lse)
  whole = lambda *a: attention.grouped_attention(*a, mask)
  both = [jax.value_and_grad(loss(f), (0, 1, 2))(q, k, v)
          for f in (whole, again)]
  for a, b in zip(*map(jax.tree.leaves, both)):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_what_the_compiler_is_not_told_changes_nothing():
  import jax.numpy as jnp
  x = jnp.asarray([[-0.0, 1.5], [3e38, -7.25]], jnp.float32)
  cast = sharding.cast(x, jnp.bfloat16, jnp.int32(5))
  assert cast.dtype == jnp.bfloat16
  np.testing.assert_array_equal(cast, x.astype(jnp.bfloat16))
  assert sharding.cast(x, jnp.float32, jnp.int32(5)) is x
  done = jnp.ones((2, 3)), jnp.zeros((), jnp.bfloat16)
  np.testing.assert_array_equal(attention.after(x, *done), x)
  # What is not finite is not hidden.
  assert np.isnan(attention.after(x, jnp.asarray([jnp.inf]))).all()
