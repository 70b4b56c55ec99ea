"""A wrong argument gets one error that names it and the nearest legal value."""

import pathlib
import subprocess

import pytest

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["creat"], "verb 'creat' does not exist; nearest: 'create'"),
    (["up", "--nme=v"], "flag '--nme' does not exist; nearest: '--name'"),
    (["up"], "--name is missing"),
    (["up", "--name=My_Run"], "nearest: --name=my-run"),
    (["up", "--name=v", "--spot=yes"], "--spot takes no value"),
    (["up", "--project=a b"], "--project='a b' is not a project id"),
    (["up", "--zone=us-west4"], "--zone='us-west4' is not a zone"),
    (["up", "--tpu="], "--tpu is missing"),
    (["up", "--tpu=v5e:4x5"], "nearest: 'v5e:4x4'"),
    (["up", "--tpu=v6e-17"], "nearest: 'v6e-1'"),
    (["up", "--tpu=tpu7x:2x2x1"], "only through GKE"),
    (["up", "--slices=0"], "--slices='0' is too small; nearest: --slices=1"),
    (["up", "--slices=two"], "--slices='two' is not a whole number"),
    (["up", "--poll=1s"], "--poll='1s' is not a number of seconds"),
    (["up", "--workdir=/home/me/run"], "nearest: --workdir=gs://my-project-"),
    (["up", "--workdir=gs://bucket/a b"], "is not gs://BUCKET/RUN"),
    (["up", "--inputs=models"], "--inputs='models' is not gs://BUCKET/FOLDER"),
    (["up", "--config=configs/tinny.py"], "nearest: 'configs/tiny.py'"),
    (["up", "--", "--config.a=b\nc"], "an override holds a line break"),
    (["status", "--name=w"], "nothing is recorded under --name=w"),
  ],
)
def test_wrong_argument(idle_world, arguments, message):
  verb, more = arguments[0], arguments[1:]
  legal = []
  if verb == "up" and more:
    legal = idle_world.up_arguments()[1:]
  result = idle_world.launch(verb, *legal, *more)
  assert result.returncode == 2
  assert result.stderr.startswith("error: ")
  assert message in result.stderr
  assert idle_world.count("queued-resources") == 0


def test_price_is_chosen_by_the_user(idle_world):
  legal = [a for a in idle_world.up_arguments() if a != "--spot"]
  result = idle_world.launch(*legal)
  assert result.returncode == 2
  assert "choose --spot or --on-demand" in result.stderr


@pytest.mark.parametrize(
  "name, accelerator, chips, runtime",
  [
    ("v5e:4x4", "v5litepod-16", 16, "v2-alpha-tpuv5-lite"),
    ("v5e-16", "v5litepod-16", 16, "v2-alpha-tpuv5-lite"),
    ("v5p:2x2x2", "v5p-16", 8, "v2-alpha-tpuv5"),
    ("v5p-8", "v5p-8", 4, "v2-alpha-tpuv5"),
    ("v6e:4x8", "v6e-32", 32, "v2-alpha-tpuv6e"),
    ("v4-16", "v4-16", 8, "tpu-ubuntu2204-base"),
  ],
)
def test_names_of_slices(name, accelerator, chips, runtime):
  script = (
    f". {LAUNCH}/lib.sh; . {LAUNCH}/accelerators.sh; "
    f"resolve_slice {name}; echo $ACCELERATOR $CHIPS $RUNTIME"
  )
  out = subprocess.run(
    ["bash", "-uc", script], capture_output=True, text=True, check=True
  )
  assert out.stdout.split() == [accelerator, str(chips), runtime]


@pytest.mark.parametrize(
  "argument",
  [
    "plain",
    "",
    "two words",
    "it's",
    '"',
    "$HOME",
    "a;b&c|d",
    "\\",
    "*",
    "~",
    "&",
    "é",
    "--a=b c",
  ],
)
def test_quote_round_trip(argument):
  script = f'. {LAUNCH}/lib.sh; quote "$1"; printf %s "$REPLY"'
  quoted = subprocess.run(
    ["bash", "-uc", script, "_", argument],
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  for shell in ("bash", "sh"):
    back = subprocess.run(
      [shell, "-c", f"printf %s {quoted}"],
      capture_output=True,
      text=True,
      check=True,
    )
    assert back.stdout == argument
