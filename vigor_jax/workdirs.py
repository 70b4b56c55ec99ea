"""Workdirs that are not on this machine: gs://bucket/run.

Lines are appended to local files, which object stores cannot do; whole files
are copied to the remote folder before each checkpoint, which orbax writes
there itself. So a checkpoint that exists remotely has its lines beside it, and
a new machine that is given the same workdir fetches them and goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from typing import Any

# Local copies, one folder per remote workdir.
CACHE = os.path.join("~", ".cache", "vigor_jax", "workdirs")
_SKIPPED = ("checkpoints", "traces")
LOCK_FILE = ".lock"
CELLS = "cells"  # A comparison's folder of runs.


def is_remote(workdir: str | os.PathLike) -> bool:
  """Whether the path is a URL, "gs://bucket/run"."""
  return "://" in os.fspath(workdir)


def join(workdir: str, name: str) -> str:
  """A path inside a workdir; absolute when it is on this machine."""
  if is_remote(workdir):
    return f"{workdir.rstrip('/')}/{name}"
  return os.path.join(os.path.abspath(workdir), name)


def beside(workdir: str, name: str) -> str:
  """A path that a run shares with its neighbours.

  It lies beside the run's folder; for a run of a comparison, beside that of the
  comparison, so that single runs and comparisons share what is kept there.
  """
  folder = workdir.rstrip("/")
  if not is_remote(folder):
    folder = os.path.abspath(folder)
  parent = os.path.dirname(folder)
  if os.path.basename(parent) == CELLS:
    parent = os.path.dirname(os.path.dirname(parent))
  return join(parent, name)


def local(workdir: str) -> str:
  """The local folder of a workdir's files; the workdir itself if local."""
  if not is_remote(workdir):
    return os.fspath(workdir)
  name = workdir.rstrip("/").rsplit("/", 1)[-1]
  digest = hashlib.sha256(workdir.rstrip("/").encode()).hexdigest()[:8]
  return os.path.join(os.path.expanduser(CACHE), f"{name}-{digest}")


class Lock:
  """Keeps a second process out of a folder while this one works in it.

  The lock is the kernel's: it goes with the process, however that ends, and is
  inherited by no child. The file stays. Processes of other machines are kept
  out only where the file system knows such locks (NFS does).

  Args:
    folder: local folder, made if absent.
    what: names the folder's flag in messages.
  """

  def __init__(self, folder: str | os.PathLike, what: str = "--workdir"):
    self._folder, self._what = os.fspath(folder), what
    self._file = None

  def acquire(self) -> None:
    """Takes the lock.

    Raises:
      ValueError: another process has it, or the folder cannot be written to.
    """
    try:
      os.makedirs(self._folder, exist_ok=True)
      file = open(os.path.join(self._folder, LOCK_FILE), "a+")
    except OSError as error:
      raise ValueError(f"{self._what}: {self._folder!r} cannot be written to "
                       f"({error.strerror})") from error
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
      file.seek(0)
      owner = file.read(20).strip()
      file.close()
      raise ValueError(
          f"{self._what}: another process{owner and f' ({owner})'} is at work "
          f"in {self._folder!r}; wait for it, or choose another folder"
      ) from error
    except OSError:  # A file system without locks.
      pass
    file.truncate(0)
    file.write(f"pid {os.getpid()}")
    file.flush()
    self._file = file

  def __enter__(self) -> Lock:
    return self

  def __exit__(self, *unused) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None


def exists(workdir: str, name: str) -> bool:
  """Whether a workdir, remote or not, has a file."""
  path = join(workdir, name)
  return _path(path).exists() if is_remote(path) else os.path.exists(path)


def read(workdir: str, name: str) -> str:
  """Text of a workdir's file."""
  path = join(workdir, name)
  if is_remote(path):
    return _path(path).read_text()
  with open(path) as file:
    return file.read()


def _path(url: str) -> Any:
  from etils import epath  # Here: it brings the client of the object store.
  try:
    return epath.Path(url)
  except Exception as error:
    raise ValueError(f"--workdir={url}: {error}") from error


class Mirror:
  """Copies between a remote workdir and its local folder.

  Nothing is done for a local workdir.
  """

  def __init__(self, workdir: str):
    self._remote = _path(workdir) if is_remote(workdir) else None
    self._local = local(workdir)
    self._pushed: dict[str, tuple[int, int]] = {}

  def fetch(self) -> None:
    """Replaces the local files by the remote ones.

    Raises:
      ValueError: the remote folder cannot be read.
    """
    if self._remote is None:
      return
    os.makedirs(self._local, exist_ok=True)
    for name in os.listdir(self._local):
      # The lock file must stay the one that others look at.
      if name != LOCK_FILE and os.path.isfile(os.path.join(self._local, name)):
        os.unlink(os.path.join(self._local, name))
    try:
      if not self._remote.exists():
        self._remote.mkdir(parents=True)
      for path in self._remote.iterdir():
        if path.name not in _SKIPPED and not path.is_dir():
          with open(os.path.join(self._local, path.name), "wb") as file:
            file.write(path.read_bytes())
    except Exception as error:  # Each store has errors of its own.
      raise ValueError(f"--workdir={self._remote}: cannot be used "
                       f"({type(error).__name__}: {error})") from error

  def push(self) -> None:
    """Copies the local files that changed since the last time."""
    if self._remote is None:
      return
    for folder, folders, names in os.walk(self._local):
      folders[:] = [f for f in folders if f not in _SKIPPED]
      for name in names:
        if name == LOCK_FILE:
          continue
        path = os.path.join(folder, name)
        inside = os.path.relpath(path, self._local)
        stat = os.stat(path)
        stamp = (stat.st_mtime_ns, stat.st_size)
        if self._pushed.get(inside) != stamp:
          target = self._remote / inside
          target.parent.mkdir(parents=True, exist_ok=True)
          with open(path, "rb") as file:
            raw = file.read()
          # Under its name only when it is whole.
          part = target.parent / f".{target.name}.part"
          part.write_bytes(raw)
          part.replace(target)
          self._pushed[inside] = stamp
