"""JetStream's driver, with what would end the process put right.

Its threads do the work: prefill, transfer, generate, detokenise. What is
changed around them, and why:

- `delete_pytree` calls jax.tree_map, which jax no longer has: the first insert
  would kill the process.
- Importing it turns all logging to DEBUG on stdout.
- The generate thread asserts that some slot is taken. The detokenise thread may
  free the last one just before, and the assertion kills the process. So slots
  that were freed show up only after the next `generate`.
- A request that its client gave up keeps its slot to the end. Here it counts as
  complete at its next chunk.
- The prefill queue has no end.
"""

from __future__ import annotations

import collections
import importlib
import logging
import queue
import threading
from typing import Any

import jax

from vigor_jax.sampling import jetstream_engine


def _import_orchestrator() -> Any:
  """The module, without what its import does to logging."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  module = importlib.import_module("jetstream.core.orchestrator")
  root.setLevel(level)
  for handler in list(root.handlers):
    if handler not in handlers:
      root.removeHandler(handler)
  module.delete_pytree = _delete
  return module


def _delete(tree: Any) -> None:
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array):
      leaf.delete()


orchestrator = _import_orchestrator()


class _FreeSlots(queue.Queue):
  """Slots that can be filled; those that were just freed wait aside."""

  def __init__(self, maxsize: int):
    super().__init__(maxsize)
    self._freed: collections.deque[int] = collections.deque()

  def put(self, item, block=True, timeout=None) -> None:
    if threading.current_thread().name.startswith("detokenize"):
      self._freed.append(item)
    else:
      super().put(item, block, timeout)

  def release(self) -> None:
    """Makes the slots that were freed so far visible."""
    while self._freed:
      super().put(self._freed.popleft(), block=False)


class _Releasing:
  """An engine after each of whose steps freed slots become visible."""

  def __init__(self, engine: jetstream_engine.Engine):
    self._engine = engine
    self.free: _FreeSlots | None = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  def generate(self, params, decode_state):
    result = self._engine.generate(params, decode_state)
    self.free.release()
    return result


class _Request(orchestrator.ActiveRequest):
  """A request whose limit the engine knows, and 0 once it is cancelled."""

  _limit, _prefix = 0, None

  @property
  def max_tokens(self) -> int:
    return 0 if self.return_channel.cancelled() else self._limit

  @max_tokens.setter
  def max_tokens(self, value: int) -> None:
    self._limit = value

  @property
  def prefill_result(self) -> jetstream_engine.Prefix | None:
    if self._prefix is None:
      return None
    return self._prefix._replace(limit=self.max_tokens)

  @prefill_result.setter
  def prefill_result(self, value) -> None:
    self._prefix = value


class Driver(orchestrator.Driver):
  """Runs one engine for prefill and generation alike.

  Args:
    engine: warmed up.
    params: of its `load_params`.
    max_waiting: requests that may wait for a slot; more are refused.
  """

  def __init__(self, engine: jetstream_engine.Engine, params,
               max_waiting: int):
    self._max_waiting = max_waiting
    releasing = _Releasing(engine)
    self._releasing = releasing
    super().__init__(
        prefill_engines=[engine], generate_engines=[releasing],
        prefill_params=[params], generate_params=[params],
        interleaved_mode=True, jax_padding=False)

  # JetStream's constructor sets it, fills it and starts the threads.
  @property
  def _generate_slots(self) -> list[_FreeSlots]:
    return self._free

  @_generate_slots.setter
  def _generate_slots(self, queues: list[queue.Queue]) -> None:
    self._free = [_FreeSlots(q.maxsize) for q in queues]
    self._releasing.free = self._free[0]

  def place_request_on_prefill_queue(self, request) -> None:
    """Takes a request.

    Raises:
      queue.Full: too many wait; JetStream tells the client to retry.
    """
    if self._prefill_backlog.qsize() >= self._max_waiting:
      raise queue.Full
    super().place_request_on_prefill_queue(_Request(
        max_tokens=request.max_tokens, history_path=request.history_path,
        prefill_content=request.prefill_content,
        is_client_side_tokenization=request.is_client_side_tokenization,
        return_channel=request.return_channel))
