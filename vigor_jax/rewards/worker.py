"""The process that judges: reads one completion at a time, answers a verdict.

Started by `pool.Pool` as a fresh interpreter (not forked from the trainer, not
multiprocessing's spawn, which would import the trainer's main module and with
it jax). It imports the reward's module and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import struct
import sys
import time
import traceback
from typing import Any, BinaryIO

from vigor_jax.rewards.verdict import RewardError, check_verdict

_HEADER = struct.Struct("!Q")
_PAGE = resource.getpagesize()
_PR_SET_PDEATHSIG = 1
_supervised = False


def supervised() -> bool:
  """True inside a worker, where the pool enforces time and memory limits."""
  return _supervised


def write_message(stream: BinaryIO, message: Any) -> None:
  data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
  stream.write(_HEADER.pack(len(data)) + data)
  stream.flush()


def read_message(stream: BinaryIO) -> Any:
  """The next message; EOFError when the other side has gone."""
  header = stream.read(_HEADER.size)
  if len(header) < _HEADER.size:
    raise EOFError("the other side closed the pipe")
  (size,) = _HEADER.unpack(header)
  data = stream.read(size)
  if len(data) < size:
    raise EOFError("the other side closed the pipe within a message")
  return pickle.loads(data)


def _set_soft(kind: int, value: int) -> None:
  hard = resource.getrlimit(kind)[1]
  if hard != resource.RLIM_INFINITY:
    value = hard if value == resource.RLIM_INFINITY else min(value, hard)
  resource.setrlimit(kind, (value, hard))


def _limit(cpu_seconds: float | None, memory_bytes: int | None) -> None:
  """Limits for the next verdict, counted from what the process has used.

  The CPU limit is the kernel's and ends the process (SIGXCPU), whatever C code
  it is in. It counts whole seconds and is rounded down, to one at least.
  """
  cpu = memory = resource.RLIM_INFINITY
  if cpu_seconds is not None:
    used = time.process_time()
    cpu = max(int(used) + 1, int(used + cpu_seconds))
  if memory_bytes is not None:
    try:
      with open("/proc/self/statm", encoding="ascii") as statm:
        memory = int(statm.read().split()[0]) * _PAGE + memory_bytes
    except OSError:  # No /proc: leave room for what the interpreter maps.
      memory = memory_bytes + (1 << 30)
  _set_soft(resource.RLIMIT_CPU, cpu)
  _set_soft(resource.RLIMIT_AS, memory)


def _judge(fn, name, completion, answer, kwargs, index) -> tuple[str, Any]:
  try:
    value = fn(completion, answer, **kwargs)
  except MemoryError:
    return "memory", None
  except RewardError as error:
    return "error", str(error)
  except (Exception, SystemExit) as error:
    return "error", (
      f"reward {name} raised {type(error).__name__}: {error} for completion"
      f" {index}\n{traceback.format_exc()}"
    )
  try:
    return "verdict", check_verdict(value, name, completion, index)
  except RewardError as error:
    return "error", str(error)


def _end_with_parent(parent: int) -> None:
  """Linux: has the kernel end this process when the trainer is gone.

  An idle worker notices by its pipe; one that a reward keeps for ever would
  not. The signal comes when the pool's thread that started it ends, too.
  """
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # It went before the kernel was asked.
    os._exit(1)


def main(
  requests_fd: int, replies_fd: int, parent_paths: list[str], parent: int
) -> None:
  """Serves requests until the pipe closes."""
  global _supervised
  _supervised = True
  _end_with_parent(parent)
  sys.path[:] = parent_paths
  for fd in (requests_fd, replies_fd):
    os.set_inheritable(fd, False)
  os.dup2(2, 1)  # What a reward prints must not reach the trainer's stdout.
  requests = os.fdopen(requests_fd, "rb")
  replies = os.fdopen(replies_fd, "wb")
  while True:
    try:
      kind, *rest = read_message(requests)
    except EOFError:
      return
    # The reward's module fails to import here.
    except (Exception, SystemExit) as error:
      write_message(
        replies,
        (
          "error",
          f"a reward worker could not load its function: {error}\n"
          f"{traceback.format_exc()}",
        ),
      )
      continue
    if kind == "warm":
      warm_up = getattr(rest[0], "warm_up", None)
      try:
        if warm_up is not None:
          warm_up()
        reply = ("ready", None)
      except (Exception, SystemExit) as error:
        reply = ("error", f"{error}\n{traceback.format_exc()}")
    else:
      fn, name, completion, answer, kwargs, index, cpu, memory = rest
      _limit(cpu, memory)
      reply = _judge(fn, name, completion, answer, kwargs, index)
      _limit(None, None)
    write_message(replies, reply)
    if reply[0] == "memory":
      return  # A heap that hit its limit is not trusted with the next one.
