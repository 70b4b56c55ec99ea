"""Local records: errors with file and line, lengths, splits, warm start."""

import datetime
import gzip
import json

import numpy as np
import pytest

from tasks import tokenizer_folders
from vigor_jax import tasks
from vigor_jax.tasks import characters, records


def write(path, rows):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
  data = ("\n".join(lines) + "\n").encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return str(path)


def good(n, offset=0):
  return [
    {"prompt": f"q{i}?", "answer": f"a{i}", "level": i % 3}
    for i in range(offset, offset + n)
  ]


def make(path, **options):
  return tasks.make({"name": "jsonl", "path": path, **options})


@pytest.mark.parametrize(
  "bad,words",
  [
    ('{"prompt": "x", ', "not a JSON record"),
    ('{"prompt": "x", "answer": NaN}', "'answer' must be a string.*float"),
    ("[]", "must be an object.*list"),
    ('"text"', "must be an object.*str"),
    ({"prompt": "x"}, r"'answer' is missing.*\['prompt'\]"),
    ({"prompt": 3, "answer": "x"}, "'prompt' must be a string, got int 3"),
    ({"prompt": "x", "answer": 7}, "'answer' must be a string, got int 7"),
    ({"prompt": "x", "answer": None}, "'answer' must be a string, got NoneType"),
    ({"prompt": "x", "answer": ""}, "'answer' is empty"),
    ({"prompt": "x", "answer": " \n"}, "'answer' is empty"),
    ({"prompt": "", "answer": "x"}, "'prompt' is empty"),
    ({"prompt": "x", "answer": "y", "completion": 1}, "'completion' must be"),
    ({"prompt": "x\ud83d", "answer": "y"}, "'prompt' is no text.*surrogate"),
    ({"prompt": "x", "answer": "\ude00"}, "'answer' is no text.*surrogate"),
    ("[" * 100_000, "not a JSON record"),
  ],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_a_bad_record_names_file_and_physical_line(tmp_path, bad, words, name):
  rows = [*good(1), "", "   ", bad, *good(2, 5)]
  path = write(tmp_path / name, rows)
  with pytest.raises(records.DataError, match=f"{name}:4: .*{words}"):
    make(path)
  task = make(path, skip_malformed=True, held_out_share=0.0)
  assert task.counts["train/malformed"] == 1
  assert task.counts["train/records"] == 4
  assert task.stream(0).num_examples == 3
  assert task.counts_text() == ["train: 4 records, 1 malformed, 3 prompts"]


def test_bytes_that_are_no_text(tmp_path):
  path = tmp_path / "data.jsonl"
  path.write_bytes(b'{"prompt": "q", "answer": "a"}\n{"prompt": "\xff"}\n')
  with pytest.raises(records.DataError, match="data.jsonl:2: not a JSON"):
    make(str(path))


def test_files_of_other_systems(tmp_path):
  """A byte order mark, CRLF line ends, separators inside of strings."""
  rows = [*good(3), {"prompt": "a\u2028b\x85c", "answer": "\u00e9\U0001f600"}]
  lines = [json.dumps(row, ensure_ascii=False) for row in rows]
  text = "\r\n".join(["", *lines, "", ""])
  path = tmp_path / "data.jsonl"
  path.write_bytes(b"\xef\xbb\xbf" + text.encode())
  prompts = make(str(path), held_out_share=0.0).source.prompts
  assert prompts.texts == [row["prompt"] for row in rows]
  assert prompts.answers == [row["answer"] for row in rows]
  path.write_bytes(b"\xef\xbb\xbf" + f"{text}[]\r\n".encode())
  with pytest.raises(records.DataError, match="data.jsonl:7: .*object"):
    make(str(path))
  path = tmp_path / "data.json"
  path.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=1).encode())
  assert make(str(path), held_out_share=0.0).source.size == 4


@pytest.mark.parametrize(
  "name,damage",
  [
    ("data.jsonl.gz", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    ("data.jsonl.gz", lambda path: path.write_bytes(b'{"prompt": "q"}\n')),
    ("data.parquet", lambda path: path.write_bytes(b"PAR1 no more")),
  ],
  ids=["cut", "not packed", "no footer"],
)
def test_a_damaged_file_is_named(tmp_path, name, damage):
  path = tmp_path / name
  write(path, good(20))
  damage(path)
  for skip in (False, True):  # only records may be skipped
    with pytest.raises(records.DataError, match=f"{name}: cannot be read: "):
      make(str(path), skip_malformed=skip)


def test_a_pattern_leaves_out_folders(tmp_path):
  write(tmp_path / "a.jsonl", good(3))
  (tmp_path / "b.jsonl").mkdir()
  task = make(str(tmp_path / "*"), held_out_share=0.0)
  assert task.source.size == 3


def test_over_long_prompts_are_measured_on_the_rendered_text(tmp_path):
  """Exactly max is kept, max + 1 is dropped, answers stay aligned."""
  # "Question: {prompt}\nAnswer:" adds 18 bytes.
  rows = [
    {"prompt": "x" * n, "answer": f"a{n}", "n": n} for n in (1, 13, 2, 12, 30, 3)
  ]
  path = write(tmp_path / "data.jsonl", rows)
  task = make(
    path, template="plain", max_prompt_length=30, held_out_share=0.0
  )
  prompts = task.stream(0).peek(4)
  assert task.counts["train/too_long"] == 2
  assert task.counts["train/prompts"] == task.stream(0).num_examples == 4
  kept = sorted(m["n"] for m in prompts.metadata)
  assert kept == [1, 2, 3, 12]
  for i, metadata in enumerate(prompts.metadata):
    n = metadata["n"]
    assert prompts.answers[i] == f"a{n}"
    assert prompts.texts[i] == "Question: " + "x" * n + "\nAnswer:"
    assert len(prompts.tokens[i]) == n + 18 <= 30
    assert task.vocabulary.decode(prompts.tokens[i]) == prompts.texts[i]


def test_all_prompts_too_long(tmp_path):
  path = write(tmp_path / "data.jsonl", good(3))
  with pytest.raises(ValueError, match="all 3 train.*length=2.*has 3 tokens"):
    make(path, max_prompt_length=2, held_out_share=0.0)


def test_metadata_reaches_the_reward(tmp_path):
  rows = [{"prompt": "q", "answer": "a", "tests": [[1, 2]], "level": 3}]
  task = make(write(tmp_path / "d.jsonl", rows), held_out_share=0.0)
  assert task.stream(0).peek(1).metadata == [{"tests": [[1, 2]], "level": 3}]
  assert task.reward == "exact"


def test_data_that_changed_are_read_again(tmp_path):
  """In one process, too: a task's name depends on all of its records."""
  names = set()
  for extra in ({}, {"level": 7}, {"level": 8}, {"completion": "so"}):
    row = {"prompt": "x", "answer": "y", **extra}
    task = make(write(tmp_path / "data.jsonl", [row]), held_out_share=0.0)
    assert task.source.prompts.metadata[0].get("level") == extra.get("level")
    _, [ids] = task.sft_batches(0, 0, 1)
    assert task.vocabulary.decode(ids) == extra.get("completion", "y")
    names.add(task.name)
  assert len(names) == 4


def test_columns_that_json_lacks_arrive_as_text(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  day = datetime.date(2025, 3, 1)
  table = pyarrow.table({"prompt": ["x"], "answer": ["y"], "day": [day]})
  parquet.write_table(table, tmp_path / "data.parquet")
  task = make(str(tmp_path / "data.parquet"), held_out_share=0.0)
  assert task.source.prompts.metadata == [{"day": "2025-03-01"}]


def test_held_out_records_by_text(tmp_path):
  rows = good(200)
  rows += rows[:50]  # doubles must fall on the side of their first copy
  path = write(tmp_path / "data.jsonl", rows)
  task = make(path, held_out_share=0.3)
  train = task.stream(0).peek(task.stream(0).num_examples)
  held_out = task.evaluation(10**6)
  assert not set(train.texts) & set(held_out.texts)
  assert len(train) + len(held_out) == 250
  assert 45 <= len(held_out) <= 105
  assert make(path, held_out_share=0.3).evaluation(9).texts == held_out.texts[:9]


def test_evaluation_from_its_own_file(tmp_path):
  path = write(tmp_path / "train.jsonl", good(5))
  held_out = write(tmp_path / "test.jsonl", good(3, 10))
  task = make(path, eval_path=held_out)
  assert task.evaluation(8).texts == ["q10?", "q11?", "q12?"]
  assert task.stream(0).num_examples == 5
  assert task.counts["evaluation/prompts"] == 3


def test_no_evaluation_split(tmp_path):
  path = write(tmp_path / "train.jsonl", good(5))
  with pytest.raises(ValueError, match="no evaluation part"):
    make(path, held_out_share=0.0).evaluation(3)


def test_folders_patterns_and_parquet(tmp_path):
  import pyarrow
  import pyarrow.parquet

  write(tmp_path / "a.jsonl", good(2))
  write(tmp_path / "b.jsonl.gz", good(3, 2))
  table = pyarrow.Table.from_pylist(good(2, 5))
  pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
  (tmp_path / "README.md").write_text("not data")
  task = make(str(tmp_path), held_out_share=0.0)
  texts = set(task.stream(0).peek(7).texts)
  assert texts == {f"q{i}?" for i in range(7)}
  task = make(str(tmp_path / "*.jsonl"), held_out_share=0.0)
  assert task.stream(0).num_examples == 2
  bad = pyarrow.Table.from_pylist([*good(1), {"prompt": "x", "answer": ""}])
  pyarrow.parquet.write_table(bad, tmp_path / "c.parquet")
  with pytest.raises(records.DataError, match="c.parquet:row 2: .*empty"):
    make(str(tmp_path))
  with pytest.raises(ValueError, match="no data at.*nowhere"):
    make(str(tmp_path / "nowhere"))


def test_a_json_array_is_read_item_by_item(tmp_path):
  path = tmp_path / "data.json"
  path.write_text(json.dumps(good(3), indent=1))
  task = make(str(path), held_out_share=0.0)
  assert task.stream(0).num_examples == 3
  path.write_text(json.dumps([*good(1), [], {"prompt": "x", "answer": "y"}]))
  with pytest.raises(records.DataError, match="data.json:item 2: .*object"):
    make(str(path))
  path.write_text("[1, ")
  with pytest.raises(records.DataError, match="data.json: not a JSON array"):
    make(str(path))
  write(path, good(2))  # lines after all
  assert make(str(path), held_out_share=0.0).stream(0).num_examples == 2
  path.write_text("[]")
  with pytest.raises(ValueError, match="no usable record"):
    make(str(path))


def test_warm_start_imitates_completions_or_answers(tmp_path):
  rows = [{"prompt": "q", "answer": "a", "completion": "so: a"}, *good(3)]
  rows.append({"prompt": "long", "answer": "b" * 40})
  task = make(
    write(tmp_path / "d.jsonl", rows),
    held_out_share=0.0,
    max_completion_length=20,
  )
  assert task.counts["warm_start/left_out"] == 1
  pairs = set()
  for step in range(4):  # 4 usable rows: one epoch is one step of 4
    prompts, completions = task.sft_batches(0, step, 4)
    assert all(c[-1] == characters.EOS_ID for c in completions)
    decode = task.vocabulary.decode
    pairs = {(decode(p), decode(c)) for p, c in zip(prompts, completions)}
    assert pairs == {("q", "so: a"), ("q0?", "a0"), ("q1?", "a1"), ("q2?", "a2")}


def test_epochs_are_permutations(tmp_path):
  task = make(write(tmp_path / "d.jsonl", good(20)), held_out_share=0.0)
  stream = task.stream(3)
  for _ in range(3):
    prompts = stream.peek(20)
    assert sorted(prompts.texts) == sorted(f"q{i}?" for i in range(20))
    stream.advance(np.ones(20, bool))


def test_with_a_pretrained_tokenizer(tmp_path):
  folder = tokenizer_folders.llama_like(tmp_path / "tok")
  path = write(tmp_path / "d.jsonl", good(4))
  task = make(path, tokenizer=folder, template="chat", held_out_share=0.0)
  prompts = task.stream(0).peek(4)
  for tokens, text in zip(prompts.tokens, prompts.texts):
    assert tokens.tolist() == task.vocabulary.encode(text)
    assert tokens.tolist().count(task.vocabulary.bos_id) == 1
  assert task.stop_ids == task.vocabulary.eos_ids and len(task.stop_ids) == 2
  _, completions = task.sft_batches(0, 0, 2)
  assert all(c[-1] == task.vocabulary.eos_id for c in completions)


def test_a_chat_template_needs_a_tokenizer(tmp_path):
  path = write(tmp_path / "d.jsonl", good(2))
  with pytest.raises(ValueError, match="'chat'.*set a tokenizer.*plain"):
    make(path, template="chat")


@pytest.mark.parametrize(
  "options,words",
  [
    ({"path": ""}, "path must name"),
    ({"template": "qwen"}, "template must be one of.*qwen_boxed"),
    ({"max_prompt_length": 0}, "max_prompt_length must be >= 1"),
    ({"held_out_share": 1.0}, r"held_out_share.*\[0, 1\)"),
    ({"stop_strings": "a||b"}, "stop_strings"),
    ({"eval_pth": "x"}, "did you mean 'eval_path'"),
  ],
)
def test_bad_options(options, words):
  with pytest.raises(ValueError, match=words):
    tasks.make({"name": "jsonl", "path": "d.jsonl"} | options)


def test_stop_strings_of_the_task(tmp_path):
  path = write(tmp_path / "d.jsonl", good(4))
  task = make(path, stop_strings="\n\n|Question:", held_out_share=0.0)
  assert task.stop_strings == ("\n\n", "Question:")


def test_as_a_seqio_mixture(tmp_path):
  """Two tasks in one seqio Mixture, cut and padded by a feature converter."""
  import seqio

  a = make(write(tmp_path / "a.jsonl", good(6)), held_out_share=0.0)
  b = make(write(tmp_path / "b.jsonl", good(6, 50)), held_out_share=0.0)
  names = [a.seqio_task.name, b.seqio_task.name]
  mixture = seqio.Mixture("test_mixture", [(n, 1.0) for n in names])
  dataset = mixture.get_dataset(
    {"inputs": 8, "targets": 8},
    "train",
    shuffle=False,
    num_epochs=1,
    passthrough_features=["answer"],
  )
  seen = {row["answer"] for row in dataset.as_numpy_iterator()}
  assert {b"a0", b"a50"} <= seen
