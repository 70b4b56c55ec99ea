"""Chains of one-digit arithmetic modulo 10, the toy task of the demo.

The prompt "3+4*2....=" asks for every partial result, worked from left to
right modulo 10: 3 + 4 = 7, 7 * 2 = 4, so the completion is "74" and then EOS.
The reward is 1 for exactly that trace. Digits are tokens, and so is an
operator with its operand; dots fill a prompt up to the most operations, so
that every step finds its operation at the same distance. (With one token per
character and no dots, a two-layer rotary policy needs several times as many
supervised steps before it finds the operands at all.)

The warm start teaches addition and subtraction well, and multiplication with
wrong labels most of the time: a policy that imitates them knows the answer to
few multiplications, and RL has to find the rest. How many prompts carry signal
is a matter of data: `difficulty` mixes in prompts that are solved already (no
multiplication) and prompts that are nearly impossible (the longest chains of
multiplications).
"""

import numpy as np

from vigor_jax.tasks import base, characters, drawn

_OPERATORS = "+-*"
_MINUS, _TIMES = 1, 2  # index into _OPERATORS
VOCABULARY = characters.PieceVocabulary([
  *"0123456789",
  *(o + d for o in _OPERATORS for d in "0123456789"),
  ".",
  "=",
])
_DIGIT, _STEP, _DOT, _EQUALS = (
  VOCABULARY.encode(c)[0] for c in ("0", "+0", ".", "=")
)

Options = drawn.Options


def score(completion: str, answer: str, **metadata) -> float:
  """1 for exactly the partial results of the gold trace, else 0."""
  del metadata
  return float(completion == answer)


score.cheap = True


def rule(
  rng: np.random.Generator,
  operations: int,
  easy: np.ndarray,
  hard: np.ndarray,
  label_noise: float,
) -> drawn.Rows:
  """Draws chains; see `drawn.Rule`.

  Easy rows have no multiplication, hard rows have `operations` of them. With
  label noise a product is replaced by a random digit with that chance, and
  the chain goes on from there.
  """
  rows = len(easy)
  shape = (rows, operations)
  lengths = rng.integers(1, operations + 1, rows)
  lengths = np.where(hard, operations, lengths)
  value = first = rng.integers(0, 10, rows)
  operands = rng.integers(0, 10, shape)
  operators = rng.integers(0, 3, shape)
  if easy.any() or hard.any():
    sums = rng.integers(0, 2, shape)
    operators = np.where(easy[:, None], sums, operators)
    operators = np.where(hard[:, None], _TIMES, operators)
  times = operators == _TIMES
  signed = np.where(operators == _MINUS, -operands, operands)
  if label_noise:
    wrong = times & (rng.random(shape) < label_noise)
    labels = rng.integers(0, 10, shape)

  trace = np.empty(shape, np.int64)
  for t in range(operations):
    product, total = value * operands[:, t], value + signed[:, t]
    value = np.where(times[:, t], product, total) % 10
    if label_noise:
      value = np.where(wrong[:, t], labels[:, t], value)
    trace[:, t] = value

  row = np.arange(rows)
  used = np.arange(operations) < lengths[:, None]
  prompts = np.full((rows, operations + 2), _EQUALS, np.int32)
  prompts[:, 0] = first + _DIGIT
  steps = 10 * operators + operands + _STEP
  prompts[:, 1:-1] = np.where(used, steps, _DOT)

  completions = np.zeros((rows, operations + 1), np.int32)
  completions[:, :-1] = trace + _DIGIT
  completions[np.arange(operations + 1) >= lengths[:, None]] = 0
  completions[row, lengths] = characters.EOS_ID
  levels = (times & used).sum(1)
  widths = np.full(rows, operations + 2)
  return drawn.Rows(prompts, widths, completions, lengths + 1, levels)


def build(options: Options) -> base.Task:
  """The task these options describe."""
  return drawn.build(
    "arithmetic",
    rule,
    VOCABULARY,
    options,
    max_prompt_length=options.operations + 2,
    max_completion_length=options.operations + 1,
    reward="vigor_jax.tasks.arithmetic:score",
  )
