"""Model families as data: Llama 2 and 3, SmolLM2, Qwen2, Qwen2.5, Qwen3.

Every family is the one transformer of transformer.py with other sizes. What a
family adds is here: its name in checkpoints, what its models always have, and
how a Hugging Face config.json is read and written. No jax: configuration
files may use `published`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

from vigor_jax.policy.sizes import ROPE_RULES, Sizes


class UnsupportedModel(ValueError):
  """A checkpoint that the transformer here cannot represent."""


@dataclasses.dataclass(frozen=True)
class Family:
  """One model type of Hugging Face, which is also one GGUF architecture.

  Attributes:
    architecture: the class in config.json's "architectures".
    flags: fields of Sizes that all its models share.
    interleaved: GGUF files store the rows of q and k in pairs, for rotations
      of neighbours instead of halves.
    members: models it covers, for messages.
  """

  architecture: str
  flags: Mapping[str, bool]
  interleaved: bool
  members: str


# A new family of this shape is one line here; docs/models.md shows how.
FAMILIES = {
  "llama": Family(
    "LlamaForCausalLM",
    {"qkv_bias": False, "qk_norm": False},
    True,
    "Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2",
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    {"qkv_bias": True, "qk_norm": False},
    False,
    "Qwen2, Qwen2.5",
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    {"qkv_bias": False, "qk_norm": True},
    False,
    "Qwen3 (dense)",
  ),
}

_NUMBER = r"\d+(\.\d+)?(e[+-]?\d+)?"
_QWEN = dict(rope_theta=1e6, norm_eps=1e-6)
_LLAMA3 = dict(vocab=128256, rope_theta=5e5, norm_eps=1e-5)
_SMOL = dict(vocab=49152, head_dim=64, tied=True, norm_eps=1e-5)


def _row(family, layers, width, heads, kv_heads, ffn, **more):
  """One line of the table below."""
  sizes = dict(
    layers=layers,
    width=width,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=128,
    ffn=ffn,
    vocab=151936,
    tied=False,
    **FAMILIES[family].flags,
  )
  return family, {**sizes, **more}


def _scaled(factor):
  return dict(rope_scaling=("llama3", factor, 1.0, 4.0, 8192))


# Sizes of published checkpoints, for compiling and planning without weights;
# with weights, config.json decides.
_PUBLISHED = {
  "qwen2.5-0.5b": _row(
    "qwen2", 24, 896, 14, 2, 4864, head_dim=64, tied=True, **_QWEN
  ),
  "qwen2.5-1.5b": _row("qwen2", 28, 1536, 12, 2, 8960, tied=True, **_QWEN),
  "qwen2.5-3b": _row("qwen2", 36, 2048, 16, 2, 11008, tied=True, **_QWEN),
  "qwen2.5-7b": _row("qwen2", 28, 3584, 28, 4, 18944, vocab=152064, **_QWEN),
  "qwen2.5-14b": _row("qwen2", 48, 5120, 40, 8, 13824, vocab=152064, **_QWEN),
  "qwen2.5-32b": _row("qwen2", 64, 5120, 40, 8, 27648, vocab=152064, **_QWEN),
  "qwen3-0.6b": _row("qwen3", 28, 1024, 16, 8, 3072, tied=True, **_QWEN),
  "qwen3-1.7b": _row("qwen3", 28, 2048, 16, 8, 6144, tied=True, **_QWEN),
  "qwen3-4b": _row("qwen3", 36, 2560, 32, 8, 9728, tied=True, **_QWEN),
  "qwen3-8b": _row("qwen3", 36, 4096, 32, 8, 12288, **_QWEN),
  "qwen3-14b": _row("qwen3", 40, 5120, 40, 8, 17408, **_QWEN),
  "qwen3-32b": _row("qwen3", 64, 5120, 64, 8, 25600, **_QWEN),
  "llama-2-7b": _row(
    "llama", 32, 4096, 32, 32, 11008, vocab=32000, norm_eps=1e-5
  ),
  "llama-3.1-8b": _row(
    "llama", 32, 4096, 32, 8, 14336, **_LLAMA3, **_scaled(8.0)
  ),
  "llama-3.2-1b": _row(
    "llama", 16, 2048, 32, 8, 8192, head_dim=64, tied=True, **_LLAMA3,
    **_scaled(32.0),
  ),
  "llama-3.2-3b": _row(
    "llama", 28, 3072, 24, 8, 8192, tied=True, **_LLAMA3, **_scaled(32.0)
  ),
  "smollm2-135m": _row(
    "llama", 30, 576, 9, 3, 1536, rope_theta=1e5, **_SMOL
  ),
  "smollm2-360m": _row(
    "llama", 32, 960, 15, 5, 2560, rope_theta=1e5, **_SMOL
  ),
  "smollm2-1.7b": _row(
    "llama", 24, 2048, 32, 32, 8192, rope_theta=1.3e5, **_SMOL
  ),
}


def published(name: str) -> dict[str, Any]:
  """Fields of `config.model.sizes` of a published model, "qwen2.5-3b".

  In a configuration file:
    config.model.sizes.update(families.published("qwen2.5-3b"))

  Raises:
    ValueError: not in the table; names the nearest.
  """
  if name not in _PUBLISHED:
    near = difflib.get_close_matches(name.lower(), _PUBLISHED, 1, cutoff=0)
    raise ValueError(
      f"no published sizes of {name!r}: did you mean {near[0]!r}? known: "
      + ", ".join(_PUBLISHED)
    )
  fields = dict(_PUBLISHED[name][1])
  fields["rope_scaling"] = rope_text(fields.get("rope_scaling", ()))
  return fields


def rope_text(scaling: tuple[Any, ...]) -> str:
  """("linear", 2.0) as the configuration's text, "linear:2"."""
  if not scaling:
    return ""
  return f"{scaling[0]}:" + ",".join(f"{x:g}" for x in scaling[1:])


def rope_from_text(text: str) -> tuple[Any, ...]:
  """The inverse of `rope_text`.

  Raises:
    ValueError: not of that form.
  """
  if not text:
    return ()
  kind, _, numbers = text.partition(":")
  if re.fullmatch(f"{_NUMBER}(,{_NUMBER})*", numbers):
    scaling = (kind, *(float(x) for x in numbers.split(",")))
    if ROPE_RULES.get(kind) == len(scaling) - 1:
      return scaling
  raise ValueError(
    "model.sizes.rope_scaling: expected '', 'linear:FACTOR' or "
    f"'llama3:FACTOR,LOW,HIGH,ORIGINAL_POSITIONS', got {text!r}"
  )


def is_pretrained(path: str) -> bool:
  """Whether a local path is a Hugging Face folder or a GGUF file."""
  if path.endswith(".gguf"):
    return os.path.isfile(path)
  # A run's folder has a config.json too.
  return os.path.exists(os.path.join(path, "config.json")) and any(
    ".safetensors" in name or name.endswith(".bin")
    for name in os.listdir(path)
  )


def has_tokenizer(path: str) -> bool:
  """Whether a checkpoint brings its tokenizer."""
  if path.endswith(".gguf"):
    return True
  return bool(path) and os.path.exists(os.path.join(path, "tokenizer.json"))


def family_of(sizes: Sizes) -> str:
  """The family whose checkpoints can hold these sizes.

  Raises:
    UnsupportedModel: no family has this combination of flags.
  """
  for name, family in FAMILIES.items():
    if all(getattr(sizes, k) == v for k, v in family.flags.items()):
      return name
  raise UnsupportedModel(
    f"qkv_bias={sizes.qkv_bias} with qk_norm={sizes.qk_norm} is no published "
    "architecture; legal: at most one of them"
  )


def read_config(
  config: Mapping[str, Any], where: str, *, dtype: str, param_dtype: str
) -> tuple[str, Sizes]:
  """(family, sizes) of a Hugging Face config.json.

  Args:
    config: its content, as transformers 4 or 5 writes it.
    where: the file, for messages.
    dtype, param_dtype: of the computation and of the parameters.

  Raises:
    UnsupportedModel: an architecture or feature that is not implemented; the
      alternative would be wrong logits.
  """
  family = _family(config, where)
  get = lambda name: _required(config, name, where)
  _refuse_features(config, where)
  width, heads = get("hidden_size"), get("num_attention_heads")
  theta, scaling = _rope(config, where)
  try:
    return family, Sizes(
      layers=get("num_hidden_layers"),
      width=width,
      heads=heads,
      kv_heads=config.get("num_key_value_heads") or heads,
      head_dim=config.get("head_dim") or width // heads,
      ffn=get("intermediate_size"),
      vocab=get("vocab_size"),
      tied=bool(config.get("tie_word_embeddings", False)),
      rope_theta=theta,
      rope_scaling=scaling,
      norm_eps=float(config.get("rms_norm_eps", 1e-6)),
      dtype=dtype,
      param_dtype=param_dtype,
      **FAMILIES[family].flags,
    )
  except ValueError as error:
    raise UnsupportedModel(f"{where}: {error}") from error


def _required(config, name, where):
  if not isinstance(config.get(name), int):
    raise UnsupportedModel(
      f"{where}: {name!r} must be a whole number, got {config.get(name)!r}"
    )
  return config[name]


def _family(config, where) -> str:
  name = config.get("model_type")
  if name in FAMILIES:
    return name
  classes = config.get("architectures") or ["unnamed"]
  known = "; ".join(f"{k!r} ({f.members})" for k, f in FAMILIES.items())
  raise UnsupportedModel(
    f"{where}: unknown architecture model_type={name!r} ({classes[0]}); "
    f"supported: {known}"
  )


def _refuse_features(config, where) -> None:
  """Refuses whatever changes the forward pass and is not implemented."""
  wrong = {}
  if config.get("hidden_act", "silu") not in ("silu", "swish"):
    wrong["hidden_act"] = "only 'silu'"
  for name in ("attention_bias", "mlp_bias"):
    if config.get(name):
      wrong[name] = "only false"
  if config.get("use_sliding_window"):
    wrong["use_sliding_window"] = "only false: every layer sees all tokens"
  layers = config.get("layer_types") or []
  if any(kind != "full_attention" for kind in layers):
    wrong["layer_types"] = "only 'full_attention'"
  if config.get("quantization_config"):
    wrong["quantization_config"] = "only unquantised safetensors, or GGUF"
  for name, legal in wrong.items():
    raise UnsupportedModel(
      f"{where}: {name}={config[name]!r} is not supported, {legal}"
    )


def _rope(config, where) -> tuple[float, tuple[Any, ...]]:
  """(theta, Sizes.rope_scaling), from version 4's or 5's fields."""
  scaling = dict(config.get("rope_scaling") or {})
  scaling.update(config.get("rope_parameters") or {})
  theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  fields = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
      "factor",
      "low_freq_factor",
      "high_freq_factor",
      "original_max_position_embeddings",
    ),
  }
  if kind not in fields:
    raise UnsupportedModel(
      f"{where}: rope scaling {kind!r} is not supported; supported: "
      + ", ".join(repr(name) for name in fields)
    )
  missing = [name for name in fields[kind] if name not in scaling]
  if missing:
    raise UnsupportedModel(
      f"{where}: rope scaling {kind!r} lacks {missing[0]!r}"
    )
  numbers = [float(scaling[name]) for name in fields[kind]]
  return theta, (kind, *numbers) if numbers else ()


def write_config(sizes: Sizes, max_positions: int) -> dict[str, Any]:
  """A config.json for these sizes; transformers 4 and 5 read this form.

  Args:
    sizes: of the model.
    max_positions: longest sequence it was used with.
  """
  name = family_of(sizes)
  config = {
    "architectures": [FAMILIES[name].architecture],
    "model_type": name,
    "hidden_act": "silu",
    "hidden_size": sizes.width,
    "intermediate_size": sizes.ffn,
    "num_hidden_layers": sizes.layers,
    "num_attention_heads": sizes.heads,
    "num_key_value_heads": sizes.kv_heads,
    "head_dim": sizes.head_dim,
    "vocab_size": sizes.vocab,
    "max_position_embeddings": max_positions,
    "rms_norm_eps": sizes.norm_eps,
    "rope_theta": sizes.rope_theta,
    "tie_word_embeddings": sizes.tied,
  }
  if sizes.rope_scaling:
    kind, factor, *rest = sizes.rope_scaling
    config["rope_scaling"] = {"rope_type": kind, "factor": factor}
    if kind == "llama3":
      low, high, original = rest
      config["rope_scaling"].update(
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(original),
      )
  return config
