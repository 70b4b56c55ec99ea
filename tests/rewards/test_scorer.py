"""Order, overlap, limits and faults of the scorer and its pool."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vigor_jax import rewards
from vigor_jax.rewards import probing
from vigor_jax.rewards import pool as pool_lib


@pytest.fixture(scope="module")
def echo():
  with rewards.Scorer("sample_rewards:echo", workers=2) as scorer:
    yield scorer


def test_inline_scores_in_order():
  with rewards.Scorer("exact") as scorer:
    assert scorer.cheap
    out = scorer.score(["a", "b", "c "], ["a", "x", "c"])
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [1, 0, 1])
    assert scorer.pids == []


def test_pool_keeps_the_order_of_completions():
  with rewards.Scorer("sample_rewards:slow_first", workers=2) as scorer:
    scorer.score(["0"], ["0"])
    texts = ["0.1", "0.2", "0.3", "0.4"]
    out = scorer.score(texts, [".3", ".0", ".0", ".0"])
    np.testing.assert_array_equal(out, np.float32([0.1, 0.2, 0.3, 0.4]))


def test_submit_returns_before_the_verdicts(tmp_path):
  go_on = tmp_path / "go_on"
  with rewards.Scorer("sample_rewards:waits_for", workers=1) as scorer:
    handle = scorer.submit(["1"], [str(go_on)])
    assert not scorer.done(handle)
    go_on.touch()
    np.testing.assert_array_equal(scorer.collect(handle), [1])
    assert scorer.done(handle)


@pytest.mark.parametrize(
  "returned",
  [
    "[1.0, 0.0]",
    "None",
    "'1.0'",
    "float('nan')",
    "1.5",
    "-1",
    "(1,)",
    "10**400",
    "sys.exit(0)",
  ],
)
@pytest.mark.parametrize("name", ["echo", "cheap_echo"])
def test_bad_verdicts_are_errors_inline_and_pooled(name, returned, echo):
  scorer = (
    echo if name == "echo" else rewards.Scorer("sample_rewards:cheap_echo")
  )
  with pytest.raises(rewards.RewardError) as error:
    scorer.score(["1.0", returned], ["", ""])
  assert f"sample_rewards:{name}" in str(error.value)
  assert "completion 1" in str(error.value)


def test_inline_verdicts_are_those_of_one_reward_among_several():
  names = ["sample_rewards:cheap_echo", "1*sample_rewards:cheap_echo"]
  texts = ["1", "True", "0.25", "0", "0.5", "1.0"]
  for name in names:
    with rewards.Scorer(name) as scorer:
      handle = scorer.submit(texts, [""] * 6)
      assert scorer.done(handle)
      verdicts = scorer.collect(handle)
      assert verdicts.dtype == np.float32
      np.testing.assert_array_equal(verdicts, [1, 1, 0.25, 0, 0.5, 1])
      assert scorer.score([], []).shape == (0,)


def test_pool_goes_on_after_an_error(echo):
  with pytest.raises(rewards.RewardError):
    echo.score(["None"], [""])
  np.testing.assert_array_equal(echo.score(["0.5"], [""]), [0.5])


def test_exceptions_carry_the_name_and_the_traceback():
  with rewards.Scorer("sample_rewards:raises", workers=1) as scorer:
    with pytest.raises(rewards.RewardError) as error:
      scorer.score(["x"], ["y"])
  for word in ("sample_rewards:raises", "KeyError", "no such column", "line"):
    assert word in str(error.value)


def test_metadata_and_mode_reach_the_function():
  with rewards.Scorer("sample_rewards:graded", workers=1) as scorer:
    out = scorer.score(["12345"], [""], [{"scale": 0.5, "level": 3}])
    np.testing.assert_allclose(out, [0.25])
  with rewards.Scorer("sample_rewards:moded", mode="full", workers=1) as s:
    np.testing.assert_array_equal(s.score(["x"], [""]), [1])
  with pytest.raises(rewards.RewardError, match="'quarter'.*half, full"):
    rewards.Scorer("sample_rewards:moded", mode="quarter")
  with pytest.raises(rewards.RewardError, match="has no mode"):
    rewards.Scorer("exact", mode="full")


def test_inputs_are_checked():
  with rewards.Scorer("exact") as scorer:
    with pytest.raises(rewards.RewardError, match="2 completions, 1 answers"):
      scorer.submit(["a", "b"], ["a"])
    with pytest.raises(rewards.RewardError, match="answer 0 is 3, a int"):
      scorer.submit(["a"], [3])


def test_probe_names_the_fault_before_anything_runs():
  with rewards.Scorer("exact") as scorer:
    examples = rewards.probe_examples(["7"], [{"level": 1}])
    np.testing.assert_array_equal(scorer.probe(examples), [0, 1, 0])
    with pytest.raises(rewards.RewardError, match="nothing to probe"):
      scorer.probe([])
  with rewards.Scorer("sample_rewards:cheap_echo") as scorer:
    with pytest.raises(rewards.RewardError, match="start-up probe.*cheap_echo"):
      scorer.probe([("[1]", "x", {})])


@pytest.mark.parametrize("name, words", [
  ("slow_first", "given up 300 s after it began"),
  ("cheap_slow", "judged without a limit: Ctrl-C ends it"),
])  # fmt: skip
def test_probe_says_what_it_waits_for(name, words, monkeypatch, capsys):
  monkeypatch.setattr(probing, "FIRST", 0.02)
  with rewards.Scorer(f"sample_rewards:{name}", workers=1) as scorer:
    scorer.probe([("1", "0.0", {}), ("0.5", "0.2", {})])
  said = capsys.readouterr().err.splitlines()
  assert len(said) == 1 and words in said[0]
  assert f"start-up probe of reward sample_rewards:{name}: no verdict" in said[0]
  monkeypatch.setattr(probing, "FIRST", 60)
  with rewards.Scorer("exact") as scorer:
    scorer.probe([("1", "1", {})])
  assert not capsys.readouterr().err


def test_killed_worker_is_replaced_and_its_completion_judged_again(tmp_path):
  with rewards.Scorer("sample_rewards:kill_once", workers=2) as scorer:
    marker = str(tmp_path / "seen")
    texts = ["a", "victim", "b", "c"]
    np.testing.assert_array_equal(
      scorer.score(texts, [marker] * 4), [1, 1, 1, 1]
    )


def test_worker_killed_from_outside_in_the_middle():
  with rewards.Scorer("sample_rewards:slow_first", workers=1) as scorer:
    scorer.score(["0"], ["0"])
    handle = scorer.submit(["0.5", "1"], ["1.0", "0"])
    time.sleep(0.3)
    os.kill(scorer.pids[0], signal.SIGKILL)
    np.testing.assert_array_equal(scorer.collect(handle), [0.5, 1])


def test_a_worker_that_always_dies_is_an_error_not_a_zero():
  with rewards.Scorer("sample_rewards:kill_always", workers=1) as scorer:
    with pytest.raises(rewards.RewardError, match="3 worker processes died"):
      scorer.score(["victim"], [""])
    np.testing.assert_array_equal(scorer.score(["other"], [""]), [1])


def test_limits_cost_one_verdict_and_no_other():
  with rewards.Scorer("sample_rewards:spins", workers=2) as scorer:
    scorer.score(["x"], [""])
    start = time.monotonic()
    out = scorer.score(["a", "spin", "b", "sleep", "big", "c"], [""] * 6)
    np.testing.assert_array_equal(out, [1, 0, 1, 0, 0, 1])
    assert time.monotonic() - start < 100


def test_a_limit_without_a_stated_verdict_is_an_error():
  with rewards.Scorer("sample_rewards:hangs", workers=1) as scorer:
    with pytest.raises(rewards.RewardError, match="wall limit"):
      scorer.score(["x"], [""])


def test_waiting_for_a_core_is_not_counted(monkeypatch):
  waited = iter([0.0, 0.0, *[2.0] * 99])  # of "warm", then of the verdict
  monkeypatch.setattr(pool_lib, "_waited", lambda pid: next(waited))
  with rewards.Scorer("sample_rewards:naps", workers=1) as scorer:
    np.testing.assert_array_equal(scorer.score(["2"], [""]), [1])


def test_a_worker_that_does_not_start_is_no_verdict(monkeypatch):
  monkeypatch.setattr(pool_lib, "_START_LIMIT", 0.0)
  with rewards.Scorer("sample_rewards:spins", workers=1) as scorer:
    with pytest.raises(rewards.RewardError, match="not ready after 0 s"):
      scorer.score(["x"], [""])


def test_workers_import_no_heavy_module():
  with rewards.Scorer("sample_rewards:heavy_modules", workers=1) as scorer:
    np.testing.assert_array_equal(scorer.score(["x"], [""]), [0])


def test_a_script_without_a_main_guard_can_use_the_pool(tmp_path):
  """The trainer's main module is not imported again by workers."""
  script = tmp_path / "trainer.py"
  here = os.path.dirname(__file__)
  root = os.path.dirname(os.path.dirname(here))
  script.write_text(
    f"import sys; sys.path[:0] = [{here!r}, {root!r}]\n"
    "print('started')\n"
    "from vigor_jax import rewards\n"
    "s = rewards.Scorer('sample_rewards:good', workers=2)\n"
    "print(s.score(['a', 'b'], ['a', 'a']).tolist())\n"
    "print(*s.pids)\n"
  )
  out = subprocess.run(
    [sys.executable, str(script)], capture_output=True, text=True, timeout=300
  )
  assert out.returncode == 0, out.stderr
  first, verdicts, pids = out.stdout.splitlines()
  assert (first, verdicts) == ("started", "[1.0, 0.0]")
  _await_death([int(pid) for pid in pids.split()])


def _await_death(pids):
  deadline = time.monotonic() + 60
  alive = set(pids)
  while alive and time.monotonic() < deadline:
    for pid in list(alive):
      try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
          if stat.read().rpartition(")")[2].split()[0] == "Z":
            alive.discard(pid)
      except FileNotFoundError:
        alive.discard(pid)
    time.sleep(0.05)
  assert not alive


def test_close_ends_the_workers():
  scorer = rewards.Scorer("sample_rewards:slow_first", workers=2)
  scorer.score(["0", "0"], ["0.2", "0.2"])
  handle = scorer.submit(["0"], ["60"])
  time.sleep(0.2)
  pids = scorer.pids
  assert pids
  scorer.close()
  _await_death(pids)
  with pytest.raises(rewards.RewardError, match="closed"):
    scorer.collect(handle)


def test_cacheable_pairs_are_judged_once(tmp_path):
  log = tmp_path / "log"
  with rewards.Scorer("sample_rewards:counted", workers=1) as scorer:
    for _ in range(3):
      np.testing.assert_array_equal(scorer.score(["x"], [str(log)]), [0.25])
    assert log.read_bytes() == b"."
    scorer.score(["y"], [str(log)])
    assert log.read_bytes() == b".."


def test_combined_parts_are_judged_apart():
  name = "0.5*sample_rewards:spins + 0.5*exact"
  with rewards.Scorer(name, workers=1) as scorer:
    out = scorer.score(["spin", "x"], ["spin", "y"])
    np.testing.assert_allclose(out, [0.5, 0.5])


def test_functions_workers_cannot_import_are_refused():
  def local(completion, answer, **metadata):
    return 1.0

  with pytest.raises(rewards.RewardError, match="module-level"):
    rewards.Scorer(local)
  local.cheap = True
  with rewards.Scorer(local) as scorer:
    np.testing.assert_array_equal(scorer.score(["x"], [""]), [1])


def test_pool_needs_a_worker():
  with pytest.raises(ValueError, match="at least 1"):
    pool_lib.Pool(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal")
def test_a_hung_worker_ends_with_a_killed_trainer():
  program = (
    "import sys; sys.path[:0] = sys.argv[1:]\n"
    "from vigor_jax.rewards import scorer; import time\n"
    "s = scorer.Scorer('sample_rewards:slow_first', workers=1)\n"
    "h = s.submit(['x'], ['600'])\n"
    "while not s.pids: time.sleep(0.05)\n"
    "time.sleep(1); print(*s.pids, flush=True); s.collect(h)\n"
  )
  trainer = subprocess.Popen(
    [sys.executable, "-c", program, os.path.dirname(__file__)],
    stdout=subprocess.PIPE,
  )
  worker = int(trainer.stdout.readline())
  assert os.path.exists(f"/proc/{worker}")
  trainer.kill()
  trainer.wait()
  deadline = time.monotonic() + 60
  while _alive(worker):
    assert time.monotonic() < deadline
    time.sleep(0.05)


def _alive(pid):
  try:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
      return stat.read().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False
