"""The command that tries a verifier on labelled cases."""

import json
import shutil
import subprocess
import sys

import pytest

from vigor_jax.rewards import check


@pytest.mark.parametrize("reward", ["math", "countdown"])
def test_case_files_pass(data, reward, capsys):
  path = str(data / f"{reward}_cases.jsonl")
  assert check.main([f"--reward={reward}", path]) == 0
  out = capsys.readouterr().out
  assert "(100.0%)" in out and "WRONG" not in out
  if reward == "math":
    assert "38 of 38 right" in out and "4 of 4 as the file says" in out


def test_code_file(tmp_path, capsys):
  path = tmp_path / "code.jsonl"
  row = {
    "id": "half",
    "program": "def f(n): return 2",
    "tests": [
      {"call": "f(1)", "expected": 2},
      {"call": "f(2)", "expected": 4},
    ],
    "right": {"pass": False, "fraction": 0.5},
  }
  wrong = row | {"id": "no", "right": {"pass": True, "fraction": 1.0}}
  path.write_text(json.dumps(row) + "\n" + json.dumps(wrong) + "\n")
  assert check.main(["--reward=code", "--time_limit=2", str(path)]) == 1
  out = capsys.readouterr().out
  assert "WRONG  no (line 2): got {'pass': False, 'fraction': 0.5}" in out
  assert "1 of 2 right (50.0%)" in out


def test_disagreements_are_printed_and_policy_never_fails(tmp_path, capsys):
  path = tmp_path / "cases.jsonl"
  row = {"output": "\\boxed{2}", "gold": "3", "verdict": True}
  rows = [
    row | {"id": "a", "why": "a reason"},
    row | {"id": "b", "policy": True},
    {"output": "\\boxed{3}", "gold": "3", "verdict": True},
  ]
  path.write_text("\n\n".join(map(json.dumps, rows)))
  assert check.main(["--reward=math", str(path)]) == 1
  out = capsys.readouterr().out
  for text in (
    "WRONG  a (line 1): got False, right is True",
    "a reason",
    "1 of 2 right (50.0%)",
    "policy b (line 3)",
    "0 of 1 as the file says",
  ):
    assert text in out
  path.write_text(json.dumps(rows[1]))
  assert check.main(["--reward=math", str(path)]) == 0


@pytest.mark.parametrize(
  "reward, line, words",
  [
    ("math", "{", "not JSON"),
    ("math", "[]", "an object is needed"),
    ("math", '{"output": "x", "gold": "y"}', "'verdict' is missing"),
    ("math", '{"output": "x", "gold": 3, "verdict": true}', "'gold' must be"),
    ("math", '{"output": "x", "gold": "y", "verdict": 1}', "type bool"),
    (
      "countdown",
      '{"numbers": [1], "target": true, "expr": "1", "right": true}',
      "'target' must be",
    ),
    (
      "countdown",
      '{"numbers": [1.5], "target": 1, "expr": "1", "right": true}',
      "whole numbers",
    ),
    ("code", '{"program": "", "tests": [], "right": {}}', "non-empty"),
    (
      "code",
      '{"program": "", "tests": [{"call": "f()", "expected": 1}], "right": {}}',
      "'right' must be",
    ),
  ],
)
def test_bad_lines_name_file_and_line(tmp_path, capsys, reward, line, words):
  path = tmp_path / "cases.jsonl"
  path.write_text(f"\n\n{line}\n")
  with pytest.raises(SystemExit, match="2"):
    check.main([f"--reward={reward}", str(path)])
  message = capsys.readouterr().err
  assert words in message
  assert f"{path}:3" in message


def test_files_that_cannot_be_read(tmp_path, capsys):
  for name, content, words in (
    ("none.jsonl", None, "none.jsonl: No such file or directory"),
    ("empty.jsonl", b"\n", "empty.jsonl: no cases"),
    ("latin.jsonl", b"\xff", "latin.jsonl: not a text in UTF-8"),
  ):
    if content is not None:
      (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
      check.main(["--reward=math", str(tmp_path / name)])
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/{words}")
    assert said.count(name) == said.count("\n") == 1


def test_as_a_command(data, tmp_path):
  path = tmp_path / "cases.jsonl"
  shutil.copy(data / "countdown_cases.jsonl", path)
  done = subprocess.run(
    [
      sys.executable, "-m", "vigor_jax.rewards.check", "--reward=countdown",
      str(path),
    ],
    capture_output=True,
    text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "4 of 4 right (100.0%)" in done.stdout
