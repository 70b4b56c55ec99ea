"""Runs the tasks of a grid, here or in processes of their own.

Both ways report through the same callback, `notify(kind, task, value)`:

  "started", task, None
  "progress", task, what `run` reported
  "done", task, what `run` returned
  "failed", task, the error in words
  "idle", None, None      about once a second when workers say nothing

Worker processes are spawned (JAX must not be forked), each tied to a core of
its own with one thread, since runs that share cores slow each other down more
than they gain. A worker that dies takes one task with it, not the grid.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from vigor_jax import endings

# Seconds that workers get to save and leave after an interruption.
PATIENCE = 120.0
# One thread per worker; XLA's thread pool follows NPROC and the affinity.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "NPROC": "1",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
}
_XLA_FLAG = "--xla_cpu_multi_thread_eigen=false"

# run(task, report) -> result. KeyboardInterrupt from it ends the grid.
Run = Callable[[Any, Callable[[Any], None]], Any]
Notify = Callable[[str, Any, Any], None]


def run_here(phases: Sequence[Sequence], run: Run, notify: Notify) -> None:
  """Runs tasks one by one in this process, which keeps compiled programs.

  Raises:
    KeyboardInterrupt: passed on from `run`.
  """
  for task in (task for tasks in phases for task in tasks):
    notify("started", task, None)

    def report(value, task=task):
      notify("progress", task, value)

    notify(*_outcome(task, run, report, endings.ANSWERED))


def _outcome(task, run: Run, report, in_words=()) -> tuple[str, Any, Any]:
  """What a task came to; tracebacks of errors but `in_words` are printed."""
  try:
    return "done", task, run(task, report)
  except BrokenPipeError:  # the process that asked for it is gone
    raise
  except Exception as error:
    if not isinstance(error, in_words):
      traceback.print_exc(file=sys.stderr)
    return "failed", task, _message(error)


def _message(error: Exception) -> str:
  """An error in words, with its type unless it was raised for a reader."""
  text = str(error).strip()
  if isinstance(error, ValueError) and text:
    return text
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ------------------------------------------------------------------ processes


@dataclasses.dataclass
class _Worker:
  process: Any
  pipe: connection.Connection
  core: int | None
  log: pathlib.Path
  task: Any = None  # what it works on


def run_pool(
  phases: Sequence[Sequence], run: Run, notify: Notify, *, jobs: int, log_folder
) -> None:
  """Runs tasks in `jobs` worker processes that take them from the list.

  Args:
    phases: lists of picklable tasks, handed out in order; a phase begins
      when the one before it is over.
    run: picklable, called in the workers.
    notify: called in this process.
    jobs: number of workers.
    log_folder: what worker k prints goes to worker_k.log there.

  Raises:
    KeyboardInterrupt: after every worker has saved its run and left.
  """
  cores = (
    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
  )
  log_folder = pathlib.Path(log_folder)
  log_folder.mkdir(parents=True, exist_ok=True)
  workers = []
  try:
    for index in range(jobs):
      core = cores[index % len(cores)] if cores else None
      workers.append(_spawn(run, core, log_folder / f"worker_{index}.log"))
    for tasks in phases:
      waiting = collections.deque(tasks)
      while waiting or any(worker.task is not None for worker in workers):
        _hand_out(waiting, workers, run, notify)
        busy = [worker for worker in workers if worker.task is not None]
        if not connection.wait([w.pipe for w in busy], timeout=1.0):
          notify("idle", None, None)
        for worker in busy:
          _listen(worker, notify)
  finally:
    _stop(workers)


def _hand_out(waiting, workers: list[_Worker], run: Run, notify) -> None:
  """Gives every idle worker a task; a dead one is replaced for it."""
  for index, worker in enumerate(workers):
    if worker.task is None and waiting:
      if not worker.process.is_alive():
        worker.pipe.close()
        workers[index] = worker = _spawn(run, worker.core, worker.log)
      worker.task = waiting.popleft()
      notify("started", worker.task, None)
      with contextlib.suppress(BrokenPipeError):  # its death is heard later
        worker.pipe.send(worker.task)


def _spawn(run: Run, core: int | None, log: pathlib.Path) -> _Worker:
  context = multiprocessing.get_context("spawn")
  here, there = context.Pipe()
  process = context.Process(
    target=_serve, args=(there, run, core, str(log)), daemon=True
  )
  flags = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAG}".strip()
  with _environment({**_ENVIRONMENT, "XLA_FLAGS": flags}):
    process.start()
  there.close()
  return _Worker(process, here, core, log)


@contextlib.contextmanager
def _environment(values):
  """Sets variables for the processes started inside."""
  before = {name: os.environ.get(name) for name in values}
  os.environ.update(values)
  try:
    yield
  finally:
    for name, value in before.items():
      if value is None:
        del os.environ[name]
      else:
        os.environ[name] = value


def _listen(worker: _Worker, notify: Notify) -> None:
  """Passes on what a worker has said; notices its death."""
  try:
    while worker.pipe.poll():
      kind, value = worker.pipe.recv()
      task = worker.task
      if kind != "progress":
        worker.task = None
      if kind == "interrupted":
        raise KeyboardInterrupt
      notify(kind, task, value)
  except (EOFError, ConnectionResetError):
    worker.process.join()
    task, worker.task = worker.task, None
    if task is not None:  # one that died idle is replaced for the next task
      notify("failed", task, _death(worker.process.exitcode, worker.log))


def _death(code: int, log: pathlib.Path) -> str:
  if code >= 0:
    return f"its process ended with exit code {code}; see {log}"
  reason = signal.Signals(-code).name
  hint = " (out of memory?)" if reason == "SIGKILL" else ""
  return f"its process was ended by {reason}{hint}; see {log}"


def _stop(workers: Sequence[_Worker]) -> None:
  """Lets idle workers go, asks busy ones to save, and waits for all."""
  for worker in workers:
    if worker.task is not None:
      worker.process.terminate()
    else:
      with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.pipe.send(None)
  deadline = time.monotonic() + PATIENCE
  try:
    for worker in workers:
      worker.process.join(max(0.0, deadline - time.monotonic()))
  finally:  # out of patience, or a second Ctrl-C
    for worker in workers:
      if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
      worker.pipe.close()


def _end_with_parent() -> None:
  """Ends this process when its parent is gone, however that ended.

  A worker that went on alone would hold its cell against the same command,
  given again. Ending at any instant loses nothing that a run has saved.
  """
  connection.wait([multiprocessing.parent_process().sentinel])
  os._exit(1)


def _serve(pipe, run: Run, core: int | None, log: str) -> None:
  """A worker's life: tasks in, outcomes out, until None comes."""
  # A group of its own: Ctrl-C reaches the parent alone, which then asks.
  if hasattr(os, "setpgrp"):
    os.setpgrp()
  threading.Thread(target=_end_with_parent, daemon=True).start()
  if core is not None:
    os.sched_setaffinity(0, {core})
  with open(log, "a", buffering=1, encoding="utf-8") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    while True:
      try:
        task = pipe.recv()
      except EOFError:  # the parent is gone
        return
      if task is None:
        return
      try:
        kind, _, value = _outcome(
          task, run, lambda value: pipe.send(("progress", value))
        )
      except KeyboardInterrupt:
        pipe.send(("interrupted", None))
        return
      pipe.send((kind, value))
