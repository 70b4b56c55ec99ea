"""Expressions in made-up API symbols to stack programs, the graded toy task.

A prompt such as "xA2Dy..=" applies symbol A to x and 2, then D to the result
and y; dots fill it up to the most operations (arithmetic.py says why). What a
symbol does depends on its right operand by a hidden table, and the completion
is the same computation as a program for a stack machine that works modulo 10,
here "x2+y*" if the table says + for (A, 2) and * for (D, y). The reward is the
share of hidden tests (values of x and y) that the program passes. The warm
start teaches the first half of the symbols well and the second half mostly
with random operators.
"""

import dataclasses
import operator

import numpy as np

from vigor_jax.tasks import base, characters, drawn

LEAVES = "xy123"
OPERATORS = "+-*><"  # sum, difference, product, maximum, minimum
SYMBOLS = "ABCDEF"
NUM_TESTS = 8
VOCABULARY = characters.CharacterVocabulary(LEAVES + OPERATORS + SYMBOLS + ".=")
_LEAF, _OPERATOR, _SYMBOL, _DOT, _EQUALS = VOCABULARY.encode("x+A.=")
_WELL_TAUGHT = len(SYMBOLS) // 2

# TABLE[symbol, right operand]: index into OPERATORS. Part of the task's
# definition, so written out rather than drawn.
TABLE = np.array(
  [
    [4, 3, 3, 4, 2],
    [3, 4, 0, 2, 1],
    [0, 1, 2, 0, 3],
    [2, 0, 4, 1, 0],
    [1, 2, 1, 3, 4],
    [3, 0, 2, 1, 1],
  ]
)
_FUNCTIONS = {
  "+": operator.add,
  "-": operator.sub,
  "*": operator.mul,
  ">": max,
  "<": min,
}


@dataclasses.dataclass(frozen=True)
class Options(drawn.Options):
  """As in drawn.Options; at most six operations."""

  operations: int = 3
  most_operations = 6


def run(program: str, tests: list[list[int]]) -> list[int] | None:
  """The program's result on every test, or None if it is not a program.

  Args:
    program: leaves and operators in postfix order.
    tests: rows (x, y, ...) of inputs.
  """
  values = {"x": [t[0] for t in tests], "y": [t[1] for t in tests]}
  values |= {digit: [int(digit)] * len(tests) for digit in "123"}
  stack: list[list[int]] = []
  for c in program:
    if c in values:
      stack.append(values[c])
    elif c in _FUNCTIONS and len(stack) >= 2:
      function, right = _FUNCTIONS[c], stack.pop()
      left = stack.pop()
      stack.append([function(a, b) % 10 for a, b in zip(left, right)])
    else:
      return None
  return stack[0] if len(stack) == 1 else None


def score(completion: str, answer: str, **metadata) -> float:
  """Share of metadata["tests"], rows (x, y, result), that are passed."""
  tests = metadata["tests"]
  if completion == answer:
    return 1.0
  results = run(completion, tests)
  if results is None:
    return 0.0
  passed = sum(r == test[2] for r, test in zip(results, tests))
  return passed / len(tests)


score.cheap = True


def _evaluate(leaves, operators, lengths, x, y) -> np.ndarray:
  """Results [rows, tests] of left-deep expressions, modulo 10."""

  def leaf(column):
    column = column[:, None]
    constant = np.broadcast_to(column - 1, x.shape)
    return np.where(column == 0, x, np.where(column == 1, y, constant))

  value = leaf(leaves[:, 0])
  for t in range(operators.shape[1]):
    a, b, op = value, leaf(leaves[:, t + 1]), operators[:, t, None]
    options = [a + b, a - b, a * b, np.maximum(a, b), np.minimum(a, b)]
    applied = np.select([op == k for k in range(5)], options) % 10
    value = np.where((t < lengths)[:, None], applied, value)
  return value


def rule(
  rng: np.random.Generator,
  operations: int,
  easy: np.ndarray,
  hard: np.ndarray,
  label_noise: float,
) -> drawn.Rows:
  """Draws expressions; see `drawn.Rule`.

  Easy rows use well-taught symbols only, hard rows badly taught ones only, at
  full length. With label noise the operator of a badly taught symbol is
  replaced by a random one with that chance.
  """
  rows = len(easy)
  shape = (rows, operations)
  lengths = rng.integers(1, operations + 1, rows)
  lengths = np.where(hard, operations, lengths)
  leaves = rng.integers(0, len(LEAVES), (rows, operations + 1))
  leaves[:, 0] = rng.integers(0, 2, rows)  # starts from x or y
  symbols = rng.integers(0, len(SYMBOLS), shape)
  if easy.any() or hard.any():
    half = symbols % _WELL_TAUGHT
    symbols = np.where(easy[:, None], half, symbols)
    symbols = np.where(hard[:, None], half + _WELL_TAUGHT, symbols)
  badly_taught = symbols >= _WELL_TAUGHT
  operators = TABLE[symbols, leaves[:, 1:]]
  if label_noise:
    wrong = badly_taught & (rng.random(shape) < label_noise)
    random = rng.integers(0, len(OPERATORS), shape)
    operators = np.where(wrong, random, operators)
  x, y = rng.integers(0, 10, (2, rows, NUM_TESTS))
  results = _evaluate(leaves, operators, lengths, x, y)

  row, width = np.arange(rows), 2 * operations + 2
  prompts = np.zeros((rows, width), np.int32)
  prompts[:, 0:-1:2] = leaves + _LEAF
  prompts[:, 1:-1:2] = symbols + _SYMBOL
  prompts[np.arange(width) > 2 * lengths[:, None]] = _DOT
  prompts[:, -1] = _EQUALS

  completions = np.zeros((rows, width), np.int32)
  completions[:, 0] = leaves[:, 0] + _LEAF
  completions[:, 1:-1:2] = leaves[:, 1:] + _LEAF
  completions[:, 2:-1:2] = operators + _OPERATOR
  completions[np.arange(width) > 2 * lengths[:, None]] = 0
  completions[row, 2 * lengths + 1] = characters.EOS_ID
  used = np.arange(operations) < lengths[:, None]
  return drawn.Rows(
    prompts,
    np.full(rows, width),
    completions,
    2 * lengths + 2,
    (badly_taught & used).sum(1),
    {"tests": np.stack([x, y, results], 2)},
  )


def build(options: Options) -> base.Task:
  """The task these options describe."""
  return drawn.build(
    "stack_language",
    rule,
    VOCABULARY,
    options,
    max_prompt_length=2 * options.operations + 2,
    max_completion_length=2 * options.operations + 2,
    reward="vigor_jax.tasks.stack_language:score",
  )
