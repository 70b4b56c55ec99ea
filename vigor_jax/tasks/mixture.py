"""Several published sets as one task: a seqio Mixture, and its union here.

An epoch of the training stream is a permutation of all parts together, a part
with `repeats` n counting n times; the seqio Mixture has the same rates.
"""

import dataclasses
import hashlib

import numpy as np

from vigor_jax.tasks import base, datasets, text
from vigor_jax.tasks.stream import FixedSource, Prompts


@dataclasses.dataclass(frozen=True)
class Options(text.Options):
  """Fields of `config.task` for a mixture; see `text.Options` for more.

  Attributes:
    parts: names of published sets, separated by commas.
    repeats: how often each counts in an epoch, separated by commas; empty:
      once.
    folder: a folder with one sub-folder per part; empty: where fetch puts
      them.
    held_out_share: for parts that have no test part.
  """

  parts: str = "math,dapo_math"
  repeats: str = ""
  folder: str = ""
  held_out_share: float = 0.02

  @property
  def names(self) -> list[str]:
    return [name.strip() for name in self.parts.split(",")]

  @property
  def counts(self) -> list[int]:
    if not self.repeats:
      return [1] * len(self.names)
    try:
      return [int(n) for n in self.repeats.split(",")]
    except ValueError:
      raise ValueError(
        f"repeats must be whole numbers like '1,2', got {self.repeats!r}"
      ) from None

  def validate(self) -> None:
    """Raises ValueError that names the field and the legal values."""
    super().validate()
    legal = [n for n, s in datasets.SOURCES.items() if s.train is not None]
    for name in self.names:
      if name not in legal:
        raise ValueError(
          f"parts: no training set {name!r}; {base.nearest(name, legal)}"
        )
    if len(set(self.names)) != len(self.names):
      raise ValueError(f"parts names a set twice: {self.parts!r}; use repeats")
    if len({datasets.SOURCES[name].reward for name in self.names}) > 1:
      raise ValueError(
        f"parts {self.parts!r} have different rewards: a mixture has one"
      )
    if len(self.counts) != len(self.names) or min(self.counts) < 1:
      raise ValueError(
        f"repeats must give one number >= 1 per part ({len(self.names)}), got"
        f" {self.repeats!r}"
      )
    if not 0 <= self.held_out_share < 1:
      raise ValueError(
        f"held_out_share must lie in [0, 1), got {self.held_out_share}"
      )


def _options_of(name: str, options: Options) -> datasets.Options:
  shared = {
    f.name: getattr(options, f.name) for f in dataclasses.fields(text.Options)
  }
  folder = f"{options.folder.rstrip('/')}/{name}" if options.folder else ""
  return datasets.Options(
    **shared, folder=folder, held_out_share=options.held_out_share
  )


def _parts(options: Options) -> list[base.Task]:
  """The parts as tasks; what any of them evaluates on trains none of them."""
  settings = [_options_of(name, options) for name in options.names]
  loaded = [datasets.load(n, o) for n, o in zip(options.names, settings)]
  for train, _ in loaded:
    for _, evaluation in loaded:
      train.leave_out(evaluation)
  return [
    datasets.build(name, part, *examples)
    for name, part, examples in zip(options.names, settings, loaded)
  ]


def _union(parts: list[Prompts]) -> Prompts:
  union = Prompts.concatenate(parts)
  union.positions = np.arange(len(union))
  union.uids = np.arange(len(union))
  return union


def build(options: Options) -> base.Task:
  """The task these options describe."""
  options.validate()
  parts = _parts(options)
  train = [task.source.prompts for task in parts]
  union = _union(train)
  # Repeated rows keep their uid: they are the same prompt.
  starts = np.cumsum([0, *map(len, train)])
  rows = [
    np.tile(np.arange(start, start + len(prompts)), n)
    for start, prompts, n in zip(starts, train, options.counts)
  ]

  # Evaluated are all parts' held-out prompts, in turn until each is used up.
  held_out = [
    task.evaluation(10**9) for task in parts if task.held_out is not None
  ]
  order = sorted(
    (i, p) for p, prompts in enumerate(held_out) for i in range(len(prompts))
  )
  firsts = np.cumsum([0, *map(len, held_out)])
  evaluation = None
  if held_out:
    evaluation = _union(held_out).take([firsts[p] + i for i, p in order])
    evaluation.positions = np.arange(len(evaluation))

  names = "_".join(task.name for task in parts)
  digest = hashlib.sha256(f"{names}{options.counts}".encode()).hexdigest()[:8]
  full_name = f"vigor_mixture_{digest}"
  rates = [n * len(p) for n, p in zip(options.counts, train)]

  def seqio_builder():
    from vigor_jax.tasks import seqio_tasks

    return seqio_tasks.register_mixture(
      full_name, [(t.seqio_task.name, r) for t, r in zip(parts, rates)]
    )

  first = parts[0]
  counts = {
    f"{name}/{key}": value
    for name, task in zip(options.names, parts)
    for key, value in task.counts.items()
  }
  return dataclasses.replace(
    first,
    name=full_name,
    source=FixedSource(union.take(np.concatenate(rows))),
    held_out=None if evaluation is None else text.first_of(evaluation),
    seqio_builder=seqio_builder,
    warm_start=_warm_start(parts),
    longest_warm_start=max(task.longest_warm_start for task in parts),
    counts=counts,
  )


def _warm_start(parts: list[base.Task]):
  """Batches from each part in turn, where all parts have completions."""
  if any(task.warm_start is None for task in parts):
    return None

  def batches(seed: int, step: int, batch: int) -> base.SftBatch:
    part = parts[step % len(parts)]
    return part.sft_batches(seed, step // len(parts), batch)

  return batches
