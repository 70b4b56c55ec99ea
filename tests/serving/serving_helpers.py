"""A small policy saved as a run, and a server of it in a process of its own."""

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys

import numpy as np
import tiny_runs

from vigor_jax import checkpoints, experiment
from vigor_jax.config import loading
from vigor_jax.policy import build, transformer
from vigor_jax.sampling import sampler as sampler_lib

SERVING = re.compile(r"serving .* on 127\.0\.0\.1:(\d+): (.*); Ctrl-C stops")


@dataclasses.dataclass
class Run:
  """A run's folder, and what its policy answers at temperature 0."""

  folder: str
  config: object
  graph: object
  sizes: object
  params: object
  vocabulary: object
  stop_ids: tuple

  def answers(self, prompts, max_new_tokens):
    """Greedy completions, without the stop id, by our sampler."""
    sampler = sampler_lib.Sampler(
      self.graph, self.sizes,
      sampler_lib.Settings(
        slots=16, chunk=4, prompt_buckets=(16, 40), prefill_batch=8,
        max_new_tokens=self.config.sampling.max_new_tokens,
        prefixes=len(prompts), queue=len(prompts)),
      stop_ids=self.stop_ids, seed=0)  # fmt: skip
    count = np.arange(len(prompts))
    sampler.prefill(self.params, count, [np.asarray(p) for p in prompts])
    sampler.request(count, count, count * 0, temperature=0.0,
                    max_new_tokens=np.asarray(max_new_tokens))  # fmt: skip
    found = {}
    for rows in sampler.decode(self.params):
      for i, group in enumerate(rows.group):
        tokens = rows.tokens[i, : rows.lengths[i]].tolist()
        found[int(group)] = [t for t in tokens if t not in self.stop_ids]
    return [found[i] for i in range(len(prompts))]


def save_run(folder, **changes):
  """A run that was saved before its first step.

  The output matrix is untied, so that greedy completions do not repeat one
  token, and the EOS is made likely enough to end some of them.
  """
  config = tiny_runs.config(
    **{"sampling.max_new_tokens": 32, "sampling.prompt_buckets": (16, 40),
       "policy.row_length": 128, "model.sizes.tied": False, **changes}
  )  # fmt: skip
  vocabulary, stop_ids, _ = experiment.reading_of(config)
  sizes = build.sizes_of(config, vocabulary.vocab_size)
  graph, params = transformer.create(sizes, 1)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(loading.to_json(config))
  store = checkpoints.Checkpoints(str(folder))
  store.save(1, params, {"none": np.zeros(1)}, {"stage": "rl"})
  store.close()
  return Run(str(folder), config, graph, sizes, params, vocabulary,
             tuple(stop_ids))  # fmt: skip


@contextlib.contextmanager
def server(root, *arguments, seconds=180):
  """(process, port, what its ready line says); ended by SIGTERM."""
  process = subprocess.Popen(
    [sys.executable, "-m", "vigor_jax.serve", "--port=0", *arguments],
    cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip
  said = []
  try:
    for line in process.stdout:
      said.append(line)
      ready = SERVING.search(line)
      if ready:
        break
    else:
      raise AssertionError("".join(said))
    yield process, int(ready[1]), ready[2]
  finally:
    if process.poll() is None:
      process.send_signal(signal.SIGTERM)
      try:
        process.wait(120)
      except subprocess.TimeoutExpired:
        process.kill()
        raise
