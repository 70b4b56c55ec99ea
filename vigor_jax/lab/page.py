"""Tables and figures of docs/allocation.md from the laboratory's results.

The page holds blocks between `<!-- lab:NAME -->` and `<!-- /lab -->`; `write`
puts the measured tables there and the figures beside, and leaves the words
alone.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np

from vigor_jax.lab import estimators, experiment, figures, grids, prediction
from vigor_jax.lab import saturation as saturation_lib
from vigor_jax.lab.experiment import Cell
from vigor_jax.lab.learner import Estimator, Rule
from vigor_jax.lab.world import PRESETS, World

_BLOCK = r"(<!-- lab:{name} -->\n).*?(<!-- /lab -->)"
_UNIFORM = "uniform 32 x 8"


def table(head, rows) -> str:
  """A Markdown table; an empty line after the marker keeps renderers happy."""
  lines = ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
  lines += ["| " + " | ".join(row) + " |" for row in rows]
  return "\n".join([*lines, ""])


def ratio(r) -> str:
  """A statistics.Ratio as text, censoring named."""
  if np.isnan(r.value):
    return "not reached"
  text = f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]"
  if r.low == r.high:
    text = f"{r.value:.2f}"
  return f"{r.bound} {text}" if r.bound else text


def early(outcome, rates) -> str:
  """The ratio at the early target; an odd learning rate is shown."""
  text = ratio(outcome.against_best[0])
  usual = max(set(rates), key=rates.count)
  return text if outcome.rate == usual else f"{text}, rate {outcome.rate:g}"


def preset_name(world: World) -> str:
  shares = (world.easy, world.hard)
  names = {v: k for k, v in PRESETS.items()}
  return names.get(shares, f"{100 * shares[0]:.0f} / {100 * shares[1]:.0f}")


def headline(results) -> str:
  rows = []
  for world in grids.PRESET_WORLDS:
    found = experiment.outcomes(results, world, experiment.HEADLINE)
    for label, o in found.items():
      rows.append(
        (
          preset_name(world), world.reward, label, ratio(o.against_best[0]),
          ratio(o.against_best[1]), ratio(o.against_published[0]),
          f"{o.mixed:.1f}", f"{o.variance:.3f}", f"{o.rate:g}",
        )
      )  # fmt: skip
  return table(
    ("stream", "reward", "rule", "early, best uniform", "late, best uniform",
     "early, 32 x 8", "mixed", "V", "rate"),
    rows,
  )  # fmt: skip


def _rates(found) -> list[float]:
  return [o.rate for o in found.values()]


def shares(results) -> str:
  rows = []
  for world in grids.SHARE_WORLDS:
    found = experiment.outcomes(results, world, grids.SHORT)
    rows.append(
      (
        f"{100 * world.easy:.0f} %",
        f"{100 * world.hard:.0f} %",
        *(early(o, _rates(found)) for o in found.values()),
      )
    )
  return table(("easy", "hard", *(r.label for r in grids.SHORT)), rows)


def noises(results) -> str:
  rows = []
  for world in grids.NOISE_WORLDS + grids.OTHER_NOISE_WORLDS:
    found = experiment.outcomes(results, world, grids.SHORT)
    rows.append(
      (
        f"{preset_name(world)}, {world.reward}",
        f"{world.noise:g}",
        *(early(o, _rates(found)) for o in found.values()),
      )
    )
  return table(("stream", "q", *(r.label for r in grids.SHORT)), rows)


def rivals(results) -> str:
  rules = grids.SHORT + grids.RIVALS
  rows = []
  for world in grids.FIXED_WORLDS:
    tuned = experiment.outcomes(results, world, rules)
    fixed = experiment.outcomes(results, world, rules, rate=grids.RATE)
    for rule in rules:
      one, two = tuned[rule.label], fixed[rule.label]
      rows.append(
        (
          rule.label, ratio(one.against_best[0]), f"{one.rate:g}",
          ratio(two.against_best[0]), ratio(two.against_best[1]),
          f"{two.mixed:.1f}",
        )
      )  # fmt: skip
  return table(
    ("rule", "tuned rate, early", "rate", f"all at {grids.RATE:g}, early",
     "late", "mixed"),
    rows,
  )  # fmt: skip


def ablations(results) -> str:
  rows = []
  rules = (Rule("random_top"), grids.VIGOR, Rule("low_success_first"))
  rules += grids.SCHEDULES + (grids.EB,) + grids.PIECES
  columns = [
    experiment.outcomes(results, w, rules) for w in grids.ABLATION_WORLDS
  ]
  for rule in rules:
    rows.append(
      (
        f"{rule.label}, P = {rule.prompts}" if rule.prompts != 32 else
        rule.label,
        "r - mean, sum",
        *(early(c[rule.label], _rates(c)) for c in columns),
      )
    )  # fmt: skip
  for form in grids.FORMS:
    for rule in (experiment.UNIFORMS[0], grids.VIGOR):
      row = [rule.label, f"{form.advantage}, {form.aggregator}"]
      for world in grids.ABLATION_WORLDS:
        o = experiment.outcomes(results, world, (rule,), form)[rule.label]
        row.append(early(o, _rates(columns[0])))
      rows.append(tuple(row))
  names = [preset_name(w) for w in grids.ABLATION_WORLDS]
  return table(("rule", "advantage, aggregator", *names), rows)


WEIGHTS = (
  (experiment.UNIFORMS[0], Estimator("rloo", "rollout_mean"), "-"),
  (experiment.UNIFORMS[0], Estimator("grpo", "prompt_mean"), "--"),
  (grids.VIGOR, Estimator("dr_grpo", "rollout_mean"), "-"),
  (grids.VIGOR, Estimator("grpo", "prompt_mean"), "--"),
  (grids.VIGOR, Estimator("predictable", "rollout_mean"), ":"),
  (grids.EB, Estimator("dr_grpo", "rollout_mean"), "-"),
)


def weights(folder, steps: int) -> str:
  bandits = estimators.u_shaped()
  rows, lines = [], {}
  for rule, form, dashes in WEIGHTS:
    m = estimators.measure(bandits, rule, form, steps=steps)
    shown = [m.weight[list(bandits.p).index(p)] for p in (0.05, 0.2, 0.5, 0.9)]
    rows.append(
      (
        rule.label, form.advantage, form.aggregator,
        *(f"{w:.2f}" for w in shown), f"{m.cosine:.3f}", f"{m.noise:.2f}",
        f"{m.sideways.max():.1f}",
      )
    )  # fmt: skip
    text = f"{rule.name},\n{form.advantage}, {form.aggregator.split('_')[0]}"
    key = "uniform 32 x 8" if rule.name == "uniform" else rule.name
    lines[text] = (key, m.weight, dashes)
  figures.save(
    figures.weights(bandits.p, lines), folder / "allocation_weights.png"
  )
  return table(
    ("rule", "advantage", "aggregator", "w(.05)", "w(.2)", "w(.5)", "w(.9)",
     "cosine", "noise / signal", "sideways"),
    rows,
  )  # fmt: skip


def saturation(folder) -> str:
  rows, lines = [], {}
  shades = iter(("#0072B2", "#D55E00", "#009E73", "#7c3aed"))
  for p in (0.5, 0.1, 0.05):
    one = estimators.Bandits(np.array([p]), np.ones(1))
    moments = [saturation_lib.moments(one.policy())]
    rows.append(_saturation_row(f"one bandit, p = {p:g}", moments))
  for world in grids.PRESET_WORLDS:
    moments = saturation_lib.chain_moments(world, 0)
    name = f"{preset_name(world)}, {world.reward}"
    rows.append(_saturation_row(name, moments))
    if world.reward == "sparse":
      energy = lambda n, m=moments: np.mean([x.energy(n) for x in m])
      cost = [n * energy(n) for n in saturation_lib.SIZES]
      lines[preset_name(world)] = (cost, next(shades))
  figures.save(
    figures.saturation(saturation_lib.SIZES, lines),
    folder / "allocation_saturation.png",
  )
  return table(
    ("prompts", "b", "w", "n* = 1 + sqrt(w / b)", "best n, exact",
     "fit off by at most"),
    rows,
  )  # fmt: skip


def _saturation_row(name, moments):
  s = saturation_lib.saturation(moments)
  return (
    name, f"{s.b:.4f}", f"{s.w:.4f}", f"{s.best:.1f}", str(s.exact),
    f"{100 * s.fit_error:.0f} %",
  )  # fmt: skip


def missed() -> str:
  rows = []
  for name in PRESETS:
    m = saturation_lib.false_negatives(World.preset(name), grids.VIGOR)
    shares = (m.mixed, m.high, m.of_all_high)
    rows.append((name, *(f"{100 * x:.1f} %" for x in shares)))
  return table(
    ("stream", "left after m0 = 2, mixed in 8 fresh", "variance >= 3/16 in 8",
     "high-variance prompts that were dropped"),
    rows,
  )  # fmt: skip


_S = "effective rollouts S, c = 2, s = 1"
SCORES = {
  "V, variance per rollout": lambda f: f.variance,
  "distinct mixed prompts": lambda f: f.mixed,
  _S: lambda f: f.effective,
}
OTHERS = ((0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (4.0, 1.0))  # c, s


def agreement(results, folder) -> str:
  """Rank correlation of predictions at the warm start with training."""
  worlds = grids.PRESET_WORLDS + grids.SHARE_WORLDS + grids.NOISE_WORLDS
  measured, owners = [], []
  played = []
  for world in worlds:
    rules = [
      r for r in experiment.HEADLINE if Cell(world, r).key in results.cells
    ]
    found = experiment.outcomes(results, world, rules)
    steps = {r.label: prediction.play_world(world, r) for r in rules}
    base = [r.label for r in experiment.UNIFORMS]
    for rule in rules:
      value = found[rule.label].against_best[0].value
      if rule.name == "uniform" or np.isnan(value):
        continue
      measured.append(value)
      owners.append(rule.name)
      played.append((steps[rule.label], [steps[b] for b in base]))
  scores = {
    name: [
      pick(prediction.summarise(own))
      / max(pick(prediction.summarise(b)) for b in bases)
      for own, bases in played
    ]
    for name, pick in SCORES.items()
  }
  for c, room in OTHERS:
    score = lambda steps, c=c, r=room: (
      prediction.summarise(steps, c, r).effective
    )
    scores[f"S, c = {c:g}, s = {room:g}"] = [
      score(own) / max(map(score, bases)) for own, bases in played
    ]
  rows = []
  for name, values in scores.items():
    rho = rank_correlation(values, measured)
    low, high = bootstrap_rank(values, measured)
    inside = np.mean(np.sign(np.log(values)) == np.sign(np.log(measured)))
    slope = np.polyfit(np.log(values), np.log(measured), 1)[0]
    rows.append(
      (
        name, f"{rho:.2f} [{low:.2f}, {high:.2f}]", f"{100 * inside:.0f} %",
        f"{slope:.2f}",
      )
    )  # fmt: skip
  s = scores[_S]
  points: dict[str, list] = {}
  for owner, x, y in zip(owners, prediction.gain(np.array(s)), measured):
    points.setdefault(owner, []).append((x, y))
  figures.save(
    figures.agreement(points, rank_correlation(s, measured)),
    folder / "allocation_prediction.png",
  )
  return table(
    (f"score, relative to the best uniform split ({len(measured)} cells)",
     "rank correlation", "sign right", "slope of logs"),
    rows,
  )  # fmt: skip


def ranks(values) -> np.ndarray:
  """Ranks with ties shared."""
  values = np.asarray(values, float)
  _, index, count = np.unique(values, return_inverse=True, return_counts=True)
  last = np.cumsum(count)
  return (last - (count - 1) / 2)[index]


def rank_correlation(x, y) -> float:
  """Spearman's rho."""
  return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def bootstrap_rank(x, y, resamples: int = 1000) -> tuple[float, float]:
  """95 % percentile interval of Spearman's rho over cells."""
  rng = np.random.Generator(np.random.Philox(key=5))
  x, y = np.asarray(x), np.asarray(y)
  rhos = []
  for _ in range(resamples):
    i = rng.integers(len(x), size=len(x))
    rhos.append(rank_correlation(x[i], y[i]))
  return tuple(np.percentile(rhos, [2.5, 97.5]))


def phase_figure(results, folder) -> None:
  worlds = tuple(w for w in grids.PRESET_WORLDS if w.reward == "sparse")
  points: dict[str, list] = {"vigor": [], "eb_widening": []}
  for world in worlds + grids.SHARE_WORLDS:
    found = experiment.outcomes(results, world, grids.SHORT)
    for rule, rows in points.items():
      value = found[rule].against_best[0].value
      rows.append((world.easy, world.hard, value))
  figures.save(figures.phase(points), folder / "allocation_phase.png")


def noise_figure(results, folder) -> None:
  worlds = (World.preset("sparse_signal"), *grids.NOISE_WORLDS)
  found = [experiment.outcomes(results, w, grids.SHORT) for w in worlds]
  lines = {
    rule: [(w.noise, o[rule].against_best[0]) for w, o in zip(worlds, found)]
    for rule in ("vigor", "eb_widening")
  }
  figures.save(figures.noise(lines), folder / "allocation_noise.png")


BLOCKS = (
  "headline", "shares", "noise", "rivals", "ablations", "weights",
  "saturation", "missed", "agreement",
)  # fmt: skip


def write(results, docs: pathlib.Path, *, weight_steps: int = 100) -> None:
  """Fills the blocks of docs/allocation.md and writes its figures."""
  folder = docs / "figures"
  folder.mkdir(parents=True, exist_ok=True)
  page = docs / "allocation.md"
  text = page.read_text()
  for name in BLOCKS:  # before the minutes of work
    fill(text, name, "")
  blocks = {
    "headline": headline(results),
    "shares": shares(results),
    "noise": noises(results),
    "rivals": rivals(results),
    "ablations": ablations(results),
    "weights": weights(folder, weight_steps),
    "saturation": saturation(folder),
    "missed": missed(),
    "agreement": agreement(results, folder),
  }
  phase_figure(results, folder)
  noise_figure(results, folder)
  for name, content in blocks.items():
    text = fill(text, name, content)
  page.write_text(text)


def fill(text: str, name: str, content: str) -> str:
  """Puts `content` into the block `name`; ValueError if there is none."""
  pattern = re.compile(_BLOCK.format(name=name), re.DOTALL)
  if not pattern.search(text):
    raise ValueError(f"the page has no block <!-- lab:{name} --> ... /lab")
  return pattern.sub(lambda m: f"{m.group(1)}{content}\n{m.group(2)}", text)
