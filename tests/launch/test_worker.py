"""worker.sh alone: what a lost connection or a lost session leaves behind."""

import pathlib
import signal
import subprocess
import time

import pytest

WORKER = pathlib.Path(__file__).parents[2] / "launch/worker.sh"

# One session, as long as its file is there. Its beginning takes until go_on.
TMUX = """#!/bin/bash
case $1 in
  has-session) [ -e "$HOME/session" ] ;;
  kill-session) rm -f "$HOME/session" ;;
  new-session)
    touch "$HOME/starting"
    until [ -e "$HOME/go_on" ]; do sleep 0.02; done
    touch "$HOME/session" ;;
esac
"""


class Vm:
  def __init__(self, home):
    self.home, self.run = home, home / "vigor_jax/runs/r"
    self.run.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/tmux").write_text(TMUX)
    (home / "bin/tmux").chmod(0o755)

  def popen(self, *arguments):
    return subprocess.Popen(
      ["bash", str(WORKER), *arguments],
      env={"HOME": str(self.home), "PATH": f"{self.home}/bin:/usr/bin:/bin"},
      stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

  def answer(self, *arguments):
    return self.popen(*arguments).communicate(timeout=120)[0].strip()


@pytest.fixture
def vm(tmp_path):
  return Vm(tmp_path)


@pytest.fixture
def trainer():
  """A process group of its own, as a trainer's."""
  process = subprocess.Popen(["sleep", "600"], start_new_session=True)
  yield process
  process.kill()
  process.wait()


def ticks(process):
  stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
  return stat.rpartition(")")[2].split()[19]


def test_a_look_in_the_middle_of_a_start_waits_for_its_end(vm):
  (vm.run / "exit_code").write_text("1\n")  # a failure, to be tried again
  (vm.run / "stopping").touch()  # left by a stop that was cut off
  start = vm.popen("start", "r", "gs://b/r", "train")
  while not (vm.home / "starting").exists():
    time.sleep(0.02)
  looks = [vm.popen("status", "r") for _ in range(3)]
  time.sleep(0.5)  # Long enough to have answered "interrupted".
  (vm.home / "go_on").touch()
  assert start.communicate(timeout=60)[0] == "vigor-worker running\n"
  for look in looks:
    assert look.communicate(timeout=60)[0] == "vigor-worker running\n"
  # Or the run would end as one that was stopped.
  assert not (vm.run / "stopping").exists()


def test_a_trainer_that_outlived_its_session_is_ended(vm, trainer):
  (vm.run / "started").write_text("20260101T000000Z\n")
  (vm.run / "process").write_text(f"{trainer.pid} {ticks(trainer)}\n")
  assert vm.answer("status", "r") == "vigor-worker interrupted"
  assert vm.answer("stop", "r") == "vigor-worker ready"
  assert trainer.wait(60) == -signal.SIGTERM


def test_a_number_that_is_now_another_process_is_left_alone(vm, trainer):
  (vm.run / "started").write_text("20260101T000000Z\n")
  (vm.run / "process").write_text(f"{trainer.pid} 17\n")
  (vm.home / "go_on").touch()
  assert vm.answer("start", "r", "gs://b/r", "train") == "vigor-worker running"
  (vm.home / "session").unlink()  # killed, and the VM booted again
  (vm.run / "process").write_text(f"{trainer.pid} 17\n")
  assert vm.answer("stop", "r") == "vigor-worker ready"
  assert trainer.poll() is None


def supervised(vm):
  """A session whose trainer has begun and would go on for minutes."""
  (vm.run / "started").write_text("20260101T000000Z\n")
  (vm.run / "command").write_text("sleep\n600\n")
  session = vm.popen("supervise", "r", "gs://b/r")
  while not (vm.run / "process").exists():
    time.sleep(0.02)
  return session


def test_a_session_that_is_told_to_end_takes_its_trainer_along(vm):
  session = supervised(vm)
  process, began = (vm.run / "process").read_text().split()
  assert pathlib.Path(f"/proc/{process}/stat").exists() and began.isdigit()
  session.send_signal(signal.SIGHUP)
  session.communicate(timeout=60)
  assert (vm.run / "exit_code").read_text() == "143\n"
  assert not pathlib.Path(f"/proc/{process}").exists()


def test_what_a_lost_session_came_to_is_not_the_next_ones(vm):
  session = supervised(vm)
  (vm.run / "started").write_text("20260101T000100Z\n")
  session.send_signal(signal.SIGTERM)
  session.communicate(timeout=60)
  assert not (vm.run / "exit_code").exists()
