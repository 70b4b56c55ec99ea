"""Pretrained weights in and out: Hugging Face folders, and GGUF files in.

Reading is lazy and direct: a parameter's shards are allocated once, filled
from slices of the file's tensors (those of other hosts are never touched), and
put on their devices. On CPU devices the filled memory *is* the device's array.
Peak host memory is what the mesh holds plus one tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from vigor_jax.policy import families
from vigor_jax.policy import gguf_file
from vigor_jax.policy import layout
from vigor_jax.policy import safetensors
from vigor_jax.policy import transformer
from vigor_jax.policy.safetensors import CheckpointFileError
from vigor_jax.policy.sizes import Sizes

CONFIG = "config.json"
# What belongs to a model's tokenizer and generation, copied as it is.
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "vocab.json",
  "merges.txt",
  "tokenizer.model",
  "generation_config.json",
)
_BLOCK = 1 << 18  # elements copied at once
_ALIGNMENT = 64  # jax on CPU adopts host memory at such an address


def config_of(path: str) -> dict[str, Any]:
  """The config.json of a checkpoint; a GGUF file's metadata in that form.

  Raises:
    CheckpointFileError: nothing there, or not JSON.
  """
  if path.endswith(".gguf"):
    _check_local(path)
    return gguf_file.read(path)[0]
  where = os.path.join(path, CONFIG)
  _check_local(where)
  with open(where, "rb") as file:
    try:
      return json.load(file)
    except ValueError as error:
      raise CheckpointFileError(f"{where}: not JSON ({error})") from error


def _check_local(path: str) -> None:
  if "://" in path:
    raise CheckpointFileError(
      f"{path}: weights are read from local files; copy the folder to every "
      "host first (gcloud storage cp -r), or mount the bucket"
    )
  if not os.path.exists(path):
    raise CheckpointFileError(
      f"{path}: no such file; expected a Hugging Face folder with {CONFIG}, or "
      "a .gguf file"
    )


def read_sizes(
  path: str, *, dtype: str = "float32", param_dtype: str = "float32"
) -> tuple[str, Sizes]:
  """(family, sizes) of a checkpoint, from its own configuration.

  Args:
    path: a Hugging Face folder, or a .gguf file.
    dtype, param_dtype: of the computation and of the parameters.
  """
  where = path if path.endswith(".gguf") else os.path.join(path, CONFIG)
  return families.read_config(
    config_of(path), where, dtype=dtype, param_dtype=param_dtype
  )


def from_checkpoint(path: str, sizes: Sizes, shardings: Any = None) -> Any:
  """Parameters of `transformer.create(sizes, ...)`, read from a checkpoint.

  Args:
    path: a Hugging Face folder (one safetensors file, or several with an
      index), or a .gguf file.
    sizes: as `read_sizes` gives them; param_dtype is what is made.
    shardings: where parameters go: one jax Sharding for all, or a tree of
      them in the parameters' structure. None: the first local device.

  Raises:
    CheckpointFileError: a file is missing or damaged, or a tensor is missing,
      not expected or of another shape; names file and tensor.
  """
  if path.endswith(".gguf"):
    _check_local(path)
    tensors = gguf_file.read(path)[1]
  else:
    _check_local(os.path.join(path, CONFIG))
    tensors = safetensors.read_folder(path)
  entries = layout.entries(sizes)
  _check(path, entries, tensors, sizes)

  _, abstract = transformer.abstract(sizes)
  leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
  names = [_path_name(keys) for keys, _ in leaves]
  if shardings is None:
    shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if isinstance(shardings, jax.sharding.Sharding):
    shardings = [shardings] * len(names)
  else:
    shardings = jax.tree.leaves(shardings)
  where = dict(zip(names, shardings, strict=True))
  # The largest first, so that the last ones find room where they passed.
  order = sorted(entries, key=lambda e: -np.prod(e.param_shape))
  dtype = np.dtype(jax.numpy.dtype(sizes.param_dtype))
  made = {e.path: _load(e, tensors, dtype, where[e.path]) for e in order}
  return jax.tree.unflatten(structure, [made[name] for name in names])


def _path_name(keys) -> str:
  """"blocks/attn_norm/scale" of a leaf; flax adds a step below each."""
  parts = [getattr(key, "key", getattr(key, "name", None)) for key in keys]
  return "/".join(str(part) for part in parts if part != "value")


def _check(path, entries, tensors, sizes) -> None:
  """Compares what the model needs with what the checkpoint holds."""
  expected = {name: entry for entry in entries for name in entry.names()}
  for name, entry in expected.items():
    found = tensors.get(name)
    if found is None:
      gone = sum(other not in tensors for other in expected)
      raise CheckpointFileError(
        f"{path}: tensor {name!r} is missing (the model's {entry.path}); "
        f"{gone} of {len(expected)} are"
      )
    if found.shape != entry.shape:
      raise CheckpointFileError(
        f"{found} has shape {found.shape}, the model's configuration asks for "
        f"{entry.shape} ({entry.path})"
      )
  for name, tensor in tensors.items():
    # Old Llama files keep rotary tables; tied ones may repeat the embedding.
    known = name.endswith("rotary_emb.inv_freq") or (
      sizes.tied and name == "lm_head.weight"
    )
    if name not in expected and not known:
      raise CheckpointFileError(
        f"{tensor} is not part of the model that the configuration describes "
        f"({sizes.layers} layers, qkv_bias={sizes.qkv_bias}, "
        f"qk_norm={sizes.qk_norm}); leaving it out would change the results"
      )


def _load(entry, tensors, dtype, sharding) -> jax.Array:
  """One parameter on its devices: this host's shards, each read once."""
  shape = entry.param_shape
  slots, buffers = [], {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
    if spans not in buffers:
      buffers[spans] = _aligned([b - a for a, b in spans], dtype)
    slots.append((device, spans))
  for layer, name in enumerate(entry.names()):
    inside = {
      spans: buffer
      for spans, buffer in buffers.items()
      if not entry.layers or spans[0][0] <= layer < spans[0][1]
    }
    if not inside:
      continue
    source = entry.to_param(tensors[name].view())
    for spans, buffer in inside.items():
      if entry.layers:
        (first, _), *spans = spans
        buffer = buffer[layer - first]
      _copy(buffer, source[tuple(slice(a, b) for a, b in spans)])
    del source  # unmaps the file
  arrays = [jax.device_put(buffers[spans], device) for device, spans in slots]
  # A later parameter must not wait for memory that a transfer still reads.
  return jax.block_until_ready(
    jax.make_array_from_single_device_arrays(shape, sharding, arrays)
  )


def _aligned(shape, dtype: np.dtype) -> np.ndarray:
  """Uninitialised memory that a CPU device can adopt without a copy."""
  size = int(np.prod(shape)) * dtype.itemsize
  raw = np.empty(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
  """target[...] = source, by blocks of the file's rows that fit in a cache.

  A transposed copy of a whole matrix takes more than twice as long.
  """
  axis = int(np.argmax(source.strides))
  rows = source.shape[axis]
  step = max(1, _BLOCK * rows // source.size)
  for first in range(0, rows, step):
    part = (slice(None),) * axis + (slice(first, first + step),)
    _copy_block(target[part], source[part])


def _copy_block(target: np.ndarray, source: np.ndarray) -> None:
  """target[...] = source; bfloat16 by its bits, several times faster."""
  bits = source.dtype == ml_dtypes.bfloat16
  if bits and target.dtype == source.dtype:
    target.view(np.uint16)[...] = source.view(np.uint16)
  elif bits and target.dtype == np.float32:
    # bfloat16 is the upper half of float32.
    wide = target.view(np.uint32)
    wide[...] = source.view(np.uint16)
    np.left_shift(wide, 16, out=wide)
  else:
    target[...] = source


def check_free(folder: str) -> None:
  """Raises ValueError unless a folder can be written: absent or empty."""
  if os.path.exists(folder) and (
    not os.path.isdir(folder) or os.listdir(folder)
  ):
    raise ValueError(f"{folder}: exists and is not an empty folder")


def to_folder(
  params: Any,
  sizes: Sizes,
  folder: str,
  *,
  config: Mapping[str, Any] | None = None,
  tokenizer: str = "",
  dtype: str = "",
  max_file_bytes: int = 4 << 30,
) -> list[str]:
  """Writes a folder that transformers' from_pretrained loads.

  It is written beside the target and renamed when it is whole.

  Args:
    params: of a transformer; every shard on this host.
    sizes: of that transformer.
    folder: must not exist, or be empty.
    config: the config.json to keep, with the dtype set; by default one is
      made from the sizes.
    tokenizer: folder whose tokenizer files are copied, or a .gguf file whose
      tokenizer is written out; empty: none.
    dtype: "float32", "bfloat16" or "float16"; empty: as in memory.
    max_file_bytes: larger models are split into several files with an index.

  Returns:
    Names of the files written.

  Raises:
    ValueError: the folder is in use, or params lie on other hosts too.
  """
  check_free(folder)
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  values = {_path_name(keys): leaf for keys, leaf in leaves}
  for name, value in values.items():
    if not getattr(value, "is_fully_addressable", True):
      raise ValueError(
        f"{name} lies on several hosts; save a checkpoint, and export it with "
        "one process (python -m vigor_jax.export)"
      )
  dtype = dtype or sizes.param_dtype
  kept = dict(config or families.write_config(sizes, max_positions=32768))
  kept["dtype" if "dtype" in kept else "torch_dtype"] = dtype
  target = np.dtype(jax.numpy.dtype(dtype))
  entries = layout.entries(sizes)
  plan = [
    safetensors.Planned(name, entry.shape, target)
    for entry in entries
    for name in entry.names()
  ]
  unfinished = f"{os.path.normpath(folder)}.unfinished"
  shutil.rmtree(unfinished, ignore_errors=True)
  os.makedirs(unfinished)
  with open(os.path.join(unfinished, CONFIG), "w") as file:
    json.dump(kept, file, indent=2)
    file.write("\n")
  safetensors.write_folder(
    unfinished, plan, _tensors(entries, values, target), max_file_bytes
  )
  if tokenizer:
    _write_tokenizer(tokenizer, unfinished)
  if os.path.isdir(folder):
    os.rmdir(folder)
  os.rename(unfinished, folder)
  return sorted(os.listdir(folder))


def _tensors(entries, values, dtype) -> Iterator[np.ndarray]:
  """The checkpoint's tensors, in the entries' order."""
  for entry in entries:
    param = np.asarray(values[entry.path])  # on CPU a view
    for layer in range(max(entry.layers, 1)):
      one = param[layer] if entry.layers else param
      yield entry.to_tensor(one).astype(dtype, copy=False)


def _write_tokenizer(source: str, folder: str) -> None:
  if not source.endswith(".gguf"):
    for name in TOKENIZER_FILES:
      path = os.path.join(source, name)
      if os.path.exists(path):
        shutil.copyfile(path, os.path.join(folder, name))
    return
  from vigor_jax.tasks import pretrained

  vocabulary = pretrained.from_gguf(source)
  vocabulary.tokenizer.save(os.path.join(folder, "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    **vocabulary.special_tokens,
  }
  if vocabulary.chat_template is not None:
    config["chat_template"] = vocabulary.chat_template
  with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
    json.dump(config, file, indent=2, ensure_ascii=False)
    file.write("\n")
