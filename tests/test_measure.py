"""Time by phase, and variance per rollout against a policy that is known."""

import types

import numpy as np
import pytest

from vigor_jax import allocation, evaluate, measure
from vigor_jax.config import default_config
from vigor_jax.tasks.stream import Prompts, addressed_rng

# Time.


@pytest.fixture
def clock(monkeypatch):
  """A clock that is turned by hand."""
  now = types.SimpleNamespace(time=100.0)
  monkeypatch.setattr(measure.time, "perf_counter", lambda: now.time)
  return now


def test_phases_and_the_rest(clock):
  timer = measure.PhaseTimer()
  with timer("decode"):
    clock.time += 3
    with timer("allocate"):  # Asked while decoding: counted once.
      clock.time += 1
      with timer("prefill"):
        clock.time += 0.5
    clock.time += 2
  with timer("decode"):
    clock.time += 4
  with timer.excluded():
    clock.time += 50
  clock.time += 0.25
  found = timer.metrics(clock.time - 100)
  assert found == {
    "time/prefill": 0.5,
    "time/decode": 9,
    "time/reward": 0,
    "time/allocate": 1,
    "time/update": 0,
    "time/other": 0.25,
  }


def test_a_phase_that_fails_is_counted(clock):
  timer = measure.PhaseTimer()
  with pytest.raises(KeyError):
    with timer("reward"):
      clock.time += 2
      raise KeyError
  with timer("update"):
    clock.time += 1
  assert timer.seconds["reward"] == 2 and timer.seconds["update"] == 1


# Variance.

SPARSE = ((0.75, 0.97), (0.15, 0.01), (0.1, None))  # None: uniform in [0, 1]


class KnownPolicy:
  """Answers prompt x with success p_x, addressed as the sampler does."""

  def __init__(self, kinds=SPARSE, queue=128, prefixes=16):
    self.settings = types.SimpleNamespace(queue=queue, prefixes=prefixes)
    self._kinds = kinds
    self.streams = set()
    self.drawn = 0

  def p(self, position):
    rng = addressed_rng(1, "policy", int(position))
    shares, values = zip(*self._kinds)
    kind = values[rng.choice(len(shares), p=shares)]
    return rng.random() if kind is None else kind

  def succeeds(self, position, stream, step, sample):
    rng = addressed_rng(2 + stream, "draw", int(position), step * 1000 + sample)
    return float(rng.random() < self.p(position))

  def begin(self, step, stream=0):
    self._step, self._stream, self._queue = step, stream, []
    self.streams.add(stream)

  def prefill(self, params, rows, tokens):
    assert len(rows) == len(tokens) <= self.settings.prefixes

  def request(self, group, positions, samples, **settings):
    self.asked = settings
    assert len(group) <= self.settings.queue
    self._queue = list(zip(group, positions, samples))

  def decode(self, params):
    for part in np.array_split(np.arange(len(self._queue)), 3):
      group, positions, samples = zip(*(self._queue[i] for i in part))
      verdicts = [
        self.succeeds(x, self._stream, self._step, s)
        for x, s in zip(positions, samples)
      ]
      self.drawn += len(part)
      yield types.SimpleNamespace(
        group=np.array(group),
        sample=np.array(samples),
        lengths=np.ones(len(part), np.int32),
        truncated=np.zeros(len(part), bool),
        verdicts=verdicts,
      )


def prompts_at(positions):
  k = len(positions)
  return Prompts(positions, positions, [np.ones(2, np.int32)] * k, ["?"] * k,
                 ["!"] * k, [{}] * k)  # fmt: skip


class Run:
  """Steps of a rule on a known policy."""

  def __init__(self, name="vigor", *, kinds=SPARSE, fresh=16, few=1000,
               graded=False, **options):
    config = default_config("arithmetic")
    config.allocation.name = name
    config.allocation[name].update(options)
    config.evaluation.update(fresh_rollouts=fresh, fresh_prompts=few)
    self.policy = KnownPolicy(kinds)
    self.allocator = allocation.make(
      name, options, prompts_per_step=32, budget=256, seed=0
    )
    self.scale = 0.3 if graded else 1.0
    self.parts = types.SimpleNamespace(
      sampler=self.policy,
      config=config,
      allocator=self.allocator,
      task=types.SimpleNamespace(finish=lambda rows: (rows, rows.verdicts)),
      scorer=types.SimpleNamespace(
        score=lambda texts, answers, metadata: self.scale * np.array(texts)
      ),
    )
    self.meter = measure.VarianceMeter(self.parts)
    self.step = self.head = 0

  def advance(self):
    """One step: (groups, prompts)."""
    positions = self.head + np.arange(self.allocator.max_prompts)
    stream = types.SimpleNamespace(peek=lambda k: prompts_at(positions[:k]))
    groups = self.allocator.begin(stream, self.step)
    for request in self.allocator.rounds(groups):
      group = np.repeat(np.arange(len(groups)), request.counts)
      ends = np.cumsum(request.counts)
      within = np.arange(len(group)) - np.repeat(ends - request.counts,
                                                 request.counts)  # fmt: skip
      sample = within + (groups.counts - request.counts)[group]
      groups.add(group, [
        self.scale * self.policy.succeeds(positions[g], 0, self.step, int(s))
        for g, s in zip(group, sample)
      ])
    self.allocator.end(groups)
    self.step, self.head = self.step + 1, positions[-1] + 1
    return types.SimpleNamespace(groups=groups, prompts=prompts_at(positions))

  def measured(self):
    """(line of the meter, rollouts) of the next step."""
    rollouts = self.advance()
    line = self.meter.measure(None, self.step - 1, rollouts)
    self.meter.add(rollouts.groups)
    return line, rollouts


KEY = "allocation/variance_per_rollout_"


@pytest.mark.parametrize("name, steps", [("vigor", 60), ("uniform", 25)])
def test_measured_agrees_with_predicted(name, steps):
  run = Run(name)
  fresh, errors, predicted, true = [], [], [], []
  for _ in range(steps):
    line, rollouts = run.measured()
    groups = rollouts.groups
    fresh.append(line[KEY + "fresh"])
    errors.append(line[KEY + "fresh_error"])
    predicted.append(line[KEY + "predicted"])
    p = np.array([run.policy.p(x) for x in groups.positions])
    true.append((groups.n * p * (1 - p)).sum() / groups.n.sum())
  pooled, error = np.mean(fresh), np.sqrt(np.sum(np.square(errors))) / steps
  assert error / pooled < 0.06
  # Unbiased: what is measured is what the prompts really carry.
  assert abs(pooled - np.mean(true)) < 4 * error
  # Predictions of the first steps rest on few counts.
  assert np.mean(predicted[10:]) == pytest.approx(np.mean(true), rel=0.1)
  if name == "vigor":
    assert KEY + "pareto" in line
  else:
    assert line[KEY + "pareto"] is None
  assert run.policy.streams == {evaluate.FRESH_STREAM}
  assert run.policy.drawn == steps * 32 * 16


def test_concentrating_raises_the_variance_per_rollout():
  fresh = {}
  for name in ("vigor", "uniform"):
    run = Run(name, fresh=8)
    fresh[name] = np.mean([run.measured()[0][KEY + "fresh"] for _ in range(15)])
  assert fresh["vigor"] > 1.3 * fresh["uniform"]


def test_the_measurement_by_hand():
  # Two kinds of prompts; v is 1/4 for one and 0 for the other.
  run = Run("uniform", kinds=((0.5, 1.0), (0.5, 0.5)), fresh=4)
  rollouts = run.advance()
  line = run.meter.measure(None, 0, rollouts)
  positions = rollouts.groups.positions
  verdicts = np.array([
    [run.policy.succeeds(x, evaluate.FRESH_STREAM, 0, j) for j in range(4)]
    for x in positions
  ])
  v, n = verdicts.var(1, ddof=1), rollouts.groups.n
  expected = (n * v).sum() / n.sum()
  assert line[KEY + "fresh"] == pytest.approx(expected, rel=1e-6)
  error = np.sqrt(np.square(n * (v - expected)).sum()) / n.sum()
  assert line[KEY + "fresh_error"] == pytest.approx(error, rel=1e-6)
  assert 0 < expected < 0.25


def test_fresh_rollouts_come_from_the_distribution_that_is_trained_on():
  at = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
  run = Run("uniform", fresh=4)
  run.meter._parts.config.sampling.update(at)
  run.measured()
  assert run.policy.asked == at


def test_only_some_prompts_may_be_measured():
  run = Run("uniform", few=5, fresh=3)
  line, _ = run.measured()
  assert run.policy.drawn == 15 and line[KEY + "fresh"] >= 0
  again = Run("uniform", few=5, fresh=3)
  assert again.measured()[0] == line


def test_rules_that_open_more_prompts_are_simulated():
  run = Run("eb_widening", fresh=4, few=64)
  for _ in range(3):
    run.meter.add(run.advance().groups)
  line, rollouts = run.measured()
  assert line[KEY + "pareto"] is None
  assert 0.2 * line[KEY + "fresh"] < line[KEY + "predicted"] < 0.25
  # The rule's own history is not touched by predicting.
  other = Run("eb_widening", fresh=4, few=64)
  for _ in range(4):
    other.advance()
  assert run.allocator.state_dict() == other.allocator.state_dict()


@pytest.mark.parametrize("name", allocation.REGISTRY)
def test_every_rule_has_a_prediction(name):
  run = Run(name, fresh=2, few=40)
  line, _ = run.measured()
  assert 0 < line[KEY + "predicted"] < 0.25
  assert name == "vigor" or line[KEY + "pareto"] is None


def test_graded_rewards_have_no_prediction():
  run = Run("vigor", graded=True, fresh=4)
  line, _ = run.measured()
  assert line[KEY + "predicted"] is None and line[KEY + "pareto"] is None
  assert line[KEY + "fresh"] > 0


def test_recent_counts_are_kept_in_the_checkpoint():
  run = Run("uniform", fresh=2)
  for _ in range(12):
    run.meter.add(run.advance().groups)
  state = run.meter.state_dict()
  assert len(state) == 4  # The last steps only: the policy moves.
  assert all(len(n) == len(k) == 32 for n, k in state)
  other = measure.VarianceMeter(run.parts)
  other.load_state_dict(state)
  assert other.state_dict() == state
  rollouts = run.advance()
  assert other.measure(None, 12, rollouts) == run.meter.measure(
    None, 12, rollouts
  )
