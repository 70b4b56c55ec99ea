"""Writes the tiny checkpoints in this folder with transformers, on torch.

    pip install torch transformers; python tests/data/models/make.py

Random weights from a fixed seed, large enough that every part (biases, norms,
rope scaling, both heads) moves the logits by far more than the tests allow.
Beside each checkpoint, logits.npz holds tokens int32 [2, 24] and the float32
logits [2, 24, V] of transformers' own forward pass, eager attention.
"""

import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
COMMON = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=256,
  bos_token_id=1,
  eos_token_id=2,
)


def models():
  """{folder: (config, dtype, largest file)}."""
  return {
    # Tied, one file.
    "qwen2_tiny": (
      transformers.Qwen2Config(
        **COMMON, tie_word_embeddings=True, rope_parameters=_rope(1e6)
      ),
      torch.float32,
      "1GB",
    ),
    # head_dim is not width / heads; bfloat16; several files with an index.
    "qwen3_tiny": (
      transformers.Qwen3Config(
        **COMMON,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters=_rope(1e6),
      ),
      torch.bfloat16,
      "16KB",
    ),
    # All three bands of the scaling rule have frequencies.
    "llama3_tiny": (
      transformers.LlamaConfig(
        **COMMON,
        head_dim=16,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters=dict(
          _rope(1e4),
          rope_type="llama3",
          factor=8.0,
          low_freq_factor=1.0,
          high_freq_factor=4.0,
          original_max_position_embeddings=64,
        ),
      ),
      torch.float32,
      "48KB",
    ),
  }


def _rope(theta):
  return dict(rope_theta=theta, rope_type="default")


def main():
  for number, (name, (config, dtype, largest)) in enumerate(models().items()):
    torch.manual_seed(number)
    model = transformers.AutoModelForCausalLM.from_config(
      config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
      for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
          parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        elif parameter_name.endswith("bias"):
          parameter.copy_(torch.randn_like(parameter))
        else:
          scale = parameter.shape[-1] ** -0.5
          parameter.copy_(2 * scale * torch.randn_like(parameter))
    model = model.to(dtype)
    model.save_pretrained(FOLDER / name, max_shard_size=largest)
    # Read back, so that the rotary tables are made in float32.
    model = transformers.AutoModelForCausalLM.from_pretrained(
      FOLDER / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.default_rng(number).integers(0, 96, (2, 24))
    with torch.no_grad():
      logits = model(torch.tensor(tokens)).logits.numpy()
    np.savez_compressed(
      FOLDER / name / "logits.npz",
      tokens=tokens.astype(np.int32),
      logits=logits.astype(np.float32),
    )


if __name__ == "__main__":
  main()
