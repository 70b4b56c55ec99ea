"""Files wherever they lie: local paths, and gs:// through TensorFlow."""

import gzip
import io
import os
from typing import BinaryIO

_REMOTE = ("gs://",)


def is_remote(path: str) -> bool:
  """Whether the path names a bucket."""
  return path.startswith(_REMOTE)


def _gfile():
  from vigor_jax.tasks import seqio_tasks

  return seqio_tasks.tf.io.gfile


def exists(path: str) -> bool:
  """Whether a file or folder is there."""
  return _gfile().exists(path) if is_remote(path) else os.path.exists(path)


def is_folder(path: str) -> bool:
  """Whether the path is a folder."""
  return _gfile().isdir(path) if is_remote(path) else os.path.isdir(path)


def names_in(folder: str) -> list[str]:
  """Sorted names of what a folder holds."""
  listing = _gfile().listdir if is_remote(folder) else os.listdir
  return sorted(name.rstrip("/") for name in listing(folder))


def open_binary(path: str) -> BinaryIO:
  """Opens for reading; .gz is unpacked on the way."""
  if is_remote(path):
    with _gfile().GFile(path, "rb") as f:
      raw = io.BytesIO(f.read())
  else:
    raw = open(path, "rb")
  return gzip.open(raw) if path.endswith(".gz") else raw
