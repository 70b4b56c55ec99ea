"""Scores batches of completions, inline or in worker processes."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, NoReturn

import numpy as np

from vigor_jax.rewards import pool as pool_lib
from vigor_jax.rewards import probing
from vigor_jax.rewards.combine import Combined
from vigor_jax.rewards.registry import reward_name, resolve
from vigor_jax.rewards.verdict import RewardError, check_verdict, shorten


class VerdictCache:
  """The last `size` verdicts by (completion, answer); texts are hashed."""

  def __init__(self, size: int = 1 << 16) -> None:
    self._size = size
    self._items: collections.OrderedDict[bytes, float] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()

  @staticmethod
  def key(completion: str, answer: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for text in (completion, answer):
      data = text.encode("utf-8", "surrogatepass")
      digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()

  def get(self, key: bytes) -> float | None:
    with self._lock:
      if key in self._items:
        self._items.move_to_end(key)
        return self._items[key]
      return None

  def put(self, key: bytes, verdict: float) -> None:
    with self._lock:
      self._items[key] = verdict
      self._items.move_to_end(key)
      while len(self._items) > self._size:
        self._items.popitem(last=False)


@dataclasses.dataclass
class Handle:
  """A submitted batch; pass it to `Scorer.collect` once."""

  completions: Sequence[str]
  rows: list[list[Any]]  # [k][parts]: a float, or a future of an Outcome.
  keys: dict[int, bytes]  # id(future) -> cache key.
  waits: bool = False  # Some verdict may be a future.


class Scorer:
  """Turns completions into verdicts, in the order they were submitted.

  Args:
    fn: a reward function, its name, or a combination (see `resolve`).
    mode: passed on as the keyword `mode`, for rewards that have one.
    workers: processes for rewards that are not cheap; None: one per core this
      process may use, 16 at most.

  A reward with the attribute `cheap` runs in the caller's thread during
  `submit`; any other in worker processes, so that `submit` returns at once and
  decoding goes on. `cacheable` rewards (a verdict depends on completion and
  answer alone) are judged once per distinct pair.
  """

  def __init__(
    self,
    fn: str | Callable[..., float],
    mode: str | None = None,
    workers: int | None = None,
  ) -> None:
    self.fn = resolve(fn)
    self.name, self.mode = reward_name(self.fn), mode
    self._parts = (
      self.fn.parts if isinstance(self.fn, Combined) else ((self.fn, 1.0),)
    )
    self._kwargs = [self._mode_kwargs(part, mode) for part, _ in self._parts]
    if mode is not None and not any(self._kwargs):
      raise RewardError(f"reward.mode is {mode!r} but {self.name} has no mode")
    self._caches = [VerdictCache() for _ in self._parts]
    self._pool: pool_lib.Pool | None = None
    self._workers = workers
    if workers is not None and workers < 1:
      raise RewardError(f"reward workers must be at least 1, got {workers}")
    for part, _ in self._parts:
      if not getattr(part, "cheap", False):
        pool_lib.picklable(part, reward_name(part))

  @staticmethod
  def _mode_kwargs(fn, mode: str | None) -> dict[str, Any]:
    if mode is None or "mode" not in inspect.signature(fn).parameters:
      return {}
    modes = getattr(fn, "modes", None)
    if modes is not None and mode not in modes:
      raise RewardError(
        f"reward.mode {mode!r} is not a mode of {reward_name(fn)}: one of"
        f" {', '.join(modes)}"
      )
    return {"mode": mode}

  @property
  def cheap(self) -> bool:
    """Every verdict is given inline."""
    return all(getattr(part, "cheap", False) for part, _ in self._parts)

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers alive now."""
    return self._pool.pids if self._pool else []

  def submit(
    self,
    completions: Sequence[str],
    answers: Sequence[str],
    metadata: Sequence[dict[str, Any]] | None = None,
  ) -> Handle:
    """Starts judging k completions.

    Args:
      completions: k texts, without the prompt.
      answers: k gold answers.
      metadata: k dicts, passed on as keywords; None: no keywords.

    Raises:
      RewardError: the lengths differ, a text is not a string, or an inline
        verdict is refused.
    """
    metadata = [{}] * len(completions) if metadata is None else metadata
    if not len(completions) == len(answers) == len(metadata):
      raise RewardError(
        f"reward {self.name}: {len(completions)} completions,"
        f" {len(answers)} answers and {len(metadata)} metadata; their number"
        " must agree"
      )
    for field, texts in (("completion", completions), ("answer", answers)):
      if set(map(type, texts)) <= {str}:  # One pass without a call per text.
        continue
      for i, text in enumerate(texts):
        if not isinstance(text, str):
          raise RewardError(
            f"reward {self.name}: {field} {i} is {shorten(text)}, a"
            f" {type(text).__name__}, not a string"
          )
    handle = Handle(completions, [], {})
    batch = zip(completions, answers, metadata)
    if len(self._parts) == 1 and self.cheap:
      handle.rows = self._judge(batch)
      return handle
    for i, (text, answer, extra) in enumerate(batch):
      handle.rows.append(
        [
          self._start(part, text, answer, extra, i, handle)
          for part in range(len(self._parts))
        ]
      )
    return handle

  def _judge(
    self, batch: Iterable[tuple[str, str, dict[str, Any]]]
  ) -> list[list[float]]:
    """The rows of a batch whose one reward is cheap.

    Such a reward may take less time than the calls around it.
    """
    fn, own = self._parts[0][0], self._kwargs[0]
    rows = []
    for i, (text, answer, extra) in enumerate(batch):
      try:
        value = fn(text, answer, **({**extra, **own} if own else extra))
      except (Exception, SystemExit) as error:
        self._blame(error, reward_name(fn), text, i)
      if type(value) is not float or not 0.0 <= value <= 1.0:
        value = check_verdict(value, reward_name(fn), text, i)
      rows.append([value])
    return rows

  @staticmethod
  def _blame(
    error: BaseException, name: str, text: str, index: int
  ) -> NoReturn:
    """Raises a RewardError for what a reward raised."""
    if isinstance(error, RewardError):
      raise error
    # A reward that calls sys.exit() must not end the run, least of all as if
    # it were done.
    raise RewardError(
      f"reward {name} raised {type(error).__name__}: {error} for"
      f" completion {index} {shorten(text)}\n{traceback.format_exc()}"
    ) from error

  def _start(self, part, text, answer, extra, index, handle):
    fn = self._parts[part][0]
    name = reward_name(fn)
    kwargs = {**extra, **self._kwargs[part]}
    if getattr(fn, "cheap", False):
      try:
        value = fn(text, answer, **kwargs)
      except (Exception, SystemExit) as error:
        self._blame(error, name, text, index)
      return check_verdict(value, name, text, index)
    handle.waits = True
    key = None
    if getattr(fn, "cacheable", False):
      key = VerdictCache.key(text, answer)
      known = self._caches[part].get(key)
      if known is not None:
        return known
    if self._pool is None:
      self._pool = pool_lib.Pool(
        self._workers or min(16, pool_lib.available_cpus())
      )
    future = self._pool.submit(fn, name, text, answer, kwargs, index)
    if key is not None:
      handle.keys[id(future)] = key
    return future

  def collect(self, handle: Handle) -> np.ndarray:
    """Waits for a batch: float32 [k] verdicts in the order of completions.

    Raises:
      RewardError: a verdict is not a number in [0, 1], or a judge is at fault;
        what was left of the batch is cancelled.
    """
    if not handle.waits and not isinstance(self.fn, Combined):
      return np.array([value for value, in handle.rows], np.float32)
    out = np.empty(len(handle.rows), np.float32)
    try:
      for i, row in enumerate(handle.rows):
        values = [self._wait(j, item, handle) for j, item in enumerate(row)]
        mixed = (
          self.fn.mix(values) if isinstance(self.fn, Combined) else values[0]
        )
        out[i] = mixed
    except BaseException:
      for row in handle.rows:
        for item in row:
          if isinstance(item, futures.Future):
            item.cancel()
      raise
    return out

  def _wait(self, part: int, item, handle: Handle) -> float:
    if not isinstance(item, futures.Future):
      return item
    outcome = item.result()
    key = handle.keys.get(id(item))
    # A verdict that ran out of wall time says the machine was busy: not kept.
    if key is not None and outcome.reason != "wall":
      self._caches[part].put(key, outcome.verdict)
    return outcome.verdict

  def done(self, handle: Handle) -> bool:
    """True when `collect` would not wait."""
    return all(
      item.done()
      for row in handle.rows
      for item in row
      if isinstance(item, futures.Future)
    )

  def score(self, completions, answers, metadata=None) -> np.ndarray:
    """`submit` and `collect` in one call: float32 [k]."""
    return self.collect(self.submit(completions, answers, metadata))

  def probe(
    self, examples: Iterable[tuple[str, str, dict[str, Any]]]
  ) -> np.ndarray:
    """Calls the reward on made completions before anything compiles.

    Args:
      examples: (completion, answer, metadata) triples; `probe_examples` makes
        them from a task's prompts.

    Returns:
      float32 [len(examples)] verdicts.

    Raises:
      RewardError: as `collect`; the message names the reward and what it
        returned.
    """
    examples = list(examples)
    if not examples:
      raise RewardError(f"reward {self.name}: nothing to probe it with")
    names = [f"made completion {shorten(text)}" for text, _, _ in examples]
    with probing.Told(f"start-up probe of reward {self.name}",
                      self._patience()) as told:
      try:
        handles = []
        for name, example in zip(names, examples):
          told.waits_for = name
          handles.append(self.submit(*([part] for part in example)))
        verdicts = []
        for name, handle in zip(names, handles):
          told.waits_for = name
          verdicts.append(self.collect(handle)[0])
        return np.array(verdicts, np.float32)
      except RewardError as error:
        raise RewardError(f"start-up probe of the reward: {error}") from error

  def _patience(self) -> str:
    """When a verdict that does not come is given up, in words."""
    if self.cheap:
      return "it is cheap = True, judged without a limit: Ctrl-C ends it"
    walls = [pool_lib.wall_limit(part) for part, _ in self._parts
             if not getattr(part, "cheap", False)]
    if None in walls:
      return "it limits itself"
    return f"given up {max(walls):g} s after it began"

  def close(self) -> None:
    """Ends the worker processes."""
    if self._pool is not None:
      self._pool.close()
      self._pool = None

  def __enter__(self) -> Scorer:
    return self

  def __exit__(self, *unused) -> None:
    self.close()
