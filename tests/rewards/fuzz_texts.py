"""Random and mutated model outputs, the same for the same seed."""

import json
import random

_PIECES = (
  "\\boxed{",
  "}",
  "{",
  "\\frac{1}{2}",
  "\\sqrt{",
  "^",
  "_",
  "$",
  "\\(",
  "\\)",
  "\\[",
  "\\]",
  "\\\\",
  "\\left(",
  "\\right)",
  "1,000",
  "3.14",
  "-",
  "+",
  "=",
  "<",
  "\\le ",
  "%",
  "\\%",
  "!",
  "'",
  "|",
  "\\begin{pmatrix}",
  "&",
  "\\end{pmatrix}",
  "\\text{ and }",
  " or ",
  "x",
  "pi",
  "\\infty",
  "(1,2]",
  "<think>",
  "</think>",
  "<answer>",
  "</answer>",
  "#### ",
  "Answer: ",
  "**",
  "10^{10^{10}}",
  "\u221a2",
  "\u00bd",
  "\ud83d\ude00",
  "\u0665",
  "\x00",
  "\n",
  "\t",
  "  ",
  "\\sum_{k=1}^{n}",
  "\\int_0^1 x\\,dx",
  "5 cm",
  "60^\\circ",
  "C",
  "9" * 60,
  "1e400",
  "nan",
  "inf",
  "0",
  "i",
  "e",
  "\\pm",
  "\\cup",
  "\ud800",
)
_CODE = (
  "def f(n):\n",
  "  return n\n",
  "print(1)\n",
  "import os\n",
  "while True:\n",
  "  pass\n",
  "input()\n",
  "(",
  ")",
  "[",
  "]",
  ":",
  "\n",
  "  ",
  "\t",
  "'",
  '"',
  "raise ValueError\n",
  "exit()\n",
  "os._exit(0)\n",
  "lambda: 0",
  "10**10**4",
  "\x00",
  "\u00e9",
  "```",
  "```python\n",
  "x = [0] * 10**9\n",
  "\ud800",
  "import threading\n",
  "class A: pass\n",
  "yield 1\n",
  "f(3)\n",
  "#",
  "\\",
)
_HOSTILE = ("c17", "c19", "c21", "c22", "c23")


def _mutate(draw: random.Random, text: str, pieces, other: str) -> str:
  for _ in range(draw.randint(1, 4)):
    at = draw.randint(0, len(text))
    end = min(len(text), at + draw.randint(0, 12))
    kind = draw.randrange(6)
    if kind == 0:
      text = text[:at] + text[end:]
    elif kind == 1:
      text = text[:at] + draw.choice(pieces) + text[at:]
    elif kind == 2:
      text = text[:at]
    elif kind == 3:
      text = text[:at] + text[at:end] * draw.randint(2, 5) + text[end:]
    elif kind == 4:
      cut = draw.randint(0, len(other))
      text = text[:at] + other[cut:]
    else:
      char = chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x3000))))
      text = text[:at] + char + text[at + 1 :]
  return text


def _soup(draw: random.Random, pieces) -> str:
  return "".join(draw.choices(pieces, k=draw.randint(0, 40)))


def math_pairs(folder, count: int, seed: int) -> list[tuple[str, str]]:
  """(output, gold) pairs."""
  draw = random.Random(seed)
  cases = []
  for name in ("math_cases", "math_kinds"):
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
      case = json.loads(line)
      cases.append((case["output"], case["gold"]))
  pairs = []
  for _ in range(count):
    (output, gold), (other, _) = draw.choice(cases), draw.choice(cases)
    if draw.random() < 0.3:
      output = "\\boxed{" * draw.randint(0, 1) + _soup(draw, _PIECES)
    else:
      output = _mutate(draw, output, _PIECES, other)
    if draw.random() < 0.2:
      gold = _mutate(draw, gold, _PIECES, other)
    pairs.append((output, gold))
  return pairs


def code_pairs(folder, count: int, seed: int) -> list[tuple[str, list]]:
  """(program, tests) pairs; the endless ones are rare, they cost their limit."""
  draw = random.Random(seed)
  cases, hostile = [], []
  for line in (folder / "code_cases.jsonl").read_text().splitlines():
    case = json.loads(line)
    kind = hostile if case["id"] in _HOSTILE else cases
    kind.append((case["program"], case["tests"]))
  pairs = []
  for _ in range(count):
    program, tests = draw.choice(hostile if draw.random() < 0.01 else cases)
    other = draw.choice(cases)[0]
    if draw.random() < 0.2:
      program = _soup(draw, _CODE)
    else:
      program = _mutate(draw, program, _CODE, other)
    pairs.append((program, tests))
  return pairs
