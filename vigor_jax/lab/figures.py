"""Figures of docs/allocation.md. Matplotlib, in the report's style."""

from __future__ import annotations

import numpy as np

from vigor_jax.reporting import style

NAMES = {"vigor": "VIGOR", "eb_widening": "eb_widening"}
_DPI = 110
_LOW, _HIGH = 0.5, 2.0  # ends of the colour scale of ratios


def save(figure, path) -> None:
  figure.savefig(path, dpi=_DPI, facecolor="white", metadata={"Software": None})


def colour_of(label: str) -> str:
  return style.colours([label.split()[0]])[label.split()[0]]


def phase(points: dict[str, list[tuple[float, float, float]]]):
  """Ratios over the shares of easy and hard prompts, a panel per rule.

  points: rule -> [(easy, hard, ratio of rollouts to target)].
  """
  figure, axes = style.new_figure(
    "What part of the stream has signal decides",
    "rollouts to the early target, best uniform split / rule; above 1: cheaper",
    rows=len(points),
    height=2.9 * len(points) + 0.4,
    left=0.155,
    right=0.95,
    bottom=0.09,
    sharex=True,
  )
  for axis, (rule, rows) in zip(axes, points.items()):
    axis.plot([0, 1], [1, 0], color=style.FAINT, linewidth=1, zorder=0)
    easy, hard, ratio = map(np.array, zip(*rows))
    axis.scatter(
      easy, hard, s=440, c=np.log(ratio), cmap="RdBu", marker="s",
      vmin=np.log(_LOW), vmax=np.log(_HIGH), edgecolors=style.GREY,
      linewidths=0.6,
    )  # fmt: skip
    for e, h, r in rows:
      dark = abs(np.log(r)) > 0.45
      axis.text(
        e, h, f"{r:.2f}", ha="center", va="center", size=8,
        color="white" if dark else style.INK,
      )  # fmt: skip
    axis.set_xlim(-0.08, 1.02)
    axis.set_ylim(-0.12, 1)
    axis.set_ylabel("share of hard prompts")
    axis.text(
      0.97, 0.9, NAMES.get(rule, rule), transform=axis.transAxes, ha="right",
      weight="bold", color=colour_of(rule),
    )  # fmt: skip
    style.percent_axis(axis, "y")
    style.percent_axis(axis, "x")
  axes[-1].set_xlabel("share of easy prompts")
  return figure


def noise(lines: dict[str, list]):
  """Ratios against the probability of a wrong verdict, with intervals.

  lines: rule -> [(q, statistics.Ratio)].
  """
  figure, (axis,) = style.new_figure(
    "Wrong verdicts on the stream with sparse signal",
    "rollouts to the early target, best uniform split / rule, 95 % interval",
    right=style.right_margin(list(NAMES.values())),
  )
  ends = []
  for rule, rows in lines.items():
    rows = [(q, r) for q, r in rows if np.isfinite(r.value)]
    q = np.array([q for q, _ in rows])
    value, low, high = (
      np.array([getattr(r, name) for _, r in rows])
      for name in ("value", "low", "high")
    )
    axis.plot(q, value, color=colour_of(rule), marker="o", markersize=3.5)
    axis.fill_between(q, low, high, color=colour_of(rule), alpha=0.12, lw=0)
    ends.append((q[-1], value[-1], NAMES[rule], colour_of(rule)))
  axis.axhline(1, color=style.GREY, linewidth=0.8)
  axis.set_xticks(q)
  axis.set_xlabel("probability q that a verdict is turned round")
  axis.set_ylabel("ratio")
  style.name_lines(axis, ends)
  return figure


def weights(p, lines: dict[str, tuple]):
  """w(p) of allocators and estimators.

  lines: text -> (rule's name, w [len(p)], line style).
  """
  figure, (axis,) = style.new_figure(
    "What a prompt counts for in the update",
    "w(p): expected gradient / gradient of p, measured at a frozen policy",
    right=0.62,
    height=3.6,
  )
  ends = []
  for text, (name, w, dashes) in lines.items():
    axis.plot(p, w, color=colour_of(name), linestyle=dashes, linewidth=1.6)
    ends.append((p[-1], w[-1], text, colour_of(name)))
  axis.set_xlabel("success probability p")
  axis.set_ylabel("w(p)")
  axis.set_ylim(0)
  style.name_lines(axis, ends)
  return figure


def saturation(sizes, lines: dict[str, tuple]):
  """Noise of a fixed budget against the group size, least = 1.

  lines: text -> (n E|g_n|^2 [len(sizes)], colour).
  """
  figure, (axis,) = style.new_figure(
    "How many rollouts one prompt is worth",
    "squared error of a step's gradient, in groups of n, least = 1",
    right=0.72,
  )
  ends = []
  for text, (cost, colour) in lines.items():
    cost = np.asarray(cost) / min(cost)
    axis.plot(sizes, cost, color=colour, marker="o", markersize=3)
    ends.append((sizes[-1], min(cost[-1], 6), text, colour))
  axis.set_xscale("log", base=2)
  axis.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
  axis.set_ylim(0.9, 6)
  axis.set_xlabel("rollouts per prompt n")
  style.name_lines(axis, ends)
  return figure


def agreement(points: dict[str, list[tuple[float, float]]], correlation: float):
  """Predicted against measured gain; rule -> [(predicted, measured)]."""
  figure, (axis,) = style.new_figure(
    "Predicted from the warm start, measured by training",
    f"against the best uniform split; rank correlation {correlation:.2f}",
    right=0.72,
    height=3.4,
  )
  for rule, rows in points.items():
    x, y = zip(*rows)
    axis.scatter(
      x, y, s=22, color=colour_of(rule), label=NAMES.get(rule, rule),
      alpha=0.8, linewidths=0,
    )  # fmt: skip
  ends = np.array([v for rows in points.values() for row in rows for v in row])
  span = [ends.min() * 0.95, ends.max() * 1.05]
  axis.plot(span, span, color=style.FAINT, linewidth=1)
  axis.set_xscale("log")
  axis.set_yscale("log")
  for which in (axis.xaxis, axis.yaxis):
    which.set_major_locator(style.ticker.FixedLocator([0.4, 0.6, 1, 1.5, 2]))
    which.set_major_formatter("{x:g}")
    which.set_minor_locator(style.ticker.NullLocator())
  axis.set_xlabel("predicted gain")
  axis.set_ylabel("measured, early target")
  axis.legend(
    loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8
  )
  return figure
