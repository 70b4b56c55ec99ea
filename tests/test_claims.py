"""The tables of benchmarks/claims.py, from curves with known crossings."""

import importlib.util
import json
import math
import pathlib

import numpy as np
import pytest
from vigor_jax import config as configuration
from vigor_jax.grid import cells
from vigor_jax.reporting import claims
from vigor_jax.reporting import paired

POINTS = 13


def run(speed, top=0.9, start=0.4, tokens=5.0):
  """A curve that rises linearly to `top` at step 100 / speed."""
  x = np.linspace(0, 120, POINTS)
  y = start + (top - start) * np.minimum(1, x * speed / 100)
  return {
    "rollouts": (256 * x).tolist(),
    "tokens": (256 * x * tokens).tolist(),
    "seconds": (0.1 * x).tolist(),
    "accuracy": y.tolist(),
    "full_pass": float(y[-1]),
    "mixed": 5.0,
    "trained": 24.0,
  }


def pairs(speed, **kwargs):
  return {
    f"w{w} s{s}": run(speed * (1 + 0.02 * s), start=0.4 + 0.1 * w, **kwargs)
    for w in (0, 1)
    for s in (10, 11, 12)
  }


def data():
  rules = {
    "uniform 32 x 8": pairs(0.8),
    "uniform 64 x 4": pairs(0.88),
    "vigor": pairs(0.6),
    claims.HOUSE: pairs(1.6, tokens=6.0),
  }
  return {
    "screening": {"vigor": {"0.001": {"plain": 0.5, "sparse_signal": 0.25}}},
    "rates": {"vigor": 0.001},
    "streams": {"sparse_signal": rules},
    "lean": {"sparse_signal": {f"lean {claims.HOUSE}": pairs(1.5)}},
    "ablations": {"sparse_signal": {"random_top": pairs(0.5)}},
    "lab": {
      "sparse_signal": {
        "uniform 64 x 4": {"early": 1.2, "late": 1.1},
        "vigor": {"early": 0.7, "late": None},
        claims.HOUSE: {"early": 1.9, "late": None},
      }
    },
  }


class TestAnalyse:
  def test_ratios_are_those_of_the_speeds(self):
    found = paired.analyse(data()["streams"]["sparse_signal"])
    house = found[claims.HOUSE]
    assert found["uniform 64 x 4"]["is_best"] == [True, True]
    assert house["published"]["rollouts"][0].value == pytest.approx(2, rel=0.01)
    assert house["best"]["rollouts"][0].value == pytest.approx(
      1.6 / 0.88, rel=0.01
    )
    assert house["best"]["tokens"][0].value == pytest.approx(
      1.6 / 0.88 * 5 / 6, rel=0.01
    )
    assert house["pairs"] == 6 and house["tokens"] == pytest.approx(6.0)

  def test_targets_are_of_each_warm_start(self):
    """Half of the rise in the first five sixths (step 100) of the run."""
    goals = paired.goals(
      {"w0 s1": run(1.0), "w1 s1": run(1.0, start=0.6, top=0.8)}
    )
    assert goals["w0"] == pytest.approx((0.65, 0.825), abs=0.02)
    assert goals["w1"] == pytest.approx((0.7, 0.77), abs=0.02)

  def test_censored_runs_are_counted_and_bound(self):
    rules = data()["streams"]["sparse_signal"]
    rules["slow"] = pairs(0.3)
    found = paired.analyse(rules)["slow"]
    assert found["censored"] == 1.0
    assert found["published"]["rollouts"][1].bound == "at most"

  def test_pairs_of_one_rule_only_are_left_out(self):
    rules = data()["streams"]["sparse_signal"]
    del rules[claims.HOUSE]["w1 s12"]
    found = paired.analyse(rules)[claims.HOUSE]
    assert found["pairs"] == 5
    assert len(found["published"]["rollouts"][0].per_pair) == 5


class TestTables:
  def page(self):
    return "\n".join(
      f"<!-- claims:{name} -->\n<!-- /claims -->" for name in claims.BLOCKS
    )

  def test_fill_is_idempotent_and_shows_the_rows(self):
    page = claims.fill(self.page(), data())
    assert claims.fill(page, data()) == page
    assert f"| sparse_signal | {claims.HOUSE} | 6 |" in page
    assert "| sparse_signal | random_top | 6 | 0.83 [" in page
    # Against 64 x 4 (.88), beside the rule that is not lean (1.6).
    lean = f"| sparse_signal | lean {claims.HOUSE} | 6 | 1.70 ["
    assert lean in page and "1.82 [" in page.split(lean)[1].split("\n")[0]
    assert "| vigor | 0.001 | 0.500 | 0.250 | taken |" in page

  def test_fill_wants_every_block(self):
    with pytest.raises(ValueError, match="claims:headline"):
      claims.fill("nothing", data())

  def test_dump_can_be_read_again(self):
    text = claims.dump(data())
    assert json.loads(text) == data()
    assert len(text.splitlines()) < 80  # a line for every run

  def test_lab_pairs(self):
    found = {rule: (x, y) for _, rule, x, y in claims.lab_pairs(data())}
    assert set(found) == {"uniform 64 x 4", "vigor", claims.HOUSE}
    assert found["vigor"] == (0.7, pytest.approx(0.75, rel=0.01))

  def test_figures(self):
    found, targets = claims.figures(data())
    assert found["sparse_signal_early"] == pytest.approx(1.82, abs=0.02)
    assert targets["sparse_signal_early"] == {"min": 1.6}
    assert "lab_rank_correlation" not in found  # fewer than 20 cells


def test_area_of_a_straight_line():
  straight = run(100 / 120)
  assert paired.area(straight) == pytest.approx(0.65)
  assert not math.isnan(paired.area(run(2.0)))


def test_the_results_page_is_what_the_data_gives():
  docs = pathlib.Path(__file__).parents[1] / "docs"
  page = (docs / "results.md").read_text()
  data = json.loads((docs / "claims.json").read_text())
  assert claims.fill(page, data) == page
  for stream, rules in data["streams"].items():
    pairs_of = {rule: set(runs) for rule, runs in rules.items()}
    published = pairs_of[claims.PUBLISHED]
    assert len(published) >= 5, stream
    for rule, found in pairs_of.items():
      close = rule.startswith("uniform") or rule in (claims.BEFORE, claims.HOUSE)
      assert found == published or not close, (stream, rule)
      least = 10 if rule in claims.ORDER else 6
      assert found <= published and len(found) >= least, (stream, rule)


@pytest.mark.parametrize("rule", ["uniform", "eb_effective", "eb_predicted"])
def test_the_lean_form_is_the_same_by_fields_and_as_an_entry(rule):
  root = pathlib.Path(__file__).resolve().parent.parent
  where = root / "benchmarks" / "common" / "lean.py"
  spec = importlib.util.spec_from_file_location("lean", where)
  lean = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(lean)
  config = configuration.load_file(str(root / "configs" / "arithmetic.py"))
  [cell] = cells.make(config, lean.entry(rule), "0", [])
  by_fields = {"allocation.name": rule, **lean.overrides(rule)}
  assert cells.config_of(cell) == configuration.validate(
    configuration.with_overrides(config, by_fields)
  )
