"""How programs end: one message, an exit code, one process in a workdir."""

import errno
import json
import os
import subprocess
import sys

import pytest

from vigor_jax import __main__ as programs
from vigor_jax import endings
from vigor_jax import record
from vigor_jax import report
from vigor_jax import workdirs

HOLDS = (
  "import sys; from vigor_jax import workdirs\n"
  "with workdirs.Lock(sys.argv[1]) as lock:\n"
  "  lock.acquire(); print('held', flush=True); sys.stdin.read()\n"
)


@pytest.mark.parametrize(
  "error, code, words",
  [
    (ValueError("seed: no"), 2, "error: seed: no\n"),
    (OSError(errno.ENOSPC, "No space left on device", "a/metrics.jsonl"), 2,
     "error: a/metrics.jsonl: No space left on device\n"),
    (OSError("without a number"), 2, "error: without a number\n"),
    (FloatingPointError("loss is NaN"), 2, "error: loss is NaN\n"),
    (KeyboardInterrupt(), 130, "stopped; to go on: X\n"),
  ],
)  # fmt: skip
def test_one_message(error, code, words, capsys):
  with pytest.raises(SystemExit) as caught:
    with endings.one_message("stopped; to go on: X"):
      raise error
  assert caught.value.code == code
  assert capsys.readouterr().err == words


def test_every_program_is_listed_and_ends_with_one_message(root):
  found = {"__main__"}
  for path in (root / "vigor_jax").rglob("*.py"):
    text = path.read_text()
    # What a reward's process runs has no user.
    if 'if __name__ == "__main__"' in text and path.name != "sandbox_driver.py":
      assert "endings.one_message(" in text, path
      name = str(path.relative_to(root / "vigor_jax").with_suffix(""))
      found.add(name.removesuffix("/__main__").replace("/", "."))
  assert found == {"__main__", *programs.PROGRAMS}
  assert programs.about("train").startswith("Trains a policy")
  assert all(len(programs.about(name)) < 80 for name in programs.PROGRAMS)


def test_faults_of_the_code_keep_their_traceback():
  with pytest.raises(KeyError):
    with endings.one_message():
      raise KeyError("a bug")


def test_a_closed_pipe_ends_a_program_silently():
  program = (
    "from vigor_jax import endings\n"
    "with endings.one_message():\n"
    "  while True: print('line', flush=True)\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", program], stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )  # fmt: skip
  assert process.stdout.readline() == b"line\n"
  process.stdout.close()
  assert process.wait(60) == 141
  assert process.stderr.read() == b""


def test_ctrl_c_is_not_lost_where_exceptions_are():
  program = (
    "import os, signal\n"
    "from vigor_jax import endings\n"
    "class Collected:\n"
    "  def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
    "with endings.one_message('stopped', at_once=True):\n"
    "  Collected(); print('went on')\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True
  )
  assert (done.returncode, done.stderr, done.stdout) == (130, "stopped\n", "")


def test_a_folder_has_one_process_and_is_free_when_that_is_killed(tmp_path):
  folder = tmp_path / "run"
  process = subprocess.Popen(
    [sys.executable, "-c", HOLDS, str(folder)], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )  # fmt: skip
  try:
    assert process.stdout.readline() == b"held\n"
    with workdirs.Lock(folder) as lock:
      with pytest.raises(ValueError, match=rf"\(pid {process.pid}\) is at"):
        lock.acquire()
  finally:
    process.kill()
    process.wait()
  with workdirs.Lock(folder) as lock:
    lock.acquire()
  with workdirs.Lock(folder) as lock:  # Given back.
    lock.acquire()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / "file").touch()
  with workdirs.Lock(tmp_path / "file" / "run") as lock:
    with pytest.raises(ValueError, match="--workdir: '.*/file/run' cannot be"):
      lock.acquire()


@pytest.mark.parametrize(
  "text", ["", '{"total_steps": 4', "[]", "{}", '{"total_steps": 4}',
           '{"total_steps": 4, "rollouts": 1, "seconds": 1, "curve": 3}'],
)  # fmt: skip
def test_a_damaged_summary_is_named(tmp_path, text):
  (tmp_path / "summary.json").write_text(text)
  with pytest.raises(ValueError, match="summary.json: cannot be read.*delete"):
    record.read_summary(str(tmp_path))


def test_a_file_in_the_place_of_checkpoints_is_named(tmp_path):
  (tmp_path / "checkpoints").touch()
  with pytest.raises(ValueError, match="checkpoints is a file"):
    record.check_config(None, str(tmp_path))


@pytest.mark.parametrize(
  "record_", ["", "[]", "{}", {"cells": [{"name": 1}]}, {"cells": 3},
              {"cells": [{"folder": "a", "state": 1}]}],
)  # fmt: skip
def test_a_damaged_comparison_is_named(tmp_path, record_, capsys):
  text = record_ if isinstance(record_, str) else json.dumps(record_)
  (tmp_path / "compare.json").write_text(text)
  with pytest.raises(SystemExit):
    report.main([str(tmp_path)])
  assert "compare.json: cannot be read" in capsys.readouterr().err
  assert os.listdir(tmp_path) == ["compare.json"]
