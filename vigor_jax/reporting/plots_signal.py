"""Figures of the signal that groups and rollouts carried.

Every function returns None when the runs do not carry what it shows.
"""

import math

import numpy as np

from vigor_jax.reporting import runs as run_folders
from vigor_jax.reporting import style


def pass_rates(histograms, title: str, how: str, colour: str):
  """Pass-rate histograms of several stretches of training.

  Args:
    histograms: [(text, edges [M+1], share [M], mean)] from early to late.
    how: what the shares are: deconvolved or raw, in words.
  """
  if not histograms:
    return None
  height = 0.95 + 0.78 * len(histograms)
  figure, axes = style.new_figure(
    title,
    how,
    rows=len(histograms),
    sharex=True,
    sharey=True,
    height=height,
    bottom=0.45 / height,
    right=0.8,
  )
  figure.subplots_adjust(hspace=0.25)
  for axis, (text, edges, share, mean) in zip(axes, histograms):
    axis.bar(
      edges[:-1], share, np.diff(edges) * 0.92, align="edge", color=colour
    )
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.25 * max(max(s) for _, _, s, _ in histograms))
    style.percent_axis(axis, bins=2)
    for at, height in zip((edges[:-1] + edges[1:]) / 2, share):
      if height >= 0.005:
        axis.annotate(
          f"{100 * height:.0f}",
          (at, height),
          xytext=(0, 1),
          textcoords="offset points",
          ha="center",
          size=7,
          color=style.GREY,
        )
    axis.annotate(
      f"{text}\nmean {mean:.0%}",
      (1.015, 0.5),
      xycoords="axes fraction",
      size=8.5,
      va="center",
      annotation_clip=False,
    )
  style.percent_axis(axes[-1], which="x")
  axes[-1].set_xlabel("pass rate of a prompt")
  return figure


_VARIANCE = (
  (
    "allocation/variance_per_rollout_pareto",
    "predicted,\nPareto",
    "#CC79A7",
    "D",
  ),
  (
    "allocation/variance_per_rollout_predicted",
    "predicted,\nfinite-sample",
    "#E69F00",
    "s",
  ),
  (
    "allocation/variance_per_rollout_fresh",
    "measured,\nfresh rollouts",
    "#0072B2",
    "o",
  ),
  (
    "allocation/variance_per_rollout",
    "own rollouts,\nbiased up",
    style.GREY,
    "|",
  ),
)


def evaluation_series(run, key) -> tuple[np.ndarray, np.ndarray]:
  """(rollouts, values) of a key that may stand in either kind of line."""
  pairs = sorted(
    (run_folders.number(line, "rollouts"), run_folders.number(line, key))
    for line in (*run.train, *run.evals)
  )
  pairs = [p for p in pairs if not any(map(math.isnan, p))]
  x, y = zip(*pairs) if pairs else ((), ())
  return np.array(x, float), np.array(y, float)


def variance_over_run(run):
  """Variance per rollout of one run: predictions and measurement."""
  named = []
  for key, text, colour, _ in _VARIANCE:
    x, y = evaluation_series(run, key)
    if len(x):
      pooled = np.cumsum(y) / np.arange(1, len(y) + 1)
      text = f"{text}\n{pooled[-1]:.4f}"
      named.append((text, colour, x, pooled, "-"))
  if not named:
    return None
  return style.line_figure(
    "Reward variance per rollout", "mean of the run so far", named, zero=True
  )


def variance_by_rule(rules: style.Rules, colour):
  """Run means of variance per rollout: predictions against measurement."""
  table = {}
  for label, runs in rules.items():
    row = {}
    for key, *_ in _VARIANCE:
      values = [evaluation_series(run, key)[1] for run in runs]
      values = np.concatenate(values) if values else np.zeros(0)
      if len(values):
        row[key] = float(values.mean())
    if row:
      table[label] = row
  kinds = [k for k in _VARIANCE if any(k[0] in row for row in table.values())]
  if not table or not kinds:
    return None
  texts = [style.short(label) for label in table]
  height = 1.3 + style.row_height(texts) * len(table)
  figure, (axis,) = style.new_figure(
    "Reward variance per rollout, mean of the run",
    " ",
    height=height,
    left=1 - style.right_margin(texts),
    right=0.95,
    bottom=0.45 / height,
  )
  axis.grid(axis="x")
  axis.grid(False, axis="y")
  for y, row in enumerate(table.values()):
    for key, text, shade, marker in kinds:
      if key in row:
        place = kinds.index((key, text, shade, marker))
        offset = 0.13 * (place - (len(kinds) - 1) / 2)
        axis.plot(
          [row[key]],
          [y + offset],
          marker=marker,
          color=shade,
          markersize=6,
          markeredgewidth=1.8 if marker == "|" else 0.8,
          markeredgecolor=shade if marker == "|" else "white",
          linestyle="none",
        )
  axis.set_yticks(range(len(table)), texts)
  for tick, label in zip(axis.get_yticklabels(), table):
    tick.set(color=colour[label], weight="bold", size=8.5)
  axis.set_ylim(len(table) - 0.5, -0.5)
  axis.set_xlim(left=0)
  axis.set_xlabel("mean variance of a rollout's prompt")
  style.key_line(
    figure,
    [
      (
        text.replace("predicted,\n", "").replace("\n", " "),
        {"color": shade, "marker": marker},
      )
      for _, text, shade, marker in kinds
    ],
  )
  return figure


def signal_over_run(run, colour):
  """Share of groups and of rollouts without signal, one run."""
  named = []
  for key, text, shade in (
    ("groups/zero_variance_share", "groups", style.GREY),
    ("rollouts/zero_variance_share", "rollouts\nin them", colour),
  ):
    x, y = run.series(key)
    if len(x):
      named.append((f"{text}\n{y.mean():.0%}", shade, x, style.steady(y), "-"))
  if not named:
    return None
  return style.line_figure(
    "Without signal: all rewards of the group alike",
    "share of groups, and of rollouts in such groups, smoothed",
    named,
    percent=True,
    zero=True,
    top=1,
  )


def signal_by_rule(rules: style.Rules, colour):
  """Share of groups against share of rollouts without signal, per rule."""
  rows = []
  for label, runs in rules.items():
    groups = [run.mean("groups/zero_variance_share") for run in runs]
    rollouts = [run.mean("rollouts/zero_variance_share") for run in runs]
    if np.isfinite(groups).any() and np.isfinite(rollouts).any():
      rows.append((label, np.nanmean(groups), np.nanmean(rollouts)))
  if not rows:
    return None
  texts = [style.short(label) for label, *_ in rows]
  height = 1.3 + style.row_height(texts) * len(rows)
  figure, (axis,) = style.new_figure(
    "Without signal: all rewards of the group alike",
    " ",
    height=height,
    left=1 - style.right_margin(texts),
    right=0.94,
    bottom=0.45 / height,
  )
  axis.grid(axis="x")
  axis.grid(False, axis="y")
  for y, (label, groups, rollouts) in enumerate(rows):
    axis.plot(
      [groups, rollouts], [y, y], color=colour[label], linewidth=2, alpha=0.5
    )
    axis.plot(
      [groups],
      [y],
      "o",
      color=colour[label],
      markersize=7,
      markerfacecolor="white",
      markeredgewidth=1.6,
    )
    axis.plot([rollouts], [y], "o", color=colour[label], markersize=7)
  axis.set_yticks(range(len(rows)), texts)
  for tick, (label, *_) in zip(axis.get_yticklabels(), rows):
    tick.set(color=colour[label], weight="bold", size=8.5)
  axis.set_ylim(len(rows) - 0.5, -0.5)
  axis.set_xlim(0, 1)
  style.percent_axis(axis, which="x")
  axis.set_xlabel("mean share over the run")
  mark = {"color": style.GREY, "marker": "o"}
  style.key_line(
    figure,
    [
      ("groups", {**mark, "markerfacecolor": "white"}),
      ("rollouts in them", mark),
    ],
  )
  return figure


def mixed_prompts(rules: style.Rules, colour):
  """Distinct prompts per step whose rewards disagree."""
  named = []
  for label, runs in rules.items():
    found = style.mean_series(runs, "groups/mixed")
    if found is not None:
      text = style.short(label) if len(rules) > 1 else "mixed\nprompts"
      named.append((text, colour[label], *found, "-"))
  if not named:
    return None
  return style.line_figure(
    "Distinct prompts with mixed rewards, per step",
    "what a step can learn from; smoothed",
    named,
    zero=True,
  )
