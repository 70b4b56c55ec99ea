"""Tables of benchmarks/claims.py: paired ratios over (seed, warm start).

The data is one JSON-able dictionary, kept in docs/claims.json:

  screening  {rule: {rate: {stream: mean accuracy over the run}}}
  rates      {rule: the rate that was taken}
  streams    {stream: {rule: {"w0 s10": run}}}, a run being lists with one
             entry per evaluation (rollouts, tokens, seconds, accuracy) and
             the numbers full_pass, mixed
  ablations  as streams: variants of vigor, all at vigor's rate
  lean       as streams: rules with fewer rollouts in the update; a run has
             "trained", rollouts in the update, beside the others
  lab        {stream: {rule: {"early": ratio, "late": ratio}}}, 32 x 8 / rule
  shared     true: the machine did other work too, seconds mean nothing
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import math
import re

import numpy as np

from vigor_jax import statistics
from vigor_jax.lab import page as lab_page
from vigor_jax.reporting.paired import (
  FRACTIONS, MEASURES, PUBLISHED, analyse, goals, ratio, spent,
)  # fmt: skip

HOUSE, BEFORE = "eb_predicted", "eb_effective"  # the rule, and its forerunner
# Rows of the tables; streams and rules that are not named come last.
ORDER = (
  PUBLISHED, "uniform 64 x 4", "uniform 128 x 2", "vigor", "eb_widening",
  BEFORE, HOUSE,
)  # fmt: skip
STREAM_ORDER = ("sparse_signal", "plain", "hard_junk", "stack, sparse",
                "stack, plain", "sparse_signal, 512", "plain, 512",
                "hard_junk, 512", "sparse_signal, q = .1",
                "stack, plain, q = .1", "sparse_signal, long")  # fmt: skip
_BLOCK = r"(<!-- claims:{name} -->\n)(?:(?!<!-- ).)*(<!-- /claims -->)"


def dump(data: Mapping) -> str:
  """JSON with a line for every run."""
  text = json.dumps(data, indent=1, sort_keys=True)
  # Lists of numbers and what holds numbers only go on one line.
  flat = lambda m: re.sub(r"\s+", " ", m.group(0))
  text = re.sub(r"\[[^\[\]{}]*\]", flat, text)
  return re.sub(r"\{[^{}]*\}", flat, text) + "\n"


def _ordered(mapping: Mapping, order) -> dict:
  place = {name: i for i, name in enumerate(order)}
  names = sorted(mapping, key=lambda n: (place.get(n, len(order)), n))
  return {name: mapping[name] for name in names}


def streams_of(data: Mapping) -> dict[str, dict]:
  """{stream: {rule: runs}} in the order of the tables."""
  return {
    stream: _ordered(rules, ORDER)
    for stream, rules in _ordered(data["streams"], STREAM_ORDER).items()
  }


# ----------------------------------------------------------------------- tables


def table(header, rows) -> str:
  lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
  return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _text(value: statistics.Ratio | None, same: bool = False) -> str:
  if same:
    return "1.00"
  if value is None:
    return "-"
  if math.isnan(value.value):
    return "unknown"
  sign = f"{value.bound} " if value.bound else ""
  return f"{sign}{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _percent(value: float) -> str:
  return f"{100 * value:.1f} %"


def headline(data) -> str:
  """One row per stream and rule of the headline."""
  return _against_uniform(data, lambda rule: rule in ORDER)


def others(data) -> str:
  """The same for the other rules, beside the best uniform split."""
  return _against_uniform(data, lambda rule: rule not in ORDER)


def _against_uniform(data, shows) -> str:
  rows = []
  for stream, rules in streams_of(data).items():
    for rule, o in analyse(rules).items():
      if not shows(rule):
        continue
      best, published = o["best"], o["published"]
      rows.append(
        (
          stream, rule, str(o["pairs"]),
          *(_text(best["rollouts"][t], o["is_best"][t]) for t in (0, 1)),
          *(_text(published["rollouts"][t], rule == PUBLISHED) for t in (0, 1)),
          f"{100 * o['censored']:.0f} %",
          _percent(o["final"][0]), f"{o['mixed']:.1f}", f"{o['tokens']:.2f}",
        )
      )  # fmt: skip
  return table(
    ("stream", "rule", "pairs", "50 %, best uniform", "85 %, best uniform",
     "50 %, 32 x 8", "85 %, 32 x 8", "85 % missed", "final accuracy",
     "mixed prompts a step", "tokens a rollout"),
    rows,
  )  # fmt: skip


def spending(data) -> str:
  """Rollouts, tokens and seconds to the early target, of the adaptive rules."""
  rows = []
  for stream, rules in streams_of(data).items():
    for rule, o in analyse(rules).items():
      if rule in ORDER and not rule.startswith("uniform"):
        shown = [_text(o["best"][m][0]) for m in MEASURES]
        if data.get("shared"):
          shown[-1] = "not measured"
        rows.append((stream, rule, *shown))
  return table(("stream", "rule", *MEASURES), rows)


def house(data) -> str:
  """The rule of the house against the rule it came from, same pairs."""
  rows = []
  for stream, rules in streams_of(data).items():
    if HOUSE not in rules or BEFORE not in rules:
      continue
    goal = goals(rules[PUBLISHED])
    shown = [
      _text(
        ratio(
          *(
            spent(rules[r], goal, t, "rollouts") for r in (BEFORE, HOUSE)
          )
        )
      )
      for t in range(len(FRACTIONS))
    ]
    rows.append((stream, str(len(rules[HOUSE])), *shown))
  return table(("stream", "pairs", "50 %", "85 %"), rows)


def ablations(data) -> str:
  """Variants of vigor against vigor, same rate and pairs."""
  rows = []
  for stream, rules in _ordered(
    data.get("ablations", {}), STREAM_ORDER
  ).items():
    known = data["streams"][stream]
    goal = goals(known[PUBLISHED])
    for rule, runs in rules.items():
      shown = [
        _text(
          ratio(
            spent(known["vigor"], goal, t, "rollouts"),
            spent(runs, goal, t, "rollouts"),
          )
        )
        for t in range(len(FRACTIONS))
      ]
      mixed = float(np.mean([run["mixed"] for run in runs.values()]))
      rows.append((stream, rule, str(len(runs)), *shown, f"{mixed:.1f}"))
  return table(
    ("stream", "variant", "pairs", "50 %", "85 %", "mixed prompts a step"), rows
  )


def lean(data) -> str:
  """Rules with fewer rollouts in the update; uniform splits as they are."""
  rows = []
  for stream, rules in _ordered(data.get("lean", {}), STREAM_ORDER).items():
    found = analyse(data["streams"][stream] | rules)
    for rule, runs in _ordered(rules, ORDER).items():
      o = found[rule]
      trained = np.mean([run["trained"] for run in runs.values()])
      whole = found[rule.removeprefix("lean ").split(",")[0]]
      rows.append(
        (
          stream, rule, str(o["pairs"]),
          *(_text(r) for r in o["best"]["rollouts"]),
          *(_text(r) for r in whole["best"]["rollouts"]),
          _text(o["best"]["tokens"][0]),
          _percent(o["final"][0]), f"{trained:.0f}",
        )
      )  # fmt: skip
  return table(
    ("stream", "rule", "pairs", "50 %", "85 %", "50 %, not lean",
     "85 %, not lean", "50 %, tokens", "final accuracy", "trained on"),
    rows,
  )  # fmt: skip


def screening(data) -> str:
  """Mean accuracy over the run by rate, and the rate that was taken."""
  rows = []
  for rule, by_rate in _ordered(data["screening"], ORDER).items():
    for rate, streams in sorted(by_rate.items(), key=lambda kv: float(kv[0])):
      taken = float(rate) == data["rates"][rule]
      shown = [f"{streams[s]:.3f}" for s in ("plain", "sparse_signal")]
      rows.append((rule, rate, *shown, "taken" if taken else ""))
  return table(("rule", "rate", "plain", "sparse_signal", ""), rows)


def lab_pairs(data) -> list[tuple[str, str, float, float]]:
  """(stream, rule, laboratory, learned): 32 x 8 / rule at the early target."""
  found = []
  for stream, rules in streams_of(data).items():
    measured = analyse(rules)
    for rule, o in measured.items():
      predicted = data.get("lab", {}).get(stream, {}).get(rule)
      value = o["published"]["rollouts"][0]
      if rule == PUBLISHED or predicted is None or value is None:
        continue
      if not math.isnan(value.value) and predicted["early"] is not None:
        found.append((stream, rule, predicted["early"], value.value))
  return found


def agreement(data) -> str:
  """Rank correlation of the laboratory with learned policies."""
  pairs = lab_pairs(data)
  rows = []
  kinds = {
    "all": lambda stream, rule: True,
    "0/1 rewards": lambda stream, rule: not stream.startswith("stack"),
    "graded rewards": lambda stream, rule: stream.startswith("stack"),
    "right verdicts": lambda stream, rule: "q =" not in stream,
    "right verdicts, uniform splits left out": lambda stream, rule: (
      "q =" not in stream and not rule.startswith("uniform")
    ),
  }
  for kind, chosen in kinds.items():
    x = [p[2] for p in pairs if chosen(*p[:2])]
    y = [p[3] for p in pairs if chosen(*p[:2])]
    if len(x) < 10:
      continue
    low, high = lab_page.bootstrap_rank(x, y)
    inside = np.mean(np.sign(np.log(x)) == np.sign(np.log(y)))
    rows.append(
      (
        kind, str(len(x)),
        f"{lab_page.rank_correlation(x, y):.2f} [{low:.2f}, {high:.2f}]",
        f"{100 * inside:.0f} %",
      )
    )  # fmt: skip
  return table(("cells", "number", "rank correlation", "sign right"), rows)


BLOCKS = {
  "headline": headline,
  "others": others,
  "spending": spending,
  "house": house,
  "lean": lean,
  "ablations": ablations,
  "screening": screening,
  "agreement": agreement,
}


def fill(text: str, data: Mapping) -> str:
  """The page with its blocks written anew; ValueError if one is missing."""
  for name, make in BLOCKS.items():
    pattern = re.compile(_BLOCK.format(name=name), re.DOTALL)
    if not pattern.search(text):
      raise ValueError(f"the page has no block <!-- claims:{name} -->")
    content = make(data)
    text = pattern.sub(
      lambda m, c=content: f"{m.group(1)}\n{c}\n\n{m.group(2)}", text
    )
  return text


def as_text(data: Mapping) -> str:
  return "\n\n".join(make(data) for make in BLOCKS.values())


# ---------------------------------------------------------------------- targets


def figures(data: Mapping) -> tuple[dict, dict]:
  """(figures, targets) of the final line: the rule of the house by stream."""
  found, targets = {}, {}
  for stream, rules in streams_of(data).items():
    if HOUSE not in rules:
      continue
    o = analyse(rules)[HOUSE]
    key = re.sub(r"\W+", "_", stream)
    least = {"sparse_signal": 1.6, "stack, sparse": 1.3}.get(stream, 0.97)
    for name, value in zip(("early", "late"), o["best"]["rollouts"]):
      known = value is not None and not math.isnan(value.value)
      found[f"{key}_{name}"] = round(value.value, 3) if known else None
      targets[f"{key}_{name}"] = {"min": least}
  pairs = lab_pairs(data)
  if len(pairs) >= 20:
    rho = lab_page.rank_correlation(
      [p[2] for p in pairs], [p[3] for p in pairs]
    )
    found["lab_rank_correlation"] = round(rho, 3)
    targets["lab_rank_correlation"] = {"min": 0.8}
  return found, targets
