"""Sampler against trainer: the same log-probs from two forward passes."""

import dataclasses

import jax
import numpy as np
import pytest
from sampling_helpers import SIZES, draw, make, model, prompts, rollouts, same
from sampling_helpers import trainer_logprobs

from vigor_jax.sampling import cache, weights
from vigor_jax.sampling import sampler as sampler_lib


def largest_gap(graph, params, texts, drawn, temperature=1.0):
  scored = trainer_logprobs(graph, params, texts, drawn, temperature)
  return max(
    float(np.abs(scored[k] - drawn[k]["logprobs"]).max()) for k in drawn
  )


@pytest.mark.parametrize(
  "changes",
  [
    {},
    dict(qk_norm=True, tied=False),
    dict(layers=13),  # stacked: one scan over the layers
    dict(kv_heads=1, vocab=300),  # the two-level inverse CDF
  ],
)
def test_whole_batch_within_1e_4(changes):
  sizes = dataclasses.replace(SIZES, **changes)
  graph, params = model(sizes)
  texts = prompts(vocab=sizes.vocab)
  drawn = draw(make(graph, sizes), params, texts=texts)
  assert largest_gap(graph, params, texts, drawn) < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_at_other_temperatures_and_with_truncation(temperature):
  graph, params = model()
  texts = prompts()
  drawn = draw(
    make(graph), params, texts=texts, temperature=temperature, top_k=5
  )
  assert largest_gap(graph, params, texts, drawn, temperature) < 1e-4


def test_after_the_slots_have_been_used_by_longer_rollouts():
  graph, params = model()
  sampler = make(graph, slots=2, chunk=2)
  texts = prompts()
  draw(sampler, params, texts=texts[::-1])
  drawn = draw(sampler, params, step=1, texts=texts)
  assert largest_gap(graph, params, texts, drawn) < 1e-4


@pytest.mark.parametrize("changes", [{}, dict(slots=7, widths=(2, 4), chunk=2)])
def test_unrolled_layers_equal_scanned_ones(monkeypatch, changes):
  graph, params = model()
  unrolled = draw(make(graph), params)
  assert isinstance(make(graph)._state.kv, list)
  monkeypatch.setattr(cache, "unrolled", lambda sizes: False)
  # Programs are shared by samplers of equal graphs: this one is new.
  monkeypatch.setattr(weights, "of", weights.Weights)
  monkeypatch.setattr(
    sampler_lib, "_programs", sampler_lib._programs.__wrapped__
  )
  sampler = make(graph, **changes)
  assert not isinstance(sampler._state.kv, list)
  same(unrolled, draw(sampler, params))


def test_a_bfloat16_cache_is_close():
  graph, params = model()
  texts = prompts()
  sampler = make(graph, cache_dtype="bfloat16")
  assert {a.dtype.name for a in jax.tree.leaves(sampler._state.kv)} == {
    "bfloat16"
  }
  drawn = draw(sampler, params, texts=texts)
  assert 1e-6 < largest_gap(graph, params, texts, drawn) < 0.1


def test_wrong_positions_would_be_seen():
  # The comparison is sharp: one other prompt token moves log-probs far.
  graph, params = model()
  texts = prompts()
  drawn = draw(make(graph), params, texts=texts, requests=[rollouts()])
  texts[3] = texts[3].copy()
  texts[3][0] = 5 if texts[3][0] != 5 else 6
  assert largest_gap(graph, params, texts, drawn) > 0.01
