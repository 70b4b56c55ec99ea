"""A small world for tests of launch/: a repository, a cloud, a trainer."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import pytest

import fake_cloud

REPOSITORY = pathlib.Path(__file__).parents[2]
CONFIG = "configs/tiny.py"

# Trains 4 steps: one line of metrics and one checkpoint each, from wherever the
# checkpoint stands. Only the first worker writes; all end when it has ended.
TRAINER = """#!/bin/bash
if [ "$1" = -c ]; then exit 0; fi
for argument in "$@"; do
  case $argument in
    --workdir=gs://*) run=$FAKE_CLOUD/gs/${argument#--workdir=gs://} ;;
  esac
done
trap 'exit 0' TERM  # as a trainer that saves, which does not mean finished
mkdir -p "$run"
printf '%s\\n' "$@" > "$run/argv-$FAKE_HOST"
step=$(cat "$run/checkpoint" 2> /dev/null || echo 0)
echo "start $step" >> "$run/starts-$FAKE_HOST"
touch "$HOME/training"
while [ "$step" -lt 4 ]; do
  sleep 0.04
  if [ -f "$run/crash" ]; then echo "ValueError: made up"; exit 1; fi
  case $FAKE_HOST in
    v-w-0 | v-0-w-0)
      while [ "$(cat "$FAKE_CLOUD/hold" 2> /dev/null)" = "$step" ]; do
        sleep 0.02
      done
      step=$((step + 1))
      echo "{\\"step\\": $step}" >> "$run/metrics.jsonl"
      echo "$step" > "$run/checkpoint.new"
      mv "$run/checkpoint.new" "$run/checkpoint"
      echo "step $step" ;;
    *) step=$(cat "$run/checkpoint" 2> /dev/null || echo 0) ;;
  esac
done
"""

UV = """#!/bin/bash
if [ "$1" = venv ]; then
  for folder in "$@"; do :; done
  mkdir -p "$folder/bin"
  cp "$FAKE_CLOUD/trainer" "$folder/bin/python"
fi
"""

# Stands in for tmux where there is none: one session, kept by its process.
TMUX = """#!/bin/bash
pid=$TMUX_TMPDIR/session
case $1 in
  has-session) # one that has ended may stay listed, as a zombie
    grep -q '^State:.[^Z]' "/proc/$(cat "$pid" 2> /dev/null)/status" \
      2> /dev/null ;;
  new-session) setsid bash -c "$5" < /dev/null > /dev/null 2>&1 &
    echo $! > "$pid" ;;
  kill-session) kill -HUP "$(cat "$pid" 2> /dev/null)" ;;
esac
"""


class World:
  """Runs launch scripts of a copied repository against the fake cloud."""

  def __init__(self, root):
    self.root = root / "c"
    self.repo = root / "repo"
    self.home = root / "home"
    for folder in ("bin", "vm_bin", "gs/bucket", "vms"):
      (self.root / folder).mkdir(parents=True)
    self.home.mkdir()
    shutil.copytree(REPOSITORY / "launch", self.repo / "launch")
    (self.repo / "configs").mkdir()
    (self.repo / CONFIG).write_text("# a config\n")
    (self.repo / ".gitignore").write_text(".venv/\n")
    subprocess.run(["git", "init", "-q"], cwd=self.repo, check=True)
    self.script("bin/gcloud", fake_cloud.CLIENT)
    self.script("vm_bin/uv", UV)
    self.script("vm_bin/hostname", "#!/bin/sh\necho $FAKE_HOST\n")
    self.script("trainer", TRAINER)
    if shutil.which("tmux") is None:
      self.script("vm_bin/tmux", TMUX)
    self.cloud = fake_cloud.FakeCloud(self.root)

  def script(self, name, text):
    path = self.root / name
    path.write_text(text)
    path.chmod(0o755)

  def count(self, text):
    return sum(text in call for call in self.cloud.calls)

  @property
  def run_folder(self):
    return self.root / "gs/bucket/run"

  @property
  def steps(self):
    path = self.run_folder / "metrics.jsonl"
    if not path.exists():
      return []
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]

  def starts(self, host):
    """The checkpoint step at each start of the trainer on one worker."""
    path = self.run_folder / f"starts-{host}"
    if not path.exists():
      return []
    return [int(line.split()[1]) for line in path.read_text().splitlines()]

  @property
  def environment(self):
    return {
      "PATH": f"{self.root}/bin:{os.environ['PATH']}",
      "HOME": str(self.home),
      "FAKE_CLOUD": str(self.root),
    }

  def popen(self, *arguments, script="tpu_vm.sh"):
    return subprocess.Popen(
      ["bash", str(self.repo / "launch" / script), *arguments],
      env=self.environment,
      cwd=self.home,
      text=True,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )

  def launch(self, *arguments, script="tpu_vm.sh"):
    process = self.popen(*arguments, script=script)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)

  def up(self, *more, slices=1):
    return self.launch(*self.up_arguments(*more, slices=slices))

  def up_arguments(self, *more, slices=1):
    return [
      "up",
      *self.place(slices),
      "--workdir=gs://bucket/run",
      f"--config={CONFIG}",
      "--poll=0.02",
      *more,
    ]

  def place(self, slices=1):
    return [
      "--name=v",
      "--project=my-project",
      "--zone=us-west4-a",
      "--tpu=v5e:4x4",
      f"--slices={slices}",
      "--spot",
    ]

  def wait_for(self, condition, seconds=180):
    end = time.monotonic() + seconds
    while not condition():
      assert time.monotonic() < end, "waited in vain"
      time.sleep(0.02)


@contextlib.contextmanager
def make_world():
  # Not tmp_path: the path of a tmux socket may have 108 characters only.
  root = pathlib.Path(tempfile.mkdtemp(prefix="vigor-"))
  result = World(root)
  try:
    yield result
  finally:
    result.cloud.close()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def world():
  with make_world() as result:
    yield result


@pytest.fixture(scope="module")
def idle_world():
  """One for all tests of a file that must not change it."""
  with make_world() as result:
    yield result
