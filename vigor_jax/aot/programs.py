"""The programs that a configuration compiles, on devices that need not exist.

They are the trainer's own: the same jitted functions, handed shapes with
shardings instead of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vigor_jax import allocation
from vigor_jax.config import checks
from vigor_jax.config import fields
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import packing
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.policy import update as update_lib
from vigor_jax.sampling import decode as decode_lib
from vigor_jax.sampling import placed as placed_lib
from vigor_jax.sampling import state as state_lib
from vigor_jax.sampling import weights as weights_lib

_STOP_IDS = 8


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and the shapes that it is compiled for.

  Attributes:
    name: "update".
    function, arguments: to be traced and lowered.
    trips: counts of its loops over data; see cost.of_text.
    unit: what one run of these trips does.
    calls: runs in a step.
  """

  name: str
  function: Any
  arguments: tuple[Any, ...]
  trips: tuple[int, ...]
  unit: str
  calls: float


@dataclasses.dataclass(frozen=True)
class Workload:
  """A step in numbers: what the estimate of its time rests on.

  Attributes:
    prompt, completion: mean lengths in tokens that are assumed.
    prompts: opened in a step; rollouts: of a step.
    useful: share of slots, and of packed rows, that does work.
  """

  prompt: float
  completion: float
  prompts: int
  rollouts: int
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
    tokens = self.tokens + 2 * self.prompts * self.prompt
    return max(1, math.ceil(tokens / (rows * length * self.useful)))


def workload_of(config, completion_share: float) -> Workload:
  """The step of a configuration.

  Args:
    completion_share: mean completion in parts of sampling.max_new_tokens.
  """
  buckets = config.sampling.prompt_buckets
  return Workload(
      prompt=0.75 * buckets[-1],
      completion=completion_share * config.sampling.max_new_tokens,
      prompts=_allocator(config).max_prompts, rollouts=config.rollout_budget)


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
    ValueError: not even the fewest slots fit.
  """
  shape = checks.mesh_shape(config, len(topology.devices))
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
    shape = checks.mesh_shape(config, len(devices))
    self.placement = sharding.Placement(sharding.make_mesh(shape, devices))
    sharding.check_rows(self.placement, config)
    self.params = self.placement.abstract(abstract)
    self.updater = update_lib.Updater(
        self.graph, build_lib.objective_of(config),
        build_lib.optimizer_of(config), self.placement)
    self.settings = build_lib.sampler_settings(
        config, _allocator(config).max_prompts)
    self.estimator = build_lib.estimator_of(config)

  # ------------------------------------------------------------- arguments

  def _shaped(self, tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        tree, shardings)

  def state(self) -> update_lib.TrainState:
    return update_lib.TrainState(self.params,
                                 self.updater.abstract_opt(self.params))

  @functools.cached_property
  def weights(self) -> weights_lib.Weights:
    return weights_lib.of(self.graph, self.sizes, self.placement)

  def leaves(self) -> tuple[Any, ...]:
    """The sampler's weights."""
    return self.weights.abstract(self.params)

  def prefixes(self) -> state_lib.Prefixes:
    s = self.settings
    shapes = jax.eval_shape(lambda: state_lib.empty_prefixes(
        self.sizes, s.prefixes, s.prompt_buckets[-1],
        jnp.dtype(s.cache_dtype)))
    return self._shaped(shapes, placed_lib.prefixes(self.placement, shapes))

  def slots(self) -> state_lib.State:
    s = self.settings
    shapes = jax.eval_shape(lambda: state_lib.empty_state(
        self.sizes, s.slots, s.ring, s.max_new_tokens,
        jnp.dtype(s.cache_dtype)))
    return self._shaped(shapes, placed_lib.state(self.placement, shapes))

  def _whole(self, shape, dtype=np.int32):
    return jax.ShapeDtypeStruct(shape, dtype,
                                sharding=self.placement.replicated)

  def batch(self) -> packing.Packed:
    e = self.estimator
    shape = (e.max_micro(self.config.rollout_budget), e.rows_per_micro,
             e.row_length)
    make = lambda dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=self.placement.batch)
    return packing.Packed(*[make(np.int32)] * 5, *[make(np.float32)] * 3)

  # -------------------------------------------------------------- programs

  def programs(self) -> list[Program]:
    """Everything that a step runs on the devices."""
    return [self._weights(), *self._prefills(), self._decode(),
            *self._scores(), self._update()]

  def _weights(self) -> Program:
    return Program("sampling weights", self.weights.program, (self.params,),
                   (), "all parameters", self._updates())

  def _updates(self) -> int:
    policy = self.config.policy
    return policy.updates_per_step * policy.minibatches

  def _prefills(self) -> list[Program]:
    s = self.settings
    prefill = functools.partial(decode_lib.prefill, self.weights)
    prefill, _ = placed_lib.wrapped(self.placement, prefill, prefill)
    n = s.prefill_batch
    calls = math.ceil(self.workload.prompts / n)
    made = []
    for bucket in s.prompt_buckets:
      last = bucket == s.prompt_buckets[-1]
      made.append(Program(
          f"prefill {bucket}", jax.jit(prefill, donate_argnums=(1,)),
          (self.leaves(), self.prefixes(), self._whole((n, bucket)),
           self._whole((n,)), self._whole((n,))), (),
          f"{n} prompts of {bucket} tokens", calls if last else 0))
    return made

  def _decode(self) -> Program:
    s = self.settings
    shapes = tuple(shape for shape in s.shapes(self.sizes)
                   if shape.width == s.slots)
    decode = functools.partial(decode_lib.decode, self.weights, chunk=s.chunk,
                               shapes=shapes, rows=s.report_rows)
    _, decode = placed_lib.wrapped(self.placement, decode, decode)
    steps = self.workload.decode_steps(s.slots)
    return Program(
        "decode chunk", jax.jit(decode, donate_argnums=(2,)),
        (self.leaves(), self.prefixes(), self.slots(),
         self._whole((len(state_lib.QUEUE_DTYPES), s.queue)),
         self._whole((len(state_lib.Control._fields),)),
         self._whole((_STOP_IDS,))),
        (1, s.chunk), f"{s.chunk} tokens in each of {s.slots} slots",
        steps / s.chunk)

  def _micro(self) -> int:
    e = self.estimator
    micro = self.workload.micro_batches(e.rows_per_micro, e.row_length)
    return min(micro, e.max_micro(self.config.rollout_budget)
               * self.config.policy.minibatches)

  def _scores(self) -> list[Program]:
    objective = self.updater.objective
    times = (objective.old == "trainer") + (objective.kl_coef > 0)
    if not times:
      return []
    per_call = max(1, self._micro() // self.config.policy.minibatches)
    return [Program(
        "score", self.updater.programs.score,
        (self.params, self.batch(), self._whole(())), (per_call,),
        f"log-probs of {per_call} micro-batches",
        times * self.config.policy.minibatches)]

  def _update(self) -> Program:
    logprobs = self.batch().sampler_logprobs
    number = lambda dtype: self._whole((), dtype)
    per_call = max(1, self._micro() // self.config.policy.minibatches)
    return Program(
        "update", self.updater.programs.update,
        (self.state(), self.batch(), logprobs, logprobs, number(np.int32),
         number(np.float32), number(np.float32)), (per_call,),
        f"{per_call} micro-batches, one optimiser step", self._updates())

  def resident(self) -> dict[str, int]:
    """Bytes per chip that live through a whole step, by what they are."""
    state = self.state()
    parts = {
        "parameters": state.params, "optimiser state": state.opt_state,
        "sampling weights": self.leaves(), "prefixes": self.prefixes(),
        "slots": self.slots(),
    }
    return {name: per_chip(tree) for name, tree in parts.items()}


def per_chip(tree: Any) -> int:
  """Bytes that one device holds of a tree of shapes with shardings."""
  return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
             for a in jax.tree.leaves(tree))
