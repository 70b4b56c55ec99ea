"""preflight --tune: the numbers it suggests, and what it compiles for them."""

import dataclasses

import jax
import pytest
import tiny_runs

from vigor_jax.aot import chips
from vigor_jax.aot import estimate
from vigor_jax.aot import programs
from vigor_jax.aot import tune


def _asked(function):
  calls = []

  def total(value):
    calls.append(value)
    return function(value)

  return total, calls


@pytest.mark.parametrize("start", [16, 256, 1024])
def test_the_line_is_read_in_three_calls(start):
  total, calls = _asked(lambda n: 1000 + 3 * n)
  assert tune.largest(total, 3100, start, 16, 4096) == 688  # 700 in sixteens.
  assert len(calls) <= 3


def test_a_bent_line_is_followed():
  total, calls = _asked(lambda n: 1000 + 2 * n + n * n / 200)
  found = tune.largest(total, 6000, 64, 8, 4096)
  assert total(found) <= 6000 < total(int(1.2 * found))
  assert len(set(calls)) <= tune._TRIES + 1


def test_what_is_suggested_was_seen_to_fit():
  # A jump that no line foresees.
  total, calls = _asked(lambda n: n + (5000 if n > 700 else 0))
  found = tune.largest(total, 4000, 256, 8, 4096)
  assert 256 < found <= 700 and found in calls


def test_ends_of_the_range():
  assert tune.largest(lambda n: n, 1e9, 64, 16, 1000) == 992
  assert tune.largest(lambda n: 7, 8, 64, 16, 1000) == 992
  assert tune.largest(lambda n: n, 20, 512, 16, 1000) == 16
  assert tune.largest(lambda n: n, 15, 512, 16, 1000) is None
  assert tune.largest(lambda n: n, 15, 16, 16, 16) is None


@pytest.mark.slow
def test_a_policy_fills_the_memory_it_gets():
  config = tiny_runs.config(policy__rows_per_microbatch=4)
  cpu = chips.Topology("cpu:1", chips.CHIPS["cpu"], jax.devices()[:1])
  plan_of = lambda config: programs.Plan(
    config, cpu.devices, programs.workload_of(config, 0.5), 13)
  resident = sum(plan_of(config).resident().values())
  topology = dataclasses.replace(
    cpu, chip=dataclasses.replace(cpu.chip, hbm=5.0 * resident))
  said = []
  tuner = tune.Tuner(config, topology, 13, 0.5, None, said.append)
  tuner.run()
  slots, rows = (tuner.config.sampling.slots,
                 tuner.config.policy.rows_per_microbatch)
  assert slots > 16 and rows > 4
  last = f"tune: --config.policy.rows_per_microbatch={rows}"
  assert said[-1].startswith(last)
  assert set(tuner.results) == {"decode chunk", "update"}
  report = estimate.report(
    plan_of(tuner.config), topology, options=None, flags="CPU",
    say=lambda line: None, known=tuner.results)
  assert report.fits
  assert 0.7 < report.peak / topology.chip.hbm <= 1 - tune.ROOM
