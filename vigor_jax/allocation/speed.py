"""SPEED (arXiv 2506.09016): screen 4, extend prompts that are mixed by 20.

The signal-to-noise ratio of a prompt's gradient vanishes as p goes to 0 or 1,
so only prompts with 0 < k < 4 after screening are trained on, with all 24
rollouts. Paper: 64 prompts screened per call, 16 trained on.
"""

from __future__ import annotations

import numpy as np

from vigor_jax.allocation import screening
from vigor_jax.allocation.groups import Groups


class Speed(screening.Screening):
  """Screen, then extend the mixed prompts."""

  name = "speed"

  def qualifies(self, groups: Groups) -> np.ndarray:
    return groups.mixed()
