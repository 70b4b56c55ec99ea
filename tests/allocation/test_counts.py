"""Counts pooled and laid out, and EM on them against the sums written out."""

import numpy as np
import pytest

from vigor_jax.allocation import counts as counting


ROWS = np.array([
  (1, 0, 0, 2.0), (1, 0, 2, 5.0), (2, 1, 2, 1.0), (2, 2, 0, 3.0), (4, 0, 3, 7.0)
])  # fmt: skip


def test_rows_are_laid_out_by_kind():
  found = counting.Counts(ROWS, 5)
  assert found.n.tolist() == [1, 2, 2, 4] and found.k.tolist() == [0, 1, 2, 0]
  assert found.prompts.tolist() == [
    [2, 0, 3, 0], [0] * 4, [5, 1, 0, 0], [0, 0, 0, 7], [0] * 4
  ]  # fmt: skip
  assert len(counting.Counts(ROWS).prompts) == 4
  without = counting.Counts(ROWS[:, [0, 1, 3]])
  assert without.prompts.tolist() == [[7, 1, 3, 7]]
  assert counting.Counts(np.zeros((0, 4)), 3).prompts.shape == (3, 0)


@pytest.mark.parametrize("iterations", [1, 7])
def test_iterations_are_those_written_out(iterations):
  rng = np.random.default_rng(1)
  like, weights = rng.random((4, 5)), rng.dirichlet(np.ones(5), 4)
  mix, common = rng.random((4, 5)), rng.random(5)
  found = counting.Counts(ROWS)
  start, want = weights.copy(), weights
  for _ in range(iterations):
    own = np.zeros((4, 5))
    for column, row in enumerate(like):
      for kind in range(4):
        post = row * want[kind] / (row * want[kind]).sum()
        own[kind] += found.prompts[kind, column] * post
    want = mix @ np.concatenate([own, common[None]])
  expected, tables = counting.climb(
    found, like, mix, common, weights, iterations
  )
  np.testing.assert_allclose(expected, own)
  np.testing.assert_allclose(tables, want)
  np.testing.assert_array_equal(weights, start)


def test_distinct_rows_and_their_numbers():
  rng = np.random.default_rng(0)
  rows = np.column_stack([
    rng.integers(1, 9000, 400) // 3000 + 8190.0,
    rng.integers(0, 4, 400) * 2.0**-10 + 8000,
    rng.integers(0, 3, 400),
  ])  # fmt: skip
  number = rng.integers(1, 5, 400) * 1.0
  kinds, index = np.unique(rows, axis=0, return_inverse=True)
  for each in (None, number):
    found = counting.distinct(rows, each)
    np.testing.assert_array_equal(found[:, :3], kinds)
    expected = np.bincount(index.reshape(-1), each)
    np.testing.assert_array_equal(found[:, 3], expected)
  assert counting.distinct(rows[:0]).shape == (0, 4)
