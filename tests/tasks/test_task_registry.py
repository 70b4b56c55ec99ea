"""The registry as a whole: options, documentation, buckets."""

import dataclasses
import json
import re

import pytest

from vigor_jax import tasks
from vigor_jax.tasks import files, templates


@pytest.fixture(scope="module")
def document(root):
  return (root / "docs" / "tasks.md").read_text()


@pytest.mark.parametrize("name", sorted(tasks.REGISTRY))
def test_every_task_and_option_is_documented(document, name):
  assert f"`{name}`" in document or re.search(f"^### {name}\\b", document, re.M)
  for field in dataclasses.fields(tasks.REGISTRY[name].options):
    assert f"| `{field.name}` |" in document, field.name


def test_every_template_is_documented(document):
  for name in templates.TEMPLATES:
    assert f"`{name}`" in document


@pytest.mark.parametrize("name", sorted(tasks.REGISTRY))
def test_options_are_frozen_with_plain_defaults(name):
  options = tasks.REGISTRY[name].options
  for field in dataclasses.fields(options):
    assert isinstance(field.default, bool | int | float | str), field.name
  with pytest.raises(dataclasses.FrozenInstanceError):
    options().max_prompt_length = options().data_seed = 1


def test_files_in_a_bucket(monkeypatch):
  """TensorFlow's in-memory file system stands in for gs://."""
  from vigor_jax.tasks import seqio_tasks

  monkeypatch.setattr(files, "_REMOTE", ("ram://",))
  gfile = seqio_tasks.tf.io.gfile
  gfile.makedirs("ram://bucket/data")
  for part in ("a", "b"):
    with gfile.GFile(f"ram://bucket/data/{part}.jsonl", "w") as f:
      f.write(json.dumps({"prompt": f"q{part}", "answer": part}) + "\n")
  with gfile.GFile("ram://bucket/data/notes.txt", "w") as f:
    f.write("not data")
  for path, size in [("ram://bucket/data", 2), ("ram://bucket/data/a.jsonl", 1)]:
    task = tasks.make({"name": "jsonl", "path": path, "held_out_share": 0.0})
    assert task.stream(0).num_examples == size
  with pytest.raises(ValueError, match="no data at 'ram://bucket/none'"):
    tasks.make({"name": "jsonl", "path": "ram://bucket/none"})
