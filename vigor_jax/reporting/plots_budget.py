"""Figures of which prompts the rollouts went to.

Every function returns None when the runs do not carry what it shows.
"""

import numpy as np
from matplotlib import colors
from matplotlib import ticker

from vigor_jax.reporting import style

_RAREST = 5e-4  # Lower end of the shares in the histogram of group sizes.

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
    total[: table.shape[0], : table.shape[1]] += table
  return total / len(tables)


def rounds_heat(rules: style.Rules, one_step: bool = False):
  """Heat map of rollouts per prompt (by rank) and round.

  One panel per rule with the mean over the run's steps; for a single run also
  its last step as it was.
  """
  panels = []
  for label, runs in rules.items():
    table = _mean_rounds(runs)
    if table is not None:
      steps = sum(len(run.groups) for run in runs)
      name = style.short(label).replace("\n", ", ")
      text = f"mean of {steps} steps" if one_step else name
      panels.append((text, table))
    if (
      one_step
      and runs
      and runs[0].groups
      and (last := runs[0].groups[-1])["rounds"].size
    ):
      panels.append((f"step {last['step']}", _ranked(last)))
  if not panels:
    return None
  tall = [0.16 * min(max(t.shape[0], 2), 10) for _, t in panels]
  height = 1.2 + sum(tall) + 0.26 * (len(tall) - 1)
  figure, axes = style.new_figure(
    "Rollouts per prompt and round",
    "prompts of a step sorted by their rollouts, one row per round",
    rows=len(panels),
    height=height,
    bottom=0.46 / height,
    right=0.86,
    left=0.115,
    sharex=True,
    gridspec_kw={"height_ratios": tall},
  )
  figure.subplots_adjust(
    top=1 - 0.7 / height, hspace=0.26 * len(tall) / sum(tall)
  )
  top = max(t.max() for _, t in panels)
  width = max(t.shape[1] for _, t in panels)
  for axis, (text, table) in zip(axes, panels):
    axis.grid(False)
    image = axis.imshow(
      np.where(table > 0, table, np.nan),
      aspect="auto",
      cmap="YlOrRd",
      # Rollouts are few on most prompts: a root keeps them off the white.
      norm=colors.PowerNorm(0.5, 0, top),
      interpolation="nearest",
      extent=(0.5, table.shape[1] + 0.5, table.shape[0] + 0.5, 0.5),
    )
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
  figure.colorbar(image, cax=bar, ticks=ticker.MaxNLocator(6, integer=True))
  bar.tick_params(size=0, labelsize=8)
  bar.set_title("rollouts", size=8, loc="left")
  for side in bar.spines.values():
    side.set_visible(False)
  return figure


def group_sizes(rules: style.Rules, colour):
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
  texts = [style.short(label) for label in sizes]
  height = 0.95 + (0.86 if rows > 1 else 1.9) * rows
  figure, axes = style.new_figure(
    "Rollouts per prompt, whole run",
    "share of the opened prompts, log scale",
    rows=rows,
    sharex=True,
    height=height,
    bottom=0.45 / height,
    right=style.right_margin(texts),
  )
  figure.subplots_adjust(hspace=0.25)
  left, right = 0.2, max(most, 4) + 0.8 + 0.03 * most
  place = axes[0].get_position()
  inch = (right - left) / (style.WIDTH * place.width)
  for axis, (label, n), text in zip(axes, sizes.items(), texts):
    shares = np.bincount(n.astype(int), minlength=most + 1) / max(len(n), 1)
    x = np.flatnonzero(shares)
    axis.bar(x, shares[x], width=0.82, color=colour[label])
    if len(x):
      named = x if len(x) <= 6 else [shares.argmax()]
      words = [f"{at}: {shares[at]:.0%}" for at in named]
      widths = np.array([inch * (0.066 * len(word) + 0.04) for word in words])
      middles = style.spread(
        named, widths, left + widths[0] / 2, right - widths[-1] / 2
      )
      for at, middle, word in zip(named, middles, words):
        axis.annotate(
          word,
          (middle, shares[at]),
          xytext=(0, 1),
          textcoords="offset points",
          ha="center",
          size=7.5,
          color=style.GREY,
        )
    # Few prompts get most of an adaptive rule's rollouts: only a log scale
    # shows both them and the many.
    axis.set_yscale("log")
    axis.set_ylim(_RAREST, 6)
    axis.set_yticks([0.001, 0.01, 0.1, 1], ["0.1 %", "1 %", "10 %", "100 %"])
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlim(left, right)
    axis.annotate(
      text,
      (1.02, 0.5),
      xycoords="axes fraction",
      color=colour[label],
      va="center",
      size=8.5,
      weight="bold",
      linespacing=1.05,
      annotation_clip=False,
    )
  axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
  axes[-1].set_xlabel("rollouts of one prompt in one step")
  return figure


def difficulty(rules: style.Rules, colour):
  """Mean level of the data's prompts, weighted by their rollouts."""
  named = []
  for label, runs in rules.items():
    steps = [
      (s["step"], s)
      for run in runs
      for s in run.groups
      if s["levels"] is not None and s["n"].sum() > 0
    ]
    if not steps:
      continue
    weighted: dict[int, list[float]] = {}
    plain: dict[int, list[float]] = {}
    for step, s in steps:
      weighted.setdefault(step, []).append(
        float((s["levels"] * s["n"]).sum() / s["n"].sum())
      )
      plain.setdefault(step, []).append(float(s["levels"].mean()))
    x = np.array(sorted(weighted))
    y = style.steady([np.mean(weighted[i]) for i in x])
    text = style.short(label) if len(rules) > 1 else "weighted by\nrollouts"
    named.append((text, colour[label], x, y, "-"))
    if len(rules) == 1:
      y = style.steady([np.mean(plain[i]) for i in x])
      named.append(("all opened\nprompts", style.GREY, x, y, (0, (2, 2))))
  if not named:
    return None
  return style.line_figure(
    "Difficulty the rollouts were spent on",
    "mean level of the prompts, weighted by rollouts, smoothed",
    named,
    ylabel="level",
    xlabel="step",
  )
