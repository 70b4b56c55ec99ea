"""Writes a trained policy as a Hugging Face folder.

    python -m vigor_jax.export --workdir=runs/RUN --to=FOLDER \
        [--step=N] [--dtype=bfloat16]

The folder holds config.json, safetensors (with an index when there are several
files) and, where the run has a pretrained tokenizer, that tokenizer's files:
transformers, vLLM or vigor_jax (`model.checkpoint`) load it.
"""

from __future__ import annotations

import argparse
import os
import sys

from vigor_jax import endings
from vigor_jax.policy import families

_DTYPES = ("float32", "bfloat16", "float16")


def export(workdir: str, folder: str, *, step: int | None = None,
           dtype: str = "") -> tuple[int, list[str]]:
  """Writes one checkpoint of a run into a folder.

  Args:
    workdir: the run's folder.
    folder: must not exist, or be empty.
    step: which checkpoint; None: the latest.
    dtype: of the weights written; empty: that of the run's parameters.

  Returns:
    (the step, names of the files written).

  Raises:
    ValueError: no run or no such step there, or a folder in use.
  """
  from vigor_jax import checkpoints
  from vigor_jax import config as config_lib
  from vigor_jax import experiment
  from vigor_jax.policy import build
  from vigor_jax.policy import transformer
  from vigor_jax.policy import weights

  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    raise ValueError(f"{workdir}: no run is there (it has no config.json)")
  weights.check_free(folder)
  steps = _steps(os.path.join(workdir, checkpoints.FOLDER))
  step = steps[-1] if step is None and steps else step
  if step not in steps:
    raise ValueError(f"{workdir}: there is no checkpoint of step {step}; there "
                     f"are {steps or 'none'}")
  config = config_lib.read_json(path)
  checkpoint = config.model.checkpoint
  # The task is built only where its vocabulary is the model's.
  known = checkpoint or config.model.sizes.vocab
  vocab = 0 if known else experiment.make_task(config).vocabulary.vocab_size
  sizes = build.sizes_of(config, vocab)

  params, _ = checkpoints.restore_params(
      os.path.join(workdir, checkpoints.FOLDER, str(step)),
      transformer.abstract(sizes)[1])
  longest = max(config.sampling.prompt_buckets) + config.sampling.max_new_tokens
  files = weights.to_folder(
      params, sizes, folder, dtype=dtype,
      config=(weights.config_of(checkpoint) if checkpoint
              else families.write_config(sizes, longest)),
      tokenizer=_tokenizer_of(config))
  return step, files


def _steps(folder: str) -> list[int]:
  """Steps whose checkpoints are whole; others have longer names."""
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return sorted(int(name) for name in names if name.isdigit())


def _tokenizer_of(config) -> str:
  """Folder or .gguf file that the run's tokenizer comes from; or ""."""
  if families.has_tokenizer(config.model.checkpoint):
    return config.model.checkpoint
  named = config.task.get("tokenizer", "")
  return os.path.dirname(named) if named.endswith(".json") else named


def main(argv) -> None:
  parser = argparse.ArgumentParser(
      prog="vigor_jax.export", description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workdir", required=True, help="the run's folder")
  parser.add_argument("--to", required=True, help="the folder to write")
  parser.add_argument("--step", type=int, help="default: the latest")
  parser.add_argument("--dtype", choices=_DTYPES, default="",
                      help="default: that of the run's parameters")
  args = parser.parse_args(argv[1:])
  with endings.one_message(at_once=True):
    step, files = export(args.workdir, args.to, step=args.step,
                         dtype=args.dtype)
  print(f"step {step} of {args.workdir} is in {args.to}: {', '.join(files)}")
  if "tokenizer.json" not in files:
    print("without a tokenizer: this run's vocabulary is not a pretrained one")


if __name__ == "__main__":
  main(sys.argv)
