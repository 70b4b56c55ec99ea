"""Vocabularies that need no file: an id per character, piece or byte.

They are NumPy only, so a toy run never imports TensorFlow. The methods are
those of seqio.Vocabulary that training needs; `seqio_tasks.SeqioVocabulary`
wraps any of them for seqio itself.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

PAD_ID = 0
EOS_ID = 1
# How an id shows that is no text but was sampled inside a completion: a pad, or
# one of the ids that a model has beyond its vocabulary.
STRAY = "\u00b7"


class Vocabulary(Protocol):
  """Text to ids and back.

  Attributes:
    pad_id, eos_id, bos_id, unk_id: special ids; None where there is none.
    eos_ids: every id that ends a completion, eos_id first.
    vocab_size: number of ids.
    fingerprint: equal for vocabularies that give equal ids.
  """

  pad_id: int
  eos_id: int | None
  bos_id: int | None
  unk_id: int | None
  eos_ids: tuple[int, ...]
  vocab_size: int
  fingerprint: str

  def encode(self, text: str) -> list[int]:
    """Ids of a text; adds no BOS and no EOS."""

  def decode(self, ids: Sequence[int]) -> str:
    """Text up to the first EOS, which itself is not shown."""

  def decode_batch(self, tokens, lengths) -> list[str]:
    """`decode` of tokens[i, :lengths[i]] for int arrays [k, L] and [k]."""


class ByteTable:
  """Shared by the vocabularies whose ids are single latin-1 characters.

  Decoding is one table lookup for a whole batch: 256 completions of 32 tokens
  take about a tenth of a millisecond.
  """

  pad_id = PAD_ID
  eos_id = EOS_ID
  bos_id = None
  unk_id = None
  eos_ids = (EOS_ID,)

  def __init__(self, table: bytes, encoding: str):
    """`table` holds the byte of every id, the special ids' included."""
    # One entry more: a model's vocabulary may be padded, and what it samples
    # from the padding must show as text that no answer contains.
    self._table = np.frombuffer(table + STRAY.encode("latin-1"), np.uint8)
    self._encoding = encoding
    self.fingerprint = f"{encoding} {table.hex()}"
    self.vocab_size = len(table)

  def decode_batch(self, tokens, lengths) -> list[str]:
    tokens = np.asarray(tokens)
    if tokens.size == 0:
      return [""] * len(tokens)
    columns = np.arange(tokens.shape[1])
    ended = (tokens == EOS_ID) & (columns < np.asarray(lengths)[:, None])
    stop = np.where(ended.any(1), ended.argmax(1), lengths).tolist()
    width = tokens.shape[1]
    known = np.minimum(tokens, self.vocab_size)
    flat = self._table[known].tobytes()
    rows = [flat[i * width : i * width + n] for i, n in enumerate(stop)]
    return [row.decode(self._encoding, "replace") for row in rows]

  def decode(self, ids: Sequence[int]) -> str:
    ids = np.asarray(ids, np.int64).reshape(1, -1)
    # Padding at the end is no text; padding in the middle is shown.
    used = np.flatnonzero(ids[0] != PAD_ID)
    return self.decode_batch(ids, [used[-1] + 1 if len(used) else 0])[0]


class CharacterVocabulary(ByteTable):
  """One id per character of a small alphabet, after pad 0 and EOS 1."""

  def __init__(self, alphabet: str):
    if len(set(alphabet)) != len(alphabet) or not alphabet.isascii():
      raise ValueError(f"alphabet must be distinct ASCII, got {alphabet!r}")
    table = STRAY + "\0" + alphabet
    super().__init__(table.encode("latin-1"), "latin-1")
    self.alphabet = alphabet
    self._ids = {c: i for i, c in enumerate(alphabet, start=2)}

  def encode(self, text: str) -> list[int]:
    try:
      return [self._ids[c] for c in text]
    except KeyError as error:
      raise ValueError(
        f"character {error.args[0]!r} of {text!r} is not in the alphabet"
        f" {self.alphabet!r}"
      ) from None


class PieceVocabulary:
  """One id per piece of text, after pad 0 and EOS 1.

  Pieces may have several characters; the longest that fits is taken.
  """

  pad_id = PAD_ID
  eos_id = EOS_ID
  bos_id = None
  unk_id = None
  eos_ids = (EOS_ID,)

  def __init__(self, pieces: Sequence[str]):
    if len(set(pieces)) != len(pieces) or not all(pieces):
      raise ValueError(f"pieces must be distinct and not empty, got {pieces}")
    if any("\0" in piece for piece in pieces):
      raise ValueError(f"pieces must not hold NUL, got {pieces}")
    self.pieces = tuple(pieces)
    self.vocab_size = len(pieces) + 2
    self._ids = {piece: i for i, piece in enumerate(pieces, start=2)}
    longest = sorted(pieces, key=len, reverse=True)
    self._match = re.compile("|".join(map(re.escape, longest))).match
    # One entry more, as in ByteTable: what is sampled from a model's padding.
    self._texts = np.array([STRAY, "", *pieces, STRAY])
    self._width = max(map(len, self._texts))

  def encode(self, text: str) -> list[int]:
    ids, at = [], 0
    while at < len(text):
      found = self._match(text, at)
      if found is None:
        raise ValueError(
          f"{text[at:]!r} of {text!r} starts with none of the vocabulary's"
          f" pieces: {' '.join(self.pieces)}"
        )
      ids.append(self._ids[found.group()])
      at = found.end()
    return ids

  def decode_batch(self, tokens, lengths) -> list[str]:
    tokens = np.asarray(tokens)
    if tokens.size == 0:
      return [""] * len(tokens)
    columns = np.arange(tokens.shape[1])
    ended = (tokens == EOS_ID) | (columns >= np.asarray(lengths)[:, None])
    known = np.minimum(tokens, self.vocab_size, order="C")
    # From the first end on no text. Then each row as one string, in which
    # pieces shorter than the longest are filled up with NUL.
    known[np.logical_or.accumulate(ended, 1)] = EOS_ID
    rows = self._texts[known].view(f"U{self._width * tokens.shape[1]}")
    return [row.replace("\0", "") for row in rows.ravel().tolist()]

  def decode(self, ids: Sequence[int]) -> str:
    ids = np.asarray(ids, np.int64).reshape(1, -1)
    # Padding at the end is no text; padding in the middle is shown.
    used = np.flatnonzero(ids[0] != PAD_ID)
    return self.decode_batch(ids, [used[-1] + 1 if len(used) else 0])[0]


class ByteVocabulary(ByteTable):
  """UTF-8 bytes after pad 0, EOS 1: 258 ids, any text, no file."""

  def __init__(self):
    super().__init__(b"\0\0" + bytes(range(256)), "utf-8")

  def encode(self, text: str) -> list[int]:
    return [b + 2 for b in text.encode("utf-8")]
