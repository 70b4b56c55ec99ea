"""No output raises, hangs, leaks a process, or leaves [0, 1]."""

import time

import numpy as np

import pytest

from vigor_jax import rewards

import fuzz_texts
import processes


def _children():
  return set(processes.descendants())


def _run(name, pairs, metadata, allowed_seconds, mode=None):
  before = _children()
  start = time.monotonic()
  with rewards.Scorer(name, mode=mode, workers=2) as scorer:
    out = scorer.score([p[0] for p in pairs], [p[1] for p in pairs], metadata)
  assert out.shape == (len(pairs),)
  assert np.isfinite(out).all() and out.min() >= 0 and out.max() <= 1
  assert time.monotonic() - start < allowed_seconds
  deadline = time.monotonic() + 60
  while _children() - before and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not _children() - before
  return out


def _math(data, count, seed, seconds):
  out = _run("math", fuzz_texts.math_pairs(data, count, seed), None, seconds)
  # Mutations keep some right answers right: the judge is not just refusing.
  assert 0 < out.mean() < 1


def _code(data, count, seed, seconds):
  pairs = fuzz_texts.code_pairs(data, count, seed)
  metadata = [{"tests": tests, "time_limit": 1} for _, tests in pairs]
  _run("code", [(p, "") for p, _ in pairs], metadata, seconds, "fraction")


def test_math_slice(data):
  _math(data, 400, 0, 400)


def test_code_slice(data):
  _code(data, 40, 0, 400)


@pytest.mark.slow
def test_math_ten_thousand(data):
  _math(data, 10_000, 1, 1800)


@pytest.mark.slow
def test_code_ten_thousand(data):
  _code(data, 10_000, 1, 7200)
