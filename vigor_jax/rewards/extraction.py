r"""The final answer in a model's text about a mathematical problem.

In order: the last <answer> tag, the last \boxed, the last "####" line, the last
"answer is ..." statement; failing those, what the last line ends with. Text
inside a reasoning block does not count.
"""

from __future__ import annotations

import re

from vigor_jax.rewards import answer_text
from vigor_jax.rewards import latex
from vigor_jax.rewards.latex_clean import strip_marks

# A statement is read this far, and a last line this far from its end.
_MAX_STATEMENT = 2_000
_CONNECTOR = re.compile(
  r"(?:[\s$,;&.]|\\[()\[\],;:! ]|\\q?quad|\band\b|\bor\b"
  r"|\\text\s*\{\s*(?:and|or)"
  r"\s*,?\s*\}|(?<![A-Za-z])[A-Za-z]\s*=|及|和|或)*",
  re.I,
)
_LABEL = re.compile(
  r"(?:answers?|correct\s+(?:option|choice))(?:\s+to\s+[^.:\n]{1,80})?[*_`\s]*"
  r"(?:[:：=]|\bis\b|\bare\b)(?:\s*[:=])?[*_`\s]*",
  re.I,
)
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_SENTENCE_END = re.compile(r"[.!?](?=\s|\Z)|\n\s*\n|。")
_MATH = re.compile(
  r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S
)
_CUT = re.compile(
  r",?\s+(?:because|since|which|as\s+we|where|so|for|when|in\s+total)\b", re.I
)
_BOLD = re.compile(r"(?<![\w)\]}])\*\*(?=\S)([^*\n]+)\*\*")
_STRAY = re.compile(r"\*\*(?=\s|\Z)")
_NUMBER = (
  r"[-+−]?\s*[$€£]?\s*(?:[0-9]+ +[0-9]+\s*/\s*[0-9]+"
  r"|[0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,4})?(?:\s*/\s*[0-9]+)?"
  r"|\.[0-9]+)(?![0-9A-Za-z_/])\s*(?:\\?%)?"
)
_LEADING_NUMBER = re.compile(_NUMBER)
_AFTER_VERB = re.compile(
  r"(?:=|\bis\b|\bare\b|\bequals\b|\bgives\b|\bget\b|:|≈)\s*(" + _NUMBER + ")"
)
_LAST_NUMBER = re.compile(
  r"(?:\A|(?<=[\s=($*:]))(" + _NUMBER + r")[\s.*$)!]*\Z"
)


def _boxed(text: str) -> str | None:
  r"""The last box; boxes joined by no more than "and" are one answer."""
  found = answer_text.boxes(text)
  found = [box for box in found if box[2].strip()]
  if not found:
    return None
  group = [found[-1]]
  for box in reversed(found[:-1]):
    between = text[box[1] : group[0][0]]
    if len(between) > 60 or not _CONNECTOR.fullmatch(between):
      break
    if "\n\n" in between:
      break
    group.insert(0, box)
  contents: list[str] = []
  for _, _, content in group:
    if content.strip() not in contents:
      contents.append(content.strip())
  return " , ".join(contents)


def _without_bold(line: str) -> str:
  """Markdown's bold marks gone; 2**3 is a power and stays."""
  return _STRAY.sub("", _BOLD.sub(r"\1", line))


def _readable(text: str) -> bool:
  try:
    latex.read(text)
  except (latex.Unreadable, ValueError, RecursionError):
    return False
  return True


def _math_segments(text: str) -> list[tuple[int, int, str]]:
  out = []
  for match in _MATH.finditer(text):
    out.append((match.start(), match.end(), next(filter(None, match.groups()))))
  return out


def _statement(text: str) -> str | None:
  """The answer within "the answer is <text>", up to the end of its sentence."""
  text = text[: 4 * _MAX_STATEMENT].lstrip()[:_MAX_STATEMENT]
  line = (
    text.split("\n", 1)[0] if text.split("\n", 1)[0].strip(" *_$`") else text
  )
  line = _without_bold(line)
  end = _SENTENCE_END.search(line)
  sentence = strip_marks(line[: end.start()] if end else line)
  if not sentence:
    return None
  if _readable(sentence):
    return sentence
  segments = _math_segments(line)
  if segments:
    group = [segments[0]]
    for segment in segments[1:]:
      if not _CONNECTOR.fullmatch(line[group[-1][1] : segment[0]]):
        break
      group.append(segment)
    return " , ".join(content for _, _, content in group)
  cut = _CUT.split(sentence, maxsplit=1)[0]
  if _readable(cut):
    return cut
  number = _LEADING_NUMBER.match(sentence)
  # "8 - 3 x y?" is not 8: a number followed by an operator is a part.
  if number and not re.match(r"\s*[-+*/^=<>\\]", sentence[number.end() :]):
    return number[0]
  return cut


def _last_line(text: str) -> str | None:
  lines = [line for line in text[-_MAX_STATEMENT:].splitlines() if line.strip()]
  if not lines:
    return None
  line = _without_bold(lines[-1].strip())
  if _readable(line) and not re.search(r"[A-Za-z]{4}", _plain(line)):
    return line
  segments = _math_segments(line)
  if segments:
    content = segments[-1][2]
    return content.rpartition("=")[2] if "=" in content else content
  match = _LAST_NUMBER.search(line)
  if match:
    return match[1]
  matches = list(_AFTER_VERB.finditer(line))
  return matches[-1][1] if matches else None


def _plain(line: str) -> str:
  return re.sub(r"\\[A-Za-z]+", "", line)


def final_answer(completion: str) -> str | None:
  """The stated answer as written, or None when none is stated."""
  text = answer_text.after_reasoning(completion)
  found = answer_text.tagged(text)
  if found is not None:
    return _boxed(found) or strip_marks(found) or None
  found = _boxed(text)
  if found is not None:
    return found
  if answer_text.has_box(text):
    return None  # An empty or unclosed box: the answer was cut off.
  hashes = _HASHES.findall(text)
  if hashes:
    return strip_marks(hashes[-1]) or None
  ends = [label.end() for label in _LABEL.finditer(text)]
  if ends:
    stated = _statement(text[ends[-1] :])
    if stated:
      return stated
  return _last_line(text)


def gold_answer(answer: str) -> str:
  r"""The gold answer, out of a \boxed or from behind "####" if it is there."""
  boxed = _boxed(answer)
  if boxed is not None:
    return boxed
  if "####" in answer:
    answer = answer.rpartition("####")[2]
  return answer.strip()
