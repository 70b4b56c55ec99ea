"""Evaluates a policy on held-out prompts, inside a run or on a checkpoint.

    python -m vigor_jax.evaluate --config=configs/arithmetic.py \
        --checkpoint=runs/arithmetic [--config.evaluation.num_prompts=1024]

Prints and writes (to --output, if given) one JSON object: the protocol and,
with bootstrap intervals, avg@k, unbiased pass@k, full-pass and
average-test-pass. The statistics are in statistics.py.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Callable

from absl import flags
import numpy as np

from vigor_jax import statistics
from vigor_jax.metrics import atomic_write
from vigor_jax.policy import families

# Streams of the sampler's addressed randomness; 0 is training.
EVALUATION_STREAM = 1
FRESH_STREAM = 2


def sample_rewards(sampler, params, task, score: Callable, prompts,
                   per_prompt: int, *, step: int, stream: int,
                   settings: dict[str, Any]) -> tuple[np.ndarray, dict]:
  """Draws `per_prompt` rollouts of every prompt and scores them.

  Args:
    sampler: its queue is emptied; runs in batches that fit its stores.
    score: (texts, answers, metadata) -> float32 [k] verdicts.
    prompts: tasks.Prompts, k of them.
    step, stream: address of the randomness.
    settings: temperature, top_k, top_p, min_p of `Sampler.request`.

  Returns:
    (rewards float32 [k, per_prompt],
     record: lengths int [k, per_prompt], truncated bool [k, per_prompt],
       texts list of k lists).
  """
  k = len(prompts)
  rewards = np.zeros((k, per_prompt), np.float32)
  lengths = np.zeros((k, per_prompt), np.int32)
  truncated = np.zeros((k, per_prompt), bool)
  texts = [[""] * per_prompt for _ in range(k)]
  s = sampler.settings
  # Rollouts of one prompt may have to be split over several queues.
  at_once = min(per_prompt, s.queue)
  width = max(1, min(s.prefixes, s.queue // at_once))
  for first in range(0, k, width):
    chosen = np.arange(first, min(first + width, k))
    for begin in range(0, per_prompt, at_once):
      count = min(at_once, per_prompt - begin)
      sampler.begin(step, stream=stream)
      sampler.prefill(params, np.arange(len(chosen)),
                      [prompts.tokens[i] for i in chosen])
      sampler.request(
          np.repeat(np.arange(len(chosen)), count),
          np.repeat(prompts.positions[chosen], count),
          np.tile(np.arange(begin, begin + count), len(chosen)), **settings)
      for rows in sampler.decode(params):
        decoded = task.decode(rows.tokens, rows.lengths)
        at = chosen[rows.group]
        verdicts = score(decoded, [prompts.answers[i] for i in at],
                         [prompts.metadata[i] for i in at])
        rewards[at, rows.sample] = verdicts
        lengths[at, rows.sample] = rows.lengths
        truncated[at, rows.sample] = rows.truncated
        for i, j, text in zip(at, rows.sample, decoded):
          texts[i][j] = text
  return rewards, dict(lengths=lengths, truncated=truncated, texts=texts)


def summary(rewards: np.ndarray, ks=(1,)) -> dict[str, float]:
  """eval/* metrics of rewards [prompts, samples].

  accuracy (= average reward, avg@k), full_pass (share of verdicts equal to
  1), pass@k (unbiased, for k up to the number of samples), and a 95 %
  bootstrap interval of the accuracy over prompts.
  """
  n = rewards.shape[1]
  low, high = statistics.bootstrap_interval(rewards.mean(1), resamples=400)
  full = rewards >= 1.0
  out = {
      "eval/accuracy": float(rewards.mean(dtype=np.float64)),
      "eval/full_pass": float(full.mean()),
  }
  if len(rewards) > 1:  # One prompt says nothing about spread.
    out.update({"eval/accuracy_low": low, "eval/accuracy_high": high})
  for k in sorted({*ks, n}):
    if 1 < k <= n:
      values = statistics.pass_at_k(np.full(len(full), n), full.sum(1), k)
      out[f"eval/pass@{k}"] = float(np.mean(values))
  return out


class Evaluator:
  """Held-out evaluation of a run, on the run's own sampler."""

  def __init__(self, config, task, sampler, score: Callable):
    e = config.evaluation
    self.prompts = task.evaluation(e.num_prompts)
    self.samples = e.samples_per_prompt
    self.num_logged = e.num_samples_logged
    self._task, self._sampler, self._score = task, sampler, score
    self._settings = dict(temperature=e.temperature)
    for i, tokens in enumerate(self.prompts.tokens):
      sampler.check_prompt(len(tokens), f"evaluation prompt {i}")

  def __call__(self, params, step: int) -> tuple[dict[str, float], list]:
    """(metrics, sample completions) of the policy after `step` steps."""
    start = time.perf_counter()
    rewards, record = sample_rewards(
        self._sampler, params, self._task, self._score, self.prompts,
        self.samples, step=step, stream=EVALUATION_STREAM,
        settings=self._settings)
    metrics = summary(rewards)
    metrics["eval/length"] = float(record["lengths"].mean())
    metrics["eval/truncated_share"] = float(record["truncated"].mean())
    metrics["eval/seconds"] = time.perf_counter() - start
    samples = [
        dict(prompt=self.prompts.texts[i], answer=self.prompts.answers[i],
             completion=record["texts"][i][0], reward=float(rewards[i, 0]))
        for i in range(min(self.num_logged, len(rewards)))]
    return metrics, samples


_USAGE = """Evaluates a checkpoint on its task's held-out prompts.

    python -m vigor_jax.evaluate --config=FILE.py --checkpoint=RUN_OR_STEP
        [--output=FILE.json] [--config.evaluation.num_prompts=1024 ...]
"""


def _define(values) -> None:
  flags.DEFINE_string("checkpoint", "", "a run's folder, one of its steps, or "
                      "pretrained weights (a Hugging Face folder, .gguf); "
                      "empty: where the configuration starts (init_from)",
                      flag_values=values)
  flags.DEFINE_string("output", "", "where the JSON goes, beside stdout",
                      flag_values=values)


def main(argv) -> None:
  from vigor_jax.config import cli
  args = cli.parse_flags(argv, _USAGE, _define, needs_workdir=False)
  config = args.config
  with config.unlocked():
    if args.flags.checkpoint:
      # A run's checkpoint replaces the weights of the model it started from.
      if families.is_pretrained(args.flags.checkpoint):
        config.model.checkpoint, config.init_from = args.flags.checkpoint, ""
      else:
        config.init_from = args.flags.checkpoint
  from vigor_jax import experiment  # jax starts here, after the checks.
  from vigor_jax import train
  try:
    parts = experiment.build(config)
    with parts.scorer:
      evaluator = Evaluator(config, parts.task, parts.sampler,
                            parts.scorer.score)
      metrics, samples = evaluator(train.initial_params(parts, args.workdir or "runs/evaluate"), 0)
  except ValueError as error:
    cli.exit_with_message(error)
  e = config.evaluation
  result = dict(
      checkpoint=(args.flags.checkpoint or config.init_from
                  or config.model.checkpoint),
      protocol=dict(task=parts.task.name, prompts=e.num_prompts,
                    samples_per_prompt=e.samples_per_prompt,
                    temperature=e.temperature,
                    max_new_tokens=config.sampling.max_new_tokens,
                    seed=config.seed),
      metrics=metrics, samples=samples)
  text = json.dumps(result, indent=2)
  print(text)
  if args.flags.output:
    atomic_write(args.flags.output, text + "\n")


if __name__ == "__main__":
  main(sys.argv)
