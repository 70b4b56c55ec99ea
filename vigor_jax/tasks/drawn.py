"""Tasks whose prompts are drawn from a rule: what the toys have in common.

A rule draws padded rows of (prompt, completion) for given difficulty masks;
this module makes the splits, the difficulty mixtures, the fresh and the fixed
training streams, the warm start and the seqio registration from it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from vigor_jax.tasks import base
from vigor_jax.tasks.characters import Vocabulary
from vigor_jax.tasks.rows import DrawnPrompts, Rows
from vigor_jax.tasks.stream import (
  BLOCK,
  FixedSource,
  FreshSource,
  Prompts,
  addressed_rng,
)

# Shares of prompts that the warm start solves, and that it nearly never does.
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
  """Fields of `config.task` for a drawn task.

  Attributes:
    difficulty: "plain", "sparse_signal" or "hard_junk".
    operations: most operations in a prompt; lengths are uniform from 1.
    num_prompts: size of a fixed training set; 0 draws fresh prompts for ever.
    data_seed: which fixed set.
    eval_on: held-out prompts of the "plain" or of the "training" mixture.
    label_noise: share of the badly taught labels that the warm start gets
      at random.
  """

  most_operations: ClassVar[int] = 64

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
      raise ValueError(
        f"eval_on must be one of {EVAL_ON}, got {self.eval_on!r}"
      )
    if not 1 <= self.operations <= self.most_operations:
      raise ValueError(
        f"operations must lie in 1..{self.most_operations}, got"
        f" {self.operations}"
      )
    if self.num_prompts < 0:
      raise ValueError(f"num_prompts must be >= 0, got {self.num_prompts}")
    if self.data_seed < 0:
      raise ValueError(f"data_seed must be >= 0, got {self.data_seed}")
    if not 0 <= self.label_noise <= 1:
      raise ValueError(
        f"label_noise must lie in [0, 1], got {self.label_noise}"
      )


# (rng, operations, easy, hard, label_noise) -> Rows, a row per flag of the two
# bool masks; easy rows are solved by the warm start, hard ones nearly never.
Rule = Callable[
  [np.random.Generator, int, np.ndarray, np.ndarray, float], Rows
]


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
  rule: Rule,
  rng: np.random.Generator,
  rows: int,
  operations: int,
  difficulty: str = "plain",
  *,
  held_out: bool = False,
  label_noise: float = 0.0,
) -> Rows:
  """Exactly `rows` examples of one split, by rejection."""
  share = 1 / _HELD_OUT_IN if held_out else 1 - 1 / _HELD_OUT_IN
  easy_share, hard_share = DIFFICULTIES[difficulty]
  parts, found = [], 0
  while found < rows:
    # A little more than is needed on average: one pass is usually enough.
    kind = rng.random(int((rows - found) / share * 1.1) + 16)
    easy, hard = kind < easy_share, kind >= 1 - hard_share
    part = rule(rng, operations, easy, hard, label_noise)
    part = part.keep(is_held_out(part.prompts) == held_out)
    parts.append(part)
    found += len(part.levels)
  return Rows.concatenate(parts).keep(slice(rows))


class Drawn:
  """One drawn task's splits for one setting of its options."""

  def __init__(
    self,
    rule: Rule,
    vocabulary: Vocabulary,
    options: Options,
  ):
    options.validate()
    self._rule = rule
    self._vocabulary = vocabulary
    self._options = options

  def _block(self, rng, block: int, difficulty: str, held_out: bool) -> Prompts:
    operations = self._options.operations
    rows = draw(
      self._rule, rng, BLOCK, operations, difficulty, held_out=held_out
    )
    return DrawnPrompts.at(block * BLOCK, rows, self._vocabulary)

  def train_block(self, seed: int, block: int) -> Prompts:
    """Training prompts at positions block * BLOCK and on."""
    rng = addressed_rng(seed, "train", block)
    return self._block(rng, block, self._options.difficulty, False)

  def held_out_block(self, block: int) -> Prompts:
    """Evaluation prompts, the same for every run."""
    training = self._options.eval_on == "training"
    difficulty = self._options.difficulty if training else "plain"
    rng = addressed_rng(_EVALUATION_SEED, "held_out", block)
    return self._block(rng, block, difficulty, True)

  def held_out(self, n: int) -> Prompts:
    """The first n evaluation prompts."""
    blocks = [self.held_out_block(b) for b in range(-(-n // BLOCK))]
    return Prompts.concatenate(blocks).take(range(n))

  def warm_start(self, seed: int, step: int, batch: int) -> base.SftBatch:
    """Plain training prompts with noisy completions."""
    rng = addressed_rng(seed, "warm", step)
    operations, noise = self._options.operations, self._options.label_noise
    rows = draw(self._rule, rng, batch, operations, label_noise=noise)
    return rows.lists()

  def fixed_set(self) -> Prompts:
    """The first num_prompts distinct prompts of data_seed's fresh stream.

    Raises:
      ValueError: that many distinct prompts do not exist.
    """
    wanted = self._options.num_prompts
    found: dict[str, int] = {}
    blocks: list[Prompts] = []
    fruitless = 0  # blocks in a row without a new text
    while len(found) < wanted:
      # Ever rarer new texts: a set this close to the whole space is refused.
      if fruitless >= 64 or len(blocks) > 64 + 64 * wanted // BLOCK:
        raise ValueError(
          f"num_prompts={wanted}: only {len(found)} distinct prompts found"
          f" with operations={self._options.operations}; ask for fewer, or for"
          " more operations"
        )
      before = len(found)
      block = self.train_block(self._options.data_seed, len(blocks))
      for row, text in enumerate(block.texts):
        found.setdefault(text, len(blocks) * BLOCK + row)
      blocks.append(block)
      fruitless = 0 if len(found) > before else fruitless + 1
    rows = list(found.values())[:wanted]
    prompts = Prompts.concatenate(blocks).take(rows)
    prompts.positions, prompts.uids = np.arange(wanted), np.arange(wanted)
    return prompts

  def examples(self, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """What seqio reads: endless, but for a fixed training set."""
    if split == "train" and self._options.num_prompts:
      yield from base.examples_of(self.fixed_set())
      return
    for block in itertools.count():
      if split == "evaluation":
        yield from base.examples_of(self.held_out_block(block))
      else:
        yield from base.examples_of(self.train_block(seed, block))


def build(
  name: str,
  rule: Rule,
  vocabulary: Vocabulary,
  options: Options,
  *,
  max_prompt_length: int,
  max_completion_length: int,
  reward: str,
) -> base.Task:
  """The task of a rule and its options."""
  drawn = Drawn(rule, vocabulary, options)
  digest = base.options_digest(options)
  full_name = f"vigor_{name}_{options.difficulty}_{digest}"

  def seqio_builder():
    from vigor_jax.tasks import seqio_tasks

    return seqio_tasks.register(full_name, vocabulary, drawn.examples)

  if options.num_prompts:
    drawn.fixed_set()  # Its error reaches no one from inside of tf.data.
    from vigor_jax.tasks import seqio_tasks

    source = FixedSource(seqio_tasks.read(seqio_builder(), "train")[0])
  else:
    source = FreshSource(drawn.train_block)
  return base.Task(
    name=full_name,
    vocabulary=vocabulary,
    stop_ids=vocabulary.eos_ids,
    max_prompt_length=max_prompt_length,
    max_completion_length=max_completion_length,
    reward=reward,
    source=source,
    held_out=drawn.held_out,
    seqio_builder=seqio_builder,
    warm_start=drawn.warm_start,
    longest_warm_start=max_prompt_length + max_completion_length,
  )
