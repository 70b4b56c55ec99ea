"""JetStream's gRPC service, which refuses what its threads cannot take.

An exception in one of JetStream's threads ends the process, over-long prompts
lose their beginning, and text is put together token by token. So requests are
checked, tokenised and turned into text here; JetStream sees token ids only.
"""

from __future__ import annotations

import asyncio
from concurrent import futures
import contextlib
import dataclasses
import signal
from typing import Any, Callable

import grpc
from jetstream.core.proto import jetstream_pb2
from jetstream.core.proto import jetstream_pb2_grpc

from vigor_jax.serving import driver as driver_lib
from vigor_jax.serving import text as text_lib
from vigor_jax.tasks import templates

# Seconds that requests have to end once the server is asked to stop.
GRACE = 10.0
_Stream = jetstream_pb2.DecodeResponse.StreamContent


@dataclasses.dataclass(frozen=True)
class Rules:
  """What a request may hold, and how its text is read.

  Attributes:
    vocabulary: text to ids and back.
    max_prompt: tokens of a prompt at most.
    max_new_tokens: of a completion at most; also what max_tokens = 0 means.
    template: a name in tasks.templates.TEMPLATES that text prompts are put
      into; "raw" leaves them as they are.
    stop_strings: texts that end a completion, beside the stop ids.
    vocab: ids that the model knows.
  """

  vocabulary: Any
  max_prompt: int
  max_new_tokens: int
  vocab: int
  template: str = "raw"
  stop_strings: tuple[str, ...] = ()

  def check(self, request) -> tuple[list[int], int]:
    """(prompt ids, longest completion) of a DecodeRequest.

    Raises:
      ValueError: with the reason why it is refused.
    """
    if request.session_cache:
      raise ValueError("session_cache is not supported; send the whole prompt")
    limit = request.max_tokens or self.max_new_tokens
    if not 1 <= limit <= self.max_new_tokens:
      raise ValueError(
          f"max_tokens={request.max_tokens}: this server allows 1 to "
          f"{self.max_new_tokens}, or 0 for the most")
    kind = request.WhichOneof("content")
    if kind == "text_content":
      text = templates.render(self.template, request.text_content.text,
                              self.vocabulary)
      ids = list(self.vocabulary.encode(text))
    elif kind == "token_content":
      ids = list(request.token_content.token_ids)
    else:
      raise ValueError("the request has neither text_content nor token_content")
    if not 1 <= len(ids) <= self.max_prompt:
      raise ValueError(f"the prompt has {len(ids)} tokens; this server allows "
                       f"1 to {self.max_prompt}")
    wrong = [i for i in ids if not 0 <= i < self.vocab]
    if wrong:
      raise ValueError(f"token id {wrong[0]} is outside the vocabulary of "
                       f"{self.vocab}")
    return ids, limit


class Servicer(driver_lib.orchestrator.LLMOrchestrator):
  """Answers Decode and HealthCheck.

  Attributes:
    answered, refused, cancelled: requests so far.
  """

  def __init__(self, driver: driver_lib.Driver, rules: Rules):
    super().__init__(driver)
    self._rules = rules
    self.answered = self.refused = self.cancelled = 0

  async def Decode(self, request, context=None):
    """Streams a completion: token ids and, for a prompt of text, its text."""
    try:
      ids, limit = self._rules.check(request)
    except ValueError as error:
      self.refused += 1
      await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
      return
    inner = jetstream_pb2.DecodeRequest(
        max_tokens=limit, priority=request.priority,
        token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=ids))
    is_text = request.WhichOneof("content") == "text_content"
    text = text_lib.StreamedText(self._rules.vocabulary,
                                 self._rules.stop_strings)
    ended = False
    try:
      async with contextlib.aclosing(super().Decode(inner, context)) as stream:
        async for response in stream:
          drawn = response.stream_content.samples[0].token_ids
          kept, piece = text.push(drawn)
          if kept or piece:
            yield _response(kept, piece if is_text else "")
          if text.stopped:
            break
      piece = text.flush()
      if piece and is_text:
        yield _response([], piece)
      ended = True
      self.answered += 1
    except futures.CancelledError:
      return  # The client is gone.
    except grpc.aio.AbortError:
      ended = True
      self.refused += 1
      raise
    finally:
      self.cancelled += not ended


def _response(ids, text: str):
  return jetstream_pb2.DecodeResponse(stream_content=_Stream(samples=[
      _Stream.Sample(text=text, token_ids=ids)]))


async def _refuse(context, code, details: str) -> None:
  if context is None:
    raise ValueError(details)
  await context.abort(code, details)


async def run(servicer: Servicer, driver: driver_lib.Driver, *, host: str,
              port: int, ready: Callable[[int], None]) -> None:
  """Serves until SIGINT or SIGTERM; requests then have `GRACE` to end.

  Args:
    servicer, driver: what is served.
    host, port: where; port 0 takes a free one.
    ready: called with the port once requests are taken.

  Raises:
    ValueError: the port cannot be used.
  """
  loop, stop = asyncio.get_running_loop(), asyncio.Event()
  for signum in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(signum, stop.set)
  # Two servers must not share a port: each would get half of the requests.
  server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
  jetstream_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
  try:
    try:
      bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
      raise ValueError(f"--port={port}: {host}:{port} cannot be used "
                       "(another server?)") from error
    await server.start()
    ready(bound)
    await stop.wait()
    await server.stop(GRACE)
  finally:
    # Its threads post to this loop, so they end before it does.
    await loop.run_in_executor(None, driver.stop)
