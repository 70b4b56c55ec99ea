"""Text that is handed out while a completion is drawn."""

import numpy as np
import pytest

from vigor_jax.serving.text import StreamedText
from vigor_jax.tasks import characters

BYTES = characters.ByteVocabulary()


def pieces(ids, sizes, stops=(), vocabulary=BYTES):
  text, out, kept = StreamedText(vocabulary, stops), [], []
  start = 0
  for size in sizes:
    belongs, piece = text.push(ids[start : start + size])
    kept += belongs
    out.append(piece)
    start += size
  assert start >= len(ids)
  return [*out, text.flush()], kept, text.stopped


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_pieces_join_to_the_text(size):
  whole = "naïve café: 5 € for 𝄞 and 日本語 😀."
  ids = BYTES.encode(whole)
  out, kept, stopped = pieces(ids, [size] * len(ids))
  assert "".join(out) == whole and kept == ids and not stopped
  assert not any("\ufffd" in piece for piece in out)


def test_a_character_is_held_back_until_it_is_whole():
  ids = BYTES.encode("a€b")
  assert pieces(ids, [1] * 5)[0] == ["a", "", "", "€", "b", ""]
  # Cut off inside a character: shown as broken, at the end.
  assert pieces(ids[:3], [1] * 3)[0] == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_text_are_not_held_back_for_ever():
  rng = np.random.default_rng(0)
  for _ in range(50):
    raw = bytes(rng.integers(0x80, 0x100, 40).astype(np.uint8))
    table = {b: i for i, b in enumerate(BYTES._table.tobytes()) if i > 1}
    ids = [table[b] for b in raw]
    out, _, _ = pieces(ids, [1] * len(ids))
    assert "".join(out) == BYTES.decode(ids)
    assert "".join(out[:20])


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_stop_string_ends_it(size):
  ids = BYTES.encode("answer 7;\nand more")
  out, kept, stopped = pieces(ids, [size] * len(ids), (";\n",))
  assert stopped and "".join(out) == "answer 7;\n" == BYTES.decode(kept)
