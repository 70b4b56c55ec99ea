"""Everything a run consists of, built from its configuration.

Cheap checks come first: task, reward (called once on made completions),
prompts against buckets. Device arrays are made last.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vigor_jax import allocation
from vigor_jax import checkpoints
from vigor_jax import rewards
from vigor_jax import tasks
from vigor_jax.config import fields
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import families
from vigor_jax.policy import transformer
from vigor_jax.policy import update as update_lib
from vigor_jax.policy import weights
from vigor_jax.sampling import sampler as sampler_lib

# Completions on which a reward is tried before anything compiles.
_PROBE_PROMPTS = 4


@dataclasses.dataclass
class Experiment:
  """The parts of a run.

  Attributes:
    config: validated configuration.
    task: prompts, vocabulary, evaluation set.
    scorer: verdicts; close it when done (it may own processes).
    allocator: which prompt gets the next rollout.
    stream: training prompts.
    graph: nnx graph of the transformer; sizes: its sizes.
    sampler, updater: the two device programs.
  """

  config: Any
  task: tasks.Task
  scorer: rewards.Scorer
  allocator: allocation.Allocator
  stream: tasks.PromptStream
  graph: Any
  sizes: transformer.Sizes
  sampler: sampler_lib.Sampler
  updater: update_lib.Updater

  def fresh_params(self, seed: int):
    """The pretrained checkpoint's parameters; without one, drawn anew."""
    if self.config.model.checkpoint:
      return weights.from_checkpoint(self.config.model.checkpoint, self.sizes)
    return transformer.create(self.sizes, seed)[1]

  def abstract_params(self):
    """Shapes of the parameters, for restoring into."""
    return transformer.abstract(self.sizes)[1]

  def load_params(self, path: str):
    """Parameters of a checkpoint (a run's folder or one of its steps)."""
    return checkpoints.restore_params(path, self.abstract_params())[0]


def make_task(config) -> tasks.Task:
  """The task of `config.task`.

  A task of text whose tokenizer is not named uses the pretrained model's.
  """
  name = config.task.name
  options = fields.options_of(config.task, tasks.REGISTRY[name].options)
  checkpoint = config.model.checkpoint
  if options.get("tokenizer") == "" and families.has_tokenizer(checkpoint):
    options["tokenizer"] = checkpoint
  return tasks.make({"name": name, **options})


def make_scorer(config, task: tasks.Task) -> rewards.Scorer:
  """The run's reward, tried once on made completions.

  Raises:
    RewardError: it returned something that is not a number in [0, 1]; the
      message names the function and what it returned.
  """
  scorer = rewards.Scorer(config.reward.name or task.reward,
                          mode=config.reward.mode or None,
                          workers=config.reward.workers or None)
  try:
    few = task.evaluation(_PROBE_PROMPTS)
    scorer.probe(rewards.probe_examples(few.answers, few.metadata))
  except BaseException:
    scorer.close()
    raise
  return scorer


def build(config) -> Experiment:
  """Builds a run's parts; makes no parameters.

  Raises:
    ValueError: with the field, file or prompt that is wrong.
  """
  task = make_task(config)
  if task.max_prompt_length > max(config.sampling.prompt_buckets):
    raise ValueError(
        f"sampling.prompt_buckets: the largest is "
        f"{max(config.sampling.prompt_buckets)} tokens, but prompts of task "
        f"{task.name} have up to {task.max_prompt_length}")
  scorer = make_scorer(config, task)
  name = config.allocation.name
  allocator = allocation.make(
      name, fields.options_of(config.allocation[name],
                              allocation.REGISTRY[name].Options),
      prompts_per_step=config.prompts_per_step, budget=config.rollout_budget,
      seed=config.seed, train_on=config.allocation.train_on)
  sizes = build_lib.sizes_of(config, task.vocabulary.vocab_size)
  graph, _ = transformer.abstract(sizes)
  sampler = sampler_lib.Sampler(
      graph, sizes, build_lib.sampler_settings(config, allocator.max_prompts),
      stop_ids=task.stop_ids, seed=config.seed)
  updater = update_lib.Updater(graph, build_lib.objective_of(config),
                               build_lib.optimizer_of(config))
  return Experiment(config, task, scorer, allocator,
                    task.stream(config.seed), graph, sizes, sampler, updater)


def shaping_of(config) -> rewards.Shaping | None:
  """What is added to verdicts for the loss; None: nothing."""
  shaping = rewards.Shaping(**config.reward.shaping)
  return None if shaping == rewards.Shaping() else shaping


def add_noise(config, verdicts: np.ndarray, positions: np.ndarray,
              samples: np.ndarray) -> np.ndarray:
  """Flips verdicts with probability `reward.noise`, by rollout address."""
  if not config.reward.noise:
    return verdicts
  noise = rewards.Noise(seed=config.seed, flip_right=config.reward.noise,
                        flip_wrong=config.reward.noise)
  return noise.apply(verdicts, positions, samples)
