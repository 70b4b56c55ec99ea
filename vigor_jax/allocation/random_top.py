"""VIGOR's schedule with a random ranking: isolates what the ranking adds."""

from __future__ import annotations

import numpy as np

from vigor_jax.allocation import halving
from vigor_jax.allocation.groups import Groups

RANKING = 1  # purpose of the addressed numbers, apart from the tie keys


class RandomTop(halving.Halving):
  """Successive halving of prompts chosen at random (VIGOR's own control)."""

  name = "random_top"

  def score(self, groups: Groups, round_index: int) -> np.ndarray:
    return groups.uniforms(round_index, purpose=RANKING)
