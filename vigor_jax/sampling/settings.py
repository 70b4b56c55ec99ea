"""The sampler's static shapes, and the memory that they take.

Keys and values are most of it, so they decide how many slots there can be.
Slots are halved from the most that could be used down, not fitted to the last
byte: runs on similar machines then have the same shapes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Sequence

import jax.numpy as jnp

from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.sampling import cache as cache_lib
from vigor_jax.sampling import layout as layout_lib
from vigor_jax.sampling import state as state_lib

# A report larger than this many tokens is handed over in parts.
_REPORT_TOKENS = 2**19
# Rings shorter than this are not worth a second cache length.
_SHORT_RING = 32
# So few slots would ask the host at almost every row that ends.
_FEW_SLOTS = 16
# Fewer rows than this cost a step about as much.
_NARROWEST = 4
# Arrays of the logits' size that a decode step holds at once: logits, scaled,
# probabilities, and those that truncation keeps.
_LOGITS = 4


@dataclasses.dataclass(frozen=True)
class Settings:
  """Static shapes of a sampler; each is one compiled size.

  Attributes:
    slots: decode rows, S.
    chunk: decode steps between refills, C.
    chunks_per_dispatch: chunks before the host looks; 0 = as many as it
      takes (streaming: until half of the waiting places may be free).
    max_new_tokens: longest completion, stop token included, L.
    prompt_buckets: ascending padded prompt lengths.
    prefill_batch: prompts per prefill dispatch.
    few_prompts: a second, smaller size of that batch, for rules that open
      prompts a few at a time; 0 = none.
    prefixes: rows of the prefix store (prompts of a step), P.
    queue: rollouts of a step at most, Q (the budget).
    cache_dtype: dtype of keys and values.
    ahead: streaming: rollouts waiting beyond the slots, so that a slot that
      frees up never waits for the host; -1 = half of the slots, or all of
      a few.
    widths: ascending numbers of slots a chunk may be run with when no more
      are active; () = chosen from the slots.
  """

  slots: int
  chunk: int
  max_new_tokens: int
  prompt_buckets: tuple[int, ...]
  prefill_batch: int
  prefixes: int
  queue: int
  chunks_per_dispatch: int = 0
  cache_dtype: str = "float32"
  ahead: int = -1
  few_prompts: int = 0
  widths: tuple[int, ...] = ()

  @property
  def ring(self) -> int:
    """Completion columns of a slot."""
    return cache_lib.ring_length(self.max_new_tokens, self.chunk)

  @property
  def report_rows(self) -> int:
    """Rows of one dispatch's report."""
    whole = self.queue + self.slots
    fits = whole * self.max_new_tokens <= _REPORT_TOKENS
    return whole if fits else min(whole, 2 * self.slots)

  @property
  def waiting(self) -> int:
    """Rollouts that a streaming rule may have waiting for a slot."""
    if self.ahead >= 0:
      return self.ahead
    return max(self.slots // 2, min(self.slots, _FEW_SLOTS))

  def idle(self, free: int) -> int:
    """Of `free` rollouts, those without which slots soon have no work.

    Idle slots, and a quarter of the places: what is granted begins a dispatch
    later, and meanwhile other slots free up.
    """
    return max(0, free - self.waiting + self.waiting // 4)

  @property
  def ended_per_dispatch(self) -> int:
    """Streaming: rows that may end before the host looks."""
    return max(1, self.waiting // 2)

  def shapes(self, sizes: transformer.Sizes) -> tuple[state_lib.Shape, ...]:
    """Compiled sizes of a chunk, the cheapest first."""
    ring, full = self.ring, self.slots
    scanned = not cache_lib.unrolled(sizes)
    if scanned and ring >= _SHORT_RING:
      # Fewer rows would be copied out of the ring.
      lengths = [ring // 4, ring // 2] if ring >= 4 * _SHORT_RING else []
      return tuple(state_lib.Shape(full, n) for n in (*lengths, ring))
    widths = self.widths
    if not widths:
      # A step costs about in proportion to its rows.
      widths = [w for w in (full // 8, full // 4, full // 2)
                if w >= _NARROWEST]
      widths += [3 * full // 4] if widths else []
      widths = widths[-2:] if scanned else widths  # Each takes long to compile.
    widths = sorted({w for w in widths if 1 <= w < full})
    lengths = [ring // 2] if ring >= _SHORT_RING else []
    return (*[state_lib.Shape(w, ring) for w in widths],
            *[state_lib.Shape(full, n) for n in (*lengths, ring)])

  def cache_bytes(self, sizes: transformer.Sizes,
                  placement: sharding.Placement | None = None
                  ) -> dict[str, int]:
    """Bytes of keys and values: slots, prefixes, the running chunk's view.

    On a mesh, of one device: see layout.py.
    """
    layout = layout_lib.of(placement, sizes, self)
    slots, prompts = 1, 1
    if layout is not None:
      slots = layout.slot_parts * placement.count(layout.heads)
      prompts = layout.prefix_parts
    width = self.chunk
    if cache_lib.unrolled(sizes):
      width += self.prompt_buckets[-1] + self.ring
    elif layout is not None and not layout.columns:
      width += self.prompt_buckets[-1]
    elif layout is None and self.ring < _SHORT_RING:
      width += self.ring  # of the rows that a narrower chunk takes
    count = lambda *what: cache_lib.nbytes(sizes, *what)
    return {
        "slots": count(self.slots, self.ring, self.cache_dtype) // slots,
        "prefixes": count(self.prefixes, self.prompt_buckets[-1],
                          self.cache_dtype) // prompts,
        "chunk": count(self.slots, width, sizes.dtype) // slots,
    }

  def decode_bytes(self, sizes: transformer.Sizes,
                   placement: sharding.Placement | None = None) -> int:
    """Bytes a device needs beside the weights: cache, and a step's logits."""
    layout = layout_lib.of(placement, sizes, self)
    rows = 1 if layout is None else placement.count(layout.everyone)
    logits = _LOGITS * -(-self.slots // rows) * sizes.vocab * 4
    return sum(self.cache_bytes(sizes, placement).values()) + logits


def memory_line(settings: Settings, sizes: transformer.Sizes,
                placement: sharding.Placement | None = None) -> str:
  """One line on the memory of keys and values, for before a run."""
  parts = settings.cache_bytes(sizes, placement)
  mib = lambda n: f"{n / 2**20:.1f} MiB"
  where = "" if placement is None else " a device"
  # Completions that fit one chunk have no columns of their own.
  slots = f" {mib(parts['slots'])}" if parts["slots"] else ""
  return (f"cache {mib(sum(parts.values()))}{where}: {settings.slots} slots"
          f"{slots}, {settings.prefixes} prompts {mib(parts['prefixes'])}, "
          f"running chunk {mib(parts['chunk'])}")


# ------------------------------------------------------- slots from memory


def largest_slots(make: Callable[[int], Settings], sizes: transformer.Sizes,
                  memory: int, most: int,
                  placement: sharding.Placement | None = None) -> int:
  """The most slots that fit, halved from `most` down.

  Args:
    make: the settings with a number of slots.
    sizes: of the model.
    memory: bytes for the cache and a decode step's logits, of each device.
    most: no more slots than this are of use.
    placement: slots are a multiple of its rows.

  Raises:
    ValueError: not even the fewest slots fit.
  """
  step = 1 if placement is None else placement.rows
  slots = max(most // step, 1) * step
  while slots > step and make(slots).decode_bytes(sizes, placement) > memory:
    slots = max(slots // 2 // step, 1) * step
  settings = make(slots)
  need = settings.decode_bytes(sizes, placement)
  if need > memory:
    raise ValueError(
        f"sampling.slots: {slots} slot{'s' * (slots > 1)} and "
        f"{settings.prefixes} prompts need {need / 2**20:.1f} MiB of memory "
        f"a device, {max(memory, 0) / 2**20:.1f} MiB are left; lower "
        "sampling.prefixes, max_new_tokens or prompt_buckets")
  return slots


def device_memory(devices: Sequence[Any]) -> int:
  """Bytes that one of the process's own devices has in all.

  What the device reports, else (CPU) its part of the host's memory. The
  total, not what is free at the moment, so that a choice made from it can be
  repeated.
  """
  reported = []
  for device in devices:
    stats = device.memory_stats() or {}
    reported.append(stats.get("bytes_limit") or 0)
  if reported and min(reported):
    return min(reported)
  return host_memory() // max(len(devices), 1)


def host_memory(limits: Sequence[str] = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes")) -> int:
  """Bytes of the machine, or of the container where it has fewer."""
  total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  for path in limits:
    try:
      with open(path) as file:
        text = file.read().strip()
    except OSError:
      continue
    if text.isdigit():  # Or "max".
      total = min(total, int(text))
  return total


def memory_left(total: int, sizes: transformer.Sizes, *, copies: int,
                placement: sharding.Placement | None = None) -> int:
  """Bytes of a device that the cache may take: half of what weights leave.

  The other half is for what comes and goes: activations of the update, and
  prompts.

  Args:
    total: bytes of the device.
    sizes: of the model.
    copies: arrays of the parameters' size and type that stay: themselves,
      gradients, moments.
    placement: splits them over fsdp and tensor.
  """
  masters = copies * sizes.num_params * jnp.dtype(sizes.param_dtype).itemsize
  # The weights as the sampler reads them: fused, or of another type.
  own = sizes.num_params * jnp.dtype(sizes.dtype).itemsize
  if placement is not None:
    shape = placement.mesh.shape
    masters //= shape["fsdp"] * shape["tensor"]
    if not cache_lib.unrolled(sizes):
      own //= shape["tensor"]
  return (total - masters - own) // 2
