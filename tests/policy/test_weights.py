"""Pretrained weights: logits, round trips, placement, damage, GGUF, export."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from vigor_jax import checkpoints
from vigor_jax import config as config_lib
from vigor_jax import experiment
from vigor_jax import export
from vigor_jax.policy import attention
from vigor_jax.policy import build
from vigor_jax.policy import families
from vigor_jax.policy import gguf_file
from vigor_jax.policy import layout
from vigor_jax.policy import safetensors
from vigor_jax.policy import transformer
from vigor_jax.policy import weights

MODELS = pathlib.Path(__file__).parents[1] / "data" / "models"
TINY = ("qwen2_tiny", "qwen3_tiny", "llama3_tiny")


def _load(path, **types):
  _, sizes = weights.read_sizes(str(path), **types)
  return weights.from_checkpoint(str(path), sizes), sizes


def _logits(params, sizes, tokens):
  model = nnx.merge(transformer.abstract(sizes)[0], params)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _ = model(jnp.asarray(tokens), positions, attention.causal_attend)
  return np.asarray(model.logits(hidden))


def _equal(first, second):
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second),
    strict=True,
  ):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), str(path))


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name):
  params, sizes = _load(MODELS / name)
  stored = np.load(MODELS / name / "logits.npz")
  logits = _logits(params, sizes, stored["tokens"])
  assert stored["logits"].std() > 1  # The tolerance below means something.
  assert np.abs(logits - stored["logits"]).max() < 1e-4


def test_parameters_have_the_type_that_is_asked_for():
  narrow, _ = _load(MODELS / "llama3_tiny", param_dtype="bfloat16")
  wide, _ = _load(MODELS / "llama3_tiny")
  _equal(narrow, jax.tree.map(lambda a: a.astype(jnp.bfloat16), wide))
  # The file is bfloat16: nothing is lost in either direction.
  narrow, _ = _load(MODELS / "qwen3_tiny", param_dtype="bfloat16")
  wide, _ = _load(MODELS / "qwen3_tiny")
  _equal(wide, jax.tree.map(lambda a: a.astype(jnp.float32), narrow))


@pytest.mark.parametrize("name", TINY)
def test_a_parameter_is_a_view_of_the_file(name):
  """So a slice of a parameter reads that slice's bytes and no others."""
  _, sizes = weights.read_sizes(str(MODELS / name))
  tensors = safetensors.read_folder(str(MODELS / name))
  for entry in layout.entries(sizes):
    for tensor_name in entry.names():
      view = tensors[tensor_name].view()
      assert np.shares_memory(entry.to_param(view), view)
  shapes = transformer.abstract(sizes)[1]
  assert sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(shapes)) == (
    sorted(entry.param_shape for entry in layout.entries(sizes))
  )


_PLACEMENT = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from vigor_jax.policy import transformer, weights
path = {path!r}
_, sizes = weights.read_sizes(path)
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
_, abstract = transformer.abstract(sizes)
specs = dict(q=P(None, "fsdp", "tensor"), o=P(None, "tensor", None, "fsdp"),
             up=P("fsdp", None, ("data", "tensor")), embed=P("tensor", "fsdp"))
def of(keys, leaf):
  return NamedSharding(mesh, specs.get(keys[-2].key, P()))
shardings = jax.tree_util.tree_map_with_path(of, abstract)
placed = weights.from_checkpoint(path, sizes, shardings)
whole = weights.from_checkpoint(path, sizes)
for a, b, sharding in zip(*map(jax.tree.leaves, (placed, whole, shardings))):
  assert a.sharding.is_equivalent_to(sharding, a.ndim), (a.sharding, sharding)
  assert len(a.addressable_shards) == 8
  for shard in a.addressable_shards:
    np.testing.assert_array_equal(shard.data, np.asarray(b)[shard.index])
assert len({{s.data.shape for s in placed["blocks"]["q"][...].addressable_shards}}
           ) == 1
assert placed["blocks"]["q"][...].addressable_shards[0].data.shape == (2, 16, 2, 16)
assert placed["blocks"]["up"][...].addressable_shards[0].data.shape == (1, 32, 12)
one = weights.from_checkpoint(path, sizes, NamedSharding(mesh, P()))
assert all(a.is_fully_replicated for a in jax.tree.leaves(one))
print("placed")
"""


def test_every_device_gets_its_shard():
  code = _PLACEMENT.format(path=str(MODELS / "qwen3_tiny"))
  flags = "--xla_force_host_platform_device_count=8"
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True, text=True,
  )
  assert done.stdout == "placed\n", done.stderr


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("largest", [4 << 30, 20_000])
def test_round_trip_is_bit_equal(name, largest, tmp_path):
  dtype = "bfloat16" if name == "qwen3_tiny" else "float32"
  params, sizes = _load(MODELS / name, param_dtype=dtype)
  source = str(MODELS / name)
  folder = str(tmp_path / "out")
  files = weights.to_folder(
    params, sizes, folder, config=weights.config_of(source), tokenizer=source,
    max_file_bytes=largest,
  )
  assert files == sorted(os.listdir(folder))
  assert "generation_config.json" in files
  assert ("model.safetensors" in files) == (largest > 20_000)
  before, after = map(safetensors.read_folder, (source, folder))
  assert set(before) == set(after)
  for tensor_name, tensor in before.items():
    written = after[tensor_name]
    assert (written.shape, written.dtype) == (tensor.shape, tensor.dtype)
    assert written.view().tobytes() == tensor.view().tobytes()
  assert weights.config_of(folder) == weights.config_of(source)
  again, same = _load(folder, param_dtype=dtype)
  assert same == sizes
  _equal(again, params)


def test_files_stay_below_their_limit(tmp_path):
  params, sizes = _load(MODELS / "qwen2_tiny")
  weights.to_folder(params, sizes, str(tmp_path / "out"), max_file_bytes=20_000)
  index = json.loads((tmp_path / "out" / safetensors.INDEX).read_text())
  assert index["metadata"]["total_size"] == 4 * sizes.num_params
  names = set(index["weight_map"].values())
  assert len(names) == 5 and "model-00005-of-00005.safetensors" in names
  for name in names:
    header = safetensors.read_header(str(tmp_path / "out" / name))
    size = sum(4 * int(np.prod(t.shape)) for t in header.values())
    assert size <= 20_000


def test_an_export_never_overwrites_and_never_leaves_half(tmp_path):
  params, sizes = _load(MODELS / "qwen2_tiny")
  (tmp_path / "used").mkdir()
  (tmp_path / "used" / "file").touch()
  with pytest.raises(ValueError, match="not an empty folder"):
    weights.to_folder(params, sizes, str(tmp_path / "used"))
  broken = jax.tree.map(lambda a: a[:1], params)
  with pytest.raises((ValueError, IndexError)):
    weights.to_folder(broken, sizes, str(tmp_path / "new"))
  assert not (tmp_path / "new").exists()


def test_a_smaller_type_is_rounded(tmp_path):
  params, sizes = _load(MODELS / "qwen2_tiny")
  folder = str(tmp_path / "out")
  weights.to_folder(params, sizes, folder, dtype="bfloat16")
  assert weights.config_of(folder)["torch_dtype"] == "bfloat16"
  again, _ = _load(folder)
  rounded = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)
  _equal(again, jax.tree.map(rounded, params))


# ------------------------------------------------------------------- damage


@pytest.fixture
def copy(tmp_path):
  """copy(name) -> a folder that may be damaged."""

  def make(name):
    shutil.copytree(MODELS / name, tmp_path / name)
    return tmp_path / name

  return make


def _rewrite(folder, change):
  """Writes a single-file folder again with {name: array} changed."""
  tensors = {
    name: np.array(t.view())
    for name, t in safetensors.read_folder(str(folder)).items()
  }
  change(tensors)
  plan = [safetensors.Planned(n, a.shape, a.dtype) for n, a in tensors.items()]
  safetensors.write_folder(str(folder), plan, iter(tensors.values()), 1 << 30)


def _refused(folder):
  with pytest.raises(ValueError) as error:
    _load(folder)
  return str(error.value)


def test_a_missing_tensor_is_named(copy):
  folder = copy("qwen2_tiny")
  _rewrite(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
  message = _refused(folder)
  assert str(folder) in message
  assert "'model.layers.1.self_attn.k_proj.bias' is missing" in message
  assert "blocks/k_bias" in message and "1 of 26" in message


def test_a_wrong_shape_is_named(copy):
  folder = copy("qwen2_tiny")
  name = "model.layers.0.mlp.up_proj.weight"
  _rewrite(folder, lambda t: t.update({name: t[name].T.copy()}))
  message = _refused(folder)
  assert f"{folder}/model.safetensors: tensor {name!r}" in message
  assert "(32, 48)" in message and "(48, 32)" in message


@pytest.mark.parametrize(
  "name",
  [
    "model.layers.2.mlp.up_proj.weight",  # one layer more
    "model.layers.0.self_attn.o_proj.bias",
    "score.weight",  # a value head
  ],
)
def test_a_tensor_that_would_be_ignored_is_refused(copy, name):
  folder = copy("qwen2_tiny")
  _rewrite(folder, lambda t: t.update({name: np.zeros((4, 4), np.float32)}))
  message = _refused(folder)
  assert f"tensor {name!r} is not part of the model" in message


def test_harmless_extras_are_left_out(copy):
  folder = copy("qwen2_tiny")
  before, _ = _load(folder)
  extras = {
    "lm_head.weight": np.zeros((96, 32), np.float32),  # tied
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
  }
  _rewrite(folder, lambda t: t.update(extras))
  _equal(_load(folder)[0], before)


def test_files_that_are_missing_or_damaged(copy):
  folder = copy("llama3_tiny")
  second = folder / "model-00002-of-00003.safetensors"
  whole = second.read_bytes()

  second.write_bytes(whole[:-1])
  assert f"{second}: tensor" in (message := _refused(folder))
  assert "cut off" in message
  second.write_bytes(whole[:100])
  assert f"{second}: not a safetensors file, or cut off" in _refused(folder)
  second.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
  assert "Git LFS pointer" in _refused(folder)
  second.write_bytes((8).to_bytes(8, "little") + b"not json")
  assert f"{second}: the header is not JSON" in _refused(folder)
  second.unlink()
  message = _refused(folder)
  assert f"{second}: this file is missing" in message

  index = folder / safetensors.INDEX
  second.write_bytes(whole)
  good = json.loads(index.read_text())
  bad = dict(good, weight_map={
    **good["weight_map"], "model.norms.weight": second.name})
  index.write_text(json.dumps(bad))
  message = _refused(folder)
  assert "'model.norms.weight' is missing" in message
  index.write_text("{}")
  assert f"{index}: not a JSON object with a 'weight_map'" in _refused(folder)
  index.unlink()
  assert "neither model.safetensors nor" in _refused(folder)
  (folder / "pytorch_model.bin").touch()
  assert "pytorch_model.bin is of the old format" in _refused(folder)
  (folder / "config.json").write_text("{")
  assert f"{folder}/config.json: not JSON" in _refused(folder)
  (folder / "config.json").unlink()
  assert f"{folder}/config.json: no such file" in _refused(folder)
  assert "copy the folder" in _refused("gs://bucket/model")


def test_types_that_cannot_be_read_are_named(copy):
  folder = copy("qwen2_tiny")
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
  assert "has type I32" in _refused(folder)
  path.write_bytes(path.read_bytes().replace(b'"I32"', b'"F16"', 1))
  assert "bytes for shape" in _refused(folder)


# --------------------------------------------------------------------- GGUF


def _converted(name, array, config):
  """A tensor's GGUF name and content, as llama.cpp's converter writes them.

  Names: gguf's own table. Permutation: convert_hf_to_gguf.py, LlamaModel.
  """
  family = config["model_type"]
  arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == family)
  table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
  new = table.get_name(name, try_suffixes=(".weight", ".bias"))
  heads = {
    "q_proj": config["num_attention_heads"],
    "k_proj": config["num_key_value_heads"],
  }.get(name.split(".")[-2])
  if family == "llama" and heads:
    half = array.shape[0] // heads // 2
    split = array.reshape(heads, 2, half, *array.shape[1:])
    array = split.swapaxes(1, 2).reshape(array.shape)
  return new, array


def _write_gguf(path, name, quantised=(), extra=None):
  config = weights.config_of(str(MODELS / name))
  writer = gguf.GGUFWriter(str(path), config["model_type"])
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(256)
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  writer.add_head_count_kv(config["num_key_value_heads"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
  if "head_dim" in config:
    writer.add_key_length(config["head_dim"])
  for hf_name, tensor in safetensors.read_folder(str(MODELS / name)).items():
    array = np.asarray(tensor.view(), np.float32)
    new, array = _converted(hf_name, array, config)
    if hf_name.endswith(quantised):
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(new, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
      writer.add_tensor(new, array)
  for new, array in (extra or {}).items():
    writer.add_tensor(new, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)


def _llama3_divisors(theta, head_dim, factor):
  """rope_freqs.weight as llama.cpp's converter computes it."""
  divisors = []
  for i in range(0, head_dim, 2):
    wavelength = 2 * np.pi * theta ** (i / head_dim)
    if wavelength < 8192 / 4:
      divisors.append(1.0)
    elif wavelength > 8192 / 1:
      divisors.append(factor)
    else:
      smooth = (8192 / wavelength - 1) / (4 - 1)
      divisors.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(divisors, np.float32)


@pytest.mark.parametrize("name", TINY)
def test_gguf_gives_the_same_parameters(name, tmp_path):
  path = _write_gguf(tmp_path / "model.gguf", name)
  params, sizes = _load(path)
  wanted, wanted_sizes = _load(MODELS / name)
  _equal(params, wanted)
  # GGUF has no place for Llama 3's rule; see the test of rope_freqs.
  assert sizes == wanted_sizes or name == "llama3_tiny"


def test_gguf_is_dequantised(tmp_path):
  parts = ("q_proj.weight", "up_proj.weight", "embed_tokens.weight")
  path = _write_gguf(tmp_path / "model.gguf", "llama3_tiny", quantised=parts)
  params, _ = _load(path)
  wanted, _ = _load(MODELS / "llama3_tiny")
  for keys in (("blocks", "q"), ("blocks", "up"), ("embed",)):
    a, b = params, wanted
    for key in keys:
      a, b = a[key], b[key]
    error = np.abs(np.asarray(a[...]) - np.asarray(b[...]))
    # Q8_0 keeps 127 steps up to the largest of each 32 values.
    assert 0 < error.max() <= np.abs(np.asarray(b[...])).max() / 127
  np.testing.assert_array_equal(
    np.asarray(params["head"][...]), np.asarray(wanted["head"][...])
  )


def test_gguf_rope_scaling_is_recognised_by_its_divisors(tmp_path):
  right = _llama3_divisors(10000.0, 16, 8.0)
  assert right[0] == 1 and right[-1] == 8  # theta 1e4 reaches 6283 * 3.2
  extra = {"rope_freqs.weight": right}
  path = _write_gguf(tmp_path / "right.gguf", "llama3_tiny", extra=extra)
  assert weights.read_sizes(path)[1].rope_scaling == (
    "llama3", 8.0, 1.0, 4.0, 8192.0,
  )
  _load(path)
  extra = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
  path = _write_gguf(tmp_path / "wrong.gguf", "llama3_tiny", extra=extra)
  with pytest.raises(families.UnsupportedModel, match="rope_freqs.weight"):
    weights.read_sizes(path)


def test_gguf_errors_name_the_file(tmp_path):
  path = tmp_path / "model.gguf"
  assert f"{path}: no such file" in _refused(path)
  path.write_bytes(b"something else entirely")
  assert f"{path}: not a GGUF file" in _refused(path)
  writer = gguf.GGUFWriter(str(path), "phi3")
  writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  assert "unknown architecture 'phi3'" in _refused(path)
  extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
  path = _write_gguf(tmp_path / "extra.gguf", "qwen2_tiny", extra=extra)
  assert "'blk.0.attn_sinks.weight' is not part of the model" in _refused(path)


def test_pairs_are_undone_by_hand():
  """One head of four rows: stored 0 2 1 3 becomes 0 1 2 3."""
  rows = np.array([[0.0], [2.0], [1.0], [3.0]])
  np.testing.assert_array_equal(
    gguf_file._halves(rows, 1), [[0.0], [1.0], [2.0], [3.0]]
  )


# --------------------------------------------------- configuration and runs


def _config(checkpoint, **fields):
  config = config_lib.default_config()
  with config.unlocked():
    config.model.checkpoint = str(checkpoint)
    for name, value in fields.items():
      if name == "family":
        config.model.family = value
      else:
        config.model.sizes[name] = value
  return config_lib.validate(config)


def test_sizes_follow_the_checkpoint():
  for family in ("tiny", "qwen2"):
    sizes = build.sizes_of(_config(MODELS / "qwen2_tiny", family=family), 96)
    assert sizes == weights.read_sizes(str(MODELS / "qwen2_tiny"))[1]


@pytest.mark.parametrize(
  "fields, vocab, words",
  [
    (dict(family="qwen3"), 96, ["'qwen3'", "'qwen2'", "qwen2_tiny"]),
    (dict(layers=3), 96, ["model.sizes.layers=3", "has 2"]),
    (dict(), 97, ["96", "97", "vocabulary", "qwen2_tiny"]),
  ],
)
def test_a_checkpoint_of_another_model_is_refused(fields, vocab, words):
  config = _config(MODELS / "qwen2_tiny", **fields)
  with pytest.raises(ValueError) as error:
    build.sizes_of(config, vocab)
  for word in words:
    assert word in str(error.value)


def test_a_run_starts_from_the_checkpoint():
  """The arithmetic task has 16 ids, which 96 hold."""
  parts = experiment.build(_config(MODELS / "qwen2_tiny"))
  with parts.scorer:
    _equal(parts.fresh_params(0), _load(MODELS / "qwen2_tiny")[0])


def test_text_tasks_take_the_tokenizer_of_the_checkpoint(copy, tmp_path):
  import tokenizers

  folder = copy("qwen2_tiny")
  letters = {c: i for i, c in enumerate("<abcdefghijklmnopqrstuvwxyz>")}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(letters, [], unk_token="<")
  )
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text('{"eos_token": ">"}')
  records = [dict(prompt=2 * c, answer=c) for c in "abcdefghijklmnop"]
  path = tmp_path / "records.jsonl"
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  config = config_lib.from_json(json.dumps({
    "task": {"name": "jsonl", "path": str(path)},
    "model": {"checkpoint": str(folder)},
  }))
  task = experiment.make_task(config)
  assert task.vocabulary.vocab_size == 28
  assert task.vocabulary.encode("cab") == [3, 1, 2]
  assert set(task.stop_ids) == {27, 2}  # tokenizer's and config.json's


def test_export_writes_a_runs_checkpoint(tmp_path, capsys):
  config = config_lib.default_config()
  with config.unlocked():
    config.model.sizes.qkv_bias = True
    config.model.family = "qwen2"
  sizes = build.sizes_of(config, experiment.make_task(config).vocabulary.vocab_size)
  workdir, folder = str(tmp_path / "run"), str(tmp_path / "out")
  made = {}
  store = checkpoints.Checkpoints(workdir)
  for step in (1, 2):
    made[step] = transformer.create(sizes, step)[1]
    store.save(step, made[step], {"m": jnp.zeros(1)}, {})
  store.close()
  (tmp_path / "run" / "config.json").write_text(config_lib.to_json(config))

  export.main(["export", f"--workdir={workdir}", f"--to={folder}"])
  assert f"step 2 of {workdir} is in {folder}" in capsys.readouterr().out
  params, same = _load(folder)
  assert same == sizes
  _equal(params, made[2])
  step, _ = export.export(workdir, f"{folder}1", step=1)
  assert step == 1
  _equal(_load(f"{folder}1")[0], made[1])
  for arguments, words in [
    ([f"--to={folder}"], "not an empty folder"),
    ([f"--to={folder}3", "--step=3"], "there are [1, 2]"),
  ]:
    with pytest.raises(SystemExit) as stop:
      export.main(["export", f"--workdir={workdir}", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_export_of_a_pretrained_run_keeps_its_config(tmp_path):
  source = str(MODELS / "qwen3_tiny")
  config = _config(source)
  with config.unlocked():
    config.model.param_dtype = "bfloat16"
  params, sizes = _load(source, param_dtype="bfloat16")
  workdir = str(tmp_path / "run")
  store = checkpoints.Checkpoints(workdir)
  store.save(5, params, {"m": jnp.zeros(1)}, {})
  store.close()
  (tmp_path / "run" / "config.json").write_text(config_lib.to_json(config))
  export.export(workdir, str(tmp_path / "out"))
  assert weights.config_of(str(tmp_path / "out")) == weights.config_of(source)
  again, _ = _load(tmp_path / "out", param_dtype="bfloat16")
  _equal(again, params)
  assert jax.tree.leaves(again)[0].dtype == ml_dtypes.bfloat16
