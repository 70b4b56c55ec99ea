"""Device traces of chosen steps, for XProf and TensorBoard's profiler."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import jax


class StepTraces:
  """Traces the steps of `config.profile_steps` into workdir/traces/."""

  def __init__(self, workdir: str, steps: Sequence[int]):
    """Takes the steps to trace, counted from 1 as in metrics.jsonl."""
    self._folder = os.path.join(workdir, "traces")
    self._steps = frozenset(steps)

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Surrounds one step; writes its trace if it was asked for."""
    if step not in self._steps:
      yield
      return
    with jax.profiler.trace(os.path.join(self._folder, f"step_{step}")):
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        yield
