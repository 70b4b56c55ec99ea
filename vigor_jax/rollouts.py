"""One step's rollouts: rounds of requests, decoding and verdicts.

Rounds and streaming share everything but who is asked when: a rule with
rounds is asked at a barrier, a streaming rule whenever slots free up.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from typing import Any

import numpy as np

from vigor_jax import allocation
from vigor_jax import experiment as experiment_lib


# Fields of config.sampling that decide the distribution of a rollout.
SAMPLED_AT = ("temperature", "top_k", "top_p", "min_p")


class _Window:
  """A stream whose last peek is kept, so that it is tokenised once."""

  def __init__(self, stream):
    self._stream = stream
    self.num_examples = stream.num_examples
    self.prompts = None
    self.timer = None

  def peek(self, k: int):
    # Drawing and tokenising prompts is work on data, not allocation.
    with self.timer("prefill"):
      self.prompts = self._stream.peek(k)
    return self.prompts


@dataclasses.dataclass
class StepRollouts:
  """A step's groups, their prompts and their rollouts.

  Attributes:
    groups, prompts, buffer: see allocation and tasks.
    utilisation: useful row steps / (slots x decode steps).
    prefilled: prompts run through the model.
    decode_steps: decode steps of all slots.
    wait: seconds spent waiting for verdicts that were late.
    shaped: whether what is trained on differs from the verdicts.
  """

  groups: allocation.Groups
  prompts: Any
  buffer: allocation.RolloutBuffer
  utilisation: float
  prefilled: int
  decode_steps: int
  wait: float
  shaped: bool = False

  @property
  def tokens(self) -> int:
    """Generated tokens, stop tokens included."""
    return int(self.buffer.lengths[: self.buffer.size].sum())

  def metrics(self) -> dict[str, Any]:
    """The step's reward/, groups/, rollouts/, allocation/ and slots/ keys."""
    groups, size = self.groups, self.buffer.size
    lengths = self.buffer.lengths[:size]
    shaped = {}
    if self.shaped:
      shaped["reward/shaped_mean"] = float(
          self.buffer.shaped[:size].mean(dtype=float))
    return {
        "reward/mean": float(self.buffer.reward[:size].mean(dtype=float)),
        **shaped,
        "groups/opened": int(groups.opened.sum()),
        "groups/passed_over": groups.passed_over,
        "groups/mixed": groups.mixed_count(),
        "groups/zero_variance_share": groups.zero_variance_share(),
        "rollouts/zero_variance_share": groups.zero_variance_rollout_share(),
        "rollouts/length": float(lengths.mean(dtype=float)),
        "rollouts/truncated_share": float(
            self.buffer.truncated[:size].mean(dtype=float)),
        "allocation/rounds": [int(c.sum()) for c in groups.round_counts],
        "allocation/largest_group": int(groups.counts.max()),
        "allocation/variance_per_rollout": groups.variance_per_rollout(),
        "slots/utilisation": self.utilisation,
        "slots/decode_steps": self.decode_steps,
        "slots/prefilled": self.prefilled,
        "time/wait": self.wait,
    }

  def samples(self, task, batch, count: int) -> list[dict[str, Any]]:
    """Some of the step's rollouts with reward and advantage.

    Groups with signal come first, then the order of the batch.

    Args:
      task: decodes the completions.
      batch: the step's policy.batch.Batch.
      count: how many at most.
    """
    first = np.argsort(batch.advantages == 0, kind="stable")[:count]
    rows = batch.order[first]
    buffer, prompts = self.buffer, self.prompts
    texts = task.decode(buffer.tokens[rows], buffer.lengths[rows])
    return [
        dict(source="training", prompt=prompts.texts[buffer.group[row]],
             answer=prompts.answers[buffer.group[row]], completion=text,
             reward=float(buffer.reward[row]), advantage=float(advantage))
        for row, text, advantage in zip(rows, texts, batch.advantages[first])]

  def decisions(self) -> dict[str, Any]:
    """What every host of a job must hold alike before an update."""
    order = self.buffer.order()
    return {
        "prompts": self.groups.uids[self.groups.opened],
        "counts": self.groups.counts,
        "tokens": self.buffer.tokens[order],
        "rewards": self.buffer.reward[order],
    }

  def group_record(self) -> dict[str, Any]:
    """The step's line of groups.jsonl: opened groups only."""
    groups = self.groups
    opened = np.flatnonzero(groups.opened)
    metadata = [self.prompts.metadata[i] for i in opened]
    # A task's level may be anything; the report sorts by numbers.
    levels = [m.get("level") for m in metadata]
    if not all(isinstance(x, (int, float)) and math.isfinite(x)
               for x in levels):
      levels = None
    return {
        "n": groups.n[opened].astype(int).tolist(),
        "sum": np.round(groups.reward_sum[opened], 6).tolist(),
        "round_counts": [c[opened].tolist() for c in groups.round_counts],
        "levels": levels,
    }


class Collector:
  """Collects a step's rollouts for one run."""

  def __init__(self, parts: experiment_lib.Experiment):
    self._parts = parts
    sampling = parts.config.sampling
    self._settings = {name: sampling[name] for name in SAMPLED_AT}
    self._window = _Window(parts.stream)
    self._shaping = experiment_lib.shaping_of(parts.config)

  def collect(self, params, step: int, timer) -> StepRollouts:
    """Draws and judges the rollouts of one step.

    Args:
      params: policy parameters.
      step: 0-based training step, part of every rollout's address.
      timer: measure.PhaseTimer.

    Raises:
      ValueError: a prompt does not fit, or a reward is not in [0, 1].
    """
    parts = self._parts
    sampler, allocator = parts.sampler, parts.allocator
    sampler.begin(step)
    self._window.timer = timer
    with timer("allocate"):
      groups = allocator.begin(self._window, step)
      buffer = allocation.RolloutBuffer(
          parts.config.rollout_budget, sampler.settings.max_new_tokens,
          groups)
    self._prompts = self._window.prompts
    if groups.chosen:
      self._prompts = self._prompts.take(groups.rows)
    self._wait = 0.0
    draw = self._stream if allocator.streaming else self._rounds
    draw(params, groups, buffer, timer)
    return StepRollouts(groups, self._prompts, buffer, sampler.utilisation,
                        sampler.prefilled, sampler.decode_steps, self._wait,
                        shaped=self._shaping is not None)

  def look_ahead(self, timer) -> None:
    """Prepares the next step's prompts; see Allocator.look_ahead."""
    self._window.timer = timer
    with timer("allocate"):
      self._parts.allocator.look_ahead(self._window)

  def _rounds(self, params, groups, buffer, timer) -> None:
    rounds = self._parts.allocator.rounds(groups)

    def meanwhile():
      with timer("allocate"):
        self._parts.allocator.meanwhile(groups)
      if len(groups.round_counts) == 1:
        with timer("prefill"):
          self._parts.stream.prefetch()
        with timer("reward"):  # They are made when first asked for.
          _ = self._prompts.answers, self._prompts.metadata

    while True:
      with timer("allocate"):
        request = next(rounds, None)
      if request is None:
        return
      self._enqueue(params, groups, request, timer)
      pending = []
      decoding = self._parts.sampler.decode(params, meanwhile=meanwhile)
      while True:
        with timer("decode"):
          rows = next(decoding, None)
        if rows is None:
          break
        with timer("reward"):
          pending.append(self._submit(rows))
      self._settle(pending, groups, buffer, timer)

  def _stream(self, params, groups, buffer, timer) -> None:
    """The rule is asked whenever a slot frees up, while others decode.

    Decisions happen in logical time: a verdict becomes visible `lag` chunks
    after the chunk in which its rollout ended, or when nothing is left to
    decode, however long it took; one that is late is waited for. So they do
    not depend on when verdicts arrive.
    """
    pending = collections.deque()
    lag = self._parts.config.sampling.lag
    idle = self._parts.sampler.settings.idle
    allocator = self._parts.allocator

    def ask(free: int, chunk: int | None) -> bool:
      while pending and (
          chunk is None or pending[0][0].end_chunk[0] + lag <= chunk):
        self._settle([pending.popleft()], groups, buffer, timer)
      if not groups.spent:
        free = max(free, allocator.opening())
      while free > 0:
        with timer("allocate"):
          request = allocator.grant(groups, free, idle(free))
        if request is None or not request.total:
          break
        self._enqueue(params, groups, request, timer)
        free -= request.total
      return groups.spent < buffer.budget

    decoding = self._parts.sampler.decode(params, ask=ask)
    while True:
      with timer("decode"):
        rows = next(decoding, None)
      if rows is None:
        return
      with timer("reward"):
        # By chunk: each has its own time of becoming visible.
        for chunk in np.unique(rows.end_chunk):
          part = rows.take(rows.end_chunk == chunk)
          pending.append(self._submit(part))

  def _enqueue(self, params, groups, request, timer) -> None:
    sampler = self._parts.sampler
    with timer("prefill"):
      if len(request.opened):
        tokens = self._prompts.tokens
        sampler.prefill(params, request.opened,
                        [tokens[i] for i in request.opened.tolist()])
    with timer("allocate"):
      counts = request.counts
      group = np.repeat(np.arange(len(counts)), counts)
      # Sample indices count on within each group: at its end they reach what
      # the group has been granted.
      shift = groups.counts - np.cumsum(counts)
      sample = np.arange(len(group)) + shift[group]
      positions = groups.positions[group]
    with timer("decode"):
      sampler.request(group, positions, sample, **self._settings)

  def _submit(self, rows):
    """(rows, cut at stop strings; their texts; handle of the verdicts)."""
    rows, texts = self._parts.task.finish(rows)
    answers, metadata = self._prompts.answers, self._prompts.metadata
    group = rows.group.tolist()
    return rows, texts, self._parts.scorer.submit(
        texts, [answers[g] for g in group], [metadata[g] for g in group])

  def _settle(self, pending, groups, buffer, timer) -> None:
    """Waits for verdicts and adds the rows to the buffer."""
    for rows, texts, handle in pending:
      with timer("reward"):
        start = time.perf_counter()
        verdicts = self._parts.scorer.collect(handle)
        self._wait += time.perf_counter() - start
        verdicts = experiment_lib.add_noise(
            self._parts.config, verdicts, groups.positions[rows.group],
            rows.sample)
      with timer("allocate"):
        buffer.add(rows, verdicts)
        if self._shaping is not None:
          new = slice(buffer.size - len(verdicts), buffer.size)
          buffer.shaped[new] = self._shaping.apply(
              verdicts, rows.lengths, rows.truncated,
              self._parts.config.sampling.max_new_tokens, texts)
