"""Requests through JetStream's orchestrator, in this process."""

import asyncio
import logging
import threading

import grpc
import pytest
from jetstream.core.proto import jetstream_pb2
from serving_helpers import save_run

from vigor_jax import compilation
from vigor_jax.sampling import jetstream_engine
from vigor_jax.serving import driver as driver_lib
from vigor_jax.serving import load
from vigor_jax.serving import servicer as servicer_lib

Request = jetstream_pb2.DecodeRequest
# JetStream's threads post to the loop that a request came from, to the end.
LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return save_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def served(run):
  """(driver, servicer) of three slots; both run in this process."""
  options = load.Options(run.folder, slots=3, chunk=4)
  read = load.policy(options)
  engine = load.engine(options, read)
  params = engine.load_params()
  engine.warm_up(params)
  driver = driver_lib.Driver(engine, params, max_waiting=32)
  yield driver, servicer_lib.Servicer(
    driver, load.rules(options, read, engine.settings)
  )
  driver.stop()
  LOOP.close()


class Context:
  """As much of a gRPC context as the service uses."""

  def __init__(self, gone=False):
    self.code = self.details = None
    self.callbacks, self.gone = [], gone

  def add_done_callback(self, callback):
    self.callbacks.append(callback)
    if self.gone:
      callback(self)

  async def abort(self, code, details):
    self.code, self.details = code, details
    raise grpc.aio.AbortError(details)

  def done(self):
    for callback in self.callbacks:
      callback(self)


def text(prompt, limit=0):
  return Request(
    text_content=Request.TextContent(text=prompt), max_tokens=limit
  )


def tokens(ids, limit=0, **more):
  return Request(
    token_content=Request.TokenContent(token_ids=ids), max_tokens=limit, **more
  )


async def ask(servicer, request, gone=False):
  """(text, ids, refusal or None); the client may be gone at once."""
  context, shown, ids = Context(gone), "", []
  try:
    async for response in servicer.Decode(request, context):
      for sample in response.stream_content.samples:
        shown += sample.text
        ids += sample.token_ids
  except grpc.aio.AbortError:
    return shown, ids, (context.code, context.details)
  context.done()
  return shown, ids, None


def test_answers_equal_the_samplers_and_nothing_compiles(run, served):
  _, servicer = served
  prompts = [f"{a}*{b}+{a}=" * n for a in range(1, 5) for b, n in
             ((1, 1), (2, 3), (3, 5))]  # fmt: skip
  limits = [1 + 5 * i % 32 for i in range(len(prompts))]
  ids = [run.vocabulary.encode(p) for p in prompts]
  expected = run.answers(ids, limits)
  assert len({len(a) for a in expected}) > 3
  before = compilation.count()

  async def all_of_them():
    return await asyncio.gather(*[
      ask(servicer, text(p, n) if i % 2 else tokens(ids[i], n))
      for i, (p, n) in enumerate(zip(prompts, limits))
    ])  # fmt: skip

  for i, (shown, drawn, refused) in enumerate(LOOP.run_until_complete(all_of_them())):
    assert refused is None and drawn == expected[i], i
    assert shown == (run.vocabulary.decode(drawn) if i % 2 else "")
  assert compilation.count() == before


@pytest.mark.parametrize(
  "request_, words",
  [
    (text("1+1=", 33), "max_tokens=33: this server allows 1 to 32"),
    (text("1+1=", -1), "max_tokens=-1"),
    (text("1" * 41), "the prompt has 41 tokens; this server allows 1 to 40"),
    (tokens([2] * 5000), "the prompt has 5000 tokens"),
    (text(""), "the prompt has 0 tokens"),
    (text("what?"), "'what?' starts with none of the vocabulary's pieces"),
    (tokens([2, 999]), "token id 999 is outside the vocabulary"),
    (tokens([-1]), "token id -1"),
    (tokens([2], session_cache="x"), "session_cache"),
    (Request(max_tokens=3), "neither text_content nor token_content"),
  ],
)
def test_refusals_say_why(served, request_, words):
  driver, servicer = served
  _, ids, refused = LOOP.run_until_complete(ask(servicer, request_))
  assert refused[0] == grpc.StatusCode.INVALID_ARGUMENT and ids == []
  assert words in refused[1]
  assert driver.live


def test_a_cancelled_request_frees_its_slot(run, served):
  driver, servicer = served
  prompt = run.vocabulary.encode("1+2=")
  whole = run.answers([prompt], [32])[0]

  before = servicer.cancelled
  for _ in range(5):
    _, ids, _ = LOOP.run_until_complete(
      ask(servicer, tokens(prompt), gone=True)
    )
    assert ids == []
  assert servicer.cancelled == before + 5

  # All slots are free again: three requests run side by side.
  async def three():
    return await asyncio.gather(*[
      ask(servicer, tokens(prompt)) for _ in range(3)])  # fmt: skip

  assert [ids for _, ids, _ in LOOP.run_until_complete(three())] == [whole] * 3


def test_a_request_counts_as_complete_once_its_client_is_gone():
  async def check():
    channel = driver_lib.orchestrator.async_multifuture.AsyncMultifuture()
    request = driver_lib._Request(max_tokens=7, return_channel=channel)
    assert request.prefill_result is None
    request.prefill_result = jetstream_engine.Prefix((), 0, 99)
    assert request.max_tokens == request.prefill_result.limit == 7
    channel.cancel()
    assert request.max_tokens == request.prefill_result.limit == 0

  LOOP.run_until_complete(check())


def test_too_many_that_wait_are_told_so(run, served, monkeypatch):
  driver, servicer = served
  monkeypatch.setattr(driver, "_max_waiting", 0)
  _, _, refused = LOOP.run_until_complete(ask(servicer, tokens([2, 3])))
  assert refused[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
  assert "retry" in refused[1]


def test_slots_freed_while_the_generator_looks_stay_hidden():
  free = driver_lib._FreeSlots(2)
  free.put(0)
  assert free.qsize() == 1
  thread = threading.Thread(target=free.put, args=(1,), name="detokenize-0")
  thread.start()
  thread.join()
  assert free.qsize() == 1
  free.release()
  assert free.qsize() == 2


def test_logging_is_as_it_was():
  assert logging.getLogger().level > logging.DEBUG
  orchestrator = driver_lib.orchestrator
  assert orchestrator.handler not in logging.getLogger().handlers
