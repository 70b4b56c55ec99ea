"""The jitted programs of the policy-gradient step; one is a whole update.

    gradient = sum over micro-batches of d/dθ sum(weight * terms)
    step     = optimiser(gradient / denominator)

Micro-batches run in a `while_loop` on the device whose trip count is data, so
a step with few informative rollouts costs little and nothing recompiles. With
rows of several lengths there is a loop for each, and the sums go through all
of them. Everything that varies (advantages, weights, denominator, learning
rate) is an argument; only shapes and the objective's form are static.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from vigor_jax.policy import lora
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


def trained_of(params, adapted):
  """The parameters that have a gradient."""
  return params if adapted is None else lora.split(params)[0]


def _at(arrays: Any, index: jax.Array) -> Any:
  """Entry `index` of arrays stacked on axis 0."""
  return jax.tree.map(
      lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, False), arrays)


@functools.lru_cache(maxsize=None)
def programs(graph, objective: Objective,
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
    sizes = nnx.merge(graph, params).sizes
    if (placement is None or not objective.remat or not all(
        pieces_lib.supported(sizes, placement, rows.tokens.shape[2])
        for rows in packing.each(batch))):
      if placement is not None and objective.attention == "splash":
        raise ValueError(
            "policy.attention: on a mesh 'splash' needs policy.remat=True, and "
            "heads, ffn, vocabulary and row length that mesh.tensor divides")
      return None
    return pieces_lib.Pieces(graph, placement, objective.temperature,
                             objective.attention)

  def add_gradients(totals, params, pieces, batch, old, reference, num_micro):
    """(gradients, loss, sums, maxima) with the micro-batches of one length."""
    trained, sizes = trained_of(params, adapted), nnx.merge(graph, params).sizes

    def ahead(i):
      # Unrolled layers: handed from one iteration to the next, because XLA's
      # CPU backend would compute them again in every operation of a layer.
      if pieces is not None or sizes.layers > objective_lib.UNROLLED:
        return None
      return objective_lib.surroundings(sizes, _at(batch, i))

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

    return jax.lax.while_loop(lambda c: c[0] < num_micro, body,
                              (jnp.int32(0), ahead(0), *totals))[2:]

  def update(state, batch, old, reference, num_micro, denominator, rate):
    params = state.params
    trained = trained_of(params, adapted)
    pieces = split(params, batch)
    if pieces is not None:
      zeros = pieces_lib.zeros(trained, placement)
    else:
      zeros = like_params(jax.tree.map(jnp.zeros_like, trained))
    totals = (zeros, jnp.zeros(()),
              dict(tokens=jnp.int32(0), clipped=jnp.int32(0),
                   entropy=jnp.zeros(()), kl=jnp.zeros(())),
              dict(ratio=jnp.zeros(()), gap=jnp.zeros(())))
    for rows in zip(*map(packing.each, (batch, old, reference, num_micro))):
      with jax.named_scope(packing.scope(rows[0])):
        totals = add_gradients(totals, params, pieces, *rows)
    grads, loss, sums, peaks = totals
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

    def body(batch, carry):
      i, out = carry
      micro = _at(batch, i)
      if pieces is not None:
        logprobs, _ = pieces.logprobs(params, micro)
      else:
        logprobs, _ = objective_lib.micro_logprobs(model, micro, objective)
      logprobs = jnp.where(micro.segment > 0, logprobs, 0.0)
      return i + 1, jax.lax.dynamic_update_index_in_dim(out, logprobs, i, 0)

    def of_length(batch, num_micro):
      out = jnp.zeros(batch.tokens.shape, jnp.float32)
      with jax.named_scope(packing.scope(batch)):
        return jax.lax.while_loop(
            lambda c: c[0] < num_micro, functools.partial(body, batch),
            (jnp.int32(0), out))[1]

    return packing.joined(
        [*map(of_length, packing.each(batch), packing.each(num_micro))])

  def traced(function):
    @functools.wraps(function)
    def run(*args):
      with sharding.activations(placement):
        return function(*args)
    return run

  def init(params):
    return like_params(tx.init(trained_of(params, adapted)))

  def policy(params):
    return like_params(lora.merged(params, adapted.adapters.scale))

  return Programs(jax.jit(init), jax.jit(traced(update), donate_argnums=(0,)),
                  jax.jit(traced(score)), jax.jit(policy))
