"""Small tokenizers of the three families, written to folders by tests."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
  "the quick brown fox jumps over the lazy dog",
  "question answer system user assistant",
  "what is 12 + 7 ? the answer is 19 . stop here",
] * 3

CHATML = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
  "<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = (
  "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
  "{{ eos_token }}{% endfor %}"
)


def train(special):
  """A byte-level BPE of a few hundred ids with these special tokens last."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=330,
    show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  tokenizer.train_from_iterator(CORPUS, trainer)
  tokenizer.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in special]
  )
  return tokenizer


def write(folder, tokenizer, config, generation=None, jinja=None):
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  if generation is not None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
  if jinja is not None:
    (folder / "chat_template.jinja").write_text(jinja)
  return str(folder)


def qwen_like(folder):
  """No BOS; a turn ends with another token than a text."""
  tokenizer = train(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
  ids = {t: tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>")}
  return write(
    folder,
    tokenizer,
    {
      "bos_token": None,
      "eos_token": "<|im_end|>",
      "pad_token": {"content": "<|endoftext|>", "special": True},
      "chat_template": CHATML,
    },
    {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
  )


def llama_like(folder):
  """A BOS that the tokenizer's post-processor adds, no flag in the config."""
  tokenizer = train(["<|begin|>", "<|end|>", "<|eot|>"])
  begin = tokenizer.token_to_id("<|begin|>")
  tokenizer.post_processor = processors.TemplateProcessing(
    single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
  )
  return write(
    folder,
    tokenizer,
    {"bos_token": "<|begin|>", "eos_token": "<|eot|>"},
    {"eos_token_id": tokenizer.token_to_id("<|end|>")},
    jinja=WITH_BOS,
  )
