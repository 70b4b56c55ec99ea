"""Figures of what was learned, at what cost and in what time.

Every function draws one figure from runs of one stream, keyed by the rule's
label, and returns it, or None when the runs do not carry what it shows.
"""

import math
from collections.abc import Sequence

from matplotlib import ticker

from vigor_jax.reporting import phases as phase_times
from vigor_jax.reporting import pooled
from vigor_jax.reporting import style


_SPENDING = {
  "rollouts": "rollouts",
  "tokens": "generated tokens",
  "seconds": "training seconds",
}


def accuracy(rules: style.Rules, against: str, colour, targets=()):
  """Held-out accuracy against what was spent, one line per rule."""
  curves = {
    label: pooled.mean_curve(runs, against)
    for label, runs in rules.items()
  }
  curves = {label: c for label, c in curves.items() if c is not None}
  if not curves:
    return None
  names = {label: style.short(label) for label in curves}
  figure, (axis,) = style.new_figure(
    f"Accuracy against {_SPENDING[against]}",
    f"held-out prompts, {style.seeds_text(rules)}, smoothed over 3 evaluations",
    right=style.right_margin(names.values()),
    height=style.line_height(names.values()),
    key=bool(targets),
  )
  ends = []
  for label, curve in curves.items():
    axis.fill_between(
      curve.x,
      curve.low,
      curve.high,
      color=colour[label],
      alpha=0.13,
      linewidth=0,
    )
  for label, curve in curves.items():
    axis.plot(
      curve.x,
      curve.mean,
      color=colour[label],
      linewidth=2,
      marker="o" if len(curve.x) == 1 else None,
      markersize=4,
    )
    ends.append((curve.x[-1], curve.mean[-1], names[label], colour[label]))
  if targets:
    dotted = {"color": style.GREY, "linewidth": 0.9, "linestyle": (0, (2, 3))}
    for _, value in targets:
      axis.axhline(value, **dotted)
    # In the key: wherever they stood at their lines, curves may pass.
    fractions = " and ".join(f"{fraction:.0%}" for fraction, _ in targets)
    style.key_line(
      figure,
      [(f"{fractions} of the baseline's rise", dotted)],
      below=0.53,
      fontsize=8.5,
      handletextpad=0.5,
      labelcolor=style.GREY,
    )
  axis.set_xlim(0, max(curve.x[-1] for curve in curves.values()) or None)
  style.percent_axis(axis)
  style.x_axis(axis, _SPENDING[against])
  style.name_lines(axis, ends)
  return figure


_RATIOS_RIGHT = 0.82  # Right edge of the axes of `ratios`.


def _ratio_ticks(low: float, high: float, width: float) -> list[float]:
  """Ticks of a log axis from low to high, from 1 outwards while they fit.

  width: of the axis in inches.
  """
  inch = math.log(high / low) / width
  ticks = [1.0]
  for side in ((1.4, 2, 3, 4, 8, 16), (0.7, 0.5, 0.25, 0.1)):
    last = 1.0
    for tick in side:
      if low <= tick <= high and abs(math.log(tick / last)) > 0.38 * inch:
        ticks.append(tick)
        last = tick
  return sorted(ticks)


def ratios(results: Sequence[dict], colour):
  """Baseline / rule for rollouts, tokens and seconds, one panel per target.

  Args:
    results: [{"target": text, "rows": [{"label", "measure", "value", "low",
      "high", "bound"}]}]; rows of one label are neighbours.
  """
  results = [
    r for r in results if any(row["value"] is not None for row in r["rows"])
  ]
  if not results:
    return None
  labels = list(
    dict.fromkeys(row["label"] for r in results for row in r["rows"])
  )
  measures = list(
    dict.fromkeys(row["measure"] for r in results for row in r["rows"])
  )
  texts = [style.short(label) for label in labels]
  row = max(0.5, style.row_height(texts))
  height = 1.25 + len(results) * (0.3 + row * len(labels))
  figure, axes = style.new_figure(
    "Cost to the same accuracy, against the baseline",
    "above 1: the rule needs less than the baseline",
    rows=len(results),
    left=1 - style.right_margin(texts),
    right=_RATIOS_RIGHT,
    sharex=True,
    height=height,
    bottom=0.45 / height,
  )
  figure.subplots_adjust(
    top=1 - 0.72 / height, hspace=0.36 / (row * len(labels))
  )
  values = [
    v
    for r in results
    for row in r["rows"]
    for v in (row["value"], row["low"], row["high"])
    if v is not None and math.isfinite(v)
  ]
  low, high = min(min(values), 0.8) / 1.12, max(max(values), 1.25) * 1.12
  width = style.WIDTH * (_RATIOS_RIGHT - 1 + style.right_margin(texts))
  ticks = _ratio_ticks(low, high, width)
  for axis, result in zip(axes, results):
    axis.set_xscale("log")
    axis.grid(False)
    axis.axvline(1, color=style.INK, linewidth=0.9)
    axis.set_title(
      result["target"], size=8.5, loc="left", color=style.INK, x=0, pad=4
    )
    for row in result["rows"]:
      if row["value"] is None:
        continue
      y = labels.index(row["label"]) + 0.24 * (
        measures.index(row["measure"]) - (len(measures) - 1) / 2
      )
      shade = colour[row["label"]]
      if row["low"] is not None:
        axis.plot(
          [row["low"], row["high"]],
          [y, y],
          color=shade,
          linewidth=2,
          alpha=0.45,
        )
      marker = {"": "o", "at most": "<", "at least": ">"}[row["bound"]]
      axis.plot(
        [row["value"]],
        [y],
        marker=marker,
        color=shade,
        markersize=5,
        markerfacecolor="white" if row["bound"] else shade,
      )
      sign = {"": "", "at most": "≤ ", "at least": "≥ "}[row["bound"]]
      axis.annotate(
        f"{row['measure']} {sign}{row['value']:.2f}",
        (1.01, y),
        xycoords=("axes fraction", "data"),
        size=7,
        va="center",
        color=shade,
        annotation_clip=False,
      )
    axis.set_yticks(range(len(labels)), texts)
    for tick, label in zip(axis.get_yticklabels(), labels):
      tick.set(color=colour[label], weight="bold", size=8.5)
    axis.set_ylim(len(labels) - 0.45, -0.55)
    axis.set_xlim(low, high)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}x"))
  axes[-1].set_xlabel("baseline's spending / rule's spending")
  return figure


# In the order in which they are drawn.
_PHASES = dict(
  zip(
    phase_times.PHASES,
    ("#93c5fd", "#2563eb", "#f59e0b", "#dc2626", "#059669", "#9ca3af"),
  )
)


def time_by_phase(rules: style.Rules, colour):
  """Median seconds of a step by phase, one bar per rule."""
  rows = [
    (label, phases)
    for label, runs in rules.items()
    if (phases := phase_times.medians(runs))
  ]
  if not rows:
    return None
  many = len(rules) > 1
  texts = [style.short(label) for label, _ in rows] if many else ["one step"]
  height = 1.35 + max(0.45, style.row_height(texts)) * len(rows)
  left, right = 1 - style.right_margin(texts), 0.88
  figure, (axis,) = style.new_figure(
    "Time of a step by phase",
    " ",
    height=height,
    left=left,
    right=right,
    bottom=0.45 / height,
  )
  axis.grid(axis="x")
  axis.grid(False, axis="y")
  longest = max(sum(p.values()) for _, p in rows)
  scale, unit = (1e3, "ms") if longest < 2 else (1, "s")
  inch = 1.05 * longest * scale / (style.WIDTH * (right - left))
  for y, (_, phases) in enumerate(rows):
    start = 0.0
    for phase, seconds in phases.items():
      width = seconds * scale
      axis.barh(
        y,
        width,
        left=start,
        height=0.62,
        color=_PHASES[phase],
        edgecolor="white",
        linewidth=0.6,
      )
      if width > 0.32 * inch:
        axis.annotate(
          f"{width:.3g}",
          (start + width / 2, y),
          ha="center",
          va="center",
          color=style.ink_on(_PHASES[phase]),
          size=8,
        )
      start += width
    axis.annotate(f" {start:.3g} {unit}", (start, y), va="center", size=8.5)
  axis.set_yticks(range(len(rows)), texts)
  for tick, (label, _) in zip(axis.get_yticklabels(), rows):
    tick.set(
      color=colour[label] if many else style.INK, weight="bold", size=8.5
    )
  axis.set_ylim(len(rows) - 0.5, -0.5)
  axis.set_xlabel(f"median {unit} per step")
  style.key_line(
    figure, [(p, {"color": c, "marker": "s"}) for p, c in _PHASES.items()]
  )
  return figure
