"""The start-up probe of a reward: what it judges, what is said meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
import sys
import threading
import time
from typing import Any

# Seconds of silence before it is said what the probe waits for; then between
# further lines.
FIRST, LATER = 5.0, 60.0


class Told:
  """Says on stderr what is waited for, once it takes long.

  Args:
    what: is going on.
    patience: how long it may last, in words.

  Attributes:
    waits_for: set by the caller as it goes on.
  """

  def __init__(self, what: str, patience: str):
    self._what, self._patience = what, patience
    self.waits_for = ""
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._tell, daemon=True)

  def __enter__(self) -> Told:
    self._begun = time.monotonic()
    self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._over.set()
    self._thread.join()

  def _tell(self) -> None:
    pause = FIRST
    while not self._over.wait(pause):
      pause = LATER
      print(f"{self._what}: no verdict on {self.waits_for} after "
            f"{time.monotonic() - self._begun:.0f} s ({self._patience})",
            file=sys.stderr, flush=True)


def probe_examples(
  answers: Sequence[str], metadata: Sequence[dict[str, Any]] | None = None
) -> list[tuple[str, str, dict[str, Any]]]:
  """Made completions for `Scorer.probe`: empty, the gold answer, and junk."""
  metadata = [{}] * len(answers) if metadata is None else metadata
  return [
    (completion, answer, extra)
    for answer, extra in zip(answers, metadata)
    for completion in ("", answer, "\x00 not an answer \\boxed{")
  ]
