"""The weight w(p) that allocator x advantage x aggregator gives a prompt.

On-policy, with coefficients a_j that depend on rewards only, the gradient of a
prompt's objective has expectation w grad p, with

  w = E[ sum_{r_j=1} a_j / p - sum_{r_j=0} a_j / (1 - p) ]

(docs/theory.md). Here w is enumerated exactly, over every outcome of VIGOR's
rounds on four softmax bandits, by code that shares nothing with the package,
and compared with autodiff of the package's loss on rollouts that the package's
allocators asked for.
"""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vigor_jax import allocation
from vigor_jax.policy import advantages, aggregators, losses

SUCCESS = (0.25, 0.4, 0.55, 0.75)  # p of the four prompts
PROMPTS = len(SUCCESS)
BUDGET = 24
LIMIT = 4  # L_max; a completion is one token, the chosen arm
# VIGOR's rounds with T = 3, m0 = 2, alpha = 1/2, gamma = 2: prompts x rollouts.
SCHEDULES = {"vigor": ((4, 2), (2, 4), (1, 8)), "uniform": ((4, 6),)}
OPTIONS = {"vigor": {"rounds": 3}, "uniform": {}}
STEPS = {"vigor": 22_000, "uniform": 4_000}
METHODS = ("grpo", "dr_grpo", "rloo", "predictable")
SIGMAS = 4
RELATIVE_ERROR = 0.01


# ------------------------------------------------- enumeration, in plain Python


def binomial(n, p):
  return [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]


def spread(path):
  """n^2 times the variance of all rewards so far: an exact integer."""
  n, k = sum(m for m, _ in path), sum(k for _, k in path)
  return k * (n - k)


@functools.cache
def outcomes(name):
  """Counter of (path of each prompt) -> probability.

  A path is ((m_1, k_1), (m_2, k_2), ...): rollouts and successes per round.
  """
  schedule = SCHEDULES[name]
  result = collections.Counter()

  def play(t, active, paths, probability):
    size, new = schedule[t]
    assert size == len(active)
    draws = [list(enumerate(binomial(new, SUCCESS[x]))) for x in active]
    for combination in itertools.product(*draws):
      after, chance = dict(paths), probability
      for x, (k, q) in zip(active, combination):
        after[x] = (*after[x], (new, k))
        chance *= q
      if t + 1 == len(schedule):
        result[tuple(after[x] for x in range(PROMPTS))] += chance
        continue
      # All active prompts have drawn alike, so k (n - k) ranks the variance;
      # every way to fill the last places from the tied is equally likely.
      keep = schedule[t + 1][0]
      scores = {x: spread(after[x]) for x in active}
      edge = sorted(scores.values(), reverse=True)[keep - 1]
      above = [x for x in active if scores[x] > edge]
      tied = [x for x in active if scores[x] == edge]
      choices = list(itertools.combinations(tied, keep - len(above)))
      for rest in choices:
        play(t + 1, sorted((*above, *rest)), after, chance / len(choices))

  play(0, list(range(PROMPTS)), {x: () for x in range(PROMPTS)}, 1.0)
  return result


def coefficients(method, path):
  """Advantage of a (success, failure) in each round of a path."""
  n, k = sum(m for m, _ in path), sum(k for _, k in path)
  if method == "predictable":
    seen_n, seen_k, result = 0, 0, []
    for m, hits in path:
      if seen_n:
        result.append((1 - seen_k / seen_n, -seen_k / seen_n))
      elif m == 1:
        result.append((0.0, 0.0))
      else:
        result.append((1 - (hits - 1) / (m - 1), -hits / (m - 1)))
      seen_n, seen_k = seen_n + m, seen_k + hits
    return result
  if k in (0, n):
    return [(0.0, 0.0)] * len(path)
  mean = k / n
  scale = {
    "grpo": 1 / (math.sqrt(mean * (1 - mean)) + 1e-6),
    "dr_grpo": 1.0,
    "rloo": n / (n - 1),
  }[method]
  return [((1 - mean) * scale, -mean * scale)] * len(path)


@functools.cache
def marginals(name):
  """Per prompt, (its path, mixed prompts, rollouts in them) -> probability."""
  result = [collections.Counter() for _ in SUCCESS]
  for paths, probability in outcomes(name).items():
    mixed = [path for path in paths if spread(path)]
    rollouts = sum(m for path in mixed for m, _ in path)
    for x, path in enumerate(paths):
      result[x][path, len(mixed), rollouts] += probability
  return result


def share(aggregator, path, prompts, rollouts):
  """What a term of this prompt is multiplied with."""
  return {
    "prompt_mean": 1 / (prompts * sum(m for m, _ in path)),
    "rollout_mean": 1 / rollouts,
    "token_mean": 1 / rollouts,
    "constant": 1 / (rollouts * LIMIT),
  }[aggregator]


def enumerated(name, method, aggregator, denominator="all"):
  """w of each prompt: float64 [PROMPTS]."""
  result = np.zeros(PROMPTS)
  for x, p in enumerate(SUCCESS):
    for (path, prompts, rollouts), probability in marginals(name)[x].items():
      if denominator == "all":
        factor = share(aggregator, path, PROMPTS, BUDGET)
      elif not spread(path):
        continue
      else:
        factor = share(aggregator, path, prompts, rollouts)
      gain = sum(
        k * hit / p - (m - k) * miss / (1 - p)
        for (m, k), (hit, miss) in zip(path, coefficients(method, path))
      )
      result[x] += probability * factor * gain
  return result


# ---------------------------------------------------- simulation, the package's


@dataclasses.dataclass
class Stream:
  """Fresh prompts without end."""

  positions: np.ndarray
  uids: np.ndarray

  def peek(self, k):
    assert k == len(self.positions)
    return self


@dataclasses.dataclass
class Simulation:
  """Rollouts of many steps. A row is one prompt of one step, [R, T]."""

  actions: np.ndarray
  rewards: np.ndarray
  rounds: np.ndarray
  drawn: np.ndarray  # bool, the allocator asked for this one


def policy_logits():
  """[PROMPTS, 3]: arm 0 is right, the wrong two are unequal."""
  p = np.array(SUCCESS)
  return np.log(np.stack([p, 0.7 * (1 - p), 0.3 * (1 - p)], axis=1))


@functools.cache
def simulate(name, steps, **options):
  """Runs the package's allocator for `steps` steps at a frozen policy."""
  width = sum(m for _, m in SCHEDULES[name])
  rng = np.random.Generator(np.random.Philox(key=[7, len(name)]))
  cumulative = np.exp(policy_logits()).cumsum(axis=1)
  uniforms = rng.random((steps, PROMPTS, width))
  actions = (uniforms[..., None] > cumulative[:, None, :2]).sum(axis=-1)
  rewards = (actions == 0).astype(np.float64)
  rounds = np.zeros((steps, PROMPTS, width), np.int64)
  drawn = np.zeros((steps, PROMPTS, width), bool)
  rule = allocation.make(
    name,
    OPTIONS[name] | options,
    prompts_per_step=PROMPTS,
    budget=BUDGET,
    seed=0,
    train_on="all",
  )
  for step in range(steps):
    positions = np.arange(step * PROMPTS, (step + 1) * PROMPTS)
    groups = rule.begin(Stream(positions, positions), step)
    for t, request in enumerate(rule.rounds(groups)):
      x = np.repeat(np.arange(PROMPTS), request.counts)
      first = np.cumsum(request.counts) - request.counts
      sample = np.arange(len(x)) - first[x] + groups.n[x].astype(int)
      drawn[step, x, sample], rounds[step, x, sample] = True, t
      groups.add(x, rewards[step, x, sample])
    assert drawn[step].sum() == BUDGET
  shape = (steps * PROMPTS, width)
  return Simulation(
    actions.reshape(shape),
    rewards.reshape(shape),
    rounds.reshape(shape),
    drawn.reshape(shape),
  )


@jax.jit
def row_gradients(actions, advantage, weight, segment):
  """-d loss / d logits of every row, by autodiff of the package's loss."""
  logits = jnp.tile(policy_logits(), (len(actions) // PROMPTS, 1))

  def loss(logits):
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions, axis=1)
    terms, _ = losses.token_loss(
      "grpo", logprobs, jax.lax.stop_gradient(logprobs), advantage, segment,
      segment, clip_low=0.2, clip_high=0.2,
    )  # fmt: skip
    return (weight * terms).sum()

  return -jax.grad(loss)(logits)


def step_weights(aggregator, denominator, group, mixed, steps):
  """The package's weight / denominator of each rollout, for its own step.

  Steps that share a denominator go through one call, which divides by the sum
  of theirs: multiplying by their number gives each step's own.
  """
  result = np.zeros(len(group))
  step = group // PROMPTS
  kinds = np.zeros(steps, int)
  if denominator == "informative":
    has = np.zeros(steps * PROMPTS, bool)
    has[group[mixed]] = True
    groups_mixed = has.reshape(steps, PROMPTS).sum(axis=1)
    kinds = groups_mixed * (BUDGET + 1)
    kinds += np.bincount(step, mixed, steps).astype(int)
  for kind in np.unique(kinds):
    rows = (kinds == kind)[step]
    count = int((kinds == kind).sum())
    weight, total = aggregators.weights(
      aggregator,
      group[rows],
      np.ones(int(rows.sum()), int),
      budget=BUDGET * count,
      max_new_tokens=LIMIT,
      num_prompts=PROMPTS * count,
      denominator=denominator,
      informative=mixed[rows],
    )
    result[rows] = weight * (count / total)
  return result


def gradients(name, method, aggregator, denominator="all", ddof=0, run=None):
  """Per-step gradients on the logits: float64 [steps, PROMPTS, 3]."""
  run = run or simulate(name, STEPS[name])
  steps = len(run.drawn) // PROMPTS
  row, column = np.nonzero(run.drawn)
  rewards = run.rewards[row, column]
  advantage, weight = np.zeros((2, *run.drawn.shape), np.float32)
  advantage[row, column] = advantages.compute(
    method, rewards, row, round_index=run.rounds[row, column], ddof=ddof
  )
  mixed = advantages.informative(rewards, row)
  weight[row, column] = step_weights(aggregator, denominator, row, mixed, steps)
  segment = np.where(run.drawn, np.arange(1, run.drawn.shape[1] + 1), 0)
  grads = row_gradients(run.actions, advantage, weight, segment)
  return np.asarray(grads, np.float64).reshape(steps, PROMPTS, 3)


def compare(grads, expected):
  """(w measured, its standard error, deviations of w and of the direction).

  Deviations are in standard errors, [PROMPTS].
  """
  policy = np.exp(policy_logits())
  right = np.array([1.0, 0.0, 0.0])
  slope = policy * (right - policy[:, :1])  # grad p on the logits
  across = np.cross(slope, np.ones(3))  # orthogonal, and sums to 0
  along = (grads * slope).sum(-1) / (slope**2).sum(-1)
  sideways = (grads * across).sum(-1)
  mean = np.stack([along.mean(axis=0), sideways.mean(axis=0)])
  se = np.stack([along.std(axis=0, ddof=1), sideways.std(axis=0, ddof=1)])
  se /= math.sqrt(len(grads))
  return mean[0], se[0], (mean[0] - expected) / se[0], mean[1] / se[1]


def check(grads, expected):
  """The test: precise enough, on the enumerated weight, in its direction."""
  measured, se, off, sideways = compare(grads, expected)
  assert (se <= RELATIVE_ERROR * np.abs(measured)).all(), se / measured
  assert (np.abs(off) <= SIGMAS).all(), (measured, expected, off)
  assert (np.abs(sideways) <= SIGMAS).all(), sideways


# ------------------------------------------------------------------------ tests


def test_the_enumeration_is_a_distribution_that_spends_the_budget():
  for name in SCHEDULES:
    assert sum(outcomes(name).values()) == pytest.approx(1, abs=1e-12)
    for paths in outcomes(name):
      assert sum(m for path in paths for m, _ in path) == BUDGET


def test_enumerated_weights_of_uniform_are_the_closed_forms():
  ones = np.ones(PROMPTS) / PROMPTS
  w = functools.partial(enumerated, "uniform")
  np.testing.assert_allclose(w("rloo", "prompt_mean"), ones)
  np.testing.assert_allclose(w("dr_grpo", "prompt_mean"), 5 / 6 * ones)
  # E sqrt(k (n - k)) / n / (p (1 - p)), up to eps in the denominator.
  expected = [
    sum(q * math.sqrt(k * (6 - k)) / 6 for k, q in enumerate(binomial(6, p)))
    / (p * (1 - p))
    / PROMPTS
    for p in SUCCESS
  ]
  np.testing.assert_allclose(w("grpo", "prompt_mean"), expected, rtol=1e-5)


def test_enumerated_predictable_weights_are_the_expected_group_sizes():
  sizes = np.zeros(PROMPTS)
  for paths, probability in outcomes("vigor").items():
    sizes += [probability * sum(m for m, _ in path) for path in paths]
  assert sizes.sum() == pytest.approx(BUDGET)
  weights = enumerated("vigor", "predictable", "rollout_mean")
  np.testing.assert_allclose(weights, sizes / BUDGET, rtol=1e-12)
  # Dividing by the realised group size instead is not unbiased.
  mean = enumerated("vigor", "predictable", "prompt_mean")
  assert (np.abs(mean * PROMPTS - 1) > 0.05).any()


def test_vigors_weights_depend_on_the_aggregator():
  per_prompt = enumerated("vigor", "grpo", "prompt_mean")
  uniform = enumerated("uniform", "grpo", "prompt_mean")
  assert (per_prompt < 0.8 * uniform).all()
  per_rollout = enumerated("vigor", "grpo", "rollout_mean")
  ratio = per_rollout / per_prompt
  # The sum form favours prompts that are kept: p near 1/2.
  assert ratio[1:3].min() > 1.1 * max(ratio[0], ratio[3])


@pytest.mark.parametrize("aggregator", aggregators.AGGREGATORS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_losses_gradient_has_the_enumerated_weight(
  name, method, aggregator
):
  check(
    gradients(name, method, aggregator), enumerated(name, method, aggregator)
  )


@pytest.mark.parametrize("aggregator", ["prompt_mean", "rollout_mean"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_denominators_over_informative_rollouts(name, aggregator):
  check(
    gradients(name, "grpo", aggregator, "informative"),
    enumerated(name, "grpo", aggregator, "informative"),
  )


# VIGOR's defaults, 256 prompts with p ~ Beta(1/2, 1/2): w of grpo with
# prompt_mean under VIGOR and under n = 8, of r - mean summed over rollouts / B,
# and the mean group size. A simulation made apart from this package.
BINS = (
  (0.10, 0.20, 1.15, 2.23, 0.68, 6.1),
  (0.20, 0.35, 1.18, 2.01, 1.18, 10.5),
  (0.35, 0.50, 1.23, 1.87, 1.77, 15.6),
  (0.65, 0.80, 1.19, 2.00, 1.20, 10.6),
)


def test_published_schedule_at_full_size():
  prompts, budget, steps = 256, 2048, 160
  rng = np.random.default_rng(11)
  p = rng.beta(0.5, 0.5, (steps, prompts))
  sums, zero = {}, {}
  for name in ("vigor", "uniform"):
    rule = allocation.make(
      name, prompts_per_step=prompts, budget=budget, seed=1, train_on="all"
    )
    group, reward = [], []
    for step in range(steps):
      positions = np.arange(prompts) + step * prompts
      groups = rule.begin(Stream(positions, positions), step)
      for request in rule.rounds(groups):
        x = np.repeat(np.arange(prompts), request.counts)
        values = (rng.random(len(x)) < p[step, x]).astype(float)
        groups.add(x, values)
        group.append(x + step * prompts)
        reward.append(values)
    group, reward = np.concatenate(group), np.concatenate(reward)
    chance = p.ravel()[group]
    score = reward / chance - (1 - reward) / (1 - chance)
    size = np.bincount(group)
    for method, factor in (("grpo", 1 / size[group]), ("dr_grpo", 1 / 8)):
      advantage = advantages.compute(method, reward, group)
      sums[name, method] = np.bincount(group, advantage * factor * score)
    silent = ~advantages.informative(reward, group)
    shares = np.bincount(group, silent) / size
    zero[name] = (shares.mean(), silent.mean())
    sums[name, "size"] = size
  for low, high, vigor, uniform, summed, size in BINS:
    inside = (p.ravel() >= low) & (p.ravel() < high)
    mean = {k: v[inside].mean() for k, v in sums.items()}
    assert mean["vigor", "grpo"] == pytest.approx(vigor, rel=0.07)
    assert mean["uniform", "grpo"] == pytest.approx(uniform, rel=0.07)
    assert mean["vigor", "dr_grpo"] == pytest.approx(summed, rel=0.07)
    assert mean["vigor", "size"] == pytest.approx(size, rel=0.05)
  # Zero-variance groups, and rollouts in them: VIGOR has more of the first
  # and fewer of the second.
  np.testing.assert_allclose(zero["vigor"], (0.65, 0.24), atol=0.01)
  np.testing.assert_allclose(zero["uniform"], (0.39, 0.39), atol=0.01)


def adjacent_groups(size, length, prompts, rollouts, tokens, limit):
  """Wrong on purpose: as if every prompt had the same number of rollouts."""
  return np.full_like(length, prompts / rollouts), prompts


def off_by_one(size, length, prompts, rollouts, tokens, limit):
  """Wrong on purpose: n + 1 for n."""
  return 1 / ((size + 1) * length), prompts


@pytest.mark.parametrize("wrong", [adjacent_groups, off_by_one])
def test_a_wrong_aggregator_fails(monkeypatch, wrong):
  expected = enumerated("vigor", "grpo", "prompt_mean")
  check(gradients("vigor", "grpo", "prompt_mean"), expected)
  monkeypatch.setitem(aggregators.AGGREGATORS, "prompt_mean", wrong)
  grads = gradients("vigor", "grpo", "prompt_mean")
  assert (np.abs(compare(grads, expected)[2]) > 2 * SIGMAS).any()
  with pytest.raises(AssertionError):
    check(grads, expected)


def test_another_ddof_fails():
  expected = enumerated("vigor", "grpo", "prompt_mean")
  grads = gradients("vigor", "grpo", "prompt_mean", ddof=1)
  with pytest.raises(AssertionError):
    check(grads, expected)


def test_ties_by_index_fail():
  # The tie rule is part of the weight: random ties are what is enumerated.
  expected = enumerated("vigor", "rloo", "rollout_mean")
  run = simulate("vigor", 4_000, ties="index")
  grads = gradients("vigor", "rloo", "rollout_mean", run=run)
  off = compare(grads, expected)[2]
  assert off[0] > 2 * SIGMAS and off[3] < -2 * SIGMAS
