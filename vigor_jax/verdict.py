"""What a comparison of rules found, as numbers and in plain words.

The numbers are a JSON-able dictionary (compare.json keeps it); the sentences
are made from the numbers alone. How it is judged:

  1. The targets are accuracies at fixed fractions of the rise of the named
     baseline's smoothed mean curve, chosen before any rule is looked at.
  2. Every run's curve is smoothed alike and its first crossing counted in
     rollouts, generated tokens and training seconds.
  3. Rules are compared seed by seed (same warm start, same prompts), as
     ratios baseline / rule, with their geometric mean and an interval.
  4. A run that never got there is censored: it enters with all it spent, and
     the mean becomes a bound. It is never dropped.
  5. Beside the named baseline stands the best uniform split on record, since
     part of what is seen over 32 x 8 is often only the number 8.
"""

from collections.abc import Mapping, Sequence
import math

import numpy as np

from vigor_jax import runs as run_folders
from vigor_jax import statistics

MEASURES = ("rollouts", "tokens", "seconds")
FRACTIONS = (0.5, 0.85)

Rules = Mapping[str, Sequence[run_folders.Run]]


def analyse(rules: Rules, baseline: str) -> dict:
  """Compares rules on one stream.

  Args:
    rules: {label: runs}, one run per seed.
    baseline: the label whose curve fixes the targets.

  Returns:
    A JSON-able dictionary; see the keys below. Ratios are baseline / rule, so
    above 1 the rule is cheaper.

  Raises:
    ValueError: the baseline is not among the labels.
  """
  if baseline not in rules:
    raise ValueError(
        f"baseline {baseline!r} is not among the rules: {', '.join(rules)}")
  result = {
      "baseline": baseline,
      "stream": _stream(rules[baseline], baseline),
      "targets": [],
      "start": None,
      "top": None,
      "rules": {label: _rule(runs) for label, runs in rules.items()},
      "best_uniform": [],
  }
  curve = run_folders.mean_curve(rules[baseline], "rollouts")
  if curve is not None:
    fixed = statistics.targets(curve.mean, FRACTIONS)
    result["start"], result["top"] = fixed.start, fixed.top
    noise = _rise_noise(rules[baseline], fixed)
    if fixed.values and fixed.top - fixed.start > 2 * noise:
      result["targets"] = [
          {"fraction": f, "accuracy": v}
          for f, v in zip(FRACTIONS, fixed.values)]
  uniforms = [label for label, runs in rules.items()
              if runs and runs[0].allocator == "uniform"]
  for target in result["targets"]:
    reached = {
        label: {m: _reached(runs, m, target["accuracy"]) for m in MEASURES}
        for label, runs in rules.items()}
    best = {m: _cheapest({u: reached[u][m] for u in uniforms})
            for m in MEASURES}
    result["best_uniform"].append(
        {"fraction": target["fraction"], **best})
    for label in rules:
      result["rules"][label]["to_target"].append({
          "fraction": target["fraction"],
          **{m: _spent(reached[label][m]) for m in MEASURES}})
      for key, others in (
          ("ratio", dict.fromkeys(MEASURES, baseline)),
          ("ratio_best_uniform", best)):
        row = {"fraction": target["fraction"]}
        for m in MEASURES:
          other = others[m]
          row[m] = (None if other is None or other == label
                    else _ratio(reached[other][m], reached[label][m]))
        result["rules"][label][key].append(row)
  result["sentences"] = sentences(result)
  return result


def _finite(value: float) -> float | None:
  return float(value) if math.isfinite(value) else None


def _rise_noise(runs, fixed) -> float:
  """Standard error of the rise of a mean curve, from evaluation size alone."""
  sizes = []
  for run in runs:
    evaluation = run.config.get("evaluation", {})
    sizes.append(evaluation.get("num_prompts", 0)
                 * evaluation.get("samples_per_prompt", 1))
  total = sum(sizes)
  if not total:
    return 0.0
  return math.sqrt(sum(p * (1 - p) for p in (fixed.start, fixed.top)) / total)


def _reached(runs, measure, accuracy) -> dict:
  """{seed: Reached} of the runs that were evaluated."""
  found = {}
  for run in runs:
    x, y = run_folders.smoothed(run, measure)
    if len(x):
      found[run.seed] = statistics.reach(x, y, accuracy)
  return found


def _spent(reached: dict) -> dict:
  """Per-seed spending to a target and its geometric mean."""
  values = [r.at for r in reached.values()]
  censored = [seed for seed, r in reached.items() if r.censored]
  mean = statistics.geometric_mean(values) if values and min(values) > 0 else (
      float(np.mean(values)) if values else math.nan)
  return {
      "mean": _finite(mean),  # a lower bound when a run is censored
      "low": _finite(min(values, default=math.nan)),
      "high": _finite(max(values, default=math.nan)),
      "per_seed": {str(s): r.at for s, r in reached.items()},
      "censored_seeds": censored,
  }


def _ratio(base: dict, method: dict) -> dict | None:
  seeds = [s for s in base if s in method]
  if not seeds:
    return None
  ratio = statistics.paired_ratio(
      [base[s] for s in seeds], [method[s] for s in seeds])
  return {
      "value": _finite(ratio.value),
      "low": _finite(ratio.low),
      "high": _finite(ratio.high),
      "bound": ratio.bound,
      "per_seed": {str(s): v for s, v in zip(seeds, ratio.per_pair)},
  }


def _cheapest(reached: dict[str, dict]) -> str | None:
  """The label with fewest censored runs, then the lowest mean spending."""
  best = None
  for label, runs in reached.items():
    spent = _spent(runs)
    if spent["mean"] is not None:
      key = (len(spent["censored_seeds"]), spent["mean"])
      if best is None or key < best[0]:
        best = key, label
  return best[1] if best else None


def _rule(runs) -> dict:
  """What one rule's runs ended at and spent their budget on."""
  finals, seeds = [], []
  for run in runs:
    y = run_folders.smoothed(run, "rollouts")[1]
    if len(y):
      finals.append(float(run.curve("rollouts")[1][-1]))
      seeds.append(run.seed)
  low, high = statistics.bootstrap_interval(finals)
  rollouts = [run.last("rollouts") for run in runs]
  tokens = [run.last("tokens") for run in runs]
  per_rollout = [t / r for t, r in zip(tokens, rollouts)
                 if r and math.isfinite(t / r)]
  return {
      "runs": len(runs),
      "seeds": seeds,
      "stopped_early": [
          run.seed for run in runs
          if run.total_steps is not None and run.steps < run.total_steps],
      "final_accuracy": {
          "mean": _finite(np.mean(finals) if finals else math.nan),
          "low": _finite(low), "high": _finite(high), "per_seed": finals},
      "tokens_per_rollout": _finite(
          np.mean(per_rollout) if per_rollout else math.nan),
      "mixed_prompts_per_step": _mean_of(runs, "groups/mixed"),
      "zero_variance_groups": _mean_of(runs, "groups/zero_variance_share"),
      "zero_variance_rollouts": _mean_of(runs, "rollouts/zero_variance_share"),
      "slot_utilisation": _mean_of(runs, "slots/utilisation"),
      "compiled_late": sorted(
          {step for run in runs for step in run.compiled_after(2)}),
      "to_target": [],
      "ratio": [],
      "ratio_best_uniform": [],
  }


def _mean_of(runs, key) -> float | None:
  values = [v for run in runs if math.isfinite(v := run.mean(key))]
  return float(np.mean(values)) if values else None


def _stream(runs, label) -> dict:
  """What the baseline's groups say about the stream of prompts."""
  signal, early, late = [], [], []
  for run in runs:
    y = 1 - run.series("groups/zero_variance_share")[1]
    if len(y):
      part = max(1, len(y) // 5)
      signal.append(y.mean())
      early.append(y[:part].mean())
      late.append(y[-part:].mean())
  n = [s["n"] for run in runs for s in run.groups]
  total = [s["sum"] for run in runs for s in run.groups]
  stream = {
      "under": label,
      "signal_share": _finite(np.mean(signal)) if signal else None,
      "signal_early": _finite(np.mean(early)) if early else None,
      "signal_late": _finite(np.mean(late)) if late else None,
      "group_size": None, "all_right": None, "all_wrong": None,
  }
  if n:
    n, total = np.concatenate(n), np.concatenate(total)
    if len(n):
      stream |= {
          "group_size": float(n.mean()),
          "all_right": float((total >= n - 1e-6).mean()),
          "all_wrong": float((total <= 1e-6).mean()),
      }
  stream["kind"] = _kind(stream)
  return stream


def _kind(stream) -> str:
  share = stream["signal_share"]
  if share is None:
    return "unknown"
  if share >= 0.35:
    return "dense signal"
  return "moderate signal" if share >= 0.2 else "sparse signal"


# ------------------------------------------------------------------- sentences


def percent(value: float | None, digits: int = 1) -> str:
  return "unknown" if value is None else f"{100 * value:.{digits}f} %"


def stream_sentence(stream: dict) -> str:
  """What kind of stream it is, in plain words."""
  if stream["signal_share"] is None:
    return "The runs do not record how many groups carried signal."
  size = ("" if stream["group_size"] is None
          else f" with {stream['group_size']:.3g} rollouts a prompt")
  text = (f"This is a stream of {stream['kind']}: under {stream['under']}"
          f"{size}, {percent(stream['signal_share'], 0)} of the groups had "
          "rewards that disagreed")
  text += (f" ({percent(stream['signal_early'], 0)} early, "
           f"{percent(stream['signal_late'], 0)} late in training)")
  if stream["all_right"] is not None:
    right, wrong = stream["all_right"], stream["all_wrong"]
    text += (f"; {percent(right, 0)} were all right and "
             f"{percent(wrong, 0)} all wrong")
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
  """How many rollouts a rule needed against another, as a phrase."""
  if ratio is None:
    return f"shares no seed with {against}"
  value, low, high = ratio["value"], ratio["low"], ratio["high"]
  if value is None:
    return f"unknown against {against} (runs of both never got there)"
  if ratio["bound"] == "at most":
    if value < 1:
      return (f"at least {1 / value:.2f} times the rollouts of {against} (runs "
              "of it never got there)")
    return (f"at most {value:.2f} times fewer rollouts than {against} (runs of "
            "it never got there)")
  if ratio["bound"] == "at least":
    if value > 1:
      return f"at least {value:.2f} times fewer rollouts than {against}"
    return f"at most {1 / value:.2f} times the rollouts of {against}"
  if low is None:
    text = (f"{value:.2f} times fewer rollouts than {against}" if value >= 1
            else f"{1 / value:.2f} times the rollouts of {against}")
    return f"{text} (one seed, spread unknown)"
  if low > 1:
    return (f"{value:.2f} times fewer rollouts than {against} "
            f"[{low:.2f}, {high:.2f}]")
  if high < 1:
    return (f"worse, {1 / value:.2f} times the rollouts of {against} "
            f"[{1 / high:.2f}, {1 / low:.2f}]")
  return (f"no clear difference from {against} ({value:.2f} "
          f"[{low:.2f}, {high:.2f}])")


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
        "against; train longer, or start elsewhere."]
  said.append(
      f"Targets, fixed from {baseline}'s mean curve ({percent(result['start'])}"
      f" to {percent(result['top'])}): "
      + " and ".join(
          f"{percent(t['accuracy'])} ({t['fraction']:.0%} of its rise)"
          for t in result["targets"]) + ".")
  best = list(dict.fromkeys(
      row["rollouts"] for row in result["best_uniform"]
      if row["rollouts"] not in (None, baseline)))
  if best:
    said.append(f"The best uniform split on record is {' and '.join(best)}; "
                "part of what is seen over the baseline is its group size.")
  for label in rules:
    if label != baseline:
      said.append(f"{label}: " + " ".join(
          f"To the {t['fraction']:.0%} target {_placed(label, result, i)}."
          for i, t in enumerate(result["targets"])))
  for label, rule in rules.items():
    for row in rule["to_target"]:
      missing = row["rollouts"]["censored_seeds"]
      if missing:
        said.append(
            f"{label}: {_seed_list(missing)} did not reach the "
            f"{row['fraction']:.0%} target within the budget and "
            f"count{'s' if len(missing) == 1 else ''} as censored.")
    if rule["stopped_early"]:
      said.append(f"{label}: {_seed_list(rule['stopped_early'])} stopped "
                  "before the last step; its figures are provisional.")
    if rule["compiled_late"]:
      said.append(f"{label}: programs were compiled after the first two steps "
                  f"(steps {', '.join(map(str, rule['compiled_late'][:8]))}).")
  said += _finals(rules)
  counts = [rule["runs"] for rule in rules.values()]
  if max(counts) > 1:
    said.append(
        f"Intervals in [ ] are 95 % bootstrap intervals over {min(counts)}"
        + (f" to {max(counts)}" if max(counts) != min(counts) else "")
        + " seeds"
        + ("; with so few they are little more than the range seen."
           if min(counts) < 6 else "."))
  return said


def _seed_list(seeds) -> str:
  return ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(
      map(str, seeds))


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


# ----------------------------------------------------------------------- table


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
    return [("At the end", ["rule", "final accuracy"],
             [[label, final(rule)]
              for label, rule in result["rules"].items()])]
  made = []
  for position, target in enumerate(result["targets"]):
    title = (f"To {percent(target['accuracy'])}, {target['fraction']:.0%} of "
             f"the rise of {result['baseline']}")
    header = ["rule", "final accuracy", *MEASURES,
              f"x {result['baseline']}", "x best uniform"]
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
      row.append("baseline" if label == result["baseline"] else
                 ratio_text(rule["ratio"][position]["rollouts"]))
      row.append("best" if is_best else ratio_text(
          rule["ratio_best_uniform"][position]["rollouts"]))
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
    uniforms = {result["baseline"], *(
        label for label in result["rules"] if label.split(":")[0] == "uniform")}
    rules = [r for r in result["rules"] if r not in uniforms] or [
        r for r in result["rules"] if r != result["baseline"]]
    said.append(
        f"{name} ({kind}), to {percent(result['targets'][last]['accuracy'])}: "
        + "; ".join(f"{rule} {_placed(rule, result, last)}" for rule in rules)
        + ".")
  return said
