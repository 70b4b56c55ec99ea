"""The safetensors format, read lazily and written as a stream.

A file is an 8-byte little-endian length, that many bytes of JSON
({name: {dtype, shape, data_offsets}}), and the tensors' bytes
(https://github.com/huggingface/safetensors, "Format"). Written out here
because reading must not cost a second copy: a tensor is a memory map that
lives only while its slices are copied, and bfloat16 stays bfloat16.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000  # the reference implementation's limit


class CheckpointFileError(ValueError):
  """A weight file is missing, damaged or not what the model needs."""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in a file; its bytes are read when it is viewed."""

  file: str
  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  offset: int

  def __str__(self) -> str:
    return f"{self.file}: tensor {self.name!r}"

  def view(self) -> np.ndarray:
    """Memory map of the tensor, released with the last reference to it."""
    if 0 in self.shape:
      return np.zeros(self.shape, self.dtype)
    return np.memmap(
      self.file, self.dtype, "r", offset=self.offset, shape=self.shape
    )


def read_header(path: str) -> dict[str, Tensor]:
  """The tensors of one file, by name.

  Raises:
    CheckpointFileError: not a safetensors file, or cut off.
  """
  size = os.path.getsize(path)
  with open(path, "rb") as file:
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
      raise CheckpointFileError(
        f"{path}: not a safetensors file, or cut off after {size} bytes"
        + (
          " (it is a Git LFS pointer: fetch the real file with git lfs pull)"
          if start == b"version "
          else ""
        )
      )
    try:
      header = json.loads(file.read(length))
    except ValueError as error:
      raise CheckpointFileError(
        f"{path}: the header is not JSON ({error})"
      ) from error
  header.pop("__metadata__", None)
  return {
    name: _tensor(path, name, fields, 8 + length, size)
    for name, fields in header.items()
  }


def _tensor(path, name, fields, start, size) -> Tensor:
  where = f"{path}: tensor {name!r}"
  shape = tuple(fields["shape"])
  begin, end = fields["data_offsets"]
  if start + end > size:
    raise CheckpointFileError(
      f"{where} ends at byte {start + end}, but the file has only {size}: it "
      "is cut off, download it again"
    )
  dtype = DTYPES.get(fields["dtype"])
  if dtype is None:
    raise CheckpointFileError(
      f"{where} has type {fields['dtype']}, which is not supported; "
      f"supported: {', '.join(DTYPES)}"
    )
  if end - begin != math.prod(shape) * dtype.itemsize:
    raise CheckpointFileError(
      f"{where} has {end - begin} bytes for shape {shape} of {fields['dtype']}"
    )
  return Tensor(path, name, shape, dtype, start + begin)


def read_folder(folder: str) -> dict[str, Tensor]:
  """The tensors of a Hugging Face folder: one file, or several by an index.

  Raises:
    CheckpointFileError: no weights, a missing file, or an index that does not
      agree with its files.
  """
  index = os.path.join(folder, INDEX)
  if not os.path.exists(index):
    single = os.path.join(folder, SINGLE)
    if os.path.exists(single):
      return read_header(single)
    names = sorted(os.listdir(folder))
    others = [name for name in names if name.endswith((".bin", ".pt"))]
    raise CheckpointFileError(
      f"{folder}: neither {SINGLE} nor {INDEX}"
      + (
        f"; {others[0]} is of the old format: load and save_pretrained it once "
        "with transformers, which writes safetensors"
        if others
        else ""
      )
    )
  with open(index, "rb") as file:
    try:
      weight_map = json.load(file)["weight_map"]
    except (ValueError, KeyError) as error:
      raise CheckpointFileError(
        f"{index}: not a JSON object with a 'weight_map' ({error})"
      ) from error
  headers = {}
  for name, file in weight_map.items():
    path = os.path.join(folder, file)
    if file not in headers:
      if not os.path.exists(path):
        raise CheckpointFileError(
          f"{path}: this file is missing; {INDEX} says that it holds {name!r} "
          f"and {sum(f == file for f in weight_map.values()) - 1} more tensors"
        )
      headers[file] = read_header(path)
    if name not in headers[file]:
      near = difflib.get_close_matches(name, headers[file], 1)
      raise CheckpointFileError(
        f"{path}: tensor {name!r} is missing, although {INDEX} names it there"
        + (f"; the nearest in the file is {near[0]!r}" if near else "")
      )
  return {name: headers[file][name] for name, file in weight_map.items()}


@dataclasses.dataclass(frozen=True)
class Planned:
  """A tensor that will be written."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
  folder: str,
  plan: Iterable[Planned],
  values: Iterator[np.ndarray],
  max_file_bytes: int,
) -> list[str]:
  """Writes tensors into one file, or into several with an index.

  Args:
    folder: an existing folder.
    plan: what will come, in order.
    values: the tensors, in the plan's order; each is asked for when it is
      written, so that only one is in memory.
    max_file_bytes: a new file begins rather than pass this; a single larger
      tensor gets a file of its own.

  Returns:
    The names of the files.
  """
  files = [[]]
  for tensor in plan:
    used = sum(t.nbytes for t in files[-1])
    if files[-1] and used + tensor.nbytes > max_file_bytes:
      files.append([])
    files[-1].append(tensor)
  names = [
    SINGLE
    if len(files) == 1
    else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
    for i in range(len(files))
  ]
  for name, tensors in zip(names, files):
    _write_file(os.path.join(folder, name), tensors, values)
  if len(files) > 1:
    index = {
      "metadata": {"total_size": sum(t.nbytes for f in files for t in f)},
      "weight_map": {t.name: n for n, f in zip(names, files) for t in f},
    }
    with open(os.path.join(folder, INDEX), "w") as file:
      json.dump(index, file, indent=2, sort_keys=True)
      file.write("\n")
  return names


def _write_file(path, tensors, values) -> None:
  codes = {dtype: code for code, dtype in DTYPES.items()}
  # transformers asks for this entry before it believes the file.
  header, at = {"__metadata__": {"format": "pt"}}, 0
  for tensor in tensors:
    header[tensor.name] = {
      "dtype": codes[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [at, at + tensor.nbytes],
    }
    at += tensor.nbytes
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # tensors start aligned
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
      value = next(values)
      if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
          f"{tensor.name}: planned {tensor.dtype}{tensor.shape}, got "
          f"{value.dtype}{value.shape}"
        )
      raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
      file.write(memoryview(raw))
