"""Prediction of a prompt's success: a logistic regression that forgets.

Verdicts on features, learned one step at a time: the posterior of the weights,
a Gaussian (Laplace), loses a share of its precision between steps, so that it
follows a policy that changes. All features count alike beforehand; those that
repeat others are left to them (span.py), with the same posterior.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.linalg import blas, lapack

from vigor_jax.allocation.span import Span

SPREAD = 2.0  # prior deviation of a prompt's logit, by its features
LEVEL = 3.0  # and of the common level
FORGET = 0.9  # what is left of the weights' precision after a step
ALIKE = 0.3  # correlation of a prompt's verdicts beyond its features
NEWTON = 12
# What an iteration gains in log posterior below which it is the last one: the
# next would gain about the square of that. The precision before the last
# iteration stands for the one after it.
LAST = 1e-4
TINY = 1e-9
SURE = 0.5  # change of logits up to which an iteration needs no check


class Predictor:
  """Bayesian logistic regression with forgetting.

  Attributes:
    centre, scale: float64 [D], set by the first prompts seen; scale 0 where a
      feature did not vary, which is then left out.
    span: the r features that tell the others.
    mean: float64 [r + 1], of the weights; the last one is the level.
    precision: float64 [r + 1, r + 1].
  """

  def __init__(self):
    self.centre = self.scale = np.zeros(0)
    self.span: Span | None = None
    self.mean = np.zeros(0)
    self.precision = self._prior = np.zeros((0, 0))
    self._root = self._ahead = None  # of these weights, once asked for

  def look(self, x: np.ndarray) -> bool:
    """Takes centre, scale and span from the first features seen.

    Later ones may add to the span: designs made before are then too short.

    Returns:
      Whether any feature varies.
    """
    if self.span is None:
      self.centre = x.mean(0)
      deviation = x.std(0)
      varies = deviation > 1e-9 * (1 + np.abs(self.centre))
      self.scale = np.where(varies, 1 / np.where(varies, deviation, 1), 0.0)
      self._span_of(Span.of(self._standard(x)))
      self.mean = np.zeros(len(self._prior))
      self.precision = self._prior
    elif x.shape[1] != len(self.centre):
      raise ValueError(
        f"prompts have {x.shape[1]} features, those before had"
        f" {len(self.centre)}"
      )
    else:
      z = self._standard(x)
      outside = self.span.outside(z)
      if outside.any():
        self._extend(z[outside])
    return bool(self.scale.any())

  def _standard(self, x, columns=slice(None)) -> np.ndarray:
    z = x[:, columns] - self.centre[columns]
    z *= self.scale[columns]
    return z

  def _span_of(self, span: Span) -> None:
    """Sets the span, and the prior precision by it."""
    self.span = span
    used = max(int((self.scale > 0).sum()), 1)
    size = len(span.columns)
    self._prior = np.zeros((size + 1, size + 1))
    gram = np.linalg.inv(span.gram()) if size else np.zeros((0, 0))
    self._prior[:size, :size] = (gram + gram.T) * (used / SPREAD**2 / 2)
    self._prior[size, size] = 1 / LEVEL**2
    self._root = self._ahead = None

  def _extend(self, z) -> None:
    """Makes room for rows outside the span; nothing is known of that yet."""
    old, before = self.span, self._prior
    span, turn = old.joined(z)
    if len(span.columns) == len(old.columns):
      return
    learned = self.precision - before
    self._span_of(span)
    turn = _with_level(turn)
    learned = turn.T @ learned @ turn
    self.precision = self._prior + (learned + learned.T) / 2
    # What is expected of w given the mean of u, seen by the new columns.
    weights = span.basis @ old.basis.T @ np.linalg.inv(old.gram())
    self.mean = _with_level(weights) @ self.mean

  def design(self, x: np.ndarray) -> np.ndarray:
    """Standardised features of the span and a one: float64 [k, r + 1]."""
    z = np.ones((len(x), len(self.mean)))
    z[:, :-1] = self._standard(x, self.span.columns)
    return z

  def forecast(self, z: np.ndarray) -> np.ndarray:
    """`Fit.forecast` before anything of this step is seen."""
    if self._root is None:
      self._root = _inverse_root(_factor(self.precision))
    return Fit(self.mean, self._root).forecast(z)

  def ahead(self, z, n, start=None, like: Ahead | None = None) -> Ahead:
    """What a fit needs that does not depend on what the verdicts say.

    The precision after a step's verdicts follows from their number: it can be
    had while they are being made.

    Args:
      z: float64 [m, r + 1], designs.
      n: [m], verdicts there will be; may be 0.
      start: weights to begin at; default: those before the step.
      like: of the same designs, whose curvature will do; for one iteration.
    """
    # Verdicts of one prompt share what its features do not tell.
    each = 1 / (1 + (n - 1) * ALIKE)
    worth = n * each
    seen = worth.nonzero()[0]
    own = z if len(seen) == len(n) else z.take(seen, 0)
    w = self.mean if start is None else start
    t = z.dot(w)
    p = _logistic(t)
    expected = worth * p
    if like is None:
      weight = expected * (1 - p)
      fit = self._at(w, own, weight.take(seen))
      rest = _without(_variance(z, fit.root), weight)
    else:
      fit, rest = Fit(w, like.fit.root, like.fit.precision), like.rest
    pull = self._before().dot(w - self.mean)
    return Ahead(
      z, n, each, worth, seen, own, t, expected, rest, fit, pull, like is None
    )

  def fit(self, ahead: Ahead, k, newton: int = NEWTON) -> Fit:
    """The weights after the verdicts that `ahead` tells the number of.

    Args:
      ahead: of the designs and the numbers of verdicts.
      k: float64 [m], how many of them were right.
      newton: most iterations.
    """
    every_k = k * ahead.each
    seen, z = ahead.seen, ahead.own
    n, k = ahead.worth.take(seen), every_k.take(seen)
    before, across = self._before(), z.T

    def loss(t, move, pull):
      """Minus the log posterior, from the logits and the prior's slope."""
      return n.dot(np.logaddexp(0, t)) - k.dot(t) + move.dot(pull) / 2

    fit, expected, t = ahead.fit, ahead.expected.take(seen), ahead.t.take(seen)
    w, pull = fit.mean, ahead.pull
    for iteration in range(newton):
      if iteration:
        p = _logistic(t)
        expected = n * p
        fit = self._at(w, z, expected * (1 - p))
      slope = across.dot(k - expected) - pull
      step = fit.root.T.dot(fit.root.dot(slope))
      gain = slope.dot(step) / 2  # of the log posterior, nearly
      turn, push = z.dot(step), before.dot(step)
      # Newton's step may be too long far from the solution.
      if gain > SURE or np.abs(turn).max(initial=0) > SURE:
        move = w - self.mean
        value, size = loss(t, move, pull), 1.0
        while (
          loss(t + size * turn, move + size * step, pull + size * push) > value
          and size > TINY
        ):
          size /= 2
        step, turn, push = size * step, size * turn, size * push
      w, t, pull = w + step, t + turn, pull + push
      if gain < LAST:
        break
    # Leaving one prompt out, by one step of Newton from the common solution.
    t = ahead.z.dot(w)
    expected = ahead.worth * _logistic(t)
    rest = ahead.rest
    if fit is not ahead.fit:
      weight = expected * (1 - _logistic(t))
      rest = _without(_variance(ahead.z, fit.root), weight)
    return Fit(
      w, fit.root, fit.precision,
      _moderate(t - rest * (every_k - expected), rest),
    )  # fmt: skip

  def _at(self, w, z, weight) -> Fit:
    """The posterior's curvature at weights w, where designs z weigh this."""
    precision = self._before() + _square(z, weight)
    return Fit(w, _inverse_root(_factor(precision)), precision)

  def _before(self) -> np.ndarray:
    """Precision of the weights before a step's verdicts: some is forgotten."""
    if self._ahead is None:
      self._ahead = FORGET * self.precision + (1 - FORGET) * self._prior
    return self._ahead

  def commit(self, fit: Fit) -> None:
    """Ends a step with what `fit` found."""
    self.mean, self.precision = fit.mean, fit.precision
    self._root, self._ahead = fit.root, None

  def state_dict(self) -> dict:
    lower = np.tril_indices(len(self.mean))
    return {
      "centre": self.centre.tolist(),
      "scale": self.scale.tolist(),
      "span": None if self.span is None else self.span.state_dict(),
      "mean": self.mean.tolist(),
      "precision": self.precision[lower].tolist(),
    }

  def load_state_dict(self, state: dict) -> None:
    self.__init__()
    self.centre, self.scale, mean = (
      np.asarray(state[name], np.float64)
      for name in ("centre", "scale", "mean")
    )
    if state["span"] is None:
      return
    self._span_of(Span.from_state(state["span"], len(self.centre)))
    self.mean, size = mean, len(mean)
    self.precision = np.zeros((size, size))
    self.precision[np.tril_indices(size)] = state["precision"]
    self.precision += np.tril(self.precision, -1).T


@dataclasses.dataclass
class Fit:
  """A posterior of the weights.

  Attributes:
    mean: float64 [r + 1].
    root: float64 [r + 1, r + 1], lower; the covariance is root' root.
    precision: float64 [r + 1, r + 1].
    without: float64 [m], forecasts for the prompts it was given, each as if
      its own verdicts had not been seen.
  """

  mean: np.ndarray
  root: np.ndarray
  precision: np.ndarray | None = None
  without: np.ndarray | None = None

  def forecast(self, z: np.ndarray) -> np.ndarray:
    """Logit of the predictive success probability: float64 [k]."""
    return _moderate(z @ self.mean, _variance(z, self.root))


@dataclasses.dataclass(frozen=True)
class Ahead:
  """What is known of a fit before the verdicts are: see Predictor.ahead.

  Attributes:
    z, n: float64 [m, r + 1] and [m], as they were given.
    each, worth: float64 [m], what a prompt's verdict counts for, and all of
      them.
    seen: int64 [s], prompts that will have verdicts; own: their designs.
    t, expected: float64 [m], logits, and what `worth` comes to by them.
    rest: float64 [m], variance of the logits without the prompt's verdicts.
    fit: curvature at the weights that the fit begins with.
    pull: float64 [r + 1], slope of what was known before, there.
    curved: whether the curvature is that of these verdicts.
  """

  z: np.ndarray
  n: np.ndarray
  each: np.ndarray
  worth: np.ndarray
  seen: np.ndarray
  own: np.ndarray
  t: np.ndarray
  expected: np.ndarray
  rest: np.ndarray
  fit: Fit
  pull: np.ndarray
  curved: bool


def _with_level(matrix) -> np.ndarray:
  """The matrix for weights with the level behind them, which stays."""
  result = np.zeros((matrix.shape[0] + 1, matrix.shape[1] + 1))
  result[:-1, :-1] = matrix
  result[-1, -1] = 1
  return result


def _logistic(t):
  return 1 / (1 + np.exp(-t))


def _square(z, weight) -> np.ndarray:
  """Sum of weight z z': float64 [r + 1, r + 1]."""
  # A matrix times itself: half the work, and symmetric to the last bit.
  half = z * np.sqrt(weight)[:, None]
  return half.T.dot(half)


def _factor(precision) -> np.ndarray:
  """Cholesky's lower factor."""
  # The transpose is the same matrix, in the order that LAPACK reads.
  factor, failed = lapack.dpotrf(precision.T, lower=1)
  if failed:
    raise np.linalg.LinAlgError(
      "the predictor's precision is not positive definite"
    )
  return factor


def _inverse_root(factor) -> np.ndarray:
  return lapack.dtrtri(factor, lower=1)[0]


def _variance(z, root) -> np.ndarray:
  """Of the logits of designs z, with covariance root' root: float64 [k]."""
  y = blas.dtrmm(1.0, root, z.T, lower=1)  # half of a product's work
  return np.einsum("ij,ij->j", y, y)


def _without(variance, weight):
  """Variances of logits, less what a prompt's own `weight` told of its."""
  return variance / np.maximum(1 - weight * variance, TINY)


def _moderate(logit, variance):
  """The logit of E sigma(t), t normal, by MacKay's approximation (1992)."""
  return logit / np.sqrt(1 + np.pi / 8 * variance)
