"""Settings that hold for every test, made before jax is imported."""

import os
import pathlib
import re
import signal

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Numbers are compared bit for bit on the CPU, wherever the tests run.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# What is started in the background or by nohup ignores these two, and so would
# every program that a test starts in order to send it one.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
  signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
  """The checkout: for subprocesses, configs and documents."""
  return ROOT


@pytest.fixture(scope="session")
def documented_metrics() -> dict[str, tuple[str, str]]:
  """{key: (unit, meaning)} of docs/metrics.md, in the document's order.

  A key may end in a placeholder, as in "eval/pass_at_<k>".
  """
  rows = {}
  for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if line.startswith("| `") and len(cells) == 3:
      for key in re.findall(r"`([^`]+)`", cells[0]):
        assert key not in rows, f"{key} is documented twice"
        rows[key] = (cells[1], cells[2])
  return rows


@pytest.fixture(scope="session")
def is_documented(documented_metrics):
  """A function that tells whether a metric's key is in docs/metrics.md."""
  patterns = [
    re.compile(r"[\w.]+".join(map(re.escape, re.split(r"<\w+>", key))))
    for key in documented_metrics
  ]
  return lambda key: any(pattern.fullmatch(key) for pattern in patterns)
