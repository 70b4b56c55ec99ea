"""What a task is: prompts, their rewards, and how their text is tokenised."""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vigor_jax.tasks import vocabularies
from vigor_jax.tasks.characters import Vocabulary
from vigor_jax.tasks.stream import Prompts, PromptStream, Source

SftBatch = tuple[list[np.ndarray], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class TaskDef:
  """A registry entry.

  Attributes:
    options: frozen dataclass of the task's fields, with defaults and a
      `validate()` that raises ValueError.
    build: makes the Task from an instance of it.
  """

  options: type
  build: Callable[[Any], "Task"]


@dataclasses.dataclass
class Task:
  """One task, ready to serve prompts.

  Attributes:
    name: unique per task and options; also its name in seqio's registry.
    vocabulary: see `Vocabulary`.
    stop_ids: every id that ends a completion.
    max_prompt_length: longest prompt in tokens; longer ones were dropped.
    max_completion_length: suggested limit, EOS included.
    reward: default reward function, "module:function".
    source: the training prompts; None for a task that only evaluates.
    held_out: n -> Prompts, the same n prompts every time; None where there is
      no evaluation part.
    warm_start: (seed, step, batch) -> prompt ids and completion ids, EOS
      included; None where the task has nothing to imitate.
    longest_warm_start: most tokens of such a prompt and completion together;
      0: not known.
    seqio_builder: registers the task with seqio and returns it; seqio (and
      TensorFlow with it: seconds) is imported by the first use only.
    stop_strings: texts that also end a completion.
    counts: records loaded, skipped and dropped, for the run's log.
  """

  name: str
  vocabulary: Vocabulary
  stop_ids: tuple[int, ...]
  max_prompt_length: int
  max_completion_length: int
  reward: str
  source: Source | None
  held_out: Callable[[int], Prompts] | None
  seqio_builder: Callable[[], Any]
  warm_start: Callable[[int, int, int], SftBatch] | None = None
  longest_warm_start: int = 0
  stop_strings: tuple[str, ...] = ()
  counts: dict[str, int] = dataclasses.field(default_factory=dict)

  def counts_text(self) -> list[str]:
    """What was read, left out and kept, one line a part, for a run's log."""
    parts: dict[str, list[str]] = {}
    for key, value in self.counts.items():
      part, _, what = key.rpartition("/")
      if value or what in ("records", "prompts"):
        words = f"{value} {what.replace('_', ' ')}"
        parts.setdefault(part, []).append(words)
    return [f"{part}: {', '.join(words)}" for part, words in parts.items()]

  def stream(self, seed: int, shard=0, num_shards=1) -> PromptStream:
    """The training prompts in the order of this seed.

    Raises:
      ValueError: the task only evaluates.
    """
    if self.source is None:
      raise ValueError(
        f"task {self.name!r} is for evaluation only: it has no training part"
      )
    return PromptStream(self.source, seed, shard, num_shards)

  def evaluation(self, n: int) -> Prompts:
    """n held-out prompts, the same ones every time; fewer if it has fewer.

    Raises:
      ValueError: the task has no evaluation part.
    """
    if n < 1:
      raise ValueError(f"evaluation needs at least one prompt, got {n=}")
    if self.held_out is None:
      raise ValueError(
        f"task {self.name!r} has no evaluation part: give it one"
        " (task.eval_path, task.held_out_share), name other tasks in"
        " evaluation.suite, or set evaluation.every_steps=0"
      )
    return self.held_out(n)

  def sft_batches(self, seed: int, step: int, batch: int) -> SftBatch:
    """Prompt ids and completion ids (EOS included) of one warm-start step.

    Raises:
      ValueError: the task has no completions to imitate.
    """
    if self.warm_start is None:
      raise ValueError(
        f"task {self.name!r} has no completions for a supervised warm start:"
        " choose another task, or give its records a 'completion' field"
      )
    return self.warm_start(seed, step, batch)

  def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
    """Texts of completions: int [k, L] and [k]; the EOS is not shown."""
    return self.vocabulary.decode_batch(tokens, lengths)

  def finish(self, rows: Any) -> tuple[Any, list[str]]:
    """Ends each completion with its first stop string.

    The sampler knows stop ids only, so a row may hold tokens that were drawn
    after a stop string, which may span tokens, was complete. They are dropped:
    the row ends with the token that completed it, ids as they were sampled.

    Args:
      rows: a dataclass with tokens, logprobs, processed_logprobs [k, L],
        lengths [k] and truncated [k], such as the sampler's.

    Returns:
      (rows, the k texts; a stop string is shown, an EOS is not).
    """
    texts = self.decode(rows.tokens, rows.lengths)
    stops = self.stop_strings
    if not stops:
      return rows, texts
    found = [i for i, t in enumerate(texts) if any(s in t for s in stops)]
    if not found:
      return rows, texts
    lengths, truncated = rows.lengths.copy(), rows.truncated.copy()
    for i in found:
      ids = rows.tokens[i, : lengths[i]]
      lengths[i] = vocabularies.find_stop(self.vocabulary, ids, stops) + 1
      truncated[i] = False
      texts[i] = self.decode(rows.tokens[i][None], lengths[i : i + 1])[0]
    live = np.arange(rows.tokens.shape[1]) < lengths[:, None]
    names = ("tokens", "logprobs", "processed_logprobs")
    cut = {n: np.where(live, getattr(rows, n), 0) for n in names}
    cut |= {"lengths": lengths, "truncated": truncated}
    return dataclasses.replace(rows, **cut), texts

  @property
  def seqio_task(self) -> Any:
    """The same task as a seqio Task, registered on first use."""
    return self.seqio_builder()


def examples_of(prompts: Prompts) -> Iterator[dict[str, Any]]:
  """Prompts as the plain records that a seqio source yields."""
  rows = zip(
    prompts.texts, prompts.answers, prompts.metadata, prompts.uids.tolist()
  )
  for text, answer, metadata, uid in rows:
    yield {
      "inputs": text,
      "targets": answer,
      "answer": answer,
      "metadata": json.dumps(metadata),
      "uid": uid,
    }


def options_digest(options: Any) -> str:
  """Eight hex digits that tell two settings of one task apart."""
  fields = json.dumps(dataclasses.asdict(options), sort_keys=True)
  return hashlib.sha256(fields.encode()).hexdigest()[:8]


def nearest(name: str, legal: list[str]) -> str:
  """For an error: the legal name closest to a wrong one, and the others."""
  close = difflib.get_close_matches(name, legal, 1)
  hint = f"did you mean {close[0]!r}? " if close else ""
  return f"{hint}legal: {', '.join(sorted(legal))}"
