"""What a run says on the console: one short line a step, and warnings."""

import collections
import sys
import time
from collections.abc import Mapping
from typing import Any


def duration(seconds: float) -> str:
  """Returns a duration such as "42s", "3m10s" or "2h05m"."""
  seconds = int(round(max(seconds, 0)))
  if seconds < 60:
    return f"{seconds}s"
  if seconds < 3600:
    return f"{seconds // 60}m{seconds % 60:02d}s"
  return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def quantity(number: float) -> str:
  """Returns a count in three or four characters: "950", "12.3k", "4.1M"."""
  for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(number) >= scale:
      return f"{number / scale:.3g}{suffix}"
  return f"{number:.0f}"


class Progress:
  """Prints a line per step, also when the output is piped."""

  def __init__(self, total_steps: int, file=None, patience: int = 3):
    """Starts at no step.

    Args:
      total_steps: of the run, for the estimate of the time left.
      file: where lines go; None: standard output.
      patience: consecutive steps without a mixed group before a warning.
    """
    self._total = total_steps
    self._file = sys.stdout if file is None else file
    self._patience = patience
    self._silent_steps = 0
    self._warn_at = patience
    self._accuracy = None
    # Tokens and time at the last line, and (step, time) of recent lines.
    self._tokens = self._since = None  # None: not started.
    self._compiles = 0
    self._lines = collections.deque(maxlen=21)

  def say(self, text: str) -> None:
    """Prints one line at once."""
    print(text, file=self._file, flush=True)

  def start(self, tokens: int = 0) -> None:
    """Notes the time before the next step, and the tokens spent until then."""
    self._tokens, self._since = tokens, time.monotonic()

  def step(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Prints the line of a training step.

    Args:
      step: training steps done.
      metrics: the step's record; keys that are absent are left out.
    """
    rate, left = self._pace(step, metrics)
    rounds = metrics.get("allocation/rounds")
    width = len(str(self._total))
    parts = [f"step {step:>{width}}/{self._total}"]
    if self._accuracy is not None:
      parts.append(f"accuracy {self._accuracy:.3f}")
    for label, key, form in (
      ("loss", "sft/loss", ".4f"),
      ("reward", "reward/mean", ".3f"),
      ("mixed", "groups/mixed", ".0f"),
    ):
      if metrics.get(key) is not None:
        parts.append(f"{label} {metrics[key]:{form}}")
    if rounds:
      parts.append("rounds " + "+".join(str(int(count)) for count in rounds))
    if rate is not None:
      parts.append(f"{quantity(rate)} tokens/s")
    if metrics.get("slots/utilisation") is not None:
      parts.append(f"slots {metrics['slots/utilisation']:.0%}")
    if left is not None:
      parts.append(f"left {duration(left)}")
    self.say("  ".join(parts))
    self._watch_signal(metrics)

  def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Prints the line of an evaluation; later lines show its accuracy."""
    self._accuracy = metrics.get("eval/accuracy")
    shown = "no accuracy"
    if self._accuracy is not None:
      shown = f"accuracy {self._accuracy:.3f}"
    if metrics.get("eval/accuracy_low") is not None:
      shown += (
        f" [{metrics['eval/accuracy_low']:.3f}, "
        f"{metrics['eval/accuracy_high']:.3f}]"
      )
    for key, value in metrics.items():
      name = key.removeprefix("eval/").removesuffix("/accuracy")
      if name.startswith(("pass@", "cons@")) or key == f"eval/{name}/accuracy":
        shown += f"  {name} {value:.3f}"
    rollouts = metrics.get("rollouts")
    spent = f" after {quantity(rollouts)} rollouts" if rollouts else ""
    self.say(f"evaluation at step {step}{spent}: {shown}")
    if self._since is not None:
      self._since = time.monotonic()

  def _pace(self, step, metrics):
    """Returns tokens per second since the last line and the seconds left."""
    now = time.monotonic()
    rate = left = None
    tokens = metrics.get("tokens")
    if tokens is not None and self._since is not None:
      if tokens > (self._tokens or 0):
        rate = (tokens - (self._tokens or 0)) / max(now - self._since, 1e-9)
    # What compiling took says nothing of the steps that are left.
    compiles = metrics.get("compiles") or 0
    if compiles > self._compiles:
      self._lines.clear()
    elif not self._lines and self._since is not None:
      self._lines.append((step - 1, self._since))
    self._compiles = compiles
    if self._lines and step > self._lines[0][0]:
      first_step, first_time = self._lines[0]
      pace = (now - first_time) / (step - first_step)
      left = pace * (self._total - step)
    self._lines.append((step, now))
    self._tokens, self._since = tokens, now
    return rate, left

  def _watch_signal(self, metrics):
    """Warns when no group of several steps in a row had differing rewards."""
    mixed = metrics.get("groups/mixed")
    if mixed is None:
      return
    self._silent_steps = 0 if mixed else self._silent_steps + 1
    if self._silent_steps == 0:
      self._warn_at = self._patience
    if self._silent_steps < self._warn_at:
      return
    self._warn_at *= 2  # Once more each time the silence has doubled.
    reward = metrics.get("reward/mean")
    if reward is not None and reward >= 0.99:
      advice = "the prompts are solved: choose harder ones (task.*)"
    elif reward is not None and reward <= 0.01:
      advice = (
        "nothing is ever rewarded: read samples.jsonl (is the answer where "
        "the reward looks for it? is it cut at sampling.max_new_tokens?), "
        "choose easier prompts (task.*) or start from a better checkpoint "
        "(init_from)"
      )
    else:
      advice = (
        "every prompt is either solved or hopeless: read samples.jsonl, look "
        "at sampling.temperature, and at the prompts (task.*)"
      )
    self.say(
      f"warning: no group carried signal for {self._silent_steps} steps (all "
      f"rollouts of each prompt got the same reward; mean {reward}), so "
      f"nothing is learned; {advice}"
    )
