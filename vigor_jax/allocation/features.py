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


TOKENS, SHUFFLED = "tokens", "shuffled"


def source(name: str) -> Callable[[Any], np.ndarray | None]:
  """What makes the features of prompts, by the option's value.

  Args:
    name: "tokens"; "shuffled", the same but for the rule to shuffle; or
      "module:function", which gets what the stream handed out (positions, uids,
      tokens, texts, metadata) and returns float [k, D]. It must be a pure
      function: a run that is killed and started again asks it again.

  Raises:
    ValueError: the function cannot be found.
  """
  if name in (TOKENS, SHUFFLED):
    return of
  module, _, function = name.partition(":")
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"looks={name!r} must be {TOKENS!r}, {SHUFFLED!r} or 'module:function'"
      f" ({error})"
    ) from error


def of(prompts) -> np.ndarray | None:
  """Features of what a stream handed out: float64 [k, D], or None.

  None where there is nothing to look at, as in simulations of rewards alone.
  """
  given = getattr(prompts, "features", None)
  if given is not None:
    return np.asarray(given, np.float64)
  tokens = getattr(prompts, "tokens", None)
  return None if tokens is None else hashed(tokens)


def hashed(tokens: Sequence[np.ndarray]) -> np.ndarray:
  """Projected counts of tokens and of pairs, and the length.

  Args:
    tokens: k int arrays of prompt ids, unpadded.

  Returns:
    float64 [k, UNIGRAMS + BIGRAMS + 1].
  """
  lengths = np.array([len(t) for t in tokens])
  ids = np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.uint64)
  owner = np.repeat(np.arange(len(tokens)), lengths)
  # A pair belongs to its first token; the last token of a prompt has none.
  inner = owner[:-1] == owner[1:]
  with np.errstate(over="ignore"):
    pairs = (_mix(ids[:-1]) * _GOLDEN + ids[1:])[inner]
  return np.concatenate(
    [
      _project(ids, owner, len(tokens), UNIGRAMS),
      _project(pairs, owner[:-1][inner], len(tokens), BIGRAMS),
      lengths[:, None].astype(np.float64),
    ],
    axis=1,
  )


def _mix(x: np.ndarray) -> np.ndarray:
  """The finaliser of splitmix64 (Steele et al. 2014), a 64-bit mixer."""
  with np.errstate(over="ignore"):
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def _project(items, owner, rows: int, size: int) -> np.ndarray:
  """Sum over an owner's items of PLACES random signs each: [rows, size].

  Whole numbers, so the sums do not depend on their order. `size` is at most
  2**12.
  """
  bits = _mix(items)
  result = np.zeros(rows * size)
  for place in range(PLACES):
    part = bits >> np.uint64(16 * place)
    column = (part & np.uint64(0xFFF)).astype(np.int64) % size
    sign = ((part >> np.uint64(12)) & np.uint64(1)).astype(np.float64) * 2 - 1
    result += np.bincount(owner * size + column, sign, rows * size)
  return result.reshape(rows, size)
