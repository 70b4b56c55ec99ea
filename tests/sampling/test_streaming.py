"""Streaming: decisions in logical time, whatever the verdicts' delays."""

import dataclasses
import time

import numpy as np
import pytest

from vigor_jax import allocation, experiment, measure, rollouts
from vigor_jax.config import default_config, validate
from vigor_jax.sampling import sampler as sampler_lib

BUDGET, PROMPTS = 64, 8


class LateScorer:
  """Verdict 1 for a completion of odd length, after a random delay."""

  def __init__(self, delay, seed):
    self.delay, self.rng = delay, np.random.default_rng(seed)

  def submit(self, completions, answers, metadata):
    ready = time.perf_counter() + self.rng.random() * self.delay
    return ready, [float(len(text) % 2) for text in completions]

  def collect(self, handle):
    ready, verdicts = handle
    time.sleep(max(0.0, ready - time.perf_counter()))
    return np.array(verdicts, np.float32)


def build(name):
  config = default_config("arithmetic")
  config.allocation.name = name
  config.prompts_per_step, config.rollout_budget = PROMPTS, BUDGET
  config.sampling.slots, config.sampling.chunk = 4, 3
  config.sampling.max_new_tokens, config.sampling.prompt_buckets = 9, (16,)
  return experiment.build(validate(config))


@pytest.fixture(scope="module")
def base():
  parts = build("uniform")
  params = parts.fresh_params(0)
  params.embed[...] = params.embed[...] * 4  # Far from uniform.
  yield parts, params
  parts.scorer.close()


def collector(base, name, *, lag=1, delay=0.0, seed=0, **changes):
  """A collector of the module's policy under another rule and sampler."""
  parts, _ = base
  config = parts.config.copy_and_resolve_references()
  config.sampling.lag = lag
  allocator = allocation.make(
    name,
    {},
    prompts_per_step=PROMPTS,
    budget=BUDGET,
    seed=3,
    train_on="all",
  )
  settings = dataclasses.replace(
    parts.sampler.settings, prefixes=64, queue=BUDGET, **changes
  )
  sampler = sampler_lib.Sampler(
    parts.graph,
    parts.sizes,
    settings,
    stop_ids=parts.task.stop_ids + (4, 9),
    seed=3,
  )
  return rollouts.Collector(
    dataclasses.replace(
      parts,
      config=config,
      allocator=allocator,
      sampler=sampler,
      scorer=LateScorer(delay, seed),
      stream=parts.task.stream(0),
    )
  )


def collect(collector, params, step=0):
  out = collector.collect(params, step, measure.PhaseTimer())
  order = out.buffer.order()
  return out, [
    getattr(out.buffer, name)[order].tolist()
    for name in ("group", "sample", "lengths", "tokens", "reward")
  ]


STREAMING = [
  n for n, a in sorted(allocation.REGISTRY.items()) if a.streaming
]


@pytest.mark.parametrize("name", STREAMING)
def test_delays_of_verdicts_change_nothing(base, name):
  _, params = base
  out, prompt = collect(collector(base, name), params)
  _, late = collect(collector(base, name, delay=0.02, seed=1), params)
  slow, later = collect(collector(base, name, delay=0.02, seed=2), params)
  assert prompt == late == later
  assert out.buffer.size == BUDGET
  assert slow.wait > 0.01
  assert slow.metrics()["time/wait"] == slow.wait
  # One prefill for every prompt opened.
  assert out.prefilled == out.groups.opened.sum()


def test_a_rule_works_ahead_once_a_round_while_the_device_decodes(base):
  _, params = base
  it, order, fetched = collector(base, "vigor"), [], []
  it._parts.stream.prefetch = lambda: fetched.append(len(order))
  sampler, rule = it._parts.sampler, it._parts.allocator
  dispatch, read = sampler._dispatch, sampler._collect
  sampler._dispatch = lambda *a: order.append("run") or dispatch(*a)
  sampler._collect = lambda *a: order.append("read") or read(*a)
  rule.meanwhile = lambda groups: order.append(
    int((groups.counts - groups.n).sum())
  )
  out, _ = collect(it, params)
  waiting = [int(c.sum()) for c in out.groups.round_counts]
  assert len(waiting) > 1
  assert order == [x for n in waiting for x in ("run", n, "read")]
  assert fetched == [2]  # once, with the opening


def test_decisions_follow_verdicts(base):
  # With the verdicts' help the budget is not shared out evenly.
  _, params = base
  out, _ = collect(collector(base, STREAMING[0]), params)
  counts = out.groups.counts[out.groups.opened]
  assert counts.min() < counts.max()


def test_a_lag_hides_the_latest_verdicts(base):
  _, params = base
  results = {
    lag: collect(collector(base, STREAMING[0], lag=lag), params)[1]
    for lag in (0, 1, 30)
  }
  assert results[0][:2] != results[30][:2]


def test_rollouts_are_those_of_the_rounds(base):
  # Which ones are drawn differs between rules; each is the same rollout.
  _, params = base
  drawn = {}
  for name in ("uniform", STREAMING[0]):
    _, (group, sample, _, tokens, _) = collect(collector(base, name), params)
    drawn[name] = dict(zip(zip(group, sample), tokens))
  shared = drawn["uniform"].keys() & drawn[STREAMING[0]].keys()
  assert len(shared) > BUDGET // 3
  assert all(drawn["uniform"][k] == drawn[STREAMING[0]][k] for k in shared)


def test_rollouts_waiting_ahead_keep_the_slots_busy(base):
  _, params = base
  busy = {}
  for ahead in (0, 2):
    out, _ = collect(
      collector(base, STREAMING[0], ahead=ahead, chunk=1), params
    )
    busy[ahead] = out.utilisation
  assert busy[2] > busy[0] + 0.02


def test_the_opening_is_prefilled_and_decoded_before_the_rule_is_asked(base):
  _, params = base
  chosen = collector(base, "eb_streaming", prefill_batch=4, few_prompts=2)
  sampler, allocator = chosen._parts.sampler, chosen._parts.allocator
  first = allocator.opening()
  prefilled, asked = [], []
  prefill, grant = sampler.prefill, allocator.grant

  def counted_prefill(params, rows, tokens):
    prefilled.append(len(rows))
    prefill(params, rows, tokens)

  def counted_grant(groups, free, idle):
    asked.append((free, int(groups.n.sum())))
    return grant(groups, free, idle)

  sampler.prefill, allocator.grant = counted_prefill, counted_grant
  out, _ = collect(chosen, params)
  assert first == BUDGET // 2 > sampler.settings.slots
  assert asked[0] == (first, 0) and prefilled[0] == first // 2
  # The next question comes when as many wait as have places, with verdicts,
  # not once for every few of the opening's rollouts.
  places = sampler.settings.slots + sampler.settings.waiting
  later = [seen for _, seen in asked[1:]]
  assert min(later) >= first - places
  assert out.buffer.size == BUDGET
  assert sum(prefilled) == out.prefilled == out.groups.opened.sum()


def test_slots_are_busy_until_the_budget_is_granted(base):
  _, params = base
  out, _ = collect(collector(base, "eb_streaming", chunk=1), params)
  # All but what the last rollouts leave: 4 slots, up to 9 tokens.
  tail = 3 * 9
  steps = out.decode_steps * 4
  assert out.utilisation * steps >= steps - tail
