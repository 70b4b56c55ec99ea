"""The sampler as a JetStream engine, driven the way its orchestrator does."""

import dataclasses

import numpy as np
import pytest
from jetstream.engine import token_utils
from sampling_helpers import SIZES, draw, make, model, prompts, settings

from vigor_jax import compilation
from vigor_jax.sampling import jetstream_engine
from vigor_jax.sampling.jetstream_engine import Engine

# An untied output matrix: tied random weights mostly repeat a token.
UNTIED = dataclasses.replace(SIZES, tied=False)
# Rollouts of the model end in one of them, or at the limit of 9: they have
# 8, 9, 0, 3, 9 and 4 tokens before it.
STOPS = (3, 5, 18)


class Letters:
  """A vocabulary: id 2 is "a"."""

  def encode(self, text):
    return [ord(c) - 95 for c in text]

  def decode(self, ids):
    return "".join(chr(i + 95) for i in ids)


@pytest.fixture(scope="module")
def policy():
  return model(UNTIED, scale=1.0)


def engine(policy, *, stop_ids=STOPS, sizes=UNTIED, **changes):
  options = {k: changes.pop(k) for k in ("temperature", "seed", "top_k")
             if k in changes}  # fmt: skip
  slots = changes.get("slots", 4)
  changes |= dict(prefill_batch=1, prefixes=slots, queue=slots)
  graph, params = policy
  return Engine(graph, sizes, params, settings(**changes),
                vocabulary=Letters(), stop_ids=stop_ids, **options)  # fmt: skip


class Driver:
  """JetStream's loop in one thread: its padding and its reading of results."""

  def __init__(self, made):
    self.engine, self.params = made, made.load_params()
    self.state = made.init_decode_state()
    self.tokenizer = made.build_tokenizer(made.get_tokenizer())
    self.running, self.answers = {}, {}

  def insert(self, key, tokens, slot, limit=9):
    padded, length = token_utils.pad_tokens(
      tokens, self.tokenizer.bos_id, self.tokenizer.pad_id,
      max_prefill_length=self.engine.max_prefill_length, jax_padding=False,
    )  # fmt: skip
    prefix = self.engine.prefill(
      params=self.params, padded_tokens=padded, true_length=length
    )
    prefix = prefix._replace(limit=limit)
    self.state = self.engine.insert(prefix, self.state, slot=slot)
    self.running[slot] = (key, limit, np.zeros(1, bool))
    self.answers[key] = []

  def generate(self):
    self.state, result = self.engine.generate(self.params, self.state)
    result = result.convert_to_numpy()
    for slot, (key, limit, complete) in list(self.running.items()):
      samples, complete = token_utils.process_result_tokens(
        self.tokenizer, slot, limit, result, complete
      )
      self.answers[key] += samples[0].token_ids
      self.running[slot] = (key, limit, complete)
      if complete.all():
        del self.running[slot]

  def serve(self, waiting):
    """Requests (key, tokens, limit) in order, each when a slot is free."""
    waiting = list(waiting)
    while waiting or self.running:
      free = [s for s in range(self.engine.max_concurrent_decodes)
              if s not in self.running]  # fmt: skip
      # Slots from the last down: JetStream chooses, not the sampler.
      for slot in free[::-1][: len(waiting)]:
        key, tokens, limit = waiting.pop(0)
        self.insert(key, tokens, slot, limit)
      self.generate()
    return self.answers


def expected(policy, sizes=UNTIED, **options):
  """{prompt: greedy tokens without the stop id} of our sampler."""
  graph, params = policy
  requests = [(np.arange(6), np.arange(6), np.zeros(6, int))]
  sampler = make(graph, sizes, stop_ids=STOPS)
  drawn = draw(sampler, params, requests=requests, temperature=0.0, **options)
  return {g: [int(t) for t in row["tokens"] if t not in STOPS]
          for (g, _), row in drawn.items()}  # fmt: skip


def test_answers_equal_the_samplers(policy):
  whole = expected(policy)
  assert [len(whole[i]) for i in range(6)] == [8, 9, 0, 3, 9, 4]
  driver = Driver(engine(policy))
  # Three times over, so that slots are filled again beside running ones.
  requests = [((i, again), text, 9) for again in range(3)
              for i, text in enumerate(prompts())]  # fmt: skip
  answers = driver.serve(requests)
  assert len(answers) == 18
  for (i, _), tokens in answers.items():
    assert tokens == whole[i], i


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    dict(chunk=1),
    dict(chunk=9),  # A completion fits one chunk: no ring.
    dict(slots=1),
    dict(slots=24, prompt_buckets=(8,)),
  ],
)
def test_answers_do_not_depend_on_shapes(policy, changes):
  driver = Driver(engine(policy, **changes))
  answers = driver.serve((i, t, 9) for i, t in enumerate(prompts()))
  assert answers == expected(policy)


@pytest.mark.slow
def test_a_model_that_scans_its_layers():
  sizes = dataclasses.replace(UNTIED, layers=13)
  policy = model(sizes, scale=1.0)
  driver = Driver(engine(policy, sizes=sizes))
  answers = driver.serve((i, t, 9) for i, t in enumerate(prompts()))
  assert answers == expected(policy, sizes)


def test_each_request_has_its_own_limit(policy):
  whole = expected(policy)
  limits = [1, 2, 3, 4, 6, 9]
  requests = [(i, t, n) for i, (t, n) in enumerate(zip(prompts(), limits))]
  answers = Driver(engine(policy)).serve(requests)
  for i, limit in enumerate(limits):
    assert answers[i] == whole[i][:limit]


def test_the_clock_of_the_ring_is_set_back(policy):
  driver = Driver(engine(policy))
  state = driver.state.slots
  # 9 columns: 3 chunks of 3; as if it had been busy for a billion steps.
  late = (jetstream_engine._LATE // 9 + 1) * 9 + 3
  slots = jetstream_engine.state_lib.unpack(state)._replace(
    time=np.int32(late)
  )
  # Another slot runs as well, so that the clock does not start from 0.
  slots = slots._replace(active=slots.active.at[3].set(True),
                         limit=slots.limit.at[3].set(9),
                         began=slots.began.at[3].set(late))  # fmt: skip
  driver.state = driver.state._replace(
    slots=jetstream_engine.state_lib.pack(slots)
  )
  driver.insert(1, prompts()[1], slot=0)
  times = []
  while driver.running:
    driver.generate()
    times.append(int(driver.state.slots.counters[0]))
  assert driver.answers == {1: expected(policy)[1]}
  # Two turns of the ring are kept; the last chunk only ends the request.
  assert times == [24, 27, 30, 30]


def test_random_numbers_are_those_of_the_request(policy):
  text = prompts()[4]
  drawn = []
  for changes in (dict(seed=1), dict(seed=1), dict(seed=2)):
    driver = Driver(engine(policy, temperature=1.0, stop_ids=(99,), **changes))
    drawn.append(driver.serve((i, text, 9) for i in range(6)))
  assert drawn[0] == drawn[1] != drawn[2]
  assert len({tuple(tokens) for tokens in drawn[0].values()}) > 3


def test_nothing_compiles_after_warm_up(policy):
  made = engine(policy, chunk=2)
  made.warm_up(made.load_params())
  before = compilation.count()
  driver = Driver(made)
  for limit in (9, 5):
    driver.serve(((i, limit), t, limit) for i, t in enumerate(prompts()))
  assert compilation.count() == before


def test_what_should_have_been_refused_does_not_raise(policy):
  driver = Driver(engine(policy))
  rng = np.random.default_rng(0)
  odd = [
    rng.integers(2, 23, 9),  # One more than fits.
    rng.integers(2, 23, 40),  # More than JetStream pads to.
    np.array([500, -3]),
    np.array([], int),
  ]
  answers = driver.serve((i, t, 99) for i, t in enumerate(odd))
  # The last 8 tokens are kept.
  last = driver.serve([("last", odd[0][-8:], 9)])["last"]
  assert answers[0] == last
  assert all(len(a) <= 9 for a in answers.values())


def test_what_jetstream_asks_an_engine(policy):
  made = engine(policy)
  assert made.max_concurrent_decodes == 4 and made.samples_per_slot == 1
  assert made.max_prefill_length == 16
  assert engine(policy, prompt_buckets=(15,)).max_prefill_length == 16
  assert engine(policy, prompt_buckets=(16,)).max_prefill_length == 32
  tokenizer = made.build_tokenizer(made.get_tokenizer())
  padded, length = tokenizer.encode(
    "abc", is_bos=True, max_prefill_length=16, jax_padding=False
  )
  assert padded.tolist() == [0, 2, 3, 4] + [0] * 12 and length == 4
  assert tokenizer.decode([2, 3]) == "ab"
  assert tokenizer.stop_tokens == {3, 5, 18}
  with pytest.raises(ValueError, match="at most 32767"):
    engine(policy, prompt_buckets=(32768,))
  with pytest.raises(ValueError, match="stop id"):
    engine(policy, stop_ids=())
