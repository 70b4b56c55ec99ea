"""The host half of the sampler: queues, buckets, and rows handed out.

    sampler = Sampler(graph, sizes, settings, stop_ids=..., seed=...)
    sampler.begin(step)                                # empties the queue
    prefixes = sampler.prefill(params, opened, tokens)   # once per prompt
    sampler.request(prefix_ids, positions, samples)      # enqueue rollouts
    for rows in sampler.decode(params):                  # until all ended
      ...

`decode(params, ask=...)` serves streaming allocators with the same loop: the
host decides about one chunk's rows while the device runs the next.

Shapes never change: one prefix store, one queue, one slot count, one chunk,
one prefill batch and a few prompt buckets. What a run compiles is therefore
one decode program and one prefill program per bucket (two for rules that open
prompts a few at a time).
"""

from __future__ import annotations

import functools
import time
from typing import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.sampling import decode as decode_lib
from vigor_jax.sampling import layout as layout_lib
from vigor_jax.sampling import placed as placed_lib
from vigor_jax.sampling.rows import Rows
from vigor_jax.sampling.settings import Settings
from vigor_jax.sampling import state as state_lib
from vigor_jax.sampling import weights as weights_lib


@functools.lru_cache(maxsize=64)
def _settings_words(values: tuple) -> np.ndarray:
  """int32 words of one queue entry's limit, temperature, ..., min_p."""
  dtypes = state_lib.QUEUE_DTYPES[-len(values):]
  return np.array([np.asarray(value).astype(dtype).view(np.int32)
                   for value, dtype in zip(values, dtypes)])


@functools.lru_cache(maxsize=None)
def _programs(graph, sizes, chunk: int, shapes, rows: int, layout):
  """Jitted programs, shared by every sampler of the same model."""
  weights = weights_lib.of(graph, sizes, layout)
  prefill = functools.partial(decode_lib.prefill, weights)
  decode = functools.partial(decode_lib.decode, weights, chunk=chunk,
                             shapes=shapes, rows=rows)
  if layout is not None:
    prefill, decode = placed_lib.wrapped(layout, prefill, decode)
  return (weights, jax.jit(prefill, donate_argnums=(1,)),
          jax.jit(decode, donate_argnums=(2,)))


class Sampler:
  """Draws rollouts for one model; see the module's docstring.

  Args:
    graph: nnx graph of the transformer.
    sizes: its sizes.
    settings: static shapes.
    stop_ids: token ids that end a completion.
    seed: first word of every rollout's address.
    placement: where arrays live on a mesh; None = one device.

  Raises:
    ValueError: settings that cannot work (empty buckets, no slots, ...).
  """

  def __init__(self, graph, sizes: transformer.Sizes, settings: Settings, *,
               stop_ids: Sequence[int], seed: int,
               placement: sharding.Placement | None = None):
    for name in ("slots", "chunk", "max_new_tokens", "prefill_batch",
                 "prefixes", "queue"):
      if getattr(settings, name) < 1:
        raise ValueError(f"sampling.{name} must be at least 1, got "
                         f"{getattr(settings, name)}")
    buckets = settings.prompt_buckets
    if not buckets or list(buckets) != sorted(set(buckets)):
      raise ValueError("sampling.prompt_buckets must ascend and not be empty, "
                       f"got {buckets}")
    if not len(stop_ids):
      raise ValueError("the sampler needs at least one stop id")
    self.sizes, self.settings = sizes, settings
    self.seed = seed
    # A fixed width, so that another set of stop ids does not compile.
    width = max(8, len(stop_ids))
    self._stop_ids = np.full((width,), -1, np.int32)
    self._stop_ids[: len(stop_ids)] = stop_ids
    self._placement = placement
    rows = 1 if placement is None else placement.rows
    self._batches = sorted(
        {n for n in (settings.few_prompts, settings.prefill_batch)
         if n and (n == settings.prefill_batch or n % rows == 0)})
    layout = layout_lib.of(placement, sizes, settings)
    shapes = settings.shapes(sizes)
    if placement is None:
      self._stop_ids = jnp.asarray(self._stop_ids)
    else:
      # Picking the active slots out of all would move rows between devices.
      shapes = tuple(s for s in shapes if s.width == settings.slots)
      self._stop_ids = placement.put(self._stop_ids, placement.replicated)
    self._weights, self._prefill, self._decode = _programs(
        graph, sizes, settings.chunk, shapes, settings.report_rows, layout)
    self._params, self._leaves = None, None
    dtype = jnp.dtype(settings.cache_dtype)
    prefixes = functools.partial(state_lib.empty_prefixes, sizes,
                                 settings.prefixes, buckets[-1], dtype,
                                 self._weights.as_values)
    state = functools.partial(
        state_lib.empty_state, sizes, settings.slots, settings.ring,
        settings.max_new_tokens, dtype, self._weights.as_values)
    if placement is None:
      self._prefixes, self._state = prefixes(), state()
    else:
      self._prefixes = placed_lib.empty(
          prefixes, functools.partial(placed_lib.prefixes, layout))
      self._state = placed_lib.empty(
          state, functools.partial(placed_lib.state, layout))
    self.seconds = {"prefill": 0.0, "decode": 0.0}
    self.begin(0)

  def begin(self, step: int, *, stream: int = 0) -> None:
    """Starts a step with an empty queue.

    Args:
      step: training step, part of every rollout's address.
      stream: 0 for training; other numbers give independent randomness at
        the same step (evaluation, fresh rollouts).
    """
    self._queue = np.zeros((len(state_lib.QUEUE_DTYPES),
                            self.settings.queue), np.int32)
    self._given = None
    self._tail = self._ended = 0
    self._address, self._reset = (self.seed, stream, step), 1
    self.decode_steps = self.row_steps = self.useful_steps = 0
    self.chunks = self.prefilled = 0

  def warm_up(self, params) -> None:
    """Compiles every program before the first step, drawing nothing."""
    leaves = self._prepared(params)
    if self._placement is None and leaves[0].committed:
      # Where results of programs with these weights are, so that the first call
      # of a program is compiled for what all others get.
      self._prefixes, self._state = jax.device_put(
          (self._prefixes, self._state), leaves[0].sharding)
    for n in self._batches:
      nowhere = np.full(n, self.settings.prefixes, np.int32)
      for bucket in self.settings.prompt_buckets:
        self._prefixes = self._finished(self._prefill(
            leaves, self._prefixes,
            placed_lib.prompts(self._placement, [], n, bucket),
            np.ones(n, np.int32), nowhere))
    self.begin(0)
    jax.block_until_ready(self._dispatch(leaves, 0))
    self.begin(0)

  def _prepared(self, params):
    """Weights as the programs take them, made again when they changed.

    Within a step a tree handed over again is taken to be what it was: looking
    at its arrays costs as much as a small prefill.
    """
    if params is self._given:
      return self._leaves
    arrays = jax.tree.leaves(params)
    if self._params is None or len(arrays) != len(self._params) or any(
        a is not b for a, b in zip(arrays, self._params)):
      self._params = arrays
      self._leaves = self._finished(self._weights.prepare(params))
    self._given = params
    return self._leaves

  def look_ahead(self, params) -> None:
    """Starts preparing the weights of the next step; waits for nothing.

    A large model's are left to their first use: a copy of them does not fit
    beside what an update takes.
    """
    waits = self._placement is not None and self._placement.waits
    if self._weights.small and not waits:
      self._prepared(params)

  def check_prompt(self, length: int, what: str = "prompt") -> None:
    """Raises ValueError for a prompt that fits no bucket."""
    limit = self.settings.prompt_buckets[-1]
    if not 1 <= length <= limit:
      raise ValueError(
          f"{what} has {length} tokens; sampling.prompt_buckets allows 1 to "
          f"{limit}")

  def prefill(self, params, rows: Sequence[int],
              tokens: Sequence[np.ndarray]) -> None:
    """Keeps the prefixes of prompts, in fixed-size batches by bucket.

    Args:
      rows: prefix rows to write, each in [0, settings.prefixes).
      tokens: prompt ids of each, unpadded.

    Raises:
      ValueError: a prompt is empty or longer than the largest bucket.
    """
    start = time.perf_counter()
    leaves = self._prepared(params)
    lengths = np.array([len(t) for t in tokens], np.int32)
    buckets = self.settings.prompt_buckets
    for i in np.flatnonzero((lengths < 1) | (lengths > buckets[-1])):
      self.check_prompt(int(lengths[i]), f"the prompt of group {rows[i]}")
    rows = np.asarray(rows, np.int32)
    which = np.searchsorted(buckets, lengths)
    for b, bucket in enumerate(buckets):
      members = np.flatnonzero(which == b)
      first = 0
      while first < len(members):
        n = self._batch(len(members) - first)
        part = members[first: first + n]
        first += n
        block = placed_lib.prompts(self._placement, [tokens[m] for m in part],
                                   n, bucket)
        padded = np.ones(n, np.int32)
        padded[: len(part)] = lengths[part]
        at = np.full(n, self.settings.prefixes, np.int32)
        at[: len(part)] = rows[part]
        self._prefixes = self._finished(self._prefill(
            leaves, self._prefixes, block, padded, at))
    self.prefilled += len(rows)
    self.seconds["prefill"] += time.perf_counter() - start

  def _batch(self, count: int) -> int:
    """Size of the next prefill of `count` prompts: the least padding."""
    few, most = self._batches[0], self._batches[-1]
    return few if -(-count // few) * few < most else most

  def request(self, prefix: np.ndarray, position: np.ndarray,
              sample: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0,
              min_p=0.0, max_new_tokens=None) -> None:
    """Enqueues rollouts; arrays of one entry per rollout, or scalars.

    Args:
      prefix: rows of the prefix store.
      position: prompt positions in the stream.
      sample: index of each rollout in its group.
      temperature, top_k, top_p, min_p: see `logits.sample`.
      max_new_tokens: longest completion of each; None = the settings'.

    Raises:
      ValueError: more rollouts in a step than `settings.queue`, or a limit
        that is not in [1, settings.max_new_tokens].
    """
    end = self._tail + len(prefix)
    if end > self.settings.queue:
      raise ValueError(f"{end} rollouts requested in one step, but the queue "
                       f"holds {self.settings.queue} (rollout_budget)")
    longest = self.settings.max_new_tokens
    limit = longest if max_new_tokens is None else max_new_tokens
    if max_new_tokens is not None and np.size(limit) and not (
        1 <= np.min(limit) <= np.max(limit) <= longest):
      raise ValueError(f"max_new_tokens must be in [1, {longest}], got "
                       f"{np.min(limit)} to {np.max(limit)}")
    # A new array each time: a dispatched program may still read the old one.
    queue = self._queue.copy()
    new = queue[:, self._tail: end]
    where = (prefix, position, sample)
    for row, value in zip(new, where):
      row[:] = value  # Keeps the low 32 bits.
    same = (limit, temperature, top_k, top_p, min_p)
    if all(isinstance(value, (int, float)) for value in same):
      new[len(where):] = _settings_words(same)[:, None]
    else:
      for row, value, dtype in zip(new[len(where):], same,
                                   state_lib.QUEUE_DTYPES[len(where):]):
        row[:] = np.asarray(value).astype(dtype).view(np.int32)
    self._queue, self._tail = queue, end

  def decode(self, params, ask: Callable[[int, int | None], bool] | None = None,
             meanwhile: Callable[[], None] | None = None) -> Iterator[Rows]:
    """Decodes until every requested rollout has ended.

    With `ask` or a limit of chunks, one dispatch is in flight while the host
    reads the rows of the one before and decides; what it enqueues is decoded
    from the next dispatch on. With `ask`, a dispatch ends when half of the
    waiting places may have been taken (`settings.ended_per_dispatch`), so the
    queue does not run dry meanwhile; rollouts enqueued beyond the places are
    decoded first. When it is asked depends on logical time alone.

    Args:
      params: policy parameters.
      ask: `ask(free, chunk)`; may call `request`. `free` is the number of
        rollouts that would keep every slot and the places in the queue
        (`settings.ahead`) busy; `chunk` the last one whose rows were handed
        out, None when nothing is left to decode. It returns whether it may
        ask for more later.
      meanwhile: called once, when the device has begun.

    Yields:
      Rows that ended since the last host read (never empty).
    """
    s = self.settings
    most = np.iinfo(np.int32).max
    limit, more = s.chunks_per_dispatch or most, False
    start = time.perf_counter()
    leaves = self._prepared(params)
    in_flight = None
    # Rollouts that waited beyond the places when the last dispatch began, as
    # far as it was to decode them.
    beyond = 0

    def free() -> int:
      return s.slots + (s.waiting if ask else 0) - self._running()

    if ask is not None:
      more = bool(ask(max(0, free()), None))
    while self._running() or in_flight is not None:
      start = time.perf_counter()
      report, in_flight = in_flight, None
      if self._running():
        beyond = max(0, -free() - beyond)
        ended = s.ended_per_dispatch + beyond if more else most
        in_flight = self._dispatch(leaves, limit, ended, more)
        if meanwhile is not None:
          meanwhile()
          meanwhile = None
      if ask is None and limit == most:
        # One dispatch draws all: a second would find nothing to do.
        report, in_flight = in_flight, None
      rows = self._collect(report) if report is not None else None
      self.seconds["decode"] += time.perf_counter() - start
      if rows is not None:
        yield rows
      if ask is not None and report is not None:
        idle = not self._running()
        more = bool(ask(max(0, free()), None if idle else self.chunks - 1))

  def _dispatch(self, leaves, limit: int, ended: int = 0, more: bool = False
                ) -> state_lib.Report:
    control = state_lib.Control(self._tail, limit, ended, more, self._reset,
                                *self._address)
    # Words of 32 bits: an address keeps its low ones.
    words = (np.array(control, np.int64) & 0xFFFFFFFF).astype(np.uint32)
    self._state, report = self._decode(
        leaves, self._prefixes, self._state, self._queue,
        words.view(np.int32), self._stop_ids)
    self._reset = 0
    return self._finished(report)

  def _finished(self, result):
    if self._placement is not None and self._placement.waits:
      jax.block_until_ready(result)
    return result

  def _running(self) -> int:
    """Rollouts requested and not yet handed out."""
    return self._tail - self._ended

  def _collect(self, report: state_lib.Report) -> Rows | None:
    for array in report:
      array.copy_to_host_async()
    record, ends, counters = map(np.asarray, report)
    (k, _, self.chunks, self.decode_steps, self.row_steps,
     self.useful_steps) = map(int, counters)
    if not k:
      return None
    self._ended += k
    entry, lengths, stopped, end_chunk, slot = ends[:, :k].copy()
    tokens, logprobs, processed = record[:, :k]
    return Rows(
        tokens=tokens, logprobs=logprobs.view(np.float32),
        processed_logprobs=processed.view(np.float32), lengths=lengths,
        truncated=stopped == 0, group=self._queue[0, entry],
        sample=self._queue[2, entry], end_chunk=end_chunk, slot=slot,
        entry=entry)

  @property
  def utilisation(self) -> float:
    """Useful row steps / (slots x decode steps) of this step so far."""
    total = self.settings.slots * self.decode_steps
    return self.useful_steps / total if total else 0.0
