"""GGUF files, seen as a Hugging Face checkpoint: its config and its tensors.

Quantised tensors are dequantised one at a time when they are viewed (with the
gguf package, of the extra "tasks"). Files of the llama architecture store the
rows of q and k in pairs, for rotations of neighbours; they are put back into
halves here, see `_halves`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np

from vigor_jax.policy import families
from vigor_jax.policy.safetensors import CheckpointFileError

_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_BLOCK = {
  "attn_norm": "input_layernorm",
  "ffn_norm": "post_attention_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a GGUF file; dequantised when it is viewed.

  Attributes:
    file, name: where it is, by its own name.
    shape: (out, in), as in Hugging Face checkpoints.
    dtype: of the view: float32.
    raw: the gguf package's ReaderTensor.
    pairs: heads whose rows are stored in pairs; 0: rows are in order.
  """

  file: str
  name: str
  shape: tuple[int, ...]
  raw: Any
  pairs: int = 0
  dtype: np.dtype = np.dtype(np.float32)

  def __str__(self) -> str:
    return f"{self.file}: tensor {self.name!r}"

  def view(self) -> np.ndarray:
    """float32 values in this tensor's shape."""
    from gguf import quants

    try:
      values = quants.dequantize(self.raw.data, self.raw.tensor_type)
    except NotImplementedError as error:
      raise CheckpointFileError(
        f"{self} is quantised as {self.raw.tensor_type.name}, which the gguf "
        "package cannot read back"
      ) from error
    values = np.asarray(values, np.float32).reshape(self.shape)
    return _halves(values, self.pairs) if self.pairs else values


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows (0, h, 1, h + 1, ...) of each head back in order 0, 1, 2, ...

  The converter of llama.cpp (convert_hf_to_gguf.py, LlamaModel.permute) does
  reshape(heads, 2, d / 2, in).swapaxes(1, 2); this is its inverse.
  """
  split = rows.reshape(heads, -1, 2, *rows.shape[1:])
  return split.swapaxes(1, 2).reshape(rows.shape)


def read(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """(config.json that says the same, tensors by their Hugging Face names).

  Raises:
    CheckpointFileError: not a GGUF file, or cut off.
    families.UnsupportedModel: an architecture or rope scaling that is not
      implemented.
  """
  return _read(os.path.abspath(path), os.path.getmtime(path))


# Reading the metadata takes seconds (the tokenizer is in it) and holds a map.
@functools.lru_cache(maxsize=1)
def _read(path: str, modified: float):
  del modified  # a file that was replaced is read again
  try:
    import gguf
  except ModuleNotFoundError as error:
    raise CheckpointFileError(
      f"{path}: GGUF files need the package gguf: pip install "
      "'vigor-jax[tasks]'"
    ) from error
  try:
    reader = gguf.GGUFReader(path)
  except (ValueError, IndexError) as error:
    raise CheckpointFileError(
      f"{path}: not a GGUF file, or cut off ({error})"
    ) from error
  raw = {tensor.name: tensor for tensor in reader.tensors}
  config = _config(path, reader.fields, raw)
  return config, _tensors(path, raw, config)


def _config(path, fields, raw) -> dict[str, Any]:
  read = lambda key, default=None: (
    fields[key].contents() if key in fields else default
  )
  name = read("general.architecture")
  if name not in families.FAMILIES:
    known = ", ".join(repr(n) for n in families.FAMILIES)
    raise families.UnsupportedModel(
      f"{path}: unknown architecture {name!r}; supported: {known}"
    )
  key = lambda suffix, default=None: read(f"{name}.{suffix}", default)
  embedding = raw.get("token_embd.weight")
  if embedding is None:
    raise CheckpointFileError(f"{path}: tensor 'token_embd.weight' is missing")
  config = {
    "architectures": [families.FAMILIES[name].architecture],
    "model_type": name,
    "hidden_act": "silu",
    "hidden_size": key("embedding_length"),
    "intermediate_size": key("feed_forward_length"),
    "num_hidden_layers": key("block_count"),
    "num_attention_heads": key("attention.head_count"),
    "num_key_value_heads": key("attention.head_count_kv"),
    "vocab_size": int(embedding.shape[1]),
    "max_position_embeddings": key("context_length", 2048),
    # Stored as float32: the shortest decimal that means the same.
    "rms_norm_eps": _decimal(key("attention.layer_norm_rms_epsilon", 1e-6)),
    "rope_theta": _decimal(key("rope.freq_base", 10000.0)),
    "tie_word_embeddings": "output.weight" not in raw,
  }
  if key("attention.key_length"):
    config["head_dim"] = key("attention.key_length")
  for token in ("bos", "eos"):
    if read(f"tokenizer.ggml.{token}_token_id") is not None:
      config[f"{token}_token_id"] = read(f"tokenizer.ggml.{token}_token_id")
  kind = key("rope.scaling.type", "none")
  if _ROPE_FACTORS in raw:
    config["rope_scaling"] = _llama3(path, raw[_ROPE_FACTORS], config)
  elif kind != "none":
    config["rope_scaling"] = {
      "rope_type": kind,
      "factor": key("rope.scaling.factor"),
    }
  return config


def _decimal(x: float) -> float:
  return float(str(np.float32(x)))


def _llama3(path, tensor, config) -> dict[str, Any]:
  """Llama 3's rope scaling, which GGUF keeps only as a divisor per frequency.

  All published Llama 3 models have low 1, high 4 and original length 8192;
  the divisors these give are compared with the stored ones.
  """
  divisors = np.asarray(tensor.data, np.float64).reshape(-1)
  factor = float(divisors.max())
  inverse = config["rope_theta"] ** (
    -np.arange(len(divisors)) / len(divisors)
  )
  turns = 8192 * inverse / (2 * np.pi)  # within the original length
  smooth = np.clip((turns - 1) / (4 - 1), 0, 1)
  expected = 1 / ((1 - smooth) / factor + smooth)
  if not np.allclose(expected, divisors, rtol=1e-3):
    raise families.UnsupportedModel(
      f"{path}: tensor {_ROPE_FACTORS!r} is not the rope scaling of Llama 3; "
      "other divisors are not supported"
    )
  return {
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }


def _tensors(path, raw, config) -> dict[str, Tensor]:
  family = families.FAMILIES[config["model_type"]]
  heads = {
    "attn_q": config["num_attention_heads"],
    "attn_k": config["num_key_value_heads"] or config["num_attention_heads"],
  }
  tensors = {}
  for name, tensor in raw.items():
    if name == _ROPE_FACTORS:
      continue
    # A name that is not known keeps its own, and is refused with the rest.
    target, part = _TOP.get(name, name), ""
    if name.startswith("blk."):
      _, layer, part, kind = (name.split(".") + ["", ""])[:4]
      if part in _BLOCK:
        target = f"model.layers.{layer}.{_BLOCK[part]}.{kind}"
    tensors[target] = Tensor(
      path,
      name,
      tuple(int(n) for n in reversed(tensor.shape)),
      tensor,
      pairs=heads.get(part, 0) if family.interleaved else 0,
    )
  return tensors
