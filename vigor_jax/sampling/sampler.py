"""The host half of the sampler: queues, buckets, and rows handed out.

    sampler = Sampler(graph, sizes, settings, stop_ids=..., seed=...)
    sampler.begin(step)                                # empties the queue
    prefixes = sampler.prefill(params, opened, tokens)   # once per prompt
    sampler.request(prefix_ids, positions, samples)      # enqueue rollouts
    for rows in sampler.decode(params):                  # until all ended
      ...

`decode(params, ask=...)` serves streaming allocators with the same loop: when
slots free up, `ask(free)` may enqueue more.

Shapes never change: one prefix store, one queue, one slot count, one chunk,
one prefill batch and a few prompt buckets. What a run compiles is therefore
1 decode program and one prefill program per bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vigor_jax.policy import transformer
from vigor_jax.sampling import decode as decode_lib


@dataclasses.dataclass(frozen=True)
class Settings:
  """Static shapes of a sampler; each is one compiled size.

  Attributes:
    slots: decode rows, S.
    chunk: decode steps between refills, C.
    chunks_per_dispatch: chunks before the host looks; 0 = until all ended.
    max_new_tokens: longest completion, stop token included, L.
    prompt_buckets: ascending padded prompt lengths.
    prefill_batch: prompts per prefill dispatch.
    prefixes: rows of the prefix store (prompts of a step), P.
    queue: rollouts of a step at most, Q (the budget).
    cache_dtype: dtype of keys and values.
  """

  slots: int
  chunk: int
  max_new_tokens: int
  prompt_buckets: tuple[int, ...]
  prefill_batch: int
  prefixes: int
  queue: int
  chunks_per_dispatch: int = 0
  cache_dtype: str = "float32"

  def cache_bytes(self, sizes: transformer.Sizes) -> tuple[int, int]:
    """Bytes of (slot caches, prefix store)."""
    per = (2 * sizes.layers * sizes.kv_heads * sizes.head_dim
           * jnp.dtype(self.cache_dtype).itemsize)
    length = decode_lib.cache_length(self.prompt_buckets[-1],
                                     self.max_new_tokens, self.chunk)
    return (per * self.slots * (length + self.chunk),
            per * self.prefixes * self.prompt_buckets[-1])


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rollouts that ended, ordered by queue entry.

  Attributes:
    tokens: int32 [k, L]; entries past `lengths` are 0.
    logprobs: float32 [k, L] at the sampling temperature, before truncation.
    processed_logprobs: float32 [k, L] of the distribution drawn from.
    lengths: int32 [k], stop token included.
    truncated: bool [k], hit max_new_tokens without a stop token.
    group: int32 [k] prefix row; sample: int32 [k] index in the group.
    end_chunk: int32 [k] logical time; slot: int32 [k].
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  processed_logprobs: np.ndarray
  lengths: np.ndarray
  truncated: np.ndarray
  group: np.ndarray
  sample: np.ndarray
  end_chunk: np.ndarray
  slot: np.ndarray


@functools.lru_cache(maxsize=None)
def _programs(graph, chunk: int, max_new_tokens: int):
  """Jitted programs, shared by every sampler of the same model."""
  prefill = jax.jit(functools.partial(decode_lib.prefill, graph),
                    donate_argnums=(1,))
  decode = jax.jit(
      functools.partial(decode_lib.decode, graph, chunk=chunk,
                        max_new_tokens=max_new_tokens),
      donate_argnums=(2, 3))
  return prefill, decode


class Sampler:
  """Draws rollouts for one model; see the module's docstring.

  Args:
    graph: nnx graph of the transformer.
    sizes: its sizes.
    settings: static shapes.
    stop_ids: token ids that end a completion.
    seed: first word of every rollout's address.

  Raises:
    ValueError: settings that cannot work (empty buckets, no slots, ...).
  """

  def __init__(self, graph, sizes: transformer.Sizes, settings: Settings, *,
               stop_ids: Sequence[int], seed: int):
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
    self._prefill, self._decode = _programs(
        graph, settings.chunk, settings.max_new_tokens)
    dtype = jnp.dtype(settings.cache_dtype)
    self._prefixes = decode_lib.empty_prefixes(
        sizes, settings.prefixes, buckets[-1], dtype)
    length = decode_lib.cache_length(buckets[-1], settings.max_new_tokens,
                                     settings.chunk)
    self._slots = decode_lib.empty_slots(
        sizes, settings.slots, length, settings.queue, dtype)
    self._empty_out = jax.jit(functools.partial(
        decode_lib.empty_out, settings.queue, settings.max_new_tokens))
    self._counters = jax.jit(lambda s: s._replace(
        head=jnp.zeros_like(s.head), chunks=jnp.zeros_like(s.chunks),
        steps=jnp.zeros_like(s.steps), useful=jnp.zeros_like(s.useful)),
        donate_argnums=(0,))
    self.seconds = {"prefill": 0.0, "decode": 0.0}
    self.begin(0)

  def begin(self, step: int, *, stream: int = 0) -> None:
    """Starts a step with an empty queue.

    Args:
      step: training step, part of every rollout's address.
      stream: 0 for training; other numbers give independent randomness at
        the same step (evaluation, fresh rollouts).
    """
    q = self.settings.queue
    self._queue = decode_lib.Queue(
        np.zeros(q, np.int32), np.zeros(q, np.uint32), np.zeros(q, np.uint32),
        np.ones(q, np.float32), np.zeros(q, np.int32),
        np.ones(q, np.float32), np.zeros(q, np.float32))
    self._tail = 0
    self._reported = np.zeros(q, bool)
    self._out = self._empty_out()
    self._slots = self._counters(self._slots)
    self._step_key = _step_key(self.seed, step, stream)
    self.decode_steps = 0
    self.useful_steps = 0
    self.chunks = 0
    self.prefilled = 0

  def warm_up(self, params) -> None:
    """Compiles every program before the first step, drawing nothing."""
    n = self.settings.prefill_batch
    nowhere = np.full(n, self.settings.prefixes, np.int32)
    for bucket in self.settings.prompt_buckets:
      self._prefixes = self._prefill(
          params, self._prefixes, np.zeros((n, bucket), np.int32),
          np.ones(n, np.int32), nowhere)
    self.begin(0)
    self._slots, self._out = self._decode(
        params, self._prefixes, self._slots, self._out, self._queue,
        np.int32(0), np.int32(0), self._step_key, self._stop_ids)
    self.begin(0)

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
    lengths = np.array([len(t) for t in tokens], np.int32)
    for row, length in zip(rows, lengths):
      self.check_prompt(int(length), f"the prompt of group {row}")
    rows = np.asarray(rows, np.int32)
    buckets = np.asarray(self.settings.prompt_buckets)
    which = np.searchsorted(buckets, lengths)
    n = self.settings.prefill_batch
    for b in np.unique(which):
      members = np.flatnonzero(which == b)
      for i in range(0, len(members), n):
        part = members[i: i + n]
        block = np.zeros((n, int(buckets[b])), np.int32)
        for j, m in enumerate(part):
          block[j, : lengths[m]] = tokens[m]
        padded = np.ones(n, np.int32)
        padded[: len(part)] = lengths[part]
        at = np.full(n, self.settings.prefixes, np.int32)
        at[: len(part)] = rows[part]
        self._prefixes = self._prefill(params, self._prefixes, block, padded,
                                       at)
    self.prefilled += len(rows)
    self.seconds["prefill"] += time.perf_counter() - start

  def request(self, prefix: np.ndarray, position: np.ndarray,
              sample: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0,
              min_p=0.0) -> None:
    """Enqueues rollouts; arrays of one entry per rollout, or scalars.

    Raises:
      ValueError: more rollouts in a step than `settings.queue`.
    """
    k = len(prefix)
    end = self._tail + k
    if end > self.settings.queue:
      raise ValueError(f"{end} rollouts requested in one step, but the queue "
                       f"holds {self.settings.queue} (rollout_budget)")
    at = slice(self._tail, end)
    # New arrays each time: a dispatched program may still read the old ones.
    queue = decode_lib.Queue(*[a.copy() for a in self._queue])
    for field, value in zip(queue, (prefix, position, sample, temperature,
                                    top_k, top_p, min_p)):
      field[at] = value
    self._queue, self._tail = queue, end

  def decode(self, params, ask: Callable[[int], None] | None = None,
             on_dispatch: Callable[[], None] | None = None
             ) -> Iterator[Rows]:
    """Decodes until every requested rollout has ended.

    Args:
      params: policy parameters.
      ask: called with the number of idle slots after each host read; may
        call `request`. Without it the queue is what was requested before.
      on_dispatch: called once work is on its way to the device, for host
        work that can overlap with it.

    Yields:
      Rows that ended since the last host read (never empty).
    """
    limit = self.settings.chunks_per_dispatch or np.iinfo(np.int32).max
    while True:
      if ask is not None:
        ask(self.settings.slots - self._running())
      if not self._running():
        return
      start = time.perf_counter()
      self._slots, self._out = self._decode(
          params, self._prefixes, self._slots, self._out, self._queue,
          np.int32(self._tail), np.int32(limit), self._step_key,
          self._stop_ids)
      if on_dispatch is not None:
        on_dispatch()
        start = time.perf_counter()
        on_dispatch = None
      out, *counters = jax.device_get(
          (self._out, self._slots.steps, self._slots.useful,
           self._slots.chunks))
      self.decode_steps, self.useful_steps, self.chunks = map(int, counters)
      self.seconds["decode"] += time.perf_counter() - start
      rows = self._collect(out)
      if rows is not None:
        yield rows

  def _running(self) -> int:
    """Rollouts requested and not yet handed out."""
    return self._tail - int(self._reported.sum())

  def _collect(self, out: decode_lib.Out) -> Rows | None:
    new = np.flatnonzero((out.lengths > 0) & ~self._reported)
    if not len(new):
      return None
    self._reported[new] = True
    lengths = out.lengths[new]
    past = np.arange(out.tokens.shape[1])[None] >= lengths[:, None]
    cut = lambda a: np.where(past, 0, a[new]).astype(a.dtype)
    return Rows(
        tokens=cut(out.tokens), logprobs=cut(out.logprobs),
        processed_logprobs=cut(out.processed), lengths=lengths,
        truncated=~out.stopped[new], group=self._queue.prefix[new],
        sample=self._queue.sample[new].astype(np.int32),
        end_chunk=out.end_chunk[new], slot=out.slot[new])

  @property
  def utilisation(self) -> float:
    """Useful row steps / (slots x decode steps) of this step so far."""
    total = self.settings.slots * self.decode_steps
    return self.useful_steps / total if total else 0.0


@functools.partial(jax.jit, static_argnums=())
def _fold(seed, step, stream):
  key = jax.random.fold_in(jax.random.key(seed), stream)
  return jax.random.key_data(jax.random.fold_in(key, step))


def _step_key(seed: int, step: int, stream: int) -> jax.Array:
  return _fold(np.uint32(seed), np.uint32(step), np.uint32(stream))
