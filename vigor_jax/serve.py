"""Serves a policy over JetStream's gRPC, on one device.

    python -m vigor_jax.serve --checkpoint=runs/arithmetic [--port=9000]

--checkpoint is a run's folder or one of its steps, a Hugging Face folder or a
.gguf file. `python -m vigor_jax.serve_client` is a client; docs/serving.md
describes the protocol. Ctrl-C stops: requests have ten seconds to end.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import os
import socket
import sys

from vigor_jax import endings


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
      prog="vigor_jax.serve", description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--checkpoint", required=True, help="what is served")
  add("--host", default="127.0.0.1",
      help="address to listen on; 0.0.0.0: all (there is no encryption and no "
      "authentication). Default: 127.0.0.1")
  add("--port", type=int, default=9000, help="default: 9000; 0: a free one")
  add("--slots", type=int, default=0,
      help="requests decoded at once; default: as many as memory holds, 64 at "
      "most")
  add("--max_waiting", type=int, default=1024,
      help="requests that may wait for a slot; default: 1024")
  add("--max_prompt", type=int, default=0,
      help="tokens of a prompt at most; default: the run's, or 1024")
  add("--max_new_tokens", type=int, default=0,
      help="tokens of a completion at most; default: the run's, or 512")
  add("--chunk", type=int, default=8,
      help="tokens of a request drawn, and sent, at once; default: 8")
  add("--dtype", default="", choices=("float32", "bfloat16"),
      help="of the computation; default: the run's, else bfloat16, on a CPU "
      "float32")
  add("--template", default="raw",
      help="what text prompts are put into (docs/tasks.md), such as chat; "
      "default: raw, as they are sent")
  add("--temperature", type=float, default=0.0,
      help="of all requests; default: 0, the likeliest token")
  add("--top_k", type=int, default=0, help="0: off")
  add("--top_p", type=float, default=1.0, help="1: off")
  add("--min_p", type=float, default=0.0, help="0: off")
  add("--seed", type=int, default=0, help="of the random numbers")
  return parser


def _check_port(host: str, port: int) -> None:
  """Refuses a port in use before a model is loaded for it."""
  if not 0 <= port <= 65535:
    raise ValueError(f"--port must lie in [0, 65535], got {port}")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  with socket.socket(family, socket.SOCK_STREAM) as probe:
    # A port that was closed a moment ago is free.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind((host.strip("[]"), port))
    except OSError as error:
      raise ValueError(f"--port={port}: {host}:{port} cannot be used "
                       f"({error.strerror})") from error


def serve(args) -> None:
  """Loads, compiles and serves until it is told to stop.

  Raises:
    ValueError: an option that cannot be, no such checkpoint, a port in use.
  """
  if args.max_waiting < 1:
    raise ValueError(f"--max_waiting must be at least 1, got "
                     f"{args.max_waiting}")
  if "://" not in args.checkpoint and not os.path.exists(args.checkpoint):
    raise ValueError(f"--checkpoint: {args.checkpoint!r} does not exist")
  _check_port(args.host, args.port)
  # jax, JetStream and TensorFlow start here, after the cheap checks. The last
  # one first: this module knows how to import it without its notices.
  importlib.import_module("vigor_jax.tasks.seqio_tasks")
  from vigor_jax import compilation
  from vigor_jax.sampling import settings as settings_lib
  from vigor_jax.serving import driver as driver_lib
  from vigor_jax.serving import load
  from vigor_jax.serving import servicer as servicer_lib
  names = {field.name for field in dataclasses.fields(load.Options)}
  options = load.Options(
      **{name: value for name, value in vars(args).items() if name in names})
  options.check()
  read = load.policy(options)
  engine = load.engine(options, read)
  settings = engine.settings
  rules = load.rules(options, read, settings)
  print(settings_lib.memory_line(settings, read.sizes), flush=True)
  if (line := load.devices_line()) is not None:
    print(line, flush=True)
  params = engine.load_params()
  engine.warm_up(params)
  driver = driver_lib.Driver(engine, params, args.max_waiting)
  servicer = servicer_lib.Servicer(driver, rules)
  compiled = compilation.count()

  def ready(port: int) -> None:
    print(f"serving {args.checkpoint} on {args.host}:{port}: {settings.slots} "
          f"slots, prompts of up to {rules.max_prompt} tokens, completions of "
          f"up to {rules.max_new_tokens}; Ctrl-C stops", flush=True)

  asyncio.run(servicer_lib.run(servicer, driver, host=args.host,
                               port=args.port, ready=ready))
  print(f"stopped: {servicer.answered} requests answered, {servicer.refused} "
        f"refused, {servicer.cancelled} cancelled; "
        f"{compilation.count() - compiled} programs compiled while serving",
        flush=True)


def main(argv) -> None:
  args = _parser().parse_args(argv[1:])
  with endings.one_message():
    serve(args)


if __name__ == "__main__":
  main(sys.argv)
