"""Which prompt gets the next rollout. One file per rule, NumPy on the host.

A new rule is one module with a subclass of `Allocator` and one line in
`REGISTRY`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from vigor_jax.allocation import base
from vigor_jax.allocation.base import Allocator
from vigor_jax.allocation.buffer import RolloutBuffer
from vigor_jax.allocation.cero import Cero
from vigor_jax.allocation.dynamic_sampling import DynamicSampling
from vigor_jax.allocation.eb_effective import EbEffective
from vigor_jax.allocation.eb_predicted import EbPredicted
from vigor_jax.allocation.eb_streaming import EbStreaming
from vigor_jax.allocation.eb_widening import EbWidening
from vigor_jax.allocation.greso import Greso
from vigor_jax.allocation.groups import Groups, Request
from vigor_jax.allocation.gvm import Gvm
from vigor_jax.allocation.knapsack import Knapsack
from vigor_jax.allocation.low_success_first import LowSuccessFirst
from vigor_jax.allocation.pilot_commit import PilotCommit
from vigor_jax.allocation.pods import Pods
from vigor_jax.allocation.random_top import RandomTop
from vigor_jax.allocation.reinforce_ada import ReinforceAda
from vigor_jax.allocation.speed import Speed
from vigor_jax.allocation.streaming_vigor import StreamingVigor
from vigor_jax.allocation.uniform import Uniform
from vigor_jax.allocation.vigor import Vigor
from vigor_jax.allocation.vip import Vip

__all__ = [
  "REGISTRY",
  "Allocator",
  "Groups",
  "Request",
  "RolloutBuffer",
  "make",
  "make_options",
]

REGISTRY: dict[str, type[Allocator]] = {
  "uniform": Uniform,
  "vigor": Vigor,
  "random_top": RandomTop,
  "low_success_first": LowSuccessFirst,
  "eb_widening": EbWidening,
  "eb_effective": EbEffective,
  "eb_predicted": EbPredicted,
  "streaming_vigor": StreamingVigor,
  "eb_streaming": EbStreaming,
  "dynamic_sampling": DynamicSampling,
  "pods": Pods,
  "greso": Greso,
  "vip": Vip,
  "cero": Cero,
  "knapsack": Knapsack,
  "gvm": Gvm,
  "reinforce_ada": ReinforceAda,
  "pilot_commit": PilotCommit,
  "speed": Speed,
}


def make(
  name: str,
  options=None,
  *,
  prompts_per_step: int,
  budget: int,
  seed: int,
  train_on: str = "all",
) -> Allocator:
  """Builds the allocator `name`.

  Args:
    name: a key of REGISTRY.
    options: mapping of fields of the allocator's `Options`, an instance of
      it, or None for the defaults.
    prompts_per_step, budget, seed, train_on: see `Allocator`.

  Raises:
    ValueError: an unknown name or field (with the nearest one), a value of
      the wrong type or range, a budget the rule cannot spend (with the legal
      values).
  """
  if name not in REGISTRY:
    raise ValueError(
      f"allocation.name={name!r} is not an allocator"
      f"{base.nearest(name, REGISTRY)}; there are {', '.join(REGISTRY)}"
    )
  cls = REGISTRY[name]
  if not isinstance(options, cls.Options):
    options = make_options(name, options or {})
  return cls(
    options,
    prompts_per_step=prompts_per_step,
    budget=budget,
    seed=seed,
    train_on=train_on,
  )


def make_options(name: str, values: Mapping):
  """The `Options` of allocator `name` with `values` in place of defaults."""
  cls = REGISTRY[name].Options
  fields = [f.name for f in dataclasses.fields(cls)]
  for field in values:
    if field not in fields:
      raise ValueError(
        f"allocation.{name}.{field} does not exist"
        f"{base.nearest(str(field), fields)}; there are"
        f" {', '.join(fields) or 'no fields'}"
      )
  options = cls(**values)
  options.validate()
  return options
