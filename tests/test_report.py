"""Reports from whole, broken and unfinished run folders."""

import json
import re
import shutil

import fake_runs
import numpy as np
import pytest

from vigor_jax import report
from vigor_jax.reporting import pooled
from vigor_jax.reporting import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "vigor"
  return fake_runs.write(folder, fake_runs.config("vigor", steps=20))


def _copy(whole, tmp_path):
  return shutil.copytree(whole, tmp_path / "run")


def _rewrite(folder, file, change):
  path = folder / file
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  path.write_text("".join(
      json.dumps(line) + "\n" for line in change(lines)))


def test_single_run_report_is_self_contained(whole, tmp_path):
  path = report.build([whole], tmp_path)
  page = path.read_text()
  images = re.findall(r'<img alt="([^"]+)" src="([^"]{30})', page)
  assert len(images) == 11
  assert all(src.startswith("data:image/png;base64,") for _, src in images)
  assert not re.search(r'(src|href)="(?!data:)', page)
  assert len(list((tmp_path / "plots").glob("*.png"))) == 11
  titles = [alt for alt, _ in images]
  for words in ("against rollouts", "against generated tokens",
                "against training seconds", "per prompt and round",
                "Rollouts per prompt, whole run", "Pass rates", "Difficulty",
                "variance per rollout", "Without signal", "mixed rewards",
                "Time of a step"):
    assert sum(words in title for title in titles) == 1, words
  assert "The run finished its 20 steps." in page
  assert "none after the first two steps" in page
  assert "0*7+3-20=" in page  # a sample of the last evaluation
  assert "task.difficulty = sparse_signal" in page
  assert "<pre>python -m vigor_jax.train --config=c.py</pre>" in page
  assert "could not be read" not in page


def _tables(page):
  """Each table of a page as rows of cells."""
  return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
           for row in re.findall(r"<tr>(.*?)</tr>", table)]
          for table in re.findall(r"<table>(.*?)</table>", page, re.S)]


def _timed(folder, **seconds):
  """The same run with these times in every step but the first."""
  def change(lines):
    for i, line in enumerate(lines):
      times = {f"time/{k}": 9.0 if i == 0 else v for k, v in seconds.items()}
      yield {**{k: v for k, v in line.items() if not k.startswith("time/")},
             **(times if "policy/loss" in line or "compiles" in line else {})}
  _rewrite(folder, "metrics.jsonl", change)
  return folder


def test_the_time_of_a_step_is_told_by_phase(whole, tmp_path):
  folder = _timed(_copy(whole, tmp_path), prefill=0.01, decode=0.06,
                  reward=0.0, allocate=0.002, update=0.12, other=0.008)
  page = report.build([folder]).read_text()
  assert "<h2>Where the time went</h2>" in page
  table = next(t for t in _tables(page) if t[0][0] == "phase")
  assert table == [
    ["phase", "ms a step", "share"], ["prefill", "10", "5.0%"],
    ["decode", "60", "30.0%"], ["reward", "0", "0.0%"],
    ["allocate", "2", "1.0%"], ["update", "120", "60.0%"],
    ["other", "8", "4.0%"], ["step", "200", "100.0%"]]


def test_the_times_of_several_rules_stand_side_by_side(tmp_path):
  folders = [
    _timed(fake_runs.write(tmp_path / name, fake_runs.config(name, steps=4)),
           decode=decode, update=1.0)
    for name, decode in (("uniform", 3.0), ("vigor", 1.0))]
  page = report.build(folders, tmp_path / "out").read_text()
  table = next(t for t in _tables(page) if "decode, s" in t[0])
  assert table == [
    ["rule", "prefill, s", "decode, s", "reward, s", "allocate, s",
     "update, s", "other, s", "step, s"],
    ["uniform", "0 (0%)", "3 (75%)", "0 (0%)", "0 (0%)", "1 (25%)", "0 (0%)",
     "4"],
    ["vigor", "0 (0%)", "1 (50%)", "0 (0%)", "0 (0%)", "1 (50%)", "0 (0%)",
     "2"]]


def test_images_are_deterministic(whole, tmp_path):
  first = report.build([whole], tmp_path / "a").read_bytes()
  assert report.build([whole], tmp_path / "b").read_bytes() == first


def test_torn_last_line_is_left_out_and_said(whole, tmp_path):
  folder = _copy(whole, tmp_path)
  for name in ("metrics", "groups", "samples"):
    path = folder / f"{name}.jsonl"
    text = path.read_text()
    path.write_text(text[: len(text) - 15])
  page = report.build([folder]).read_text()
  for name in ("metrics", "groups", "samples"):
    assert f"{name}.jsonl: the last line was cut off" in page


def test_malformed_middle_line_is_named(whole, tmp_path):
  folder = _copy(whole, tmp_path)
  path = folder / "metrics.jsonl"
  lines = path.read_text().splitlines()
  lines[1] = "[1, 2"
  path.write_text("\n".join(lines) + "\n")
  run = runs.read(folder)
  assert run.notes == [
      "metrics.jsonl, line 2 is not a JSON object and is left out"]
  assert run.steps == 19


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 300, 2000])
def test_a_run_killed_at_any_byte_still_gives_a_report(whole, tmp_path, cut):
  folder = _copy(whole, tmp_path)
  for name in ("metrics", "groups", "samples"):
    path = folder / f"{name}.jsonl"
    path.write_bytes(path.read_bytes()[:cut])
  page = report.build([folder]).read_text()
  assert page.endswith("</html>\n")
  if cut < 40:
    assert "Nothing has been recorded yet" in page


def test_folder_with_only_a_config(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(fake_runs.config()))
  assert "Nothing has been recorded yet" in report.build(
      [tmp_path]).read_text()


def test_one_step_only(tmp_path):
  folder = fake_runs.write(
      tmp_path / "run", fake_runs.config("eb_widening", steps=20), until=1)
  page = report.build([folder]).read_text()
  assert "The run stands at step 1 of 20" in page
  assert "measured once" in page


def test_missing_keys_drop_their_figures_only(whole, tmp_path):
  folder = _copy(whole, tmp_path)
  _rewrite(folder, "metrics.jsonl", lambda lines: [
      {k: v for k, v in line.items() if not k.startswith(("time/", "groups/"))
       and k != "compiles"} for line in lines])
  _rewrite(folder, "groups.jsonl", lambda lines: [
      {**line, "levels": None} for line in lines])
  (folder / "samples.jsonl").unlink()
  report.build([folder])
  left = {p.stem for p in (folder / "plots").glob("*.png")}
  assert left == {"accuracy_rollouts", "accuracy_tokens", "accuracy_seconds",
                  "rounds", "group_sizes", "pass_rates", "variance", "signal"}


def test_null_and_nan_values_are_no_numbers():
  line = {"a": None, "b": float("nan"), "c": True, "d": 3, "e": "x"}
  values = [runs.number(line, key) for key in "abcdef"]
  np.testing.assert_array_equal(
      values, [np.nan, np.nan, np.nan, 3.0, np.nan, np.nan])


def test_lines_of_a_resumed_run_count_once(whole, tmp_path):
  folder = _copy(whole, tmp_path)
  _rewrite(folder, "metrics.jsonl", lambda lines: lines + [
      {**lines[-2], "reward/mean": 0.123}])
  run = runs.read(folder)
  assert run.steps == 20
  assert run.last("reward/mean") == 0.123


def test_training_seconds_leave_compilation_out():
  # Compiled in steps 1 and 3; the others take 2 and 4 s, median 3.
  train = [{"step": s, "time/decode": d, "compiles": c} for s, d, c in
           ((1, 60.0, 5), (2, 2.0, 5), (3, 30.0, 6), (4, 4.0, 6))]
  np.testing.assert_allclose(
      runs.training_seconds(train), [3.0, 5.0, 8.0, 12.0])
  assert runs.training_seconds([{"step": 1, "seconds": 3.0}]) is None


def test_compiled_after_knows_restarts_and_evaluations():
  def run(counts, evals=()):
    return runs.Run(
        folder=None, config={}, groups=[], samples=[], notes=[],
        train=[{"step": i + 1, "compiles": c} for i, c in enumerate(counts)],
        evals=[{"step": s} for s in evals])

  assert run([9, 10, 10, 10]).compiled_after() == []
  assert run([9, 10, 10, 11]).compiled_after() == [4]
  assert run([9, 10, 10, 11], evals=[3]).compiled_after() == []
  # Started again before step 4: a lower count, and two steps of grace.
  assert run([9, 10, 10, 8, 9, 9, 10]).compiled_after() == [7]


def test_text_of_a_run_is_escaped(whole, tmp_path):
  folder = _copy(whole, tmp_path)
  _rewrite(folder, "samples.jsonl", lambda lines: [
      {"step": 1, "samples": [{"prompt": "<script>alert(1)</script>",
                               "completion": "a & b", "reward": 1.0}]}])
  page = report.build([folder]).read_text()
  assert "<script>" not in page and "&lt;script&gt;" in page
  assert "a &amp; b" in page


def test_several_runs_are_labelled_by_what_differs(tmp_path):
  folders = []
  for name, prompts in (("uniform", 32), ("uniform", 64), ("vigor", 32)):
    for seed in (0, 1):
      values = fake_runs.config(name, seed=seed, steps=10, prompts=prompts)
      folders.append(fake_runs.write(
          tmp_path / f"{name}{prompts}-{seed}", values))
  read = [runs.read(folder) for folder in folders]
  pooled.label_runs(read)
  assert list(pooled.by_label(read)) == [
      "uniform:prompts_per_step=32", "uniform:prompts_per_step=64",
      "vigor:prompts_per_step=32"]
  path = report.build(folders)
  assert path == tmp_path / "report.html"
  assert "Comparison of allocation rules" in path.read_text()


def test_graded_rewards_are_shown_raw(whole, tmp_path):
  folder = _copy(whole, tmp_path)
  _rewrite(folder, "groups.jsonl", lambda lines: [
      {**line, "sum": [s * 0.375 for s in line["sum"]]} for line in lines])
  histograms, how = pooled.pass_rate_histograms([runs.read(folder)])
  assert "raw" in how
  for _, _, shares, mean in histograms:
    assert shares.sum() == pytest.approx(1.0)
    assert mean < 0.375


def test_pass_rates_are_deconvolved():
  # 2 rollouts of prompts that all pass half the time: raw k/n says half of
  # them are at 0 or 1, the mixture knows better.
  n = np.full(4, 2.0)
  steps = [{"step": s, "n": n, "sum": np.array([0.0, 1, 1, 2]),
            "rounds": np.zeros((0, 4)), "levels": None} for s in range(9)]
  run = runs.Run(folder=None, config={}, train=[], evals=[], groups=steps,
                 samples=[], notes=[])
  (_, edges, shares, mean), *_ = pooled.pass_rate_histograms([run])[0]
  assert mean == pytest.approx(0.5)
  assert shares[:2].sum() + shares[-2:].sum() < 0.1
  assert shares.sum() == pytest.approx(1.0) and len(edges) == 11


def test_wrong_folders_are_named(tmp_path, capsys):
  with pytest.raises(ValueError, match="neither config.json nor"):
    report.build([tmp_path])
  (tmp_path / "runs" / "demo").mkdir(parents=True)
  (tmp_path / "runs" / "demo" / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="did you mean .*runs/demo.$"):
    report.build([tmp_path / "runs"])
  with pytest.raises(SystemExit) as caught:
    report.main([str(tmp_path / "nowhere")])
  assert caught.value.code == 2
  assert "nowhere is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": [{"label": 1}]}'])
def test_a_damaged_comparison_is_named(tmp_path, text):
  (tmp_path / report.COMPARE_FILE).write_text(text)
  with pytest.raises(ValueError, match="compare.json: "):
    report.build([tmp_path])


def test_labels_never_overlap():
  from vigor_jax.reporting import plots
  moved = plots.spread([0.5, 0.5, 0.1, 0.52], 0.2, 0.0, 1.0)
  order = np.argsort([0.5, 0.5, 0.1, 0.52], kind="stable")
  assert (np.diff(moved[order]) >= 0.2 - 1e-9).all()
  assert moved.min() >= 0 and moved.max() <= 1
  np.testing.assert_allclose(  # room enough: nothing moves
      plots.spread([0.1, 0.9, 0.5], 0.2, 0.0, 1.0), [0.1, 0.9, 0.5])
  # Pushed against the top: the block slides down as a whole.
  np.testing.assert_allclose(
      plots.spread([1.0, 1.0], 0.2, 0.0, 1.0), [0.8, 1.0])
  # Each label takes the room that it needs, not that of the tallest.
  np.testing.assert_allclose(
      plots.spread([0.5, 0.5, 0.5], [0.1, 0.3, 0.1], 0.0, 1.0), [0.3, 0.5, 0.7])


def test_small_shares_are_seen_among_group_sizes(tmp_path):
  from vigor_jax.reporting import plots, runs
  run = runs.read(fake_runs.write(tmp_path / "run"))
  run.groups = [{"n": np.array([2] * 990 + [9] * 10)}]
  figure = plots.group_sizes({"eb_widening": [run]}, {"eb_widening": "#0072B2"})
  low, high = figure.axes[0].get_ylim()
  tall = [(np.log(bar.get_height()) - np.log(low)) / np.log(high / low)
          for bar in figure.axes[0].patches]
  assert figure.axes[0].get_yscale() == "log" and min(tall) > 0.25


RULES = ("uniform", "uniform:prompts_per_step=64:optimizer.learning_rate=0.001",
         "vigor", "eb_widening:optimizer.learning_rate=0.001", "eb_effective",
         "eb_predicted")


def _learned(label, rise):
  """A run whose accuracy rises from 0.4 by `rise`, with times of its phases."""
  steps = np.arange(1, 41)
  return runs.Run(
      folder=None, config={}, groups=[], samples=[], notes=[], label=label,
      train=[{"step": int(s), "rollouts": 256 * int(s), "compiles": 9,
              **{f"time/{p}": 0.002 * (1 + i) for i, p in enumerate(
                  ("prefill", "decode", "reward", "allocate", "update"))}}
             for s in steps],
      evals=[{"step": int(s), "rollouts": 256 * int(s),
              "eval/accuracy": 0.4 + rise * (1 - np.exp(-s / 8))}
             for s in steps[::5]])


def _boxes(figure):
  """{text: where it stands} of all that is written in a figure, as drawn."""
  from matplotlib import text
  from matplotlib.backends import backend_agg
  backend_agg.FigureCanvasAgg(figure).draw()
  beyond = set()  # Labels of ticks outside an axis' limits are not drawn.
  for axes in figure.axes:
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      beyond |= {tick.label1 for tick in axis.get_major_ticks()
                 if not low <= tick.get_loc() <= high}
  found = {}
  for i, item in enumerate(figure.findobj(text.Text)):
    if item.get_text().strip() and item.get_visible() and item not in beyond:
      found[f"{i} {item.get_text()}"] = item.get_window_extent()
  return found


def _apart(figure):
  boxes = list(_boxes(figure).items())
  for i, (text, box) in enumerate(boxes):
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text
    assert box.y0 >= 0 and box.y1 <= figure.bbox.y1, text
    for other, at in boxes[:i]:
      # Boxes of text have a pixel or two of air around the letters.
      assert not box.padded(-1).overlaps(at.padded(-1)), (text, other)


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_words_stand_apart_from_curves_and_each_other(count, spread):
  from vigor_jax.reporting import plots
  rules = {label: [_learned(label, 0.55 - spread * i)]
           for i, label in enumerate(RULES[:count])}
  colour = plots.colours(list(rules))
  # Where curves end one above the other, and where in one point.
  figure = plots.accuracy(rules, "rollouts", colour, [(0.5, 0.67), (0.85, 0.86)])
  _apart(figure)
  inside = figure.axes[0].get_window_extent()
  ticks = {t.get_text() for t in figure.axes[0].get_yticklabels()}
  for text, box in _boxes(figure).items():
    assert text.split(" ", 1)[1] in ticks or not box.overlaps(inside), text
  assert any("50% and 85% of the baseline's rise" in text
             for text in _boxes(figure))
  _apart(plots.time_by_phase(rules, colour))


@pytest.mark.parametrize("high", [1.3, 2.0, 4.0, 16.0])
def test_ticks_of_ratios_stand_apart(high):
  from vigor_jax.reporting import plots
  rows = [{"label": label, "measure": measure, "value": value, "low": value,
           "high": value, "bound": ""}
          for label, value in zip(RULES, (0.5, 0.75, 0.9, 1.1, 1.2, high))
          for measure in ("rollouts", "tokens", "seconds")]
  figure = plots.ratios([{"target": "to 67.4%", "rows": rows},
                         {"target": "to 85.1%", "rows": rows}],
                        plots.colours(RULES))
  _apart(figure)
  assert "1x" in {t.get_text() for t in figure.axes[-1].get_xticklabels()}


def test_sizes_are_named_side_by_side():
  from vigor_jax.reporting import plots
  for sizes in ([2, 3], [2, 4, 6, 30], [40]):
    run = runs.Run(folder=None, config={}, train=[], evals=[], samples=[],
                   notes=[], groups=[{"n": np.array(sizes)}])
    figure = plots.group_sizes({"vigor": [run]}, {"vigor": "#D55E00"})
    left, right = figure.axes[0].get_window_extent().intervalx
    named = [box for text, box in _boxes(figure).items() if ": " in text]
    assert len(named) == len(sizes)
    assert min(b.x0 for b in named) >= left
    assert max(b.x1 for b in named) <= right
    _apart(figure)


def test_bars_are_labelled_in_ink_that_is_read():
  from vigor_jax.reporting import style
  assert style.ink_on("#93c5fd") == style.ink_on("#f59e0b") == style.INK
  assert style.ink_on("#2563eb") == style.ink_on("#000000") == "white"


def test_one_colour_per_rule():
  from vigor_jax.reporting import plots
  labels = ["uniform", "uniform:prompts_per_step=64", "vigor",
            "vigor:rounds=2", "eb_widening", "random_top",
            "low_success_first", "other"]
  chosen = plots.colours(labels)
  assert len(set(chosen.values())) == len(labels)
  assert chosen["vigor"] == plots.colours(["vigor"])["vigor"]
