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


def final_answer(completion: str, answer: str) -> str | None:
  """What a majority vote counts: the stripped text; None if it is empty."""
  del answer
  return completion.strip() or None


verify.cheap = True
verify.final_answer = final_answer
