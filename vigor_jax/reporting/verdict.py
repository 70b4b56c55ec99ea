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

from vigor_jax import statistics
from vigor_jax.reporting import pooled
from vigor_jax.reporting import runs as run_folders
from vigor_jax.reporting import wording

MEASURES = wording.MEASURES
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
      f"baseline {baseline!r} is not among the rules: {', '.join(rules)}"
    )
  result = {
    "baseline": baseline,
    "stream": _stream(rules[baseline], baseline),
    "targets": [],
    "start": None,
    "top": None,
    "rules": {label: _rule(runs) for label, runs in rules.items()},
    "best_uniform": [],
  }
  curve = pooled.mean_curve(rules[baseline], "rollouts")
  if curve is not None:
    fixed = statistics.targets(curve.mean, FRACTIONS)
    result["start"], result["top"] = fixed.start, fixed.top
    noise = _rise_noise(rules[baseline], fixed)
    if fixed.values and fixed.top - fixed.start > 2 * noise:
      result["targets"] = [
        {"fraction": f, "accuracy": v} for f, v in zip(FRACTIONS, fixed.values)
      ]
  uniforms = [
    label
    for label, runs in rules.items()
    if runs and runs[0].allocator == "uniform"
  ]
  for target in result["targets"]:
    reached = {
      label: {m: _reached(runs, m, target["accuracy"]) for m in MEASURES}
      for label, runs in rules.items()
    }
    best = {
      m: _cheapest({u: reached[u][m] for u in uniforms}) for m in MEASURES
    }
    result["best_uniform"].append({"fraction": target["fraction"], **best})
    for label in rules:
      result["rules"][label]["to_target"].append(
        {
          "fraction": target["fraction"],
          **{m: _spent(reached[label][m]) for m in MEASURES},
        }
      )
      for key, others in (
        ("ratio", dict.fromkeys(MEASURES, baseline)),
        ("ratio_best_uniform", best),
      ):
        row = {"fraction": target["fraction"]}
        for m in MEASURES:
          other = others[m]
          row[m] = (
            None
            if other is None or other == label
            else _ratio(reached[other][m], reached[label][m])
          )
        result["rules"][label][key].append(row)
  result["sentences"] = wording.sentences(result)
  return result


def _finite(value: float) -> float | None:
  return float(value) if math.isfinite(value) else None


def _rise_noise(runs, fixed) -> float:
  """Standard error of the rise of a mean curve, from evaluation size alone."""
  sizes = []
  for run in runs:
    evaluation = run.config.get("evaluation", {})
    sizes.append(
      evaluation.get("num_prompts", 0) * evaluation.get("samples_per_prompt", 1)
    )
  total = sum(sizes)
  if not total:
    return 0.0
  return math.sqrt(sum(p * (1 - p) for p in (fixed.start, fixed.top)) / total)


def _reached(runs, measure, accuracy) -> dict:
  """{seed: Reached} of the runs that were evaluated."""
  found = {}
  for run in runs:
    x, y = pooled.smoothed(run, measure)
    if len(x):
      found[run.seed] = statistics.reach(x, y, accuracy)
  return found


def _spent(reached: dict) -> dict:
  """Per-seed spending to a target and its geometric mean."""
  values = [r.at for r in reached.values()]
  censored = [seed for seed, r in reached.items() if r.censored]
  mean = (
    statistics.geometric_mean(values)
    if values and min(values) > 0
    else (float(np.mean(values)) if values else math.nan)
  )
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
    [base[s] for s in seeds], [method[s] for s in seeds]
  )
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
    y = pooled.smoothed(run, "rollouts")[1]
    if len(y):
      finals.append(float(run.curve("rollouts")[1][-1]))
      seeds.append(run.seed)
  low, high = statistics.bootstrap_interval(finals)
  rollouts = [run.last("rollouts") for run in runs]
  tokens = [run.last("tokens") for run in runs]
  per_rollout = [
    t / r for t, r in zip(tokens, rollouts) if r and math.isfinite(t / r)
  ]
  return {
    "runs": len(runs),
    "seeds": seeds,
    "stopped_early": [
      run.seed
      for run in runs
      if run.total_steps is not None and run.steps < run.total_steps
    ],
    "final_accuracy": {
      "mean": _finite(np.mean(finals) if finals else math.nan),
      "low": _finite(low),
      "high": _finite(high),
      "per_seed": finals,
    },
    "tokens_per_rollout": _finite(
      np.mean(per_rollout) if per_rollout else math.nan
    ),
    "mixed_prompts_per_step": _mean_of(runs, "groups/mixed"),
    "zero_variance_groups": _mean_of(runs, "groups/zero_variance_share"),
    "zero_variance_rollouts": _mean_of(runs, "rollouts/zero_variance_share"),
    "slot_utilisation": _mean_of(runs, "slots/utilisation"),
    "compiled_late": sorted(
      {step for run in runs for step in run.compiled_after(2)}
    ),
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
    "group_size": None,
    "all_right": None,
    "all_wrong": None,
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
