"""How the report's figures look: colours, margins, labels, ticks.

One colour per rule, the same in every figure; names stand at the lines, not in
a legend. Figures are 5 inches wide so that their text stays readable at the
width of a phone.
"""

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib import colors as mpl_colors
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import ticker
import numpy as np

from vigor_jax import statistics
from vigor_jax.reporting import runs as run_folders

matplotlib.rcParams.update(
  {
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
  }
)

Rules = Mapping[str, Sequence[run_folders.Run]]

INK, GREY, FAINT = "#111827", "#6b7280", "#d1d5db"
_DPI = 180
WIDTH = 5.0
# In inches: below an axis for its ticks and name, of a line below the subtitle.
_BELOW, _KEY = 0.45, 0.2
# Okabe and Ito's palette, readable with colour-blind eyes and in grey print.
_FIXED = {
  "vigor": "#D55E00",
  "eb_widening": "#0072B2",
  "low_success_first": "#009E73",
  "random_top": "#CC79A7",
  "streaming_vigor": "#E69F00",
}
_UNIFORM = ("#374151", "#8b95a3", "#64748b", "#b6a98f")
_SPARE = (
  "#56B4E9",
  "#7c3aed",
  "#b45309",
  "#0f766e",
  "#be123c",
  "#4d7c0f",
  "#CC79A7",
  "#009E73",
  "#E69F00",
  "#D55E00",
  "#0072B2",
)


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
    parts.append(
      f"{value} prompts" if field == "prompts_per_step" else f"{field} {value}"
    )
  return "\n".join([name.replace("_", " ")] + parts)


def png(figure) -> bytes:
  data = io.BytesIO()
  figure.savefig(
    data, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None}
  )
  return data.getvalue()


# -------------------------------------------------------------- shared pieces


def new_figure(
  title,
  subtitle="",
  *,
  rows=1,
  height=3.2,
  right=0.97,
  left=0.105,
  bottom=None,
  key=False,
  **options,
):
  """A figure with its title at the top left; returns (figure, axes list).

  bottom: edge of the axes; by default as much as an axis with a name takes.
  key: whether the figure grows by a `key_line` below the subtitle.
  """
  height += _KEY * key
  figure = mpl_figure.Figure(figsize=(WIDTH, height))
  axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
  top = 1 - (0.36 + 0.16 * bool(subtitle) + _KEY * key) / height
  bottom = _BELOW / height if bottom is None else bottom
  figure.subplots_adjust(left=left, right=right, top=top, bottom=bottom)
  figure.text(
    0.02, 1 - 0.09 / height, title, weight="bold", size=10.5, va="top"
  )
  if subtitle:
    figure.text(
      0.02, 1 - 0.28 / height, subtitle, size=8.5, color=GREY, va="top"
    )
  return figure, list(axes)


def line_height(labels) -> float:
  """Height of a figure of lines, in inches, that has room for their names."""
  return max(3.2, 0.52 + _BELOW + sum(map(_name_height, labels)))


def row_height(labels) -> float:
  """Inches between rows that are named at the left, so that no names meet."""
  return max(0.42, max(map(_name_height, labels)))


def _name_height(label: str) -> float:
  return 0.13 * (label.count("\n") + 1) + 0.03


def right_margin(labels) -> float:
  """Right edge of the axes that leaves room for names outside."""
  longest = max(len(line) for label in labels for line in label.split("\n"))
  return 1 - (0.24 + 0.072 * longest) / WIDTH


def spread(positions, heights, low: float, high: float) -> np.ndarray:
  """Moves labels apart until none overlaps, in order, as little as it can.

  Blocks of neighbours that are too close share the shift (pool adjacent
  violators on positions minus their rank's offset), then all are kept within
  [low, high] if that has room for them.

  Args:
    positions: of the labels' middles.
    heights: of each label, or one for all.
    low, high: of the middles.
  """
  positions = np.asarray(positions, float)
  heights = np.broadcast_to(heights, positions.shape)
  order = np.argsort(positions, kind="stable")
  between = (heights[order][1:] + heights[order][:-1]) / 2
  offsets = np.concatenate([[0.0], np.cumsum(between)])
  blocks: list[list[float]] = []
  for offset, value in zip(offsets, positions[order]):
    blocks.append([value - offset, 1])
    while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
      value, count = blocks.pop()
      mean, before = blocks[-1]
      blocks[-1] = [
        (mean * before + value * count) / (before + count),
        before + count,
      ]
  base = np.repeat([b[0] for b in blocks], [int(b[1]) for b in blocks])
  base = np.maximum(np.minimum(base, high - offsets[-1]), low)
  moved = np.empty_like(positions)
  moved[order] = base + offsets
  return moved


def name_lines(axis, ends) -> None:
  """Names at the right of lines, tied to where they end.

  Args:
    axis: with a linear y axis whose limits are set.
    ends: [(x, y, text, colour)].
  """
  if not ends:
    return
  low, high = axis.get_ylim()
  axis.set_ylim(low, high)
  place = axis.get_position()
  inch = (high - low) / (axis.figure.get_figheight() * place.height)
  width = axis.figure.get_figwidth() * place.width
  heights = np.array([inch * _name_height(text) for *_, text, _ in ends])
  order = np.argsort([y for _, y, *_ in ends], kind="stable")
  least, most = heights[order[[0, -1]]] / 2
  ys = spread([y for _, y, *_ in ends], heights, low + least, high - most)
  where = {"textcoords": ("axes fraction", "data"), "annotation_clip": False}
  for y, (x, end, text, colour) in zip(ys, ends):
    axis.annotate(
      text, (x, end), xytext=(1 + 0.17 / width, y), color=colour, va="center",
      size=8.5, weight="bold", linespacing=1.05, **where,
    )  # fmt: skip
    # A line of its own that ends before the names: a steep one passes others.
    axis.annotate(
      "", (x, end), xytext=(1 + 0.13 / width, y), **where,
      arrowprops={
        "arrowstyle": "-", "color": colour, "linewidth": 1, "linestyle": ":",
        "shrinkA": 0, "shrinkB": 1.5,
      },
    )  # fmt: skip


def thousands(value, _=None) -> str:
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= size:
      return f"{value / size:.3g}{letter}"
  return f"{value:.3g}"


def x_axis(axis, label) -> None:
  axis.set_xlabel(label)
  axis.xaxis.set_major_locator(ticker.MaxNLocator(5))
  axis.xaxis.set_major_formatter(ticker.FuncFormatter(thousands))


def percent_axis(axis, which="y", bins=6) -> None:
  """Percent ticks with as many decimals as their distance needs."""
  chosen = axis.yaxis if which == "y" else axis.xaxis
  chosen.set_major_locator(ticker.MaxNLocator(bins, steps=[1, 2, 5, 10]))
  step = 100 * np.diff(chosen.get_majorticklocs()).min(initial=1.0)
  decimals = max(0, -math.floor(math.log10(step) + 1e-9))
  chosen.set_major_formatter(
    ticker.PercentFormatter(1.0, decimals=decimals, symbol=" %")
  )


def seeds_text(rules: Rules) -> str:
  counts = {len(runs) for runs in rules.values()}
  if counts == {1}:
    return "one run" if len(rules) == 1 else "one run of each rule"
  if len(counts) == 1:
    return f"mean and range of {counts.pop()} seeds"
  return f"mean and range of {min(counts)} to {max(counts)} seeds"


def mean_series(runs, key):
  """Smoothed seed mean of a train key: (rollouts, mean) or None."""
  lines = [run.series(key) for run in runs]
  lines = [(x, steady(y)) for x, y in lines if len(x)]
  if not lines or max(x[0] for x, _ in lines) > min(x[-1] for x, _ in lines):
    return None
  curve = statistics.mean_curve(lines)
  return curve.x, curve.mean


def steady(y) -> np.ndarray:
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


def line_figure(
  title,
  subtitle,
  named,
  *,
  ylabel="",
  percent=False,
  zero=False,
  xlabel="rollouts",
  top=None,
):
  """A figure of named lines: [(text, colour, x, y, style)]."""
  texts = [text for text, *_ in named]
  figure, (axis,) = new_figure(
    title, subtitle, right=right_margin(texts), height=line_height(texts)
  )
  ends = []
  for text, colour, x, y, style in named:
    axis.plot(
      x,
      y,
      color=colour,
      linewidth=1.8,
      linestyle=style,
      marker="o" if len(x) == 1 else None,
      markersize=4,
    )
    ends.append((x[-1], y[-1], text, colour))
  if max(len(x) for _, _, x, _, _ in named) > 1:
    axis.margins(x=0)
  if zero:
    axis.set_ylim(0, top)
  if percent:
    percent_axis(axis)
  if ylabel:
    axis.set_ylabel(ylabel)
  x_axis(axis, xlabel)
  name_lines(axis, ends)
  return figure


def key_line(figure, entries, below=0.40, **options) -> None:
  """One line that says what marks and lines mean.

  Args:
    figure: of any height.
    entries: [(text, properties of the Line2D that stands before it)].
    below: inches from the figure's top to the line's middle.
    options: of the legend.
  """
  handles = [
    mpl_lines.Line2D(
      [], [], label=text, **{"linestyle": "none", "markersize": 6, **look}
    )
    for text, look in entries
  ]
  figure.legend(
    handles=handles,
    loc="center left",
    bbox_to_anchor=(0.01, 1 - below / figure.get_figheight()),
    ncols=len(entries),
    frameon=False,
    borderpad=0,
    **{
      "fontsize": 7.6, "handletextpad": 0.1, "columnspacing": 0.9, **options
    },
  )  # fmt: skip


def ink_on(colour: str) -> str:
  """White on dark colours, INK on light ones, by WCAG's relative luminance."""
  channels = np.array(mpl_colors.to_rgb(colour))
  linear = np.where(
    channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
  )
  luminance = linear @ [0.2126, 0.7152, 0.0722]
  return "white" if luminance < 0.25 else INK
