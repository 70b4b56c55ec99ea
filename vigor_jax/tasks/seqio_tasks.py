"""The one module that imports seqio (and TensorFlow with it: seconds).

Tasks are registered here as real seqio Tasks: usable in seqio mixtures, with
seqio's evaluator, sharded and shuffled its way. Training itself reads a split
once, through `read`, and from then on draws by index, because tf.data
has no order that resumes across epochs (see `stream.py`).
"""

import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vigor_jax.tasks import characters, stream


@contextlib.contextmanager
def _without_start_up_notices():
  """Holds back what TensorFlow writes to stderr while it starts.

  Its C++ side logs before any level can be set, straight to the descriptor.
  Everything that is not such a notice is written out at the end.
  """
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  notice = re.compile(
    rb"WARNING: All log messages before absl|[IW]\d{4} |E\d{4} .*cuInit"
  )
  sys.stderr.flush()
  stderr = os.dup(2)
  with tempfile.TemporaryFile() as held:
    os.dup2(held.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(stderr, 2)
      os.close(stderr)
      held.seek(0)
      for line in held:
        if not notice.match(line):
          os.write(2, line)


with _without_start_up_notices():
  import seqio
  import tensorflow as tf

  # TensorFlow would take the accelerator's memory for itself.
  for _kind in ("GPU", "TPU"):
    tf.config.set_visible_devices([], _kind)

_SIGNATURE = {
  "inputs": tf.TensorSpec((None,), tf.string),
  "targets": tf.TensorSpec((None,), tf.string),
  "answer": tf.TensorSpec((None,), tf.string),
  "metadata": tf.TensorSpec((None,), tf.string),
  "uid": tf.TensorSpec((None,), tf.int64),
}
_CHUNK = 64


class SeqioVocabulary(seqio.Vocabulary):
  """Any of this package's vocabularies as a seqio Vocabulary."""

  def __init__(self, vocabulary: characters.Vocabulary):
    super().__init__(extra_ids=0)
    self.wrapped = vocabulary

  bos_id = property(lambda self: self.wrapped.bos_id)
  eos_id = property(lambda self: self.wrapped.eos_id)
  pad_id = property(lambda self: self.wrapped.pad_id)
  unk_id = property(lambda self: self.wrapped.unk_id)
  _base_vocab_size = property(lambda self: self.wrapped.vocab_size)

  def _encode(self, s: str) -> Sequence[int]:
    return self.wrapped.encode(s)

  def _decode(self, ids: Sequence[int]) -> str:
    return self.wrapped.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text):
      # bytes inside tf.data, an array of str when called eagerly
      text = tf.compat.as_text(np.asarray(text, object).item())
      return np.asarray(self.wrapped.encode(text), np.int32)

    ids = tf.numpy_function(encode, [s], tf.int32, stateful=False)
    ids.set_shape([None])
    return ids

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(rows):
      flat = rows.reshape(-1, rows.shape[-1])
      texts = [self.wrapped.decode(row).encode() for row in flat]
      return np.array(texts, object).reshape(rows.shape[:-1])

    return tf.numpy_function(decode, [ids], tf.string, stateful=False)

  def __eq__(self, other: Any) -> bool:
    mine = self.wrapped.fingerprint
    return (
      isinstance(other, SeqioVocabulary) and mine == other.wrapped.fingerprint
    )

  def __hash__(self) -> int:
    return hash(self.wrapped.fingerprint)


def _chunks(
  examples: Iterator[dict[str, Any]],
) -> Iterator[dict[str, list[Any]]]:
  """Records a few at a time: one crossing into TensorFlow costs .4 ms."""
  while rows := list(itertools.islice(examples, _CHUNK)):
    yield {key: [row[key] for row in rows] for key in _SIGNATURE}


def register(
  name: str,
  vocabulary: characters.Vocabulary,
  examples: Callable[[str, int], Iterator[dict[str, Any]]],
  num_examples: dict[str, int] | None = None,
  max_prompt_length: int | None = None,
) -> seqio.Task:
  """The seqio Task of this name, registered on the first call.

  Args:
    name: unique per task and options.
    vocabulary: tokenises inputs and targets.
    examples: (split, seed) -> records with "inputs", "targets", "answer",
      "metadata" (JSON) and "uid"; may be endless.
    num_examples: records per split where known.
    max_prompt_length: longer prompts are filtered out, in tokens of the
      rendered text; seqio alone would cut them short without a word.
  """
  if name in seqio.TaskRegistry.names():
    return seqio.TaskRegistry.get(name)

  def dataset_fn(split, shuffle_files, seed=None):
    del shuffle_files  # one generator, no files
    chunks = tf.data.Dataset.from_generator(
      lambda: _chunks(examples(split, seed or 0)), output_signature=_SIGNATURE
    )
    return chunks.unbatch()

  def keep_short(dataset):
    return dataset.filter(lambda x: tf.size(x["inputs"]) <= max_prompt_length)

  splits = ("train", "evaluation") if num_examples is None else num_examples
  wrapped = SeqioVocabulary(vocabulary)
  preprocessors = [seqio.preprocessors.tokenize]
  if max_prompt_length is not None:
    preprocessors.append(keep_short)
  preprocessors.append(seqio.preprocessors.append_eos)
  return seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(dataset_fn, splits, num_examples),
    preprocessors=preprocessors,
    output_features={
      "inputs": seqio.Feature(wrapped, add_eos=False),
      "targets": seqio.Feature(wrapped, add_eos=True),
    },
  )


def register_mixture(
  name: str, rates: list[tuple[str, float]]
) -> seqio.Mixture:
  """The seqio Mixture of registered tasks, registered on the first call."""
  if name in seqio.MixtureRegistry.names():
    return seqio.MixtureRegistry.get(name)
  return seqio.MixtureRegistry.add(name, rates)


def read(
  task: seqio.Task, split: str, limit: int | None = None
) -> tuple[stream.Prompts, list[np.ndarray]]:
  """Reads one split into memory, in its order, at most `limit` records.

  Returns:
    the prompts, and the int32 target ids of each, EOS included.
  """
  dataset = task.get_dataset(split=split, shuffle=False, seed=0)
  if limit is not None:
    dataset = dataset.take(limit)
  rows = list(dataset.as_numpy_iterator())
  prompts = stream.Prompts(
    np.arange(len(rows), dtype=np.int64),
    np.array([row["uid"] for row in rows], np.int64),
    [row["inputs"].astype(np.int32) for row in rows],
    [row["inputs_pretokenized"].decode() for row in rows],
    [row["answer"].decode() for row in rows],
    [json.loads(row["metadata"]) for row in rows],
  )
  return prompts, [row["targets"].astype(np.int32) for row in rows]


def tfds_rows(
  name: str, split: str, data_dir: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
  """(where, record) of a TFDS data set that has been prepared.

  Args:
    name: as TFDS knows it.
    split: as TFDS knows it.
    data_dir: TFDS's folder, local or gs://; empty: its own default.

  Raises:
    ValueError: the set is not prepared, or TFDS lacks a package.
  """
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=data_dir or None)
    prepared = builder.is_prepared()
  except ModuleNotFoundError as error:
    raise ValueError(
      f"TFDS needs the package {error.name!r} to read {name!r}"
    ) from error
  if not prepared:
    # seqio would start to download here, and wait for a network for minutes.
    raise ValueError(
      f"TFDS has not prepared {name!r} in {builder.data_dir!r}: run tfds build"
      f" {name} on a machine with network access, or use source='folder'"
    )
  source = seqio.TfdsDataSource(
    f"{name}:{builder.version}", builder.data_path.parent.parent, [split]
  )
  dataset = source.get_dataset(split, shuffle=False)
  for row, record in enumerate(dataset.as_numpy_iterator(), start=1):
    texts = {
      k: v.decode() if isinstance(v, bytes) else v for k, v in record.items()
    }
    yield f"tfds:{name}/{split}:row {row}", texts
