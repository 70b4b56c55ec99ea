"""Several processes: exchanges, verdicts, whole runs on localhost."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tiny_runs

from vigor_jax import checkpoints
from vigor_jax import distributed
from vigor_jax import workdirs


class Store:
  """The coordination service's key-value store, between threads."""

  def __init__(self):
    self._values, self._changed = {}, threading.Condition()

  def key_value_set_bytes(self, key, value):
    with self._changed:
      assert key not in self._values
      self._values[key] = value
      self._changed.notify_all()

  def blocking_key_value_get_bytes(self, key, milliseconds):
    with self._changed:
      if not self._changed.wait_for(lambda: key in self._values,
                                    milliseconds / 1000):
        raise TimeoutError(key)
      return self._values[key]

  def key_value_delete(self, key):
    del self._values[key]


def _together(count, function, timeout=20.0, absent=()):
  """Results (or exceptions) of function(cluster) in `count` threads."""
  store, results = Store(), [None] * count

  def run(rank):
    try:
      results[rank] = function(
        distributed.Cluster(rank, count, store, timeout))
    except Exception as error:
      results[rank] = error

  threads = [threading.Thread(target=run, args=(r,))
             for r in range(count) if r not in absent]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results, store


def test_exchanges_come_by_rank_and_are_cleaned_up():
  def run(team):
    return [team.exchange("x", b"%d.%d" % (team.rank, i)) for i in range(9)]

  results, store = _together(3, run)
  want = [[b"0.%d" % i, b"1.%d" % i, b"2.%d" % i] for i in range(9)]
  assert results == [want] * 3
  assert len(store._values) == 2 * 3


def test_a_silent_process_is_named_after_the_time_limit():
  results, _ = _together(3, lambda team: team.exchange("verdicts", b""),
                         timeout=0.3, absent=(1,))
  for error in (results[0], results[2]):
    assert isinstance(error, distributed.HostLost)
    assert "process 1 of 3" in str(error) and "verdicts" in str(error)


def test_the_first_decides_for_all():
  results, _ = _together(
    2, lambda team: team.from_first("step", lambda: [7, team.rank]))
  assert results == [[7, 0], [7, 0]]

  def fail():
    raise ValueError("seed: 0 -> 1")

  results, _ = _together(2, lambda team: team.from_first("config", fail))
  assert [str(error) for error in results] == ["seed: 0 -> 1"] * 2


def test_hosts_that_differ_are_told_what_differs():
  same = {"counts": np.arange(4), "rewards": np.ones(4, np.float32)}
  results, _ = _together(3, lambda team: team.agree("step 3", same))
  assert results == [None] * 3

  def run(team):
    rewards = np.array([0, 1, team.rank == 2], np.float32)
    return team.agree("step 3", {**same, "rewards": rewards})

  results, _ = _together(3, run)
  for error in results:
    assert isinstance(error, distributed.HostLost)
    assert "step 3: process 2 and process 0 hold different rewards" in str(
      error)


def test_one_signal_reaches_all():
  results, _ = _together(
    3, lambda team: team.largest("signals", 15 * (team.rank == 1)))
  assert results == [15] * 3


class Scorer:
  name = "length"

  def __init__(self):
    self.seen = []

  def submit(self, texts, answers, metadata=None):
    self.seen += texts
    if "bad" in texts:
      raise ValueError("reward length returned None for 'bad'")
    return texts

  def collect(self, texts):
    return np.array([len(t) / 10 for t in texts], np.float32)

  def close(self):
    pass


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_verdicts_are_shared_out_disjoint_and_complete(hosts, size):
  texts = ["x" * (i % 10) for i in range(size)]
  scorers = [Scorer() for _ in range(hosts)]

  def run(team):
    return distributed.SharedScorer(scorers[team.rank], team).score(
      texts, [""] * size, [{}] * size)

  results, _ = _together(hosts, run)
  for verdicts in results:
    np.testing.assert_array_equal(
      verdicts, np.array([len(t) / 10 for t in texts], np.float32))
  assert sorted(sum((s.seen for s in scorers), [])) == sorted(texts)
  assert max(len(s.seen) for s in scorers) <= -(-size // hosts)


def test_a_refused_verdict_stops_all():
  def run(team):
    scorer = distributed.SharedScorer(Scorer(), team)
    assert scorer.name == "length"
    return scorer.score(["a", "bad", "c"], [""] * 3, [{}] * 3)

  results, _ = _together(3, run)
  assert all("returned None for 'bad'" in str(error) for error in results)
  assert "process 1" in str(results[0])


def test_the_environment_describes_the_job():
  describe = distributed._described
  names = distributed.VARIABLES
  assert describe({"JAX_PLATFORMS": "cpu"}) is None
  assert describe(dict(zip(names, ("h:1", "1", "0")))) is None
  assert describe(dict(zip(names, ("h:1", "4", "3")))) == dict(
    coordinator_address="h:1", num_processes=4, process_id=3)
  with pytest.raises(ValueError, match="JAX_PROCESS_ID: not set"):
    describe(dict(zip(names, ("h:1", "4"))))
  with pytest.raises(ValueError, match="JAX_PROCESS_ID='4'"):
    describe(dict(zip(names, ("h:1", "4", "4"))))


def test_remote_workdirs_are_mirrored(tmp_path, monkeypatch):
  bucket = tmp_path / "bucket"
  monkeypatch.setattr(workdirs, "CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(workdirs, "_path",
                      lambda url: bucket / url.removeprefix("gs://"))
  url = "gs://b/run"
  folder = workdirs.local(url)
  assert folder.startswith(str(tmp_path)) and workdirs.local("x") == "x"
  assert workdirs.join(url, "checkpoints") == "gs://b/run/checkpoints"
  first = workdirs.Mirror(url)
  first.fetch()
  (tmp_path / "cache").joinpath(os.path.basename(folder), "plots").mkdir()
  for name in ("metrics.jsonl", "plots/a.png"):
    with open(os.path.join(folder, name), "w") as file:
      file.write("one\n")
  first.push()
  assert (bucket / "b/run/plots/a.png").read_text() == "one\n"
  # Lines after the last push are lost with the machine.
  with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
    file.write("two\n")
  workdirs.Mirror(url).fetch()
  assert open(os.path.join(folder, "metrics.jsonl")).read() == "one\n"
  assert workdirs.exists(url, "metrics.jsonl")
  assert not workdirs.exists(url, "summary.json")
  assert workdirs.read(url, "metrics.jsonl") == "one\n"
  assert not list(bucket.rglob(".*.part"))
  assert checkpoints._locate(f"{url}/checkpoints/40") == (
    f"{url}/checkpoints", 40)


# Whole runs.


def _free_port():
  """A port that nothing else is given before the coordinator takes it."""
  while True:
    # Below those that the system hands out by itself.
    port = random.SystemRandom().randrange(10_000, 30_000)
    with socket.socket() as probe:
      try:
        probe.bind(("127.0.0.1", port))
        return port
      except OSError:
        continue


def _start(root, workdir, processes, devices, *overrides, command=None):
  port = _free_port()
  command = [sys.executable, *(command or (
    "-m", "vigor_jax.train", f"--config={root}/tests/multihost_config.py",
    f"--workdir={workdir}")), *overrides]
  running = []
  for rank in range(processes):
    environ = {
      **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
      "PYTHONPATH": str(root),
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if processes > 1:
      environ.update(zip(distributed.VARIABLES, (
        f"127.0.0.1:{port}", str(processes), str(rank))))
    log = open(f"{workdir}.{rank}.log", "a")
    running.append(subprocess.Popen(command, cwd=root, env=environ, stdout=log,
                                    stderr=subprocess.STDOUT))
  return running


def _run(root, workdir, processes, devices, *overrides, command=None):
  running = _start(root, workdir, processes, devices, *overrides,
                   command=command)
  codes = [process.wait(timeout=500) for process in running]
  log = open(f"{workdir}.0.log").read()
  assert codes == [0] * processes, log[-3000:]
  return log


def _lines(workdir, name):
  with open(f"{workdir}/{name}") as file:
    return [json.loads(line) for line in file]


def _train_lines(workdir):
  return [line for line in _lines(workdir, "metrics.jsonl")
          if "policy/loss" in line]


_CLOSE = ("policy/grad_norm", "policy/entropy")


def _compare(one, other, equal_steps):
  groups = _lines(one, "groups.jsonl"), _lines(other, "groups.jsonl")
  assert groups[0][:equal_steps] == groups[1][:equal_steps]
  pairs = list(zip(_train_lines(one), _train_lines(other)))[:equal_steps]
  assert len(pairs) == equal_steps
  for a, b in pairs:
    assert a["tokens"] == b["tokens"]
    for key in _CLOSE:
      assert a[key] == pytest.approx(b[key], rel=1e-4), (a["step"], key)


def test_two_processes_make_the_same_steps_as_one(root, tmp_path):
  one, two = str(tmp_path / "one"), str(tmp_path / "two")
  _run(root, one, 1, 4)
  _run(root, two, 2, 2)
  _compare(one, two, equal_steps=2)
  # Only process 0 writes, and says so.
  assert "step 3/3" in open(f"{two}.0.log").read()
  assert "step 3/3" not in open(f"{two}.1.log").read()
  assert len(_lines(two, "metrics.jsonl")) == 3
  # What two processes saved goes on in one, on one device.
  log = _run(root, two, 1, 1, "--config.total_steps=4", "--config.mesh.fsdp=1")
  assert "resumed from step 3" in log and "step 4/4" in log


def _fed(root, tmp_path, processes, devices):
  """What each process sent to its devices in one step; see fed_rows.py."""
  out = str(tmp_path / f"{processes}x{devices}")
  _run(root, out, processes, devices, "--config.reward.noise=0.3", command=(
    f"{root}/tests/fed_rows.py", f"{root}/tests/multihost_config.py", out))
  return [dict(np.load(f"{out}.{rank}.npz")) for rank in range(processes)]


@pytest.mark.slow
def test_each_host_feeds_the_rows_of_its_devices(root, tmp_path):
  (one,), two = _fed(root, tmp_path, 1, 4), _fed(root, tmp_path, 2, 2)
  calls = [key.removesuffix("_rows") for key in one if key.endswith("_rows")]
  assert len(calls) >= 2 and "prefill_0" in calls and "update_0" in calls
  found = []
  for call in calls:
    axis = 0 if call.startswith("prefill") else 1
    whole = one[f"{call}_sent"]
    size = whole.shape[axis]
    # Four devices, a quarter of the rows each, and half of them on each host.
    spans = [host[f"{call}_rows"].tolist() for host in two]
    assert all(len(mine) == 2 for mine in spans)
    assert sorted(spans[0] + spans[1]) == one[f"{call}_rows"].tolist() == [
      [k * size // 4, (k + 1) * size // 4] for k in range(4)]
    # Together what one process sends, none of it twice.
    together = np.zeros_like(whole)
    for host, mine in zip(two, spans):
      sent = np.split(host[f"{call}_sent"], len(mine), axis)
      for (start, stop), rows in zip(mine, sent):
        together[(slice(None),) * axis + (slice(start, stop),)] = rows
    np.testing.assert_array_equal(together, whole)
    if axis == 0:
      found += [row[row != 0].tolist() for row in together if row.any()]
  # And these are the step's prompts, all of them.
  ends = np.cumsum(one["lengths"])[:-1]
  prompts = [ids[ids != 0].tolist() for ids in np.split(one["prompts"], ends)]
  assert sorted(found) == sorted(prompts)
  assert len(prompts) == 8


@pytest.mark.extended
@pytest.mark.parametrize("processes, devices", [(2, 4), (4, 2)])
def test_layouts_agree(root, tmp_path, processes, devices):
  start, many = str(tmp_path / "start"), str(tmp_path / "many")
  again = str(tmp_path / "again")
  overrides = ["--config.total_steps=20", "--config.allocation.name=uniform",
               "--config.reward.noise=0.3"]  # wrong verdicts: a signal
  _run(root, start, 1, 8, *overrides)
  _run(root, many, processes, devices, *overrides)
  _compare(start, many, equal_steps=1)
  groups = _lines(start, "groups.jsonl"), _lines(many, "groups.jsonl")
  apart = [k + 1 for k, (a, b) in enumerate(zip(*groups)) if a != b]
  print(f"{processes} x {devices}, running freely: first step with other "
        f"verdicts than 1 x 8: {apart[0] if apart else 'none of 20'}")
  _run(root, again, processes, devices, *overrides)
  # The same layout again: every number, and what was learned, bit for bit.
  assert len(_train_lines(many)) == 20
  assert all(line["policy/grad_norm"] > 0 for line in _train_lines(many))
  tiny_runs.same(many, again)


@pytest.mark.extended
def test_layouts_make_the_same_step_of_the_same_state(root, tmp_path):
  run, steps = str(tmp_path / "run"), 20
  overrides = [f"--config.total_steps={steps}",
               "--config.checkpoint.every_steps=1",
               f"--config.checkpoint.keep={steps}",
               "--config.reward.noise=0.3"]  # wrong verdicts: a signal
  _run(root, run, 1, 8, *overrides)

  def found(processes, devices):
    out = str(tmp_path / f"{processes}x{devices}.npz")
    _run(root, out, processes, devices, *overrides, command=(
      f"{root}/tests/layout_steps.py", f"{root}/tests/multihost_config.py",
      run, str(steps), out))
    return np.load(out)

  one = found(1, 8)
  for processes, devices in [(2, 4), (4, 2)]:
    many = found(processes, devices)
    for k in range(steps):
      for name in ("tokens", "lengths", "counts"):
        np.testing.assert_array_equal(
          many[f"{name}_{k}"], one[f"{name}_{k}"], f"{name} of step {k + 1}")
      for name in ("sampled", "logprobs", "gradient"):
        a, b = many[f"{name}_{k}"], one[f"{name}_{k}"]
        apart, size = np.linalg.norm(a - b), np.linalg.norm(b)
        assert size > 0, (name, k + 1)
        assert apart <= 1e-5 * size, (name, k + 1, apart, size)


@pytest.mark.extended
def test_two_processes_keep_the_reference_where_the_run_began(root, tmp_path):
  base, one, two = (str(tmp_path / name) for name in ("base", "one", "two"))
  ours = [f"--config.init_from={base}", "--config.policy.kl.coef=0.1"]
  at_once = [*ours, "--config.total_steps=4"]
  _run(root, base, 1, 4, "--config.total_steps=2")
  _run(root, one, 1, 4, *at_once)
  _run(root, two, 2, 2, *ours, "--config.total_steps=2")
  # The run that init_from names trains on while ours is down.
  _run(root, base, 1, 4, "--config.total_steps=4")
  log = _run(root, two, 2, 2, *at_once)
  assert "reference of policy.kl: step 2 of" in log
  a, b = _train_lines(one), _train_lines(two)
  assert [x["tokens"] for x in a] == [x["tokens"] for x in b]
  kl = [[x["policy/kl"] for x in lines] for lines in (a, b)]
  assert kl[0][-1] > 1e-9
  assert kl[1] == pytest.approx(kl[0], rel=1e-3, abs=1e-9)


# Trains, process 1 from 40 s after the others on, as if compiling took longer.
LATE = """
import os, sys, time
from vigor_jax import experiment, train
build = experiment.build
def late(*arguments, **options):
  parts = build(*arguments, **options)
  time.sleep(40 * (os.environ["JAX_PROCESS_ID"] == "1"))
  return parts
experiment.build = late
sys.exit(train.main(sys.argv))
"""


@pytest.mark.extended
def test_a_process_may_come_late(root, tmp_path):
  workdir = str(tmp_path / "run")
  log = _run(root, workdir, 2, 2, "--config.reward.noise=0.3", command=(
    "-c", LATE, f"--config={root}/tests/multihost_config.py",
    f"--workdir={workdir}"))
  assert "step 3/3" in log
  # All connections were there before the first step, and none came later.
  opened = [i for i, line in enumerate(log.splitlines()) if "[Gloo]" in line]
  first = log[: log.index("step 1/3")].count("\n")
  assert opened and opened[-1] < first


@pytest.mark.extended
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_eight_devices_go_on_as_fewer(root, tmp_path, devices):
  workdir = str(tmp_path / "run")
  _run(root, workdir, 1, 8)
  log = _run(root, workdir, 1, devices, "--config.total_steps=5",
             f"--config.mesh.fsdp={min(2, devices)}")
  assert "resumed from step 3" in log and "step 5/5" in log


def _until(path, text, seconds=500):
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    if os.path.exists(path) and text in open(path).read():
      return
    time.sleep(0.2)
  raise AssertionError(f"{text!r} did not appear: {open(path).read()[-2000:]}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_the_job(root, tmp_path, number):
  workdir = str(tmp_path / "run")
  running = _start(root, workdir, 2, 2, "--config.total_steps=100000",
                   "--config.mesh.host_timeout=20")
  try:
    _until(f"{workdir}.0.log", " 4/100000")
    running[1].send_signal(number)
    begun = time.monotonic()
    assert running[0].wait(timeout=90) != 0
    assert time.monotonic() - begun < 60
  finally:
    for process in running:
      process.kill()
      process.wait()
  log = open(f"{workdir}.0.log").read()
  assert "error: process 0" in log or "distributed service" in log
  steps = max(checkpoints.Checkpoints(workdir).steps())
  log = _run(root, workdir, 2, 2, f"--config.total_steps={steps + 2}",
             "--config.mesh.host_timeout=20")
  assert f"resumed from step {steps}" in log


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(root, tmp_path):
  workdir = str(tmp_path / "run")
  running = _start(root, workdir, 2, 2, "--config.total_steps=100000")
  try:
    _until(f"{workdir}.0.log", " 4/100000")
    running[1].send_signal(signal.SIGTERM)
    codes = [process.wait(timeout=240) for process in running]
  finally:
    for process in running:
      process.kill()
      process.wait()
  assert codes == [128 + signal.SIGTERM] * 2
  assert "stopped by SIGTERM after step" in open(f"{workdir}.0.log").read()
