"""Text of a completion while it is being drawn."""

from __future__ import annotations

from typing import Sequence

from vigor_jax.tasks import vocabularies

# What an incomplete character decodes to.
_BROKEN = "\ufffd"
# An incomplete character has at most this many bytes, and so tokens.
_MISSING = 3


class StreamedText:
  """Turns tokens into text piece by piece; the pieces join to the whole text.

  A token may end inside a character, and a tokenizer may write a token
  differently at the start of a text. So a piece is the difference of two
  texts that begin at the same, earlier token, and it is held back while it ends
  in an incomplete character.

  Args:
    vocabulary: decodes ids.
    stop_strings: the completion ends with the token that completes one.

  Attributes:
    stopped: a stop string is complete.
  """

  def __init__(self, vocabulary, stop_strings: Sequence[str] = ()):
    self._vocabulary, self._stops = vocabulary, tuple(stop_strings)
    self._ids: list[int] = []
    # Text of ids[:_shown] has been handed out; ids[_start:] are decoded.
    self._start = self._shown = 0
    self.stopped = False

  def push(self, ids: Sequence[int]) -> tuple[list[int], str]:
    """Takes further tokens.

    Returns:
      (those that belong to the completion, the piece of text that became
      certain.)
    """
    if self.stopped:
      return [], ""
    ids, searched = list(ids), len(self._ids)
    self._ids += ids
    if self._stops:
      end = vocabularies.find_stop(self._vocabulary, self._ids, self._stops,
                                   searched)
      if end is not None:
        self.stopped = True
        ids = ids[: end + 1 - searched]
        del self._ids[end + 1:]
    return ids, self._piece(self.stopped)

  def flush(self) -> str:
    """What is left at the end, incomplete characters included."""
    return self._piece(True)

  def _piece(self, final: bool) -> str:
    decode = lambda end: self._vocabulary.decode(self._ids[self._start: end])
    end = len(self._ids)
    if not final:
      # A character that lacks bytes began among the last three tokens.
      last = range(end, max(end - _MISSING, self._shown), -1)
      end = next((i for i in last if not decode(i).endswith(_BROKEN)),
                 end - _MISSING)
    if end <= self._shown:
      return ""
    before = decode(self._shown)
    piece = decode(end)[len(before):]
    if not before.endswith(_BROKEN):  # Else the next text could begin inside.
      self._start = self._shown
    self._shown = end
    return piece
