"""Each verb does its part, can be repeated, and --dry-run does nothing."""

import pathlib
import shlex
import subprocess

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
FLAGS = ["--workdir=gs://bucket/run", "--config=configs/tiny.py"]


def test_dry_run_from_create_to_training(world):
  note = '--config.note=it\'s "two  words"'
  result = world.up("--dry-run", "--", note, slices=2)
  assert result.returncode == 0, result.stderr
  assert world.cloud.calls == []
  assert not (world.home / ".vigor_jax").exists()
  # Two slices of 16 chips, four to a VM.
  assert "setting up 8 of 8 workers" in result.stdout
  commands = [
    line for line in result.stdout.splitlines() if not line.startswith("#")
  ]
  parsed = [shlex.split(line) for line in commands]
  assert all(p[0] in ("gcloud", "git") for p in parsed)

  def first(*words):
    return next(
      i
      for i, p in enumerate(parsed)
      if all(any(w in a for a in p) for w in words)
    )

  order = [
    first("queued-resources", "create"),
    first("storage", "cp", ".tar.gz"),
    first("ssh", "v-1", "worker.sh setup"),
    first("ssh", "v-1", "worker.sh start"),
  ]
  assert order == sorted(order)
  # What reaches the trainer: gcloud hands --command to the remote shell.
  command = parsed[order[-1]][-1].removeprefix("--command=")
  remote = shlex.split(command.split("; then ")[1].split("; else ")[0])
  assert remote[-4:] == [
    "vigor_jax.train",
    "--config=configs/tiny.py",
    "--workdir=gs://bucket/run",
    note,
  ]


def test_verbs_one_by_one_and_each_one_twice(world):
  world.cloud.hold(2)
  for _ in range(2):
    result = world.launch("create", *world.place(), "--poll=0.02")
    assert result.returncode == 0, result.stderr
  assert world.count("queued-resources create") == 1
  for _ in range(2):
    result = world.launch("setup", "--name=v", "--workdir=gs://bucket/run")
    assert result.returncode == 0, result.stderr
  assert world.count("storage cp") - world.count(".record") == 1
  for _ in range(2):
    result = world.launch(
      "run", "--name=v", "--config=configs/tiny.py", "--", "--config.note=a b"
    )
    assert result.returncode == 0, result.stderr
    assert "16 chips" in result.stderr
  world.wait_for(lambda: world.steps == [1, 2])
  world.wait_for(lambda: world.starts("v-w-1"))
  logs = world.root / "vms/v/0/vigor_jax/runs"
  world.wait_for(lambda: "step 2" in next(logs.glob("*/log")).read_text())
  assert world.starts("v-w-0") == [0]
  assert len(world.starts("v-w-1")) == 1

  status = world.launch("status", "--name=v")
  assert status.returncode == 0, status.stderr
  assert "v: ACTIVE, v5litepod-16 x 1 in us-west4-a" in status.stderr
  assert "worker v/0: running | step 2" in status.stderr
  logs = world.launch("logs", "--name=v", "--lines=1")
  assert (logs.returncode, logs.stdout) == (0, "step 2\n")

  # Another command must not push the running one aside.
  other = world.launch(
    "run", "--name=v", "--config=configs/tiny.py", "--", "--config.note=c"
  )
  assert other.returncode == 2
  assert "worker v/0 runs another command" in other.stderr
  for _ in range(2):
    assert world.launch("stop", "--name=v").returncode == 0
  assert not list(world.run_folder.glob("launch/*/finished"))
  other = world.launch("run", "--name=v")
  assert other.returncode == 0, other.stderr
  world.wait_for(lambda: world.starts("v-w-0") == [0, 2])

  for _ in range(2):
    deleted = world.launch("delete", "--name=v", "--poll=0.02")
    assert deleted.returncode == 0, deleted.stderr
    assert "gcloud storage rm -r gs://bucket/run" in deleted.stderr
  assert world.cloud.requests == {}
  status = world.launch("status", "--name=v")
  assert "no TPU, no cost but storage" in status.stderr


def test_inputs_are_on_every_worker_also_after_a_preemption(world):
  folder = world.root / "gs/bucket/models/tiny"
  folder.mkdir(parents=True)
  (folder / "config.json").write_text("{}")
  world.cloud.preempt = [2]
  result = world.up("--inputs=gs://bucket/models/",
                    "--", "--config.model.checkpoint=inputs/tiny")
  assert result.returncode == 0, result.stderr
  assert world.steps == [1, 2, 3, 4]
  found = list((world.root / "vms").glob("*/**/inputs/tiny/config.json"))
  assert len({p.relative_to(world.root / "vms").parts[:2] for p in found}) == 2
  # By two workers, each time their VMs are new; a repeated setup copies nothing.
  assert world.count("storage rsync") >= 4
  assert "inputs=gs://bucket/models\n" in (
    world.home / ".vigor_jax/launch/v.record").read_text()


def test_delete_finds_the_node_that_outlived_its_request(world):
  assert (
    world.launch("create", *world.place(slices=2), "--poll=0.02").returncode
    == 0
  )
  world.cloud.requests.clear()
  world.cloud.orphans.add("v-1")
  result = world.launch("delete", "--name=v", "--poll=0.02")
  assert result.returncode == 0, result.stderr
  assert world.cloud.orphans == set()


def test_delete_that_cannot_see_warns_of_the_cost(world):
  assert world.launch("create", *world.place(), "--poll=0.02").returncode == 0
  world.cloud.describe_errors = ["UNAVAILABLE: try again"] * 50
  result = world.launch("delete", "--name=v", "--poll=0.02")
  assert result.returncode == 4
  assert "IT MAY STILL COST MONEY" in result.stderr


def test_a_name_in_use_elsewhere_is_not_taken_over(world):
  assert world.launch("create", *world.place(), "--poll=0.02").returncode == 0
  result = world.up("--zone=europe-west4-b")
  assert result.returncode == 2
  assert "already exists as v5litepod-16 x 1 in us-west4-a" in result.stderr
  assert world.count("queued-resources create") == 1


def test_every_script_parses():
  scripts = sorted(LAUNCH.glob("*.sh"))
  assert {s.name for s in scripts} >= {"tpu_vm.sh", "worker.sh", "local.sh"}
  for script in scripts:
    subprocess.run(["bash", "-n", str(script)], check=True)


# A tmux whose session ends, well, while it is being asked for.
ENDING_TMUX = """#!/bin/bash
echo 0 > "$HOME/vigor_jax/runs/r/exit_code"
exit 1
"""


def test_a_run_that_ends_during_the_look_is_finished(tmp_path):
  run = tmp_path / "vigor_jax/runs/r"
  run.mkdir(parents=True)
  (run / "started").write_text("20260101T000000Z\n")
  (run.parent / "current").write_text("r\n")
  tmux = tmp_path / "bin/tmux"
  tmux.parent.mkdir()
  tmux.write_text(ENDING_TMUX)
  tmux.chmod(0o755)
  result = subprocess.run(
    ["bash", str(LAUNCH / "worker.sh"), "status", "r"],
    env={"HOME": str(tmp_path), "PATH": f"{tmux.parent}:/usr/bin:/bin"},
    capture_output=True,
    text=True,
  )
  assert result.stdout == "vigor-worker finished\n"
