"""Predictions, advice from a run, results and the page."""

import dataclasses
import pathlib

import fake_runs
import numpy as np
import pytest
from vigor_jax.lab import __main__ as command
from vigor_jax.lab import experiment, grids, page, paired, prediction, recommend
from vigor_jax.lab.experiment import Cell, Protocol, Results
from vigor_jax.lab.learner import Rule
from vigor_jax.lab.prediction import Step, summarise
from vigor_jax.lab.world import World

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def uniform_step(p, n, budget=256):
  k = budget // n
  return Step(
    np.full(k, float(n)), np.full(k, p), np.full(k, p * (1 - p)),
    np.ones(k, bool),
  )  # fmt: skip


def test_effective_rollouts_by_hand():
  # m u = 1 * .25 and 3 * .25: S = 1 / (1 + c (1/16 + 9/16)), s = 0.
  step = Step(
    np.array([2.0, 4.0]), np.full(2, 0.5), np.full(2, 0.25), np.ones(2, bool)
  )
  scale = 256 / 6
  s = lambda c: summarise([step], c, 0.0).effective / scale
  assert s(0.0) == pytest.approx(1.0)
  assert s(1.0) == pytest.approx(1 / 1.625)
  # c -> infinity: c S is the participation number 1 / (10 / 16).
  assert 1e9 * s(1e9) == pytest.approx(1.6, rel=1e-6)
  assert summarise([step], 0.0, 0.0).variance == pytest.approx(0.25)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.05])
def test_uniform_groups_are_best_at_the_saturation(p):
  sizes = np.arange(2, 20)
  value = [
    summarise([uniform_step(p, n, 10**5)], 1.0, 0.0).effective for n in sizes
  ]
  best = 1 + 1 / np.sqrt(p * (1 - p))
  assert abs(sizes[np.argmax(value)] - best) <= 1


def test_room_discounts_what_is_nearly_solved():
  easy, hard = uniform_step(0.9, 4), uniform_step(0.1, 4)
  effective = lambda step, s: summarise([step], 1.0, s).effective
  assert effective(easy, 0) == pytest.approx(effective(hard, 0))
  assert effective(hard, 1) == pytest.approx(81 * effective(easy, 1))


@pytest.mark.parametrize("name", ["vigor", "uniform", "eb_widening"])
def test_played_worlds(name):
  world = World.preset("plain")
  steps = prediction.play_world(world, Rule(name), runs=2, steps=2, warmup=1)
  assert len(steps) == 4
  for step in steps:
    assert step.n.sum() == 256
    assert ((step.mean >= 0) & (step.mean <= 1)).all()
    np.testing.assert_allclose(step.variance, step.mean * (1 - step.mean))
    assert not step.mixed[step.n < 2].any()


# ---------------------------------------------------------------------- advice


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run") / "run"
  fake_runs.write(folder, fake_runs.config(name="vigor", steps=9))
  return recommend.advise(folder, steps=12, warmup=4)


def test_a_rule_that_was_not_played_is_said(advice):
  best = next(
    i for i in range(len(advice.candidates)) if i != advice.baseline
  )
  mine = dataclasses.replace(advice, allocator="my_own_rule", best=best)
  text = recommend.recommendation(mine)
  assert "this run's rule, my_own_rule, was not played." in text


def test_advice_covers_every_rule_that_can_spend_the_budget(advice):
  from vigor_jax import allocation

  assert {c.name for c in advice.candidates} == set(allocation.REGISTRY)
  labels = [c.label(advice.budget) for c in advice.candidates]
  assert "uniform 32 x 8" in labels and len(set(labels)) == len(labels)
  assert len(advice.stretches) == 3
  for stretch in advice.stretches:
    assert sum(stretch.shares()) == pytest.approx(1)
    for figures in stretch.figures:
      assert 0 < figures.rollouts <= 256
      assert 0 < figures.variance <= 0.25


def test_advice_knows_a_stream_with_sparse_signal(advice):
  hard, middle, easy = advice.stretches[0].shares()
  assert easy > 0.5 and middle < 0.35
  names = [c.name for c in advice.candidates]
  gain = dict(zip(names[::-1], advice.gain[::-1]))
  assert gain["eb_widening"] > gain["vigor"] > gain["random_top"]
  assert advice.gain[advice.baseline] == pytest.approx(1)


def test_advice_in_words(advice):
  text = recommend.words(advice)
  assert "Recommended: " in text and "solved" in text
  assert "random_top" in text
  same = dataclasses.replace(advice, best=advice.baseline)
  assert "No rule is predicted" in recommend.recommendation(same)
  graded = dataclasses.replace(advice, binary=False)
  assert "graded" in recommend.words(graded)


def test_a_folder_that_is_no_run(tmp_path, capsys):
  with pytest.raises(SystemExit, match="2"):
    command.main([f"--from_run={tmp_path}"])
  assert "not a run folder" in capsys.readouterr().err
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="no step with rollouts"):
    recommend.advise(tmp_path)


# --------------------------------------------------------- results and the page

TINY = Protocol(steps=6, tuning=1, fresh=2)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
  path = tmp_path_factory.mktemp("lab") / "results.json"
  found = Results(path, TINY)
  world = World.preset("plain", facts=6, mastered=3, features=8, evaluation=64)
  rules = (*experiment.UNIFORMS, Rule("vigor"))
  for rule in rules:
    cell = Cell(world, rule)
    found.cells[cell.key] = experiment.measure(cell, TINY)
  found.save()
  return found, world, rules


def test_outcomes_are_relative_to_uniform(results):
  found, world, rules = results
  outcome = experiment.outcomes(found, world, rules)
  assert set(outcome) == {r.label for r in rules}
  assert outcome["uniform 32 x 8"].against_published[0].value == 1
  best = [outcome[r.label].against_best[0].value for r in experiment.UNIFORMS]
  assert max(best) == pytest.approx(1)


def test_stored_results_are_read_again(results):
  found, world, rules = results
  again = Results(found.path, TINY)
  assert again.cells == found.cells
  again.fill([Cell(world, rule) for rule in rules])  # nothing is left to do
  other = Results(found.path, Protocol(steps=7, tuning=1, fresh=2))
  assert other.cells == {}


def test_cells_of_the_grid_are_distinct_and_legal():
  cells = grids.cells()
  keys = [c.key for c in cells]
  assert len(set(keys)) >= len(keys) - len(grids.HEADLINE)
  for rule in {c.rule for c in cells}:
    assert rule.make(0).budget == 256
  assert set(c.key for c in grids.cells(quick=True)) < set(keys)


def test_rank_correlation_by_hand():
  assert page.ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]
  assert page.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
  assert page.rank_correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)


def test_blocks_of_the_page():
  text = "a\n<!-- lab:x -->\nold\n<!-- /lab -->\nb"
  filled = page.fill(text, "x", "new\\1")
  assert filled == "a\n<!-- lab:x -->\nnew\\1\n<!-- /lab -->\nb"
  assert page.fill(filled, "x", "old") == text
  empty = "<!-- lab:x -->\n<!-- /lab -->\n<!-- lab:y -->\n<!-- /lab -->"
  both = page.fill(page.fill(empty, "x", "1"), "y", "2")
  assert both == (
    "<!-- lab:x -->\n1\n<!-- /lab -->\n<!-- lab:y -->\n2\n<!-- /lab -->"
  )
  with pytest.raises(ValueError, match="lab:y"):
    page.fill(text, "y", "new")


def test_the_documented_figures_exist():
  text = (DOCS / "allocation.md").read_text()
  for name in page.BLOCKS:
    block = text.split(f"<!-- lab:{name} -->")[1].split("<!-- /lab -->")[0]
    assert block.count("|") > 10, name
  for name in ("phase", "noise", "weights", "saturation", "prediction"):
    path = DOCS / "figures" / f"allocation_{name}.png"
    assert f"figures/allocation_{name}.png" in text
    assert 1_000 < path.stat().st_size < 150_000


def test_wrong_verdicts_add_noise_and_shrink_the_signal():
  world = World.preset("plain", noise=0.2)
  step = prediction.play_world(world, Rule("uniform"), runs=1, steps=1)[0]
  p = 0.2 + 0.6 * step.mean
  np.testing.assert_allclose(step.seen, p * (1 - p))
  clean = dataclasses.replace(step, seen=None, noise=0.0)
  assert summarise([step]).effective < 0.6 * summarise([clean]).effective


def test_paired_rules_on_one_small_world():
  world = World.preset("sparse_signal", facts=12, mastered=6, features=8)
  (row,) = paired.rows(
    Rule("eb_widening"), Rule("gvm"), worlds={"here": world}, rates=(0.2,),
    seeds=4, steps=25,
  )  # fmt: skip
  assert row[:2] == ("here", "0.2")
  value, low, high = map(
    float, row[3].translate({91: "", 93: "", 44: ""}).split()
  )
  assert low <= value <= high
  same = paired.difference(
    world, Rule("gvm"), Rule("gvm"), 0.2, range(2), steps=5
  )
  assert same[1:] == (0.0, 0.0, 0.0)


def test_paired_refuses_unknown_rules(capsys):
  with pytest.raises(SystemExit, match="2"):
    command.main(["--paired=vigor,no_such_rule"])
  assert "no_such_rule" in capsys.readouterr().err
