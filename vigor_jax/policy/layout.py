"""Where every parameter lies in a Hugging Face checkpoint.

A checkpoint holds one tensor per layer, matrices as (out, in); the policy
stacks layers on axis 0 and keeps (in, heads, head_dim) and the like. One
`Entry` says how to see the first as the second: split axes, then permute them.
Both are views, so the slice of a parameter is a slice of the file.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.policy.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Entry:
  """One parameter of the policy in terms of a checkpoint's tensors.

  Attributes:
    path: of the parameter, such as "blocks/attn_norm/scale".
    name: of the tensor; "{}" stands for the layer's index.
    shape: of the tensor.
    split: shape in which it is seen before axes are permuted.
    permutation: axes of `split`, in the parameter's order.
    layers: how many tensors are stacked; 0 where there is just one.
  """

  path: str
  name: str
  shape: tuple[int, ...]
  split: tuple[int, ...]
  permutation: tuple[int, ...]
  layers: int = 0

  @property
  def param_shape(self) -> tuple[int, ...]:
    """Shape of the parameter, with the layers in front."""
    shape = tuple(self.split[axis] for axis in self.permutation)
    return (self.layers, *shape) if self.layers else shape

  def names(self) -> list[str]:
    """The tensors' names, by layer."""
    if not self.layers:
      return [self.name]
    return [self.name.format(i) for i in range(self.layers)]

  def to_param(self, tensor: np.ndarray) -> np.ndarray:
    """A tensor as the parameter (of one layer) sees it: a view."""
    return tensor.reshape(self.split).transpose(self.permutation)

  def to_tensor(self, param: np.ndarray) -> np.ndarray:
    """The inverse of `to_param`; copies where the order differs."""
    back = np.argsort(self.permutation)
    return param.transpose(back).reshape(self.shape)


def entries(sizes: Sizes) -> list[Entry]:
  """All parameters of a transformer of these sizes."""
  d, f, v, hd = sizes.width, sizes.ffn, sizes.vocab, sizes.head_dim
  top = [
    _plain("embed", "model.embed_tokens.weight", (v, d)),
    _plain("final_norm/scale", "model.norm.weight", (d,)),
  ]
  if not sizes.tied:
    top.append(_matrix("head", "lm_head.weight", d, v))

  attention, mlp = "self_attn.", "mlp."
  blocks = [
    _plain("attn_norm/scale", "input_layernorm.weight", (d,)),
    _plain("mlp_norm/scale", "post_attention_layernorm.weight", (d,)),
    _matrix("gate", mlp + "gate_proj.weight", d, f),
    _matrix("up", mlp + "up_proj.weight", d, f),
    _matrix("down", mlp + "down_proj.weight", f, d),
  ]
  for letter, heads in (
    ("q", sizes.heads),
    ("k", sizes.kv_heads),
    ("v", sizes.kv_heads),
  ):
    name = f"{attention}{letter}_proj"
    # [H hd, D] seen as [H, hd, D], then D in front.
    blocks.append(
      Entry(
        letter, f"{name}.weight", (heads * hd, d), (heads, hd, d), (2, 0, 1)
      )
    )
    if sizes.qkv_bias:
      blocks.append(
        Entry(
          f"{letter}_bias", f"{name}.bias", (heads * hd,), (heads, hd), (0, 1)
        )
      )
    if sizes.qk_norm and letter != "v":
      blocks.append(
        _plain(
          f"{letter}_norm/scale", f"{attention}{letter}_norm.weight", (hd,)
        )
      )
  blocks.append(
    Entry(
      "o",
      f"{attention}o_proj.weight",
      (d, sizes.heads * hd),
      (d, sizes.heads, hd),
      (1, 2, 0),
    )
  )
  return top + [
    dataclasses.replace(
      entry,
      path=f"blocks/{entry.path}",
      name=f"model.layers.{{}}.{entry.name}",
      layers=sizes.layers,
    )
    for entry in blocks
  ]


def _plain(path: str, name: str, shape: tuple[int, ...]) -> Entry:
  return Entry(path, name, shape, shape, tuple(range(len(shape))))


def _matrix(path: str, name: str, inside: int, outside: int) -> Entry:
  """A matrix [in, out] that the checkpoint holds as (out, in)."""
  shape = (outside, inside)
  return Entry(path, name, shape, shape, (1, 0))
