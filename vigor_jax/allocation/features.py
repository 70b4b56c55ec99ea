"""What a prompt looks like, as numbers: for rules that predict difficulty.

A prompt's features are a fixed number of floats, made on the host from its
token ids alone: a random projection of its bag of tokens and of its pairs of
neighbours, and its length. Ids go through a hash, so any vocabulary will do.
Linear functions of token counts survive the projection exactly while fewer
kinds of tokens occur than there are dimensions, and nearly so beyond that.
A stream whose prompts carry `features` of their own (float [k, D]) is taken at
its word, and a function of the prompts may take the place of all this, such as
a model's embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import importlib
from typing import Any

import numpy as np

UNIGRAMS = 64  # dimensions of the projected bag of tokens
BIGRAMS = 32
PLACES = 4  # dimensions a token is spread over, with random signs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


TOKENS, BAG, SHUFFLED = "tokens", "bag", "shuffled"


def source(name: str) -> Callable[[Any], np.ndarray | None]:
  """What makes the features of prompts, by the option's value.

  Args:
    name: "tokens"; "bag", the same without pairs of neighbours, a third less to
      compute with; "shuffled", tokens for the rule to shuffle; or
      "module:function", which gets what the stream handed out (positions, uids,
      tokens, texts, metadata) and returns float [k, D]. It must be a pure
      function: a run that is killed and started again asks it again.

  Raises:
    ValueError: the function cannot be found.
  """
  if name in (TOKENS, SHUFFLED):
    return of
  if name == BAG:
    return bag
  module, _, function = name.partition(":")
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"looks={name!r} must be {TOKENS!r}, {BAG!r}, {SHUFFLED!r} or"
      " 'module:function'"
      f" ({error})"
    ) from error


def of(prompts, pairs: bool = True) -> np.ndarray | None:
  """Features of what a stream handed out: float64 [k, D], or None.

  None where there is nothing to look at, as in simulations of rewards alone.

  Args:
    prompts: their own `features`, or `padded` or `tokens` as in `hashed`.
    pairs: whether pairs of neighbours count.
  """
  given = getattr(prompts, "features", None)
  if given is not None:
    return np.asarray(given, np.float64)
  padded = getattr(prompts, "padded", None)
  if padded is not None:
    return _hashed(*padded, pairs)
  tokens = getattr(prompts, "tokens", None)
  return None if tokens is None else hashed(tokens, pairs)


def bag(prompts) -> np.ndarray | None:
  """`of` without pairs of neighbours."""
  return of(prompts, pairs=False)


# What a row holds depends on that prompt alone: a rule need not ask again.
of.by_row = bag.by_row = True


def hashed(tokens: Sequence[np.ndarray], pairs: bool = True) -> np.ndarray:
  """Projected counts of tokens and of pairs, and the length.

  Args:
    tokens: k int arrays of prompt ids, unpadded.
    pairs: whether pairs count.

  Returns:
    float64 [k, UNIGRAMS + BIGRAMS + 1], without BIGRAMS if pairs do not count.
  """
  lengths = np.array([len(t) for t in tokens], np.int64)
  ids = np.concatenate([np.zeros(0, np.int64), *tokens])
  return _hashed(ids, lengths, pairs)


def _hashed(ids: np.ndarray, lengths: np.ndarray, pairs: bool) -> np.ndarray:
  """`hashed` of ids one after another, or padded: [k, longest]."""
  if ids.ndim == 2 and len(ids):
    ids = ids[np.arange(ids.shape[1]) < lengths[:, None]]
  ids = ids.astype(np.uint64)
  size = UNIGRAMS + (BIGRAMS if pairs else 0) + 1
  first = np.repeat(np.arange(len(lengths)) * size, lengths)
  bits = _mix(ids)
  result = _project(bits, first, UNIGRAMS, len(lengths) * size)
  if pairs:
    # A pair belongs to its first token; the last token of a prompt has none.
    inner = first[:-1] == first[1:]
    both = (bits[:-1] * _GOLDEN + ids[1:])[inner]
    result += _project(
      _mix(both), first[:-1][inner] + UNIGRAMS, BIGRAMS, len(result)
    )
  result = result.reshape(len(lengths), size)
  result[:, -1] = lengths
  return result


def _mix(x: np.ndarray) -> np.ndarray:
  """The finaliser of splitmix64 (Steele et al. 2014), a 64-bit mixer."""
  x = x + _GOLDEN  # Whole arrays wrap round in silence.
  x ^= x >> np.uint64(30)
  x *= _MIX[0]
  x ^= x >> np.uint64(27)
  x *= _MIX[1]
  x ^= x >> np.uint64(31)
  return x


def _project(bits, first, size: int, total: int) -> np.ndarray:
  """Sums PLACES random signs of every item into `size` cells: [total].

  Whole numbers, so the sums do not depend on their order. `size` is at most
  2**12.

  Args:
    bits: uint64 [n], an item's mixed bits, 16 for each of its places.
    first: int64 [n], where the cells of the item's owner begin.
    size: cells of an owner.
    total: cells of all owners.
  """
  part = bits.astype("<u8", copy=False).view("<u2").reshape(-1, PLACES)
  cell = (part & np.uint16(0xFFF)) % np.uint16(size) + first[:, None]
  sign = (part >> np.uint16(12) & np.uint16(1)) * 2.0 - 1.0
  return np.bincount(cell.ravel(), sign.ravel(), total)
