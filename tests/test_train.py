"""Training end to end on a tiny policy: budgets, resumes, signals, records."""

import dataclasses
import json
import shlex
import shutil

import jax
import numpy as np
import pytest
import tiny_runs

from vigor_jax import allocation, compilation, experiment, measure, rollouts
from vigor_jax import step as step_lib
from vigor_jax import train as train_lib
from vigor_jax.allocation import base
from vigor_jax.config import ConfigError, default_config, load_file
from vigor_jax.policy import batch as batch_lib
from vigor_jax.policy import build
from vigor_jax.sampling import settings as settings_lib

BUDGET = tiny_runs.BUDGET
# Rules that may leave rollouts of the budget undrawn.
MAY_STOP = {"dynamic_sampling", "greso", "reinforce_ada", "pilot_commit",
            "speed", "streaming_vigor", "eb_streaming"}  # fmt: skip


def run(config, folder, **options):
  return train_lib.train(config, str(folder), quiet=True, **options)


def killed(config, folder, step):
  """Runs until the line of `step` is written, and no further."""
  with pytest.raises(tiny_runs.Killed):
    run(config, folder, progress=tiny_runs.KilledAt(step))


# Every rule.


@pytest.mark.parametrize("name", allocation.REGISTRY)
def test_every_allocator_trains_within_its_budget(name, tmp_path):
  config = tiny_runs.config(name, total_steps=2, evaluation__every_steps=0,
                            task__num_prompts=48)  # fmt: skip
  summary = run(config, tmp_path)
  first, second = tiny_runs.steps_of(tmp_path)
  before = 0
  for line in (first, second):
    drawn = line["rollouts"] - before
    before = line["rollouts"]
    assert drawn == sum(line["allocation/rounds"])
    if name in MAY_STOP:
      assert 0 < drawn <= BUDGET
    else:
      assert drawn == BUDGET
    assert 0 < line["reward/mean"] < 1 and line["groups/mixed"] > 0
    assert 0 < line["slots/utilisation"] <= 1
    assert line["policy/sampler_trainer_logprob_gap"] < 1e-4
  assert summary["rollouts"] == second["rollouts"]
  assert second["tokens"] >= second["rollouts"]
  groups = tiny_runs.lines(tmp_path, "groups.jsonl")
  for line, drawn in zip(groups, (first, second)):
    assert sum(line["n"]) == sum(drawn["allocation/rounds"])
    assert sum(line["sum"]) == pytest.approx(
      drawn["reward/mean"] * sum(line["n"]), abs=1e-4
    )


# The first step, by hand.


def collected(name, **changes):
  """(config, groups, buffer, batch) of one step of a rule."""
  config = tiny_runs.config(name, seed=5, **changes)
  with experiment.build(config) as parts:
    collector = rollouts.Collector(parts)
    step = collector.collect(parts.fresh_params(0), 0, measure.PhaseTimer())
    batch = batch_lib.make_batch(
      step.buffer, step.groups, parts.allocator, step.prompts.tokens,
      build.estimator_of(config), seed=5, step=0,
    )  # fmt: skip
  return step, batch


def test_what_needs_no_update_is_done_before_waiting_for_it(monkeypatch):
  config, seen = tiny_runs.config("uniform"), []
  with experiment.build(config) as parts:
    step = step_lib.TrainingStep(parts)
    state = parts.updater.init(parts.fresh_params(0))
    timer = measure.PhaseTimer()
    collected = step.collect(state.params, 0, timer)
    expected = collected.metrics(), collected.group_record()
    weights = parts.sampler._weights
    for owner, name in [
      (collected, "metrics"), (collected, "group_record"),
      (weights, "prepare"), (step_lib.update_lib, "averaged"),
    ]:  # fmt: skip
      run_it = getattr(owner, name)
      monkeypatch.setattr(
        owner, name,
        lambda *a, it=run_it, name=name: seen.append(name) or it(*a),
      )  # fmt: skip
    state, done = step.learn(state, collected, 0, timer)
    assert seen[-1] == "averaged"
    assert sorted(seen[:-1]) == ["group_record", "metrics", "prepare"]
    assert done.metrics().items() >= expected[0].items()
    assert done.group_record == expected[1]
    # The next step has its weights.
    step.collect(state.params, 1, timer)
    assert seen.count("prepare") == 1


def by_address(step):
  """{(position in the stream, sample): (tokens, log-probs, reward)}."""
  buffer = step.buffer
  return {
    (int(step.groups.positions[buffer.group[i]]), int(buffer.sample[i])): (
      buffer.tokens[i, : buffer.lengths[i]].tolist(),
      buffer.logprobs[i, : buffer.lengths[i]],
      float(buffer.reward[i]),
    )
    for i in range(buffer.size)
  }


@pytest.fixture(scope="module")
def uniform():
  return collected("uniform")


@pytest.mark.parametrize("name", ["vigor", "eb_widening", "streaming_vigor"])
def test_rules_share_their_common_rollouts(uniform, name):
  a, b = by_address(uniform[0]), by_address(collected(name)[0])
  common = a.keys() & b.keys()
  assert len(common) >= 16 and a.keys() != b.keys()
  for key in common:
    assert a[key][0] == b[key][0] and a[key][2] == b[key][2]
    np.testing.assert_allclose(a[key][1], b[key][1], rtol=0, atol=1e-5)


def test_verdicts_are_flipped_by_address(uniform):
  clean = by_address(uniform[0])
  noisy = {
    name: by_address(collected(name, reward__noise=0.25)[0])
    for name in ("uniform", "vigor")
  }
  assert clean.keys() == noisy["uniform"].keys()
  flipped = [clean[k][2] != noisy["uniform"][k][2] for k in clean]
  # 64 flips at .25: 16, give or take 3.5.
  assert 5 <= sum(flipped) <= 28
  for key in noisy["uniform"].keys() & noisy["vigor"].keys():
    assert noisy["uniform"][key][2] == noisy["vigor"][key][2]


def test_the_batch_holds_what_the_rewards_say(uniform):
  step, batch = uniform
  buffer = step.buffer
  for group in np.unique(buffer.group):
    at = buffer.group[batch.order] == group
    rewards = buffer.reward[batch.order][at]
    np.testing.assert_allclose(
      batch.advantages[at], rewards - rewards.mean(), atol=1e-6
    )
  assert batch.active == np.count_nonzero(batch.advantages)


# The record.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """{name: folder} of complete runs of six steps, made when asked for."""
  folder, made = tmp_path_factory.mktemp("undisturbed"), {}

  def of(name):
    if name not in made:
      made[name] = folder / name
      run(tiny_runs.config(**RUNS[name]), made[name])
    return made[name]

  return of


SIX = dict(total_steps=6, checkpoint__every_steps=2, evaluation__every_steps=3)
RUNS = {
  "vigor": dict(name="vigor", **SIX),
  # Prompts that are not opened return to the head; history; second epoch.
  "eb_widening": dict(name="eb_widening", task__num_prompts=60, **SIX,
                      evaluation__fresh_rollouts=4),
  # Looks at more prompts than it opens, skips some, learns to predict.
  "eb_predicted": dict(name="eb_predicted", **SIX),
  "streaming": dict(name="streaming_vigor", **SIX),
  "greso": dict(name="greso", task__num_prompts=30, **SIX),
  # 16 prompts at 8 a step: checkpoints lie exactly at the ends of epochs.
  "epochs": dict(name="uniform", task__num_prompts=16, **SIX),
  "several updates": dict(
    name="vigor", policy__updates_per_step=2, policy__minibatches=2,
    policy__old_logprobs="trainer", policy__kl__coef=0.1, **SIX),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_with_the_same_numbers(name, undisturbed, tmp_path):
  config = tiny_runs.config(**RUNS[name])
  killed(config, tmp_path, 3)  # Back to step 2.
  killed(config, tmp_path, 4)  # Step 4 was not saved: back to 2 again.
  killed(config, tmp_path, 6)
  summary = run(config, tmp_path)
  tiny_runs.same(undisturbed(name), tmp_path)
  other = tiny_runs.summary(undisturbed(name))
  for key in ("rollouts", "tokens", "step", "allocation", "reward"):
    assert summary[key] == other[key]
  strip = lambda curve: [
    {k: v for k, v in point.items() if not k.startswith(tiny_runs.VOLATILE)}
    for point in curve
  ]
  assert strip(summary["curve"]) == strip(other["curve"])


def test_epochs_end_where_the_set_does(undisturbed):
  _, host = tiny_runs.arrays(undisturbed("epochs"))
  assert (host["stream"]["next"], host["stream"]["epoch"]) == (48, 3.0)
  assert host["counters"]["rollouts"] == 6 * BUDGET


def test_a_killed_start_starts_again(undisturbed, tmp_path):
  config = tiny_runs.config(**RUNS["vigor"])
  killed(config, tmp_path, 1)
  run(config, tmp_path)
  tiny_runs.same(undisturbed("vigor"), tmp_path)


def test_raising_total_steps_continues(undisturbed, tmp_path):
  short = tiny_runs.config(**(RUNS["vigor"] | {"total_steps": 3}))
  assert run(short, tmp_path)["step"] == 3
  assert run(tiny_runs.config(**RUNS["vigor"]), tmp_path)["step"] == 6
  tiny_runs.same(undisturbed("vigor"), tmp_path)


def test_a_complete_run_returns_its_summary_at_once(
  undisturbed, tmp_path, monkeypatch, capsys
):
  folder = undisturbed("vigor")
  monkeypatch.setattr(experiment, "build", None)  # Nothing is built.
  summary = train_lib.train(tiny_runs.config(**RUNS["vigor"]), str(folder))
  assert summary == tiny_runs.summary(folder)
  assert "is complete (6 steps); raise total_steps" in capsys.readouterr().out


def test_the_first_update_is_on_policy(undisturbed):
  lines = tiny_runs.steps_of(undisturbed("vigor"))
  for line in lines:
    assert line["policy/ratio_max_deviation"] < 1e-4
    assert line["policy/sampler_trainer_logprob_gap"] < 1e-4
    # Advantages of a group sum to 0, so at ratio 1 the loss does.
    assert abs(line["policy/loss"]) < 1e-5 and line["policy/grad_norm"] > 1e-3
    assert line["policy/clip_share"] == 0
  several = tiny_runs.steps_of(undisturbed("several updates"))
  assert max(line["policy/ratio_max_deviation"] for line in several) > 1e-3
  assert several[-1]["policy/kl"] > 0


def test_samples_have_reward_and_advantage(undisturbed):
  lines = tiny_runs.lines(undisturbed("vigor"), "samples.jsonl")
  assert [line["step"] for line in lines] == [0, 3, 6]
  trained = [s for line in lines for s in line["samples"] if "advantage" in s]
  assert len(trained) == 8 and all(s["source"] == "training" for s in trained)
  for sample in trained:
    assert sample["prompt"].endswith("=") and sample["advantage"] != 0
    assert sample["reward"] == tiny_runs.parity(sample["completion"], "")
    assert (sample["advantage"] > 0) == (sample["reward"] == 1)
  held_out = [s for s in lines[0]["samples"]]
  assert held_out and all({"prompt", "completion", "reward"} <= s.keys()
                          for s in held_out)  # fmt: skip


def test_every_key_is_documented(undisturbed, is_documented):
  for name in ("vigor", "several updates", "eb_widening"):
    for line in tiny_runs.lines(undisturbed(name)):
      assert not [key for key in line if not is_documented(key)]


def test_time_by_phase_adds_up(undisturbed):
  before = 0.0
  for line in tiny_runs.steps_of(undisturbed("vigor")):
    phases = sum(v for k, v in line.items()
                 if k.startswith("time/") and k != "time/wait")  # fmt: skip
    assert 0 < phases
    # Evaluations and checkpoints between steps are not in the step's phases.
    assert line["seconds"] - before > 0.5 * phases
    before = line["seconds"]


def test_slots_are_chosen_once(tmp_path, capsys, monkeypatch):
  options = dict(sampling__slots=0, total_steps=1, evaluation__every_steps=0)
  train_lib.train(tiny_runs.config("uniform", **options), str(tmp_path))
  said = capsys.readouterr().out
  assert f": {BUDGET} slots" in said and said.index("cache ") < said.index("step")
  stored = json.loads((tmp_path / "config.json").read_text())
  assert stored["sampling"]["slots"] == BUDGET
  # On a machine with less memory the run keeps its shapes.
  monkeypatch.setattr(settings_lib, "device_memory", lambda devices: 0)
  options["total_steps"] = 2
  train_lib.train(tiny_runs.config("uniform", **options), str(tmp_path))
  said = capsys.readouterr().out
  assert f": {BUDGET} slots" in said and "resumed from step 1" in said
  # Nor does it matter what is said to choose from, once they are chosen: the
  # run's own config.json continues it, and then the first command again.
  path = tmp_path / "config.json"
  own = load_file(str(path))
  assert own.sampling.slots == BUDGET
  assert run(own, tmp_path)["total_steps"] == 2
  with pytest.raises(ValueError, match="sampling.slots"):
    run(tiny_runs.config("uniform", **options), tmp_path / "new")


@pytest.mark.slow
def test_the_reference_stays_where_the_run_began(tmp_path):
  """The run that init_from names trains on while ours is down."""
  source, ours, other = (tmp_path / name for name in ("source", "a", "b"))
  first = dict(evaluation__every_steps=0, checkpoint__every_steps=1,
               checkpoint__keep=1, optimizer__learning_rate=0.1)  # fmt: skip
  run(tiny_runs.config("uniform", total_steps=1, **first), source)
  config = tiny_runs.config(
    "uniform", init_from=str(source), policy__kl__coef=0.1, total_steps=3,
    evaluation__every_steps=0, checkpoint__every_steps=1)  # fmt: skip
  run(config, other)
  killed(config, ours, 2)
  shutil.copytree(source, tmp_path / "kept")
  run(tiny_runs.config("uniform", total_steps=2, **first), source)
  with pytest.raises(ValueError, match="policy.kl.coef: the reference.*step 1;"
                     r" there are \[2\]"):
    run(config, ours)
  shutil.copytree(tmp_path / "kept/checkpoints/1", source / "checkpoints/1")
  run(config, ours)
  assert tiny_runs.lines(ours) == tiny_runs.lines(other)
  assert tiny_runs.lines(ours)[-1]["policy/kl"] > 0


def test_prompts_longer_than_every_bucket_are_refused(tmp_path):
  with pytest.raises(ValueError, match="sampling.prompt_buckets: the largest is "
                     "4 tokens, but prompts .* up to 6; legal: a bucket"):
    run(tiny_runs.config("uniform", task__operations=4), tmp_path)


# Another configuration in the same folder.


def test_another_configuration_is_refused(undisturbed):
  folder = undisturbed("vigor")
  before = (folder / "config.json").read_text()
  other = tiny_runs.config(**(RUNS["vigor"] | {"seed": 1}),
                           optimizer__learning_rate=1e-4)  # fmt: skip
  with pytest.raises(ConfigError) as error:
    run(other, folder)
  text = str(error.value)
  assert "seed: 0 -> 1" in text and "optimizer.learning_rate" in text
  assert "choose another --workdir" in text
  assert (folder / "config.json").read_text() == before


def test_fewer_steps_than_are_done_are_refused(undisturbed):
  folder = undisturbed("vigor")
  kept = {name: (folder / name).read_text() for name in
          ("config.json", "summary.json", "metrics.jsonl")}  # fmt: skip
  short = tiny_runs.config(**(RUNS["vigor"] | {"total_steps": 5}))
  with pytest.raises(ConfigError, match="total_steps: 5 .*6 steps.*has done"):
    run(short, folder)
  for name, text in kept.items():
    assert (folder / name).read_text() == text


def test_what_may_change_is_reported(tmp_path, capsys):
  config = tiny_runs.config("uniform", total_steps=1, evaluation__every_steps=0)
  run(config, tmp_path)
  config = tiny_runs.config("uniform", total_steps=2, evaluation__every_steps=0,
                            checkpoint__keep=2)  # fmt: skip
  train_lib.train(config, str(tmp_path))
  said = capsys.readouterr().out
  assert "changed since the run began: total_steps: 1 -> 2" in said
  assert "changed since the run began: checkpoint.keep: 3 -> 2" in said
  assert f"resumed from step 1 in {tmp_path}" in said


# Rewards that return something else.


@pytest.mark.parametrize(
  "name, words", [("never_a_number", "nan"), ("a_list", "list")]
)
def test_a_bad_reward_is_named_before_anything_compiles(name, words, tmp_path):
  config = tiny_runs.config(reward__name=f"tiny_runs:{name}")
  compiled = compilation.count()
  with pytest.raises(ValueError, match=f"tiny_runs:{name}.*{words}"):
    run(config, tmp_path)
  assert compilation.count() == compiled
  assert not (tmp_path / "metrics.jsonl").exists()


# Signals, through the command line.


CONFIG = """
import tiny_runs
def get_config():
  return tiny_runs.config("uniform", reward__name="tiny_runs:stopping",
                          total_steps=4, evaluation__every_steps=2)
"""


@pytest.mark.parametrize("name", tiny_runs.SIGNALS)
def test_a_signal_saves_and_says_how_to_go_on(
  name, tmp_path, monkeypatch, capfd
):
  path = tmp_path / "tiny.py"
  path.write_text(CONFIG)
  signum = tiny_runs.SIGNALS[name]
  # 16 verdicts of the first evaluation, some of the probe: in step 2.
  monkeypatch.setenv("STOP_SIGNAL", str(int(signum)))
  monkeypatch.setenv("STOP_CALL", "110")
  argv = ["train", f"--config={path}", f"--workdir={tmp_path / 'a run'}"]
  with pytest.raises(SystemExit) as stop:
    train_lib.main(argv)
  assert stop.value.code == 128 + signum
  said = capfd.readouterr()
  assert "stopping after this step" in said.err
  assert f"stopped by {name} after step " in said.out
  step = int(said.out.split(f"stopped by {name} after step ")[1].split(";")[0])
  assert step in (1, 2)
  command = shlex.split(said.out.strip().splitlines()[-1])
  assert command[:3] == ["python", "-m", "vigor_jax.train"]
  assert command[3:] == argv[1:]
  train_lib.main(command[2:])
  said = capfd.readouterr().out
  assert f"resumed from step {step} in" in said and "done: 256 rollouts" in said
  monkeypatch.setenv("STOP_CALL", "0")
  run(tiny_runs.config("uniform", reward__name="tiny_runs:stopping",
                       total_steps=4), tmp_path / "other")  # fmt: skip
  tiny_runs.same(tmp_path / "other", tmp_path / "a run")


# Compilation.


class Drawn(base.Allocator):
  """A schedule drawn at random every step."""

  name = "drawn"

  def setup(self):
    self.max_prompts = 2 * self.prompts_per_step

  def rounds(self, groups):
    rng = np.random.default_rng([self.seed, groups.step])
    left = self.budget
    while left:
      now = int(rng.integers(1, left + 1))
      most = int(rng.integers(1, self.max_prompts + 1))
      share = rng.dirichlet(np.ones(most))
      counts = np.zeros(self.max_prompts, int)
      counts[:most] = rng.multinomial(now, share)
      left -= now
      yield groups.request(counts)


class Compiling(Drawn):
  """What an extension may do wrong: a program for every step's shape."""

  name = "compiling"

  def end(self, groups):
    jax.jit(lambda a: a + 1)(np.zeros(20 + groups.step))


@pytest.fixture
def with_rules(monkeypatch):
  for rule in (Drawn, Compiling):
    monkeypatch.setitem(allocation.REGISTRY, rule.name, rule)
  assert "drawn" in default_config().allocation


def test_a_random_schedule_compiles_nothing_new(with_rules, tmp_path):
  run(tiny_runs.config("drawn", total_steps=6), tmp_path)
  lines = tiny_runs.steps_of(tmp_path)
  assert len({line["compiles"] for line in lines[1:]}) == 1
  shapes = {(len(line["allocation/rounds"]), line["groups/opened"])
            for line in lines}  # fmt: skip
  assert len(shapes) >= 4
  assert all(sum(line["allocation/rounds"]) == BUDGET for line in lines)


def test_compiling_after_the_second_step_stops_the_run(with_rules, tmp_path):
  with pytest.raises(RuntimeError, match="step 3 compiled 1 program"):
    run(tiny_runs.config("compiling", evaluation__every_steps=0), tmp_path)
  assert [line["step"] for line in tiny_runs.steps_of(tmp_path)] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, options",
  [
    ("vigor", {}),
    ("eb_widening", {}),
    ("streaming_vigor", {}),
    ("drawn", {}),
    ("drawn", {"policy__rows_per_microbatch": 1, "policy__row_buckets": (8,)}),
    ("uniform", {"policy__updates_per_step": 2, "policy__minibatches": 2,
                 "policy__old_logprobs": "trainer",
                 "policy__kl__coef": 0.1}),
  ],
)  # fmt: skip
def test_a_cold_process_compiles_in_two_steps_only(
  name, options, with_rules, tmp_path
):
  jax.clear_caches()
  config = tiny_runs.config(name, total_steps=8, task__num_prompts=60,
                            checkpoint__every_steps=3,
                            evaluation__fresh_rollouts=2, **options)  # fmt: skip
  before = compilation.count()
  run(config, tmp_path)
  lines = tiny_runs.steps_of(tmp_path)
  # Evaluations and saves may compile; the steps do not.
  assert lines[0]["compiles"] > before
  same = [line["compiles"] for line in lines]
  assert same[1] == same[2] and same[4] == same[5] and same[-2] == same[-1]


def test_options_of_the_command_line_are_kept(tmp_path):
  config = tiny_runs.config("uniform", total_steps=1, evaluation__every_steps=0)
  run(config, tmp_path, command="python -m vigor_jax.train --config=x.py")
  assert (tmp_path / "command.txt").read_text().startswith("python -m")
  saved = json.loads((tmp_path / "config.json").read_text())
  assert saved["allocation"]["name"] == "uniform"
  assert dataclasses.is_dataclass(allocation.REGISTRY["vigor"].Options)
