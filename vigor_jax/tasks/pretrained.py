"""Pretrained tokenizers: a HF tokenizer.json, or the one inside a GGUF file.

Both become a `TokenizerVocabulary` over the `tokenizers` library. A prompt is
rendered to its full text first, special tokens included (by the model's own
chat template, or raw), and that text is tokenised once: what is measured,
shown and fed to the model is the same string, and a BOS cannot be doubled.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from vigor_jax.tasks import characters, files

# Pre-tokenizers of the byte-level BPE families that GGUF names by a word.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GGUF_SPLITS = {
  "smollm": None,  # single digits, then GPT-2's own split
  "qwen2": _SPLIT % "",
  "llama-bpe": _SPLIT % "{1,3}",
}
_GGUF_CONTROL = 3  # token_type of special tokens


class TokenizerVocabulary:
  """A pretrained tokenizer; see `characters.Vocabulary` for the attributes.

  Attributes:
    bos_id: prepended once to every prompt; None where the family has none.
    pad_id: 0 only by chance: masks come from lengths, never from this.
    chat_template: the model's own jinja template, or None.
  """

  unk_id = None  # byte-level vocabularies know every text

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    *,
    eos_ids: Sequence[int],
    bos_id: int | None = None,
    pad_id: int | None = None,
    chat_template: str | None = None,
    special_tokens: Mapping[str, str] | None = None,
  ):
    """Wraps a tokenizer.

    Args:
      tokenizer: its post-processor is not used, so it adds nothing.
      eos_ids: every id that ends a completion, the tokenizer's own first.
      bos_id: only where the family starts its prompts with one.
      pad_id: defaults to the first EOS.
      chat_template: jinja source.
      special_tokens: "bos_token" and so on, for the chat template.
    """
    self.tokenizer = tokenizer
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    self.vocab_size = size
    for i in [*eos_ids, *(x for x in (bos_id, pad_id) if x is not None)]:
      if not 0 <= i < size:
        raise ValueError(f"special id {i} is outside the vocabulary of {size}")
    if not eos_ids:
      raise ValueError("a vocabulary needs at least one EOS id")
    self.eos_ids = tuple(dict.fromkeys(int(i) for i in eos_ids))
    self.eos_id = self.eos_ids[0]
    self.bos_id = bos_id
    self.pad_id = self.eos_id if pad_id is None else pad_id
    self.chat_template = chat_template
    self.special_tokens = dict(special_tokens or {})
    self._compiled = None

  @functools.cached_property
  def fingerprint(self) -> str:
    """Equal for vocabularies that give equal ids."""
    text = f"{self.eos_ids} {self.bos_id} {self.tokenizer.to_str()}"
    return hashlib.sha256(text.encode()).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Ids of a text; special tokens written in it become their ids."""
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    return self.decode_batch(np.asarray(ids)[None], [len(ids)])[0]

  def decode_batch(self, tokens, lengths) -> list[str]:
    rows = []
    for row, n in zip(np.asarray(tokens).tolist(), lengths):
      stop = next((i for i, t in enumerate(row[:n]) if t in self.eos_ids), n)
      rows.append(row[:stop])
    if np.max(tokens, initial=0) >= self.vocab_size:
      return [self._with_strays(row) for row in rows]
    return self.tokenizer.decode_batch(rows, skip_special_tokens=False)

  def _with_strays(self, row: list[int]) -> str:
    """Decodes ids of a model's padding as strays; tokenizers hides them."""
    parts = [[]]
    for i in row:
      if i < self.vocab_size:
        parts[-1].append(i)
      else:
        parts.append([])
    texts = self.tokenizer.decode_batch(parts, skip_special_tokens=False)
    return characters.STRAY.join(texts)

  def with_one_bos(self, text: str) -> str:
    """The text with exactly one BOS in front where the family has one."""
    if self.bos_id is None:
      return text
    bos = self.tokenizer.id_to_token(self.bos_id)
    while text.startswith(bos):
      text = text[len(bos) :]
    return bos + text

  def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as the model's own template writes it.

    Ends where the assistant's turn begins. `strftime_now` is not offered: a
    run that resumes on another day must see the same prompts.

    Raises:
      ValueError: there is no template, or it refuses the conversation.
    """
    if self.chat_template is None:
      raise ValueError(
        "this tokenizer has no chat template: choose a prompt template that is"
        " plain text"
      )
    if self._compiled is None:
      self._compiled = _jinja_environment().from_string(self.chat_template)
    try:
      text = self._compiled.render(
        messages=list(messages),
        add_generation_prompt=True,
        tools=None,
        **self.special_tokens,
      )
    except jinja2.TemplateError as error:
      raise ValueError(f"the chat template refused: {error}") from error
    return self.with_one_bos(text)


def _jinja_environment():
  """As HF applies chat templates: sandboxed, blocks trimmed."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[jinja2.ext.loopcontrols],
  )

  def refuse(message):
    raise jinja2.TemplateError(message)

  environment.globals["raise_exception"] = refuse
  environment.filters["tojson"] = lambda x, **options: json.dumps(
    x, ensure_ascii=False, **options
  )
  return environment


def _read_json(folder: str, name: str) -> dict[str, Any]:
  path = os.path.join(folder, name)
  if not files.exists(path):
    return {}
  with files.open_binary(path) as f:
    text = f.read()
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path}: damaged: not JSON ({error})") from error
  if not isinstance(values, dict):
    raise ValueError(
      f"{path}: damaged: expected an object, got a {type(values).__name__}"
    )
  return values


def _token_text(token: Any) -> str | None:
  """A special token, which HF writes as a string or as {"content": ...}."""
  return token.get("content") if isinstance(token, Mapping) else token


def from_folder(folder: str) -> TokenizerVocabulary:
  """Reads tokenizer.json and what lies beside it.

  EOS ids come from the tokenizer and from the model's generation_config.json
  or config.json, since chat models end a turn with another token than the
  base model ends a text.

  Raises:
    ValueError: no tokenizer.json, a damaged file, or no EOS anywhere.
  """
  path = os.path.join(folder, "tokenizer.json")
  if not files.exists(path):
    raise ValueError(f"no tokenizer.json in {folder!r}")
  with files.open_binary(path) as f:
    text = f.read()
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(text)
  except Exception as error:  # The library raises nothing narrower.
    raise ValueError(
      f"{path}: damaged, or of another kind: the package tokenizers"
      f" {tokenizers.__version__} cannot read it ({error})"
    ) from error
  config = _read_json(folder, "tokenizer_config.json")
  special = {
    name: _token_text(config[name])
    for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    if config.get(name) is not None
  }

  eos_ids = []
  if "eos_token" in special:
    eos_ids.append(_token_id(tokenizer, special["eos_token"], path))
  for name in ("generation_config.json", "config.json"):
    more = _read_json(folder, name).get("eos_token_id")
    if more is not None:
      eos_ids += more if isinstance(more, list) else [more]
  if not eos_ids:
    raise ValueError(f"{folder!r} names no EOS token in any of its configs")

  bos_id = None
  if "bos_token" in special:
    bos = _token_id(tokenizer, special["bos_token"], path)
    # Some families name a BOS that they never use: believe the flag, and
    # without one, what the tokenizer itself does to a text.
    adds = config.get("add_bos_token")
    if adds is None:
      adds = tokenizer.encode("a").ids[0] == bos
    bos_id = bos if adds else None
  pad = special.get("pad_token")
  return TokenizerVocabulary(
    tokenizer,
    eos_ids=eos_ids,
    bos_id=bos_id,
    pad_id=None if pad is None else _token_id(tokenizer, pad, path),
    chat_template=_chat_template(folder, config),
    special_tokens=special,
  )


def _token_id(tokenizer: tokenizers.Tokenizer, token: str, path: str) -> int:
  i = tokenizer.token_to_id(token)
  if i is None:
    raise ValueError(f"special token {token!r} is not in {path}")
  return i


def _chat_template(folder: str, config: Mapping[str, Any]) -> str | None:
  path = os.path.join(folder, "chat_template.jinja")
  if files.exists(path):
    with files.open_binary(path) as f:
      return f.read().decode()
  template = config.get("chat_template")
  if isinstance(template, list):  # several, by name
    by_name = {t["name"]: t["template"] for t in template}
    return by_name.get("default")
  return template


def from_gguf(path: str) -> TokenizerVocabulary:
  """Rebuilds the byte-level BPE tokenizer from a GGUF file's metadata.

  Raises:
    ValueError: a damaged file, or its tokenizer is of another kind.
  """
  import gguf

  try:
    fields = gguf.GGUFReader(path).fields
  except Exception as error:  # Of many kinds, by where the damage is.
    raise ValueError(
      f"{path}: not a GGUF file, or cut off ({type(error).__name__}: {error})"
    ) from error

  def read(key):
    try:
      return fields[key].contents() if key in fields else None
    except (ValueError, IndexError) as error:
      raise ValueError(f"{path}: damaged: {key}: {error}") from error

  def needed(key):
    if key not in fields:
      raise ValueError(f"{path}: damaged: its metadata lack {key}")
    return read(key)

  kind = read("tokenizer.ggml.model")
  family = read("tokenizer.ggml.pre")
  if kind != "gpt2" or family not in _GGUF_SPLITS:
    raise ValueError(
      f"{path}: tokenizer {kind!r} / {family!r} is not supported; supported:"
      f" 'gpt2' with {sorted(_GGUF_SPLITS)}"
    )
  tokens = needed("tokenizer.ggml.tokens")
  types = needed("tokenizer.ggml.token_type")
  merges = [tuple(m.split(" ")) for m in needed("tokenizer.ggml.merges")]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  try:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
  except Exception as error:  # The library raises nothing narrower.
    raise ValueError(
      f"{path}: damaged: its tokens and merges do not agree ({error})"
    ) from error
  split = _GGUF_SPLITS[family]
  if split is None:
    first = pre_tokenizers.Digits(individual_digits=True)
  else:
    first = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      first,
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  controls = [t for t, kind in zip(tokens, types) if kind == _GGUF_CONTROL]
  tokenizer.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in controls]
  )
  ids = {
    name: read(f"tokenizer.ggml.{key}_token_id")
    for name, key in [("bos", "bos"), ("pad", "padding")]
  }
  ids["eos"] = needed("tokenizer.ggml.eos_token_id")
  for name, i in ids.items():
    if i is not None and not 0 <= i < len(tokens):
      raise ValueError(
        f"{path}: damaged: the {name} token is {i} of {len(tokens)} tokens"
      )
  special = {
    f"{k}_token": tokens[i] for k, i in ids.items() if i is not None
  }
  return TokenizerVocabulary(
    tokenizer,
    eos_ids=[ids["eos"]],
    bos_id=ids["bos"] if read("tokenizer.ggml.add_bos_token") else None,
    pad_id=ids["pad"],
    chat_template=read("tokenizer.chat_template"),
    special_tokens=special,
  )
