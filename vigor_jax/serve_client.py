"""Asks a server of `vigor_jax.serve` for completions.

    python -m vigor_jax.serve_client --prompt="3*4+5....=" \\
        [--server=127.0.0.1:9000]

Without --prompt every line of the standard input is one; empty lines are left
out. Several prompts are asked at once and printed in order; a single one is
printed while it is drawn. `complete` is the same for programs.
"""

from __future__ import annotations

import argparse
from concurrent import futures
import sys
from typing import Iterator, Sequence

import grpc
from jetstream.core.proto import jetstream_pb2
from jetstream.core.proto import jetstream_pb2_grpc

from vigor_jax import endings

_Request = jetstream_pb2.DecodeRequest


class Client:
  """A connection; safe to use from several threads.

  Args:
    server: "host:port".
    timeout: seconds that one completion may take.
  """

  def __init__(self, server: str, timeout: float = 600.0):
    self._channel = grpc.insecure_channel(server)
    self._stub = jetstream_pb2_grpc.OrchestratorStub(self._channel)
    self._timeout = timeout

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *unused) -> None:
    self._channel.close()

  def stream(self, prompt: str | Sequence[int], max_tokens: int = 0
             ) -> Iterator[tuple[str, list[int]]]:
    """(text, token ids) of a completion, piece by piece.

    Args:
      prompt: text, or token ids; ids are answered by ids alone.
      max_tokens: longest completion; 0: the server's limit.

    Raises:
      grpc.RpcError: refused (INVALID_ARGUMENT, with the reason), too busy
        (RESOURCE_EXHAUSTED), not there (UNAVAILABLE), too slow
        (DEADLINE_EXCEEDED).
    """
    request = _Request(max_tokens=max_tokens)
    if isinstance(prompt, str):
      request.text_content.CopyFrom(_Request.TextContent(text=prompt))
    else:
      request.token_content.CopyFrom(_Request.TokenContent(token_ids=prompt))
    call = self._stub.Decode(request, timeout=self._timeout)
    try:
      for response in call:
        for sample in response.stream_content.samples:
          yield sample.text, list(sample.token_ids)
    finally:
      call.cancel()  # Its slot is free again, also when we stop early.

  def complete(self, prompt: str | Sequence[int], max_tokens: int = 0
               ) -> tuple[str, list[int]]:
    """(text, token ids) of a whole completion; see `stream`."""
    text, ids = "", []
    for piece, tokens in self.stream(prompt, max_tokens):
      text += piece
      ids += tokens
    return text, ids

  def is_live(self) -> bool:
    """Whether the server answers."""
    try:
      return self._stub.HealthCheck(jetstream_pb2.HealthCheckRequest(),
                                    timeout=self._timeout).is_live
    except grpc.RpcError:
      return False


def main(argv) -> None:
  parser = argparse.ArgumentParser(
      prog="vigor_jax.serve_client", description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--server", default="127.0.0.1:9000",
                      help="default: 127.0.0.1:9000")
  parser.add_argument("--prompt", action="append",
                      help="may be given several times")
  parser.add_argument("--max_tokens", type=int, default=0,
                      help="of each completion; default: the server's limit")
  parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
  args = parser.parse_args(argv[1:])
  with endings.one_message():
    _ask(args.prompt or _read_prompts(), args)


def _read_prompts() -> list[str]:
  """The lines of the standard input that are not empty.

  Raises:
    ValueError: there is none.
  """
  if sys.stdin.isatty():
    print("prompts, one a line; Ctrl-D ends them:", file=sys.stderr)
  lines = [line.rstrip("\r\n") for line in sys.stdin]
  prompts = [line for line in lines if line.strip()]
  if not prompts:
    raise ValueError("no prompt: the standard input has none; write one a "
                     "line, or give --prompt=TEXT")
  return prompts


def _ask(prompts: Sequence[str], args: argparse.Namespace) -> None:
  """Prints the completions and exits, with 1 if a prompt was refused."""
  failed = False
  with Client(args.server, args.timeout) as client:
    if len(prompts) == 1:
      failed = not _print_streamed(client, prompts[0], args.max_tokens)
    else:
      with futures.ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(client.complete, p, args.max_tokens)
                 for p in prompts]
        for prompt, answer in zip(prompts, asked):
          try:
            print(f"{prompt}{answer.result()[0]}", flush=True)
          except grpc.RpcError as error:
            failed = True
            _print_error(error, f"{prompt!r}: ")
  sys.exit(1 if failed else 0)


def _print_streamed(client: Client, prompt: str, max_tokens: int) -> bool:
  try:
    for piece, _ in client.stream(prompt, max_tokens):
      print(piece, end="", flush=True)
    print()
    return True
  except grpc.RpcError as error:
    _print_error(error)
    return False


def _print_error(error, what: str = "") -> None:
  print(f"error: {what}{error.code().name}: {error.details()}",
        file=sys.stderr, flush=True)


if __name__ == "__main__":
  main(sys.argv)
