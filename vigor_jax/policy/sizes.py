"""Sizes of a transformer: what tells one model from another, without jax."""

import dataclasses
from typing import Any

ROPE_RULES = {"linear": 1, "llama3": 4}  # numbers that follow the name
# Matrices of a layer that adapters may be put beside.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Adapters:
  """Low-rank adapters of a model, see lora.py.

  Attributes:
    rank: columns of A, rows of B; 0: there are none.
    alpha: A B counts alpha / rank times.
    targets: names of TARGETS with commas between.
  """

  rank: int = 0
  alpha: float = 16.0
  targets: str = ",".join(TARGETS)

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(self.targets.split(","))

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Everything that tells one family member from another.

  Attributes:
    layers, width, heads, kv_heads, head_dim, ffn, vocab: sizes.
    qkv_bias: biases on q, k and v (Qwen2).
    qk_norm: RMSNorm over head_dim of q and k before rotation (Qwen3).
    tied: the output head is the transposed embedding.
    rope_theta: rotary base.
    rope_scaling: () or ("llama3", factor, low_freq_factor, high_freq_factor,
      original_max_positions) or ("linear", factor).
    norm_eps: epsilon inside the RMSNorm root.
    dtype: compute dtype ("float32", "bfloat16").
    param_dtype: dtype in which parameters are stored.
    adapters: what is trained instead of all parameters; None: nothing.
  """

  layers: int
  width: int
  heads: int
  kv_heads: int
  head_dim: int
  ffn: int
  vocab: int
  qkv_bias: bool = False
  qk_norm: bool = False
  tied: bool = False
  rope_theta: float = 10000.0
  rope_scaling: tuple[Any, ...] = ()
  norm_eps: float = 1e-6
  dtype: str = "float32"
  param_dtype: str = "float32"
  adapters: Adapters | None = None

  def __post_init__(self):
    for field in (
      "layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab"
    ):
      value = getattr(self, field)
      if not isinstance(value, int) or value < 1:
        raise ValueError(
          f"model.sizes.{field} must be a positive int, got {value!r}"
        )
    if self.heads % self.kv_heads:
      raise ValueError(
        f"model.sizes.heads={self.heads} must be a multiple of "
        f"model.sizes.kv_heads={self.kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(
        f"model.sizes.head_dim={self.head_dim} must be even "
        "(rotary positions rotate pairs)"
      )
    if self.rope_scaling:
      kind, *numbers = self.rope_scaling
      if ROPE_RULES.get(kind) != len(numbers):
        raise ValueError(
          "model.sizes.rope_scaling: expected ('linear', factor) or ('llama3',"
          " factor, low_freq_factor, high_freq_factor, original_max_positions)"
          f", got {self.rope_scaling!r}"
        )

  @property
  def num_params(self) -> int:
    """Number of parameters."""
    attn = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
    bias = self.head_dim * (self.heads + 2 * self.kv_heads) * self.qkv_bias
    block = (
      attn
      + bias
      + 3 * self.width * self.ffn
      + 2 * self.width
      + 2 * self.head_dim * self.qk_norm
    )
    embed = self.vocab * self.width * (1 if self.tied else 2)
    return self.layers * block + embed + self.width
