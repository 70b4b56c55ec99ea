"""Verdicts per second: math answers, and programs in the sandbox.

  python benchmarks/rewards.py [--quick]

Math: ordinary right and wrong answers (numbers, fractions, roots, polynomials,
lists, intervals), all different so that no cache helps, through a `Scorer` with
one worker per core; beside it, math-verify alone in one process on the same
pairs. Then the same batch with one power tower that only a limit could end is
timed, to show that it costs no other verdict. Code: small programs, one test
each, so that every verdict starts a sandbox; then one program with many tests.
Half a minute; `--quick` a few seconds.
"""

import argparse
import json
import random
import time

from vigor_jax import rewards
from vigor_jax.rewards import sandbox
from vigor_jax.rewards.pool import available_cpus

TARGETS = {"math_verdicts_per_second": 100, "sandboxed_runs_per_second": 20}


def math_pairs(count, seed):
  """(completion, gold) pairs, half of them wrong."""
  draw = random.Random(seed)
  pairs = []
  for i in range(count):
    a, b, c = (draw.randrange(2, 900) for _ in range(3))
    off = draw.randrange(2)
    answer, gold = (
      (f"{a + off}", f"{a}"),
      (f"\\frac{{{a * c}}}{{{b * c + off}}}", f"\\frac{{{a}}}{{{b}}}"),
      (f"{a + off}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}"),
      (f"x^2+{a + b + off}x+{a * b}", f"(x+{a})(x+{b})"),
      (f"{a + off}, {b}, -{c}", f"-{c}, {a}, {b}"),
      (f"{a} < x \\le {a + b + off}", f"({a}, {a + b}]"),
      (f"\\frac{{{a}\\pi}}{{{b + off}}}", f"{a}\\pi / {b}"),
    )[i % 7]
    text = "We compute step by step. " * 40
    pairs.append((f"{text}So the answer is $\\boxed{{{answer}}}$. ({i})", gold))
  return pairs


def time_math(count):
  pairs = math_pairs(count, 0)
  with rewards.Scorer("math") as scorer:
    warm = math_pairs(64, 1)
    scorer.score(*map(list, zip(*warm)))
    start = time.perf_counter()
    out = scorer.score(*map(list, zip(*pairs)))
    seconds = time.perf_counter() - start
    right = float(out.mean())
    # Integers alone: answered from their texts.
    tower = "\\boxed{(1+\\sqrt{2})^{10^{17}} - (1+\\sqrt{2})^{10^{17}+1}}"
    start = time.perf_counter()
    mixed = scorer.score(
      [tower] + [p + " again" for p, _ in pairs], ["7"] + [g for _, g in pairs]
    )
    beside = time.perf_counter() - start
  assert (mixed[1:] == out).all() and mixed[0] == 0
  return {
    "math_verdicts_per_second": len(pairs) / seconds,
    "math_share_right": right,
    "math_seconds_added_by_a_hostile_answer": beside - seconds,
  }


def time_math_verify(count):
  """math-verify alone, in this process, its limits off."""
  import logging

  import math_verify

  logging.getLogger("math_verify").setLevel(logging.ERROR)
  pairs = math_pairs(count, 0)

  def judge(text, gold):
    parsed = [
      math_verify.parse(t, parsing_timeout=None)
      for t in (f"\\boxed{{{gold}}}", text)
    ]
    return math_verify.verify(*parsed, timeout_seconds=None)

  judge(*pairs[0])
  start = time.perf_counter()
  for pair in pairs:
    judge(*pair)
  return count / (time.perf_counter() - start)


def time_code(count):
  programs = [
    f"n = int(input())\nprint(n * {i} + sum(range(n)))" for i in range(count)
  ]
  tests = [[{"stdin": "9", "stdout": str(9 * i + 36)}] for i in range(count)]
  with rewards.Scorer("code") as scorer:
    metadata = [{"tests": t} for t in tests]
    workers = available_cpus()
    scorer.score(programs[:workers], [""] * workers, metadata[:workers])
    start = time.perf_counter()
    out = scorer.score(programs, [""] * count, metadata)
    seconds = time.perf_counter() - start
    many = [{"stdin": str(i), "stdout": str(2 * i)} for i in range(100)]
    start = time.perf_counter()
    one = scorer.score(["print(2 * int(input()))"], [""], [{"tests": many}])
    shared = time.perf_counter() - start
  assert out.min() == 1 and one[0] == 1
  return {
    "sandboxed_runs_per_second": count / seconds,
    "tests_per_second_in_one_sandbox": len(many) / shared,
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  quick = parser.parse_args().quick
  figures = {"cores": available_cpus(), "sandbox": sandbox.check()}
  figures.update(time_math(700 if quick else 7000))
  figures["math_verify_alone_per_second"] = time_math_verify(
    70 if quick else 700
  )
  figures.update(time_code(40 if quick else 400))
  for name, value in figures.items():
    print(
      f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}"
    )
  ok = all(figures[name] >= least for name, least in TARGETS.items())
  print(
    json.dumps(
      {
        "name": "rewards",
        "figures": figures,
        "targets": TARGETS,
        "ok": ok,
      }
    )
  )


if __name__ == "__main__":
  main()
