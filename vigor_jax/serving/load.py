"""From a checkpoint to an engine: a run, a Hugging Face folder, a .gguf."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from vigor_jax import checkpoints
from vigor_jax import config as config_lib
from vigor_jax import experiment
from vigor_jax import workdirs
from vigor_jax.policy import build
from vigor_jax.policy import families
from vigor_jax.policy import transformer
from vigor_jax.policy import weights
from vigor_jax.sampling import settings as settings_lib
from vigor_jax.serving import servicer as servicer_lib
from vigor_jax.tasks import templates
from vigor_jax.tasks import vocabularies

# Where neither the options nor a run's configuration say.
MAX_PROMPT, MAX_NEW_TOKENS, CHUNK = 1024, 512, 8
# More slots than this are of no use to a few clients.
MOST_SLOTS = 64


@dataclasses.dataclass(frozen=True)
class Options:
  """How a policy is served; see `vigor_jax.serve` for their meaning."""

  checkpoint: str
  slots: int = 0
  max_prompt: int = 0
  max_new_tokens: int = 0
  chunk: int = CHUNK
  dtype: str = ""
  template: str = "raw"
  seed: int = 0
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  def check(self) -> None:
    """Raises ValueError for what cannot be, naming the option."""
    for name in ("slots", "max_prompt", "max_new_tokens", "top_k", "seed",
                 "temperature"):
      if getattr(self, name) < 0:
        raise ValueError(f"--{name} must be at least 0, got "
                         f"{getattr(self, name)}")
    if self.seed >= 2**31:
      raise ValueError(f"--seed must be below 2**31, got {self.seed}")
    if self.chunk < 1:
      raise ValueError(f"--chunk must be at least 1, got {self.chunk}")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"--top_p must lie in (0, 1], got {self.top_p}")
    if not 0 <= self.min_p < 1:
      raise ValueError(f"--min_p must lie in [0, 1), got {self.min_p}")
    try:
      templates.check(self.template)
    except ValueError as error:
      raise ValueError(f"--{error}") from error


@dataclasses.dataclass(frozen=True)
class Policy:
  """What is read from a checkpoint.

  Attributes:
    sizes: of the model; params: its parameters.
    vocabulary, stop_ids, stop_strings: how its tokens are read.
    max_prompt, max_new_tokens: tokens of a prompt and of a completion.
  """

  sizes: transformer.Sizes
  params: Any
  vocabulary: Any
  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...]
  max_prompt: int
  max_new_tokens: int


def policy(options: Options) -> Policy:
  """Reads a checkpoint.

  Raises:
    ValueError: nothing of the kind is there, or it is damaged.
  """
  path = options.checkpoint
  if not workdirs.is_remote(path) and not os.path.exists(path):
    raise ValueError(f"--checkpoint: {path!r} does not exist")
  if families.is_pretrained(path):
    return _pretrained(path, options.dtype)
  return _trained(path, options.dtype)


def _pretrained(path: str, dtype: str) -> Policy:
  if not families.has_tokenizer(path):
    raise ValueError(f"--checkpoint: {path!r} has no tokenizer.json, so its "
                     "prompts cannot be read")
  on_cpu = jax.default_backend() == "cpu"
  dtype = dtype or ("float32" if on_cpu else "bfloat16")
  vocabulary = vocabularies.load(path)
  _, sizes = weights.read_sizes(path, dtype=dtype, param_dtype=dtype)
  params = weights.from_checkpoint(path, sizes)
  return Policy(sizes, params, vocabulary, vocabulary.eos_ids, (), MAX_PROMPT,
                MAX_NEW_TOKENS)


def _trained(path: str, dtype: str) -> Policy:
  config = _config_of(path)
  vocabulary, stop_ids, stop_strings = experiment.reading_of(config)
  sizes = build.sizes_of(config, vocabulary.vocab_size)
  if dtype:
    sizes = dataclasses.replace(sizes, dtype=dtype)
  params, _ = checkpoints.restore_params(path, transformer.abstract(sizes)[1])
  return Policy(sizes, params, vocabulary, tuple(stop_ids), stop_strings,
                max(config.sampling.prompt_buckets),
                config.sampling.max_new_tokens)


def _config_of(path: str):
  """The configuration of the run that a folder, or a step in it, is of."""
  name = "config.json"
  whole = path if workdirs.is_remote(path) else os.path.abspath(path)
  whole = whole.rstrip("/")
  for folder in (whole, os.path.dirname(whole),
                 os.path.dirname(os.path.dirname(whole))):
    if workdirs.exists(folder, name):
      return config_lib.from_json(workdirs.read(folder, name),
                                  workdirs.join(folder, name))
  raise ValueError(
      f"--checkpoint: {path!r} is neither a run's folder (or a step in its "
      "checkpoints), nor a Hugging Face folder with safetensors, nor a .gguf "
      "file")


def buckets(longest: int) -> tuple[int, ...]:
  """Padded prompt lengths: powers of two from 16, and the longest itself."""
  powers, n = [], 16
  while n < longest:
    powers.append(n)
    n *= 2
  return (*powers, longest)


def settings_of(options: Options, read: Policy) -> settings_lib.Settings:
  """The engine's static shapes; slots from the memory where they are open."""
  longest = options.max_new_tokens or read.max_new_tokens

  def make(slots: int) -> settings_lib.Settings:
    return settings_lib.Settings(
        slots=slots, chunk=min(options.chunk, longest), max_new_tokens=longest,
        prompt_buckets=buckets(options.max_prompt or read.max_prompt),
        prefill_batch=1, prefixes=slots, queue=slots,
        cache_dtype=read.sizes.dtype)

  if options.slots:
    return make(options.slots)
  memory = settings_lib.memory_left(
      settings_lib.device_memory(jax.local_devices()), read.sizes, copies=1)
  return make(settings_lib.largest_slots(make, read.sizes, memory, MOST_SLOTS))


def devices_line() -> str | None:
  """Says that one device of several is used; None where there is one."""
  count = jax.local_device_count()
  if count == 1:
    return None
  return (f"1 of {count} devices is used: a policy is served from one, with "
          "weights and cache whole on it")


def engine(options: Options, read: Policy):
  """The engine of a policy, not warmed up."""
  from vigor_jax.sampling import jetstream_engine  # JetStream, and TensorFlow.
  graph, _ = transformer.abstract(read.sizes)
  return jetstream_engine.Engine(
      graph, read.sizes, read.params, settings_of(options, read),
      vocabulary=read.vocabulary, stop_ids=read.stop_ids, seed=options.seed,
      temperature=options.temperature, top_k=options.top_k,
      top_p=options.top_p, min_p=options.min_p)


def rules(options: Options, read: Policy, settings: settings_lib.Settings
          ) -> servicer_lib.Rules:
  """What requests may hold.

  Raises:
    ValueError: the template needs a chat template that the vocabulary lacks.
  """
  try:
    templates.render(options.template, "", read.vocabulary)
  except ValueError as error:
    raise ValueError(f"--template: {error}") from error
  return servicer_lib.Rules(
      read.vocabulary, max_prompt=settings.prompt_buckets[-1],
      max_new_tokens=settings.max_new_tokens, vocab=read.sizes.vocab,
      template=options.template, stop_strings=read.stop_strings)
