"""Whatever happens on the way, `up` ends with a finished run, nothing lost."""

import signal

import pytest

ALL = [1, 2, 3, 4]
QUOTA = (
  "RESOURCE_EXHAUSTED: Quota limit 'TPUV5sPreemptibleLitepodPerProject"
  "PerZoneForTPUAPI' has been exceeded. Limit: {} in zone us-west4-a."
)


def test_up_trains_on_all_workers_of_all_slices(world):
  override = '--config.note=it\'s "two  words" $HOME; & *'
  result = world.up("--", override, "--config.steps=6", slices=2)
  assert result.returncode == 0, result.stderr
  assert world.steps == ALL
  for host in ("v-0-w-0", "v-0-w-1", "v-1-w-0", "v-1-w-1"):
    argv = (world.run_folder / f"argv-{host}").read_text().splitlines()
    assert argv == [
      "-m",
      "vigor_jax.train",
      "--config=configs/tiny.py",
      "--workdir=gs://bucket/run",
      override,
      "--config.steps=6",
    ]
    assert len(world.starts(host)) == 1
  (create,) = [c for c in world.cloud.calls if "queued-resources create" in c]
  assert "--accelerator-type=v5litepod-16" in create
  assert "--runtime-version=v2-alpha-tpuv5-lite" in create
  assert "--node-count=2 --node-prefix=v --spot" in create
  assert "finished: gs://bucket/run" in result.stderr
  # The TPU is still there, so the price and the way out are named last.
  assert result.stderr.rstrip().endswith("launch/tpu_vm.sh delete --name=v")
  assert "32 chips" in result.stderr
  logs = list(world.run_folder.glob("launch/*/logs/*.log"))
  assert sorted(p.name.split("-2")[0] for p in logs) == [
    "v-0-w-0",
    "v-0-w-1",
    "v-1-w-0",
    "v-1-w-1",
  ]


def test_four_preemptions_in_one_run_of_two_slices(world):
  world.cloud.preempt = ["waiting", "setup", 1, (3, "hidden")]
  result = world.up(slices=2)
  assert result.returncode == 0, result.stderr
  assert world.steps == ALL
  assert "preempted (4 so far)" in result.stderr
  assert world.count("queued-resources create") == 5
  # Every worker of every slice started anew, from the checkpoint.
  assert world.starts("v-0-w-0") == [0, 1, 3]
  assert len(world.starts("v-1-w-1")) == 3


def test_quota_is_refused_at_once_with_the_way_out(world):
  world.cloud.create_errors = [QUOTA.format(0)]
  result = world.up()
  assert result.returncode == 3
  assert "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI" in result.stderr
  assert "nothing was created" in result.stderr
  assert "iam-admin/quotas?project=my-project" in result.stderr
  assert world.cloud.requests == {}
  assert world.count("queued-resources create") == 1


def test_quota_after_a_preemption_is_waited_for(world):
  world.cloud.preempt = [2]
  world.cloud.create_errors = [None, QUOTA.format(16), QUOTA.format(16)]
  result = world.up()
  assert result.returncode == 0, result.stderr
  assert world.steps == ALL
  assert world.count("queued-resources create") == 4


def test_failed_request_is_deleted_because_it_eats_quota(world):
  world.cloud.failed = [QUOTA.format(0)]
  result = world.up()
  assert result.returncode == 3
  assert "Limit: 0" in result.stderr
  assert world.cloud.requests == {}


@pytest.mark.parametrize(
  "error, fix",
  [
    ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", "tpu.admin"),
    (
      "SERVICE_DISABLED: Cloud TPU API is off",
      "gcloud services enable tpu.googleapis.com --project=my-project",
    ),
    (
      "You do not currently have an active account selected.",
      "gcloud auth login",
    ),
  ],
)
def test_refusals_name_the_command_that_helps(world, error, fix):
  world.cloud.describe_errors = [error]
  result = world.up()
  assert result.returncode == 3
  assert fix in result.stderr
  assert world.count("queued-resources create") == 0


def test_slice_the_zone_does_not_have(world):
  world.cloud.create_errors = ["INVALID_ARGUMENT: unknown accelerator type"]
  result = world.up("--tpu=v5e:4x8")
  assert result.returncode == 2
  assert "nearest type that this zone offers: v5litepod-16" in result.stderr


def test_missing_bucket_is_found_before_anything_costs(world):
  result = world.up("--workdir=gs://nobucket/run")
  assert result.returncode == 3
  assert "gcloud storage buckets create" in result.stderr
  assert world.count("queued-resources") == 0


def test_passing_trouble_passes(world):
  world.cloud.describe_errors = ["UNAVAILABLE: try again"] * 3
  world.cloud.create_errors = ["INTERNAL: try again", None]
  world.cloud.failed = ["There is no more capacity in the zone", None]
  world.cloud.ssh_failures = {"v/1": 5}
  world.cloud.without_address = 2
  result = world.up()
  assert result.returncode == 0, result.stderr
  assert world.steps == ALL
  # One request failed at once, one for capacity; none was taken for preempted.
  assert world.count("queued-resources create") == 3
  assert "no more capacity" in result.stderr
  assert "preempted" not in result.stderr
  assert "worker v/1 does not answer" in result.stderr
  assert len(world.starts("v-w-1")) == 1


def test_one_worker_without_ssh_for_ever(world):
  world.cloud.ssh_failures = {"v/1": 1000}
  result = world.up()
  assert result.returncode == 4
  assert "ssh to worker v/1 failed 10 times" in result.stderr
  assert "Connection timed out" in result.stderr
  assert "launch/tpu_vm.sh delete --name=v" in result.stderr
  assert "launch/tpu_vm.sh resume --name=v" in result.stderr


def test_setup_that_cannot_work(world):
  world.script("vm_bin/uv", "#!/bin/sh\necho no such package >&2; exit 1\n")
  result = world.up()
  assert result.returncode == 4
  assert "setup of worker v/0 failed 10 times" in result.stderr
  assert "no such package" in result.stderr


def test_crash_restarts_from_the_checkpoint(world):
  world.cloud.hold(2)
  process = world.popen(*world.up_arguments())
  world.wait_for(lambda: 2 in world.steps)
  (world.run_folder / "crash").touch()
  world.cloud.hold(None)
  world.wait_for(lambda: world.count("worker.sh stop") > 0)
  (world.run_folder / "crash").unlink()
  _, err = process.communicate(timeout=180)
  assert process.returncode == 0, err
  assert world.steps == ALL
  assert "ValueError: made up" in err
  assert "of 3, from its last checkpoint" in err


def test_crash_for_good_gives_up_and_stops_paying(world):
  world.run_folder.mkdir(parents=True)
  (world.run_folder / "crash").touch()
  result = world.up("--max_restarts=1", "--delete_when_done")
  assert result.returncode == 1
  assert "2 times (--max_restarts=1)" in result.stderr
  assert "ValueError: made up" in result.stderr
  assert world.cloud.requests == {}
  assert list(world.run_folder.glob("launch/*/logs/*.log"))


def test_lost_terminal_loses_nothing(world):
  world.cloud.hold(2)
  process = world.popen(*world.up_arguments())
  world.wait_for(lambda: 2 in world.steps)
  second = world.launch("resume", "--name=v")
  assert second.returncode == 2
  assert f"process {process.pid} already watches v" in second.stderr
  process.send_signal(signal.SIGHUP)
  _, err = process.communicate(timeout=180)
  assert process.returncode == 130
  assert "launch/tpu_vm.sh resume --name=v" in err
  assert "launch/tpu_vm.sh delete --name=v" in err
  world.cloud.hold(None)
  world.wait_for(lambda: world.steps == ALL)
  result = world.launch("resume", "--name=v", "--poll=0.02")
  assert result.returncode == 0, result.stderr
  assert world.starts("v-w-0") == [0]


def test_detached_watch_survives_deletes_and_is_not_paid_for_twice(world):
  world.cloud.preempt = [2]
  result = world.up("--detach", "--delete_when_done")
  assert result.returncode == 0, result.stderr
  assert "watching in the background" in result.stderr
  log = world.home / ".vigor_jax/launch/v.watch.log"
  world.wait_for(lambda: log.exists() and "deleted v" in log.read_text())
  assert world.steps == ALL
  assert world.cloud.requests == {}
  assert world.count("queued-resources create") == 2
  again = world.launch("resume", "--name=v")
  assert again.returncode == 0
  assert "finished: gs://bucket/run" in again.stderr
  assert world.count("queued-resources create") == 2


def test_resume_on_another_machine_runs_the_same_code(world):
  world.cloud.hold(2)
  process = world.popen(*world.up_arguments("--", "--config.note=a b"))
  world.wait_for(lambda: 2 in world.steps)
  process.kill()
  process.communicate()
  # Another machine: no record; a repository that has moved on.
  (world.home / ".vigor_jax/launch/v.record").unlink()
  (world.repo / "configs/tiny.py").write_text("# edited since\n")
  world.cloud.requests["v"]["preempt"] = 2
  result = world.launch(
    "resume", "--name=v", "--workdir=gs://bucket/run", "--poll=0.02"
  )
  assert result.returncode == 0, result.stderr
  assert world.steps == ALL
  assert len(list(world.run_folder.glob("launch/code/*.tar.gz"))) == 1
  configs = list((world.root / "vms").rglob("configs/tiny.py"))
  assert {c.read_text() for c in configs} == {"# a config\n"}
  argv = (world.run_folder / "argv-v-w-0").read_text().splitlines()
  assert argv[-1] == "--config.note=a b"


def test_results_that_never_left_the_vms_are_not_deleted(world):
  # A trainer that takes gs://... for a local folder ends well, but there.
  world.script("trainer", "#!/bin/sh\nexit 0\n")
  result = world.up("--delete_when_done")
  assert result.returncode == 1
  assert "there is no gs://bucket/run/metrics.jsonl" in result.stderr.replace(
    "\n  ", " "
  )
  assert "v" in world.cloud.requests


def test_config_that_the_trainer_refuses_is_not_tried_again(world):
  world.script("trainer", "#!/bin/sh\n[ $1 = -c ] || { echo bad; exit 2; }\n")
  result = world.up()
  assert result.returncode == 2
  assert "the training refused its config on worker v/0" in result.stderr
  assert "| bad" in result.stderr
  assert world.count("worker.sh start") == 1
