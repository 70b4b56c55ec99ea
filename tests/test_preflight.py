"""Preflight: the walker on known programs, and a run for 8 fake devices."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny_runs

from vigor_jax import preflight
from vigor_jax.aot import chips
from vigor_jax.aot import cost
from vigor_jax.aot import estimate
from vigor_jax.aot import hlo
from vigor_jax.aot import page
from vigor_jax.aot import programs

# A loop of 5 trips. Each reads one of 5 matrices [64, 64] f32 through a fusion
# (16384 bytes, not 81920), the state [8, 64] (2048) and writes the result
# (2048), then sums it over groups of 4 of the 8 chips.
TEXT = """HloModule jit_f, entry_computation_layout={()->f32[8,64]{1,0}}

%pick (p0: f32[5,64,64], p1: s32[]) -> f32[64,64] {
  %p0 = f32[5,64,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %ds = f32[1,64,64]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %out = f32[64,64]{1,0} bitcast(%ds)
}

%product (p0: f32[8,64], p1: f32[5,64,64], p2: s32[]) -> f32[8,64] {
  %p0 = f32[8,64]{1,0} parameter(0)
  %p1 = f32[5,64,64]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %w = f32[64,64]{1,0} fusion(%p1, %p2), kind=kLoop, calls=%pick
  ROOT %dot = f32[8,64]{1,0} convolution(%p0, %w), dim_labels=bf_io->bf
}

%body (c: (s32[], f32[8,64], f32[5,64,64])) -> (s32[], f32[8,64], f32[5,64,64]) {
  %c = (s32[], f32[8,64]{1,0}, f32[5,64,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8,64]{1,0} get-tuple-element(%c), index=1
  %w = f32[5,64,64]{2,1,0} get-tuple-element(%c), index=2
  %y = f32[8,64]{1,0} fusion(%x, %w, %i), kind=kOutput, calls=%product, metadata={op_name="jit(f)/while/body/dot"}, backend_config={"estimated_cycles":"100"}
  %z = f32[8,64]{1,0:T(8,128)S(1)} all-reduce(%y), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8,64]{1,0}, f32[5,64,64]{2,1,0}) tuple(%i, %z, %w)
}

%cond (c: (s32[], f32[8,64], f32[5,64,64])) -> pred[] {
  %c = (s32[], f32[8,64]{1,0}, f32[5,64,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: (s32[], f32[8,64], f32[5,64,64])) -> (s32[], f32[8,64], f32[5,64,64]) {
  %a = (s32[], f32[8,64]{1,0}, f32[5,64,64]{2,1,0}) parameter(0)
  ROOT %loop = (s32[], f32[8,64]{1,0}, f32[5,64,64]{2,1,0}) while(%a), condition=%cond, body=%body
}
"""


def test_parsed_lines():
  module = hlo.parse(TEXT)
  assert module.entry == "main"
  line = module.by_name["body"]["z"]
  assert line.op == "all-reduce" and line.operands == ("y",)
  assert line.arrays == (hlo.Array("f32", (8, 64), 1),)
  assert line.hbm == 0  # S(1) is not HBM.
  loop = module.by_name["main"]["loop"]
  assert loop.root and loop.called("body", "condition") == ["body", "cond"]
  assert module.by_name["body"]["y"].scope == "jit(f)/while/body/dot"
  assert hlo.arrays_of("(bf16[2,3]{1,0}, s4[3]{0}, token[])") == (
    hlo.Array("bf16", (2, 3)), hlo.Array("s4", (3,)), hlo.Array("token", ()))
  assert hlo.Array("s4", (3,)).size == 2
  with pytest.raises(ValueError, match="ENTRY"):
    hlo.parse("HloModule nothing")


def test_what_a_called_computation_makes_is_held():
  called = TEXT.replace("ENTRY %main", """%held (b: f32[3,7]) -> f32[3,7] {
  %b = f32[3,7]{1,0} parameter(0)
  ROOT %wide = f32[3,77]{1,0} broadcast(%b), dimensions={0,1}
}

ENTRY %main""").replace("  ROOT %loop", """  %small = f32[3,7]{1,0} constant(0)
  %call = f32[3,7]{1,0} call(%small), to_apply=%held
  ROOT %loop""")
  assert hlo.Array("f32", (3, 77)) in hlo.parse(called).arrays()
  assert hlo.Array("f32", (3, 77)) not in hlo.parse(TEXT).arrays()


def test_what_fusions_make_on_the_way_is_not_held():
  found = hlo.parse(TEXT).arrays()
  assert hlo.Array("f32", (5, 64, 64)) in found  # The loop carries it.
  assert hlo.Array("f32", (8, 64)) in found
  assert hlo.Array("f32", (8, 64), 1) not in found  # VMEM
  assert hlo.Array("f32", (64, 64)) not in found  # Of a fusion.
  assert hlo.Array("pred", ()) in found  # Of the loop's condition.


def test_cost_of_a_loop_by_hand():
  found = cost.of_text(TEXT, devices=8)
  assert found.loops == [("body", 5)] and found.assumed == 0
  # The fusion: 2048 + 16384 and the index read, 2048 written; the sum reads
  # 2048 and writes to VMEM.
  assert found.hbm_bytes == 5 * (2048 + 16384 + 4 + 2048 + 2048)
  # Ring all-reduce: 2 (g - 1) / g of the array, g = 4.
  assert found.wire_bytes == {"all-reduce": 5 * 2 * 2048 * 3 / 4}
  assert found.wire_counts == {"all-reduce": 5}
  assert found.cycles == 500


BY_HAND = """
HloModule by_hand

%spread.1 (a: f32[8,64]) -> f32[32,64] {
  %a = f32[8,64]{1,0} parameter(0)
  ROOT %g1 = f32[32,64]{1,0} all-gather(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="3"}
}

%spread.2 (a: f32[8,64]) -> f32[32,64] {
  %a = f32[8,64]{1,0} parameter(0)
  ROOT %g2 = f32[32,64]{1,0} all-gather(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, frontend_attributes={chain_id="3"}
}

ENTRY %main (x: f32[8,64]) -> f32[2,64] {
  %x = f32[8,64]{1,0} parameter(0)
  %first = f32[32,64]{1,0} fusion(%x), kind=kCustom, calls=%spread.1
  %second = f32[32,64]{1,0} fusion(%x), kind=kCustom, calls=%spread.2
  %third = f32[32,64]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %last = f32[2,64]{1,0} reduce-scatter(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
}
"""


def test_collectives_of_shard_map_share_a_channel():
  found = cost.of_text(BY_HAND, devices=8)
  whole = 32 * 64 * 4
  # Two fusions work on one chain; the two others stand alone.
  assert found.wire_bytes == {
    "all-gather": 2 * whole * 3 / 4, "reduce-scatter": 2 * 64 * 4 * 3}
  assert found.wire_counts == {"all-gather": 2, "reduce-scatter": 1}


def test_a_loop_over_data_takes_the_callers_count():
  text = TEXT.replace("constant(5)", "parameter(1)")
  found = cost.of_text(text, devices=8, trips=(7,))
  assert found.loops == [("body", 7)] and found.assumed == 1


@pytest.mark.parametrize(
  "groups, size",
  [("[2,4]<=[8]", 4), ("{{0,1},{2,3}}", 2),
   ("mesh['x'=2,'y'=4]{'x','y'}", 8), ("{}", 8)],
)
def test_group_sizes(groups, size):
  text = TEXT.replace("[2,4]<=[8]", groups)
  wire = cost.of_text(text, devices=8).wire_total
  assert wire == pytest.approx(5 * 2 * 2048 * (size - 1) / size)


def test_flops_of_a_jaxpr():
  def step(x, w):
    def layer(x, w):
      return x @ w, None
    x, _ = jax.lax.scan(layer, x, w)  # 3 products.
    n, x = jax.lax.while_loop(
      lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, c[1] @ w[0]), (0., x))
    return jax.lax.cond(n > 1, lambda: x @ w[0], lambda: x)

  jaxpr = jax.make_jaxpr(step)(jnp.ones((4, 8)), jnp.ones((3, 8, 8)))
  product = 2 * 4 * 8 * 8
  assert cost.flops(jaxpr, trips=(10,)) == (3 + 10 + 1) * product


def test_walker_counts_what_xla_compiled():
  """A real program: the loop multiplies, XLA's own analysis does not."""
  def f(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  shapes = (jax.ShapeDtypeStruct((64, 64), jnp.float32),
            jax.ShapeDtypeStruct((9, 64, 64), jnp.float32))
  found = cost.of_text(jax.jit(f).lower(*shapes).compile().as_text(), 1)
  assert 9 in [count for _, count in found.loops]
  weights = 9 * 64 * 64 * 4
  assert weights < found.hbm_bytes < 12 * weights


def test_the_compilers_complaint():
  text = ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of "
          "memory in memory space hbm. Program hbm requirement 20.5G: ... "
          "(17.25G) exceeds available HBM (15.75G)")
  assert estimate.memory_error(text) == (17.25 * 2**30, 15.75 * 2**30)
  used = "RESOURCE_EXHAUSTED: Used 17.1G of 15.75G hbm. Exceeded by 1.3G"
  assert estimate.memory_error(used) == (17.1 * 2**30, 15.75 * 2**30)
  assert estimate.memory_error("INVALID_ARGUMENT: no") is None


def test_names_of_topologies(monkeypatch):
  assert chips.parse("v5p:2x2x2") == ("v5p", (2, 2, 2))
  with pytest.raises(chips.TopologyError, match="unknown generation.*v5e"):
    chips.parse("v9:2x2")
  with pytest.raises(chips.TopologyError, match="form like 'v5e:4x4'"):
    chips.parse("v5e:4xtwo")
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  with pytest.raises(chips.TopologyError, match=r"vigor-jax\[tpu\]"):
    chips.prepare("v5e:4x4")


def _report(temporary):
  result = estimate.Result("update", "a step", 2.0, True, peak=5 * 2**30,
                           temporary=temporary, seconds=1.5, binds="HBM",
                           wire={"reduce-scatter": 1e8, "all-gather": 2.5e8})
  made = estimate.Report(
    "v5e:4x4", 16, {"data": 1, "fsdp": 8, "tensor": 2}, "none", 15.75 * 2**30,
    {"parameters": 10 * 2**30, "slots": 2**30}, [result], {"slots": 8},
    peak=11 * 2**30 + temporary, culprit="parameters", seconds=3.0,
    parts={"slots": 2**30, "parameters": 10 * 2**30,
           "temporaries of update": temporary},
    rollouts=64, tokens=6400, price=1.2)
  return made


def test_what_the_page_says():
  fits, full = _report(2**30), _report(8 * 2**30)
  assert fits.fits and not full.fits
  assert fits.dollars == pytest.approx(1.2 * 16 * 3 / 3600)
  text = page.text(full)
  assert "does not fit on v5e:4x4: 19.00 of 15.75 GiB" in text
  assert "largest part is parameters" in text
  lines = text.splitlines()
  first = lines.index("GiB a chip at the fullest moment:") + 1
  assert [line.split(maxsplit=1) for line in lines[first:first + 3]] == [
    ["10.00", "parameters"], ["8.00", "temporaries of update"],
    ["1.00", "slots"]]
  assert "4000 rollouts a dollar" in page.speed(fits)
  assert "    0.25  all-gather of update" in lines
  made = page.page([fits, full], "python -m x --a='<b>'")
  assert "&lt;b&gt;" in made and "<b>" not in made
  assert made.count("<h2>") == 2
  kinds = "<td>update</td><td>all-gather</td><td>0.25</td>"
  assert made.index(kinds) < made.index("<td>reduce-scatter</td>")


def test_exit_codes(monkeypatch, root):
  argv = ["preflight", f"--config={root}/configs/arithmetic.py",
          "--topology=cpu:1"]
  monkeypatch.setattr(chips, "prepare", lambda name: None)
  for temporary, code in ((2**30, 0), (8 * 2**30, 1)):
    monkeypatch.setattr(preflight, "_reports",
                        lambda args, name, t=temporary: [_report(t)])
    with pytest.raises(SystemExit) as caught:
      preflight.main(argv)
    assert caught.value.code == code


def test_a_configuration_for_eight_devices(root, tmp_path):
  environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  done = subprocess.run(
    [sys.executable, "-m", "vigor_jax.preflight",
     f"--config={root}/configs/arithmetic.py", "--topology=cpu:8",
     "--config.mesh.fsdp=2", "--config.mesh.tensor=2",
     "--chip_hour_price=1", f"--workdir={tmp_path}"],
    cwd=root, env=environ, capture_output=True, text=True, timeout=400)
  assert done.returncode == 0, done.stderr[-2000:]
  assert "fits on cpu:8" in done.stdout and "rollouts a dollar" in done.stdout
  report, = json.loads((tmp_path / "preflight.json").read_text())
  assert report["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
  results = {r["name"]: r for r in report["results"]}
  prefill = next(name for name in results if name.startswith("prefill"))
  assert set(results) == {"sampling weights", prefill, "decode chunk",
                          "update"}
  assert results["update"]["wire_bytes"] > 0
  assert results["update"]["flops"] > results[prefill]["flops"] > 0
  # Adam's two moments in float32 are twice the parameters.
  resident = report["resident"]
  assert resident["optimiser state"] == pytest.approx(
    2 * resident["parameters"], rel=0.01)
  assert (tmp_path / "preflight.html").read_text().startswith("<!doctype")


def test_without_a_topology(root):
  done = subprocess.run(
    [sys.executable, "-m", "vigor_jax.preflight",
     f"--config={root}/configs/arithmetic.py"],
    cwd=root, capture_output=True, text=True, timeout=60)
  assert done.returncode != 0 and "--topology is missing" in done.stderr


def test_rollouts_left_out_of_the_update_take_none_of_its_time():
  rows = lambda **changes: programs.workload_of(
    tiny_runs.config(**changes), 1.0).micro_batches(1, 16)
  # 64 rollouts of 4 tokens, and 8 prompts of 3, twice; .85 of a row in use.
  assert rows() == -(-(64 * 4 + 2 * 8 * 3) // (16 * 0.85))
  assert rows(policy__update_rollouts=16) == -(
    -(16 * 4 + 2 * 8 * 3) // (16 * 0.85))


def _plan(**changes):
  config = tiny_runs.config(policy__rows_per_microbatch=1,
                            sampling__max_new_tokens=12, **changes)
  return programs.Plan(config, jax.devices()[:1],
                       programs.workload_of(config, 0.25), 13)


def test_shorter_rows_take_their_share_of_the_micro_batches():
  one, two = _plan(), _plan(policy__row_buckets=(8,))
  (update, *_), (both, *_) = ([p for p in plan.programs() if p.name == "update"]
                              for plan in (one, two))
  (micro,), (trips,) = update.trips, both.trips
  assert list(trips) == ["rows_of_8", "rows_of_16"]
  assert sum(trips.values()) == micro and all(trips.values())
  _, batch, *_, numbers, _, _ = both.arguments
  assert [rows.tokens.shape for rows in batch] == [
    (tiny_runs.BUDGET // 2, 2, 8), (tiny_runs.BUDGET, 1, 16)]
  assert len(numbers) == 2 and update.unit == both.unit


def test_open_slots_are_chosen_from_the_topologys_memory():
  config = tiny_runs.config(sampling__slots=0)
  chip = chips.CHIPS["cpu"]
  of = lambda hbm: programs.with_slots(
    config,
    chips.Topology("cpu:1", dataclasses.replace(chip, hbm=hbm),
                   jax.devices()[:1]), 13)  # fmt: skip
  assert of(chip.hbm).sampling.slots == tiny_runs.BUDGET
  assert 1 <= of(2**17).sampling.slots < tiny_runs.BUDGET
  with pytest.raises(ValueError, match="sampling.slots"):
    of(0)
