"""Statistics of evaluations, learning curves and comparisons. NumPy only.

Two families. Scores of one policy: avg@k, unbiased pass@k, cons@k, full pass
and average test pass, each per prompt, so that intervals resample prompts and
never completions (completions of one prompt are not independent evidence about
other prompts). And learning curves: smoothing, what a run had spent when it
reached a target, and ratios of that between two rules, paired by seed.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

# ---------------------------------------------------------- one policy's score


def _table(rewards) -> np.ndarray:
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 2 or 0 in rewards.shape:
    raise ValueError(
        f"rewards must be [prompts, completions], got {rewards.shape=}")
  if not np.isfinite(rewards).all():
    row, column = np.argwhere(~np.isfinite(rewards))[0]
    raise ValueError(
        f"rewards[{row}, {column}] is {rewards[row, column]}, not a number")
  return rewards


def avg_at_k(rewards) -> np.ndarray:
  """Mean reward over each prompt's k completions: [N, k] -> [N]."""
  return _table(rewards).mean(axis=1)


def pass_at_k(n, c, k: int) -> np.ndarray:
  """Unbiased chance that at least one of k completions is right.

  pass@k = 1 - C(n-c, k) / C(n, k) for c right ones among n drawn (Chen et al.
  2021, arXiv 2107.03374), as 1 - exp(sum_{i=n-c+1..n} log(1 - k/i)), which
  neither overflows nor cancels.

  Args:
    n: completions drawn per prompt, an integer or [N].
    c: right ones among them, an integer or [N].
    k: completions the question allows.

  Returns:
    float64, of the shape of n and c together.

  Raises:
    ValueError: k < 1, k > n (the estimate would not exist) or c outside 0..n.
  """
  n, c = np.broadcast_arrays(np.asarray(n), np.asarray(c))
  for name, value in (("n", n), ("c", c)):
    if not np.issubdtype(value.dtype, np.integer):
      raise ValueError(f"{name} must be integers, got {value.dtype}")
  if k < 1:
    raise ValueError(f"pass@k needs k >= 1, got {k=}")
  if n.size and n.min() < k:
    raise ValueError(
        f"pass@{k} needs at least {k} completions per prompt, got n="
        f"{int(n.min())}; the largest legal k is {int(n.min())}")
  if n.size and (c.min() < 0 or (c > n).any()):
    raise ValueError(f"c must lie in 0..n, got {int(c.min())}..{int(c.max())}")
  # logs[m] = sum_{i=k+1..m} log(1 - k/i); smaller i never enter unless the
  # answer is 1 anyway.
  top = int(n.max()) if n.size else k
  terms = np.zeros(top + 1)
  i = np.arange(k + 1, top + 1)
  terms[k + 1:] = np.log1p(-k / i)
  logs = np.cumsum(terms)
  wrong = n - c
  estimate = -np.expm1(logs[n] - logs[np.maximum(wrong, 0)])
  return np.where(wrong < k, 1.0, estimate)


def cons_at_k(answers: Sequence[Sequence], correct) -> np.ndarray:
  """Whether the most frequent answer of each prompt is right: [N].

  Args:
    answers: N lists of k comparable final answers; None is a completion
      without one, which does not vote.
    correct: [N, k] verdicts of the same completions.

  Returns:
    The mean verdict of the winning answer's completions; several winners share
    the vote equally (the expectation over a fair tie-break); 0 without votes.
  """
  correct = _table(correct)
  if len(answers) != len(correct):
    raise ValueError(f"{len(answers)} lists of answers, {len(correct)} prompts")
  result = np.zeros(len(correct))
  for row, (given, verdicts) in enumerate(zip(answers, correct)):
    if len(given) != len(verdicts):
      raise ValueError(
          f"prompt {row}: {len(given)} answers, {len(verdicts)} verdicts")
    votes: dict = {}
    for answer, verdict in zip(given, verdicts):
      if answer is not None:
        votes.setdefault(answer, []).append(verdict)
    if votes:
      most = max(map(len, votes.values()))
      result[row] = np.mean(
          [np.mean(v) for v in votes.values() if len(v) == most])
  return result


def full_pass(fractions) -> np.ndarray:
  """Share of each prompt's completions that pass every test: [N, k] -> [N]."""
  return (_table(fractions) >= 1.0).mean(axis=1)


def average_test_pass(fractions) -> np.ndarray:
  """Mean share of tests passed per prompt: [N, k] -> [N]."""
  return _table(fractions).mean(axis=1)


# ------------------------------------------------------------------- intervals


def bootstrap_interval(
    values,
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
  """Percentile bootstrap interval over the first axis of `values`.

  Args:
    values: [N, ...], one entry per independent unit (a prompt, a seed).
    statistic: maps [resamples, N, ...] to [resamples]; the mean by default.
    level: coverage aimed at.
    resamples: draws with replacement; fixed `seed`, so the result is a
      function of the values.

  Returns:
    (low, high); (nan, nan) with fewer than two units, which say nothing about
    spread.
  """
  values = np.asarray(values, np.float64)
  if not 0 < level < 1:
    raise ValueError(f"level must lie in (0, 1), got {level}")
  if len(values) < 2:
    return float("nan"), float("nan")
  rng = np.random.Generator(np.random.Philox(key=seed))
  picks = rng.integers(len(values), size=(resamples, len(values)))
  drawn = values[picks]
  if statistic is None:
    drawn = drawn.mean(axis=1)
    drawn = drawn.reshape(resamples, -1).mean(axis=1)
  else:
    drawn = np.asarray(statistic(drawn))
  tail = 100 * (1 - level) / 2
  low, high = np.percentile(drawn, [tail, 100 - tail])
  return float(low), float(high)


def stratified_interval(
    strata: Sequence, *, level: float = 0.95, resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
  """Bootstrap interval of the unweighted mean of several strata's means.

  Args:
    strata: vectors, at least one; each is resampled on its own (the tasks of
      a suite are fixed, their prompts are a sample).
    level, resamples, seed: as in `bootstrap_interval`.

  Returns:
    (low, high); (nan, nan) where a stratum has fewer than two values.
  """
  if not strata:
    raise ValueError("no strata to resample")
  if min(map(len, strata)) < 2:
    return float("nan"), float("nan")
  rng = np.random.Generator(np.random.Philox(key=seed))
  total = np.zeros(resamples)
  for values in strata:
    values = np.asarray(values, np.float64)
    picks = rng.integers(len(values), size=(resamples, len(values)))
    total += values[picks].mean(axis=1)
  tail = 100 * (1 - level) / 2
  low, high = np.percentile(total / len(strata), [tail, 100 - tail])
  return float(low), float(high)


# ------------------------------------------------------------- learning curves


def smooth(y, window: int = 3) -> np.ndarray:
  """Centred moving average whose window shrinks, symmetrically, at the ends.

  Symmetric windows leave a straight line unchanged, so smoothing moves no
  crossing of a steadily rising curve; the first and last points stay as they
  are.
  """
  if window < 1 or window % 2 == 0:
    raise ValueError(f"window must be odd and positive, got {window}")
  y = np.asarray(y, np.float64)
  index = np.arange(len(y))
  half = np.minimum(window // 2, np.minimum(index, index[::-1]))
  total = np.concatenate([[0.0], np.cumsum(y)])
  return (total[index + half + 1] - total[index - half]) / (2 * half + 1)


@dataclasses.dataclass(frozen=True)
class Reached:
  """What a run had spent when its curve first reached a target.

  at: the spending there; if `censored`, all that the run spent without
    reaching it, a lower bound.
  """

  at: float
  censored: bool


def reach(x, y, target: float) -> Reached:
  """First crossing of `target` by the piecewise linear curve (x, y)."""
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  if x.shape != y.shape or x.ndim != 1 or not len(x):
    raise ValueError(f"x and y must be one curve, got {x.shape=}, {y.shape=}")
  if (np.diff(x) < 0).any():
    raise ValueError("x must not decrease along a curve")
  above = np.flatnonzero(y >= target)
  if not len(above):
    return Reached(float(x[-1]), True)
  j = int(above[0])
  if j == 0:
    return Reached(float(x[0]), False)
  share = (target - y[j - 1]) / (y[j] - y[j - 1])
  return Reached(float(x[j - 1] + share * (x[j] - x[j - 1])), False)


@dataclasses.dataclass(frozen=True)
class MeanCurve:
  """Several seeds' curves on one grid: x, mean, low, high are [M]."""

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray  # lowest seed
  high: np.ndarray  # highest seed


def mean_curve(curves: Sequence[tuple]) -> MeanCurve:
  """Mean and range of curves (x, y) over the x that all of them cover."""
  if not curves:
    raise ValueError("no curves to average")
  curves = [(np.asarray(x, np.float64), np.asarray(y, np.float64))
            for x, y in curves]
  start = max(x[0] for x, _ in curves)
  end = min(x[-1] for x, _ in curves)
  grid = np.unique(np.concatenate([x for x, _ in curves]))
  grid = grid[(grid >= start) & (grid <= end)]
  rows = np.stack([np.interp(grid, x, y) for x, y in curves])
  return MeanCurve(grid, rows.mean(0), rows.min(0), rows.max(0))


@dataclasses.dataclass(frozen=True)
class Targets:
  """Accuracies fixed from a baseline's mean curve."""

  start: float  # its first value
  top: float  # its highest value
  values: tuple[float, ...]  # start + fraction * (top - start)


def targets(mean, fractions: Sequence[float] = (0.5, 0.85)) -> Targets:
  """Targets at fractions of the rise of a (smoothed) mean curve.

  The rise runs from the first value to the highest one, so that a late fall
  of the baseline does not lower the bar. Zero or negative rise (a baseline
  that did not learn) gives no targets.
  """
  mean = np.asarray(mean, np.float64)
  start, top = float(mean[0]), float(mean.max())
  values = tuple(start + f * (top - start) for f in fractions)
  return Targets(start, top, values if top > start else ())


# --------------------------------------------------------------- paired ratios


@dataclasses.dataclass(frozen=True)
class Ratio:
  """Geometric mean of baseline / method over paired runs (above 1: cheaper).

  value: the geometric mean; a bound of it if `bound` says so, nan if unknown.
  low, high: bootstrap interval over pairs; nan with fewer than two pairs.
  bound: "" (every run reached the target), "at most" (a run of the method did
    not), "at least" (a run of the baseline did not), "unknown" (both).
  per_pair: the ratios that went into it, censored runs at their last value.
  """

  value: float
  low: float
  high: float
  bound: str
  per_pair: tuple[float, ...]


def paired_ratio(
    baseline: Sequence[Reached],
    method: Sequence[Reached],
    *,
    level: float = 0.95,
    seed: int = 0,
) -> Ratio:
  """Ratio of what two rules spent, run by run, with censoring kept honest.

  A censored run enters with all that it spent, which bounds its ratio from one
  side; the mean is then a bound too. Dropping such runs would favour whichever
  rule failed more often. With censoring on both sides nothing is known.
  """
  if len(baseline) != len(method) or not baseline:
    raise ValueError(
        f"{len(baseline)} baseline runs cannot be paired with {len(method)}")
  nan = float("nan")
  base_censored = any(r.censored for r in baseline)
  method_censored = any(r.censored for r in method)
  spent_nothing = any(r.at <= 0 for r in (*baseline, *method))
  if (base_censored and method_censored) or spent_nothing:
    return Ratio(nan, nan, nan, "unknown", ())
  logs = np.log([b.at / m.at for b, m in zip(baseline, method)])
  low, high = bootstrap_interval(logs, level=level, seed=seed)
  bound = ("at most" if method_censored
           else "at least" if base_censored else "")
  return Ratio(
      float(np.exp(logs.mean())),
      float(np.exp(low)),
      float(np.exp(high)),
      bound,
      tuple(float(v) for v in np.exp(logs)),
  )


def geometric_mean(values) -> float:
  """exp(mean(log(values))); ValueError unless every value is positive."""
  values = np.asarray(values, np.float64)
  if not len(values) or not (values > 0).all():
    raise ValueError(f"a geometric mean needs positive values, got {values}")
  return float(np.exp(np.log(values).mean()))
