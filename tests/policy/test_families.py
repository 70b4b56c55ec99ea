"""Families as data: config.json in its forms, refusals, published sizes."""

import json
import subprocess
import sys

import pytest

from vigor_jax.policy import families
from vigor_jax.policy.sizes import Sizes

TYPES = dict(dtype="float32", param_dtype="float32")

# As published with Llama-3.2-1B, by transformers 4.
LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "bos_token_id": 128000,
  "head_dim": 64,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 8192,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 16,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "vocab_size": 128256,
}
# As published with Qwen2.5-3B.
QWEN = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 11008,
  "max_window_layers": 36,
  "model_type": "qwen2",
  "num_attention_heads": 16,
  "num_hidden_layers": 36,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 32768,
  "tie_word_embeddings": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}


def _read(config):
  return families.read_config(config, "some/config.json", **TYPES)


def _published(name):
  fields = families.published(name)
  fields["rope_scaling"] = families.rope_from_text(fields["rope_scaling"])
  return Sizes(**fields)


def test_published_configs_give_the_published_sizes():
  assert _read(LLAMA) == ("llama", _published("llama-3.2-1b"))
  assert _read(QWEN) == ("qwen2", _published("qwen2.5-3b"))


def test_version_5_of_transformers_keeps_rope_elsewhere():
  config = dict(LLAMA)
  rope = config.pop("rope_scaling")
  config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
  assert _read(config) == _read(LLAMA)


def test_what_old_configs_leave_out():
  """Llama 2: no head_dim, no kv heads, rope_scaling null; linear by "type"."""
  config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "vocab_size": 32000,
  }
  assert _read(config) == ("llama", _published("llama-2-7b"))
  config["rope_scaling"] = {"type": "linear", "factor": 2}
  assert _read(config)[1].rope_scaling == ("linear", 2.0)


@pytest.mark.parametrize(
  "change, words",
  [
    ({"model_type": "phi3"}, ["'phi3'", "LlamaForCausalLM", "'qwen3'"]),
    ({"model_type": "qwen3_moe"}, ["'qwen3_moe'", "Qwen3 (dense)"]),
    ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
    ({"attention_bias": True}, ["attention_bias"]),
    ({"mlp_bias": True}, ["mlp_bias"]),
    ({"use_sliding_window": True}, ["use_sliding_window"]),
    ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config", "GGUF"]),
    (
      {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
      ["'yarn'", "'llama3'"],
    ),
    (
      {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
      ["low_freq_factor"],
    ),
    ({"hidden_size": None}, ["'hidden_size'", "None"]),
    ({"num_key_value_heads": 5}, ["heads=32", "kv_heads=5"]),
  ],
)
def test_what_would_give_wrong_logits_is_refused(change, words):
  with pytest.raises(families.UnsupportedModel) as error:
    _read({**LLAMA, **change})
  for word in ["some/config.json", *words]:
    assert word in str(error.value)


# Counts of the model cards and of the safetensors metadata on the hub.
@pytest.mark.parametrize(
  "name, count",
  [
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264),
    ("llama-2-7b", 6_738_415_616),
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.2-1b", 1_235_814_400),
    ("llama-3.2-3b", 3_212_749_824),
    ("smollm2-135m", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("smollm2-1.7b", 1_711_376_384),
  ],
)
def test_published_sizes_have_the_published_number_of_parameters(name, count):
  sizes = _published(name)
  assert sizes.num_params == count
  # And a config.json that is written for them says the same again.
  config = json.loads(json.dumps(families.write_config(sizes, 4096)))
  family, again = _read(config)
  assert again == sizes
  assert family == families.family_of(sizes)


def test_names_and_texts_that_do_not_exist():
  with pytest.raises(ValueError, match="did you mean 'qwen2.5-3b'"):
    families.published("Qwen2.5-3B-Base")
  assert families.rope_from_text("llama3:8,1,4,8192") == (
    "llama3", 8.0, 1.0, 4.0, 8192.0,
  )
  assert families.rope_from_text("") == ()
  for text in ("llama3:8", "yarn:4", "linear:", "linear:x", "linear:.."):
    with pytest.raises(ValueError, match="linear:FACTOR"):
      families.rope_from_text(text)


def test_biases_with_norms_are_no_family():
  sizes = _published("qwen3-0.6b")
  values = {**vars(sizes), "qkv_bias": True}
  with pytest.raises(families.UnsupportedModel, match="qk_norm=True"):
    families.family_of(Sizes(**values))


def test_configuration_files_may_use_families_without_jax():
  code = (
    "import sys; from vigor_jax.policy import families; "
    "families.published('qwen2.5-3b'); assert 'jax' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
