"""EM for several kinds at once, against the sums written out."""

import numpy as np

from vigor_jax.allocation import mixtures
from vigor_jax.allocation.mixtures import Mixtures


def test_expected_counts_kind_by_kind():
  rng = np.random.default_rng(0)
  kind = np.array([2, 0, 2, 2, 0, 3])  # Kind 1 has no row.
  like, number = rng.random((6, 5)), rng.integers(1, 9, 6).astype(float)
  weights = rng.dirichlet(np.ones(5), 4)
  mixtures = Mixtures(like, kind, number, 4)
  post = like * weights[kind]
  total = post.sum(1)
  want = np.stack([
    (number * (kind == i)) @ (post / total[:, None]) for i in range(4)
  ])
  np.testing.assert_allclose(mixtures.expected(weights), want)


def test_iterations_are_those_written_out():
  rng = np.random.default_rng(1)
  kind = np.array([1, 0, 1, 1, 2, 0])
  like, number = rng.random((6, 5)), rng.integers(1, 9, 6).astype(float)
  start = rng.dirichlet(np.ones(5), 3)
  mix, common = rng.random((3, 4)), rng.random(5)
  mixtures = Mixtures(like, kind, number, 3)
  mixed = start
  for _ in range(7):
    mixed = mix @ np.concatenate([mixtures.expected(mixed), common[None]])
  np.testing.assert_allclose(mixtures.climb(start, 7, mix, common), mixed)
  np.testing.assert_array_equal(mixtures.climb(start, 0, mix, common), start)


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
    found = mixtures.distinct(rows, each)
    np.testing.assert_array_equal(found[:, :3], kinds)
    expected = np.bincount(index.reshape(-1), each)
    np.testing.assert_array_equal(found[:, 3], expected)
  assert mixtures.distinct(rows[:0]).shape == (0, 4)
