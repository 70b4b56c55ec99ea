"""Makes the sample rewards importable, here and in worker processes."""

import pathlib
import sys

import pytest

_HERE = str(pathlib.Path(__file__).parent)
if _HERE not in sys.path:
  sys.path.insert(0, _HERE)


@pytest.fixture
def data() -> pathlib.Path:
  return pathlib.Path(__file__).parents[1] / "data" / "rewards"
