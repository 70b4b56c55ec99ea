"""The verdict on one mathematical answer, without limits on time or memory.

First what reading alone decides (equal texts, choices, words), then our own
grammar with exact arithmetic; math-verify is asked only about commands that the
grammar does not have, and must agree in both directions.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from vigor_jax.rewards import equivalence
from vigor_jax.rewards import latex
from vigor_jax.rewards import units
from vigor_jax.rewards.latex_clean import clean

_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_CHOICE = re.compile(
  r"(?:option|choice|answer)?\s*[({\[]*\s*([A-J])\s*(?:[)}\].:]|(?=\s)|\Z)\s*"
)
_CHOICES = re.compile(
  r"[\s(){}]*[A-J](?:[\s(){},;&]+[A-J])+[\s(){}]*|[A-H]{2,8}"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z '.,-]*")
_APPROXIMATELY = re.compile(
  r"\A\s*(?:\\approx|\\simeq|\\sim|≈|approximately|about|roughly|=)\s*", re.I
)
_LEAD = re.compile(r"\A[A-Za-z][A-Za-z ,'-]*(?:\bis\b|\bare\b|:)\s*(?=\S)")
_ASIDE = re.compile(r"\s*\(\s*[A-Za-z][A-Za-z ]{2,}\)\Z")
_NOT_A_VALUE = frozenset(("nan", "inf", "none", "null", "undefined", "error"))


# math-verify's parser takes minutes for what is longer or deeply nested.
_MAX_SECOND = 500


def squeeze(text: str) -> str:
  """Cleaned text without the white space that means nothing."""
  return _SPACE.sub("", text)


def _choice(text: str) -> tuple[str, str] | None:
  """(letter, rest) of "(C) 12", "C.", "\\text{C}" ..., or None."""
  match = _CHOICE.match(text.strip())
  if not match:
    return None
  rest = text.strip()[match.end() :].strip()
  if rest and not (rest[0].isalnum() or rest[0] in "\\-("):
    return None
  if rest and re.search(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])", rest):
    return None  # "A and B" is not "A".
  if rest and text.strip()[match.end(1) : match.end(1) + 1] not in ").:]}":
    return None  # "C x" is no choice.
  return match[1], rest


def _same_choice(gold: str, text: str) -> bool | None:
  """A verdict where the gold answer is a choice, else None."""
  if _CHOICES.fullmatch(gold):
    if _CHOICES.fullmatch(text):
      letters = [sorted(re.findall("[A-J]", t)) for t in (gold, text)]
      return letters[0] == letters[1]
    return None
  wanted = _choice(gold)
  if wanted is None:
    return None
  letter, content = wanted
  found = _choice(text) or _choice(text.upper() if len(text) < 6 else text)
  if found is not None:
    return found[0] == letter
  return None if content else False


def _words(text: str) -> str | None:
  if not _WORDS.fullmatch(text) or not re.search("[A-Za-z]{3}", text):
    return None
  return " ".join(re.findall("[a-z]+", text.lower()))


def _readings(text: str) -> list[tuple[str, str]]:
  """(value, unit) pairs that a cleaned text may mean."""
  texts = [text]
  bare = _ASIDE.sub("", _APPROXIMATELY.sub("", _LEAD.sub("", text)))
  if bare and bare != text:
    texts.append(bare)
  joined = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), texts[-1])
  if joined != texts[-1]:
    texts.append(joined)
  out = [(t, "") for t in texts]
  for t in texts:
    parts = units.split(t)
    if parts:
      out.insert(0, parts)
  return out


def _parse_all(text: str) -> tuple[list[tuple[latex.Node, str]], bool]:
  """What a text may mean, and whether an unknown command is why not more."""
  out = []
  unknown = False
  for value, unit in _readings(text):
    try:
      out.append((latex.parse(value), unit))
    except latex.UnknownCommand:
      unknown = True
    except (latex.Unreadable, RecursionError):
      continue
  return out, unknown


def _same_with_units(a, b) -> bool:
  (node_a, unit_a), (node_b, unit_b) = a, b
  if not unit_a or not unit_b or unit_a == unit_b:
    return equivalence.equivalent(node_a, node_b)
  known_a, known_b = units.lookup(unit_a), units.lookup(unit_b)
  if known_a is None or known_b is None:
    return equivalence.equivalent(node_a, node_b)
  if known_a[0] != known_b[0]:
    return False
  if known_a[1] == known_b[1]:
    return equivalence.equivalent(node_a, node_b)
  scaled = [
    ("mul", node, ("num", Fraction(known[1]), None))
    for node, known in ((node_a, known_a), (node_b, known_b))
  ]
  return equivalence.equivalent(*scaled)


def quick(gold: str, text: str) -> bool | None:
  """A verdict from the cleaned texts alone; None when it takes arithmetic."""
  if not gold or not text:
    return False
  if squeeze(gold) == squeeze(text):
    return True
  verdict = _same_choice(gold, text)
  if verdict is not None:
    return verdict
  gold_words, text_words = _words(gold), _words(text)
  if gold_words is not None and text_words is not None:
    if gold_words == text_words:
      return True
    if " " in gold_words or len(gold_words) > 4:
      return False
  if text.strip("+- ").lower() in _NOT_A_VALUE:
    return False
  if all(len(t) <= 18 and t.isascii() and t.isdigit() for t in (gold, text)):
    return int(gold) == int(text)
  return None


def judge(gold: str, text: str) -> bool:
  """True when the cleaned `text` is the answer that the cleaned `gold` is."""
  verdict = quick(gold, text)
  if verdict is not None:
    return verdict
  try:
    return _by_value(gold, text)
  except RecursionError:  # Nested deeper than any gold answer is.
    return False


def _by_value(gold: str, text: str) -> bool:
  (golds, gold_unknown), (texts, text_unknown) = map(_parse_all, (gold, text))
  if all(r and units.lookup(r[0][1]) for r in (golds, texts)):
    return _same_with_units(golds[0], texts[0])
  for g in golds:
    for t in texts:
      # A unit on one side is dropped only if the other side has none at all.
      if _same_with_units(g, t):
        return True
  # What is no answer in any grammar ("4 10/3") is not asked about: math-verify
  # would match a part of it.
  if (golds or gold_unknown) and (texts or text_unknown):
    if not (golds and texts):
      return _second_opinion(gold, text)
  return False


def _too_deep(text: str) -> bool:
  depth = 0
  for char in text:
    depth += (char in "({[") - (char in ")}]")
    if depth > 12:
      return True
  return False


def _second_opinion(gold: str, text: str) -> bool:
  """What math-verify says; only equal in both directions is equal."""
  if max(len(gold), len(text)) > _MAX_SECOND or _too_deep(gold + text):
    return False
  import math_verify  # Half a second and 60 MB: only where it is needed.

  # Its notices that the limits are the caller's job: they are, see `math`.
  logging.getLogger("math_verify").setLevel(logging.ERROR)

  config = [math_verify.LatexExtractionConfig()]
  parsed = []
  for answer in (gold, text):
    found = math_verify.parse(
      f"\\boxed{{{answer}}}", config, parsing_timeout=None
    )
    # One string alone is what could not be parsed: comparing it as text was
    # done above.
    if not any(not isinstance(item, str) for item in found):
      return False
    parsed.append(found)
  return all(
    math_verify.verify(a, b, timeout_seconds=None)
    for a, b in (parsed, parsed[::-1])
  )


def readable(text: str) -> bool:
  """True when a cleaned gold answer is one that `judge` can compare by value.

  A choice, words, or a text of the grammar; anything else is still compared as
  text and by math-verify.
  """
  return bool(_choice(text) or _words(text) is not None or _parse_all(text)[0])


def cleaned(gold: str, text: str) -> tuple[str, str]:
  """Both answers in the spelling that `judge` reads."""
  return clean(gold), clean(text)
