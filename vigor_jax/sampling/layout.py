"""Which device holds which part of the sampler's arrays, and of the weights.

    batch     axes over which slots are split and weights are repeated
    heads     axes that split kv heads, in weights and stores
    columns   the other axes that split weights: slots of the ring are split
              over them, and the columns of the prompts

A large model's weights never travel: q, o and the MLP are split over heads and
columns, every device multiplies all slots of its batch with its piece, and what
travels are activations. Cached completions are split by slot and head. A prompt
may be read by any slot, so each device keeps some columns of every prompt, and
what slots attend to there is put together from all devices (spread.py).

A small model's weights are whole on every device; its slots are split over data
and fsdp.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import jax

from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.sampling import cache

Array = jax.Array
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
  """See the module's docstring; hashable, so that programs are shared.

  Attributes:
    placement: the mesh.
    batch, heads, columns: mesh axes.
    rules: mesh axes by name of a parameter's axis; None = whole.
  """

  placement: sharding.Placement
  batch: Axes
  heads: Axes
  columns: Axes
  rules: tuple[tuple[str, Axes], ...] | None

  @property
  def slots(self) -> Axes:
    """Axes that split the slots of the ring."""
    return self.batch + self.columns

  @property
  def prefix_parts(self) -> int:
    """Pieces of the prefix store; each is held by `batch` many devices."""
    return self.placement.count(self.heads + self.columns)

  @property
  def slot_parts(self) -> int:
    """Pieces of the slots."""
    return self.placement.count(self.slots)

  @property
  def everyone(self) -> Axes:
    """Axes that split rows of logits, and of hidden states between products.

    The largest first: sums of products are scattered over one at a time, and
    what the first leaves the others move again.
    """
    if not self.rules:
      return self.batch
    return self.batch + _by_size(self.placement, self.columns + self.heads)

  def whole(self, a: Array) -> Array:
    """Rows [S, ...] that every device of a batch holds."""
    return jax.lax.with_sharding_constraint(
        a, self.placement.named(self.batch, *[None] * (a.ndim - 1)))

  def by_row(self, logits: Array) -> Array:
    """Logits [S, V], made split by vocabulary, as each row's device needs.

    In two steps: in one, the compiler gathers the output matrix.
    """
    if self.rules is None:
      return logits
    fix = jax.lax.with_sharding_constraint
    named, vocab = self.placement.named, dict(self.rules).get("vocab")
    return fix(fix(logits, named(self.batch, vocab or None)),
               named(self.everyone, None))

  def stores(self, kv: Any, prompts: bool) -> Any:
    """Shardings of stores [(layers,) rows, K, ., .], of prompts or slots."""
    rows = None if prompts else self.slots
    columns = self.columns if prompts and self.columns else None
    heads = self.heads or None

    def one(array, axes):
      lead = (None,) * (array.ndim - 4)
      return self.placement.named(*lead, rows, heads, *axes)

    # Only stacked stores, whose keys lie like values, are split by columns.
    return jax.tree.map(lambda a: one(a, (columns, None)), kv)


def _by_size(placement: sharding.Placement, axes: Axes) -> Axes:
  return tuple(sorted(axes, key=lambda a: -placement.count(a)))


def of(placement: sharding.Placement | None, sizes: transformer.Sizes,
       settings: Any, stationary: bool = True) -> Layout | None:
  """The layout of a model's sampler on a mesh; None on one device.

  Args:
    settings: slots and prompt lengths must divide by the devices, or the
      weights are split over tensor only.
    stationary: split weights over fsdp, too.
  """
  if placement is None:
    return None
  if cache.unrolled(sizes):
    return _plain(placement, sizes, None)
  if _misfits(placement, sizes, settings, stationary):
    return (of(placement, sizes, settings, False) if stationary
            else _plain(placement, sizes, sharding.SAMPLE_RULES))
  batch, heads, columns = _axes(placement, sizes, stationary)
  split = heads + columns
  in_heads = sizes.heads % placement.count(split) == 0
  # In the order in which `everyone` splits rows: exchanged, not moved again.
  order = _by_size(placement, columns + heads)
  fitting = lambda size: next(
      order[:n] for n in range(len(order), -1, -1)
      if size % placement.count(order[:n]) == 0)
  rules = dict(
      heads=split if in_heads else heads, kv_heads=heads,
      head_dim=() if in_heads else columns,
      ffn=fitting(sizes.ffn), vocab=fitting(sizes.vocab))
  return Layout(placement, batch, heads, columns, tuple(rules.items()))


def _axes(placement: sharding.Placement, sizes: transformer.Sizes,
          stationary: bool) -> tuple[Axes, Axes, Axes]:
  """(batch, heads, columns) if everything divides."""
  axes = ("tensor", "fsdp") if stationary else ("tensor",)
  batch = tuple(a for a in sharding.MESH_AXES if a not in axes)
  heads, columns = [], []
  for axis in axes:
    fits = sizes.kv_heads % placement.count((*heads, axis)) == 0
    (heads if fits else columns).append(axis)
  heads, columns = tuple(heads), tuple(columns)
  if placement.count(columns) == 1:
    heads, columns = heads + columns, ()
  return batch, heads, columns


def _misfits(placement: sharding.Placement, sizes: transformer.Sizes,
             settings: Any, stationary: bool) -> list[str]:
  """What keeps weights from being split so, each with what would do."""
  batch, heads, columns = _axes(placement, sizes, stationary)
  split = heads + columns
  out = []
  for field, number, parts in (
      ("slots", settings.slots, placement.count(batch + split)),
      ("prompt_buckets, the last,", settings.prompt_buckets[-1],
       placement.count(columns))):
    if number % parts:
      low = number // parts * parts
      near = " or ".join(str(n) for n in (low, low + parts) if n)
      out.append(f"sampling.{field} is {number}, not a multiple of {parts} "
                 f"(nearest: {near})")
  if (sizes.heads % placement.count(split)
      and sizes.head_dim % placement.count(columns)):
    out.append(f"neither the {sizes.heads} heads divide by "
               f"{placement.count(split)} nor their {sizes.head_dim} numbers "
               f"by {placement.count(columns)} (another mesh may)")
  return out


def fallback_line(placement: sharding.Placement | None,
                  sizes: transformer.Sizes, settings: Any) -> str | None:
  """One line for before a run whose weights cannot be split as they should.

  None where they are, on one device, and for models that are small enough to
  be whole everywhere.
  """
  if placement is None or cache.unrolled(sizes):
    return None
  misfits = _misfits(placement, sizes, settings, True)
  if not misfits:
    return None
  shape = placement.mesh.shape
  lost = ("weights are split over tensor alone while decoding, "
          f"{shape['tensor']} pieces instead of "
          f"{shape['tensor'] * shape['fsdp']}" if shape["fsdp"] > 1 else
          "prompts are kept whole on every device while decoding")
  return f"sampler: {lost}: {'; '.join(misfits)}"


def _plain(placement, sizes, rules: Mapping[str, str] | None) -> Layout:
  """Slots over data and fsdp, heads over tensor where they divide."""
  fits = sizes.kv_heads % placement.mesh.shape["tensor"] == 0
  heads = ("tensor",) if fits else ()
  rules = rules and tuple((k, (v,)) for k, v in rules.items())
  return Layout(placement, sharding.BATCH, heads, (), rules)
