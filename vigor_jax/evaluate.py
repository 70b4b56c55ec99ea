"""Evaluates a policy on held-out prompts, inside a run or on its own.

    python -m vigor_jax.evaluate --checkpoint=runs/arithmetic \
        [--output=FILE.json --config.evaluation.num_prompts=1024]
    python -m vigor_jax.evaluate --config=configs/qwen2p5_3b_math.py \
        --checkpoint=FOLDER_OR_GGUF

Prints the protocol and the scores, and one JSON object with both on stdout
(and in --output). docs/evaluation.md says what the scores are; the statistics
are in statistics.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Callable, Sequence

from absl import flags
import numpy as np

from vigor_jax import endings
from vigor_jax import statistics
from vigor_jax.metrics import atomic_write
from vigor_jax.policy import families

# Streams of the sampler's addressed randomness; 0 is training.
EVALUATION_STREAM = 1
FRESH_STREAM = 2
_RESAMPLES = 400


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
        rows, decoded = task.finish(rows)
        at = chosen[rows.group]
        verdicts = score(decoded, [prompts.answers[i] for i in at],
                         [prompts.metadata[i] for i in at])
        rewards[at, rows.sample] = verdicts
        lengths[at, rows.sample] = rows.lengths
        truncated[at, rows.sample] = rows.truncated
        for i, j, text in zip(at, rows.sample, decoded):
          texts[i][j] = text
  return rewards, dict(lengths=lengths, truncated=truncated, texts=texts)


# ------------------------------------------------------------------- scores


def scores(rewards: np.ndarray, pass_at: Sequence[int] = (),
           answers: Sequence[Sequence] | None = None) -> dict[str, float]:
  """Scores of rewards [prompts, k].

  Args:
    rewards: verdicts in [0, 1].
    pass_at: k of pass@k to report beside the number of samples; larger ones
      than that are left out.
    answers: k final answers of each prompt, None where there is none.

  Returns:
    accuracy (avg@k) with the ends of its 95 % bootstrap interval over prompts,
    full_pass (share of verdicts that are 1), and of several samples unbiased
    pass@k and, with answers, cons@k.
  """
  n = rewards.shape[1]
  full = rewards >= 1.0
  out = {"accuracy": float(rewards.mean(dtype=np.float64)),
         "full_pass": float(full.mean())}
  if len(rewards) > 1:  # One prompt says nothing about spread.
    out["accuracy_low"], out["accuracy_high"] = statistics.bootstrap_interval(
        rewards.mean(1), resamples=_RESAMPLES)
  if n > 1:
    for k in sorted({*pass_at, n}):
      if k <= n:
        values = statistics.pass_at_k(np.full(len(full), n), full.sum(1), k)
        out[f"pass@{k}"] = float(np.mean(values))
    if answers is not None:
      out[f"cons@{n}"] = float(statistics.cons_at_k(
          votes(answers, full), rewards).mean())
  return out


def votes(answers: Sequence[Sequence], right: np.ndarray) -> list[list]:
  """Answers such that equal ones count as one in a majority vote.

  All right answers of a prompt equal its gold answer, however they are
  written; wrong ones are equal where their texts are.
  """
  return [[None if a is None else (True, "") if ok else (False, a)
           for a, ok in zip(given, marks)]
          for given, marks in zip(answers, right)]


def answers_of(scorer, texts: Sequence[Sequence[str]], prompts
               ) -> list[list[str | None]] | None:
  """Final answers of completions [prompts][k]; None: the reward names none.

  A reward function that has the attribute `final_answer`, a function
  (completion, gold) -> str | None, can be voted on.
  """
  extract = getattr(scorer.fn, "final_answer", None)
  if extract is None:
    return None
  return [[extract(text, gold) for text in given]
          for given, gold in zip(texts, prompts.answers)]


class Evaluator:
  """Held-out evaluation on one sampler: of one task, or of a suite.

  Args:
    parts: experiment.Experiment; `parts.held_out` is what is evaluated.

  Raises:
    ValueError: a prompt that is longer than the sampler's largest bucket.
  """

  def __init__(self, parts):
    self._parts, e = parts, parts.config.evaluation
    self._settings = dict(temperature=e.temperature, top_p=e.top_p)
    for part in parts.held_out:
      for i, tokens in enumerate(part.prompts.tokens):
        parts.sampler.check_prompt(
            len(tokens), f"evaluation prompt {i} of task {part.task.name}")

  def __call__(self, params, step: int) -> tuple[dict[str, float], list]:
    """(eval/* metrics, sample completions) of the policy after `step` steps.

    Of a suite, eval/accuracy is the unweighted mean over its tasks, and
    eval/<task>/accuracy each of them.
    """
    start = time.perf_counter()
    found = [self._part(part, params, step) for part in self._parts.held_out]
    if len(found) == 1 and not self._parts.held_out[0].label:
      metrics = {f"eval/{k}": v for k, v in found[0][1].items()}
    else:
      metrics = self._suite(found)
    metrics["eval/seconds"] = time.perf_counter() - start
    return metrics, [sample for *_, samples in found for sample in samples]

  def _part(self, part, params, step):
    rewards, record = sample_rewards(
        self._parts.sampler, params, part.task, part.scorer.score,
        part.prompts, part.samples, step=step, stream=EVALUATION_STREAM,
        settings=self._settings)
    e = self._parts.config.evaluation
    answers = None
    if part.samples > 1:
      answers = answers_of(part.scorer, record["texts"], part.prompts)
    values = scores(rewards, e.pass_at, answers)
    values["length"] = float(record["lengths"].mean())
    values["truncated_share"] = float(record["truncated"].mean())
    label = {"task": part.label} if part.label else {}
    samples = [
        dict(label, prompt=part.prompts.texts[i],
             answer=part.prompts.answers[i],
             completion=record["texts"][i][0], reward=float(rewards[i, 0]))
        for i in range(min(e.num_samples_logged, len(rewards)))]
    return rewards, values, samples

  def _suite(self, found) -> dict[str, float]:
    means = [rewards.mean(1, dtype=np.float64) for rewards, *_ in found]
    out = {"eval/accuracy": float(np.mean([m.mean() for m in means])),
           "eval/accuracy_weighted": float(np.concatenate(means).mean())}
    if all(len(m) > 1 for m in means):
      out["eval/accuracy_low"], out["eval/accuracy_high"] = (
          statistics.stratified_interval(means, resamples=_RESAMPLES))
    for name in ("full_pass", "length", "truncated_share"):
      out[f"eval/{name}"] = float(np.mean([v[name] for _, v, _ in found]))
    for part, (_, values, _) in zip(self._parts.held_out, found):
      out.update({f"eval/{part.label}/{k}": v for k, v in values.items()})
    return out

  def protocol(self) -> dict[str, Any]:
    """Everything that the scores depend on beside the policy."""
    config = self._parts.config
    e = config.evaluation
    return dict(
        temperature=e.temperature, top_p=e.top_p,
        max_new_tokens=config.sampling.max_new_tokens, seed=config.seed,
        dtype=config.model.dtype, pass_at=list(e.pass_at),
        tasks=[dict(task=part.label or config.task.name, name=part.task.name,
                    prompts=len(part.prompts), samples_per_prompt=part.samples,
                    reward=part.scorer.name, reward_mode=part.scorer.mode,
                    stop_strings=list(part.task.stop_strings))
               for part in self._parts.held_out])


def protocol_text(protocol: dict[str, Any]) -> str:
  """The protocol in words, one line for each task and one for all."""
  lines = [
      f"{t['task']}: {t['prompts']} prompts, avg@{t['samples_per_prompt']}, "
      f"reward {t['reward']}" + (f" ({t['reward_mode']})"
                                 if t["reward_mode"] else "")
      for t in protocol["tasks"]]
  p = protocol
  lines.append(
      f"temperature {p['temperature']:g}, top-p {p['top_p']:g}, at most "
      f"{p['max_new_tokens']} new tokens, {p['dtype']}, seed {p['seed']}")
  return "\n".join(lines)


# --------------------------------------------------------------------- main

_USAGE = """Evaluates a policy on held-out prompts.

    python -m vigor_jax.evaluate --checkpoint=RUN_OR_STEP
    python -m vigor_jax.evaluate --config=FILE.py --checkpoint=WEIGHTS
        [--output=FILE.json] [--config.evaluation.suite="math, aime24" ...]

Without --config, that of the run.
"""


def _define(values) -> None:
  flags.DEFINE_string("checkpoint", "", "a run's folder, one of its steps, or "
                      "pretrained weights (a Hugging Face folder, .gguf); "
                      "empty: where the configuration starts (init_from)",
                      flag_values=values)
  flags.DEFINE_string("output", "", "where the JSON goes, beside stdout",
                      flag_values=values)


def _with_config(argv: Sequence[str]) -> list[str]:
  """The command line, with the run's own configuration where it names none.

  Raises:
    ValueError: the checkpoint is not there, or nothing is named.
  """
  from vigor_jax.config import cli
  given = [a.lstrip("-").partition("=") for a in argv[1:]]
  if (not any(name in ("checkpoint", "config") for name, *_ in given)
      and not cli.asks_for_help(argv)):
    raise ValueError("--checkpoint is missing: a run's folder, one step in it, "
                     "or, with --config, pretrained weights")
  paths = [value for name, _, value in given if name == "checkpoint"]
  if paths and not any(name == "config" for name, *_ in given):
    if "://" not in paths[-1] and not os.path.exists(paths[-1]):
      raise ValueError(f"--checkpoint: {paths[-1]!r} does not exist")
    run = os.path.abspath(paths[-1])
    for folder in (run, os.path.dirname(os.path.dirname(run))):
      path = os.path.join(folder, "config.json")
      if os.path.exists(path) and not families.is_pretrained(folder):
        return [*argv, f"--config={path}"]
  return list(argv)


def main(argv) -> None:
  with endings.one_message(at_once=True):
    _main(argv)


def _main(argv) -> None:
  from vigor_jax.config import cli
  args = cli.parse_flags(_with_config(argv), _USAGE, _define,
                         needs_workdir=False)
  config, output = args.config, args.flags.output
  if os.path.isdir(output):
    raise ValueError(f"--output: {output!r} is a folder, not a file")
  cli.check_place("--output", output)
  with config.unlocked():
    if args.flags.checkpoint:
      # A run's checkpoint replaces the weights of the model it started from.
      if families.is_pretrained(args.flags.checkpoint):
        config.model.checkpoint, config.init_from = args.flags.checkpoint, ""
      else:
        config.init_from = args.flags.checkpoint
  from vigor_jax import distributed
  from vigor_jax import experiment  # jax starts here, after the checks.
  from vigor_jax import starting
  from vigor_jax.sampling import layout as layout_lib
  team = distributed.initialize(config.mesh.host_timeout)
  with experiment.build(config, training=False) as parts:
    evaluator = Evaluator(parts)
    fallback = layout_lib.fallback_line(parts.placement, parts.sizes,
                                        parts.sampler.settings)
    if fallback and team.primary:
      print(fallback, file=sys.stderr, flush=True)
    protocol = evaluator.protocol()
    print(protocol_text(protocol), file=sys.stderr, flush=True)
    params = starting.initial_params(
        parts, args.workdir or "runs/evaluate")[0]
    metrics, samples = evaluator(params, 0)
  if not team.primary:
    return
  for key, value in metrics.items():
    print(f"{key:<32} {value:.4g}", file=sys.stderr)
  result = dict(
      checkpoint=(args.flags.checkpoint or config.init_from
                  or config.model.checkpoint),
      protocol=protocol, metrics=metrics, samples=samples)
  text = json.dumps(result, indent=2)
  print(text)
  if output:
    atomic_write(output, text + "\n")


if __name__ == "__main__":
  main(sys.argv)
