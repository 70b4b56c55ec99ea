"""The grid of a comparison, and its verdict, on runs that are not trained."""

import io
import json
import math
import pathlib
import subprocess
import sys
import time

import fake_runs
import pytest

from vigor_jax import compare
from vigor_jax import config as configuration
from vigor_jax.config import ConfigError
from vigor_jax.grid import cells
from vigor_jax.grid import workers
from vigor_jax.reporting import pooled
from vigor_jax.reporting import runs
from vigor_jax.reporting import verdict
from vigor_jax.reporting import wording

# ------------------------------------------------------------- what was asked


@pytest.fixture
def base():
  config = configuration.default_config()
  config.total_steps = 12
  return config


def test_entries():
  assert cells.split_entries("a, b:c=(1,2),d") == ["a", "b:c=(1,2)", "d"]
  assert cells.parse_entry("uniform") == ("uniform", {})
  assert cells.parse_entry("vigor:rounds=2;keep=0.25") == (
      "vigor", {"rounds": "2", "keep": "0.25"})
  assert cells.parse_entry("a:reward.name=my.module:function:seed=1") == (
      "a", {"reward.name": "my.module:function", "seed": "1"})
  assert cells.parse_entry("task.difficulty=plain") == (
      "", {"task.difficulty": "plain"})
  assert cells.parse_seeds("0,3-5") == [0, 3, 4, 5]


def test_grid_order_labels_and_configs(base):
  grid = cells.make(
      base, "uniform:prompts_per_step=64,vigor:rounds=2:initial_rollouts=4",
      "0,1", ["task.difficulty=sparse_signal,easy:task.difficulty=plain"])
  assert [cell.text for cell in grid[:4]] == [
      "sparse_signal uniform:prompts_per_step=64 seed 0",
      "sparse_signal vigor:rounds=2:initial_rollouts=4 seed 0",
      "sparse_signal uniform:prompts_per_step=64 seed 1",
      "sparse_signal vigor:rounds=2:initial_rollouts=4 seed 1"]
  assert {cell.variant for cell in grid} == {"sparse_signal", "easy"}
  assert grid[0].name == "sparse_signal-uniform-prompts_per_step-64-seed0"
  resolved = cells.config_of(grid[7])
  assert resolved.task.difficulty == "plain"
  assert resolved.allocation.vigor.rounds == 2
  assert (resolved.seed, resolved.prompts_per_step) == (1, 32)
  assert cells.config_of(grid[4]).prompts_per_step == 64


@pytest.mark.parametrize("allocators, seeds, variants, message", [
    ("vigr", "0", [], "did you mean 'vigor'"),
    ("uniform,prompts_per_step=64", "0", [], "joined to it by ':'"),
    ("vigor:round=2", "0", [], "vigor:round=2: .*did you mean 'rounds'"),
    ("vigor:rounds=two", "0", [], "rounds"),
    ("uniform:prompts_per_step=100", "0", [], "uniform:prompts_per_step=100"),
    ("vigor:rounds=2:rounds=3", "0", [], "sets rounds twice"),
    ("uniform,uniform", "0", [], "'uniform' is there twice"),
    ("uniform", "0,zero", [], "'zero'"),
    ("uniform", "1,0-2", [], "different seeds"),
    ("uniform", "0-99999999999", [], "more than 1000 seeds"),
    ("uniform", "99999999999", [], "seed: must lie in"),
    ("", "0", [], "--allocators is empty"),
    # Fields that the grid sets itself: they would be lost without a word.
    ("uniform:seed=3", "0", [], "'uniform:seed=3' sets seed.*--seeds"),
    ("vigor:allocation.name=uniform", "0", [], "sets allocation.name"),
    ("uniform", "0", ["a:seed=1"], "--variants: 'a:seed=1' sets seed"),
    ("uniform", "0", ["allocation.name=vigor"], "--variants.*allocation.name"),
    ("uniform", "0", ["plain"], "changes nothing"),
    ("uniform", "0", ["task.dificulty=plain"], "task.difficulty"),
])
def test_what_cannot_be_run_is_refused(base, allocators, seeds, variants,
                                       message):
  with pytest.raises(ConfigError, match=message):
    cells.make(base, allocators, seeds, variants)


def test_unknown_baseline_is_refused(base):
  grid = cells.make(base, "uniform,vigor", "0", [])
  assert compare._choose_baseline(grid, "") == "uniform"
  with pytest.raises(ConfigError, match="did you mean 'vigor'"):
    compare._choose_baseline(grid, "vigo")


# ------------------------------------------------------------------- the grid


def _compare(base, folder, **options):
  said = io.StringIO()
  settings = {"allocators": "uniform,vigor", "seeds": "0,1", "jobs": 1,
              "command": "the command", "run": fake_runs.run_cell, **options}
  try:
    code = compare.compare(base, str(folder), file=said, **settings)
  except KeyboardInterrupt:
    code = 130
  calls = folder / "calls.txt"
  done = calls.read_text().split("\n")[:-1] if calls.exists() else []
  if calls.exists():
    calls.unlink()
  return code, said.getvalue(), done


@pytest.fixture
def without_figures(monkeypatch):
  """For tests of the grid alone: drawing takes longer than all the rest."""
  monkeypatch.setattr(compare.report, "build", lambda folders, out: "none")


def _record(folder):
  return json.loads((folder / "compare.json").read_text())


def test_grid_runs_once_and_writes_everything(base, tmp_path):
  base.init_from = "auto"
  code, said, done = _compare(base, tmp_path)
  assert code == 0
  assert done == ["warm start uniform-seed0", "run uniform-seed0",
                  "run vigor-seed0", "run uniform-seed1", "run vigor-seed1"]
  assert "[4/4] vigor seed 1: accuracy" in said and "left" in said
  assert {cell["state"] for cell in _record(tmp_path)["cells"]} == {"done"}
  assert "| vigor | " in (tmp_path / "compare.md").read_text()
  page = (tmp_path / "report.html").read_text()
  assert "the command" in page and "Cost to the same accuracy" in page


def test_a_finished_grid_has_nothing_to_do(base, tmp_path, without_figures):
  _compare(base, tmp_path, seeds="0")
  code, said, done = _compare(base, tmp_path, seeds="0")
  assert (code, done) == (0, [])
  assert "2 cells, 2 of them finished already" in said


def test_a_failing_cell_is_reported_and_the_others_go_on(
  base, tmp_path, capsys
):
  (tmp_path / "vigor-seed0.fail").touch()
  code, said, done = _compare(base, tmp_path)
  assert "Traceback" not in capsys.readouterr().err  # It is told in words.
  assert code == 1 and len(done) == 4
  assert "FAILED vigor seed 0: the reward returned 3, outside [0, 1]" in said
  states = {c["name"]: c["state"] for c in _record(tmp_path)["cells"]}
  assert states == {"uniform seed 0": "done", "vigor seed 0": "failed",
                    "uniform seed 1": "done", "vigor seed 1": "done"}
  page = (tmp_path / "report.html").read_text()
  assert "1 of 4 cells are missing" in page and "returned 3" in page
  code, _, done = _compare(base, tmp_path)
  assert (code, done) == (0, ["run vigor-seed0"])


def test_interrupted_grid_continues(base, tmp_path, without_figures):
  (tmp_path / "uniform-seed1.stop").touch()
  code, _, done = _compare(base, tmp_path)
  assert code == 130 and done[-1] == "run uniform-seed1"
  states = [c["state"] for c in _record(tmp_path)["cells"]]
  assert states == ["done", "done", "missing", "missing"]
  code, said, done = _compare(base, tmp_path)
  assert (code, done) == (0, ["run uniform-seed1", "run vigor-seed1"])
  assert "2 of them finished already" in said


def test_a_cell_with_another_config_is_refused(base, tmp_path,
                                               without_figures):
  _compare(base, tmp_path, seeds="0")
  base.rollout_budget = 512
  with pytest.raises(ConfigError, match="uniform-seed0 holds a run with "
                     "another configuration:\n  rollout_budget: 256 -> 512"):
    compare.compare(base, str(tmp_path), allocators="uniform", seeds="0",
                    jobs=1, run=fake_runs.run_cell)
  base.rollout_budget = 256
  base.total_steps = 24  # may change: the runs go on
  code, _, done = _compare(base, tmp_path, seeds="0")
  assert (code, done) == (0, ["run uniform-seed0", "run vigor-seed0"])


def test_two_workers_survive_a_killed_one(base, tmp_path, without_figures):
  (tmp_path / "uniform-seed0.kill").touch()
  (tmp_path / "vigor-seed1.fail").touch()
  code, said, done = _compare(base, tmp_path, jobs=2)
  assert code == 1 and len(done) == 4
  assert "FAILED uniform seed 0: its process was ended by SIGKILL" in said
  assert "FAILED vigor seed 1: the reward returned 3" in said
  states = [c["state"] for c in _record(tmp_path)["cells"]]
  assert states == ["failed", "done", "done", "failed"]
  (tmp_path / "uniform-seed0.stop").touch()
  code, _, _ = _compare(base, tmp_path, jobs=2)
  assert code == 130
  code, _, done = _compare(base, tmp_path, jobs=2)
  assert code == 0 and "run uniform-seed0" in done


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_a_killed_parent(tmp_path):
  program = (
    "import sys; sys.path[:0] = sys.argv[1:2]\n"
    "import fake_runs; from vigor_jax.grid import workers\n"
    "def notify(kind, task, value):\n"
    "  if kind == 'progress': print('running', flush=True)\n"
    "if __name__ == '__main__':\n"
    "  workers.run_pool([['a', 'b']], fake_runs.until_stopped, notify, jobs=2,\n"
    "                   log_folder=sys.argv[2])\n"
  )
  script = tmp_path / "script.py"
  script.write_text(program)
  parent = subprocess.Popen(
    [sys.executable, script, pathlib.Path(__file__).parent, tmp_path],
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  for _ in range(2):
    assert parent.stdout.readline() == b"running\n"
  children = _children(parent.pid)
  parent.kill()
  parent.wait()
  assert len(children) >= 2
  deadline = time.monotonic() + 60
  while any(map(_alive, children)):
    assert time.monotonic() < deadline, "a worker goes on alone"
    time.sleep(0.05)


def _children(pid):
  tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
  return [int(child) for task in tasks for child in task.read_text().split()]


def _alive(pid):
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return stat.rpartition(")")[2].split()[0] != "Z"


def test_interruption_lets_workers_save_first(tmp_path):
  tasks = [str(tmp_path / "a"), str(tmp_path / "b")]
  running = set()

  def notify(kind, task, value):
    if kind == "progress":
      running.add(task)
    if len(running) == 2:
      raise KeyboardInterrupt  # as Ctrl-C does, at any point of the loop

  begun = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    workers.run_pool([tasks], fake_runs.until_stopped, notify, jobs=2,
                     log_folder=tmp_path)
  assert time.monotonic() - begun < workers.PATIENCE / 2
  assert [pathlib.Path(task).read_text() for task in tasks] == ["saved"] * 2


def test_variants_have_a_section_each(base, tmp_path):
  base.init_from = "auto"
  code, said, _ = _compare(
      base, tmp_path, seeds="0", variants=[
          "task.difficulty=sparse_signal", "task.difficulty=plain"])
  assert code == 0
  assert "== sparse_signal ==" in said and "Overall:" in said
  assert "warm start of sparse_signal ready after" in said
  assert "warm start of plain is that of sparse_signal: warm_starts/" in said
  page = (tmp_path / "report.html").read_text()
  assert "<h2>sparse_signal</h2>" in page and "<h2>plain</h2>" in page
  assert (tmp_path / "plots" / "plain-ratios.png").exists()
  assert set(_record(tmp_path)["results"]) == {"sparse_signal", "plain"}


def test_command_line_refuses_before_any_work(tmp_path, capsys):
  path = tmp_path / "c.py"
  path.write_text("from vigor_jax.config import default_config\n"
                  "get_config = default_config\n".replace(
                      "get_config = default_config",
                      "def get_config():\n  return default_config()"))
  for flags, message in (
      (["--alocators=uniform"], "did you mean --allocators?"),
      (["--allocators=unifrm"], "did you mean 'uniform'"),
      (["--baseline=greso"], "--baseline: 'greso' is none of the rules")):
    with pytest.raises(SystemExit) as stop:
      compare.main(["compare", f"--config={path}",
                    f"--workdir={tmp_path / 'w'}", *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
  assert not (tmp_path / "w").exists()


# ----------------------------------------------------------------- the verdict


def _run(label, seed, rollouts, accuracy, *, allocator="uniform", seconds=1.0,
         total=None, zero=0.8):
  """A run of three steps whose curve is the given one."""
  steps = range(1, len(rollouts))
  train = [{"step": s, "rollouts": rollouts[s], "tokens": 10 * rollouts[s],
            "time/decode": seconds, "groups/zero_variance_share": zero,
            "groups/mixed": 6, "compiles": 4} for s in steps]
  evals = [{"step": s, "rollouts": r, "tokens": 10 * r, "eval/accuracy": a}
           for s, (r, a) in enumerate(zip(rollouts, accuracy))]
  return runs.Run(
      folder=None, train=train, evals=evals, groups=[], samples=[], notes=[],
      config={"seed": seed, "total_steps": total or len(train),
              "allocation": {"name": allocator},
              "evaluation": {"num_prompts": 100000,
                             "samples_per_prompt": 1}},
      label=label)


X = [0, 100, 200, 300, 400]


def test_verdict_by_hand():
  # The baseline rises in a straight line, which smoothing leaves alone; the
  # rule rises twice as fast and stays there.
  line = [0.2, 0.3, 0.4, 0.5, 0.6]
  rules = {
      "uniform": [_run("uniform", s, X, line) for s in (0, 1, 2)],
      "vigor": [_run("vigor", s, [x / 2 for x in X], line, allocator="vigor",
                     seconds=1.0) for s in (0, 1, 2)],
  }
  result = verdict.analyse(rules, "uniform")
  assert [t["accuracy"] for t in result["targets"]] == pytest.approx(
      [0.4, 0.54])
  spent = result["rules"]["uniform"]["to_target"]
  assert spent[0]["rollouts"]["mean"] == pytest.approx(200)
  assert spent[1]["tokens"]["mean"] == pytest.approx(3400)
  ratio = result["rules"]["vigor"]["ratio"]
  assert ratio[0]["rollouts"]["value"] == pytest.approx(2.0)
  assert ratio[1]["tokens"]["value"] == pytest.approx(2.0)
  # Half the rollouts per step, but as many seconds per step: no time saved.
  assert ratio[1]["seconds"]["value"] == pytest.approx(1.0)
  text = " ".join(result["sentences"])
  assert "2.00 times fewer rollouts than uniform" in text
  assert "stream of sparse signal" in text and "20 % of the groups" in text
  json.dumps(result, allow_nan=False)


def test_verdict_says_bad_news_plainly():
  line = [0.2, 0.3, 0.4, 0.5, 0.6]
  slow = [0.2, 0.255, 0.31, 0.365, 0.42]  # 0.4 after 363.6 rollouts
  rules = {
      "uniform": [_run("uniform", s, X, line) for s in (0, 1, 2)],
      "vigor": [_run("vigor", s, X, slow, allocator="vigor") for s in (0, 1, 2)],
  }
  result = verdict.analyse(rules, "uniform")
  text = " ".join(result["sentences"])
  assert "worse, 1.82 times the rollouts of uniform" in text
  # The 85 % target was never reached: a bound, and the runs are named.
  ratio = result["rules"]["vigor"]["ratio"][1]["rollouts"]
  assert ratio["bound"] == "at most" and ratio["value"] == pytest.approx(0.85)
  assert "at least 1.18 times the rollouts of uniform" in text
  assert "vigor: seeds 0, 1, 2 did not reach the 85% target" in text
  _, (title, header, rows) = wording.tables(result)
  assert title == "To 54.0 %, 85% of the rise of uniform"
  assert rows[1][2:4] == ["> 0.4 k", "> 4.0 k (≤ 0.85x)"]
  assert len(header) == len(rows[1])


def test_verdict_against_the_best_uniform_split():
  line = [0.2, 0.3, 0.4, 0.5, 0.6]
  def at(label, factor, allocator="uniform"):
    return [_run(label, s, [x * factor for x in X], line, allocator=allocator)
            for s in (0, 1, 2)]
  rules = {"uniform": at("uniform", 1), "uniform:n=4": at("uniform:n=4", 0.5),
           "vigor": at("vigor", 0.5, "vigor")}
  result = verdict.analyse(rules, "uniform")
  assert result["best_uniform"][0]["rollouts"] == "uniform:n=4"
  other = result["rules"]["vigor"]["ratio_best_uniform"][1]["rollouts"]
  assert other["value"] == pytest.approx(1.0)
  text = " ".join(result["sentences"])
  assert "The best uniform split on record is uniform:n=4" in text
  assert "cannot tell it from the best uniform split (1.00" in text
  assert result["rules"]["uniform:n=4"]["ratio_best_uniform"][0][
      "rollouts"] is None
  [overall] = wording.overall({"plain": result})
  assert overall.startswith("plain (sparse signal), to 54.0 %: vigor 2.00 ")


def test_a_baseline_that_did_not_learn_gives_no_targets():
  flat = [0.3, 0.3, 0.301, 0.3, 0.3]
  rules = {"uniform": [_run("uniform", 0, X, flat)],
           "vigor": [_run("vigor", 0, X, flat, allocator="vigor")]}
  result = verdict.analyse(rules, "uniform")
  assert result["targets"] == []
  assert "did not learn" in " ".join(result["sentences"])
  assert "no target" in wording.overall({"x": result})[0]
  [(_, header, rows)] = wording.tables(result)
  assert header == ["rule", "final accuracy"] and len(rows) == 2


def test_mean_curve_reaches_the_end_of_every_seed():
  line = [0.2, 0.3, 0.4, 0.5, 0.6]
  fast, slow = _run("u", 0, X, line), _run("u", 1, X, line, seconds=3.0)
  curve = pooled.mean_curve([fast, slow], "seconds")
  assert curve.x == pytest.approx([0, 2, 4, 6, 8])  # means of s and 3 s
  assert curve.mean == pytest.approx(line)


def test_single_seed_has_no_spread():
  line = [0.2, 0.3, 0.4, 0.5, 0.6]
  rules = {"uniform": [_run("uniform", 0, X, line)],
           "vigor": [_run("vigor", 0, [x / 2 for x in X], line,
                          allocator="vigor")]}
  result = verdict.analyse(rules, "uniform")
  ratio = result["rules"]["vigor"]["ratio"][0]["rollouts"]
  assert ratio["low"] is None and math.isclose(ratio["value"], 2.0)
  assert ("cannot tell it from uniform by one pair of runs (2.00 times fewer "
          "rollouts)") in " ".join(result["sentences"])


def _against(value, low, high, pairs=3, bound=""):
  ratio = {"value": value, "low": low, "high": high, "bound": bound,
           "per_seed": dict.fromkeys(range(pairs), value)}
  return wording._difference(ratio, "uniform")


@pytest.mark.parametrize("ratio, words", [
    ((1.5, 1.2, 1.8), "1.50 times fewer rollouts than uniform [1.20, 1.80]"),
    ((0.5, 0.4, 0.8), "worse, 2.00 times the rollouts of uniform [1.25, 2.50]"),
    # The interval spans 1, or too few pairs: neither way.
    ((1.5, 0.9, 1.8), "one cannot tell it from uniform (1.50 times fewer rollouts, "
     "but the interval [0.90, 1.80] spans 1)"),
    ((0.8, 0.5, 1.25), "one cannot tell it from uniform (1.25 times the rollouts, "
     "but the interval [0.80, 2.00] spans 1)"),
    ((1.5, 1.2, 1.8, 2), "one cannot tell it from uniform by 2 pairs of runs "
     "(1.50 times fewer rollouts [1.20, 1.80])"),
    # Bounds say something only on their own side.
    ((1.5, 1.2, 1.8, 3, "at least"),
     "at least 1.50 times fewer rollouts than uniform [1.20, 1.80]"),
    ((0.5, 0.4, 0.8, 3, "at most"), "worse, at least 2.00 times the rollouts "
     "of uniform [1.25, 2.50] (runs of it never got there)"),
    ((0.5, 0.4, 0.8, 3, "at least"), "one cannot tell it from uniform (at most "
     "2.00 times the rollouts, interval [1.25, 2.50] of the bound)"),
    ((1.5, 1.2, 1.8, 3, "at most"), "one cannot tell it from uniform (at most 1.50 "
     "times fewer rollouts, interval [1.20, 1.80] of the bound) (runs of it "
     "never got there)"),
])
def test_a_difference_is_claimed_only_when_it_is_seen(ratio, words):
  assert _against(*ratio) == words


@pytest.mark.parametrize("zero, words", [
    (0.9, "sparse signal"), (0.75, "moderate signal"), (0.6, "dense signal")])
def test_kind_of_stream(zero, words):
  run = _run("uniform", 0, X, [0.2, 0.3, 0.4, 0.5, 0.6], zero=zero)
  result = verdict.analyse({"uniform": [run]}, "uniform")
  assert result["stream"]["kind"] == words
  assert words in result["sentences"][0]


def test_unfinished_runs_are_called_provisional():
  line = [0.2, 0.3, 0.4, 0.5, 0.6]
  rules = {"uniform": [_run("uniform", 0, X, line)],
           "vigor": [_run("vigor", 0, X, line, allocator="vigor", total=50)]}
  text = " ".join(verdict.analyse(rules, "uniform")["sentences"])
  assert "vigor: seed 0 stopped before the last step" in text
