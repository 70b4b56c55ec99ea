"""Memory of the cache, and the slots that are chosen from it."""

import jax
import pytest
import tiny_runs
from sampling_helpers import SIZES, make, model, settings

from vigor_jax import allocation
from vigor_jax.config import loading
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import sharding
from vigor_jax.sampling import settings as settings_lib

# Bytes of a column: two layers of keys and values, 2 heads of 8 floats.
COLUMN = 2 * 2 * 2 * 8 * 4
# Of a slot: 9 columns of the ring, 8 + 9 + 3 of the chunk's view, and four
# rows of 23 logits.
SLOT = 29 * COLUMN + 4 * 23 * 4
PROMPTS = 64 * COLUMN


class Device:
  """A device that reports its memory, as accelerators do."""

  def __init__(self, limit):
    self.limit = limit

  def memory_stats(self):
    return None if self.limit is None else {"bytes_limit": self.limit}


def test_cache_memory_is_what_the_arrays_hold():
  sampler = make(model()[0])
  held = sampler.settings.cache_bytes(SIZES)
  assert held == dict(
    slots=36 * COLUMN, prefixes=PROMPTS, chunk=80 * COLUMN
  )
  arrays = jax.tree.leaves((sampler._state.kv, sampler._prefixes.kv))
  assert held["slots"] + held["prefixes"] == sum(a.nbytes for a in arrays)
  assert sampler.settings.decode_bytes(SIZES) == PROMPTS + 4 * SLOT
  line = settings_lib.memory_line(sampler.settings, SIZES)
  # (36 + 64 + 80) x 256 bytes = 45 KiB.
  assert line.startswith("cache 0.0 MiB: 4 slots") and "8 prompts" in line


def test_a_chunk_runs_at_parts_of_the_slots():
  widths = lambda n: [s.width for s in settings(slots=n).shapes(SIZES)]
  assert widths(32) == [4, 8, 16, 24, 32]
  assert widths(16) == [4, 8, 12, 16]
  assert widths(7) == [7]


def largest(memory, most=32):
  return settings_lib.largest_slots(
    lambda slots: settings(slots=slots), SIZES, memory, most
  )


def test_slots_are_halved_until_they_fit():
  eight = PROMPTS + 8 * SLOT
  assert [largest(m) for m in (eight, eight - 1, 10**9)] == [8, 4, 32]
  assert largest(eight, most=7) == 7
  assert largest(PROMPTS + SLOT) == 1
  with pytest.raises(ValueError, match="sampling.slots: 1 slot and 8 prompts"):
    largest(PROMPTS + SLOT - 1)


def test_what_a_device_has(tmp_path):
  assert settings_lib.device_memory([Device(7), Device(5)]) == 5
  # A CPU reports nothing: its devices share the host's memory.
  host = settings_lib.host_memory()
  assert host > 2**28
  assert settings_lib.device_memory([Device(None)] * 2) == host // 2
  limit = tmp_path / "memory.max"
  limit.write_text("1000\n")
  assert settings_lib.host_memory([str(limit)]) == 1000
  limit.write_text("max\n")
  assert settings_lib.host_memory([str(limit)]) >= host


def test_weights_come_first():
  size = SIZES.num_params * 4
  total = 10 * size
  assert settings_lib.memory_left(total, SIZES, copies=4) == 5 * size // 2
  assert settings_lib.memory_left(total, SIZES, copies=1) == 4 * size


def chosen(config, total, **options):
  allocator = allocation.make(
    config.allocation.name,
    {},
    prompts_per_step=config.prompts_per_step,
    budget=config.rollout_budget,
    seed=0,
    train_on="all",
  )
  sizes = build_lib.sizes_of(config, 13)
  return build_lib.with_slots(config, sizes, allocator, total, **options)


def test_a_configuration_that_leaves_its_slots_open():
  plenty = 2**40
  config = tiny_runs.config(sampling__slots=0)
  assert chosen(config, plenty).sampling.slots == tiny_runs.BUDGET
  assert config.sampling.slots == 0
  given = tiny_runs.config(sampling__slots=5)
  assert chosen(given, 1) is given
  # A streaming rule learns from rollouts that have ended.
  config = tiny_runs.config("streaming_vigor", sampling__slots=0)
  assert chosen(config, plenty).sampling.slots == tiny_runs.BUDGET // 4
  with pytest.raises(ValueError, match="0.0 MiB are left"):
    chosen(config, 0)


def test_memory_that_is_given_counts_instead_of_the_devices():
  config = tiny_runs.config(sampling__slots=0, sampling__memory=1.0)
  made = chosen(config, 0)
  assert made.sampling.slots == tiny_runs.BUDGET
  settings_of = build_lib.sampler_settings(made, tiny_runs.PROMPTS)
  need = settings_of.decode_bytes(build_lib.sizes_of(config, 13)) / 2**30
  small = tiny_runs.config(sampling__slots=0, sampling__memory=0.99 * need)
  assert chosen(small, 0).sampling.slots == tiny_runs.BUDGET // 2


class Mesh:
  """As much of a mesh as memory depends on: 4 x 2 pieces of rows, 2 heads."""

  shape = {"data": 4, "fsdp": 2, "tensor": 2}


def test_a_mesh_splits_slots_and_heads():
  placement = sharding.Placement(Mesh())
  sixteen = settings(slots=16)
  parts = sixteen.cache_bytes(SIZES, placement)
  # 2 slots a device, one of the two heads; all prefixes.
  assert parts == dict(
    slots=9 * COLUMN, prefixes=PROMPTS // 2, chunk=20 * COLUMN
  )
  make_settings = lambda slots: settings(slots=slots)
  many = settings_lib.largest_slots(make_settings, SIZES, 2**40, 100, placement)
  assert many == 96
  fewer = settings_lib.largest_slots(
    make_settings, SIZES, settings(slots=48).decode_bytes(SIZES, placement) - 1,
    100, placement)  # fmt: skip
  assert fewer == 24
  line = settings_lib.memory_line(sixteen, SIZES, placement)
  assert "MiB a device: 16 slots" in line


def test_a_run_that_goes_on_keeps_its_slots():
  begun = tiny_runs.config(sampling__slots=32)
  again = tiny_runs.config(sampling__slots=0)
  assert loading.as_begun(begun, again).sampling.slots == 32
  assert loading.check_resume(begun, again) == []
  other = tiny_runs.config(sampling__slots=16)
  assert loading.as_begun(begun, other) is other
  with pytest.raises(ValueError, match="sampling.slots: 32 -> 16"):
    loading.check_resume(begun, other)
