"""The verdict's sentences and tables, made from its numbers alone."""

from collections.abc import Mapping

MEASURES = ("rollouts", "tokens", "seconds")
# Pairs of runs below which nothing is said to differ, whatever was seen.
FEWEST_PAIRS = 3
_OPPOSITE = {"": "", "at most": "at least", "at least": "at most"}


def percent(value: float | None, digits: int = 1) -> str:
  return "unknown" if value is None else f"{100 * value:.{digits}f} %"


def stream_sentence(stream: dict) -> str:
  """What kind of stream it is, in plain words."""
  if stream["signal_share"] is None:
    return "The runs do not record how many groups carried signal."
  size = (
    ""
    if stream["group_size"] is None
    else f" with {stream['group_size']:.3g} rollouts a prompt"
  )
  text = (
    f"This is a stream of {stream['kind']}: under {stream['under']}"
    f"{size}, {percent(stream['signal_share'], 0)} of the groups had "
    "rewards that disagreed"
  )
  text += (
    f" ({percent(stream['signal_early'], 0)} early, "
    f"{percent(stream['signal_late'], 0)} late in training)"
  )
  if stream["all_right"] is not None:
    right, wrong = stream["all_right"], stream["all_wrong"]
    text += (
      f"; {percent(right, 0)} were all right and {percent(wrong, 0)} all wrong"
    )
    if right > 0.5:
      text += ", so most prompts are solved already"
    elif wrong > 0.5:
      text += ", so most prompts are out of reach"
  return text + "."


def _sign(ratio: dict) -> str:
  return {"": "", "at most": "≤ ", "at least": "≥ "}[ratio["bound"]]


def ratio_text(ratio: dict | None) -> str:
  """A ratio with its interval, for tables: "1.67 [1.54, 1.80]"."""
  if ratio is None:
    return "–"
  if ratio["value"] is None:
    return "not reached"
  text = f"{_sign(ratio)}{ratio['value']:.2f}"
  if ratio["low"] is not None:
    text += f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
  return text


def _difference(ratio: dict | None, against: str) -> str:
  """How many rollouts a rule needed against another, as a phrase.

  It claims a difference only where the whole interval lies on one side of 1,
  and where there are pairs enough for an interval to mean something.
  """
  if ratio is None:
    return f"shares no seed with {against}"
  value, low, high = ratio["value"], ratio["low"], ratio["high"]
  if value is None:
    return f"unknown against {against} (runs of both never got there)"
  bound, pairs = ratio["bound"], len(ratio["per_seed"])
  fewer = value >= 1
  # A bound on baseline / rule is the other way round on rule / baseline.
  sign = bound if fewer else _OPPOSITE[bound]
  amount = f"{sign} {value if fewer else 1 / value:.2f} times ".lstrip()
  amount += "fewer rollouts" if fewer else "the rollouts"
  interval = ""
  if low is not None:
    ends = (low, high) if fewer else (1 / high, 1 / low)
    interval = f" [{ends[0]:.2f}, {ends[1]:.2f}]"
  never = " (runs of it never got there)" if bound == "at most" else ""
  if pairs < FEWEST_PAIRS:
    number = "one pair" if pairs == 1 else f"{pairs} pairs"
    return (
      f"one cannot tell it from {against} by {number} of runs ({amount}"
      f"{interval}){never}"
    )
  if low > 1 and bound != "at most":
    return f"{amount} than {against}{interval}"
  if high < 1 and bound != "at least":
    return f"worse, {amount} of {against}{interval}{never}"
  why = f", interval{interval} of the bound" if bound else (
    f", but the interval{interval} spans 1"
  )
  return f"one cannot tell it from {against} ({amount}{why}){never}"


def sentences(result: dict) -> list[str]:
  """The verdict on one stream, worst news included."""
  said = [stream_sentence(result["stream"])]
  baseline, rules = result["baseline"], result["rules"]
  if result["start"] is None:
    return said + [f"{baseline} was never evaluated, so there is no target."]
  if not result["targets"]:
    return said + [
      f"{baseline} did not learn: its accuracy rose from "
      f"{percent(result['start'])} to {percent(result['top'])}, which is "
      "within the noise of the evaluation. There is no target to measure "
      "against; train longer, or start elsewhere."
    ]
  said.append(
    f"Targets, fixed from {baseline}'s mean curve ({percent(result['start'])}"
    f" to {percent(result['top'])}): "
    + " and ".join(
      f"{percent(t['accuracy'])} ({t['fraction']:.0%} of its rise)"
      for t in result["targets"]
    )
    + "."
  )
  best = list(
    dict.fromkeys(
      row["rollouts"]
      for row in result["best_uniform"]
      if row["rollouts"] not in (None, baseline)
    )
  )
  if best:
    said.append(
      f"The best uniform split on record is {' and '.join(best)}; "
      "part of what is seen over the baseline is its group size."
    )
  for label in rules:
    if label != baseline:
      said.append(
        f"{label}: "
        + " ".join(
          f"To the {t['fraction']:.0%} target {_placed(label, result, i)}."
          for i, t in enumerate(result["targets"])
        )
      )
  for label, rule in rules.items():
    for row in rule["to_target"]:
      missing = row["rollouts"]["censored_seeds"]
      if missing:
        said.append(
          f"{label}: {_seed_list(missing)} did not reach the "
          f"{row['fraction']:.0%} target within the budget and "
          f"count{'s' if len(missing) == 1 else ''} as censored."
        )
    if rule["stopped_early"]:
      said.append(
        f"{label}: {_seed_list(rule['stopped_early'])} stopped "
        "before the last step; its figures are provisional."
      )
    if rule["compiled_late"]:
      said.append(
        f"{label}: programs were compiled after the first two steps "
        f"(steps {', '.join(map(str, rule['compiled_late'][:8]))})."
      )
  said += _finals(rules)
  counts = [rule["runs"] for rule in rules.values()]
  if max(counts) > 1:
    said.append(
      f"Intervals in [ ] are 95 % bootstrap intervals over {min(counts)}"
      + (f" to {max(counts)}" if max(counts) != min(counts) else "")
      + " seeds"
      + (
        "; with so few they are little more than the range seen."
        if min(counts) < 6
        else "."
      )
    )
  return said


def _seed_list(seeds) -> str:
  return ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))


def _placed(label: str, result: dict, position: int) -> str:
  """A rule against the baseline and the best uniform split, at a target."""
  rule, baseline = result["rules"][label], result["baseline"]
  text = _difference(rule["ratio"][position]["rollouts"], baseline)
  best = result["best_uniform"][position]["rollouts"]
  if best not in (None, baseline, label):
    other = rule["ratio_best_uniform"][position]["rollouts"]
    text += f", and {_difference(other, 'the best uniform split')}"
  return text


def _finals(rules) -> list[str]:
  parts = []
  for label, rule in rules.items():
    final = rule["final_accuracy"]
    if final["mean"] is not None:
      text = f"{label} {percent(final['mean'])}"
      if final["low"] is not None:
        text += f" [{100 * final['low']:.1f}, {100 * final['high']:.1f}]"
      parts.append(text)
  return [f"Accuracy at the end: {', '.join(parts)}."] if parts else []


# ---------------------------------------------------------------------- tables


def _amount(spent: dict, measure: str) -> str:
  if spent["mean"] is None:
    return "–"
  value = spent["mean"]
  if measure == "seconds":
    text = f"{value:.1f} s" if value < 600 else f"{value / 60:.1f} min"
  elif value >= 1e6:
    text = f"{value / 1e6:.2f} M"
  else:
    text = f"{value / 1e3:.1f} k"
  return f"> {text}" if spent["censored_seeds"] else text


def tables(result: dict) -> list[tuple[str, list[str], list[list[str]]]]:
  """[(title, header, rows)], one per target, for any markup.

  Amounts are geometric means over seeds; "(1.57x)" is baseline / rule.
  """

  def final(rule):
    value = rule["final_accuracy"]
    text = percent(value["mean"])
    if value["low"] is not None:
      text += f" [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
    return text

  if not result["targets"]:
    return [
      (
        "At the end",
        ["rule", "final accuracy"],
        [[label, final(rule)] for label, rule in result["rules"].items()],
      )
    ]
  made = []
  for position, target in enumerate(result["targets"]):
    title = (
      f"To {percent(target['accuracy'])}, {target['fraction']:.0%} of "
      f"the rise of {result['baseline']}"
    )
    header = [
      "rule",
      "final accuracy",
      *MEASURES,
      f"x {result['baseline']}",
      "x best uniform",
    ]
    rows = []
    for label, rule in result["rules"].items():
      row = [label, final(rule)]
      for measure in MEASURES:
        text = _amount(rule["to_target"][position][measure], measure)
        ratio = rule["ratio"][position][measure]
        if measure != "rollouts" and ratio and ratio["value"] is not None:
          text += f" ({_sign(ratio)}{ratio['value']:.2f}x)"
        row.append(text)
      is_best = label == result["best_uniform"][position]["rollouts"]
      row.append(
        "baseline"
        if label == result["baseline"]
        else ratio_text(rule["ratio"][position]["rollouts"])
      )
      row.append(
        "best"
        if is_best
        else ratio_text(rule["ratio_best_uniform"][position]["rollouts"])
      )
      rows.append(row)
    made.append((title, header, rows))
  return made


def overall(results: Mapping[str, dict]) -> list[str]:
  """One sentence per stream: every adaptive rule at the last target."""
  said = []
  for name, result in results.items():
    kind = result["stream"]["kind"]
    if not result["targets"]:
      said.append(f"{name} ({kind}): no target, the baseline did not learn.")
      continue
    last = len(result["targets"]) - 1
    uniforms = {
      result["baseline"],
      *(label for label in result["rules"] if label.split(":")[0] == "uniform"),
    }
    rules = [r for r in result["rules"] if r not in uniforms] or [
      r for r in result["rules"] if r != result["baseline"]
    ]
    said.append(
      f"{name} ({kind}), to {percent(result['targets'][last]['accuracy'])}: "
      + "; ".join(f"{rule} {_placed(rule, result, last)}" for rule in rules)
      + "."
    )
  return said
