"""A running sandbox: its process, its limits, and what it reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from vigor_jax.rewards.verdict import RewardError


class SandboxError(RewardError):
  """The sandbox failed, not the program in it."""


class SandboxUnavailable(SandboxError):
  """This machine cannot run the sandbox; says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one test may use.

  Attributes:
    cpu: CPU seconds of all its processes together. A test that does not compute
      ends after cpu + 1 seconds of wall time, in which the time it waited for a
      core does not count, so that a busy machine changes no verdict (10 cpu +
      10 at most; 2 cpu + 1 where the kernel does not count the waiting).
    memory: bytes of address space per process, and of memory for all together.
    output: bytes of standard output; more is a failure.
    processes: processes and threads at once.
    files: open files per process.
    file_size: bytes per file; the scratch folder holds four times as much.
  """

  cpu: float = 6.0
  memory: int = 1 << 30
  output: int = 8 << 20
  processes: int = 32
  files: int = 64
  file_size: int = 16 << 20

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (not value > 0)
      ):
        raise ValueError(f"limits.{field.name} must be positive, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Run:
  """How one test went.

  Attributes:
    reason: "exit", "signal", or the limit that ended it: "cpu", "wall",
      "memory", "processes", "output".
    code: exit status or signal number, where there is one.
    stdout: what it printed; empty unless reason is "exit".
    result: JSON of the called function's value, likewise.
    stderr: the beginning of its error output.
    cpu, wall: seconds.
  """

  reason: str
  code: int | None
  stdout: bytes
  result: bytes
  stderr: bytes
  cpu: float
  wall: float


class SandboxProcess:
  """One running sandbox; a context manager that leaves no process."""

  def __init__(self, command: list[str]) -> None:
    self._errors: list[bytes] = []
    try:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={},
      )
    except OSError as error:
      raise SandboxError(f"the sandbox did not start: {error}") from error
    self._expired = False
    self._reader = threading.Thread(target=self._read_errors, daemon=True)
    self._reader.start()

  def __enter__(self) -> SandboxProcess:
    return self

  def __exit__(self, *unused) -> None:
    self._kill()
    self._process.wait()
    self._reader.join(timeout=5)
    for stream in (
      self._process.stdin,
      self._process.stdout,
      self._process.stderr,
    ):
      with contextlib.suppress(OSError):  # Unsent bytes of a dead sandbox.
        stream.close()

  def _read_errors(self) -> None:
    """Keeps the first lines that bubblewrap or the driver complain in."""
    kept = 0
    while chunk := self._process.stderr.read1(1 << 12):
      if kept < 1 << 12:
        self._errors.append(chunk)
        kept += len(chunk)

  def _kill(self) -> None:
    # Killing bubblewrap ends its namespace, and with it all processes there;
    # without one (unsafe), the process group.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)

  def expire(self) -> None:
    """Ends a sandbox that outlived every limit of its own."""
    self._expired = True
    self._kill()

  def send(self, request: bytes) -> None:
    try:
      self._process.stdin.write(request)
      self._process.stdin.close()
    except OSError as error:
      raise SandboxError(
        f"the sandbox refused its input ({error}): {self.complaint()}"
      ) from error

  def complaint(self) -> str:
    """What it printed as errors, for a message."""
    self._kill()
    status = self._process.wait()
    self._reader.join(timeout=5)
    text = b"".join(self._errors).decode("utf-8", "replace").strip()
    if self._expired:
      return "it outlived its limits and was killed"
    return text[-1500:] or f"exit status {status}"

  @property
  def output(self) -> BinaryIO:
    return self._process.stdout


def read_runs(
  process: SandboxProcess, limits: Limits, tests: int
) -> Iterator[Run]:
  """Parses what the driver writes, refusing anything it would not write."""
  stream = process.output

  def line() -> dict[str, Any]:
    raw = stream.readline(1 << 16)
    try:
      header = json.loads(raw)
    except ValueError:
      header = None
    if not isinstance(header, dict):
      raise SandboxError(f"the sandbox broke off: {process.complaint()}")
    if "fault" in header:
      raise SandboxError(f"the sandbox failed: {header['fault']}")
    return header

  if line() != {"ready": True}:
    raise SandboxError("the sandbox did not report ready")
  for index in range(tests):
    header = line()
    sizes = header.get("sizes")
    if header.get("test") != index or not (
      isinstance(sizes, list)
      and len(sizes) == 3
      and all(isinstance(s, int) and 0 <= s <= limits.output for s in sizes)
    ):
      raise SandboxError("the sandbox wrote a frame that is not its own")
    parts = [stream.read(size) for size in sizes]
    if [len(part) for part in parts] != sizes:
      raise SandboxError(f"the sandbox broke off: {process.complaint()}")
    yield Run(
      header["reason"], header["code"], *parts, header["cpu"], header["wall"]
    )
