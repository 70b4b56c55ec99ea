"""The server as a process of its own, and its client."""

import io
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import pytest
from jetstream.core.proto import jetstream_pb2
from serving_helpers import save_run, server

from vigor_jax import serve, serve_client
from vigor_jax.serve_client import Client


def said_of(root, *arguments):
  """(exit code, what was printed) of `python -m vigor_jax.serve`."""
  done = subprocess.run(
    [sys.executable, "-m", "vigor_jax.serve", *arguments], cwd=root, text=True,
    capture_output=True, timeout=120,
  )  # fmt: skip
  return done.returncode, done.stdout + done.stderr


def refusal(capsys, *arguments):
  with pytest.raises(SystemExit) as stop:
    serve.main(["serve", *arguments])
  assert stop.value.code == 2
  return capsys.readouterr().err


def test_bad_input_is_named(tmp_path, capsys):
  empty = tmp_path / "empty"
  empty.mkdir()
  for arguments, words in [
    ((f"--checkpoint={tmp_path}/runs",), "runs' does not exist"),
    ((f"--checkpoint={empty}",), "neither a run's folder"),
    ((f"--checkpoint={empty}", "--port=70000"), "--port must lie in"),
    ((f"--checkpoint={empty}", "--slots=-1"), "--slots must be at least 0"),
    ((f"--checkpoint={empty}", "--top_p=2"), "--top_p must lie in (0, 1]"),
    ((f"--checkpoint={empty}", "--template=x"), "--template must be one of"),
    ((f"--checkpoint={empty}", "--max_waiting=0"), "--max_waiting"),
    ((), "--checkpoint"),
  ]:
    assert words in refusal(capsys, *arguments), arguments


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path, capsys):
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    said = refusal(capsys, f"--checkpoint={tmp_path}", f"--port={port}")
  assert f"--port={port}: 127.0.0.1:{port} cannot be used" in said


def test_a_run_without_checkpoints_is_named(tmp_path, capsys):
  run = save_run(tmp_path / "run")
  subprocess.run(["rm", "-r", f"{run.folder}/checkpoints"], check=True)
  said = refusal(capsys, f"--checkpoint={run.folder}", "--port=0")
  assert run.folder in said and "checkpoint" in said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return save_run(tmp_path_factory.mktemp("served") / "run")


def plan(run, count=64, seed=0):
  """(kind, prompt ids or text, limit) of each request, and its answer."""
  rng = random.Random(seed)
  alphabet = run.vocabulary.vocab_size
  requests = []
  for i in range(count):
    kind = ("ids", "text", "too long", "cancelled", "ids", "over limit",
            "text", "ids")[i % 8]  # fmt: skip
    length = rng.randint(1, 40) if kind != "too long" else rng.randint(41, 900)
    ids = [rng.randrange(2, alphabet) for _ in range(length)]
    prompt = ids
    if kind == "text":
      prompt = "".join(rng.choice("0123456789=") for _ in range(length))
      ids = run.vocabulary.encode(prompt)
    limit = 33 if kind == "over limit" else rng.randint(1, 32)
    requests.append((kind, prompt, ids, 32 if kind == "cancelled" else limit))
  legal = [r for r in requests if r[0] in ("ids", "text", "cancelled")]
  answers = iter(run.answers([r[2] for r in legal], [r[3] for r in legal]))
  return [(kind, prompt, limit, next(answers) if kind in
           ("ids", "text", "cancelled") else None)
          for kind, prompt, _, limit in requests]  # fmt: skip


@pytest.mark.slow
def test_64_requests_from_16_clients_on_8_slots(run, root):
  requests = plan(run)
  outcomes = [None] * len(requests)
  with server(root, f"--checkpoint={run.folder}", "--slots=8", "--chunk=4") as (
    process, port, said,
  ):  # fmt: skip
    assert said == (
      "8 slots, prompts of up to 40 tokens, completions of up to 32"
    )
    barrier = threading.Barrier(16)

    def client(number):
      with Client(f"127.0.0.1:{port}", timeout=120) as connection:
        barrier.wait()
        for i in range(number, len(requests), 16):
          kind, prompt, limit, _ = requests[i]
          text, ids = "", []
          try:
            for piece, drawn in connection.stream(prompt, limit):
              text, ids = text + piece, ids + drawn
              if kind == "cancelled":
                break
            outcomes[i] = ("answered", text, ids)
          except grpc.RpcError as error:
            outcomes[i] = (error.code().name, error.details(), ids)

    with futures.ThreadPoolExecutor(16) as pool:
      list(pool.map(client, range(16)))
    for (kind, _, limit, expected), (how, text, ids) in zip(
      requests, outcomes
    ):
      if kind == "too long":
        assert how == "INVALID_ARGUMENT" and "allows 1 to 40" in text
      elif kind == "over limit":
        assert how == "INVALID_ARGUMENT" and "max_tokens=33" in text
      elif kind == "cancelled":
        assert how == "answered" and ids == expected[: len(ids)]
      else:
        assert how == "answered" and ids == expected, (kind, limit)
        assert text == (run.vocabulary.decode(ids) if kind == "text" else "")
    kinds = [r[0] for r in requests]
    ended = [len(r[3]) < r[2] for r in requests if r[3] is not None]
    assert any(ended) and not all(ended), "some end with the stop id"
    # Alive, and as good as before.
    assert process.poll() is None
    with Client(f"127.0.0.1:{port}", timeout=60) as connection:
      assert connection.is_live()
      again = next(r for r in requests if r[0] == "ids")
      assert connection.complete(again[1], again[2])[1] == again[3]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
  assert process.returncode == 0, rest
  refused = kinds.count("too long") + kinds.count("over limit")
  assert f"{refused} refused" in rest
  assert "0 programs compiled while serving" in rest
  assert "Traceback" not in rest and "Generate engine" not in rest, rest


@pytest.mark.slow
def test_requests_that_are_no_requests_leave_it_alive(run, root):
  with server(root, f"--checkpoint={run.folder}", "--slots=2",
              "--max_waiting=4") as (process, port, _):  # fmt: skip
    with Client(f"127.0.0.1:{port}", timeout=60) as client:
      ids = run.vocabulary.encode("1+2=")
      request = jetstream_pb2.DecodeRequest(
        max_tokens=4, session_cache="kept",
        token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=ids))
      with pytest.raises(grpc.RpcError) as error:
        list(client._stub.Decode(request))
      assert "session_cache" in error.value.details()
      for prompt in ("", "no such letters", [999], [-5]):
        with pytest.raises(grpc.RpcError) as error:
          client.complete(prompt)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
      # More at once than may wait: answered, or told to come again.
      codes, together = [], threading.Barrier(40)

      def flood(_):
        together.wait()
        try:
          return client.complete(ids, 32)[1]
        except grpc.RpcError as error:
          codes.append(error.code())

      # Clients that share two cores may come one by one: then again.
      for _ in range(20):
        with futures.ThreadPoolExecutor(40) as pool:
          found = [r for r in pool.map(flood, range(40)) if r is not None]
        if codes:
          break
      whole = run.answers([ids], [32])[0]
      assert found and all(answer == whole for answer in found)
      assert codes and set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
      # All give up at once; the slots are free for the next.
      calls = [client.stream(ids) for _ in range(4)]
      for call in calls:
        next(call)
        call.close()
      assert client.complete(ids)[1] == whole
      assert process.poll() is None
    # The same port is not given to a second server.
    code, said = said_of(root, f"--checkpoint={run.folder}", f"--port={port}")
    assert code == 2 and f"--port={port}" in said


def test_the_client_says_when_it_was_asked_nothing(monkeypatch, capsys):
  monkeypatch.setattr("sys.stdin", io.StringIO("\n  \n"))
  with pytest.raises(SystemExit, match="2"):
    serve_client.main(["serve_client"])
  assert capsys.readouterr().err.startswith("error: no prompt: ")


@pytest.mark.slow
def test_the_client_as_a_command(run, root):
  with server(root, f"--checkpoint={run.folder}/checkpoints/1", "--slots=2",
              "--temperature=1", "--seed=3", "--max_new_tokens=6") as (
                _, port, said):  # fmt: skip
    assert said.endswith("completions of up to 6")

    def ask(*arguments, lines=None):
      return subprocess.run(
        [sys.executable, "-m", "vigor_jax.serve_client",
         f"--server=127.0.0.1:{port}", *arguments], cwd=root, text=True,
        input=lines, capture_output=True, timeout=120)  # fmt: skip

    one = ask("--prompt=1+2=")
    assert one.returncode == 0 and one.stdout.endswith("\n")
    several = ask("--max_tokens=3", lines="\n1+2=\r\n\n3+4=\n")
    assert [line[:4] for line in several.stdout.splitlines()] == ["1+2=", "3+4="]
    bad = ask("--prompt=1+2=", "--max_tokens=7")
    assert bad.returncode == 1
    assert bad.stderr.startswith("error: INVALID_ARGUMENT: max_tokens=7")
  gone = ask("--prompt=1", "--timeout=5")
  assert gone.returncode == 1 and "UNAVAILABLE" in gone.stderr
