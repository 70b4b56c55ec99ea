"""The programs that a configuration compiles, on devices that need not exist.

They are the trainer's own: the same jitted functions, handed shapes with
shardings instead of arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vigor_jax import allocation
from vigor_jax.aot import cost
from vigor_jax.aot import decoding
from vigor_jax.config import model_checks
from vigor_jax.config import fields
from vigor_jax.policy import buckets
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import packing
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.policy import update as update_lib


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and the shapes that it is compiled for.

  Attributes:
    name: "update".
    function, arguments: to be traced and lowered.
    trips: counts of its loops over data; see cost.of_text.
    unit: what one run of these trips does.
    calls: runs in a step.
    rare: scopes of branches that are not taken; see cost.of_text.
  """

  name: str
  function: Any
  arguments: tuple[Any, ...]
  trips: tuple[cost.Trips, ...]
  unit: str
  calls: float
  rare: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Workload:
  """A step in numbers: what the estimate of its time rests on.

  Attributes:
    prompt, completion: mean lengths in tokens that are assumed.
    prompts: opened in a step; rollouts: of a step.
    updated: rollouts in its update, at most.
    useful: share of slots, and of packed rows, that does work.
  """

  prompt: float
  completion: float
  prompts: int
  rollouts: int
  updated: int
  useful: float = 0.85

  @property
  def tokens(self) -> float:
    """Generated in a step."""
    return self.rollouts * self.completion

  def decode_steps(self, slots: int) -> int:
    """Of all slots together in a step."""
    return max(1, math.ceil(self.tokens / (slots * self.useful)))

  def micro_batches(self, rows: int, length: int) -> int:
    """Of the update in a step; each group's prompt is packed about twice."""
    tokens = self.updated * self.completion + 2 * self.prompts * self.prompt
    return max(1, math.ceil(tokens / (rows * length * self.useful)))

  def planned(self, shapes: buckets.Shapes, minibatches: int, longest: int
              ) -> tuple[int, ...]:
    """Micro-batches of rows of each length, of an optimiser step.

    Those of completions with a heavy tail, prompts of one length, and groups
    of one size.
    """
    number = max(1, self.updated // minibatches)
    lengths = heavy_tailed(np.random.default_rng(0), number, longest,
                           self.completion)
    prompts = np.full(self.prompts, math.ceil(self.prompt))
    found = buckets.plan(np.arange(number) * self.prompts // number, lengths,
                         prompts, shapes)
    return tuple(-(-layout.rows // rows)
                 for (_, layout), rows in zip(found, shapes.rows))


def heavy_tailed(rng: np.random.Generator, count: int, longest: int,
                 mean: float) -> np.ndarray:
  """Lognormal lengths (sigma 1), cut at `longest`, with this mean: int [N]."""
  drawn = rng.lognormal(0, 1, count)
  low, high = 1e-6, float(longest)
  for _ in range(60):
    scale = (low * high) ** 0.5
    found = np.clip(np.ceil(scale * drawn), 1, longest)
    low, high = (scale, high) if found.mean() < mean else (low, scale)
  return found.astype(np.int64)


def workload_of(config, completion_share: float) -> Workload:
  """The step of a configuration.

  Args:
    completion_share: mean completion in parts of sampling.max_new_tokens.
  """
  buckets = config.sampling.prompt_buckets
  return Workload(
      prompt=0.75 * buckets[-1],
      completion=completion_share * config.sampling.max_new_tokens,
      prompts=_allocator(config).max_prompts, rollouts=config.rollout_budget,
      updated=min(config.policy.update_rollouts or config.rollout_budget,
                  config.rollout_budget))


def _allocator(config):
  name = config.allocation.name
  return allocation.make(
      name, fields.options_of(config.allocation[name],
                              allocation.REGISTRY[name].Options),
      prompts_per_step=config.prompts_per_step, budget=config.rollout_budget,
      seed=config.seed, train_on=config.allocation.train_on)


def vocabulary_of(config) -> int:
  """Ids of the model; from the task where the sizes leave it open."""
  if config.model.sizes.vocab or config.model.checkpoint:
    return 1  # sizes_of takes the model's own.
  from vigor_jax import experiment  # seqio: only where it is needed.
  return experiment.make_task(config).vocabulary.vocab_size


def with_slots(config, topology, vocab: int):
  """The configuration with slots chosen for a topology, where they are open.

  Args:
    config: a configuration; not changed.
    topology: a chips.Topology.
    vocab: see `vocabulary_of`.

  Raises:
    ConfigError: the mesh does not fit the devices.
    ValueError: policy.attention cannot be used on them.
    ValueError: not even the fewest slots fit.
  """
  shape = model_checks.mesh_shape(config, len(topology.devices))
  return build_lib.with_slots(
      config, build_lib.sizes_of(config, vocab), _allocator(config),
      int(topology.chip.hbm),
      placement=sharding.Placement(
          sharding.make_mesh(shape, topology.devices)))


class Plan:
  """Programs and resident arrays of a configuration on some devices.

  Args:
    config: a configuration; its topology is not compared with the devices.
    devices: to compile for.
    workload: see `workload_of`.
    vocab: ids of the vocabulary; see `vocabulary_of`.

  Raises:
    ConfigError: the mesh does not fit the devices.
  """

  def __init__(self, config, devices: Sequence[Any], workload: Workload,
               vocab: int):
    with config.unlocked():
      config = config.copy_and_resolve_references()
      config.topology = ""
    self.config, self.workload = config, workload
    self.sizes = build_lib.sizes_of(config, vocab)
    self.graph, abstract = transformer.abstract(self.sizes)
    shape = model_checks.mesh_shape(config, len(devices))
    self.placement = sharding.Placement(sharding.make_mesh(shape, devices))
    sharding.check_rows(self.placement, config)
    build_lib.check_attention(config, self.sizes, devices[0].platform,
                              self.placement)
    self.params = self.placement.abstract(abstract)
    self.updater = build_lib.updater_of(config, self.graph, self.sizes,
                                        self.placement)
    self.settings = build_lib.sampler_settings(
        config, _allocator(config).max_prompts)
    self.decoding = decoding.Decoding(
        self.graph, self.params, self.sizes, self.settings, self.placement)
    self.estimator = build_lib.estimator_of(config)

  # ------------------------------------------------------------- arguments

  def state(self) -> update_lib.TrainState:
    return update_lib.TrainState(self.updater.abstract_params(self.params),
                                 self.updater.abstract_opt(self.params))

  def _whole(self, shape, dtype=np.int32):
    return jax.ShapeDtypeStruct(shape, dtype,
                                sharding=self.placement.replicated)

  def batch(self) -> packing.Rows:
    def rows(shape):
      make = lambda dtype: jax.ShapeDtypeStruct(
          shape, dtype, sharding=self.placement.batch)
      return packing.Packed(*[make(np.int32)] * 5, *[make(np.float32)] * 3)

    return packing.joined([rows(shape) for shape in self._shapes()])

  def _shapes(self) -> tuple[tuple[int, int, int], ...]:
    e = self.estimator
    return e.shapes.micro_batches(e.most(self.config.rollout_budget))

  # -------------------------------------------------------------- programs

  def programs(self) -> list[Program]:
    """Everything that a step runs on the devices."""
    return [*self._merged(), self._weights(), *self._prefills(),
            self._decode(), *self._scores(), self._update()]

  def _merged(self) -> list[Program]:
    if self.updater.adapted is None:
      return []
    return [Program("merged policy", self.updater.programs.policy,
                    (self.state().params,), (), "all parameters",
                    self._updates())]

  def _weights(self) -> Program:
    return Program("sampling weights", self.decoding.weights.program,
                   (self.params,), (), "all parameters", self._updates())

  def _updates(self) -> int:
    policy = self.config.policy
    return policy.updates_per_step * policy.minibatches

  def _prefills(self) -> list[Program]:
    s = self.settings
    n = s.prefill_batch
    calls = math.ceil(self.workload.prompts / n)
    return [Program(f"prefill {bucket}", *self.decoding.prefill(bucket), (),
                    f"{n} prompts of {bucket} tokens",
                    calls if bucket == s.prompt_buckets[-1] else 0)
            for bucket in s.prompt_buckets]

  def _decode(self) -> Program:
    s = self.settings
    steps = self.workload.decode_steps(s.slots)
    return Program(
        "decode chunk", *self.decoding.chunks(), (1, s.chunk),
        f"{s.chunk} tokens in each of {s.slots} slots", steps / s.chunk,
        decoding.rare(self.config.sampling))

  def _micro(self) -> tuple[int, tuple[cost.Trips, ...]]:
    """Micro-batches of an optimiser step: all, and by the length of rows."""
    e, shapes, minibatches = self.estimator, self._shapes(), (
        self.config.policy.minibatches)
    micro = self.workload.micro_batches(e.rows_per_micro, e.row_length)
    most, _, _ = shapes[-1]
    micro = max(1, min(micro, most * minibatches) // minibatches)
    if len(shapes) == 1:
      return micro, (micro,)
    planned = self.workload.planned(
        e.shapes, minibatches, self.config.sampling.max_new_tokens)
    ends = np.rint(micro * np.cumsum(planned) / sum(planned)).astype(int)
    return micro, (dict(zip(map(packing.scope, self.batch()),
                            np.diff(ends, prepend=0).tolist())),)

  def _scores(self) -> list[Program]:
    objective = self.updater.objective
    times = (objective.old == "trainer") + (objective.kl_coef > 0)
    if not times:
      return []
    per_call, trips = self._micro()
    return [Program(
        "score", self.updater.programs.score,
        (self.state().params, self.batch(), self._numbers()), trips,
        f"log-probs of {per_call} micro-batches",
        times * self.config.policy.minibatches)]

  def _update(self) -> Program:
    logprobs = packing.joined(
        [rows.sampler_logprobs for rows in packing.each(self.batch())])
    number = lambda: self._whole((), np.float32)
    per_call, trips = self._micro()
    return Program(
        "update", self.updater.programs.update,
        (self.state(), self.batch(), logprobs, logprobs, self._numbers(),
         number(), number()), trips,
        f"{per_call} micro-batches, one optimiser step", self._updates())

  def _numbers(self) -> Any:
    """How many micro-batches are in use."""
    return packing.joined([self._whole(()) for _ in self._shapes()])

  def resident(self) -> dict[str, int]:
    """Bytes per chip that live through a whole step, by what they are."""
    state = self.state()
    parts = {
        "parameters": state.params, "optimiser state": state.opt_state,
        "sampling weights": self.decoding.leaves,
        "prefixes": self.decoding.prefixes, "slots": self.decoding.slots,
    }
    if self.updater.adapted is not None:
      parts["merged policy"] = self.params
    elif self.updater.objective.kl_coef:
      parts["KL reference"] = self.params
    return {name: decoding.per_chip(tree) for name, tree in parts.items()}
