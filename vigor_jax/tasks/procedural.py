"""Tasks of the package reasoning_gym, generated offline, by name.

The package's item i of seed s is item 0 of seed s + i, and easy settings have
few different questions, so the split is by a hash of the question and doubles
are left out. Its scores give partial credit to wrong answers, so a verdict is
1 for a score of at least .99 and else 0.
"""

import ast
import dataclasses
import functools
import re
from typing import Any

from vigor_jax.rewards import answer_text
from vigor_jax.tasks import base, records, text

_RIGHT = 0.99
_PROBED = 4  # items on which the verifier is tried when a task is built
_NONSENSE = "qwxz"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LABEL = re.compile(r"(?:final )?answer\s*(?:is|:)\s*", re.I)


@dataclasses.dataclass(frozen=True)
class Options(text.Options):
  """Fields of `config.task` for reasoning_gym; see `text.Options` for more.

  Attributes:
    dataset: the package's name of the task.
    difficulty: level of the package's curriculum, from 0; -1: its defaults.
    settings: further settings, as "min_terms=2, max_terms=3".
    num_prompts: items to generate; doubles among them are left out.
    held_out_share: share of them that is evaluated on.
    data_seed: seed of the first item.
  """

  dataset: str = "chain_sum"
  difficulty: int = -1
  settings: str = ""
  num_prompts: int = 2048
  held_out_share: float = 0.1
  data_seed: int = 0

  def validate(self) -> None:
    """Raises ValueError that names the field and the legal values."""
    super().validate()
    if not self.dataset:
      raise ValueError("dataset must name a reasoning_gym task, got ''")
    if self.difficulty < -1:
      raise ValueError(f"difficulty must be >= -1, got {self.difficulty}")
    if self.num_prompts < 1:
      raise ValueError(f"num_prompts must be >= 1, got {self.num_prompts}")
    if not 0 <= self.held_out_share < 1:
      raise ValueError(
        f"held_out_share must lie in [0, 1), got {self.held_out_share}"
      )
    if self.data_seed < 0:
      raise ValueError(f"data_seed must be >= 0, got {self.data_seed}")
    parse_settings(self.settings)


def parse_settings(settings: str) -> dict[str, Any]:
  """{"min_terms": 2} from "min_terms=2"; values are Python literals."""
  try:
    call = ast.parse(f"f({settings})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
      raise ValueError("not name=value pairs")
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords}
  except (SyntaxError, ValueError):
    raise ValueError(
      f"settings must be name=value pairs like 'min_terms=2, max_terms=3', got"
      f" {settings!r}"
    ) from None


@functools.lru_cache(maxsize=8)
def _generator(dataset: str, difficulty: int, settings: str, size: int, seed):
  """The package's generator of these settings."""
  try:
    import reasoning_gym
    from reasoning_gym.factory import CURRICULA, DATASETS
  except ModuleNotFoundError as error:
    raise ValueError(
      f"task 'reasoning_gym' needs the package {error.name!r}:"
      " pip install 'vigor-jax[tasks]'"
    ) from error

  if dataset not in DATASETS:
    raise ValueError(
      f"dataset: no reasoning_gym task {dataset!r};"
      f" {base.nearest(dataset, list(DATASETS))}"
    )
  _, config_class = DATASETS[dataset]
  legal = [f.name for f in dataclasses.fields(config_class)]
  fields = parse_settings(settings)
  for name in fields:
    if name not in legal or name in ("seed", "size"):
      raise ValueError(
        f"settings: reasoning_gym task {dataset!r} has no {name!r};"
        f" {base.nearest(name, legal)}"
      )
  if difficulty >= 0:
    if dataset not in CURRICULA:
      raise ValueError(
        f"difficulty: reasoning_gym task {dataset!r} has no levels; use -1"
      )
    curriculum = CURRICULA[dataset]()
    curriculum.set_global_level(difficulty)
    levels = curriculum.generate_configuration()
    fields = {n: getattr(levels, n) for n in legal} | fields
  fields |= {"seed": seed, "size": size}
  return reasoning_gym.create_dataset(dataset, **fields)


def pack(value: Any) -> Any:
  """A JSON value that `unpack` turns back exactly: tuples, odd keys."""
  if isinstance(value, tuple):
    return {"tuple": [pack(v) for v in value]}
  if isinstance(value, list):
    return [pack(v) for v in value]
  if isinstance(value, dict):
    return {"items": [[pack(k), pack(v)] for k, v in value.items()]}
  if value is None or isinstance(value, bool | int | float | str):
    return value
  return {"text": str(value)}


def unpack(value: Any) -> Any:
  """The inverse of `pack`, but for objects JSON does not know (their text)."""
  if isinstance(value, list):
    return [unpack(v) for v in value]
  if isinstance(value, dict):
    ((kind, inner),) = value.items()
    if kind == "tuple":
      return tuple(unpack(v) for v in inner)
    if kind == "items":
      return {unpack(k): unpack(v) for k, v in inner}
    return inner
  return value


def extract(completion: str, answer: str) -> str:
  """The part of a completion that is judged.

  The last <answer> tag, else the last box, else what follows the last
  "answer is" or "Answer:" on its line, else all of it; and if the gold answer
  is a number, the last number in that.
  """
  shown = answer_text.after_reasoning(completion)
  tagged, boxes = answer_text.tagged(shown), answer_text.boxes(shown)
  labels = list(_LABEL.finditer(shown))
  if tagged is not None:
    found = tagged
  elif boxes:
    found = boxes[-1][2]
  elif labels:
    found = shown[labels[-1].end() :].split("\n")[0].strip().rstrip(".")
  else:
    found = shown
  found = found.strip()
  if _NUMBER.fullmatch(answer.strip()):
    numbers = _NUMBER.findall(found)
    if numbers:
      return numbers[-1].replace(",", "")
  return found


def score(completion: str, answer: str, **metadata) -> float:
  """1 if reasoning_gym's own verifier accepts the completion's answer.

  Runs in the reward pool, not in the trainer: some of the package's verifiers
  evaluate expressions, and some take long.
  """
  generator = _generator(
    metadata["dataset"], metadata["difficulty"], metadata["settings"], 1, 0
  )
  entry = {
    "question": metadata["question"],
    "answer": answer if metadata["has_answer"] else None,
    "metadata": unpack(metadata["entry"]),
  }
  found = extract(completion, answer)
  return float(bool(found) and _accepts(generator, found, entry))


def _final_answer(completion: str, answer: str) -> str | None:
  """What a majority vote counts."""
  return extract(completion, answer) or None


score.final_answer = _final_answer


def _accepts(generator, found: str, entry: dict[str, Any]) -> bool:
  """Whether the package's verifier takes an answer as fully right."""
  try:
    return generator.score_answer(found, entry) >= _RIGHT
  except Exception:
    # Several of them parse the answer without care: whatever int() or a
    # parser raises on a model's text, the text is not the answer. That the
    # verifier works at all is checked on gold answers when the task is built.
    return False


def _check_verifier(generator, dataset: str, size: int) -> None:
  """Raises ValueError unless gold answers pass and nonsense does not."""
  for i in range(min(size, _PROBED)):
    item = generator[i]
    if item["answer"] is not None:
      gold = str(item["answer"])
      if not _accepts(generator, extract(gold, gold), item):
        raise ValueError(
          f"reasoning_gym's verifier of {dataset!r} refuses its own answer"
          f" {gold[:80]!r}: the task cannot be used"
        )
    if _accepts(generator, _NONSENSE, item):
      raise ValueError(
        f"reasoning_gym's verifier of {dataset!r} accepts {_NONSENSE!r} as an"
        " answer: the task cannot be used"
      )


def build(options: Options) -> base.Task:
  """The task these options describe."""
  options.validate()
  kind = (options.dataset, options.difficulty, options.settings)
  generator = _generator(*kind, options.num_prompts, options.data_seed)
  _check_verifier(generator, options.dataset, options.num_prompts)
  loaded, seen = records.Loaded([]), set()
  for i in range(options.num_prompts):
    item = generator[i]
    question, answer = item["question"], item["answer"]
    if question in seen:
      loaded.doubles += 1
      continue
    seen.add(question)
    metadata = {
      "dataset": options.dataset,
      "difficulty": options.difficulty,
      "settings": options.settings,
      "question": question,
      "has_answer": answer is not None,
      "entry": pack(item["metadata"]),
    }
    # A few tasks have many right answers and name none.
    answer = "" if answer is None else str(answer)
    loaded.examples.append(records.Example(question, answer, metadata))
  train, held_out = text.split_by_text(
    loaded.examples, options.held_out_share
  )
  if not train:
    raise ValueError(
      f"reasoning_gym task {options.dataset!r} has only {len(seen)} different"
      f" questions, and held_out_share={options.held_out_share} takes them all"
    )
  loaded.examples = train
  return text.build(
    f"reasoning_gym_{options.dataset}",
    options,
    train=loaded,
    evaluation=records.Loaded(held_out),
    template="plain",
    reward="vigor_jax.tasks.procedural:score",
  )
