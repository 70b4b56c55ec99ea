"""docs/extending.md is executed: its files are written, its code is run."""

import pathlib
import re
import sys

import pytest

from vigor_jax import allocation, tasks
from vigor_jax.policy import advantages, loss_table

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "extending.md"
REGISTRIES = {
  "task": tasks.REGISTRY,
  "allocator": allocation.REGISTRY,
  "advantage": advantages.ADVANTAGES,
  "loss": loss_table.LOSSES,
}
MOST_LINES = 26  # of a file, without blanks: about twenty and a docstring


def blocks():
  """(name of the file or None, line in the document, source) of each block."""
  text = DOCUMENT.read_text()
  for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
    line = text[: match.start(1)].count("\n") + 1
    name = re.match(r"# (\w+)\.py\n", match[1])
    yield name and name[1], line, match[1]


@pytest.fixture
def outside(tmp_path, monkeypatch):
  """A folder to import from; registries and modules are as before after."""
  monkeypatch.syspath_prepend(tmp_path)
  registries = {kind: dict(r) for kind, r in REGISTRIES.items()}
  modules = set(sys.modules)
  yield tmp_path
  for kind, registry in REGISTRIES.items():
    registry.clear()
    registry.update(registries[kind])
  for name, _, _ in blocks():
    if name and name not in modules:
      sys.modules.pop(name, None)


def test_the_snippets_run(outside):
  before = {kind: set(registry) for kind, registry in REGISTRIES.items()}
  namespace = {"__name__": "extending"}
  files, tried = 0, 0
  for name, line, source in blocks():
    if name:
      assert name not in sys.modules, name
      (outside / f"{name}.py").write_text(source)
      files += 1
      continue
    assert "assert" in source, f"the block at line {line} checks nothing"
    # Line numbers in a traceback are those of the document.
    code = compile("\n" * (line - 1) + source, str(DOCUMENT), "exec")
    exec(code, namespace)
    tried += 1
  assert files == tried == 5
  for kind, registry in REGISTRIES.items():
    assert len(set(registry) - before[kind]) == 1, kind


def test_the_files_are_short():
  for name, line, source in blocks():
    if name:
      used = [x for x in source.splitlines() if x.strip()]
      assert len(used) <= MOST_LINES, (name, line, len(used))
      assert max(map(len, used)) <= 80, (name, line)


def test_the_files_docstrings_say_what_they_do():
  for name, _, source in blocks():
    if name:
      assert source.splitlines()[1].startswith('"""'), name
