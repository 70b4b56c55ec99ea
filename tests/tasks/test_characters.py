"""The vocabularies that need no file."""

import numpy as np
import pytest

from vigor_jax.tasks import characters

DIGITS = characters.CharacterVocabulary("0123456789+-*=")


def test_ids_by_hand():
  assert DIGITS.vocab_size == 16
  assert DIGITS.encode("0+9=") == [2, 12, 11, 15]
  assert DIGITS.decode([2, 12, 11, 15, 1, 0, 0]) == "0+9="


def test_decoding_ends_at_the_first_eos_and_before_the_length():
  tokens = np.array([[3, 4, 1, 5], [3, 4, 5, 6], [1, 3, 3, 3], [3, 1, 0, 0]])
  assert DIGITS.decode_batch(tokens, [4, 3, 4, 1]) == ["12", "123", "", "1"]


def test_pieces_are_joined_up_to_the_first_end():
  pieces = ["0", "+12", "23"]
  vocabulary = characters.PieceVocabulary(pieces)
  texts = [characters.STRAY, "", *pieces, *[characters.STRAY] * 3]
  rng = np.random.default_rng(0)
  for rows, width in [(60, 1), (60, 7), (1, 4)]:
    tokens = rng.integers(0, len(texts), (rows, width))
    lengths, before = rng.integers(0, width + 1, rows), tokens.copy()
    expected = []
    for row, length in zip(tokens.tolist(), lengths):
      row = [*row[:length], characters.EOS_ID]
      row = row[: row.index(characters.EOS_ID)]
      expected.append("".join(texts[i] for i in row))
    for given in (tokens, np.asfortranarray(tokens), tokens.astype(np.int32)):
      assert vocabulary.decode_batch(given, lengths) == expected
    np.testing.assert_array_equal(tokens, before)
  with pytest.raises(ValueError, match="NUL"):
    characters.PieceVocabulary(["a", "b\0c"])


def test_a_sampled_pad_is_not_hidden():
  """Else a completion with a pad inside would score as if it had none."""
  assert DIGITS.decode_batch(np.array([[3, 0, 4]]), [3]) == ["1\u00b72"]


@pytest.mark.parametrize(
  "vocabulary",
  [
    characters.CharacterVocabulary("0123"),
    characters.PieceVocabulary(["0", "1", "23"]),
    characters.ByteVocabulary(),
  ],
  ids=["characters", "pieces", "bytes"],
)
def test_ids_of_a_models_padding_are_shown(vocabulary):
  """A model may have more ids than its task's vocabulary, and sample them."""
  zero = vocabulary.encode("0")[0]
  beyond = [vocabulary.vocab_size, vocabulary.vocab_size + 77, 2**31 - 1]
  rows = np.array([[zero, id_, zero, 1] for id_ in beyond], np.int32)
  texts = vocabulary.decode_batch(rows, [4] * 3)
  assert len(set(texts)) == 1 and texts[0] != "00"
  assert texts[0][0] == texts[0][-1] == "0"
  assert vocabulary.decode(rows[0]) == texts[0]


def test_an_unknown_character_is_named():
  with pytest.raises(ValueError, match="'x' of '3x4'"):
    DIGITS.encode("3x4")
  with pytest.raises(ValueError, match="distinct"):
    characters.CharacterVocabulary("aa")


@pytest.mark.parametrize("text", ["plain", "naïve ± 数学", "", "a\0b"])
def test_bytes_round_trip(text):
  vocabulary = characters.ByteVocabulary()
  ids = vocabulary.encode(text)
  assert all(2 <= i < vocabulary.vocab_size for i in ids)
  assert vocabulary.decode([*ids, vocabulary.eos_id]) == text


def test_half_a_character_decodes_to_a_replacement():
  ids = characters.ByteVocabulary().encode("数")[:2]
  assert characters.ByteVocabulary().decode(ids) == "\ufffd"


def test_empty_batches():
  assert DIGITS.decode_batch(np.zeros((0, 4), int), np.zeros(0, int)) == []
  assert DIGITS.decode_batch(np.zeros((2, 0), int), np.zeros(2, int)) == ["", ""]
  assert DIGITS.decode([]) == ""
