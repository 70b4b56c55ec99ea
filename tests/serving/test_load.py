"""What is read from runs and pretrained folders before it is served."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from jetstream.core.proto import jetstream_pb2
from serving_helpers import save_run

from vigor_jax.policy import transformer, weights
from vigor_jax.sampling import settings as settings_lib
from vigor_jax.serving import load

Request = jetstream_pb2.DecodeRequest


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return save_run(tmp_path_factory.mktemp("loaded") / "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, root):
  """A Hugging Face folder of a small Llama, with a tokenizer that has a BOS."""
  sys.path.insert(0, str(root / "tests" / "tasks"))
  import tokenizer_folders

  parent = tmp_path_factory.mktemp("pretrained")
  tokenizer = tokenizer_folders.llama_like(parent / "tokenizer")
  sizes = transformer.Sizes(
    layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=340
  )
  _, params = transformer.create(sizes, 0)
  weights.to_folder(params, sizes, str(parent / "model"), tokenizer=tokenizer)
  return parent / "model", params


def test_a_run_brings_its_limits_and_its_reading(run):
  for path in (run.folder, f"{run.folder}/checkpoints",
               f"{run.folder}/checkpoints/1", run.folder + "/"):  # fmt: skip
    read = load.policy(load.Options(path))
    assert (read.max_prompt, read.max_new_tokens) == (40, 32)
    assert read.stop_ids == run.stop_ids and read.sizes == run.sizes
    assert read.vocabulary.encode("1+2=") == run.vocabulary.encode("1+2=")
    for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(run.params)):
      np.testing.assert_array_equal(a, b)
  read = load.policy(load.Options(run.folder, dtype="bfloat16"))
  assert read.sizes == dataclasses.replace(run.sizes, dtype="bfloat16")


def test_shapes_follow_options_then_the_run_then_memory(run, monkeypatch):
  read = load.policy(load.Options(run.folder))
  made = load.settings_of(load.Options(run.folder), read)
  assert made.prompt_buckets == (16, 32, 40) and made.max_new_tokens == 32
  assert made.slots == made.prefixes == load.MOST_SLOTS and made.chunk == 8
  made = load.settings_of(
    load.Options(run.folder, slots=5, max_prompt=16, max_new_tokens=3), read
  )
  assert (made.slots, made.prompt_buckets, made.chunk) == (5, (16,), 3)
  eight = load.settings_of(load.Options(run.folder, slots=8), read)
  weigh = 2 * 4 * read.sizes.num_params  # As stored, and as sampled from.
  total = weigh + 2 * eight.decode_bytes(read.sizes)
  monkeypatch.setattr(settings_lib, "device_memory", lambda devices: total)
  assert load.settings_of(load.Options(run.folder), read).slots == 8


def test_a_pretrained_folder_reads_text_with_its_tokenizer(folder):
  path, params = folder
  options = load.Options(str(path), max_prompt=30, slots=2)
  read = load.policy(options)
  vocabulary = read.vocabulary
  assert read.stop_ids == vocabulary.eos_ids and read.stop_strings == ()
  for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(params)):
    np.testing.assert_array_equal(a, b)
  settings = load.settings_of(options, read)
  ask = lambda rules, text: rules.check(
    Request(text_content=Request.TextContent(text=text))
  )
  ids, limit = ask(load.rules(options, read, settings), "12 + 7")
  # One BOS, whether or not the client wrote it.
  bos = vocabulary.bos_id
  assert bos is not None and ids == [bos, *vocabulary.encode("12 + 7")]
  assert limit == load.MAX_NEW_TOKENS
  written = vocabulary.tokenizer.id_to_token(bos) + "12 + 7"
  assert ask(load.rules(options, read, settings), written)[0] == ids
  chat = dataclasses.replace(options, template="chat")
  ids, _ = ask(load.rules(chat, read, settings), "12 + 7")
  assert ids.count(bos) == 1 and "12 + 7" in vocabulary.decode(ids)
  assert len(ids) > 1 + len(vocabulary.encode("12 + 7"))


def test_what_cannot_be_served_is_named(run, folder, tmp_path):
  with pytest.raises(ValueError, match="--template: .*chat template"):
    options = load.Options(run.folder, template="chat")
    read = load.policy(options)
    load.rules(options, read, load.settings_of(options, read))
  model = tmp_path / "model"
  model.mkdir()
  for name in ("config.json", "model.safetensors"):
    (model / name).write_bytes((folder[0] / name).read_bytes())
  with pytest.raises(ValueError, match="no tokenizer.json"):
    load.policy(load.Options(str(model)))
  with pytest.raises(ValueError, match="--seed must be below"):
    load.Options(run.folder, seed=2**31).check()


def test_prompt_lengths_are_padded_by_at_most_half():
  assert load.buckets(16) == (16,) and load.buckets(17) == (16, 17)
  assert load.buckets(5) == (5,)
  assert load.buckets(100) == (16, 32, 64, 100)


def test_devices_that_are_not_used_are_told(monkeypatch):
  assert load.devices_line() is None
  monkeypatch.setattr(jax, "local_device_count", lambda: 8)
  assert load.devices_line().startswith("1 of 8 devices is used")
