"""Fewer rollouts in the update, the same expected gradient.

Equal rollouts first: where outputs are short, many rollouts of a prompt are
the same, token for token, and so are their gradients. One of them with the sum
of their weights is the same update, exactly.

A rule that finds informative prompts leaves up to four times as many rollouts
with signal as a uniform split does, and the update has to pay for them. Not
all are worth it: in a group of 3 successes among 64 each failure has an
advantage of -.05, and 61 of them say what 10 would. The update then takes
rollout j with probability pi_j and divides its weight by pi_j (Horvitz and
Thompson 1952), so that the gradient's expectation over the draw is the whole
gradient.

A micro-batch costs the same whether it is full or not. So there are as many
more as will nearly always need no further one.

The variance is least at pi_j proportional to the norm of the rollout's
gradient, at most 1 (Neyman's allocation). That is |advantage x weight| times
the norm of grad log p(rollout), which is small where the policy was nearly
sure of what it said: see `surprise`.
"""

from __future__ import annotations

import numpy as np

# Shares of packed slots that hold a token where there is no lack of them:
# mostly, and at best. In rows of 32 tokens they were .79 to .87; 8 to 19 of 100
# draws did not fit as was foreseen, in rows of 1024 11.
FULL, PACKED = 0.75, 0.85
FLOOR = 0.05  # of a squared norm, in units of one wholly unlikely token's


def equal(group: np.ndarray, advantage: np.ndarray, tokens: np.ndarray,
          lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Which rollouts are one and the same.

  Equal are rollouts of one prompt with the same tokens and the same advantage
  (verdicts with noise may give equal tokens different ones, which a clipped
  loss does not treat alike).

  Args:
    group, lengths: int [N].
    advantage: float [N].
    tokens: int [N, L]; those past a rollout's length do not count.

  Returns:
    (first int [M], ascending: the first of each kind;
    inverse int [N]: which of the M each rollout is).
  """
  known: dict[tuple, int] = {}
  first, inverse = [], np.zeros(len(group), np.int64)
  rows = zip(group.tolist(), advantage.tolist(), lengths.tolist())
  for i, (g, a, length) in enumerate(rows):
    key = (g, a, tokens[i, :length].tobytes())
    inverse[i] = known.setdefault(key, len(first))
    if inverse[i] == len(first):
      first.append(i)
  return np.array(first, np.int64), inverse


def surprise(logprobs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """About the norm of grad log p of each rollout, up to a factor: float64 [N].

  With respect to the logits of a token drawn with probability p the gradient
  is (1 - p) at the token and -p_i at the others, so its norm lies between
  1 - p and sqrt(2) (1 - p). Squares of a rollout's tokens are added, as if the
  tokens' gradients were orthogonal, and FLOOR, since it is an estimate only.

  Args:
    logprobs: float [N, L], of the tokens drawn; those past the end do not
      count.
    lengths: int [N].
  """
  live = np.arange(logprobs.shape[1]) < lengths[:, None]
  unsure = np.expm1(np.where(live, logprobs, 0.0).astype(np.float64))
  return np.sqrt((unsure * unsure).sum(1) + FLOOR)


def probabilities(size: np.ndarray, number: int) -> np.ndarray:
  """min(1, c size) with the c at which they sum to `number`.

  Args:
    size: float [N], positive.
    number: expected number of draws, at least 1; N or more takes all.

  Returns:
    float64 [N].
  """
  size = np.asarray(size, np.float64)
  if number >= len(size):
    return np.ones(len(size))
  # With the m largest at 1, c = (number - m) / sum of the others: the first m
  # at which the next one stays below 1.
  down = np.sort(size)[::-1]
  rest = np.cumsum(down[::-1])[::-1][:number]
  left = number - np.arange(number)
  m = int(np.argmax(left * down[:number] <= rest))
  return np.minimum(1.0, left[m] / rest[m] * size)


def enough(size: np.ndarray, variance: float) -> int:
  """The fewest draws that leave no more than a variance of the sum.

  With the m largest drawn surely and k others, in proportion to their size,
  the variance is (sum of the others)^2 / k - sum of their squares.

  Args:
    size: float [N], norms of the summands, positive.
    variance: positive.

  Returns:
    A number for `probabilities`, at most N.
  """
  down = np.sort(np.asarray(size, np.float64))[::-1]
  rest = np.cumsum(down[::-1])[::-1]
  others = rest**2 / (variance + np.cumsum(down[::-1] ** 2)[::-1])
  fits = down * others <= rest
  if not fits.any():
    return len(down)
  m = int(np.argmax(fits))
  return min(len(down), int(np.ceil(m + others[m])))


def filling(size: np.ndarray, group: np.ndarray, lengths: np.ndarray,
            prompts: np.ndarray, least: int, most: int, slots: int) -> int:
  """The most draws that will hardly need more micro-batches than `least` do.

  Packed, a rollout takes its length, and its prompt's length once.

  Args:
    size: float [N], as in `probabilities`.
    group, lengths, prompts: int [N], of each rollout its group, its length and
      that of its prompt.
    least, most: numbers of draws.
    slots: tokens of a micro-batch.

  Returns:
    A number from least to most, as far as it can be foreseen.
  """
  of_group = np.zeros(int(group.max(initial=0)) + 1)
  of_group[group] = prompts

  def tokens(number: int) -> float:
    chance = probabilities(size, number)
    # Systematic draws take of each group nearly its share.
    copies = np.minimum(1.0, np.bincount(group, chance))
    return chance.dot(lengths) + copies.dot(of_group)

  room = FULL * slots * np.ceil(tokens(least) / (PACKED * slots))
  low, high = least, most
  while low < high:
    middle = (low + high + 1) // 2
    if tokens(middle) <= room:
      low = middle
    else:
      high = middle - 1
  return low


def draw(probability: np.ndarray, start: float) -> np.ndarray:
  """Systematic sample: bool [N], each row with its probability.

  Takes rows at which the running sum passes start, start + 1, ...: as many as
  the probabilities sum to, and of neighbours (a group's rows) nearly their
  share.

  Args:
    probability: float [N], in [0, 1], their sum a whole number.
    start: uniform in [0, 1).
  """
  ends = np.cumsum(probability)
  if len(ends):  # The sum is whole but for rounding.
    ends[-1] = round(ends[-1])
  passed = np.ceil(ends - start)
  return np.diff(passed, prepend=np.ceil(-start)) > 0
