r"""Where in a completion the final answer stands.

Reasoning comes first: everything up to the last </think> is dropped, unless
nothing follows it. All positions are found by scanning, never by a regular
expression that can backtrack over a long completion.
"""

from __future__ import annotations

import re

_ANSWER_TAG = re.compile(r"<answer>|</answer>", re.I)
_BRACE = re.compile(r"\\.|[{}]", re.S)
# What "\boxed 5" boxes: a number, or a letter that begins no word.
_BARE = re.compile(r"[-+]?[0-9][0-9.,]*|[A-Za-z](?![A-Za-z])")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def after_reasoning(text: str) -> str:
  """What follows the last closed reasoning block.

  Text that opens a block and never closes it is reasoning throughout, cut off
  by the length limit: what came before the block is kept.
  """
  end = text.rfind("</think>")
  tail = text[end + len("</think>") :] if end >= 0 else text
  start = tail.find("<think>")
  return tail[:start] if start >= 0 else tail


def tagged(text: str) -> str | None:
  """Content of the last closed <answer>...</answer>, or None."""
  opened = None
  content = None
  for match in _ANSWER_TAG.finditer(text):
    if match[0].lower() == "<answer>":
      opened = match.end()
    elif opened is not None:
      content, opened = text[opened : match.start()], None
  return content


def closing_brace(text: str, start: int) -> int:
  r"""Index of the brace that closes the one at `start`, or -1.

  Escaped braces (\{ and \}) are content.
  """
  depth = 0
  i = start
  while i < len(text):
    char = text[i]
    if char == "\\":
      i += 2
      continue
    if char == "{":
      depth += 1
    elif char == "}":
      depth -= 1
      if depth == 0:
        return i
    i += 1
  return -1


def _closings(text: str) -> dict[int, int]:
  """Index of each opening brace that closes, to that of its closing one."""
  pairs: dict[int, int] = {}
  opened: list[int] = []
  for match in _BRACE.finditer(text):
    if match[0] == "{":
      opened.append(match.start())
    elif match[0] == "}" and opened:
      pairs[opened.pop()] = match.start()
  return pairs


def boxes(text: str) -> list[tuple[int, int, str]]:
  r"""(start, end, content) of every outermost \boxed{...} that closes.

  "\boxed 5" without braces boxes one token; a \boxed without content is none.
  """
  if not _BOX.search(text):
    return []
  closings = _closings(text)
  found: list[tuple[int, int, str]] = []
  position = 0
  while match := _BOX.search(text, position):
    begin = position = match.end()
    if text.startswith("{", begin):
      if begin in closings:
        position = closings[begin] + 1
        found.append((match.start(), position, text[begin + 1 : position - 1]))
    elif match[0][-1].isspace():
      token = _BARE.match(text, begin)
      if token:
        position = begin + len(token[0].rstrip(".,"))
        found.append((match.start(), position, text[begin:position]))
  return found


def has_box(text: str) -> bool:
  r"""True when a \boxed stands in the text, closed or not."""
  return _BOX.search(text) is not None
