"""local.sh: one process, fake devices, several processes that form one job."""

import signal

import pytest

# Writes down how it was started; one process can be told to fail, the others
# then to hang, as hosts do that wait for a dead one.
PYTHON = """#!/bin/bash
for argument in "$@"; do
  case $argument in --workdir=*) run=${argument#--workdir=} ;; esac
done
i=${JAX_PROCESS_ID:-0}
mkdir -p "$run"
printf '%s\\n' "$@" > "$run/argv-$i"
env > "$run/env-$i"
echo "process $i"
case " $* " in
  *" --config.fail=$i "*) echo "ValueError: made up"; exit 7 ;;
  *" --config.fail="*) sleep 60 ;;
esac
"""


@pytest.fixture
def local(world):
  world.script("bin/fake_python", PYTHON)
  workdir = world.home / "run"

  def launch(*more):
    return world.launch(
      "--config=configs/tiny.py",
      f"--workdir={workdir}",
      "--python=fake_python",
      *more,
      script="local.sh",
    )

  launch.workdir = workdir
  launch.env = lambda i: dict(
    line.split("=", 1)
    for line in (workdir / f"env-{i}").read_text().splitlines()
    if "=" in line
  )
  return launch


def test_plain_run_leaves_the_platform_alone(local):
  result = local("--", '--config.note=it\'s "a  b"')
  assert result.returncode == 0, result.stderr
  assert "JAX_PLATFORMS" not in local.env(0)
  assert "XLA_FLAGS" not in local.env(0)
  argv = (local.workdir / "argv-0").read_text().splitlines()
  assert argv == [
    "-m",
    "vigor_jax.train",
    "--config=configs/tiny.py",
    f"--workdir={local.workdir}",
    '--config.note=it\'s "a  b"',
  ]


def test_fake_devices(local):
  assert local("--devices=8").returncode == 0
  env = local.env(0)
  assert env["JAX_PLATFORMS"] == "cpu"
  assert env["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8"
  assert "JAX_COORDINATOR_ADDRESS" not in env


def test_processes_form_one_job(local):
  result = local("--processes=3", "--devices=4", "--port=30000")
  assert result.returncode == 0, result.stderr
  assert "process 0" in result.stdout
  for i in range(3):
    env = local.env(i)
    assert env["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:30000"
    assert (env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"]) == ("3", str(i))
    assert env["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    log = local.workdir / f"launch/process-{i}.log"
    assert log.read_text() == f"process {i}\n"


def test_one_dead_process_ends_the_job(local):
  result = local("--processes=2", "--grace=0", "--", "--config.fail=1")
  assert result.returncode == 1
  assert "process 1 ended with 7" in result.stderr
  assert "ValueError: made up" in result.stderr
  assert "the others did not notice within 0 s" in result.stderr


def test_a_job_that_is_told_to_end_ends(world, local):
  job = world.popen(
    "--config=configs/tiny.py", f"--workdir={local.workdir}",
    "--python=fake_python", "--processes=2", "--", "--config.fail=9",
    script="local.sh",
  )  # fmt: skip
  world.wait_for(lambda: (local.workdir / "env-1").exists())
  job.send_signal(signal.SIGTERM)
  job.communicate(timeout=60)
  assert job.returncode == 130


def test_dry_run_runs_nothing(local):
  result = local("--processes=2", "--dry-run")
  assert result.returncode == 0
  assert result.stdout.count("-m vigor_jax.train") == 2
  assert not local.workdir.exists()


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--proceses=2"], "nearest: '--processes'"),
    (["--devices=none"], "--devices='none' is not a whole number"),
    (["--port=70000"], "nearest: --port=65535"),
    (["--config=configs/tin.py"], "nearest: 'configs/tiny.py'"),
    (["--workdir="], "--workdir is missing"),
    (["--python=no_such"], "--python='no_such' cannot be run"),
  ],
)
def test_wrong_argument(local, arguments, message):
  result = local(*arguments)
  assert result.returncode == 2
  assert message in result.stderr
