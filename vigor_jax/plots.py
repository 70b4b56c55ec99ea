"""The report's figures. The only module that imports matplotlib.

Every function draws one figure from runs of one stream, keyed by the rule's
label, and returns it, or None when the runs do not carry what it shows. One
colour per rule, the same in every figure; names stand at the lines, not in a
legend. Figures are 5 inches wide so that their text stays readable at the width
of a phone.
"""

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import patheffects
from matplotlib import ticker
import numpy as np

from vigor_jax import runs as run_folders
from vigor_jax import statistics

matplotlib.rcParams.update({
    "font.size": 9.5,
    "axes.edgecolor": "#9ca3af",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "axes.labelcolor": "#374151",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "text.color": "#111827",
    "lines.solid_capstyle": "round",
})

Rules = Mapping[str, Sequence[run_folders.Run]]

INK, GREY, FAINT = "#111827", "#6b7280", "#d1d5db"
_DPI = 180
_WIDTH = 5.0
# Okabe and Ito's palette, readable with colour-blind eyes and in grey print.
_FIXED = {
    "vigor": "#D55E00",
    "eb_widening": "#0072B2",
    "low_success_first": "#009E73",
    "random_top": "#CC79A7",
    "streaming_vigor": "#E69F00",
}
_UNIFORM = ("#374151", "#9ca3af", "#64748b", "#b6a98f")
_SPARE = ("#56B4E9", "#7c3aed", "#b45309", "#0f766e", "#be123c", "#4d7c0f",
          "#CC79A7", "#009E73", "#E69F00", "#D55E00", "#0072B2")
_PHASES = {
    "prefill": "#93c5fd", "decode": "#2563eb", "reward": "#f59e0b",
    "allocate": "#dc2626", "update": "#059669", "other": "#9ca3af"}


def colours(labels: Sequence[str]) -> dict[str, str]:
  """One colour per label; greys for uniform splits, the reference."""
  chosen: dict[str, str] = {}
  uniforms = iter(_UNIFORM)
  for label in labels:
    name = label.split(":")[0]
    colour = next(uniforms, None) if name == "uniform" else _FIXED.get(name)
    if colour is None or colour in chosen.values():
      free = [c for c in _SPARE if c not in chosen.values()]
      colour = free[0] if free else _SPARE[len(chosen) % len(_SPARE)]
    chosen[label] = colour
  return chosen


def short(label: str) -> str:
  """A label on two short lines: "uniform" over "64 prompts"."""
  name, *overrides = label.split(":")
  parts = []
  for override in overrides:
    field, _, value = override.partition("=")
    field = field.split(".")[-1]
    parts.append(f"{value} prompts" if field == "prompts_per_step"
                 else f"{field} {value}")
  return "\n".join([name.replace("_", " ")] + parts)


def png(figure) -> bytes:
  data = io.BytesIO()
  figure.savefig(data, format="png", dpi=_DPI, facecolor="white",
                 metadata={"Software": None})
  return data.getvalue()


# -------------------------------------------------------------- shared pieces


def _new(title, subtitle="", *, rows=1, height=3.2, right=0.97, left=0.105,
         bottom=0.13, **options):
  """A figure with its title at the top left; returns (figure, axes list)."""
  figure = mpl_figure.Figure(figsize=(_WIDTH, height))
  axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
  top = 1 - (0.52 if subtitle else 0.36) / height
  figure.subplots_adjust(left=left, right=right, top=top, bottom=bottom)
  figure.text(0.02, 1 - 0.09 / height, title, weight="bold", size=10.5,
              va="top")
  if subtitle:
    figure.text(0.02, 1 - 0.28 / height, subtitle, size=8.5, color=GREY,
                va="top")
  return figure, list(axes)


def _right_margin(labels) -> float:
  """Right edge of the axes that leaves room for names outside."""
  longest = max(len(line) for label in labels for line in label.split("\n"))
  return 1 - (0.12 + 0.072 * longest) / _WIDTH


def spread(positions, gap: float, low: float, high: float) -> np.ndarray:
  """Moves positions apart to at least `gap`, in order, as little as it can.

  Blocks of neighbours that are too close share the shift (pool adjacent
  violators on positions minus their rank's offset), then all are kept within
  [low, high] if that has room for them.
  """
  positions = np.asarray(positions, float)
  order = np.argsort(positions, kind="stable")
  blocks: list[list[float]] = []
  for rank, value in enumerate(positions[order]):
    blocks.append([value - rank * gap, 1])
    while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
      value, count = blocks.pop()
      mean, before = blocks[-1]
      blocks[-1] = [(mean * before + value * count) / (before + count),
                    before + count]
  base = np.repeat([b[0] for b in blocks], [int(b[1]) for b in blocks])
  base = np.maximum(np.minimum(base, high - gap * (len(base) - 1)), low)
  moved = np.empty_like(positions)
  moved[order] = base + gap * np.arange(len(base))
  return moved


def _name_lines(axis, ends) -> None:
  """Names at the right of lines that end at `ends`: [(y, text, colour)]."""
  if not ends:
    return
  low, high = axis.get_ylim()
  figure_height = axis.figure.get_figheight() * axis.get_position().height
  tallest = max(text.count("\n") + 1 for _, text, _ in ends)
  gap = (high - low) * (0.145 * tallest + 0.03) / figure_height
  ys = spread([y for y, _, _ in ends], gap, low + gap / 2, high - gap / 3)
  for y, (_, text, colour) in zip(ys, ends):
    axis.annotate(text, (1.015, y), xycoords=("axes fraction", "data"),
                  color=colour, va="center", size=8.5, weight="bold",
                  linespacing=1.05, annotation_clip=False)


def _thousands(value, _=None) -> str:
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= size:
      return f"{value / size:.3g}{letter}"
  return f"{value:.3g}"


def _x_axis(axis, label) -> None:
  axis.set_xlabel(label)
  axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
  axis.xaxis.set_major_formatter(ticker.FuncFormatter(_thousands))


def _percent(axis, which="y", bins=6) -> None:
  """Percent ticks with as many decimals as their distance needs."""
  chosen = axis.yaxis if which == "y" else axis.xaxis
  chosen.set_major_locator(ticker.MaxNLocator(bins, steps=[1, 2, 5, 10]))
  step = 100 * np.diff(chosen.get_majorticklocs()).min(initial=1.0)
  decimals = max(0, -math.floor(math.log10(step) + 1e-9))
  chosen.set_major_formatter(
      ticker.PercentFormatter(1.0, decimals=decimals, symbol=" %"))


def _seeds(rules: Rules) -> str:
  counts = {len(runs) for runs in rules.values()}
  if counts == {1}:
    return "one run" if len(rules) == 1 else "one run of each rule"
  if len(counts) == 1:
    return f"mean and range of {counts.pop()} seeds"
  return f"mean and range of {min(counts)} to {max(counts)} seeds"


def _mean_series(runs, key):
  """Smoothed seed mean of a train key: (rollouts, mean) or None."""
  lines = [run.series(key) for run in runs]
  lines = [(x, _steady(y)) for x, y in lines if len(x)]
  if not lines or max(x[0] for x, _ in lines) > min(x[-1] for x, _ in lines):
    return None
  curve = statistics.mean_curve(lines)
  return curve.x, curve.mean


def _steady(y) -> np.ndarray:
  """Running mean over a tenth of a line, one-sided at its ends.

  For quantities that scatter from step to step; unlike `statistics.smooth` it
  leaves no raw value at the ends, and may bend a trend there.
  """
  y = np.asarray(y, float)
  half = len(y) // 20
  total = np.concatenate([[0.0], np.cumsum(y)])
  index = np.arange(len(y))
  first = np.maximum(index - half, 0)
  last = np.minimum(index + half + 1, len(y))
  return (total[last] - total[first]) / (last - first)


def _lines(title, subtitle, named, *, ylabel="", percent=False, zero=False,
           xlabel="rollouts", top=None):
  """A figure of named lines: [(text, colour, x, y, style)]."""
  texts = [text for text, *_ in named]
  figure, (axis,) = _new(title, subtitle, right=_right_margin(texts))
  ends = []
  for text, colour, x, y, style in named:
    axis.plot(x, y, color=colour, linewidth=1.8, linestyle=style,
              marker="o" if len(x) == 1 else None, markersize=4)
    ends.append((y[-1], text, colour))
  if zero:
    axis.set_ylim(0, top)
  if percent:
    _percent(axis)
  if ylabel:
    axis.set_ylabel(ylabel)
  _x_axis(axis, xlabel)
  _name_lines(axis, ends)
  return figure


# ------------------------------------------------------------------- learning

_SPENDING = {"rollouts": "rollouts", "tokens": "generated tokens",
             "seconds": "training seconds"}


def accuracy(rules: Rules, against: str, colour, targets=()):
  """Held-out accuracy against what was spent, one line per rule."""
  curves = {label: run_folders.mean_curve(runs, against)
            for label, runs in rules.items()}
  curves = {label: c for label, c in curves.items() if c is not None}
  if not curves:
    return None
  names = {label: short(label) for label in curves}
  figure, (axis,) = _new(
      f"Accuracy against {_SPENDING[against]}",
      f"held-out prompts, {_seeds(rules)}, smoothed over 3 evaluations",
      right=_right_margin(names.values()))
  ends = []
  for label, curve in curves.items():
    axis.fill_between(curve.x, curve.low, curve.high, color=colour[label],
                      alpha=0.13, linewidth=0)
  for label, curve in curves.items():
    axis.plot(curve.x, curve.mean, color=colour[label], linewidth=2,
              marker="o" if len(curve.x) == 1 else None, markersize=4)
    ends.append((curve.mean[-1], names[label], colour[label]))
  halo = [patheffects.withStroke(linewidth=2.5, foreground="white")]
  for fraction, value in targets:
    axis.axhline(value, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)))
    axis.annotate(f"{fraction:.0%} of the rise", (0.01, value),
                  xycoords=("axes fraction", "data"), xytext=(0, 2),
                  textcoords="offset points", size=7.5, color=GREY,
                  path_effects=halo)
  axis.set_xlim(left=0)
  _percent(axis)
  _x_axis(axis, _SPENDING[against])
  _name_lines(axis, ends)
  return figure


def ratios(results: Sequence[dict], colour):
  """Baseline / rule for rollouts, tokens and seconds, one panel per target.

  Args:
    results: [{"target": text, "rows": [{"label", "measure", "value", "low",
      "high", "bound"}]}]; rows of one label are neighbours.
  """
  results = [r for r in results if any(
      row["value"] is not None for row in r["rows"])]
  if not results:
    return None
  labels = list(dict.fromkeys(
      row["label"] for r in results for row in r["rows"]))
  measures = list(dict.fromkeys(
      row["measure"] for r in results for row in r["rows"]))
  texts = [short(label) for label in labels]
  height = 1.25 + len(results) * (0.3 + 0.5 * len(labels))
  figure, axes = _new(
      "Cost to the same accuracy, against the baseline",
      "above 1: the rule needs less than the baseline",
      rows=len(results), left=1 - _right_margin(texts), right=0.82,
      sharex=True, height=height, bottom=0.45 / height)
  figure.subplots_adjust(top=1 - 0.72 / height,
                         hspace=0.36 / (0.5 * len(labels)))
  values = [v for r in results for row in r["rows"]
            for v in (row["value"], row["low"], row["high"])
            if v is not None and math.isfinite(v)]
  low, high = min(min(values), 0.8) / 1.12, max(max(values), 1.25) * 1.12
  for axis, result in zip(axes, results):
    axis.set_xscale("log")
    axis.grid(False)
    axis.axvline(1, color=INK, linewidth=0.9)
    axis.set_title(result["target"], size=8.5, loc="left", color=INK,
                   x=0, pad=4)
    for row in result["rows"]:
      if row["value"] is None:
        continue
      y = labels.index(row["label"]) + 0.24 * (
          measures.index(row["measure"]) - (len(measures) - 1) / 2)
      shade = colour[row["label"]]
      if row["low"] is not None:
        axis.plot([row["low"], row["high"]], [y, y], color=shade, linewidth=2,
                  alpha=0.45)
      marker = {"": "o", "at most": "<", "at least": ">"}[row["bound"]]
      axis.plot([row["value"]], [y], marker=marker, color=shade, markersize=5,
                markerfacecolor="white" if row["bound"] else shade)
      sign = {"": "", "at most": "≤ ", "at least": "≥ "}[row["bound"]]
      axis.annotate(f"{row['measure']} {sign}{row['value']:.2f}", (1.01, y),
                    xycoords=("axes fraction", "data"), size=7, va="center",
                    color=shade, annotation_clip=False)
    axis.set_yticks(range(len(labels)), texts)
    for tick, label in zip(axis.get_yticklabels(), labels):
      tick.set(color=colour[label], weight="bold", size=8.5)
    axis.set_ylim(len(labels) - 0.45, -0.55)
    axis.set_xlim(low, high)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(ticker.FixedLocator(
        [t for t in (0.1, 0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 8, 16)
         if low <= t <= high]))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.xaxis.set_major_formatter(
        ticker.FuncFormatter(lambda v, _: f"{v:g}x"))
  axes[-1].set_xlabel("baseline's spending / rule's spending")
  return figure


# ------------------------------------------------------- where the budget went


def _ranked(step: dict) -> np.ndarray:
  """[rounds, groups] counts of a step, prompts with most rollouts first."""
  return step["rounds"][:, np.argsort(-step["n"], kind="stable")]


def _mean_rounds(runs) -> np.ndarray | None:
  """[rounds, rank] mean rollouts over all steps; short steps count as 0."""
  tables = [_ranked(s) for run in runs for s in run.groups if s["rounds"].size]
  if not tables:
    return None
  shape = (max(t.shape[0] for t in tables), max(t.shape[1] for t in tables))
  total = np.zeros(shape)
  for table in tables:
    total[:table.shape[0], :table.shape[1]] += table
  return total / len(tables)


def rounds_heat(rules: Rules, one_step: bool = False):
  """Heat map of rollouts per prompt (by rank) and round.

  One panel per rule with the mean over the run's steps; for a single run also
  its last step as it was.
  """
  panels = []
  for label, runs in rules.items():
    table = _mean_rounds(runs)
    if table is not None:
      steps = sum(len(run.groups) for run in runs)
      name = short(label).replace("\n", ", ")
      text = f"mean of {steps} steps" if one_step else name
      panels.append((text, table))
    if one_step and runs and runs[0].groups and (
        last := runs[0].groups[-1])["rounds"].size:
      panels.append((f"step {last['step']}", _ranked(last)))
  if not panels:
    return None
  tall = [0.16 * min(max(t.shape[0], 2), 10) for _, t in panels]
  height = 1.2 + sum(tall) + 0.26 * (len(tall) - 1)
  figure, axes = _new(
      "Rollouts per prompt and round",
      "prompts of a step sorted by their rollouts, one row per round",
      rows=len(panels), height=height, bottom=0.46 / height, right=0.86,
      left=0.115, sharex=True, gridspec_kw={"height_ratios": tall})
  figure.subplots_adjust(top=1 - 0.7 / height,
                         hspace=0.26 * len(tall) / sum(tall))
  top = max(t.max() for _, t in panels)
  width = max(t.shape[1] for _, t in panels)
  for axis, (text, table) in zip(axes, panels):
    axis.grid(False)
    image = axis.imshow(
        np.where(table > 0, table, np.nan), aspect="auto", cmap="YlOrRd",
        vmin=0, vmax=top, interpolation="nearest",
        extent=(0.5, table.shape[1] + 0.5, table.shape[0] + 0.5, 0.5))
    axis.set_title(text, size=8.5, loc="left", pad=3)
    axis.set_xlim(0.5, width + 0.5)
    rounds = table.shape[0]
    axis.set_yticks([1, rounds] if rounds > 1 else [1])
    axis.set_ylabel("round", size=8.5)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
  axes[-1].set_xlabel("prompt, by rank within its step")
  bottom, upper = axes[-1].get_position().y0, axes[0].get_position().y1
  bar = figure.add_axes((0.885, bottom, 0.02, upper - bottom))
  bar.grid(False)
  figure.colorbar(image, cax=bar,
                  ticks=ticker.MaxNLocator(6, integer=True))
  bar.tick_params(size=0, labelsize=8)
  bar.set_title("rollouts", size=8, loc="left")
  for side in bar.spines.values():
    side.set_visible(False)
  return figure


def group_sizes(rules: Rules, colour):
  """Histogram of rollouts per prompt over the whole run, a row per rule."""
  sizes = {}
  for label, runs in rules.items():
    found = [s["n"] for run in runs for s in run.groups]
    if found:
      sizes[label] = np.concatenate(found)
  if not sizes:
    return None
  most = max(int(n.max()) for n in sizes.values() if len(n))
  rows = len(sizes)
  texts = [short(label) for label in sizes]
  height = 0.95 + (0.72 if rows > 1 else 1.9) * rows
  figure, axes = _new(
      "Rollouts per prompt, whole run", "share of the opened prompts",
      rows=rows, sharex=True, height=height, bottom=0.45 / height,
      right=_right_margin(texts))
  figure.subplots_adjust(hspace=0.3)
  for axis, (label, n), text in zip(axes, sizes.items(), texts):
    shares = np.bincount(n.astype(int), minlength=most + 1) / max(len(n), 1)
    x = np.flatnonzero(shares)
    axis.bar(x, shares[x], width=0.82, color=colour[label])
    if len(x):
      for at in x if len(x) <= 6 else [shares.argmax()]:
        axis.annotate(f"{at}: {shares[at]:.0%}", (at, shares[at]),
                      xytext=(0, 1), textcoords="offset points", ha="center",
                      size=7.5, color=GREY)
    axis.set_ylim(0, shares.max() * 1.28)
    _percent(axis, bins=2)
    axis.set_xlim(0.2, max(most, 4) + 0.8 + 0.03 * most)
    _name_lines(axis, [(shares.max() * 0.64, text, colour[label])])
  axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
  axes[-1].set_xlabel("rollouts of one prompt in one step")
  return figure


def difficulty(rules: Rules, colour):
  """Mean level of the data's prompts, weighted by their rollouts."""
  named = []
  for label, runs in rules.items():
    steps = [(s["step"], s) for run in runs for s in run.groups
             if s["levels"] is not None and s["n"].sum() > 0]
    if not steps:
      continue
    weighted: dict[int, list[float]] = {}
    plain: dict[int, list[float]] = {}
    for step, s in steps:
      weighted.setdefault(step, []).append(
          float((s["levels"] * s["n"]).sum() / s["n"].sum()))
      plain.setdefault(step, []).append(float(s["levels"].mean()))
    x = np.array(sorted(weighted))
    y = _steady([np.mean(weighted[i]) for i in x])
    text = short(label) if len(rules) > 1 else "weighted by\nrollouts"
    named.append((text, colour[label], x, y, "-"))
    if len(rules) == 1:
      y = _steady([np.mean(plain[i]) for i in x])
      named.append(("all opened\nprompts", GREY, x, y, (0, (2, 2))))
  if not named:
    return None
  return _lines("Difficulty the rollouts were spent on",
                "mean level of the prompts, weighted by rollouts, smoothed",
                named, ylabel="level", xlabel="step")


# ------------------------------------------------------------ signal in groups


def pass_rates(histograms, title: str, how: str, colour: str):
  """Pass-rate histograms of several stretches of training.

  Args:
    histograms: [(text, edges [M+1], share [M], mean)] from early to late.
    how: what the shares are: deconvolved or raw, in words.
  """
  if not histograms:
    return None
  height = 0.95 + 0.78 * len(histograms)
  figure, axes = _new(title, how, rows=len(histograms), sharex=True,
                      sharey=True, height=height, bottom=0.45 / height,
                      right=0.8)
  figure.subplots_adjust(hspace=0.25)
  for axis, (text, edges, share, mean) in zip(axes, histograms):
    axis.bar(edges[:-1], share, np.diff(edges) * 0.92, align="edge",
             color=colour)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.25 * max(max(s) for _, _, s, _ in histograms))
    _percent(axis, bins=2)
    for at, height in zip((edges[:-1] + edges[1:]) / 2, share):
      if height >= 0.005:
        axis.annotate(f"{100 * height:.0f}", (at, height), xytext=(0, 1),
                      textcoords="offset points", ha="center", size=7,
                      color=GREY)
    axis.annotate(f"{text}\nmean {mean:.0%}", (1.015, 0.5),
                  xycoords="axes fraction", size=8.5, va="center",
                  annotation_clip=False)
  _percent(axes[-1], which="x")
  axes[-1].set_xlabel("pass rate of a prompt")
  return figure


_VARIANCE = (
    ("allocation/variance_per_rollout_pareto", "predicted,\nPareto",
     "#CC79A7", "D"),
    ("allocation/variance_per_rollout_predicted",
     "predicted,\nfinite-sample", "#E69F00", "s"),
    ("allocation/variance_per_rollout_fresh", "measured,\nfresh rollouts",
     "#0072B2", "o"),
    ("allocation/variance_per_rollout", "own rollouts,\nbiased up",
     "#9ca3af", "|"),
)


def evaluation_series(run, key) -> tuple[np.ndarray, np.ndarray]:
  """(rollouts, values) of a key that may stand in either kind of line."""
  pairs = sorted(
      (run_folders.number(line, "rollouts"), run_folders.number(line, key))
      for line in (*run.train, *run.evals))
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
  return _lines("Reward variance per rollout",
                "mean of the run so far", named, zero=True)


def variance_by_rule(rules: Rules, colour):
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
  texts = [short(label) for label in table]
  height = 1.3 + 0.42 * len(table)
  figure, (axis,) = _new("Reward variance per rollout, mean of the run", " ",
                         height=height, left=1 - _right_margin(texts),
                         right=0.95, bottom=0.45 / height)
  axis.grid(axis="x")
  axis.grid(False, axis="y")
  for y, row in enumerate(table.values()):
    for key, text, shade, marker in kinds:
      if key in row:
        offset = 0.13 * (kinds.index((key, text, shade, marker)) - 1.5)
        axis.plot([row[key]], [y + offset], marker=marker, color=shade,
                  markersize=6,
                  markeredgewidth=1.8 if marker == "|" else 0.8,
                  markeredgecolor=shade if marker == "|" else "white",
                  linestyle="none")
  axis.set_yticks(range(len(table)), texts)
  for tick, label in zip(axis.get_yticklabels(), table):
    tick.set(color=colour[label], weight="bold", size=8.5)
  axis.set_ylim(len(table) - 0.5, -0.5)
  axis.set_xlim(left=0)
  axis.set_xlabel("mean variance of a rollout's prompt")
  _key(figure, [(text.replace("predicted,\n", "").replace("\n", " "), shade,
                 marker) for _, text, shade, marker in kinds],
       1 - 0.40 / height)
  return figure


def _key(figure, entries, y) -> None:
  """One line of [(text, colour, marker)] under the title."""
  handles = [
      mpl_lines.Line2D([], [], color=shade, marker=marker,
                              linestyle="none", markersize=6, label=text)
      for text, shade, marker in entries]
  figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.005, y),
                ncols=len(entries), frameon=False, fontsize=7.6,
                handletextpad=0.1, columnspacing=0.9, borderpad=0)


def signal_over_run(run, colour):
  """Share of groups and of rollouts without signal, one run."""
  named = []
  for key, text, shade in (
      ("groups/zero_variance_share", "groups", GREY),
      ("rollouts/zero_variance_share", "rollouts\nin them", colour)):
    x, y = run.series(key)
    if len(x):
      named.append((f"{text}\n{y.mean():.0%}", shade, x, _steady(y), "-"))
  if not named:
    return None
  return _lines("Without signal: all rewards of the group alike",
                  "share of groups, and of rollouts in such groups, smoothed",
                  named, percent=True, zero=True, top=1)


def signal_by_rule(rules: Rules, colour):
  """Share of groups against share of rollouts without signal, per rule."""
  rows = []
  for label, runs in rules.items():
    groups = [run.mean("groups/zero_variance_share") for run in runs]
    rollouts = [run.mean("rollouts/zero_variance_share") for run in runs]
    if np.isfinite(groups).any() and np.isfinite(rollouts).any():
      rows.append((label, np.nanmean(groups), np.nanmean(rollouts)))
  if not rows:
    return None
  texts = [short(label) for label, *_ in rows]
  height = 1.3 + 0.42 * len(rows)
  figure, (axis,) = _new("Without signal: all rewards of the group alike", " ",
                         height=height, left=1 - _right_margin(texts),
                         right=0.94, bottom=0.45 / height)
  axis.grid(axis="x")
  axis.grid(False, axis="y")
  for y, (label, groups, rollouts) in enumerate(rows):
    axis.plot([groups, rollouts], [y, y], color=colour[label], linewidth=2,
              alpha=0.5)
    axis.plot([groups], [y], "o", color=colour[label], markersize=7,
              markerfacecolor="white", markeredgewidth=1.6)
    axis.plot([rollouts], [y], "o", color=colour[label], markersize=7)
  axis.set_yticks(range(len(rows)), texts)
  for tick, (label, *_) in zip(axis.get_yticklabels(), rows):
    tick.set(color=colour[label], weight="bold", size=8.5)
  axis.set_ylim(len(rows) - 0.5, -0.5)
  axis.set_xlim(0, 1)
  _percent(axis, which="x")
  axis.set_xlabel("mean share over the run")
  handles = [
      mpl_lines.Line2D([], [], color=GREY, marker="o", label=text,
                              linestyle="none", markersize=6,
                              markerfacecolor=face)
      for text, face in (("groups", "white"), ("rollouts in them", GREY))]
  figure.legend(handles=handles, loc="center left", ncols=2, frameon=False,
                bbox_to_anchor=(0.005, 1 - 0.40 / height), fontsize=8,
                handletextpad=0.1, columnspacing=1.2, borderpad=0)
  return figure


def mixed_prompts(rules: Rules, colour):
  """Distinct prompts per step whose rewards disagree."""
  named = []
  for label, runs in rules.items():
    found = _mean_series(runs, "groups/mixed")
    if found is not None:
      text = short(label) if len(rules) > 1 else "mixed\nprompts"
      named.append((text, colour[label], *found, "-"))
  if not named:
    return None
  return _lines("Distinct prompts with mixed rewards, per step",
                "what a step can learn from; smoothed", named, zero=True)


# ------------------------------------------------------------------------ time


def time_by_phase(rules: Rules, colour):
  """Median seconds of a step by phase, one bar per rule."""
  rows = []
  for label, runs in rules.items():
    phases = {}
    for phase in _PHASES:
      values = [run.series(f"time/{phase}")[1] for run in runs]
      values = np.concatenate(values) if values else np.zeros(0)
      phases[phase] = float(np.median(values)) if len(values) else 0.0
    if sum(phases.values()) > 0:
      rows.append((label, phases))
  if not rows:
    return None
  many = len(rules) > 1
  texts = [short(label) for label, _ in rows] if many else ["one step"]
  height = 1.35 + 0.45 * len(rows)
  figure, (axis,) = _new("Time of a step by phase", " ", height=height,
                         left=1 - _right_margin(texts), right=0.88,
                         bottom=0.45 / height)
  axis.grid(axis="x")
  axis.grid(False, axis="y")
  longest = max(sum(p.values()) for _, p in rows)
  scale, unit = (1e3, "ms") if longest < 2 else (1, "s")
  for y, (_, phases) in enumerate(rows):
    start = 0.0
    for phase, seconds in phases.items():
      width = seconds * scale
      axis.barh(y, width, left=start, height=0.62, color=_PHASES[phase],
                edgecolor="white", linewidth=0.6)
      if width > 0.09 * longest * scale:
        axis.annotate(f"{width:.3g}", (start + width / 2, y), ha="center",
                      va="center", color="white", size=8)
      start += width
    axis.annotate(f" {start:.3g} {unit}", (start, y), va="center", size=8.5)
  axis.set_yticks(range(len(rows)), texts)
  for tick, (label, _) in zip(axis.get_yticklabels(), rows):
    tick.set(color=colour[label] if many else INK, weight="bold", size=8.5)
  axis.set_ylim(len(rows) - 0.5, -0.5)
  axis.set_xlabel(f"median {unit} per step")
  _key(figure, [(p, c, "s") for p, c in _PHASES.items()], 1 - 0.40 / height)
  return figure
