"""The Colab notebook: what is stored, and (slow) that it runs top to bottom."""

import ast
import json

import nbclient
import nbformat
import pytest


@pytest.fixture
def path(root):
  return root / "notebooks" / "colab_demo.ipynb"


def test_what_is_stored(path):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == "code"]
  for cell in code:
    assert not cell.outputs and cell.execution_count is None
    ast.parse(cell.source)  # Plain Python: no magics.
  first = code[0]
  assert first.metadata.tags == ["install"]
  assert "find_spec" in first.source and "pip" in first.source
  assert "pip" not in "".join(cell.source for cell in code[1:])


def test_its_configuration_is_valid(path):
  """The cell that makes it runs in a moment, without a kernel."""
  from vigor_jax import config as configuration

  cells = json.loads(path.read_text())["cells"]
  (source,) = [
    text for cell in cells
    if "default_config" in (text := "".join(cell["source"]))
  ]
  namespace = {"configuration": configuration}
  exec(source, namespace)
  assert namespace["config"].allocation.name == "vigor"


@pytest.mark.slow
def test_it_runs_top_to_bottom(path, tmp_path):
  """vigor_jax is importable here, so the install cell does nothing."""
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
    notebook, timeout=1800, startup_timeout=600, kernel_name="python3",
    resources={"metadata": {"path": str(tmp_path)}},
  ).execute()
  outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
  assert not [out for out in outputs if out.output_type == "error"]
  figures = [out for out in outputs if "image/png" in out.get("data", {})]
  assert len(figures) == 2
  text = "".join(out.get("text", "") for out in outputs)
  for number, prompts, each in ((1, 32, 2), (2, 16, 4), (3, 8, 8), (4, 4, 16)):
    assert f"round {number}: {prompts:2d} prompts x {each:2d} rollouts" in text
  assert "uniform " in text and "vigor " in text and "accuracy" in text
