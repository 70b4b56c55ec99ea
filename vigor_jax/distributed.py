"""Several processes that run one training loop together.

Every process of a job runs the same loop on the same rows: what the sampler
reports is whole on every host. Where hosts could come apart they exchange a
few bytes through the coordination service of jax.distributed, each time with
a time limit:

  decisions    process 0 looks at the workdir, the others are told
  verdicts     each process scores its share, all get every verdict
  agreement    a digest of (ids, counts, tokens, rewards) before the update
  signals      a host that was told to stop stops all after the same step

A host that dies is noticed by its missing heartbeat, one that is stuck by the
time limit, one that computes something else by the digest. Each ends the job
on every host with a message and a non-zero exit code. With one process all of
this is a few dictionary look-ups.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import glob
import hashlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Exit code of a process that gave up on the others (sysexits' EX_TEMPFAIL:
# the same command goes on from the last checkpoint).
EXIT_LOST = 75
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES",
             "JAX_PROCESS_ID")
_START_SECONDS = 300
# A host is given up after this long without a heartbeat.
_HEARTBEAT_SECONDS = 30
_SHUTDOWN_SECONDS = 30


class HostLost(RuntimeError):
  """Another process of the job died, is stuck, or decided differently."""


class Cluster:
  """The processes of a job; `cluster()` is this process's view.

  Args:
    rank: of this process, 0 is the one that writes files.
    count: of processes.
    store: key-value store of the coordination service; None for one process.
    timeout: seconds to wait for the slowest process.
  """

  def __init__(self, rank: int = 0, count: int = 1, store: Any = None,
               timeout: float = 900.0):
    self.rank, self.count, self.timeout = rank, count, timeout
    self._store = store
    self._turn = 0
    self._mine: list[str] = []
    self._progress = time.monotonic()
    self._watched = False

  @property
  def primary(self) -> bool:
    """Whether this process writes the run's files and speaks."""
    return self.rank == 0

  def exchange(self, what: str, payload: bytes) -> list[bytes]:
    """Every process's payload, by rank; all must call it in the same order.

    Args:
      what: names the exchange in messages.
      payload: of this process.

    Raises:
      HostLost: a process did not answer within `timeout` seconds.
    """
    self._progress = time.monotonic()
    if self.count == 1:
      return [payload]
    self._turn += 1
    key = f"vigor_jax/{self._turn}"
    self._store.key_value_set_bytes(f"{key}/{self.rank}", payload)
    deadline = time.monotonic() + self.timeout
    result = []
    for rank in range(self.count):
      left = max(1, int(1000 * (deadline - time.monotonic())))
      try:
        result.append(payload if rank == self.rank else
                      self._store.blocking_key_value_get_bytes(
                          f"{key}/{rank}", left))
      except Exception as error:  # The service's own error classes vary.
        raise HostLost(
            f"process {rank} of {self.count} did not answer within "
            f"{self.timeout:g} s ({what}): it died, is stuck, or another "
            "error ended it; its own output says which. The same command on "
            "all hosts goes on from the last checkpoint") from error
    # All have begun this turn, so all have read the turn before the last.
    self._mine.append(f"{key}/{self.rank}")
    if len(self._mine) > 2:
      self._store.key_value_delete(self._mine.pop(0))
    self._progress = time.monotonic()
    return result

  def from_first(self, what: str, decide: Callable[[], Any]) -> Any:
    """What process 0 decides (anything JSON can hold), on every process.

    An exception of `decide` is raised on all of them, a ValueError with the
    same text on the others.
    """
    if self.count == 1:
      return decide()
    answer, failure = None, None
    if self.primary:
      try:
        answer = {"value": decide()}
      except Exception as error:
        answer, failure = {"error": str(error)}, error
    told = json.loads(self.exchange(what, json.dumps(answer).encode())[0])
    if failure is not None:
      raise failure
    if "error" in told:
      raise ValueError(told["error"])
    return told["value"]

  def largest(self, what: str, number: int) -> int:
    """The largest of all processes' numbers."""
    return max(map(int, self.exchange(what, str(number).encode())))

  def agree(self, what: str, parts: Mapping[str, Any]) -> None:
    """Checks that all processes hold the same values; see `digest`.

    Args:
      what: names the moment, "step 12".
      parts: {name: array or anything JSON can hold}.

    Raises:
      HostLost: processes differ; names the parts.
    """
    if self.count == 1:
      return
    mine = {name: digest(value) for name, value in parts.items()}
    answers = [json.loads(raw) for raw in self.exchange(
        f"agreement before {what}", json.dumps(mine).encode())]
    first = answers[0]
    for rank, other in enumerate(answers):
      wrong = [name for name in first if other.get(name) != first[name]]
      if wrong:
        raise HostLost(
            f"{what}: process {rank} and process 0 hold different "
            f"{', '.join(wrong)}. Hosts must run the same code, configuration "
            "and data; nothing of this step was applied")

  def watch(self) -> None:
    """Ends this process when it waits too long for a device.

    A computation that another host never joins has no time limit of its own;
    with this, a step has twice `timeout`. Call it once programs are compiled,
    which takes as long as it takes; again is harmless.
    """
    if self.count == 1 or self._watched:
      return
    self._watched = True
    self._progress = time.monotonic()
    threading.Thread(target=self._watchdog, daemon=True).start()

  def _watchdog(self) -> None:
    while True:
      time.sleep(min(5.0, self.timeout / 4))
      silent = time.monotonic() - self._progress
      if silent > 2 * self.timeout:
        faulthandler.dump_traceback(sys.stderr)
        give_up(f"no progress for {silent:.0f} s (mesh.host_timeout="
                f"{self.timeout:g}): another host has left a computation, or "
                "a step needs longer than that")


_cluster = Cluster()


def cluster() -> Cluster:
  """This process's view of the job."""
  return _cluster


def digest(value: Any) -> str:
  """Short hash of an array (dtype, shape and bytes) or of JSON."""
  if isinstance(value, np.ndarray):
    raw = f"{value.dtype}{value.shape}".encode() + value.tobytes()
  else:
    raw = json.dumps(value, sort_keys=True).encode()
  return hashlib.sha256(raw).hexdigest()[:16]


def give_up(message: str, code: int = EXIT_LOST) -> None:
  """Ends this process at once: a normal exit would wait for the others."""
  rank = f"process {_cluster.rank}: " if _cluster.count > 1 else ""
  sys.stdout.flush()
  print(f"error: {rank}{message}", file=sys.stderr, flush=True)
  os._exit(code)


@contextlib.contextmanager
def guarded(passing: type[Exception]):
  """Ends a process of a job on any error without waiting for the others.

  Args:
    passing: an exception that all processes raise together: it is let through.
  """
  try:
    yield
  except Exception as error:
    if _cluster.count == 1 or isinstance(error, passing):
      raise
    if not isinstance(error, (HostLost, ValueError)):
      traceback.print_exc()
    give_up(f"{type(error).__name__}: {error}",
            EXIT_LOST if isinstance(error, HostLost) else 1)


def initialize(timeout: float, environ: Mapping[str, str] | None = None
               ) -> Cluster:
  """Joins the job that the environment describes, before jax is used.

  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID describe it
  (launch/local.sh sets them); on a Cloud TPU VM jax finds out by itself.

  Args:
    timeout: seconds to wait for the slowest process in an exchange.
    environ: environment variables; None = this process's.

  Raises:
    ValueError: some of the variables are missing or no numbers.
  """
  global _cluster
  environ = os.environ if environ is None else environ
  arguments = _described(environ)
  if arguments is None:
    return _cluster
  import jax
  from jax._src import distributed  # The store has no public name.
  before = signal.getsignal(signal.SIGTERM)
  jax.distributed.initialize(
      **arguments, initialization_timeout=_START_SECONDS,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
  # Its preemption notifier would swallow the signal that ends us.
  signal.signal(signal.SIGTERM, before)
  _cluster = Cluster(jax.process_index(), jax.process_count(),
                     distributed.global_state.client, timeout)
  return _cluster


@functools.cache
def connect(mesh: Any) -> None:
  """Opens every connection that collectives on a mesh of CPU devices need.

  The CPU backend opens those of a set of devices at its first collective, and
  ends the process when another comes 30 s later, as where each compiles first.
  Those that are open wait as long as it takes. All processes must call this.
  """
  devices = mesh.devices.flat
  if _cluster.count == 1 or devices[0].platform != "cpu":
    return
  import jax
  everyone = jax.sharding.PartitionSpec(mesh.axis_names)
  ones = jax.make_array_from_callback(
      (len(devices),), jax.sharding.NamedSharding(mesh, everyone),
      lambda index: np.ones(len(devices), np.float32)[index])
  sets = [axes for k in range(1, 1 + len(mesh.axis_names))
          for axes in itertools.combinations(mesh.axis_names, k)]
  # Compiled by all of them before the first one runs.
  programs = [jax.jit(jax.shard_map(
      functools.partial(jax.lax.psum, axis_name=axes), mesh=mesh,
      in_specs=everyone, out_specs=everyone)).lower(ones).compile()
      for axes in sets]
  _cluster.exchange("connecting", b"")
  for program in programs:
    jax.block_until_ready(program(ones))


def _described(environ: Mapping[str, str]) -> dict[str, Any] | None:
  """Arguments of jax.distributed.initialize; None for a single process."""
  given = [name for name in VARIABLES if environ.get(name)]
  if not given:
    on_tpu_vm = (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
                 ) and importlib.util.find_spec("libtpu")
    cpu = environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu"
    return {} if on_tpu_vm and not cpu else None
  missing = [name for name in VARIABLES if name not in given]
  if missing:
    raise ValueError(f"{', '.join(missing)}: not set, but {given[0]} is; a "
                     f"job of several processes needs {', '.join(VARIABLES)}")
  address, count, rank = (environ[name] for name in VARIABLES)
  if not (count.isdigit() and rank.isdigit() and int(rank) < int(count)):
    raise ValueError(f"JAX_NUM_PROCESSES={count!r} and JAX_PROCESS_ID={rank!r}"
                     ": expected a count and a number below it")
  if int(count) == 1:
    return None
  return dict(coordinator_address=address, num_processes=int(count),
              process_id=int(rank))


# ----------------------------------------------------------------- verdicts


class SharedScorer:
  """A Scorer of which each process judges its share of the completions.

  Completion i is judged by process i mod count: neighbours, which tend to be
  equally long, are spread out. Everything else is the scorer's own.
  """

  def __init__(self, scorer: Any, cluster: Cluster):
    self._scorer, self._cluster = scorer, cluster

  def __getattr__(self, name: str) -> Any:
    return getattr(self._scorer, name)

  def __enter__(self) -> SharedScorer:
    return self

  def __exit__(self, *unused) -> None:
    self._scorer.close()

  def submit(self, completions: Sequence[str], answers: Sequence[str],
             metadata: Sequence[dict[str, Any]] | None = None) -> Any:
    """See Scorer.submit; errors are raised by `collect`, on all processes."""
    mine = slice(self._cluster.rank, None, self._cluster.count)
    handle = error = None
    try:
      if len(completions[mine]):
        handle = self._scorer.submit(
            completions[mine], answers[mine],
            None if metadata is None else metadata[mine])
    except Exception as caught:
      error = caught
    return len(completions), handle, error

  def collect(self, handle: Any) -> np.ndarray:
    """See Scorer.collect.

    Raises:
      RewardError: a verdict is refused here.
      ValueError: on another process; with its message.
    """
    size, inner, error = handle
    verdicts = np.zeros(0, np.float32)
    if error is None and inner is not None:
      try:
        verdicts = self._scorer.collect(inner)
      except Exception as caught:
        error = caught
    payload = b"+" + verdicts.tobytes() if error is None else (
        b"!" + str(error).encode())
    answers = self._cluster.exchange("verdicts", payload)
    if error is not None:
      raise error
    out = np.zeros(size, np.float32)
    for rank, raw in enumerate(answers):
      if raw[:1] == b"!":
        raise ValueError(f"process {rank}: {raw[1:].decode()}")
      out[rank::self._cluster.count] = np.frombuffer(raw[1:], np.float32)
    return out

  def score(self, completions, answers, metadata=None) -> np.ndarray:
    """Submits and collects."""
    return self.collect(self.submit(completions, answers, metadata))


def shared(scorer: Any) -> Any:
  """The scorer itself in a single process, else its shared form."""
  return scorer if _cluster.count == 1 else SharedScorer(scorer, _cluster)
