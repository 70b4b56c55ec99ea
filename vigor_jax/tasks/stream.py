"""The prompt stream: which prompts a step may open, in an order that resumes.

A stream is an endless row of positions 0, 1, 2, ... What lies at a position is
a pure function of (seed, position), so the whole state is one small record:
the next position and the positions that were looked at and handed back.
Nothing here knows about models or devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

BLOCK = 256  # fresh prompts are drawn this many at a time
# Blocks kept: those not opened lie scattered over the last thousands.
_CACHED_BLOCKS = 64
_CACHED_ORDERS = 16


def addressed_rng(seed: int, stream: str, *address: int) -> np.random.Generator:
  """A generator that is a pure function of its arguments.

  Args:
    seed: any non-negative integer below 2**64.
    stream: a name of at most 8 letters that keeps uses apart ("train", ...).
    *address: at most two non-negative integers, such as (step,) or (block,).

  Raises:
    ValueError: a seed or an address outside [0, 2**64), or a longer name.
  """
  if len(stream.encode()) > 8:
    raise ValueError(f"stream must have at most 8 letters, got {stream!r}")
  for name, value in [("seed", seed), *(("address", a) for a in address)]:
    if not 0 <= value < 2**64:
      raise ValueError(f"{name} must lie in [0, 2**64), got {value}")
  tag = int.from_bytes(stream.encode(), "little")
  # Philox counts in the low words of its counter: the address takes the high
  # ones, so two addresses never share a stretch of the sequence.
  high, low = (*address, 0, 0)[:2]
  key = np.array([seed, tag], np.uint64)
  counter = np.array([0, 0, low, high], np.uint64)
  return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclasses.dataclass
class Prompts:
  """A few prompts, as a stream or an evaluation set hands them out.

  Attributes:
    positions: int64 [k], position of each in its stream.
    uids: int64 [k], identity in its data set; equal to positions when fresh.
    tokens: k int32 arrays of prompt ids, unpadded.
    texts: k rendered prompts.
    answers: k gold answers.
    metadata: k mappings, given to the reward as keyword arguments; "level",
      where present, is the difficulty the report sorts by.
  """

  positions: np.ndarray
  uids: np.ndarray
  tokens: list[np.ndarray]
  texts: list[str]
  answers: list[str]
  metadata: list[dict[str, Any]]

  def __len__(self) -> int:
    return len(self.tokens)

  def take(self, rows: Sequence[int]) -> "Prompts":
    """The given rows, in the given order."""
    rows = np.asarray(rows, np.int64)
    chosen = []
    for field in dataclasses.fields(Prompts):
      values = getattr(self, field.name)
      is_array = isinstance(values, np.ndarray)
      chosen.append(values[rows] if is_array else [values[i] for i in rows])
    return Prompts(*chosen)

  @staticmethod
  def concatenate(parts: Sequence["Prompts"]) -> "Prompts":
    """All parts in one, in order; at least one part."""
    return parts[0].joined(parts[1:])

  def joined(self, others: Sequence["Prompts"]) -> "Prompts":
    """These and others in one, in order."""
    joined = []
    for field in dataclasses.fields(Prompts):
      values = [getattr(p, field.name) for p in (self, *others)]
      if isinstance(values[0], np.ndarray):
        joined.append(np.concatenate(values))
      else:
        joined.append([x for value in values for x in value])
    return Prompts(*joined)


class Source(Protocol):
  """What lies at a position of a stream with this seed."""

  size: int | None

  def at(self, seed: int, positions: np.ndarray) -> Prompts:
    """The prompts at int64 positions [k].

    A source may have `prefetch`, which takes the same and does what can be done
    for it in advance.
    """


class FreshSource:
  """Prompts drawn on demand: position i never comes back.

  `draw(seed, block)` gives BLOCK prompts, those of positions block * BLOCK
  and on; it must be a pure function.
  """

  size = None

  def __init__(self, draw: Callable[[int, int], Prompts]):
    self._draw = draw
    self._blocks: dict[tuple[int, int], Prompts] = {}
    self._kept = _CACHED_BLOCKS

  def _block(self, seed: int, block: int) -> Prompts:
    key = (seed, block)
    found = self._blocks.pop(key, None)
    if found is None:
      if len(self._blocks) >= self._kept:
        del self._blocks[next(iter(self._blocks))]
      found = self._draw(seed, block)
    self._blocks[key] = found  # The last used goes last.
    return found

  def prefetch(self, seed: int, positions: np.ndarray) -> None:
    for block in np.unique(positions // BLOCK):
      self._block(seed, int(block))

  def at(self, seed: int, positions: np.ndarray) -> Prompts:
    positions = np.asarray(positions, np.int64)
    # Runs of positions within one block, in order: usually few.
    block = positions // BLOCK
    begins = np.diff(block, prepend=-1) != 0
    # Those of a peek, and as many ahead of it.
    self._kept = max(self._kept, 2 * int(np.count_nonzero(begins)) + 2)
    parts = [self._block(seed, int(b)) for b in block[begins]]
    rows = (np.cumsum(begins) - 1 - block) * BLOCK + positions
    prompts = Prompts.concatenate(parts).take(rows)
    prompts.positions, prompts.uids = positions, positions.copy()
    return prompts


class FixedSource:
  """A finite set; each epoch is a permutation of it, keyed (seed, epoch)."""

  def __init__(self, prompts: Prompts):
    if not len(prompts):
      raise ValueError("a prompt set must hold at least one prompt, got 0")
    self.prompts = prompts
    self.size = len(prompts)
    self._orders: dict[tuple[int, int], np.ndarray] = {}

  def _order(self, seed: int, epoch: int) -> np.ndarray:
    key = (seed, epoch)
    if key not in self._orders:
      if len(self._orders) >= _CACHED_ORDERS:
        del self._orders[next(iter(self._orders))]
      rng = addressed_rng(seed, "epoch", epoch)
      self._orders[key] = rng.permutation(self.size)
    return self._orders[key]

  def rows(self, seed: int, positions: np.ndarray) -> np.ndarray:
    """Rows of the set, int64 [k], that lie at these positions."""
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), self.size)
    rows = np.zeros(len(epochs), np.int64)
    for epoch in np.unique(epochs):
      here = epochs == epoch
      rows[here] = self._order(seed, int(epoch))[offsets[here]]
    return rows

  def at(self, seed: int, positions: np.ndarray) -> Prompts:
    prompts = self.prompts.take(self.rows(seed, positions))
    prompts.positions = np.asarray(positions, np.int64)
    return prompts


class PromptStream:
  """The prompts a run sees, in order, with those not opened handed back.

  Shard s of n holds the positions s, s + n, s + 2n, ... of the whole stream:
  shards are disjoint, together they are complete in every epoch, and since
  the row is endless, every shard serves the same number of steps.

  Attributes:
    num_examples: the size of the data set; None when prompts are fresh.
  """

  def __init__(self, source: Source, seed: int, shard=0, num_shards=1):
    if not 0 <= shard < num_shards:
      raise ValueError(
        f"shard must lie in [0, num_shards), got {shard=} {num_shards=}"
      )
    self.num_examples = source.size
    self._source, self._seed = source, seed
    self._shard, self._num_shards = shard, num_shards
    self._next = 0  # first position nobody has taken
    # Positions before it that were not opened, ascending.
    self._returned = np.zeros(0, np.int64)
    self._peeked: np.ndarray | None = None
    self._seen: tuple[np.ndarray, Prompts] | None = None  # the last peek

  @property
  def epoch(self) -> float:
    """Prompts consumed so far over the data set's size; 0 when fresh."""
    if self.num_examples is None:
      return 0.0
    consumed = (self._next - len(self._returned)) * self._num_shards
    return consumed / self.num_examples

  def peek(self, k: int) -> Prompts:
    """The next k prompts, without consuming any. k >= 1.

    Asked the same again, it costs nothing: a run looks ahead while its device
    is at work.
    """
    if k < 1:
      raise ValueError(f"peek needs at least one prompt, got {k=}")
    head = self._returned[:k]
    fresh = np.arange(self._next, self._next + k - len(head))
    self._peeked = np.concatenate([head, fresh])
    whole = self._peeked * self._num_shards + self._shard
    if self._seen is None or not np.array_equal(self._seen[0], whole):
      self._seen = whole, self._source.at(self._seed, whole)
    return self._seen[1]

  def prefetch(self) -> None:
    """Draws what the next peek will show if all of the last one is consumed."""
    prefetch = getattr(self._source, "prefetch", None)
    if self._peeked is not None and prefetch is not None:
      first = max(self._next, int(self._peeked[-1]) + 1)
      more = np.arange(first, first + len(self._peeked))
      prefetch(self._seed, more * self._num_shards + self._shard)

  def advance(self, consumed: np.ndarray) -> None:
    """Consumes prompts of the last peek; the others return to the head.

    Args:
      consumed: bool [k], k as in the last `peek`.

    Raises:
      ValueError: no peek came before, or another length.
    """
    consumed = np.asarray(consumed, bool)
    if self._peeked is None or consumed.shape != self._peeked.shape:
      seen = 0 if self._peeked is None else len(self._peeked)
      raise ValueError(
        f"advance takes one flag per prompt of the last peek ({seen}), got"
        f" shape {consumed.shape}"
      )
    kept = np.concatenate(
      [self._peeked[~consumed], self._returned[len(self._peeked) :]]
    )
    following = max(self._next, int(self._peeked[-1]) + 1)
    # Untouched positions at the end are not remembered one by one. They
    # ascend, so those that count down from the end are the last ones.
    untouched = np.count_nonzero(
      kept == np.arange(following - len(kept), following)
    )
    self._returned = kept[: len(kept) - untouched]
    self._next = following - int(untouched)
    self._peeked = None

  def state_dict(self) -> dict[str, Any]:
    """The position as one JSON record; a pending peek counts as not taken."""
    return {
      "next": self._next,
      "returned": self._returned.tolist(),
      "epoch": self.epoch,
      "seed": self._seed,
      "shard": [self._shard, self._num_shards],
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Continues where `state_dict` was taken.

    Raises:
      ValueError: the record belongs to another seed or sharding.
    """
    mine = {"seed": self._seed, "shard": [self._shard, self._num_shards]}
    for name, value in mine.items():
      if name in state and state[name] != value:
        raise ValueError(
          f"the stream's saved {name} is {state[name]}, this run's is {value}"
        )
    self._next = int(state["next"])
    self._returned = np.array(state["returned"], np.int64)
    self._peeked = None
