"""A stream, and a driver that plays simulated rewards through an allocator."""

import types

import numpy as np

from vigor_jax import allocation


class Stream:
  """Endless fresh prompts; prompts that were not consumed come again.

  Args:
    data_set: prompts in a finite set; None: fresh ones.
    look: uids -> float [k, D], what prompts look like; None: nothing.
  """

  def __init__(self, data_set=None, look=None):
    self.data_set = data_set
    self.look = look
    self.queue = []
    self.next = 0

  def peek(self, k):
    while len(self.queue) < k:
      self.queue.append(self.next)
      self.next += 1
    positions = np.array(self.queue[:k], np.int64)
    uids = positions if self.data_set is None else positions % self.data_set
    prompts = types.SimpleNamespace(positions=positions, uids=uids)
    if self.look is not None:
      prompts.features = self.look(uids)
    return prompts

  def advance(self, consumed):
    head = self.queue[: len(consumed)]
    back = [p for p, used in zip(head, consumed) if not used]
    self.queue = back + self.queue[len(consumed) :]


def uniform_of(*address):
  """Uniform [0, 1) numbers of integer addresses (splitmix64), broadcast."""
  z = np.uint64(0)
  with np.errstate(over="ignore"):
    for part in address:
      z = z + np.asarray(part, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
      z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
      z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
      z = z ^ (z >> np.uint64(31))
  return (z >> np.uint64(11)) * 2.0**-53


def bernoulli(p):
  """0/1 reward of (group, sample), addressed by (step, uid, sample)."""

  def reward(groups, group, sample):
    probability = p(groups.uids) if callable(p) else np.asarray(p)
    draws = uniform_of(groups.step, groups.uids[group], sample)
    return (draws < probability[group]).astype(float)

  return reward


def play(allocator, groups, reward, shuffle=None, pieces=1, meanwhile=False):
  """Runs every round; returns (group, sample, reward) of all rollouts."""
  log = []
  for request in allocator.rounds(groups):
    if meanwhile:
      allocator.meanwhile(groups)
    group = np.repeat(np.arange(len(groups)), request.counts)
    before = groups.counts - request.counts
    first = np.cumsum(request.counts) - request.counts
    sample = np.arange(len(group)) - first[group] + before[group]
    rewards = reward(groups, group, sample)
    order = np.arange(len(group))
    if shuffle is not None:
      shuffle.shuffle(order)
    for part in np.array_split(order, pieces):
      groups.add(group[part], rewards[part])
    log.append((group, sample, rewards))
  return [np.concatenate(x) for x in zip(*log)]


def make(name, options=None, *, prompts=32, budget=256, seed=0, **kwargs):
  return allocation.make(
    name,
    options,
    prompts_per_step=prompts,
    budget=budget,
    seed=seed,
    **kwargs,
  )


def run_step(allocator, stream, reward, step=0, **kwargs):
  """One whole step on a stream; returns its groups."""
  groups = allocator.begin(stream, step)
  play(allocator, groups, reward, **kwargs)
  allocator.end(groups)
  stream.advance(groups.taken)
  return groups


def stream_step(
  allocator, groups, reward, *, slots, lengths, lag=1, shuffle=None
):
  """Plays a streaming rule on `slots` decode slots, chunk by chunk.

  Args:
    lengths: chunks of (group, sample).
    lag: chunks between a row's end and its verdict being visible.
    shuffle: generator that permutes verdicts of one chunk.

  Returns:
    (chunks, busy slot-chunks, chunks in which a slot idled although budget
    was left).
  """
  clock = busy = waits = 0
  rows = []  # (end, group, sample) of rows in flight
  verdicts = []  # (visible from, group, sample)
  started = np.zeros(len(groups), int)
  while True:
    due = [v for v in verdicts if v[0] <= clock]
    verdicts = [v for v in verdicts if v[0] > clock]
    if due:
      if shuffle is not None:
        shuffle.shuffle(due)
      group = np.array([v[1] for v in due])
      sample = np.array([v[2] for v in due])
      groups.add(group, reward(groups, group, sample))
    while free := slots - len(rows):
      request = allocator.grant(groups, free, free)
      if request is None:
        break
      assert 0 < request.total <= free
      for g in np.flatnonzero(request.counts):
        for _ in range(request.counts[g]):
          sample = int(started[g])
          rows.append((clock + lengths(groups, g, sample), g, sample))
          started[g] += 1
    if not rows and not verdicts:
      return clock, busy, waits
    busy += len(rows)
    waits += len(rows) < slots and groups.spent < allocator.budget
    clock += 1
    ended = [r for r in rows if r[0] <= clock]
    rows = [r for r in rows if r[0] > clock]
    verdicts += [(clock + lag, g, s) for _, g, s in ended]
