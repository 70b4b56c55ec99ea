"""Exact match: the completion is the answer, surrounding whitespace apart."""

from __future__ import annotations


def verify(completion: str, answer: str, **metadata) -> float:
  """1.0 if `completion` equals `answer` after stripping both, else 0.0.

  An empty answer is a fault of the data and pays nothing, not even for an
  empty completion.
  """
  del metadata
  gold = answer.strip()
  return float(bool(gold) and completion.strip() == gold)


verify.cheap = True
