"""Verdicts on mathematical answers, within limits on time and memory.

The judging itself (`judge`) has no limits: big numbers cannot be interrupted by
a signal. So whatever takes arithmetic runs in a worker process, which ends at
its limit; a direct call of `verify` uses a small shared pool, from any thread.
"""

from __future__ import annotations

from fractions import Fraction
import re

from vigor_jax.rewards import extraction
from vigor_jax.rewards import judge
from vigor_jax.rewards import latex
from vigor_jax.rewards import pool
from vigor_jax.rewards import scorer
from vigor_jax.rewards import worker

# Completions past this many characters are read from their end.
MAX_COMPLETION = 2_000_000
# A number as written, or a fraction of two; longer ones are compared as text.
_NUMBER = r"[0-9]{1,30}(?:\.[0-9]{1,30})?"
_LITERAL = re.compile(
  rf"(?P<sign>[-+]?)(?:(?P<value>{_NUMBER}|\.[0-9]{{1,30}})"
  r"|\\[dt]?frac\{(?P<a>[0-9]{1,30})\}\{(?P<b>[0-9]{1,30})\}"
  r"|\\[dt]?frac(?P<e>[0-9])(?P<f>[0-9])"
  r"|(?P<c>[0-9]{1,30})/(?P<d>[0-9]{1,30}))"
)
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")

_cache = scorer.VerdictCache()


def _answers(completion: str, answer: str) -> tuple[str, str] | None:
  """The two cleaned answers, or None when either is missing."""
  gold = extraction.gold_answer(answer)
  found = extraction.final_answer(completion[-MAX_COMPLETION:])
  if not gold or not found:
    return None
  if max(len(gold), len(found)) > latex.MAX_CHARS:
    # No grammar reads so much; the texts may still be equal.
    return "".join(gold.split()), "".join(found.split())
  return judge.cleaned(gold, found)


def _judge(completion: str, answer: str, **metadata) -> float:
  """`verify` in this process, without limits."""
  del metadata
  pair = _answers(completion, answer)
  if pair is None:
    return 0.0
  if max(map(len, pair)) > latex.MAX_CHARS:
    return float(pair[0] == pair[1])
  return float(judge.judge(*pair))


def verify(completion: str, answer: str, **metadata) -> float:
  r"""1.0 if the completion's final answer equals the gold answer, else 0.0.

  Args:
    completion: model text; the final answer is the last \boxed (see
      `extraction`).
    answer: gold answer, LaTeX or plain; empty pays nothing.

  A verdict that would take longer than `verify.time_limit` CPU seconds or more
  than `verify.memory_limit` bytes is 0.0: no gold answer of a data set is so
  large, so the completion's is not it.

  Raises:
    RewardError: the judging processes die for another reason.
  """
  if worker.supervised():
    return _judge(completion, answer)
  key = scorer.VerdictCache.key(completion, answer)
  verdict = _cache.get(key)
  if verdict is not None:
    return verdict
  # What reading alone decides needs no worker.
  pair = _answers(completion, answer)
  if pair is None or max(map(len, pair)) > latex.MAX_CHARS:
    return float(pair is not None and pair[0] == pair[1])
  known = judge.quick(*pair)
  if known is not None:
    return float(known)
  outcome = (
    pool.shared()
    .submit(
      verify, "vigor_jax.rewards.math:verify", completion, answer, metadata
    )
    .result()
  )
  if outcome.reason != "wall":
    _cache.put(key, outcome.verdict)
  return outcome.verdict


def final_answer(completion: str, answer: str) -> str | None:
  """What a majority vote counts: the stated answer in one spelling.

  Numbers are one however they are written (0.50, 1/2 and \\frac12); other
  answers where their cleaned texts are. None where no answer is stated.
  """
  del answer
  found = extraction.final_answer(completion[-MAX_COMPLETION:])
  if not found or len(found) > latex.MAX_CHARS:
    return found and "".join(found.split())
  text = judge.squeeze(judge.cleaned("", found)[1])
  if _THOUSANDS.fullmatch(text):
    text = text.replace(",", "")
  match = _LITERAL.fullmatch(text)
  if match is None:
    return text or None
  top = match["a"] or match["c"] or match["e"]
  bottom = match["b"] or match["d"] or match["f"]
  if bottom and int(bottom) == 0:
    return text
  value = Fraction(match["value"] or f"{top}/{bottom}")
  return str(-value if match["sign"] == "-" else value)


def problem(answer: str) -> str | None:
  """What is wrong with a gold answer, for loaders; None when it can be used."""
  gold = extraction.gold_answer(answer)
  if not gold:
    return "the gold answer is empty"
  if len(gold) > latex.MAX_CHARS:
    return f"the gold answer is longer than {latex.MAX_CHARS} characters"
  if not judge.readable(judge.cleaned(gold, "")[0]):
    return f"the gold answer {gold[:80]!r} cannot be compared by value"
  return None


def _warm_up() -> None:
  """Imports what the second opinion needs, outside any verdict's limit."""
  judge.judge("\\sum_{k=1}^{2} k", "\\int_0^1 6 dx")


verify.time_limit = 4.0
verify.memory_limit = 512 << 20
verify.timeout_verdict = 0.0
verify.cacheable = True
verify.final_answer = final_answer
verify.warm_up = _warm_up
