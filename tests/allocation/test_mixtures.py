"""EM for several kinds at once, against the sums written out."""

import numpy as np

from vigor_jax.allocation.mixtures import Mixtures


def test_expected_counts_and_likelihood_kind_by_kind():
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
  np.testing.assert_allclose(mixtures.number, want.sum(1))
  np.testing.assert_allclose(
    mixtures.log_likelihood(weights), number @ np.log(total)
  )
