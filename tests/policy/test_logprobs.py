"""Chunked log-probs: the plain formula, its gradients, and no large array."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax.policy import logprobs, optimizer, packing, transformer, update
from vigor_jax.policy import update_programs
from vigor_jax.policy.sizes import Sizes


def case(n=37, d=6, vocab=29, dtype=jnp.float32, scale=2.0):
  rng = np.random.default_rng(0)
  return (
    (rng.normal(size=(n, d)) * scale).astype(dtype),
    rng.normal(size=(d, vocab)).astype(dtype),
    rng.integers(0, vocab, n, np.int32),
  )


def reference(hidden, head, targets, temperature):
  """(log-probs, entropy) in float64 NumPy."""
  logits = np.float64(hidden) @ np.float64(head) / temperature
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  return np.log(p)[np.arange(len(p)), targets], -(p * np.log(p)).sum(-1)


def test_temperature_by_hand():
  # Logits [2, 0] at T = .5 are [4, 0]: log p0 = -log(1 + e^-4).
  found, entropy = logprobs.token_logprobs(
    np.eye(1, dtype=np.float32),
    np.array([[2.0, 0.0]], np.float32),
    np.array([0]),
    0.5,
  )
  assert float(found[0]) == pytest.approx(-0.01815, abs=5e-6)
  assert float(found[0]) == pytest.approx(-math.log1p(math.exp(-4)), rel=1e-5)
  p = 1 / (1 + math.exp(-4))
  assert float(entropy[0]) == pytest.approx(
    -p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5
  )


# 37 rows: one chunk, a chunk that does not divide them, single rows.
@pytest.mark.parametrize(
  "chunk, temperature", [(64, 1.0), (16, 0.3), (1, 1.0)]
)
def test_equals_the_plain_formula(chunk, temperature):
  hidden, head, targets = case()
  found, entropy = logprobs.token_logprobs(
    hidden, head, targets, temperature, chunk=chunk
  )
  expected, spread = reference(hidden, head, targets, temperature)
  assert found.shape == entropy.shape == (37,)
  np.testing.assert_allclose(found, expected, atol=2e-5)
  np.testing.assert_allclose(entropy, spread, atol=2e-5)


def test_gradients_do_not_depend_on_the_chunk():
  hidden, head, targets = case()
  weights = np.random.default_rng(1).normal(size=37).astype(np.float32)

  def gradient(chunk):
    def loss(hidden, head):
      found, _ = logprobs.token_logprobs(
        hidden, head, targets, 0.7, chunk=chunk
      )
      return jnp.sum(found * weights)

    return jax.jit(jax.grad(loss, (0, 1)))(hidden, head)

  whole = gradient(None)
  for a, b in zip(whole + whole, gradient(8) + gradient(5)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  # And the plain formula's: d/dlogits = weight * (one hot - p) / T.
  logits = np.float64(hidden) @ np.float64(head) / 0.7
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  back = (np.eye(29)[np.asarray(targets)] - p) * np.float64(weights)[:, None]
  np.testing.assert_allclose(whole[0], back @ np.float64(head).T / 0.7, atol=1e-4)
  np.testing.assert_allclose(whole[1], np.float64(hidden).T @ back / 0.7, atol=1e-4)


def test_no_gradient_flows_through_the_entropy():
  hidden, head, targets = case()

  @jax.jit
  @jax.grad
  def gradient(hidden):
    whole = logprobs.token_logprobs(hidden, head, targets)[1]
    parts = logprobs.token_logprobs(hidden, head, targets, chunk=8)[1]
    return whole.sum() + parts.sum()

  assert not np.asarray(gradient(hidden)).any()


def test_extreme_logits_stay_finite():
  hidden, head, targets = case(scale=1e4)
  for chunk in (None, 8):
    found, entropy = logprobs.token_logprobs(hidden, head, targets, chunk=chunk)
    assert np.isfinite(found).all() and np.isfinite(entropy).all()
    assert (np.asarray(entropy) >= 0).all()


def test_bfloat16_products_accumulate_in_float32():
  hidden, head, targets = case(d=64, dtype=jnp.bfloat16, scale=0.3)
  found, _ = logprobs.token_logprobs(hidden, head, targets, chunk=8)
  assert found.dtype == jnp.float32
  expected, _ = reference(hidden, head, targets, 1.0)
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_chunks_hold_a_fixed_number_of_logits():
  assert logprobs.chunk_rows(10**6, 152_064) == 64
  assert logprobs.chunk_rows(10**6, 41) == 2**18
  assert logprobs.chunk_rows(100, 41) == 100
  assert logprobs.chunk_rows(10**6, 2**30) == 1


# Memory.


def largest_of_jaxpr(jaxpr, vocab):
  """Most elements of an array that has an axis of the vocabulary's length."""
  most = 0
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      shape = getattr(variable.aval, "shape", ())
      if vocab in shape:
        most = max(most, math.prod(shape))
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          most = max(most, largest_of_jaxpr(inner, vocab))
  return most


def largest_of_hlo(text, vocab):
  """The same of an optimised program, whatever the type."""
  most = 0
  for dims in re.findall(r"\b(?:f32|bf16|f16|f64)\[([\d,]+)\]", text):
    shape = [int(n) for n in dims.split(",")]
    if vocab in shape:
      most = max(most, math.prod(shape))
  return most


N, D, VOCAB, CHUNK = 512, 4, 67, 32


@pytest.mark.parametrize("chunk, limit", [(CHUNK, CHUNK), (None, N)])
def test_no_array_of_all_logits_even_backwards(chunk, limit):
  hidden, head, targets = case(N, D, VOCAB)

  def loss(hidden, head):
    found, entropy = logprobs.token_logprobs(hidden, head, targets, chunk=chunk)
    return jnp.sum(found), jnp.sum(entropy)

  step = jax.value_and_grad(loss, (0, 1), has_aux=True)
  jaxpr = jax.make_jaxpr(step)(hidden, head)
  # Without chunks (the second case) the check does see the array.
  assert largest_of_jaxpr(jaxpr.jaxpr, VOCAB) == limit * VOCAB
  text = jax.jit(step).lower(hidden, head).compile().as_text()
  found = largest_of_hlo(text, VOCAB)
  assert found <= limit * VOCAB
  assert found >= min(CHUNK, limit) * VOCAB


def test_the_update_program_has_no_array_of_all_logits(monkeypatch):
  monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 16 * 509)
  sizes = Sizes(layers=1, width=8, heads=2, kv_heads=1, head_dim=4, ffn=8,
                vocab=509, tied=False)  # fmt: skip
  graph, params = transformer.create(sizes, 0)
  updater = update.Updater(
    graph, update.Objective(temperature=0.93), optimizer.OptimizerOptions()
  )
  state = updater.init(params)
  rows, length = 8, 16  # 128 positions: 8 chunks.
  shape = (1, rows, length)
  ints = [np.zeros(shape, np.int32)] * 5
  floats = [np.zeros(shape, np.float32)] * 3
  batch = packing.Packed(*ints, *floats)
  update_program = update_programs.programs(
    graph, updater.objective, optimizer.OptimizerOptions(), None, None
  )[1]
  text = (
    update_program.lower(
      state,
      batch,
      batch.sampler_logprobs,
      batch.sampler_logprobs,
      np.int32(1),
      np.float32(1),
      np.float32(1),
    )
    .compile()
    .as_text()
  )
  found = largest_of_hlo(text, 509)
  assert 16 * 509 <= found < rows * length * 509 / 4
