"""The record of a run: durability, resuming, events, and its document."""

import glob
import io
import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from vigor_jax import config as config_lib
from vigor_jax import measure
from vigor_jax import metrics
from vigor_jax import profiling
from vigor_jax import progress


def _events(folder):
  """Returns {(tag, step): value} of all event files, in which none repeats."""
  from tensorboardX.proto import event_pb2

  found = {}
  for path in glob.glob(os.path.join(folder, "events.out.tfevents.*")):
    with open(path, "rb") as file:
      while header := file.read(12):  # Length 8, crc 4; data; crc 4.
        size = int.from_bytes(header[:8], "little")
        event = event_pb2.Event.FromString(file.read(size))
        file.read(4)
        for value in event.summary.value:
          key = (value.tag, event.step)
          assert key not in found, f"{key} twice"
          found[key] = value.simple_value
  return found


def _line(step):
  return {"rollouts": 256 * step, "seconds": 0.5 * step, "reward/mean": 1 / step}


def test_lines_are_plain_json(tmp_path):
  writer = metrics.MetricsWriter(str(tmp_path))
  writer.write(1, {
    "reward/mean": np.float32(0.1), "compiles": np.int64(3),
    "allocation/rounds": np.array([64, 64]), "eval/pass@8": None,
  })
  writer.close()
  (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert json.loads(line) == {
    "step": 1, "reward/mean": float(np.float32(0.1)), "compiles": 3,
    "allocation/rounds": [64, 64], "eval/pass@8": None,
  }


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, -math.inf]])
def test_a_number_that_is_none_stops_the_run_and_stays_on_record(tmp_path, value):
  writer = metrics.MetricsWriter(str(tmp_path))
  with pytest.raises(metrics.NonFiniteMetric, match="step 7: policy/loss"):
    writer.write(7, {"reward/mean": 0.5, "policy/loss": value})
  assert metrics.read_lines(str(tmp_path / "metrics.jsonl")) == [
    {"step": 7, "reward/mean": 0.5, "policy/loss": None,
     "nonfinite": ["policy/loss"]}
  ]
  writer.close()


def test_what_is_no_number_is_refused(tmp_path):
  writer = metrics.MetricsWriter(str(tmp_path), tensorboard=False)
  with pytest.raises(TypeError, match="object cannot be a metric"):
    writer.write(1, {"reward/mean": object()})
  writer.close()


def test_a_line_has_left_the_process_when_write_returns(tmp_path):
  code = """
    import os, signal, sys
    from vigor_jax import metrics
    writer = metrics.MetricsWriter(sys.argv[1])
    for step in range(1, 6):
      writer.write(step, {"reward/mean": 0.5})
    os.kill(os.getpid(), signal.SIGKILL)
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], timeout=60
  )
  assert done.returncode == -signal.SIGKILL
  lines = metrics.read_lines(str(tmp_path / "metrics.jsonl"))
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_resuming_drops_later_and_torn_lines_and_continues(tmp_path):
  folder = str(tmp_path)
  writer = metrics.MetricsWriter(folder)
  for step in range(1, 9):
    writer.write(step, _line(step))
    if step % 2 == 0:
      writer.write(step, {**_line(step), "eval/accuracy": step / 10})
  writer.close()
  path = tmp_path / "metrics.jsonl"
  whole = path.read_bytes()
  with path.open("ab") as file:
    file.write(b'{"step": 9, "rewa')  # A kill in the middle of a write.

  resumed = metrics.MetricsWriter(folder, resume_step=6)
  lines = path.read_bytes().splitlines(keepends=True)
  assert lines == whole.splitlines(keepends=True)[:9]
  for step in (7, 8):
    resumed.write(step, _line(step))
    if step == 8:
      resumed.write(step, {**_line(step), "eval/accuracy": 0.8})
  resumed.close()
  assert path.read_bytes() == whole

  expected = {
    (key, line["step"]): value
    for line in metrics.read_lines(str(path))
    for key, value in line.items() if key != "step"
  }
  events = _events(folder)
  assert set(events) == set(expected)
  for key, value in expected.items():
    assert events[key] == pytest.approx(value, rel=1e-6)


def test_events_lost_in_a_kill_come_back(tmp_path):
  """A killed writer's queue is lost; the record still has the lines."""
  writer = metrics.MetricsWriter(str(tmp_path))
  for step in (1, 2, 3):
    writer.write(step, {**_line(step), "allocation/rounds": [64, 32]})
  writer.close()
  for path in glob.glob(str(tmp_path / "events*")):
    with open(path, "r+b") as file:
      file.truncate(40)
  metrics.MetricsWriter(str(tmp_path), resume_step=2).close()
  events = _events(str(tmp_path))
  assert {step for _, step in events} == {1, 2}
  assert events["allocation/rounds/1", 2] == 32


def test_a_new_run_starts_empty(tmp_path):
  writer = metrics.MetricsWriter(str(tmp_path))
  writer.write(1, _line(1))
  writer.close()
  metrics.MetricsWriter(str(tmp_path)).close()
  assert (tmp_path / "metrics.jsonl").read_bytes() == b""
  assert not _events(str(tmp_path))


def test_a_line_that_finds_no_room_names_the_file(tmp_path):
  path = str(tmp_path / "a.jsonl")
  lines = metrics.JsonLines(path)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
  try:
    with pytest.raises(OSError) as error:
      for step in range(20):
        lines.append({"step": step})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert path in str(error.value)
  lines.close()
  # What was written in part is left out when the run goes on.
  again = metrics.JsonLines(path, resume_step=100)
  again.append({"step": 99})
  again.close()
  steps = [line["step"] for line in metrics.read_lines(path)]
  assert steps == [*range(steps[-2] + 1), 99]


def test_events_of_a_folder_with_brackets_are_replaced(tmp_path):
  folder = tmp_path / "run[1]"
  for _ in range(2):
    metrics.MetricsWriter(str(folder)).close()
  assert len(list(folder.glob("events.out.tfevents.*"))) == 1


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not JSON"):
    metrics.read_lines(str(path))
  with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not JSON"):
    metrics.JsonLines(str(path), resume_step=3)
  path.write_text("[]\n")
  with pytest.raises(ValueError, match="line 1: expected an object"):
    metrics.read_lines(str(path))


def test_what_a_resumed_record_cannot_hold_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('\n{"step": 1}\n \n{"step": 2}\n')
  metrics.JsonLines(str(path), resume_step=1).close()
  assert path.read_text() == '{"step": 1}\n'
  path.write_text('{"step": 1}\n{"loss": 2}\n')
  with pytest.raises(ValueError, match="a.jsonl, line 2: has no step"):
    metrics.JsonLines(str(path), resume_step=1)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"total_steps": ""}'])
def test_a_damaged_summary_is_named(tmp_path, text):
  from vigor_jax import record

  assert record.read_summary(str(tmp_path)) is None
  (tmp_path / "summary.json").write_text(text)
  with pytest.raises(ValueError, match="summary.json: cannot be read.*delete"):
    record.read_summary(str(tmp_path))


def test_a_torn_last_line_is_not_read(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_text('{"step": 1}\n{"step": 2}')
  assert metrics.read_lines(str(path)) == [{"step": 1}]


def test_atomic_write_leaves_old_or_new(tmp_path, monkeypatch):
  path = tmp_path / "deep" / "config.json"
  metrics.atomic_write(str(path), "old")
  assert path.read_text() == "old"

  def fails(source, target):
    raise OSError("disk full")

  monkeypatch.setattr(os, "replace", fails)
  with pytest.raises(OSError, match="disk full"):
    metrics.atomic_write(str(path), b"new")
  assert path.read_text() == "old"
  assert os.listdir(path.parent) == ["config.json"]


def test_counters_continue_and_stand_still_when_paused(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
  counters = metrics.Counters()
  clock[0] += 5  # Start-up is not counted.
  counters.start()
  counters.add(np.int64(256), 1000)
  clock[0] += 2
  with counters.paused():
    clock[0] += 50
    assert counters.seconds == 2
  clock[0] += 1
  state = json.loads(json.dumps(counters.state_dict()))
  assert state == {"rollouts": 256, "tokens": 1000, "seconds": 3.0}

  clock[0] += 1000  # Downtime.
  again = metrics.Counters()
  again.load_state_dict(state)
  clock[0] += 7
  again.start()
  clock[0] += 1
  again.add(256, 500)
  assert again.values() == {"rollouts": 512, "tokens": 1500, "seconds": 4.0}


# The console.


def test_a_step_is_one_short_line():
  file = io.StringIO()
  shown = progress.Progress(100, file)
  shown.start()
  shown.evaluation(0, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.2,
                       "eval/accuracy_high": 0.3, "eval/pass@4": 0.5})
  shown.step(1, {
    "tokens": 1000, "reward/mean": 0.5, "groups/mixed": 9,
    "allocation/rounds": [64, 64, 64, 64], "slots/utilisation": 0.875,
  })
  first, second = file.getvalue().splitlines()
  assert first == (
    "evaluation at step 0: accuracy 0.250 [0.200, 0.300]  pass@4 0.500"
  )
  for part in ("  1/100", "accuracy 0.250", "reward 0.500", "mixed 9",
               "rounds 64+64+64+64", "tokens/s", "slots 88%", "left "):
    assert part in second
  assert len(second) < 130


def test_evaluations_count_in_the_time_left_but_not_in_the_rate(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
  file = io.StringIO()
  shown = progress.Progress(10, file)
  shown.start(tokens=1000)
  for step in (1, 2):
    clock[0] += 2
    shown.step(step, {"tokens": 1000 + 500 * step})
    clock[0] += 100
    shown.evaluation(step, {"eval/accuracy": 0.5})
  lines = [line for line in file.getvalue().splitlines() if "left" in line]
  assert [line.split("  ")[-2:] for line in lines] == [
    ["250 tokens/s", "left 18s"], ["250 tokens/s", "left 6m56s"]  # 104 s for two steps, 8 to go.
  ]


def test_compiling_does_not_count_in_the_time_left(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
  file = io.StringIO()
  shown = progress.Progress(100, file)
  shown.start()
  for step, seconds, compiles in ((1, 60, 5), (2, 30, 6), (3, 1, 6), (4, 1, 6)):
    clock[0] += seconds
    shown.step(step, {"compiles": compiles})
  assert [line.partition("  left ")[2] for line in file.getvalue().splitlines()] == [
    "", "", "1m37s", "1m36s"
  ]


def test_lines_may_stand_for_several_steps(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
  file = io.StringIO()
  shown = progress.Progress(1000, file)
  shown.start()
  for step, seconds in ((101, 2), (121, 40)):  # Resumed at step 100.
    clock[0] += seconds
    shown.step(step, {"sft/loss": 2.0, "tokens": 0})
  assert file.getvalue().splitlines() == [
    "step  101/1000  loss 2.0000  left 29m58s",
    "step  121/1000  loss 2.0000  left 29m18s",
  ]


@pytest.mark.parametrize(
  "reward, advice", [(0.0, "samples.jsonl"), (1.0, "solved"), (0.5, "temper")]
)
def test_silence_is_warned_of_once_and_again_at_its_double(reward, advice):
  file = io.StringIO()
  shown = progress.Progress(100, file, patience=3)
  mixed = [0, 0, 5] + [0] * 12
  for step, count in enumerate(mixed, start=1):
    shown.step(step, {"groups/mixed": count, "reward/mean": reward})
  lines = file.getvalue().splitlines()
  warnings = [i for i, line in enumerate(lines) if line.startswith("warning")]
  assert len(warnings) == 3  # After 3, 6 and 12 silent steps.
  assert "no group carried signal for 3 steps" in lines[warnings[0]]
  assert advice in lines[warnings[0]]


@pytest.mark.parametrize(
  "seconds, text",
  [(0.4, "0s"), (59, "59s"), (190, "3m10s"), (7500, "2h05m"), (-1, "0s")],
)
def test_durations(seconds, text):
  assert progress.duration(seconds) == text


@pytest.mark.parametrize(
  "number, text", [(950, "950"), (12345, "12.3k"), (4.1e6, "4.1M")]
)
def test_quantities(number, text):
  assert progress.quantity(number) == text


def test_only_the_chosen_steps_are_traced(tmp_path):
  traces = profiling.StepTraces(str(tmp_path), (2,))

  @jax.jit
  def program(x):
    with jax.named_scope("a_scope"):
      return jax.numpy.tanh(x).sum()

  for step in (1, 2, 3):
    timer = measure.PhaseTimer()
    with traces.step(step), timer("allocate"):
      program(np.ones(3) * step).block_until_ready()
    assert timer.seconds["allocate"] > 0
  assert os.listdir(tmp_path / "traces") == ["step_2"]
  found, = glob.glob(str(tmp_path / "traces/step_2/**/*.xplane.pb"),
                     recursive=True)
  trace = pathlib.Path(found).read_bytes()
  for name in (b"allocate", b"a_scope"):
    assert name in trace


# The document.

REQUIRED = """
  step rollouts tokens seconds reward/mean groups/zero_variance_share
  groups/mixed rollouts/zero_variance_share allocation/rounds
  allocation/variance_per_rollout slots/utilisation compiles time/prefill
  time/decode time/reward time/allocate time/update time/other policy/loss
  policy/grad_norm policy/clip_share policy/ratio_max_deviation
  policy/sampler_trainer_logprob_gap policy/entropy
""".split()
EXTRA = """
  allocation/variance_per_rollout_fresh allocation/variance_per_rollout_predicted
""".split()


def test_every_key_of_a_run_is_documented(
  tmp_path, root, is_documented, documented_metrics
):
  from vigor_jax import train

  config = config_lib.load_file(f"{root}/configs/arithmetic.py")
  config.init_from = ""
  config.total_steps, config.rollout_budget = 2, 64
  config.prompts_per_step = 8
  config.model.sizes.update(width=16, heads=2, kv_heads=2, head_dim=8, ffn=16)
  config.evaluation.update(every_steps=2, num_prompts=8, samples_per_prompt=4,
                           fresh_rollouts=4)
  train.train(config_lib.validate(config), str(tmp_path), quiet=True)
  lines = metrics.read_lines(str(tmp_path / "metrics.jsonl"))
  unexplained = {key for line in lines for key in line if not is_documented(key)}
  assert not unexplained
  steps = [line for line in lines if "reward/mean" in line]
  assert [line["step"] for line in steps] == [1, 2]
  for line in steps:
    assert set(REQUIRED) <= set(line)
  assert set(EXTRA) <= set(steps[1])
  evaluations = [line for line in lines if "eval/accuracy" in line]
  assert [line["step"] for line in evaluations] == [0, 2]
  written = {key for line in lines for key in line}
  phantom = {
    key for key in documented_metrics
    if "<" not in key and key not in written
  }
  # Of other stages and options: shaping, suites, adapters, a run that broke.
  elsewhere = {
    "nonfinite", "sft/loss", "allocation/pareto_ks", "reward/shaped_mean",
    "eval/accuracy_weighted", "policy/adapter_change",
  }
  assert phantom == elsewhere - written
  assert any(key.startswith("eval/pass@") for key in written)
