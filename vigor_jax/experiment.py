"""Everything a run consists of, built from its configuration.

Cheap checks come first: task, reward (called once on made completions),
prompts against buckets. Device arrays are made last.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from vigor_jax import allocation
from vigor_jax import checkpoints
from vigor_jax import distributed
from vigor_jax import rewards
from vigor_jax import tasks
from vigor_jax import warm_start
from vigor_jax.tasks import suites
from vigor_jax.tasks import vocabularies
from vigor_jax.config import fields
from vigor_jax.policy import build as build_lib
from vigor_jax.policy import families
from vigor_jax.policy import sharding
from vigor_jax.policy import transformer
from vigor_jax.policy import update as update_lib
from vigor_jax.policy import weights
from vigor_jax.sampling import sampler as sampler_lib
from vigor_jax.sampling import settings as settings_lib

# Completions on which a reward is tried before anything compiles.
_PROBE_PROMPTS = 4


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """A task's held-out prompts, and who judges their completions.

  Attributes:
    label: its name in a suite; "" where it is all there is.
    task, scorer, prompts: the task, its reward, k of its prompts.
    samples: completions of each.
  """

  label: str
  task: tasks.Task
  scorer: rewards.Scorer
  prompts: tasks.Prompts
  samples: int


@dataclasses.dataclass
class Experiment:
  """The parts of a run; a context that ends the rewards' processes.

  Attributes:
    config: validated configuration, its slots chosen.
    task: prompts, vocabulary, evaluation set.
    scorer: verdicts.
    held_out: what is evaluated on, one part or a suite of them; empty where
      there is nothing and nothing is asked for.
    allocator: which prompt gets the next rollout.
    stream: training prompts; None where only evaluation is asked for and
      the task has none.
    graph: nnx graph of the transformer; sizes: its sizes.
    sampler, updater: the two device programs.
    placement: where arrays live on the mesh; None = one device.
  """

  config: Any
  task: tasks.Task
  scorer: rewards.Scorer
  held_out: list[HeldOut]
  allocator: allocation.Allocator
  stream: tasks.PromptStream | None
  graph: Any
  sizes: transformer.Sizes
  sampler: sampler_lib.Sampler
  updater: update_lib.Updater
  placement: sharding.Placement | None

  def __enter__(self) -> Experiment:
    return self

  def __exit__(self, *unused) -> None:
    for scorer in {self.scorer, *(part.scorer for part in self.held_out)}:
      scorer.close()

  def fresh_params(self, seed: int):
    """The pretrained checkpoint's parameters; without one, drawn anew."""
    shardings = None
    if self.placement is not None:
      shardings = self.placement.tree(transformer.abstract(self.sizes)[1])
    if self.config.model.checkpoint:
      return weights.from_checkpoint(self.config.model.checkpoint, self.sizes,
                                     shardings)
    create = lambda: transformer.create(self.sizes, seed)[1]
    if shardings is None:
      return create()
    # Each device draws its own piece: no device holds a whole large model.
    return jax.jit(create, out_shardings=shardings)()

  def abstract_params(self):
    """Shapes, and shardings, of the parameters, for restoring into."""
    abstract = transformer.abstract(self.sizes)[1]
    if self.placement is None:
      return abstract
    return self.placement.abstract(abstract)

  def load_params(self, path: str):
    """Parameters of a checkpoint (a run's folder or one of its steps)."""
    return checkpoints.restore_params(path, self.abstract_params())[0]


def _task_options(config) -> dict[str, Any]:
  name = config.task.name
  options = fields.options_of(config.task, tasks.REGISTRY[name].options)
  checkpoint = config.model.checkpoint
  if options.get("tokenizer") == "" and families.has_tokenizer(checkpoint):
    options["tokenizer"] = checkpoint
  return options


def make_task(config) -> tasks.Task:
  """The task of `config.task`.

  A task of text whose tokenizer is not named uses the pretrained model's.
  """
  return tasks.make({"name": config.task.name, **_task_options(config)})


def reading_of(config) -> tuple[Any, tuple[int, ...], tuple[str, ...]]:
  """(vocabulary, stop ids, stop strings) of the run, without its data.

  A task of text needs only its tokenizer; others are made, from their seed.
  """
  options = _task_options(config)
  if "tokenizer" not in options:
    task = make_task(config)
    return task.vocabulary, task.stop_ids, task.stop_strings
  vocabulary = vocabularies.load(options["tokenizer"])
  stops = options.get("stop_strings", "").split("|")
  return vocabulary, vocabulary.eos_ids, tuple(s for s in stops if s)


def make_scorer(config, task: tasks.Task) -> rewards.Scorer:
  """The run's reward, tried once on made completions; see `_scorer`."""
  return _scorer(config, task, config.reward.name or task.reward,
                 config.reward.mode)


def _scorer(config, task: tasks.Task, name: str, mode: str
            ) -> rewards.Scorer:
  """A reward, tried once on made completions of a task.

  Raises:
    RewardError: it returned something that is not a number in [0, 1]; the
      message names the function and what it returned.
  """
  scorer = rewards.Scorer(name, mode=mode or None,
                          workers=config.reward.workers or None)
  try:
    if task.held_out is not None:
      few = task.evaluation(_PROBE_PROMPTS)
    else:
      few = task.stream(config.seed).peek(_PROBE_PROMPTS)
    scorer.probe(rewards.probe_examples(few.answers, few.metadata))
  except BaseException:
    scorer.close()
    raise
  return distributed.shared(scorer)


def _held_out(config, task: tasks.Task, scorer: rewards.Scorer
              ) -> list[HeldOut]:
  """What is evaluated on: the task's own held-out prompts, or a suite."""
  e = config.evaluation
  mode = e.reward_mode or config.reward.mode
  made = {(scorer.name, scorer.mode or ""): scorer}

  def judge(of: tasks.Task, name: str, mode: str) -> rewards.Scorer:
    if (name, mode) not in made:
      made[name, mode] = _scorer(config, of, name, mode)
    return made[name, mode]

  if not e.suite:
    return [HeldOut("", task, judge(task, scorer.name, mode),
                    task.evaluation(e.num_prompts), e.samples_per_prompt)]
  parts = []
  for member in suites.parse(e.suite):
    other = suites.build(member, _task_options(config), e.suite_folder)
    if other.vocabulary.fingerprint != task.vocabulary.fingerprint:
      raise ValueError(
          f"evaluation.suite: {member.label} has another vocabulary than task "
          f"{task.name}; set its tokenizer, or model.checkpoint")
    fn = rewards.resolve(other.reward)
    # A mode is the run's choice among those of a reward that has any.
    chosen = mode if getattr(fn, "modes", ()) else ""
    parts.append(HeldOut(
        member.label, other, judge(other, rewards.reward_name(fn), chosen),
        other.evaluation(member.prompts or e.num_prompts),
        member.samples or e.samples_per_prompt))
  return parts


def build(config, *, training: bool = True) -> Experiment:
  """Builds a run's parts; makes no parameters.

  Args:
    config: validated configuration.
    training: False for an evaluation alone: the task needs no training part,
      and none at all where there is a suite.

  Raises:
    ValueError: with the field, file or prompt that is wrong.
  """
  placement = sharding.placement_of(config)
  if placement is not None:
    distributed.connect(placement.mesh)
  if config.evaluation.suite and not training:
    first = suites.parse(config.evaluation.suite)[0]
    task = suites.build(first, _task_options(config),
                        config.evaluation.suite_folder)
  else:
    task = make_task(config)
  largest = max(config.sampling.prompt_buckets)
  if task.max_prompt_length > largest:
    if "max_prompt_length" in config.task:
      lower = (f"a bucket of that many, or task.max_prompt_length={largest}, "
               "which drops longer prompts and says how many")
    else:
      lower = "a bucket of that many"
    raise ValueError(
        f"sampling.prompt_buckets: the largest is {largest} tokens, but "
        f"prompts of task {task.name} have up to {task.max_prompt_length}; "
        f"legal: {lower}")
  if training and (config.stage == "sft" or config.init_from == "auto"):
    warm_start.check(config, task)
  if training or not config.evaluation.suite:
    scorer = make_scorer(config, task)
  else:
    scorer = _scorer(config, task, task.reward, "")
  held_out, e = [], config.evaluation
  if task.held_out is not None or e.suite or e.every_steps or not training:
    held_out = _held_out(config, task, scorer)
  stream = None
  if training or task.source is not None:
    stream = task.stream(config.seed)
  name = config.allocation.name
  allocator = allocation.make(
      name, fields.options_of(config.allocation[name],
                              allocation.REGISTRY[name].Options),
      prompts_per_step=config.prompts_per_step, budget=config.rollout_budget,
      seed=config.seed, train_on=config.allocation.train_on)
  sizes = build_lib.sizes_of(config, task.vocabulary.vocab_size)
  if training:
    build_lib.check_attention(config, sizes, jax.default_backend(), placement)
  if not config.sampling.slots:
    total = settings_lib.device_memory(jax.local_devices())
    # Of the host that has the least: all must run the same programs.
    total = -distributed.cluster().largest("memory of a device", -total)
    config = build_lib.with_slots(config, sizes, allocator, total,
                                  training=training, placement=placement)
  graph, _ = transformer.abstract(sizes)
  sampler = sampler_lib.Sampler(
      graph, sizes,
      build_lib.sampler_settings(config, allocator.max_prompts, scorer.cheap),
      stop_ids=task.stop_ids, seed=config.seed, placement=placement)
  updater = build_lib.updater_of(config, graph, sizes, placement)
  return Experiment(config, task, scorer, held_out, allocator, stream,
                    graph, sizes, sampler, updater,
                    placement)


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
