"""Reward functions for the tests; imported by worker processes too."""

import os
import signal
import sys
import time


def good(completion, answer, **metadata):
  return float(completion == answer)


def graded(completion, answer, *, scale=1.0, **metadata):
  return len(completion) / 10 * scale


def moded(completion, answer, *, mode="half", **metadata):
  return {"half": 0.5, "full": 1.0}[mode]


moded.modes = ("half", "full")


def echo(completion, answer, **metadata):
  """Returns whatever object the test names."""
  return eval(completion)  # The text comes from the test itself.


def cheap_echo(completion, answer, **metadata):
  return eval(completion)


cheap_echo.cheap = True


def no_metadata(completion, answer):
  return 1.0


def one_argument(completion, **metadata):
  return 1.0


def raises(completion, answer, **metadata):
  raise KeyError("no such column")


def slow_first(completion, answer, **metadata):
  """Later completions finish first."""
  time.sleep(float(answer))
  return float(completion)


def cheap_slow(completion, answer, **metadata):
  return slow_first(completion, answer)


cheap_slow.cheap = True


def waits_for(completion, answer, **metadata):
  """Until a file is there."""
  while not os.path.exists(answer):
    time.sleep(0.01)
  return float(completion)


def naps(completion, answer, **metadata):
  time.sleep(float(completion))
  return 1.0


naps.time_limit = 0.2
naps.timeout_verdict = 0.0


def kill_once(completion, answer, **metadata):
  """Dies the first time a completion is seen; `answer` is a marker file."""
  if completion == "victim" and not os.path.exists(answer):
    with open(answer, "w", encoding="utf-8"):
      pass
    os.kill(os.getpid(), signal.SIGKILL)
  return 1.0


def kill_always(completion, answer, **metadata):
  if completion == "victim":
    os._exit(0)
  return 1.0


def spins(completion, answer, **metadata):
  if completion == "spin":
    while True:
      pass
  if completion == "sleep":
    time.sleep(600)
  if completion == "big":
    return float(len(str(bytearray(3 << 30))))
  return 1.0


spins.time_limit = 1.0
spins.timeout_verdict = 0.0
spins.memory_limit = 256 << 20


def hangs(completion, answer, **metadata):
  time.sleep(600)


hangs.time_limit = 1.0


def pid(completion, answer, **metadata):
  return (os.getpid() % 1000) / 1000


def heavy_modules(completion, answer, **metadata):
  heavy = {"jax", "tensorflow", "seqio", "flax"} & set(sys.modules)
  return float(bool(heavy))


def counted(completion, answer, **metadata):
  """Appends a byte to the file `answer` per call."""
  with open(answer, "ab") as log:
    log.write(b".")
  return 0.25


counted.cacheable = True


class NotAFunction:
  pass
