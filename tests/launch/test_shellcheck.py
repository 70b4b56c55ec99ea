"""The scripts pass shellcheck, which the `test` extra brings."""

import os
import pathlib
import shutil
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).parents[2]
BESIDE_PYTHON = os.path.dirname(sys.executable)
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join(
  [BESIDE_PYTHON, os.environ.get("PATH", "")]))


def test_the_scripts_are_clean():
  assert SHELLCHECK, "no shellcheck here: pip install -e '.[test]' brings it"
  scripts = [".ci/run", *sorted(
    str(path.relative_to(REPOSITORY))
    for path in (REPOSITORY / "launch").glob("*.sh"))]
  assert len(scripts) > 5
  done = subprocess.run(
    [SHELLCHECK, "--external-sources", *scripts], cwd=REPOSITORY, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  assert done.returncode == 0, done.stdout
