"""The transformer against a NumPy forward, and its variants with each other."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax.policy import attention
from vigor_jax.policy import transformer
from vigor_jax.policy.sizes import Sizes

BASE = Sizes(layers=2, width=12, heads=4, kv_heads=4, head_dim=6, ffn=10,
             vocab=17)  # fmt: skip
VARIANTS = {
  "llama": dict(kv_heads=2, rope_theta=5e5,
                rope_scaling=("llama3", 8.0, 1.0, 4.0, 40)),
  "qwen2": dict(kv_heads=1, qkv_bias=True, tied=True, norm_eps=1e-5),
  "qwen3": dict(qk_norm=True, head_dim=8, tied=True,
                rope_scaling=("linear", 2.0)),
}  # fmt: skip


def model(**changes):
  """(sizes, graph, params) with every parameter random, biases included."""
  sizes = dataclasses.replace(BASE, **changes)
  graph, params = transformer.abstract(sizes)
  rng = np.random.default_rng(1)
  draw = lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.4 + 0.3, a.dtype)
  return sizes, graph, jax.tree.map(draw, params)


def frequencies(sizes):
  """Inverse rotary frequencies, one at a time."""
  out = []
  for i in range(sizes.head_dim // 2):
    inverse = sizes.rope_theta ** (-2 * i / sizes.head_dim)
    if sizes.rope_scaling and sizes.rope_scaling[0] == "linear":
      inverse /= sizes.rope_scaling[1]
    elif sizes.rope_scaling:
      _, factor, low, high, original = sizes.rope_scaling
      wavelength = 2 * np.pi / inverse
      if wavelength > original / low:
        inverse /= factor
      elif wavelength >= original / high:
        mix = (original / wavelength - low) / (high - low)
        inverse = (1 - mix) * inverse / factor + mix * inverse
    out.append(inverse)
  return np.array(out)


def reference(sizes, params, tokens, positions):
  """float64 logits [T, V] of one sequence, head by head."""
  w = jax.tree.map(np.float64, nnx.to_pure_dict(params))

  def norm(x, scale):
    mean = (x * x).mean(-1, keepdims=True)
    return x / np.sqrt(mean + sizes.norm_eps) * scale

  def rotate(x, position):
    half = sizes.head_dim // 2
    out = np.empty_like(x)
    for i, inverse in enumerate(frequencies(sizes)):
      c, s = np.cos(position * inverse), np.sin(position * inverse)
      out[i] = x[i] * c - x[half + i] * s
      out[half + i] = x[half + i] * c + x[i] * s
    return out

  t = len(tokens)
  x = w["embed"][tokens]
  b = w["blocks"]
  for n in range(sizes.layers):
    y = norm(x, b["attn_norm"]["scale"][n])
    heads = []
    for h in range(sizes.heads):
      shared = h // (sizes.heads // sizes.kv_heads)
      q = y @ b["q"][n][:, h]
      k = y @ b["k"][n][:, shared]
      v = y @ b["v"][n][:, shared]
      if sizes.qkv_bias:
        q = q + b["q_bias"][n][h]
        k = k + b["k_bias"][n][shared]
        v = v + b["v_bias"][n][shared]
      if sizes.qk_norm:
        q = norm(q, b["q_norm"]["scale"][n])
        k = norm(k, b["k_norm"]["scale"][n])
      q = np.stack([rotate(row, p) for row, p in zip(q, positions)])
      k = np.stack([rotate(row, p) for row, p in zip(k, positions)])
      out = np.zeros((t, sizes.head_dim))
      for i in range(t):
        score = q[i] @ k[: i + 1].T / np.sqrt(sizes.head_dim)
        weight = np.exp(score - score.max())
        out[i] = weight / weight.sum() @ v[: i + 1]
      heads.append(out @ b["o"][n][h])
    x = x + sum(heads)
    y = norm(x, b["mlp_norm"]["scale"][n])
    gate = y @ b["gate"][n]
    x = x + (gate / (1 + np.exp(-gate)) * (y @ b["up"][n])) @ b["down"][n]
  x = norm(x, w["final_norm"]["scale"])
  return x @ (w["embed"].T if sizes.tied else w["head"])


TOKENS = np.array([[3, 0, 16, 7, 7, 1, 9], [5, 5, 2, 11, 0, 4, 13]], np.int32)
# Positions with gaps and an offset: they are data, not counters.
POSITIONS = np.array([np.arange(7), [0, 1, 2, 30, 31, 44, 90]], np.int32)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
  """(sizes, params, logits scanned, unrolled and fused, gradients)."""
  sizes, graph, params = model(**VARIANTS[request.param])

  def logits(params, **options):
    net = nnx.merge(graph, params)
    how = options.pop("how", "scan")
    blocks = None if how == "scan" else net.split_layers()
    if how == "fused":
      for block in blocks:
        block.fuse()
    hidden, _ = net(TOKENS, POSITIONS, attention.causal_attend,
                    blocks=blocks, **options)  # fmt: skip
    return net.logits(hidden)

  @jax.jit
  def everything(params):
    square = lambda params, **o: jnp.sum(logits(params, **o) ** 2)
    return dict(
      scanned=logits(params),
      unrolled=logits(params, how="unrolled"),
      fused=logits(params, how="fused"),
      grad=jax.grad(square)(params),
      grad_remat=jax.grad(lambda p: square(p, remat=True))(params),
      grad_unrolled=jax.grad(lambda p: square(p, how="unrolled"))(params),
    )

  return sizes, params, jax.device_get(everything(params))


def test_equals_a_numpy_forward(variant):
  sizes, params, found = variant
  for row, (tokens, positions) in enumerate(zip(TOKENS, POSITIONS)):
    expected = reference(sizes, params, tokens, positions)
    assert found["scanned"].dtype == np.float32
    np.testing.assert_allclose(found["scanned"][row], expected, atol=2e-4)


def test_scanned_equals_unrolled_and_fused(variant):
  _, _, found = variant
  for other in ("unrolled", "fused"):
    np.testing.assert_allclose(found["scanned"], found[other], atol=2e-5)


def test_gradients_do_not_depend_on_the_loop_or_on_remat(variant):
  _, _, found = variant
  for other in ("grad_remat", "grad_unrolled"):
    for a, b in zip(jax.tree.leaves(found["grad"]), jax.tree.leaves(found[other])):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())
  # Every parameter is used.
  assert all(a.any() for a in jax.tree.leaves(found["grad"]))


def test_parameters_are_counted(variant):
  sizes, params, _ = variant
  assert sizes.num_params == sum(a.size for a in jax.tree.leaves(params))
  _, abstract = transformer.abstract(sizes)
  assert jax.tree.structure(abstract) == jax.tree.structure(params)
  for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(params)):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("name", VARIANTS)
def test_rotary_frequencies(name):
  sizes = dataclasses.replace(BASE, **VARIANTS[name])
  np.testing.assert_allclose(
    transformer.rope_frequencies(sizes), frequencies(sizes), rtol=1e-5
  )


def test_llama3_scaling_leaves_high_and_divides_low_frequencies():
  sizes = dataclasses.replace(
    BASE, head_dim=64, rope_scaling=("llama3", 8.0, 1.0, 4.0, 8192),
    rope_theta=5e5,
  )  # fmt: skip
  plain = transformer.rope_frequencies(dataclasses.replace(sizes, rope_scaling=()))
  ratio = np.asarray(plain / transformer.rope_frequencies(sizes))
  assert ratio[0] == 1 and ratio[-1] == 8
  assert (np.diff(ratio) >= -1e-5).all() and 1.5 < ratio[ratio.size // 2 + 1] < 7


def test_a_position_by_hand():
  # Pairs are (i, i + hd / 2): position 1 turns (1, 0) to (cos 1, sin 1).
  sizes = dataclasses.replace(BASE, head_dim=2)
  rope = transformer.rope_tables(sizes, np.array([[1]]))
  found = transformer.rotate(np.array([[[[1.0, 0.0]]]], np.float32), rope)
  np.testing.assert_allclose(
    np.ravel(found), [np.cos(1), np.sin(1)], rtol=1e-6
  )


def test_grouped_heads_by_hand():
  # Two query heads share one key and value; equal scores average the values.
  q = np.zeros((1, 2, 2, 2), np.float32)
  k = np.ones((1, 2, 1, 2), np.float32)
  v = np.array([[[[2.0, 4.0]], [[6.0, 0.0]]]], np.float32)
  mask = np.tril(np.ones((2, 2), bool))[None]
  out = np.asarray(attention.grouped_attention(q, k, v, mask))
  np.testing.assert_allclose(out[0, 0], [[2, 4], [2, 4]])
  np.testing.assert_allclose(out[0, 1], [[4, 2], [4, 2]])
  nothing = attention.grouped_attention(q, k, v, np.zeros((1, 2, 2), bool))
  np.testing.assert_allclose(nothing, np.broadcast_to([4, 2], (1, 2, 2, 2)))


def test_the_future_is_not_seen():
  sizes, graph, params = model(kv_heads=2)

  @jax.jit
  def hidden(tokens):
    net = nnx.merge(graph, params)
    return net(tokens, POSITIONS, attention.causal_attend)[0]

  changed = TOKENS.copy()
  changed[:, 4] += 1
  a, b = hidden(TOKENS), hidden(changed)
  np.testing.assert_array_equal(a[:, :4], b[:, :4])
  assert (np.abs(a[:, 4:] - b[:, 4:]).max(-1) > 1e-4).all()


def test_bfloat16_computes_low_and_gives_float32_logits():
  sizes, graph, params = model(dtype="bfloat16")

  @jax.jit
  def forward(params):
    net = nnx.merge(graph, params)
    hidden, _ = net(TOKENS, POSITIONS, attention.causal_attend)
    return hidden, net.logits(hidden)

  hidden, logits = forward(params)
  assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
  for row in range(2):
    expected = reference(sizes, params, TOKENS[row], POSITIONS[row])
    scale = np.abs(expected).max()
    error = np.abs(np.asarray(logits[row]) - expected).max()
    assert 1e-4 * scale < error < 0.05 * scale


def test_parameters_follow_the_seed():
  _, a = transformer.create(BASE, 0)
  _, b = transformer.create(BASE, 0)
  _, c = transformer.create(BASE, 1)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    np.testing.assert_array_equal(x, y)
  assert not np.array_equal(a.embed[...], c.embed[...])
  # Layers differ from each other too.
  assert not np.array_equal(a.blocks.q[...][0], a.blocks.q[...][1])


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(heads=4, kv_heads=3), "kv_heads=3"),
    (dict(head_dim=5), "head_dim=5 must be even"),
    (dict(layers=0), "model.sizes.layers"),
    (dict(rope_scaling=("yarn", 2.0)), "rope_scaling"),
    (dict(rope_scaling=("llama3", 8.0)), "rope_scaling"),
  ],
)
def test_sizes_that_cannot_be_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(BASE, **changes)
