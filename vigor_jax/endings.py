"""How a program ends: one message for its user, never a traceback.

Tracebacks are left to faults of the code. What a user can put right (a wrong
input, a full disk, a key pressed) is one line on stderr and an exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

# What main functions answer; HostLost and the like pass.
ANSWERED = (ValueError, FloatingPointError, OSError)


def exit_with_message(error: Exception) -> None:
  """Prints an error for its author, without a traceback, and exits with 2."""
  print(f"error: {in_words(error)}", file=sys.stderr, flush=True)
  sys.exit(2)


def in_words(error: Exception) -> str:
  """An error's message; of the operating system's, the file first."""
  if isinstance(error, OSError) and error.strerror:
    places = [os.fspath(p) for p in (error.filename, error.filename2)
              if isinstance(p, (str, os.PathLike))]
    return ": ".join([*places, error.strerror])
  return str(error).strip() or type(error).__name__


@contextlib.contextmanager
def one_message(on_interrupt: str = "stopped", at_once: bool = False
                ) -> Iterator[None]:
  """Ends the program with one message for errors that are its user's.

  Exit codes: 2 for an error, 130 after Ctrl-C, and 141 (as a shell says
  SIGPIPE) when the reader of the output has gone, as with `| head`.

  Args:
    on_interrupt: what to say after Ctrl-C.
    at_once: Ctrl-C ends the process inside its handler, for programs with
      nothing to save then. An exception would be lost where jax collects
      garbage, as it often does while it starts.
  """
  def handle(signum, frame):
    os.write(2, f"{on_interrupt}\n".encode())
    os._exit(128 + signum)

  main = threading.current_thread() is threading.main_thread()
  before = signal.signal(signal.SIGINT, handle) if at_once and main else None
  try:
    yield
    sys.stdout.flush()
  except BrokenPipeError:
    closed_output()
  except KeyboardInterrupt:
    print(on_interrupt, file=sys.stderr, flush=True)
    sys.exit(128 + signal.SIGINT)
  except ANSWERED as error:
    exit_with_message(error)
  finally:
    if before is not None:
      signal.signal(signal.SIGINT, before)


def closed_output() -> None:
  """Exits with 141; the interpreter's last flush must not fail again."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  sys.exit(128 + signal.SIGPIPE)
