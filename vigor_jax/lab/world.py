"""Chains of skills: a population of softmax bandits that share parameters.

A prompt is a chain of d <= 6 steps. Step i needs skill s_i, a softmax over
ARMS arms of which arm 0 is right. The prompt is a bandit with ARMS^d arms
whose logits are sums of skill parameters,

  log pi(a_1 .. a_d | x) = sum_i log softmax(theta[s_i])[a_i],

so success has p_x = prod_i p(s_i), and learning on one prompt helps every
prompt that shares a skill. Skills share parameters too: the logits are

  theta[s] = theta_0[s] + phi[s] W,   W [features, ARMS] is what is trained,

with random features phi[s], so that a step for one skill moves all others a
little, in random directions, as in a network (without that the best learning
rate would be infinite). It is the arithmetic task without the network:
`mastered` skills are what the warm start solves, `facts` what it was taught
badly. Verdicts are 1 for a chain without a wrong step, else 0 ("sparse"), or
the share of right steps ("graded"); a share `noise` of them is turned round,
r -> 1 - r.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vigor_jax.allocation import features

ARMS = 4
STEPS = 6  # longest chain
REWARDS = ("sparse", "graded")
# Shares of easy and of hard prompts, those of the drawn tasks.
PRESETS = {
  "plain": (0.0, 0.0),
  "sparse_signal": (0.75, 0.15),
  "hard_junk": (0.15, 0.75),
}
_BLOCK = 4096  # prompts drawn at a time
_FACT_STEP = 1 / 3  # a step of a plain prompt is one of three operations
# Purposes of random numbers.
_SKILLS, _EVALUATION, _PROMPTS, _FEATURES = range(4)
_LOOKS = 2**40  # in place of a sample index


@dataclasses.dataclass(frozen=True)
class World:
  """What is to be learned, and the stream it is learned from.

  Attributes:
    easy: share of prompts made of mastered skills.
    hard: share of prompts of six facts.
    reward: "sparse" or "graded".
    noise: probability q that a verdict r becomes 1 - r.
    facts: skills to be learned; they start with p about .05 to .6.
    mastered: skills that start with p of about `mastery`.
    mastery: see above.
    features: dimension of phi; 0 gives every skill its own parameters.
    num_prompts: size of a fixed set; 0 draws fresh prompts for ever.
    evaluation: prompts of the plain mixture on which accuracy is exact.
    visible: share of a chain's steps whose skill a prompt's looks give away;
      the others look like any skill. For rules that look at prompts.
  """

  easy: float = 0.0
  hard: float = 0.0
  reward: str = "sparse"
  noise: float = 0.0
  facts: int = 60
  mastered: int = 20
  mastery: float = 0.985
  features: int = 64
  num_prompts: int = 0
  evaluation: int = 512
  visible: float = 1.0

  def __post_init__(self):
    if not (0 <= self.easy and 0 <= self.hard and self.easy + self.hard <= 1):
      raise ValueError(
        f"easy={self.easy} and hard={self.hard} must be shares, at most 1"
        " together"
      )
    if self.reward not in REWARDS:
      raise ValueError(f"reward={self.reward!r} must be one of {REWARDS}")
    if not 0 <= self.noise <= 0.5:
      raise ValueError(f"noise={self.noise} must lie in [0, .5]")
    if min(self.facts, self.mastered, self.evaluation) < 1:
      raise ValueError("facts, mastered and evaluation must be at least 1")
    if not 0 <= self.visible <= 1:
      raise ValueError(f"visible={self.visible} must be a share")
    if self.features < 0:
      raise ValueError(f"features={self.features} must be >= 0")
    if self.num_prompts < 0:
      raise ValueError(f"num_prompts={self.num_prompts} must be >= 0")

  @classmethod
  def preset(cls, name: str, **fields) -> World:
    """plain | sparse_signal | hard_junk, with further fields."""
    if name not in PRESETS:
      raise ValueError(f"{name!r} is no preset; there are {', '.join(PRESETS)}")
    easy, hard = PRESETS[name]
    return cls(easy, hard, **fields)

  @property
  def skills(self) -> int:
    return self.facts + self.mastered

  @property
  def label(self) -> str:
    """The shares in per cent, the reward and the noise."""
    return (
      f"easy {100 * self.easy:.0f} hard {100 * self.hard:.0f} {self.reward}"
      + (f" q {self.noise:g}" if self.noise else "")
    )

  def initial(self, seed: int) -> np.ndarray:
    """Logits of the warm start: float64 [skills, ARMS]."""
    rng = _rng(seed, _SKILLS)
    logits = 0.3 * rng.standard_normal((self.skills, ARMS))
    rest = np.log(np.exp(logits[:, 1:]).sum(1))  # of the wrong arms
    fact = -1.0 + 0.8 * rng.standard_normal(self.facts)
    solved = np.log(self.mastery / (1 - self.mastery))
    solved = solved + 0.3 * rng.standard_normal(self.mastered)
    logits[:, 0] = rest + np.concatenate([fact, solved])
    return logits

  def embedding(self, seed: int) -> np.ndarray:
    """phi: float64 [skills, features], rows of expected length 1."""
    if not self.features:
      return np.eye(self.skills)
    rng = _rng(seed, _FEATURES)
    phi = rng.standard_normal((self.skills, self.features))
    return phi / np.sqrt(self.features)

  def draw(self, rng: np.random.Generator, count: int, mixture=None):
    """Chains of `count` prompts: int [count, STEPS], padded with `skills`.

    Args:
      rng: of the draw.
      count: prompts.
      mixture: (easy, hard) in place of the world's own.
    """
    easy_share, hard_share = mixture or (self.easy, self.hard)
    kind = rng.random(count)
    easy, hard = kind < easy_share, kind >= 1 - hard_share
    length = np.where(hard, STEPS, rng.integers(1, STEPS + 1, count))
    fact = rng.random((count, STEPS)) < _FACT_STEP
    fact = (fact | hard[:, None]) & ~easy[:, None]
    skill = np.where(
      fact,
      rng.integers(self.facts, size=(count, STEPS)),
      self.facts + rng.integers(self.mastered, size=(count, STEPS)),
    )
    return np.where(np.arange(STEPS) < length[:, None], skill, self.skills)

  def evaluation_chains(self, seed: int) -> np.ndarray:
    """Chains of the plain mixture: int [evaluation, STEPS]."""
    return self.draw(_rng(seed, _EVALUATION), self.evaluation, (0.0, 0.0))

  def success(self, right: np.ndarray, chains: np.ndarray) -> np.ndarray:
    """p of every chain: right [..., skills] -> [..., chains]."""
    padded = np.concatenate([right, np.ones((*right.shape[:-1], 1))], axis=-1)
    return padded[..., chains].prod(-1)


class Stream:
  """The prompts of one run. Prompts that are not consumed come again.

  Attributes of it and of what `peek` returns: positions, uids int64 [k],
  chains int [k, STEPS].
  """

  def __init__(self, world: World, seed: int):
    self.world, self.seed = world, seed
    self.num_examples = world.num_prompts or None
    self.positions = self.uids = np.zeros(0, np.int64)
    self.chains = np.zeros((0, STEPS), np.int64)
    self._block = 0
    if world.num_prompts:
      rng = _rng(seed, _PROMPTS)
      self._fixed = world.draw(rng, world.num_prompts)

  def _more(self) -> None:
    rng = _rng(self.seed, _PROMPTS, self._block + 1)
    start = int(self.positions[-1]) + 1 if len(self.positions) else 0
    start = max(start, self._next_position)
    if self.num_examples:
      uids = rng.permutation(self.num_examples)
      chains = self._fixed[uids]
      positions = start + np.arange(len(uids))
    else:
      positions = uids = start + np.arange(_BLOCK)
      chains = self.world.draw(rng, _BLOCK)
    self.positions = np.concatenate([self.positions, positions])
    self.uids = np.concatenate([self.uids, uids])
    self.chains = np.concatenate([self.chains, chains])
    self._next_position = int(positions[-1]) + 1
    self._block += 1

  _next_position = 0

  def peek(self, count: int) -> View:
    """The next `count` prompts; they stay."""
    while len(self.positions) < count:
      self._more()
    return View(
      self.positions[:count],
      self.uids[:count],
      self.chains[:count],
      self.world,
      self.seed,
    )

  def advance(self, consumed) -> None:
    """Removes consumed prompts of the head; the others stay, in order."""
    k = len(consumed)
    first = k if consumed.all() else None
    stay = slice(k, None)
    if first is None:
      stay = np.concatenate(
        [np.flatnonzero(~consumed), np.arange(k, len(self.positions))]
      )
    self.positions = self.positions[stay]
    self.uids, self.chains = self.uids[stay], self.chains[stay]


@dataclasses.dataclass(frozen=True)
class View:
  """Prompts at the head of a stream."""

  positions: np.ndarray
  uids: np.ndarray
  chains: np.ndarray
  world: World
  seed: int

  def take(self, rows) -> View:
    """The given rows, in the given order."""
    return dataclasses.replace(
      self,
      positions=self.positions[rows],
      uids=self.uids[rows],
      chains=self.chains[rows],
    )

  @property
  def features(self) -> np.ndarray:
    """What the prompts look like, made by allocation/features.py."""
    shown = self.chains
    if self.world.visible < 1:
      u = uniforms(self.seed, self.uids, _LOOKS, 2 * STEPS)
      other = (u[:, STEPS:] * self.world.skills).astype(np.int64)
      hidden = (u[:, :STEPS] >= self.world.visible) & (
        shown < self.world.skills
      )
      shown = np.where(hidden, other, shown)
    lengths = (shown < self.world.skills).sum(1)
    return features.hashed([c[:d] for c, d in zip(shown, lengths)])


def _rng(seed: int, purpose: int, block: int = 0) -> np.random.Generator:
  return np.random.Generator(
    np.random.Philox(key=[seed, 0x6C6162], counter=[0, 0, purpose, block])
  )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _finalise(x: np.ndarray) -> np.ndarray:
  """The finaliser of splitmix64 (Steele et al. 2014), a 64-bit mixer."""
  x = (x ^ (x >> np.uint64(30))) * _MIX[0]
  x = (x ^ (x >> np.uint64(27))) * _MIX[1]
  return x ^ (x >> np.uint64(31))


def uniforms(seeds, positions, samples, width: int) -> np.ndarray:
  """Addressed uniform numbers of rollouts: float64 [k, width].

  A rollout is (seed, stream position, sample index): the same rollout comes
  out whatever rule, round or batch of seeds asks for it, so rules are
  compared on common random numbers. A counter hash instead of Philox, whose
  setting up per rollout would cost more than everything else here.
  """
  with np.errstate(over="ignore"):
    key = _finalise(np.asarray(seeds, np.uint64) * _GOLDEN + _GOLDEN)
    key = _finalise(key ^ (np.asarray(positions, np.uint64) * _GOLDEN))
    key = _finalise(key + np.asarray(samples, np.uint64) * _GOLDEN)
    words = key[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    return (_finalise(words) >> np.uint64(11)) * 2.0**-53
