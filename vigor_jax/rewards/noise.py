"""Wrong verdicts on purpose: how robust is a rule to a faulty verifier?"""

from __future__ import annotations

import dataclasses

import numpy as np

# The second word of the Philox key: keeps this stream apart from others that
# use the same seed.
_STREAM = 0x6E6F697365  # "noise"


@dataclasses.dataclass(frozen=True)
class Noise:
  """Flips and perturbs verdicts, each addressed by its rollout.

  The draw for a rollout depends on (seed, prompt position, sample index)
  alone: the same rollout gets the same noise in any order, slot, round or host.

  Attributes:
    seed: of the noise.
    flip_right: probability that a verdict v >= 1/2 becomes 1 - v (a false
      negative where verdicts are 0 or 1).
    flip_wrong: the same for v < 1/2 (a false positive).
    sigma: standard deviation of Gaussian noise added after the flip; the sum
      is clipped to [0, 1].
  """

  seed: int
  flip_right: float = 0.0
  flip_wrong: float = 0.0
  sigma: float = 0.0

  def __post_init__(self) -> None:
    if not isinstance(self.seed, (int, np.integer)) or self.seed < 0:
      raise ValueError(f"noise.seed must be an integer >= 0, got {self.seed!r}")
    for field in ("flip_right", "flip_wrong"):
      value = getattr(self, field)
      if not 0.0 <= value <= 1.0:
        raise ValueError(f"noise.{field} must be in [0, 1], got {value!r}")
    if not 0.0 <= self.sigma < np.inf:
      raise ValueError(f"noise.sigma must be finite, >= 0, got {self.sigma!r}")

  def apply(
    self, verdicts: np.ndarray, positions: np.ndarray, samples: np.ndarray
  ) -> np.ndarray:
    """Returns noisy verdicts.

    Args:
      verdicts: [k] in [0, 1].
      positions: [k] the prompt's position in the stream, >= 0.
      samples: [k] index of the rollout within its prompt, >= 0.

    Returns:
      float32 [k] in [0, 1].

    Raises:
      ValueError: the lengths differ.
    """
    verdicts = np.asarray(verdicts, np.float64)
    positions, samples = np.asarray(positions), np.asarray(samples)
    if not verdicts.shape == positions.shape == samples.shape:
      raise ValueError(
        f"{verdicts.shape=}, {positions.shape=} and {samples.shape=} differ"
      )
    out = np.empty(verdicts.shape, np.float32)
    for i, verdict in enumerate(verdicts):
      draw = np.random.Generator(
        np.random.Philox(
          key=[int(self.seed) % 2**64, _STREAM],
          counter=[0, 0, int(positions[i]), int(samples[i])],
        )
      )
      rate = self.flip_right if verdict >= 0.5 else self.flip_wrong
      value = 1.0 - verdict if draw.random() < rate else verdict
      if self.sigma:
        value += self.sigma * draw.standard_normal()
      out[i] = min(1.0, max(0.0, value))
    return out
