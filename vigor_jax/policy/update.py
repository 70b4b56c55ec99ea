"""The policy-gradient step: one jitted, donated program per run.

    gradient = sum over micro-batches of d/dθ sum(weight * terms)
    step     = optimiser(gradient / denominator)

Micro-batches run in a `while_loop` on the device whose trip count is data, so
a step with few informative rollouts costs little and nothing recompiles.
Everything that varies (advantages, weights, denominator, learning rate) is an
argument; only shapes and the objective's form are static.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from vigor_jax.policy import lora
from vigor_jax.policy import losses
from vigor_jax.policy import objective as objective_lib
from vigor_jax.policy import optimizer as optimizer_lib
from vigor_jax.policy import packing
from vigor_jax.policy import pieces as pieces_lib
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.policy.objective import Objective


class TrainState(NamedTuple):
  """What an update changes.

  Attributes:
    params: the model's; with adapters, base and adapters.
    opt_state: moments of what is trained.
  """

  params: Any
  opt_state: Any


class Programs(NamedTuple):
  """The jitted programs of an updater."""

  init: Any
  update: Any
  score: Any
  policy: Any


class Updater:
  """Jitted update and scoring of one model under one objective.

  Args:
    graph: nnx graph of the transformer.
    objective: form of the loss.
    options: optimiser.
    placement: where arrays live on a mesh; None = one device.
    adapted: sizes with adapters, where those alone are trained (lora.py).

  The compiled programs are shared by all updaters with equal arguments.
  """

  def __init__(self, graph, objective: Objective,
               options: optimizer_lib.OptimizerOptions,
               placement: sharding.Placement | None = None,
               adapted: transformer.Sizes | None = None):
    losses.default_clips(objective.loss)  # Raises on an unknown name.
    self.objective, self.adapted = objective, adapted
    self.tx = optimizer_lib.chain(options)
    self._placement = placement
    if adapted is not None:
      graph = transformer.abstract(adapted)[0]
    self.programs = _programs(graph, objective, options, placement, adapted)

  def init(self, params, seed: int = 0) -> TrainState:
    """Fresh optimiser state around `params` of the plain model.

    seed: of the adapters, if there are any.
    """
    if self._placement is not None:
      params = jax.device_put(params, self._placement.tree(params))
    if self.adapted is not None:
      params = lora.start(functools.partial(_created, self.adapted), params,
                          seed, self._placement)
    return TrainState(params, self.programs.init(params))

  def policy(self, state: TrainState):
    """Parameters of the plain model: to sample from, evaluate and keep."""
    if self.adapted is None:
      return state.params
    return self._finished(self.programs.policy(state.params))

  def reference(self, state: TrainState):
    """With adapters: the frozen base, as `score` takes it."""
    return lora.reference(state.params)

  def abstract_params(self, params):
    """Shapes of what is trained and frozen, of the plain model's."""
    if self.adapted is None:
      return params
    abstract = transformer.abstract(self.adapted)[1]
    return abstract if self._placement is None else self._placement.abstract(
        abstract)

  def abstract_opt(self, params):
    """Shapes of the optimiser state, with their shardings.

    params: of the plain model, or their shapes.
    """
    trained = _trained(self.abstract_params(params), self.adapted)
    state = jax.eval_shape(self.tx.init, trained)
    return state if self._placement is None else self._placement.abstract(
        state)

  def saved(self, state: TrainState) -> tuple[Any, Any]:
    """(params, opt_state) of a checkpoint.

    With adapters, params are the merged policy, which any program can read;
    adapters and moments are in opt_state, and the base is where it came from.
    """
    if self.adapted is None:
      return state.params, state.opt_state
    return self.policy(state), dict(
        adapters=lora.split(state.params)[0], moments=state.opt_state)

  def saved_targets(self, params) -> tuple[Any, Any]:
    """Shapes of what `restored` needs of a checkpoint; None: not needed."""
    moments = self.abstract_opt(params)
    if self.adapted is None:
      return params, moments
    return None, dict(
        adapters=lora.split(self.abstract_params(params))[0], moments=moments)

  def restored(self, params, opt_state) -> TrainState:
    """The state of what was saved.

    params: those of the checkpoint; with adapters, the base's.
    """
    if self.adapted is not None:
      params = lora.join(opt_state["adapters"], params)
      opt_state = opt_state["moments"]
    return TrainState(params, opt_state)

  def update(self, state: TrainState, batch: packing.Packed, num_micro: int,
             denominator: float, rate: float, *, old=None, reference=None
             ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step. The state is donated.

    Args:
      batch: [M, R, T] micro-batches, the first `num_micro` in use.
      denominator: what the summed terms are divided by.
      rate: learning rate.
      old: float32 [M, R, T] trainer log-probs when objective.old is
        "trainer".
      reference: float32 [M, R, T] reference log-probs when kl_coef > 0.

    Returns:
      (state, metrics as device scalars: loss, grad_norm, clip_share,
      ratio_max_deviation, sampler_trainer_logprob_gap, entropy, kl).
    """
    batch = self._placed(batch)
    old = batch.sampler_logprobs if old is None else old
    reference = batch.sampler_logprobs if reference is None else reference
    return self._finished(self.programs.update(
        state, batch, old, reference, np.int32(num_micro),
        np.float32(denominator), np.float32(rate)))

  def score(self, params, batch: packing.Packed, num_micro: int) -> jax.Array:
    """Log-probs float32 [M, R, T] of completion tokens, 0 elsewhere."""
    return self._finished(self.programs.score(
        params, self._placed(batch), np.int32(num_micro)))

  def _placed(self, batch: packing.Packed) -> packing.Packed:
    if self._placement is None:
      return batch
    return self._placement.put(batch, self._placement.batch)

  def _finished(self, result):
    if self._placement is not None and self._placement.waits:
      jax.block_until_ready(result)
    return result


def _created(sizes: transformer.Sizes, seed: int):
  return transformer.create(sizes, seed)[1]


def _trained(params, adapted):
  """The parameters that have a gradient."""
  return params if adapted is None else lora.split(params)[0]


def _at(arrays: Any, index: jax.Array) -> Any:
  """Entry `index` of arrays stacked on axis 0."""
  return jax.tree.map(
      lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, False), arrays)


@functools.lru_cache(maxsize=None)
def _programs(graph, objective: Objective,
              options: optimizer_lib.OptimizerOptions,
              placement: sharding.Placement | None,
              adapted: transformer.Sizes | None):
  tx = optimizer_lib.chain(options)

  def whole(trained, params):
    """Parameters with new values of those that are trained."""
    if adapted is None:
      return trained
    return lora.join(trained, lora.split(params)[1])

  def loss_at(trained, params, *rest):
    return objective_lib.micro_loss(whole(trained, params), graph, objective,
                                    *rest)

  grad = jax.value_and_grad(loss_at, has_aux=True)

  def like_params(tree):
    """Fixes that sums and moments are split like their parameters."""
    if placement is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, placement.tree(tree))

  def split(params, batch) -> pieces_lib.Pieces | None:
    """What runs the model by pieces, where it is large and splits evenly."""
    sizes, length = nnx.merge(graph, params).sizes, batch.tokens.shape[2]
    if (placement is None or not objective.remat
        or not pieces_lib.supported(sizes, placement, length)):
      if placement is not None and objective.attention == "splash":
        raise ValueError(
            "policy.attention: on a mesh 'splash' needs policy.remat=True, and "
            "heads, ffn, vocabulary and row length that mesh.tensor divides")
      return None
    return pieces_lib.Pieces(graph, placement, objective.temperature,
                             objective.attention)

  def update(state, batch, old, reference, num_micro, denominator, rate):
    params = state.params
    trained = _trained(params, adapted)
    pieces = split(params, batch)
    sizes = nnx.merge(graph, params).sizes

    def ahead(i):
      # Unrolled layers: handed from one iteration to the next, because XLA's
      # CPU backend would compute them again in every operation of a layer.
      if pieces is not None or sizes.layers > objective_lib.UNROLLED:
        return None
      return objective_lib.surroundings(sizes, _at(batch, i))

    if pieces is not None:
      zeros = pieces_lib.zeros(trained, placement)
    else:
      zeros = like_params(jax.tree.map(jnp.zeros_like, trained))
    carry = (jnp.int32(0), ahead(0), zeros, jnp.zeros(()),
             dict(tokens=jnp.int32(0), clipped=jnp.int32(0),
                  entropy=jnp.zeros(()), kl=jnp.zeros(())),
             dict(ratio=jnp.zeros(()), gap=jnp.zeros(())))

    def body(carry):
      i, around, grads, loss, sums, peaks = carry
      micro, *others = _at((batch, old, reference), i)
      if pieces is not None:
        (value, (more, tops)), grads = pieces.add_gradient(
            params, grads, micro, lambda logprobs, entropy:
            objective_lib.loss_of(logprobs, entropy, objective, micro,
                                  *others))
      else:
        (value, (more, tops)), new = grad(trained, params, micro, *others,
                                          around)
        grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads,
                             like_params(new))
      # The index is clamped: after the last there is none.
      return (i + 1, ahead(i + 1), grads, loss + value,
              jax.tree.map(jnp.add, sums, more),
              jax.tree.map(jnp.maximum, peaks, tops))

    _, _, grads, loss, sums, peaks = jax.lax.while_loop(
        lambda c: c[0] < num_micro, body, carry)
    with jax.named_scope("optimizer"):
      if pieces is not None:
        grads = like_params(pieces_lib.total(grads))
      grads = jax.tree.map(
          lambda g: g.astype(jnp.float32) / denominator, grads)
      norm = optax.tree.norm(grads)
      updates, opt_state = tx.update(grads, state.opt_state, trained)
      # Moments keep their dtype: an array that changed it is not donated.
      opt_state = optax.tree.cast_like(opt_state, state.opt_state)
      trained = jax.tree.map(
          lambda p, u: (p - rate * u).astype(p.dtype), trained, updates)
      params = whole(trained, params)
    tokens = jnp.maximum(sums["tokens"], 1)
    metrics = {
        "loss": loss / denominator,
        "grad_norm": norm,
        "clip_share": sums["clipped"] / tokens,
        "ratio_max_deviation": peaks["ratio"],
        "sampler_trainer_logprob_gap": peaks["gap"],
        "entropy": sums["entropy"] / tokens,
        "kl": sums["kl"] / tokens,
    }
    if adapted is not None:
      metrics["adapter_change"] = lora.change(params, adapted.adapters.scale)
    state = TrainState(like_params(params), like_params(opt_state))
    return state, metrics

  def score(params, batch, num_micro):
    pieces, model = split(params, batch), nnx.merge(graph, params)
    out = jnp.zeros(batch.tokens.shape, jnp.float32)

    def body(carry):
      i, out = carry
      micro = _at(batch, i)
      if pieces is not None:
        logprobs, _ = pieces.logprobs(params, micro)
      else:
        logprobs, _ = objective_lib.micro_logprobs(model, micro, objective)
      logprobs = jnp.where(micro.segment > 0, logprobs, 0.0)
      return i + 1, jax.lax.dynamic_update_index_in_dim(out, logprobs, i, 0)

    return jax.lax.while_loop(lambda c: c[0] < num_micro, body,
                              (jnp.int32(0), out))[1]

  def traced(function):
    @functools.wraps(function)
    def run(*args):
      with sharding.activations(placement):
        return function(*args)
    return run

  def init(params):
    return like_params(tx.init(_trained(params, adapted)))

  def policy(params):
    return like_params(lora.merged(params, adapted.adapters.scale))

  return Programs(jax.jit(init), jax.jit(traced(update), donate_argnums=(0,)),
                  jax.jit(traced(score)), jax.jit(policy))


def to_host(metrics: dict[str, jax.Array]) -> dict[str, float]:
  """Waits for an update and returns its metrics as floats."""
  return {k: float(v) for k, v in jax.device_get(metrics).items()}


def run_updates(updater: Updater, state: TrainState, batch, config,
                step: int, reference) -> tuple[TrainState, dict[str, float]]:
  """All optimiser steps of one training step.

  Old log-probs are fixed for the step: with several updates and
  `old_logprobs="trainer"` every minibatch is scored before the first update.

  Args:
    batch: batch.Batch.
    config: the run's configuration.
    step: 0-based training step.
    reference: parameters of the KL reference, or None; with adapters it is
      their base.

  Returns:
    (state, metrics averaged over updates; ratio and gap are maxima).
  """
  policy, rates = config.policy, config.optimizer
  score = lambda params, mb: updater.score(params, mb.packed, mb.num_micro)
  olds = references = [None] * len(batch.minibatches)
  if updater.objective.old == "trainer":
    olds = [score(state.params, mb) for mb in batch.minibatches]
  if updater.objective.kl_coef and updater.adapted is not None:
    reference = updater.reference(state)
  if reference is not None:
    references = [score(reference, mb) for mb in batch.minibatches]
  per_step = policy.updates_per_step * policy.minibatches
  results = []
  for _ in range(policy.updates_per_step):
    for mb, old, ref in zip(batch.minibatches, olds, references):
      rate = optimizer_lib.learning_rate(
          step * per_step + len(results), peak=rates.learning_rate,
          warmup_steps=rates.warmup_steps * per_step,
          total_steps=config.total_steps * per_step,
          schedule=rates.schedule)
      state, metrics = updater.update(
          state, mb.packed, mb.num_micro, mb.denominator, rate, old=old,
          reference=ref)
      results.append(metrics)
  results = [to_host(r) for r in results]
  peaks = ("ratio_max_deviation", "sampler_trainer_logprob_gap")
  return state, {
      key: float((max if key in peaks else np.mean)([r[key] for r in results]))
      for key in results[0]}
