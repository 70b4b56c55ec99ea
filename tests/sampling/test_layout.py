"""Where the sampler's arrays lie on a mesh, and that it draws the same."""

import os
import subprocess
import sys

import pytest

from vigor_jax.policy import families, sharding
from vigor_jax.policy.sizes import Sizes
from vigor_jax.sampling import layout as layout_lib
from vigor_jax.sampling import settings as settings_lib


class Mesh:
  """As much of a mesh as layouts depend on."""

  def __init__(self, *shape):
    self.shape = dict(zip(sharding.MESH_AXES, shape))

  def __hash__(self):
    return hash(tuple(self.shape.values()))


def settings(slots=256, prompt=512, **changes):
  return settings_lib.Settings(**{**dict(
    slots=slots, chunk=32, max_new_tokens=1024, prompt_buckets=(prompt,),
    prefill_batch=16, prefixes=slots, queue=slots, cache_dtype="bfloat16",
  ), **changes})  # fmt: skip


def sizes_of(name):
  values = families.published(name)
  values["rope_scaling"] = families.rope_from_text(values["rope_scaling"])
  return Sizes(**values, dtype="bfloat16", param_dtype="bfloat16")


def layout(name, *shape, stationary=True, **changes):
  placement = sharding.Placement(Mesh(*shape))
  made = layout_lib.of(placement, sizes_of(name), settings(**changes),
                       stationary)  # fmt: skip
  return made.batch, made.heads, made.columns, dict(made.rules)


def test_weights_are_split_over_fsdp_and_tensor():
  # 2 kv heads over tensor, the columns of prompts over fsdp; 16 heads over
  # both.
  batch, heads, columns, rules = layout("qwen2.5-3b", 1, 8, 2)
  assert (batch, heads, columns) == (("data",), ("tensor",), ("fsdp",))
  both = ("tensor", "fsdp")
  # Sums and logits travel over the larger axis first.
  assert rules == dict(heads=both, kv_heads=("tensor",), head_dim=(),
                       ffn=both[::-1], vocab=both[::-1])  # fmt: skip
  # 4 does not divide 2 kv heads: they are whole, columns over all.
  assert layout("qwen2.5-3b", 1, 4, 4)[1:3] == ((), both)
  # 8 kv heads: no columns are split, slots are not either.
  assert layout("qwen3-8b", 1, 4, 2)[1:3] == (both, ())
  # 28 heads do not divide by 32, a head's 128 numbers do by 8.
  batch, heads, columns, rules = layout("qwen2.5-7b", 1, 8, 4)
  assert (heads, columns) == (("tensor",), ("fsdp",))
  assert rules["heads"] == heads and rules["head_dim"] == columns
  # ffn 18944 = 32 x 592; the vocabulary of 152064 by all of them.
  assert rules["ffn"] == rules["vocab"] == both[::-1]


def test_what_does_not_divide_is_split_over_tensor_alone():
  plain = ("data", "fsdp"), ("tensor",), ()
  assert layout("qwen2.5-3b", 1, 8, 2, slots=24)[:3] == plain
  assert layout("qwen2.5-3b", 1, 8, 2, prompt=100)[:3] == plain
  assert layout("qwen2.5-3b", 1, 8, 2, stationary=False)[:3] == plain
  # One kv head for two devices: they share the columns.
  assert layout("qwen2.5-3b", 1, 4, 4, stationary=False)[:3] == (
    ("data", "fsdp"), (), ("tensor",))  # fmt: skip
  assert layout("qwen2.5-3b", 1, 4, 4, slots=12, prompt=100)[:3] == (
    ("data", "fsdp"), (), ())  # fmt: skip


def fallback(name, *shape, **changes):
  placement = sharding.Placement(Mesh(*shape))
  return layout_lib.fallback_line(placement, sizes_of(name),
                                  settings(**changes))  # fmt: skip


def test_a_run_says_what_does_not_divide():
  assert fallback("qwen2.5-3b", 1, 8, 2) is None
  assert layout_lib.fallback_line(None, sizes_of("qwen2.5-3b"), None) is None
  assert fallback("qwen2.5-3b", 1, 8, 2, slots=24) == (
    "sampler: weights are split over tensor alone while decoding, 2 pieces"
    " instead of 16: sampling.slots is 24, not a multiple of 16 (nearest: 16"
    " or 32)"
  )
  line = fallback("qwen2.5-3b", 1, 8, 2, slots=8, prompt=100)
  assert "8, not a multiple of 16 (nearest: 16)" in line
  assert line.endswith("sampling.prompt_buckets, the last, is 100, not a"
                       " multiple of 8 (nearest: 96 or 104)")  # fmt: skip
  line = fallback("qwen2.5-3b", 1, 1, 16, prompt=100)
  assert line.startswith("sampler: prompts are kept whole on every device")


@pytest.mark.parametrize("shape", [(1, 8, 2), (1, 4, 4), (1, 1, 16)])
def test_rollouts_of_a_group_share_their_prompt(shape):
  """512 rollouts of 1k + 1k in groups of 16: .53 of one copy each."""
  sizes = sizes_of("qwen2.5-3b")
  made = settings(512, 1024, prefixes=512 // 16)
  held = made.cache_bytes(sizes, sharding.Placement(Mesh(*shape)))
  # A token's keys and values take 36 KiB.
  copies = 512 * (1024 + 1024) * 36 * 2**10 / 16
  assert held["prefixes"] == copies / 32
  assert held["slots"] == copies / 2
  assert sum(held.values()) == pytest.approx(copies * (17 / 32 + 1 / 64))
  assert sum(held.values()) < 0.55 * copies


_DRAW = """
import sys
import jax, numpy as np
from sampling_helpers import model, settings, prompts
from vigor_jax.policy import sharding, transformer
from vigor_jax.sampling.sampler import Sampler

def drawn(sizes, params, graph, made, placement):
  if placement is not None:
    params = jax.device_put(params, placement.tree(params))
  sampler = Sampler(graph, sizes, made, stop_ids=(1,), seed=3,
                    placement=placement)
  sampler.begin(1)
  sampler.prefill(params, range(6), prompts(6, vocab=64))
  groups = np.repeat(np.arange(6), 4)
  sampler.request(groups, groups, np.tile(np.arange(4), 6))
  rows = {}
  for part in sampler.decode(params):
    for i, entry in enumerate(part.entry):
      rows[int(entry)] = part.tokens[i], part.logprobs[i]
  order = sorted(rows)
  return sampler._weights.layout, *(
    np.stack([rows[entry][j] for entry in order]) for j in range(2))

for heads, kv, shape, buckets, slots in (
    (8, 2, (1, 4, 2), (4, 8), 8), (6, 2, (1, 4, 2), (8,), 8),
    (4, 4, (2, 2, 2), (8,), 8), (8, 2, (1, 4, 2), (8,), 12)):
  # So many layers are scanned.
  sizes = transformer.Sizes(
    layers=13, width=32, heads=heads, kv_heads=kv, head_dim=8, ffn=48,
    vocab=64, qkv_bias=True, qk_norm=True, tied=heads > kv)
  graph, params = model(sizes)
  made = settings(slots=slots, prefill_batch=8, queue=24, prompt_buckets=buckets)
  one = drawn(sizes, params, graph, made, None)
  placement = sharding.Placement(sharding.make_mesh(shape))
  layout, *eight = drawn(sizes, params, graph, made, placement)
  assert bool(layout.columns) == (kv == 2 and slots == 8), layout
  np.testing.assert_array_equal(one[1], eight[0])
  np.testing.assert_allclose(one[2], eight[1], rtol=1e-4, atol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_a_mesh_draws_what_one_device_does(root):
  flags = "--xla_force_host_platform_device_count=8"
  here = os.path.dirname(__file__)
  path = os.pathsep.join([here, str(root), os.environ.get("PYTHONPATH", "")])
  done = subprocess.run(
    [sys.executable, "-c", _DRAW], text=True, capture_output=True,
    env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.endswith("same\n")
