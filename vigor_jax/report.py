"""Builds report.html from run folders: `python -m vigor_jax.report DIR...`.

One file that opens anywhere: images are inlined, and lie as PNGs in plots/
beside it. DIR is a run's folder or a comparison's. One run gets its own report;
several are compared. A run may be unfinished, cut off in the middle of a line,
or lack keys: what cannot be shown is named at the end, not passed over.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Sequence
import html
import json
import math
import os
import pathlib
import sys

import numpy as np

from vigor_jax import metrics
from vigor_jax import runs as run_folders
from vigor_jax import verdict

COMPARE_FILE = "compare.json"

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem 4rem;
  background: #fff; color: #111827; line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: 1rem;
  border-top: 1px solid #e5e7eb; }
h3 { font-size: 1.02rem; margin: 1.8rem 0 .5rem; }
p, ul { max-width: 46rem; margin: .5rem 0; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
.lead { font-size: 1.08rem; }
.quiet, figcaption, caption { color: #4b5563; font-size: .9rem; }
.figures { display: grid; gap: 1.6rem 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; break-inside: avoid; }
figure img { width: 100%; max-width: 33rem; height: auto; display: block; }
figcaption { max-width: 33rem; margin-top: .3rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; vertical-align: top;
  border-bottom: 1px solid #e5e7eb; }
caption { caption-side: bottom; text-align: left; padding-top: .4rem; }
th { font-weight: 600; color: #374151; border-bottom-color: #9ca3af; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.label { font-weight: 600; }
td.text { font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere;
  min-width: 9rem; max-width: 28rem; }
pre { background: #f9fafb; border: 1px solid #e5e7eb; padding: .7rem .9rem;
  font-size: .82rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
@media print { body { padding: 0; max-width: none; font-size: 11pt; }
  .figures { grid-template-columns: 1fr 1fr; gap: 1rem; }
  details > *:not(summary) { display: block; } }
"""


def build(run_dirs: Sequence, out=None) -> pathlib.Path:
  """Writes report.html and plots/*.png for run folders.

  Args:
    run_dirs: folders of runs, of comparisons (with compare.json), or both.
    out: folder to write to; by default the only folder given, or the deepest
      one that contains all of them.

  Returns:
    The path of report.html. It is replaced in one move, so a reader never
    sees half of it.

  Raises:
    ValueError: no folder, or one that holds neither a run nor a comparison.
  """
  if not run_dirs:
    raise ValueError("a report needs at least one run folder")
  folders = [pathlib.Path(d) for d in run_dirs]
  if out is None:
    out = folders[0] if len(folders) == 1 else os.path.commonpath(
        [f.resolve() for f in folders])
  out = pathlib.Path(out)
  runs, record = _collect(folders)
  pictures = _Pictures(out)
  if len(runs) == 1 and not record:
    title, body = _single(runs[0], pictures)
  else:
    title, body = _several(runs, record, pictures)
  path = out / "report.html"
  metrics.atomic_write(str(path), _page(title, body))
  return path


def _collect(folders) -> tuple[list[run_folders.Run], dict]:
  """All runs, those of comparisons labelled, and the first comparison."""
  runs, record = [], {}
  for folder in folders:
    if not folder.is_dir():
      raise ValueError(f"{folder} is not a folder")
    if not (folder / COMPARE_FILE).exists():
      runs.append(run_folders.read(folder))
      continue
    found = json.loads((folder / COMPARE_FILE).read_text(encoding="utf-8"))
    record = record or found
    for cell in found["cells"]:
      place = folder / cell["folder"]
      if cell["state"] == "done" and place.is_dir():
        run = run_folders.read(place)
        run.label, run.variant = cell["label"], cell["variant"]
        runs.append(run)
  run_folders.label_runs(runs)
  return runs, record


class _Pictures:
  """Draws figures, keeps them as files and hands out their HTML."""

  def __init__(self, out: pathlib.Path):
    # Here, because matplotlib takes longer to import than the rest to run.
    from vigor_jax import plots

    self.plots = plots
    self._folder = out / "plots"

  def html(self, drawn: Sequence[tuple], prefix: str = "") -> str:
    """[(name, figure or None, caption)] -> a grid of <figure> elements."""
    parts = []
    for name, figure, caption in drawn:
      if figure is None:
        continue
      data = self.plots.png(figure)
      metrics.atomic_write(str(self._folder / f"{prefix}{name}.png"), data)
      title = figure.texts[0].get_text()
      parts.append(
          f'<figure><img alt="{_text(title)}" src="data:image/png;base64,'
          f'{base64.b64encode(data).decode()}"><figcaption>{_text(caption)}'
          "</figcaption></figure>")
    return f'<div class="figures">{"".join(parts)}</div>' if parts else ""


def _text(value) -> str:
  return html.escape(str(value))


def _page(title: str, body: str) -> str:
  return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width, initial-scale=1">'
      f"<title>{_text(title)}</title><style>{_STYLE}</style></head>"
      f"<body>{body}</body></html>\n")


def _list(items: Sequence[str]) -> str:
  return "<ul>" + "".join(f"<li>{_text(i)}</li>" for i in items) + "</ul>"


def _table(header, rows, *, numbers=(), texts=(), caption="") -> str:
  """A table; `numbers` and `texts` are columns set right or monospaced."""
  def kind(column):
    if column in numbers:
      return ' class="number"'
    if column in texts:
      return ' class="text"'
    return ' class="label"' if column == 0 and numbers else ""

  head = "".join(f"<th{kind(i) if i in numbers else ''}>{_text(h)}</th>"
                 for i, h in enumerate(header))
  lines = "".join(
      "<tr>" + "".join(f"<td{kind(i)}>{_text(c)}</td>"
                       for i, c in enumerate(row)) + "</tr>" for row in rows)
  note = f"<caption>{_text(caption)}</caption>" if caption else ""
  return (f'<div class="scroll"><table>{note}<thead><tr>{head}</tr></thead>'
          f"<tbody>{lines}</tbody></table></div>")


# --------------------------------------------------------------------- one run


def _amount(value: float) -> str:
  if not math.isfinite(value):
    return "unknown"
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
    if value >= size:
      return f"{value / min(size, 1e3 if letter == 'k' else size):.3g} {letter}"
  return f"{value:.0f}"


def _share(value: float) -> str:
  return verdict.percent(value if math.isfinite(value) else None, 0)


def run_summary(run: run_folders.Run) -> list[str]:
  """What happened in a run, in plain words."""
  if not run.train and not run.evals:
    return ["Nothing has been recorded yet: the run ended, or was cut off, "
            "before its first step."]
  said = []
  total = run.total_steps
  done = int(run.train[-1]["step"]) if run.train else 0
  if total is not None and done < total:
    said.append(f"The run stands at step {done} of {total}; the command it was "
                "started with continues it.")
  else:
    said.append(f"The run finished its {done} steps.")
  x, y = run.curve("rollouts")
  if len(y) > 1:
    peak = int(np.argmax(y))
    text = (f"Accuracy on held-out prompts went from {y[0]:.1%} to {y[-1]:.1%}")
    if peak != len(y) - 1:
      text += f" (highest {y[peak]:.1%} after {_amount(x[peak])} rollouts)"
    said.append(text + ".")
  elif len(y):
    said.append(f"Accuracy on held-out prompts was {y[0]:.1%}, measured once.")
  if run.train:
    spent = run_folders.training_seconds(run.train)
    seconds = run.last("seconds") if spent is None else float(spent[-1])
    said.append(
        f"It generated {_amount(run.last('rollouts'))} rollouts with "
        f"{_amount(run.last('tokens'))} tokens in "
        + (f"{seconds:.3g} s of training" if math.isfinite(seconds)
           else "an unknown time")
        + " (evaluation and compilation left out).")
    groups = run.mean("groups/zero_variance_share")
    rollouts = run.mean("rollouts/zero_variance_share")
    mixed = run.mean("groups/mixed")
    if math.isfinite(groups):
      text = (f"In {_share(groups)} of the groups all rewards were alike, so "
              "they taught nothing")
      if math.isfinite(rollouts):
        text += f"; {_share(rollouts)} of the rollouts went there"
      if math.isfinite(mixed):
        text += f". {mixed:.1f} distinct prompts a step had mixed rewards"
      said.append(text + ".")
    if mixed == 0:
      said.append("No group ever carried signal: nothing could be learned. "
                  "Look at the sample completions below and at the reward.")
    late = run.compiled_after(2)
    count = run.last("compiles")
    if math.isfinite(count):
      said.append(
          f"{count:.0f} programs were compiled, "
          + ("none after the first two steps." if not late else
             f"some of them late, at steps {', '.join(map(str, late[:8]))}."))
  return said


def _single(run, pictures) -> tuple[str, str]:
  plots = pictures.plots
  label = run.label
  colour = plots.colours([label])
  rules = {label: [run]}
  task = run.config.get("task", {}).get("name", "")
  title = f"{run.allocator}, seed {run.seed}" + (f" on {task}" if task else "")
  rates, how = run_folders.pass_rate_histograms([run])
  body = [f"<h1>{_text(title)}</h1>", '<div class="lead">']
  body += [f"<p>{_text(' '.join(run_summary(run)))}</p>", "</div>"]
  body.append("<h2>What was learned</h2>")
  body.append(pictures.html([
      (f"accuracy_{m}", plots.accuracy(rules, m, colour), caption)
      for m, caption in _ACCURACY_CAPTIONS]))
  body.append("<h2>Where the rollouts went</h2>")
  body.append(pictures.html([
      ("rounds", plots.rounds_heat(rules, one_step=True), _HEAT_CAPTION),
      ("group_sizes", plots.group_sizes(rules, colour), _SIZES_CAPTION),
      ("pass_rates", plots.pass_rates(
          rates, "Pass rates of the prompts over training", how,
          colour[label]), _RATES_CAPTION),
      ("difficulty", plots.difficulty(rules, colour), _LEVEL_CAPTION),
  ]))
  body.append("<h2>What they carried</h2>")
  body.append(pictures.html([
      ("variance", plots.variance_over_run(run), _VARIANCE_CAPTION),
      ("signal", plots.signal_over_run(run, colour[label]), _SIGNAL_CAPTION),
      ("mixed", plots.mixed_prompts(rules, colour), _MIXED_CAPTION),
      ("time", plots.time_by_phase(rules, colour), _TIME_CAPTION),
  ]))
  body.append(_samples(run))
  body.append(_how([run], None))
  body.append(_notes([run]))
  return title, "".join(body)


_ACCURACY_CAPTIONS = (
    ("rollouts", "Every generated rollout counts, also those that were not "
     "trained on."),
    ("tokens", "The same against generated tokens: rules that prefer long "
     "answers pay for them here."),
    ("seconds", "The same against time in training steps. Evaluation is left "
     "out, and steps that compiled count as a median step."),
)
_TARGET_CAPTION = (
    "Spending up to the target, geometric mean over seeds; > where runs never "
    "got there. In brackets and under x: baseline / rule, above 1 the rule is "
    "cheaper.")
_HEAT_CAPTION = (
    "Each row is a round, each column a prompt, sorted by how many rollouts "
    "it got. White: none. A rule that concentrates is dark at the left in late "
    "rows.")
_SIZES_CAPTION = (
    "How many rollouts a prompt got in one step. Adaptive rules make this "
    "skewed to the right: few prompts get many.")
_RATES_CAPTION = (
    "Mass near 0 and 100 % carries no signal. Adaptive rules gain where this "
    "is U-shaped and can lose where it is not.")
_LEVEL_CAPTION = (
    "Levels come with the data. A rising line says that the budget follows the "
    "policy to harder prompts.")
_VARIANCE_CAPTION = (
    "Mean reward variance of the prompts that rollouts were spent on. Only "
    "fresh rollouts measure it without bias: a rule's own rollouts were "
    "selected for looking variable.")
_SIGNAL_CAPTION = (
    "A group whose rewards are all alike has advantage 0. Adaptive rules have "
    "more such groups, but spend fewer rollouts in them.")
_MIXED_CAPTION = (
    "Concentrating the budget lowers this number. Distinct mixed prompts "
    "matter more than the share of rollouts with signal.")
_TIME_CAPTION = "Median over steps, so that compilation does not show."


def _samples(run) -> str:
  """The sample completions of the last evaluation that kept some."""
  if not run.samples:
    return ""
  last = run.samples[-1].get("step")
  kept = [s for s in run.samples if s.get("step") == last][:24]

  def cell(sample, key):
    value = sample.get(key)
    if value is None:
      return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

  keys = [("prompt", "prompt"), ("completion", "completion"),
          ("answer", "answer"), ("reward", "reward"),
          ("advantage", "advantage")]
  keys = [k for k in keys if any(k[1] in s for s in kept)]
  rows = [[cell(s, key) for _, key in keys] for s in kept]
  names = [name for name, _ in keys]
  numbers = [i for i, n in enumerate(names) if n in ("reward", "advantage")]
  texts = [i for i in range(len(names)) if i not in numbers]
  return (f"<h2>Sample completions</h2><p class=quiet>Drawn at step "
          f"{_text(last)}.</p>"
          + _table(names, rows, numbers=numbers, texts=texts))


# ---------------------------------------------------------------- several runs


def _several(runs, record, pictures) -> tuple[str, str]:
  variants: dict[str, list] = {}
  for run in runs:
    variants.setdefault(run.variant, []).append(run)
  sections, results = [], {}
  for name, members in variants.items():
    rules = run_folders.by_label(members)
    baseline = record.get("baseline") or _baseline(rules)
    if baseline not in rules:
      sections.append(
          f"<h2>{_text(name)}</h2><p>The baseline {_text(baseline)} has no "
          "finished run here yet, so nothing can be compared.</p>")
      continue
    result = verdict.analyse(rules, baseline)
    results[name or "the stream"] = result
    prefix = f"{_slug(name)}-" if len(variants) > 1 else ""
    heading = name if len(variants) > 1 else "What was found"
    sections.append(f"<h2>{_text(heading)}</h2>"
                    + _variant(rules, result, pictures, prefix))
  labels = list(dict.fromkeys(run.label for run in runs))
  title = "Comparison: " + ", ".join(labels[:6]) if labels else "Comparison"
  cells = record.get("cells", [])
  body = [f"<h1>{_text('Comparison of allocation rules')}</h1>",
          f"<p class=quiet>{_text(', '.join(labels))}</p>"]
  unfinished = [c for c in cells if c["state"] != "done"]
  if unfinished:
    body.append(f"<p><b>{len(unfinished)} of {len(cells)} cells are missing</b>"
                " and the command below continues with them:</p>" + _list([
                    f"{c['name']}: {c['state']}"
                    + (f" ({c['error']})" if c.get("error") else "")
                    for c in unfinished[:20]]))
  if len(results) > 1:
    body.append('<div class="lead">' + _list(verdict.overall(results))
                + "</div>")
  body += sections
  body.append(_how(runs, record))
  body.append(_notes(runs))
  return title, "".join(body)


def _baseline(rules) -> str:
  """The first uniform rule, or the first of all."""
  for label, runs in rules.items():
    if runs and runs[0].allocator == "uniform":
      return label
  return next(iter(rules))


def _slug(name: str) -> str:
  return "".join(c if c.isalnum() or c in "_-." else "-" for c in name)


def _variant(rules, result, pictures, prefix) -> str:
  """The section of one stream: verdict, table, figures."""
  plots = pictures.plots
  colour = plots.colours(list(rules))
  targets = [(t["fraction"], t["accuracy"]) for t in result["targets"]]
  baseline = result["baseline"]
  rates, how = run_folders.pass_rate_histograms(rules[baseline])
  parts = [_list(result["sentences"])]
  for title, header, rows in verdict.tables(result):
    parts.append(f"<h3>{_text(title)}</h3>")
    parts.append(_table(
        header, rows, numbers=range(1, len(header)),
        caption=_TARGET_CAPTION if result["targets"] else ""))
  parts.append(pictures.html(
      [(f"accuracy_{m}", plots.accuracy(
          rules, m, colour, targets if m == "rollouts" else ()), caption)
       for m, caption in _ACCURACY_CAPTIONS]
      + [("ratios", plots.ratios(ratio_rows(result), colour),
          "Paired by seed, geometric means; lines are bootstrap intervals over "
          "seeds. Hollow marks are bounds (< at most, > at least), because "
          "some runs never got there.")],
      prefix))
  parts.append("<h3>Where the rollouts went</h3>")
  parts.append(pictures.html([
      ("rounds", plots.rounds_heat(rules), _HEAT_CAPTION),
      ("group_sizes", plots.group_sizes(rules, colour), _SIZES_CAPTION),
      ("pass_rates", plots.pass_rates(
          rates, f"Pass rates under {baseline}", how, colour[baseline]),
       _RATES_CAPTION),
      ("difficulty", plots.difficulty(rules, colour), _LEVEL_CAPTION),
  ], prefix))
  parts.append("<h3>What they carried, and what it cost</h3>")
  parts.append(pictures.html([
      ("mixed", plots.mixed_prompts(rules, colour), _MIXED_CAPTION),
      ("signal", plots.signal_by_rule(rules, colour), _SIGNAL_CAPTION),
      ("variance", plots.variance_by_rule(rules, colour), _VARIANCE_CAPTION),
      ("time", plots.time_by_phase(rules, colour), _TIME_CAPTION),
  ], prefix))
  parts.append(_cost_table(result))
  return "".join(parts)


def ratio_rows(result: dict) -> list[dict]:
  """The ratios to the baseline as `plots.ratios` takes them."""
  panels = []
  for position, target in enumerate(result["targets"]):
    rows = []
    for label, rule in result["rules"].items():
      if label == result["baseline"]:
        continue
      for measure in verdict.MEASURES:
        ratio = rule["ratio"][position][measure] or {
            "value": None, "low": None, "high": None, "bound": ""}
        rows.append({"label": label, "measure": measure, **{
            k: ratio[k] for k in ("value", "low", "high", "bound")}})
    panels.append({
        "target": f"to {target['accuracy']:.1%} ({target['fraction']:.0%} of "
                  "the baseline's rise)",
        "rows": rows})
  return panels


def _cost_table(result) -> str:
  def cell(value, form):
    return "–" if value is None else format(value, form)

  rows = [[
      label,
      cell(rule["tokens_per_rollout"], ".1f"),
      cell(rule["mixed_prompts_per_step"], ".1f"),
      cell(rule["zero_variance_groups"], ".0%"),
      cell(rule["zero_variance_rollouts"], ".0%"),
      cell(rule["slot_utilisation"], ".0%"),
      "none" if not rule["compiled_late"] else
      f"steps {', '.join(map(str, rule['compiled_late'][:5]))}",
  ] for label, rule in result["rules"].items()]
  return _table(
      ["rule", "tokens a rollout", "mixed prompts a step", "groups w/o signal",
       "rollouts w/o signal", "slots in use", "compiled late"],
      rows, numbers=range(1, 7))


# ---------------------------------------------------------- how it was produced


def _how(runs, record) -> str:
  """The command and the configuration."""
  parts = ["<h2>How it was produced</h2>"]
  command = (record or {}).get("command") or next(
      (r.command for r in runs if r.command), None)
  if command:
    parts.append(f"<p>The command, which also continues an unfinished one:</p>"
                 f"<pre>{_text(command)}</pre>")
  parts.append("<p class=quiet>This page is rebuilt with <code>python -m "
               "vigor_jax.report DIR</code>"
               + (", and a single run has its own: <code>python -m "
                  "vigor_jax.report DIR/cells/NAME</code>" if record else "")
               + ".</p>")
  flats = [run_folders.flatten(run.config) for run in runs]
  if flats and flats[0]:
    differing = sorted(
        k for k in set().union(*flats)
        if any(f.get(k) != flats[0].get(k) for f in flats))
    shared = {k: v for k, v in flats[0].items() if k not in differing}
    text = "\n".join(f"{k} = {v}" for k, v in shared.items())
    if differing:
      text += "\n\nnot the same in all runs: " + ", ".join(differing)
    parts.append("<details><summary>Configuration</summary>"
                 f"<pre>{_text(text)}</pre></details>")
  return "".join(parts)


def _notes(runs) -> str:
  notes = [f"{run.folder.name}: {note}" for run in runs for note in run.notes]
  if not notes:
    return ""
  return ("<h2>What could not be read</h2>" + _list(notes[:40])
          + (f"<p>and {len(notes) - 40} more.</p>" if len(notes) > 40 else ""))


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
      prog="python -m vigor_jax.report", description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("folders", nargs="+", metavar="DIR",
                      help="a run's or a comparison's folder")
  parser.add_argument("--out", help="folder for report.html and plots/")
  args = parser.parse_args(argv)
  try:
    path = build(args.folders, args.out)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(path)
  return 0


if __name__ == "__main__":
  sys.exit(main())
