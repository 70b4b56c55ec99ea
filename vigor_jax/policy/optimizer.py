"""The optimiser: its chain without a learning rate, and the rate's schedule."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
  """Optimiser of a run; the learning rate is an argument of each update.

  Attributes:
    name: "adamw", "adam" or "sgd".
    b1, b2, eps: Adam's moments and epsilon (b1 is SGD's momentum).
    weight_decay: decoupled decay of matrices; norms and biases are exempt.
    clip_norm: global gradient norm limit; 0 = none.
  """

  name: str = "adamw"
  b1: float = 0.9
  b2: float = 0.99
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0


def _decayed(params):
  """True for matrices, False for norms and biases."""
  return jax.tree_util.tree_map_with_path(
      lambda path, _: not any(
          "scale" in str(p) or "bias" in str(p) for p in path), params)


def chain(options: OptimizerOptions) -> optax.GradientTransformation:
  """The chain without its learning rate."""
  parts = []
  if options.clip_norm:
    parts.append(optax.clip_by_global_norm(options.clip_norm))
  if options.name in ("adam", "adamw"):
    parts.append(optax.scale_by_adam(options.b1, options.b2, options.eps))
  elif options.name == "sgd":
    parts.append(optax.trace(options.b1) if options.b1 else optax.identity())
  else:
    raise ValueError(f"optimizer.name={options.name!r}: adamw, adam or sgd")
  if options.name == "adamw" and options.weight_decay:
    parts.append(optax.add_decayed_weights(options.weight_decay, _decayed))
  return optax.chain(*parts)


def learning_rate(step: int, *, peak: float, warmup_steps: int,
                  total_steps: int, schedule: str) -> float:
  """Learning rate of 0-based update `step`.

  Linear warm-up to the peak, then "constant", or "linear"/"cosine" decay to
  zero at total_steps.
  """
  if step < warmup_steps:
    return peak * (step + 1) / warmup_steps
  if schedule == "constant":
    return peak
  span = max(1, total_steps - warmup_steps)
  done = min(1.0, (step - warmup_steps) / span)
  if schedule == "linear":
    return peak * (1 - done)
  if schedule == "cosine":
    return peak * 0.5 * (1 + float(np.cos(np.pi * done)))
  raise ValueError(f"optimizer.schedule={schedule!r}: constant, linear or "
                   "cosine")
