"""A pool of judging processes that survives every one of them.

One thread per worker process hands out completions and waits. A verdict over
its time limit costs its own process, which is killed and replaced; a worker
that dies by another cause has its completion judged again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

from vigor_jax.rewards import worker
from vigor_jax.rewards.verdict import RewardError, shorten

# Judgings of one completion before its workers' deaths become an error.
ATTEMPTS = 3
# Wall seconds for a reward that states no limit of its own; then an error.
DEFAULT_TIME_LIMIT = 300.0
# Seconds to import the reward's module on a cold, busy disk.
_START_LIMIT = 300.0

_START = (
  "import sys, json; a = json.loads(sys.argv[1]); sys.path[:] = a[2];"
  " from vigor_jax.rewards import worker; worker.main(*a)"
)


class Outcome(NamedTuple):
  """A verdict, and what ended the judging: "verdict", or a limit's name."""

  verdict: float
  reason: str


class _Job(NamedTuple):
  fn: Callable[..., float]
  name: str
  completion: str
  answer: str
  kwargs: dict[str, Any]
  index: int
  future: futures.Future


class _Worker:
  """One process and the pipes to it."""

  def __init__(self) -> None:
    child_in, self._requests_fd = os.pipe()
    self._replies_fd, child_out = os.pipe()
    env = dict(os.environ)
    # A reward that touches numerics must not take the accelerator or all cores.
    env.update(JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1")
    arguments = json.dumps([child_in, child_out, sys.path, os.getpid()])
    try:
      self._process = subprocess.Popen(
        [sys.executable, "-c", _START, arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(child_in, child_out),
        env=env,
        start_new_session=True,  # Ctrl-C is the trainer's to handle.
      )
    except BaseException:
      os.close(self._requests_fd)
      os.close(self._replies_fd)
      raise
    finally:
      os.close(child_in)
      os.close(child_out)
    self._requests = os.fdopen(self._requests_fd, "wb")
    self._replies = os.fdopen(self._replies_fd, "rb")
    self.warm: set[str] = set()

  @property
  def pid(self) -> int:
    return self._process.pid

  def ask(self, message: Any, wall: float | None) -> tuple[str, Any]:
    """Sends a message and waits for the reply.

    Returns ("wall", None) when `wall` seconds pass, ("died", exit status) when
    the process ends first; in both cases the worker must be closed. Seconds in
    which the worker waited for a core do not count (until ten times `wall`), so
    that a busy machine changes no verdict.
    """
    try:
      worker.write_message(self._requests, message)
      begun, waited = time.monotonic(), _waited(self.pid)
      left = wall
      while not select.select([self._replies_fd], [], [], left)[0]:
        passed = time.monotonic() - begun
        counted = passed - (_waited(self.pid) - waited)
        left = min(wall - counted, 10 * wall - passed)
        if left <= 0:
          return "wall", None
      return worker.read_message(self._replies)
    except (EOFError, OSError):
      try:
        return "died", self._process.wait(timeout=5)
      except subprocess.TimeoutExpired:
        return "died", None

  def close(self) -> None:
    self._process.kill()
    self._process.wait()
    for stream in (self._requests, self._replies):
      with contextlib.suppress(OSError):  # Unsent bytes of a dead worker.
        stream.close()


def _waited(pid: int) -> float:
  """Seconds a process was ready to run and had no core; 0 if not known."""
  try:
    with open(f"/proc/{pid}/schedstat", "rb") as sched:
      return int(sched.read().split()[1]) / 1e9
  except (OSError, IndexError):
    return 0.0


class Pool:
  """Judges completions in `workers` processes.

  A reward function states its limits as attributes:
    time_limit: CPU seconds per verdict (kernel-enforced; twice that plus one
      second of wall time ends a sleeper; waiting for a core is not counted,
      see `_Worker.ask`). None: it supervises itself. Absent:
      DEFAULT_TIME_LIMIT of wall time.
    memory_limit: bytes a verdict may allocate.
    timeout_verdict: the verdict when a limit is hit. Absent: RewardError.
    warm_up: called once per worker before the first verdict, without limits.
  """

  def __init__(self, workers: int) -> None:
    if workers < 1:
      raise ValueError(f"workers must be at least 1, got {workers}")
    self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._live: set[_Worker] = set()
    self._closed = False
    self._threads = [
      threading.Thread(target=self._serve, name=f"reward-{i}", daemon=True)
      for i in range(workers)
    ]
    for thread in self._threads:
      thread.start()
    atexit.register(self.close)

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers alive now."""
    with self._lock:
      return [w.pid for w in self._live]

  def submit(
    self, fn, name: str, completion: str, answer: str, kwargs, index: int = 0
  ) -> futures.Future:
    """A future of `Outcome`; its error is a RewardError."""
    if self._closed:
      raise RewardError("the reward pool is closed")
    future: futures.Future = futures.Future()
    self._queue.put(
      _Job(fn, name, completion, answer, dict(kwargs), index, future)
    )
    return future

  def close(self) -> None:
    """Kills the workers; verdicts still outstanding fail."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      live = list(self._live)
    atexit.unregister(self.close)
    for process in live:
      with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    for _ in self._threads:
      self._queue.put(None)
    for thread in self._threads:
      thread.join(timeout=10)
    while True:
      try:
        job = self._queue.get_nowait()
      except queue.Empty:
        break
      if job is not None and job.future.set_running_or_notify_cancel():
        job.future.set_exception(RewardError("the reward pool is closed"))

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _serve(self) -> None:
    """Thread body: one worker process, replaced whenever it is lost."""
    held: list[_Worker] = []
    while (job := self._queue.get()) is not None:
      if not job.future.set_running_or_notify_cancel():
        continue
      try:
        job.future.set_result(self._judge(job, held))
      except BaseException as error:  # Reported where the verdict is awaited.
        job.future.set_exception(error)
    self._drop(held)

  def _start(self, held: list[_Worker]) -> _Worker:
    if not held:
      fresh = _Worker()
      held.append(fresh)
      with self._lock:
        self._live.add(fresh)
        closed = self._closed
      if closed:
        self._drop(held)
        raise RewardError("the reward pool is closed")
    return held[0]

  def _drop(self, held: list[_Worker]) -> None:
    while held:
      lost = held.pop()
      with self._lock:
        self._live.discard(lost)
      lost.close()

  def _judge(self, job: _Job, held: list[_Worker]) -> Outcome:
    fn = job.fn
    wall = wall_limit(fn)
    message = (
      "judge",
      fn,
      job.name,
      job.completion,
      job.answer,
      job.kwargs,
      job.index,
      getattr(fn, "time_limit", None),
      getattr(fn, "memory_limit", None),
    )
    what = f"reward {job.name} for completion {job.index}"
    exits = []
    for attempt in range(ATTEMPTS):
      process = self._start(held)
      reason, value = "ready", None
      if job.name not in process.warm:
        reason, value = process.ask(("warm", fn), _START_LIMIT)
        if reason == "wall":  # Says nothing about the completion: no verdict.
          self._drop(held)
          raise RewardError(
            f"{what}: a worker process was not ready after {_START_LIMIT:g} s"
          )
      if reason == "ready":
        process.warm.add(job.name)
        reason, value = process.ask(message, wall)
      if reason == "verdict":
        return Outcome(value, reason)
      if reason == "error":
        raise RewardError(value)
      self._drop(held)
      if self._closed:
        raise RewardError("the reward pool is closed")
      if reason == "died" and value == -signal.SIGXCPU:
        reason = "cpu"
      if reason in ("cpu", "wall", "memory"):
        verdict = getattr(fn, "timeout_verdict", None)
        if verdict is not None:
          return Outcome(float(verdict), reason)
        raise RewardError(
          f"{what} hit its {reason} limit ({shorten(job.completion)}); a"
          " reward that may run long states time_limit and timeout_verdict"
        )
      exits.append(value)
      time.sleep(0.05 * 4**attempt)  # Memory pressure passes, give it time.
    raise RewardError(
      f"{what}: {ATTEMPTS} worker processes died (exit statuses {exits})"
      f" while judging {shorten(job.completion)}"
    )


def wall_limit(fn: Callable[..., float]) -> float | None:
  """Wall seconds that a verdict of a reward may take; None: no limit here."""
  if not hasattr(fn, "time_limit"):
    return DEFAULT_TIME_LIMIT
  return None if fn.time_limit is None else 2 * fn.time_limit + 1


def picklable(fn: Callable[..., float], name: str) -> None:
  """Raises RewardError unless a fresh process can import `fn`."""
  if getattr(fn, "__module__", None) == "__main__":
    raise RewardError(
      f"reward {name} is defined in the main script, which worker processes"
      " do not run: move it to a module, or set its attribute cheap = True"
    )
  try:
    pickle.dumps(fn)
  except Exception as error:
    raise RewardError(
      f"reward {name} cannot be sent to a worker process ({error}): make it"
      " a module-level function, or set its attribute cheap = True"
    ) from error


_shared: Pool | None = None
_shared_lock = threading.Lock()


def available_cpus() -> int:
  """CPU cores this process may run on."""
  try:
    return len(os.sched_getaffinity(0))
  except AttributeError:  # Not Linux.
    return os.cpu_count() or 1


def shared() -> Pool:
  """The process-wide pool behind direct calls of a guarded reward."""
  global _shared
  with _shared_lock:
    if _shared is None or _shared._closed:
      _shared = Pool(min(2, available_cpus()))
    return _shared
