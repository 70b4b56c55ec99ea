"""Pretrained tokenizers, chat templates, BOS and EOS, stop strings."""

import json

import gguf
import numpy as np
import pytest

from tasks import tokenizer_folders
from vigor_jax.tasks import characters, pretrained, templates, vocabularies


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizers") / "qwen"
  return vocabularies.load(tokenizer_folders.qwen_like(folder))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizers") / "llama"
  return vocabularies.load(tokenizer_folders.llama_like(folder))


def test_a_family_without_bos(qwen):
  assert qwen.bos_id is None
  assert templates.render("raw", "what is", qwen) == "what is"
  text = templates.render("qwen_boxed", "what is 12 {x}?", qwen)
  assert text == (
    "<|im_start|>system\nPlease reason step by step, and put your final answer"
    " within \\boxed{}.<|im_end|>\n<|im_start|>user\nwhat is 12 {x}?<|im_end|>\n"
    "<|im_start|>assistant\n"
  )
  start = qwen.tokenizer.token_to_id("<|im_start|>")
  assert qwen.encode(text).count(start) == 3
  assert qwen.tokenizer.decode(qwen.encode(text), False) == text


def test_ids_of_a_models_padding_are_shown(qwen):
  """They would make "12" of 1, something unknown, 2."""
  one, two = qwen.encode("12")
  stray = qwen.vocab_size + 5
  rows = np.array([[one, stray, two, qwen.eos_id], [one, two, stray, stray]])
  assert qwen.decode_batch(rows, [4, 2]) == ["1\u00b72", "12"]
  assert qwen.decode([stray]) == "\u00b7"


@pytest.mark.parametrize("template", ["raw", "plain", "chat", "chat_boxed"])
def test_exactly_one_bos_where_the_family_has_one(llama, template):
  """The chat template writes one itself, raw prompts get theirs."""
  begin = llama.tokenizer.token_to_id("<|begin|>")
  assert llama.bos_id == begin
  for prompt in ("what is 12", "<|begin|>what"):
    ids = llama.encode(templates.render(template, prompt, llama))
    assert ids[0] == begin
    if "<|begin|>" not in prompt or template == "raw":
      assert ids.count(begin) == 1


def test_a_template_without_bos_still_gets_one(llama):
  bare = pretrained.TokenizerVocabulary(
    llama.tokenizer,
    eos_ids=llama.eos_ids,
    bos_id=llama.bos_id,
    chat_template=tokenizer_folders.CHATML,
  )
  text = bare.render_chat([{"role": "user", "content": "hi"}])
  assert text.startswith("<|begin|><|im_start|>user")


def test_a_flag_in_the_config_decides_about_bos(tmp_path):
  folder = tmp_path / "flag"
  tokenizer_folders.llama_like(folder)
  config = json.loads((folder / "tokenizer_config.json").read_text())
  config["add_bos_token"] = False
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  vocabulary = vocabularies.load(str(folder / "tokenizer.json"))
  assert vocabulary.bos_id is None
  assert vocabulary.special_tokens["bos_token"] == "<|begin|>"


def test_several_eos_ids(qwen, llama):

  def ids(v, *tokens):
    return tuple(v.tokenizer.token_to_id(t) for t in tokens)

  assert qwen.eos_ids == ids(qwen, "<|im_end|>", "<|endoftext|>")
  assert qwen.eos_id == qwen.eos_ids[0]
  assert qwen.pad_id == ids(qwen, "<|endoftext|>")[0]
  assert llama.eos_ids == ids(llama, "<|eot|>", "<|end|>")
  assert llama.pad_id == llama.eos_id
  for end in qwen.eos_ids:
    row = [*qwen.encode("the answer"), end, *qwen.encode(" more")]
    assert qwen.decode(row) == "the answer"


def test_decode_batch_keeps_to_lengths(qwen):
  ids = qwen.encode("the quick brown fox")
  tokens = np.zeros((2, len(ids) + 2), np.int32)
  tokens[:, : len(ids)] = ids
  whole, part = qwen.decode_batch(tokens, [len(ids), 1])
  assert whole == "the quick brown fox"
  assert part == qwen.tokenizer.decode(ids[:1])


def test_what_a_template_refuses_is_said(qwen):
  strict = pretrained.TokenizerVocabulary(
    qwen.tokenizer,
    eos_ids=[1],
    chat_template="{{ raise_exception('system turns are not known') }}",
  )
  with pytest.raises(ValueError, match="system turns are not known"):
    strict.render_chat([{"role": "user", "content": "x"}])
  with pytest.raises(ValueError, match="no chat template"):
    pretrained.TokenizerVocabulary(qwen.tokenizer, eos_ids=[1]).render_chat([])


def test_a_chat_template_cannot_run_code(qwen):
  hostile = pretrained.TokenizerVocabulary(
    qwen.tokenizer,
    eos_ids=[1],
    chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}",
  )
  with pytest.raises(ValueError, match="unsafe"):
    hostile.render_chat([])


def test_prompts_do_not_depend_on_the_day(qwen):
  dated = pretrained.TokenizerVocabulary(
    qwen.tokenizer,
    eos_ids=[1],
    chat_template="{% if strftime_now is defined %}{{ strftime_now('%d') }}"
    "{% else %}fixed{% endif %}",
  )
  assert dated.render_chat([]) == "fixed"


def test_a_folder_without_tokenizer_or_eos(tmp_path):
  with pytest.raises(ValueError, match="no tokenizer.json"):
    vocabularies.load(str(tmp_path))
  tokenizer = tokenizer_folders.train(["<|end|>"])
  folder = tokenizer_folders.write(tmp_path / "x", tokenizer, {})
  with pytest.raises(ValueError, match="no EOS"):
    vocabularies.load(folder)
  tokenizer_folders.write(tmp_path / "x", tokenizer, {"eos_token": "</s>"})
  with pytest.raises(ValueError, match="'</s>' is not in"):
    vocabularies.load(folder)
  with pytest.raises(ValueError, match="no file"):
    vocabularies.load(str(tmp_path / "none.gguf"))


def write_gguf(path, tokenizer, pre, specials, **ids):
  vocabulary = tokenizer.get_vocab(with_added_tokens=True)
  tokens = sorted(vocabulary, key=vocabulary.get)
  merges = json.loads(tokenizer.to_str())["model"]["merges"]
  writer = gguf.GGUFWriter(str(path), "llama")
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_merges([" ".join(m) for m in merges])
  writer.add_token_types([3 if t in specials else 1 for t in tokens])
  writer.add_eos_token_id(ids["eos"])
  writer.add_bos_token_id(ids["bos"])
  writer.add_add_bos_token(ids["add_bos"])
  writer.add_chat_template(tokenizer_folders.CHATML)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_from_gguf(tmp_path, add_bos):
  specials = ["<|im_start|>", "<|im_end|>"]
  tokenizer = tokenizer_folders.train(specials)
  bos, eos = (tokenizer.token_to_id(t) for t in specials)
  path = tmp_path / "model.gguf"
  write_gguf(
    path, tokenizer, "smollm", specials, bos=bos, eos=eos, add_bos=add_bos
  )
  vocabulary = vocabularies.load(str(path))
  assert vocabulary.eos_ids == (eos,) and vocabulary.pad_id == eos
  assert vocabulary.bos_id == (bos if add_bos else None)
  text = "the lazy dog<|im_end|>\nanswer"
  assert vocabulary.encode(text) == tokenizer.encode(text).ids
  # This family splits numbers into single digits.
  digits = [vocabulary.tokenizer.id_to_token(i) for i in vocabulary.encode("127")]
  assert digits == ["1", "2", "7"]
  chat = vocabulary.render_chat([{"role": "user", "content": "hi"}])
  bos_text = "<|im_start|>" if add_bos else ""
  assert chat.removeprefix(bos_text).startswith(
    "user\nhi" if add_bos else "<|im_start|>user\nhi"
  )


def test_another_kind_of_gguf_tokenizer(tmp_path):
  tokenizer = tokenizer_folders.train(["<s>", "</s>"])
  path = tmp_path / "model.gguf"
  write_gguf(path, tokenizer, "tekken", [], bos=1, eos=2, add_bos=False)
  with pytest.raises(ValueError, match="'tekken' is not supported.*smollm"):
    vocabularies.load(str(path))


def test_a_damaged_file_is_named(tmp_path):
  tokenizer = tokenizer_folders.train(["<s>", "</s>"])
  path = tmp_path / "model.gguf"
  write_gguf(path, tokenizer, "smollm", ["</s>"], bos=1, eos=2, add_bos=False)
  whole = path.read_bytes()
  folder = tokenizer_folders.qwen_like(tmp_path / "qwen")
  text = (tmp_path / "qwen" / "tokenizer.json").read_bytes()
  rng = np.random.default_rng(0)
  for trial in range(40):
    for file, raw in ((path, whole),
                      (tmp_path / "qwen" / "tokenizer.json", text)):  # fmt: skip
      damaged = bytearray(raw)
      if trial % 2:
        del damaged[rng.integers(len(raw)):]
      else:
        for at in rng.integers(len(raw), size=20):
          damaged[at] = rng.integers(256)
      file.write_bytes(damaged)
    for read, place in ((pretrained.from_gguf, str(path)),
                        (pretrained.from_folder, folder)):  # fmt: skip
      try:
        read(place)
      except ValueError as error:
        assert place in str(error)
  (tmp_path / "qwen" / "tokenizer.json").write_bytes(text)
  beside = tmp_path / "qwen" / "tokenizer_config.json"
  for wrong in ("{", "[]", "\xff"):
    beside.write_bytes(wrong.encode("latin-1"))
    with pytest.raises(ValueError, match="tokenizer_config.json: damaged"):
      pretrained.from_folder(folder)


BYTES = characters.ByteVocabulary()


@pytest.mark.parametrize(
  "text,stops,end",
  [
    ("abc STOP def", ["STOP"], 7),
    ("abc STOP def STOP", ["STOP"], 7),
    ("abc", ["abcd"], None),
    ("abc", ["c", "b"], 1),
    ("", ["a"], None),
    ("abc", [], None),
  ],
)
def test_stop_strings_on_bytes(text, stops, end):
  """One token a byte: the index is that of the stop string's last byte."""
  assert vocabularies.find_stop(BYTES, BYTES.encode(text), stops) == end


def test_a_stop_string_spans_tokens(qwen):
  ids = qwen.encode("the answer is 19 . stop here")
  for stop in ("answer is", "19 .", "stop here", "e a", "here"):
    end = vocabularies.find_stop(qwen, ids, [stop])
    assert stop in qwen.decode(ids[: end + 1])
    assert stop not in qwen.decode(ids[:end])


def test_scanning_on_finds_what_a_full_scan_finds(qwen):
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 300, 400).tolist()
  text = qwen.decode(ids)
  for start in range(5, 300, 13):
    stop = text[start : start + 6]
    if "\ufffd" in stop or not stop:
      continue
    full = vocabularies.find_stop(qwen, ids, [stop])
    seen = None
    for chunk in range(0, len(ids), 16):
      seen = vocabularies.find_stop(qwen, ids[: chunk + 16], [stop], chunk)
      if seen is not None:
        break
    assert seen == full


def test_an_empty_stop_string_is_refused():
  with pytest.raises(ValueError, match="must not be empty"):
    vocabularies.find_stop(BYTES, [2, 3], ["a", ""])


def test_as_a_seqio_vocabulary(qwen):
  import seqio

  from vigor_jax.tasks import seqio_tasks

  vocabulary = seqio_tasks.SeqioVocabulary(qwen)
  assert isinstance(vocabulary, seqio.Vocabulary)
  ids = vocabulary.encode("the lazy dog")
  assert vocabulary.encode_tf("the lazy dog").numpy().tolist() == ids
  padded = np.array([ids + [qwen.eos_id, 0]], np.int32)
  assert vocabulary.decode_tf(padded).numpy().tolist() == [b"the lazy dog"]
  assert vocabulary.vocab_size == qwen.vocab_size
