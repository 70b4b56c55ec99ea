"""Chains of one-digit arithmetic modulo 10, the toy task of the demo.

The prompt "3+4*2=" asks for every partial result, worked from left to right
modulo 10: 3 + 4 = 7, 7 * 2 = 4, so the completion is "74" and then EOS. The
reward is 1 for exactly that trace. The warm start teaches addition and
subtraction well, and multiplication with wrong labels most of the time: a
policy that imitates them knows the answer to few multiplications, and RL has
to find the rest. How many prompts carry signal is a matter of data:
`difficulty` mixes in prompts that are solved already (no multiplication) and
prompts that are nearly impossible (multiplications only).
"""

import dataclasses

import numpy as np

from vigor_jax.tasks import base, characters
from vigor_jax.tasks.stream import (
  BLOCK,
  FixedSource,
  FreshSource,
  Prompts,
  addressed_rng,
)

VOCABULARY = characters.CharacterVocabulary("0123456789+-*=")
_DIGIT, _PLUS, _TIMES, _EQUALS = (VOCABULARY.encode(c)[0] for c in "0+*=")

# Shares of prompts without multiplication, and with nothing else.
DIFFICULTIES = {
  "plain": (0.0, 0.0),
  "sparse_signal": (0.75, 0.15),
  "hard_junk": (0.15, 0.75),
}
EVAL_ON = ("plain", "training")
_HELD_OUT_IN = 8  # one prompt text in this many is kept for evaluation
_EVALUATION_SEED = 20_260


@dataclasses.dataclass(frozen=True)
class Options:
  """Fields of `config.task` for arithmetic.

  Attributes:
    difficulty: "plain", "sparse_signal" or "hard_junk".
    operations: most operations in a prompt; lengths are uniform from 1.
    num_prompts: size of a fixed training set; 0 draws fresh prompts for ever.
    data_seed: which fixed set.
    eval_on: held-out prompts of the "plain" or of the "training" mixture.
    label_noise: share of the warm start's products replaced by random digits.
  """

  difficulty: str = "plain"
  operations: int = 6
  num_prompts: int = 0
  data_seed: int = 0
  eval_on: str = "plain"
  label_noise: float = 0.8

  def validate(self) -> None:
    """Raises ValueError that names the field and the legal values."""
    if self.difficulty not in DIFFICULTIES:
      raise ValueError(
        f"difficulty must be one of {sorted(DIFFICULTIES)}, got"
        f" {self.difficulty!r}"
      )
    if self.eval_on not in EVAL_ON:
      raise ValueError(f"eval_on must be one of {EVAL_ON}, got {self.eval_on!r}")
    if not 1 <= self.operations <= 64:
      raise ValueError(f"operations must lie in 1..64, got {self.operations}")
    if self.num_prompts < 0:
      raise ValueError(f"num_prompts must be >= 0, got {self.num_prompts}")
    if self.data_seed < 0:
      raise ValueError(f"data_seed must be >= 0, got {self.data_seed}")
    if not 0 <= self.label_noise <= 1:
      raise ValueError(f"label_noise must lie in [0, 1], got {self.label_noise}")


def score(completion: str, answer: str, **metadata) -> float:
  """1 for exactly the partial results of the gold trace, else 0."""
  del metadata
  return float(completion == answer)


score.cheap = True


@dataclasses.dataclass
class Rows:
  """Padded arrays of drawn examples.

  Attributes:
    prompts: int32 [rows, 2 K + 2] prompt ids, zero after `prompt_lengths`.
    completions: int32 [rows, K + 1] trace and EOS, zero after lengths + 1.
    lengths: int [rows] number of operations.
    levels: int [rows] number of multiplications.
  """

  prompts: np.ndarray
  completions: np.ndarray
  lengths: np.ndarray
  levels: np.ndarray

  def keep(self, rows) -> "Rows":
    return Rows(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

  @property
  def prompt_lists(self) -> list[np.ndarray]:
    stops = (2 * self.lengths + 2).tolist()
    return [row[:n] for row, n in zip(self.prompts, stops)]

  @property
  def completion_lists(self) -> list[np.ndarray]:
    stops = (self.lengths + 1).tolist()
    return [row[:n] for row, n in zip(self.completions, stops)]


def _candidates(
  rng: np.random.Generator,
  rows: int,
  operations: int,
  difficulty: str,
  label_noise: float = 0.0,
) -> Rows:
  """Draws `rows` examples of the mixture, held out or not."""
  shape = (rows, operations)
  lengths = rng.integers(1, operations + 1, rows)
  first = rng.integers(0, 10, rows)
  operators = rng.integers(0, 3, shape)  # + - *
  operands = rng.integers(0, 10, shape)
  easy_share, hard_share = DIFFICULTIES[difficulty]
  if easy_share or hard_share:
    kind = rng.random(rows)
    easy, hard = kind < easy_share, kind >= 1 - hard_share
    lengths = np.where(hard, operations, lengths)
    operators = np.where(easy[:, None], rng.integers(0, 2, shape), operators)
    operators = np.where(hard[:, None], 2, operators)
  times = operators == 2
  if label_noise:
    wrong = times & (rng.random(shape) < label_noise)
    labels = rng.integers(0, 10, shape)

  trace = np.empty(shape, np.int64)
  value = first
  for t in range(operations):
    a = operands[:, t]
    added = value + np.where(operators[:, t] == 0, a, -a)
    value = np.where(times[:, t], value * a, added) % 10
    if label_noise:
      value = np.where(wrong[:, t], labels[:, t], value)
    trace[:, t] = value

  prompts = np.zeros((rows, 2 * operations + 2), np.int32)
  prompts[:, 0] = first + _DIGIT
  prompts[:, 1:-1:2] = operators + _PLUS
  prompts[:, 2:-1:2] = operands + _DIGIT
  equals = (2 * lengths + 1)[:, None]
  place = np.arange(2 * operations + 2)
  prompts = np.where(place < equals, prompts, 0)
  prompts[np.arange(rows), equals[:, 0]] = _EQUALS

  completions = np.zeros((rows, operations + 1), np.int32)
  completions[:, :-1] = trace + _DIGIT
  place = np.arange(operations + 1)
  completions = np.where(place < lengths[:, None], completions, 0)
  completions[np.arange(rows), lengths] = characters.EOS_ID
  used = np.arange(operations) < lengths[:, None]
  return Rows(prompts, completions, lengths, (times & used).sum(1))


def is_held_out(prompts: np.ndarray) -> np.ndarray:
  """bool [rows]: whether a prompt text belongs to the evaluation split.

  A hash of the padded prompt ids [rows, n], so the splits are disjoint by
  construction however often a short prompt is drawn: a polynomial modulo 2^64,
  then the finaliser of splitmix64 (Steele et al., 2014).
  """
  powers = np.empty(prompts.shape[1], np.uint64)
  factor, power = 0x9E3779B97F4A7C15, 1
  for j in range(len(powers)):
    powers[j] = power
    power = power * factor % 2**64
  x = (prompts.astype(np.uint64) * powers).sum(1, dtype=np.uint64)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  x = x ^ (x >> np.uint64(31))
  return x % np.uint64(_HELD_OUT_IN) == 0


def draw(
  rng: np.random.Generator,
  rows: int,
  operations: int,
  difficulty: str,
  *,
  held_out: bool = False,
  label_noise: float = 0.0,
) -> Rows:
  """Exactly `rows` examples of one split, by rejection."""
  share = 1 / _HELD_OUT_IN if held_out else 1 - 1 / _HELD_OUT_IN
  parts, found = [], 0
  while found < rows:
    # A little more than is needed on average: one pass is usually enough.
    size = int((rows - found) / share * 1.1) + 16
    part = _candidates(rng, size, operations, difficulty, label_noise)
    part = part.keep(is_held_out(part.prompts) == held_out)
    parts.append(part)
    found += len(part.lengths)
  if len(parts) == 1:
    return parts[0].keep(slice(rows))
  fields = [f.name for f in dataclasses.fields(Rows)]
  joined = (np.concatenate([getattr(p, f) for p in parts])[:rows] for f in fields)
  return Rows(*joined)


def _as_prompts(rows: Rows, first_position: int) -> Prompts:
  positions = np.arange(first_position, first_position + len(rows.lengths))
  return Prompts(
    positions,
    positions.copy(),
    rows.prompt_lists,
    VOCABULARY.decode_batch(rows.prompts, 2 * rows.lengths + 2),
    VOCABULARY.decode_batch(rows.completions, rows.lengths + 1),
    [{"level": level} for level in rows.levels.tolist()],
  )


def _distinct(options: Options) -> Prompts:
  """The first num_prompts distinct training prompts of data_seed's stream."""
  found: dict[str, tuple[int, int]] = {}
  blocks: list[Prompts] = []
  limit = 64 + 64 * options.num_prompts // BLOCK
  while len(found) < options.num_prompts:
    if len(blocks) == limit:
      raise ValueError(
        f"num_prompts={options.num_prompts} distinct prompts do not exist with"
        f" operations={options.operations}: found {len(found)}; ask for fewer,"
        " or for more operations"
      )
    block = _train_block(options, options.data_seed, len(blocks))
    for row, text in enumerate(block.texts):
      found.setdefault(text, (len(blocks), row))
    blocks.append(block)
  chosen = list(found.values())[: options.num_prompts]
  rows = [block * BLOCK + row for block, row in chosen]
  prompts = Prompts.concatenate(blocks).take(rows)
  prompts.positions = np.arange(len(rows))
  prompts.uids = np.arange(len(rows))
  return prompts


def _train_block(options: Options, seed: int, block: int) -> Prompts:
  rng = addressed_rng(seed, "train", block)
  rows = draw(rng, BLOCK, options.operations, options.difficulty)
  return _as_prompts(rows, block * BLOCK)


def _held_out_block(options: Options, block: int) -> Prompts:
  training = options.eval_on == "training"
  difficulty = options.difficulty if training else "plain"
  rng = addressed_rng(_EVALUATION_SEED, "held_out", block)
  rows = draw(rng, BLOCK, options.operations, difficulty, held_out=True)
  return _as_prompts(rows, block * BLOCK)


def build(options: Options) -> base.Task:
  """The task these options describe."""
  options.validate()

  def held_out(n: int) -> Prompts:
    blocks = [_held_out_block(options, b) for b in range(-(-n // BLOCK))]
    return Prompts.concatenate(blocks).take(range(n))

  def warm_start(seed: int, step: int, batch: int) -> base.SftBatch:
    rng = addressed_rng(seed, "warm", step)
    rows = draw(
      rng, batch, options.operations, "plain", label_noise=options.label_noise
    )
    return rows.prompt_lists, rows.completion_lists

  def examples(split: str, seed: int):
    """What seqio reads: endless when fresh, the set itself when fixed."""
    if split == "evaluation":
      draw_block = lambda block: _held_out_block(options, block)
    elif options.num_prompts:
      yield from base.examples_of(_distinct(options))
      return
    else:
      draw_block = lambda block: _train_block(options, seed, block)
    block = 0
    while True:
      yield from base.examples_of(draw_block(block))
      block += 1

  digest = base.options_digest(options)
  name = f"vigor_arithmetic_{options.difficulty}_{digest}"

  def seqio_builder():
    from vigor_jax.tasks import seqio_tasks

    return seqio_tasks.register(name, VOCABULARY, examples)

  if options.num_prompts:
    from vigor_jax.tasks import seqio_tasks

    source = FixedSource(seqio_tasks.materialize(seqio_builder(), "train"))
  else:
    source = FreshSource(lambda seed, block: _train_block(options, seed, block))
  return base.Task(
    name=name,
    vocabulary=VOCABULARY,
    stop_ids=VOCABULARY.eos_ids,
    max_prompt_length=2 * options.operations + 2,
    max_completion_length=options.operations + 1,
    reward="vigor_jax.tasks.arithmetic:score",
    source=source,
    held_out=held_out,
    seqio_builder=seqio_builder,
    warm_start=warm_start,
  )
