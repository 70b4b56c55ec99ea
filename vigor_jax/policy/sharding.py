"""Where arrays live on a mesh: parameters, optimiser state, batch, caches.

One mesh with the axes (data, fsdp, tensor) serves a chip, a slice and several
slices. `AXES` names the axes of every parameter; a table of rules says which
mesh axis each name is split over, one for training and one for sampling:

               training            sampling
    width      fsdp                whole: no gathering per token
    heads ...  tensor              tensor
    rows       data x fsdp         data x fsdp (slots)

Larger models sample in another layout, where slots and prompts divide by the
devices: sampling/layout.py.

An axis that its mesh axis does not divide (2 kv heads over tensor=4) stays
whole. Nothing here gathers an array on a host: resharding is a jitted
identity, and hosts put only the pieces that their own devices hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from typing import Any, Callable, Iterator, Mapping, Sequence

import jax
from jax.experimental import mesh_utils
import numpy as np

from vigor_jax import checkpoints
from vigor_jax.config import fields
from vigor_jax.config import model_checks
from vigor_jax.policy.sizes import TARGETS

MESH_AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# Axes of each parameter by its path; blocks carry "layers" in front.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "width"),
    "head": ("width", "vocab"),
    "final_norm/scale": (None,),
    "blocks/attn_norm/scale": ("layers", None),
    "blocks/mlp_norm/scale": ("layers", None),
    "blocks/q": ("layers", "width", "heads", "head_dim"),
    "blocks/k": ("layers", "width", "kv_heads", None),
    "blocks/v": ("layers", "width", "kv_heads", None),
    "blocks/o": ("layers", "heads", "head_dim", "width"),
    "blocks/q_bias": ("layers", "heads", "head_dim"),
    "blocks/k_bias": ("layers", "kv_heads", None),
    "blocks/v_bias": ("layers", "kv_heads", None),
    "blocks/q_norm/scale": ("layers", None),
    "blocks/k_norm/scale": ("layers", None),
    "blocks/gate": ("layers", "width", "ffn"),
    "blocks/up": ("layers", "width", "ffn"),
    "blocks/down": ("layers", "ffn", "width"),
    # Of `Transformer.pair`.
    "output": ("vocab", "width"),
    "blocks/queries": ("layers", "heads", "head_dim", "width"),
    "blocks/grouped": ("layers", "kv_heads", None, None, "width"),
    "blocks/kv": ("layers", None, "kv_heads", None, "width"),
    "blocks/gate_up": ("layers", None, "ffn", "width"),
}
# Adapters (lora.py): A has the inputs of its matrix, B the outputs.
for _name in TARGETS:
  _layers, *_axes = AXES[f"blocks/{_name}"]
  _inputs = 2 if _name == "o" else 1
  AXES[f"blocks/{_name}_adapter/a"] = (_layers, *_axes[:_inputs], None)
  AXES[f"blocks/{_name}_adapter/b"] = (_layers, None, *_axes[_inputs:])

_TENSOR = dict(heads="tensor", kv_heads="tensor", ffn="tensor",
               vocab="tensor")
TRAIN_RULES: Mapping[str, Any] = {"width": "fsdp", **_TENSOR}
SAMPLE_RULES: Mapping[str, Any] = dict(_TENSOR)

P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True)
class Placement:
  """A mesh and the rules on it; hashable, so that programs are shared.

  Attributes:
    mesh: axes (data, fsdp, tensor).
  """

  mesh: jax.sharding.Mesh

  @property
  def rows(self) -> int:
    """Pieces into which rows of a batch, or slots, are split."""
    return math.prod(self.mesh.shape[a] for a in BATCH)

  @property
  def waits(self) -> bool:
    """Whether each program must end before the next is started.

    Several programs with collectives in flight deadlock on the CPU backend
    of jax 0.10 (in-process rendezvous and gloo alike).
    """
    return self.mesh.devices.flat[0].platform == "cpu"

  def named(self, *axes) -> jax.sharding.NamedSharding:
    """The sharding P(*axes) on this mesh."""
    return jax.sharding.NamedSharding(self.mesh, P(*axes))

  @property
  def replicated(self) -> jax.sharding.NamedSharding:
    return self.named()

  @property
  def batch(self) -> jax.sharding.NamedSharding:
    """Of micro-batches [M, R, T]: rows over data and fsdp."""
    return self.named(None, BATCH)

  @property
  def prompts(self) -> jax.sharding.NamedSharding:
    """Of prompts [N, Lb] to prefill: rows over data and fsdp."""
    return self.named(BATCH)

  def spec(self, path: str, shape: Sequence[int],
           rules: Mapping[str, Any] = TRAIN_RULES) -> P:
    """Partition of a parameter, or of a moment of it.

    Args:
      path: the parameter's, "blocks/gate"; a longer one that ends in it (an
        optimiser's "1/mu/blocks/gate") is split alike.
      shape: of the array.
      rules: mesh axis by name of the axis.

    Raises:
      ValueError: an array of several axes whose path no entry of AXES ends.
    """
    names = _axes_of(path)
    if names is None or len(names) != len(shape):
      if len(shape) > 1:
        raise ValueError(
            f"policy/sharding.py: AXES has no entry for {path!r} of shape "
            f"{tuple(shape)}; known: {', '.join(AXES)}")
      return P()
    axes = [rules.get(name) if name else None for name in names]
    return P(*[a if a and size % self.count(a) == 0 else None
               for a, size in zip(axes, shape)])

  def count(self, axes: str | Sequence[str]) -> int:
    """Devices along one mesh axis, or along some together."""
    axes = (axes,) if isinstance(axes, str) else axes
    return math.prod(self.mesh.shape[a] for a in axes)

  def tree(self, tree: Any, rules: Mapping[str, Any] = TRAIN_RULES) -> Any:
    """Shardings of a tree of parameters or optimiser state."""
    flat = checkpoints.flatten(tree)
    leaves = [jax.sharding.NamedSharding(
        self.mesh, self.spec(path, leaf.shape, rules))
        for path, leaf in flat.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)

  def abstract(self, tree: Any) -> Any:
    """The tree as ShapeDtypeStructs in the training layout."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        tree, self.tree(tree))

  def put(self, tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Host arrays that every process holds whole, placed on the mesh.

    A process sends the pieces of its own devices, nothing else.
    """
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(
            np.shape(a), sharding, lambda index: np.asarray(a)[index]), tree)


def _axes_of(path: str) -> tuple[str | None, ...] | None:
  """Entry of AXES for a path or for the end of it."""
  parts = path.split("/")
  for start in range(len(parts)):
    names = AXES.get("/".join(parts[start:]))
    if names is not None:
      return names
  return None


def make_mesh(shape: Sequence[int], devices: Sequence[Any] | None = None
              ) -> jax.sharding.Mesh:
  """A mesh (data, fsdp, tensor) whose data axis crosses slices first.

  Args:
    shape: sizes of the axes.
    devices: all devices of the job; None = jax.devices().

  Raises:
    ConfigError: several slices that the data axis does not divide into.
  """
  devices = list(jax.devices() if devices is None else devices)
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  if slices > 1 and devices[0].platform == "tpu":
    if shape[0] % slices:
      raise fields.ConfigError(
          f"mesh.data: {shape[0]} must be a multiple of the {slices} slices "
          "(only gradients may cross between slices)")
    inner = (shape[0] // slices, *shape[1:])
    grid = mesh_utils.create_hybrid_device_mesh(
        inner, (slices, 1, 1), devices, allow_split_physical_axes=True)
  else:
    grid = mesh_utils.create_device_mesh(
        tuple(shape), devices, allow_split_physical_axes=True)
  return jax.sharding.Mesh(grid, MESH_AXES)


def placement_of(config, devices: Sequence[Any] | None = None
                 ) -> Placement | None:
  """The placement of `config.mesh` on the devices found; None for one.

  Raises:
    ConfigError: the mesh does not fit the devices, or rows do not split.
  """
  devices = list(jax.devices() if devices is None else devices)
  shape = model_checks.mesh_shape(config, len(devices))
  if len(devices) == 1:
    return None
  placement = Placement(make_mesh(shape, devices))
  check_rows(placement, config)
  return placement


def check_rows(placement: Placement, config) -> None:
  """Raises ConfigError where rows do not split evenly over the mesh."""
  for what, rows in (
      ("policy.rows_per_microbatch", config.policy.rows_per_microbatch),
      ("sampling.slots", config.sampling.slots),
      ("sampling.prefill_batch", config.sampling.prefill_batch)):
    if rows % placement.rows:
      near = max(1, round(rows / placement.rows)) * placement.rows
      raise fields.ConfigError(
          f"{what}: {rows} must be a multiple of mesh.data x mesh.fsdp = "
          f"{placement.rows}; nearest: {near}")
  tensor = placement.count("tensor")
  for length in config.policy.row_buckets:
    # Else the update could not run by pieces, which its longest rows allow.
    if length % tensor:
      raise fields.ConfigError(
          f"policy.row_buckets: {length} must be a multiple of mesh.tensor = "
          f"{tensor}")


def cast(piece: jax.Array, dtype, index: jax.Array) -> jax.Array:
  """Piece `index` of a parameter that a loop takes apart, in another dtype.

  Left alone, the compiler casts the whole parameter before the loop and keeps
  that copy, of all parameters, while the loop runs. So each piece is
  multiplied by a 1 of its own, which the compiler cannot know to be one.
  """
  if piece.dtype == dtype:
    return piece
  return (piece * (index < 2**30).astype(piece.dtype)).astype(dtype)


# ------------------------------------------------------------- activations

@dataclasses.dataclass(frozen=True)
class _Active:
  """Of the program that is being traced.

  Attributes:
    placement: None = nothing is constrained.
    hidden: axes of rows and of positions of hidden states between products.
    products: axes of rows of what enters products; None = as it lies.
    layer: rules by which a layer's parameters are split when they are used;
      None = as they lie.
  """

  placement: Placement | None = None
  # Positions over tensor (arXiv 2205.05198): what is kept for the backward
  # pass, and what norms read, is a piece.
  hidden: tuple = (BATCH, "tensor")
  products: tuple | None = None
  layer: Mapping[str, Any] | None = None


_NOWHERE = _Active()
_ACTIVE: contextvars.ContextVar[_Active] = contextvars.ContextVar(
    "activations", default=_NOWHERE)


@contextlib.contextmanager
def activations(placement: Placement | None,
                rows: Sequence[str] | None = None,
                products: Sequence[str] | None = None,
                layer: Mapping[str, Any] | None = None) -> Iterator[None]:
  """While a program is traced: `constrain` refers to this placement.

  Args:
    placement: None = nothing is constrained.
    rows: axes that split rows of hidden states, whose positions are whole
      then; None = data and fsdp, and positions over tensor.
    products: axes that split rows where a product reads them, and `rows` when
      it has been added up; None = left to the compiler.
    layer: rules for a layer's parameters where it is run: what lies in more
      pieces is gathered.
  """
  hidden = _Active.hidden if rows is None else (tuple(rows), None)
  products = None if products is None else tuple(products)
  token = _ACTIVE.set(_Active(placement, hidden, products, layer))
  try:
    yield
  finally:
    _ACTIVE.reset(token)


def active() -> Placement | None:
  """The placement of the program that is being traced."""
  return _ACTIVE.get().placement


def hidden(x: jax.Array) -> jax.Array:
  """Hidden states [B, T, D], split as they are between products."""
  return constrain(x, *_ACTIVE.get().hidden, None)


def entering(x: jax.Array) -> jax.Array:
  """Rows [B, T, D] that enter a product: gathered, where `products` says."""
  rows = _ACTIVE.get().products
  return x if rows is None else constrain(x, rows, None, None)


def leaving(multiply: Callable[..., jax.Array], name: str, x: jax.Array,
            w: jax.Array, axes: int) -> jax.Array:
  """multiply(x, w, axes), added up into pieces where `products` says.

  Written out, because the compiler would add up all rows on every device and
  then take a piece.

  Args:
    multiply: contracts the last axes of x [B, T, ...] with the first of w.
    name: of the layer's parameter w.
  """
  at = _ACTIVE.get()
  if at.products is None:
    return multiply(x, w, axes)
  split = at.placement.spec(f"blocks/{name}", (1, *w.shape), at.layer)[1:]
  over = tuple(a for a in at.hidden[0] if a not in at.products)
  named = [a for part in split[:axes] if part
           for a in ((part,) if isinstance(part, str) else part)]
  if (sorted(named) != sorted(over)
      or x.shape[0] % at.placement.count(at.hidden[0])):
    return hidden(multiply(x, w, axes))

  def local(x, w):
    x = multiply(x, w, axes)
    # One axis at a time: over several, too, it adds up and takes a piece.
    for axis in over:
      x = jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
    return x

  run = jax.shard_map(
      local, mesh=at.placement.mesh,
      in_specs=(P(at.products, None, *split[:axes]), P(*split)),
      out_specs=P(at.hidden[0], None, None), check_vma=False)
  return run(x, w)


def constrain_layer(params: Any, training: bool) -> Any:
  """One layer's parameters, taken from the stack.

  In training they are split as they were. What it fixes is their gradient:
  each device receives the sum of its own piece, instead of every sum and a
  slice of it.
  """
  at = _ACTIVE.get()
  rules = TRAIN_RULES if training else at.layer
  if at.placement is None or rules is None:
    return params
  flat = checkpoints.flatten(params)
  leaves = []
  for path, leaf in flat.items():
    spec = at.placement.spec(f"blocks/{path}", (1, *leaf.shape), rules)
    leaves.append(jax.lax.with_sharding_constraint(
        leaf, at.placement.named(*spec[1:])))
  return jax.tree.unflatten(jax.tree.structure(params), leaves)


def constrain(x: jax.Array, *axes) -> jax.Array:
  """Fixes how an activation is split; without a placement, nothing.

  Args:
    x: any array.
    *axes: per axis None, a mesh axis, or BATCH; one that does not divide the
      axis is dropped.
  """
  placement = active()
  if placement is None:
    return x
  kept = [a if a and n % placement.count(a) == 0 else None
          for a, n in zip(axes, x.shape)]
  return jax.lax.with_sharding_constraint(x, placement.named(*kept))
