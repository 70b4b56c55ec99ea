"""Drawn prompts: read out of arrays, and only what is asked for."""

import dataclasses

import numpy as np

from vigor_jax import tasks
from vigor_jax.tasks import stream


def plain(prompts):
  """The same prompts with every field made."""
  fields = dataclasses.fields(stream.Prompts)
  return stream.Prompts(*(getattr(prompts, f.name) for f in fields))


def same(a, b):
  for field in dataclasses.fields(stream.Prompts):
    left, right = getattr(a, field.name), getattr(b, field.name)
    if isinstance(left, np.ndarray) or field.name == "tokens":
      assert all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))
    else:
      assert left == right


def drawn(name, positions):
  task = tasks.make({"name": name, "difficulty": "sparse_signal"})
  return task.source.at(3, np.asarray(positions))


def test_choosing_and_joining_give_what_lists_would():
  for name in ("arithmetic", "stack_language"):
    some, more = drawn(name, [0, 5, 255, 256, 700]), drawn(name, range(40, 80))
    same(some.take([4, 0, 2]), plain(some).take([4, 0, 2]))
    both = stream.Prompts.concatenate
    same(both([some, more]), both([plain(some), plain(more)]))
    same(both([some, plain(more)]), both([plain(some), plain(more)]))
    other = drawn("arithmetic", range(3))
    if name != "arithmetic":  # Each is decoded by its own vocabulary.
      same(both([some, other]), both([plain(some), plain(other)]))


def test_what_is_only_looked_at_is_not_decoded():
  prompts = drawn("arithmetic", range(300))
  chosen = prompts.take([7])
  assert (len(prompts), len(chosen)) == (300, 1)
  assert chosen.texts and chosen.answers and chosen.metadata
  made = vars(prompts).keys() & {"tokens", "texts", "answers", "metadata"}
  assert not made


def test_a_position_holds_the_same_prompt_however_it_is_asked_for():
  far = 70 * stream.BLOCK  # Beyond the blocks that are kept.
  apart = [9, 300, far, 10, 9]
  alone = [drawn("arithmetic", [p]) for p in apart]
  same(drawn("arithmetic", apart), stream.Prompts.concatenate(alone))
  task = tasks.make("arithmetic")
  first = plain(task.source.at(0, np.arange(256)))
  task.source.at(0, np.arange(far))
  same(task.source.at(0, np.arange(256)), first)
