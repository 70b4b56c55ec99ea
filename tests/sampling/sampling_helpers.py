"""Small models and drawing loops shared by the tests of the sampler."""

import dataclasses

import jax
import numpy as np

from vigor_jax.policy import optimizer, packing, transformer, update
from vigor_jax.sampling import sampler as sampler_lib

SIZES = transformer.Sizes(
  layers=2,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  ffn=48,
  vocab=23,
  qkv_bias=True,
  tied=True,
)
STOP = (1,)


def model(sizes=SIZES, seed=0, scale=4.0):
  """(graph, params) with peaked output distributions.

  A fresh model is close to uniform; a larger embedding makes its tied
  logits differ, so that wrong attention would change tokens and log-probs.
  """
  graph, params = transformer.create(sizes, seed)
  params.embed[...] = params.embed[...] * scale
  return graph, params


def settings(**changes):
  return dataclasses.replace(
    sampler_lib.Settings(
      slots=4,
      chunk=3,
      max_new_tokens=9,
      prompt_buckets=(4, 8),
      prefill_batch=2,
      prefixes=8,
      queue=32,
    ),
    **changes,
  )


def make(graph, sizes=SIZES, *, seed=7, stop_ids=STOP, **changes):
  return sampler_lib.Sampler(
    graph, sizes, settings(**changes), stop_ids=stop_ids, seed=seed
  )


def prompts(count=6, vocab=SIZES.vocab, longest=8):
  """Prompts of lengths 1 .. longest, in mixed order."""
  rng = np.random.default_rng(0)
  lengths = [(3 * i) % longest + 1 for i in range(count)]
  return [rng.integers(2, vocab, n).astype(np.int32) for n in lengths]


def rollouts(count=6, each=4):
  """(prefix, position, sample) of `each` rollouts per prompt."""
  prefix = np.repeat(np.arange(count), each)
  return prefix, 1000 + prefix, np.tile(np.arange(each), count)


def gather(batches):
  """{(group, sample): (tokens, logprobs, processed, truncated, end, slot)}."""
  out = {}
  for rows in batches:
    for i, key in enumerate(zip(rows.group.tolist(), rows.sample.tolist())):
      assert key not in out, f"{key} was handed out twice"
      n = rows.lengths[i]
      out[key] = dict(
        tokens=rows.tokens[i, :n],
        logprobs=rows.logprobs[i, :n],
        processed=rows.processed_logprobs[i, :n],
        truncated=bool(rows.truncated[i]),
        end_chunk=int(rows.end_chunk[i]),
        slot=int(rows.slot[i]),
      )
  return out


def draw(sampler, params, *, step=0, texts=None, requests=None, **options):
  """One step: prefill, one or several requests with a barrier, decode."""
  texts = prompts() if texts is None else texts
  sampler.begin(step)
  sampler.prefill(params, np.arange(len(texts)), texts)
  batches = []
  for prefix, position, sample in requests or [rollouts(len(texts))]:
    sampler.request(prefix, position, sample, **options)
    batches += list(sampler.decode(params))
  return gather(batches)


def same(a, b, atol=1e-5):
  """Tokens equal, log-probs to `atol`."""
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_array_equal(a[key]["tokens"], b[key]["tokens"], str(key))
    assert a[key]["truncated"] == b[key]["truncated"], key
    for name in ("logprobs", "processed"):
      np.testing.assert_allclose(
        a[key][name], b[key][name], atol=atol, rtol=0, err_msg=str(key)
      )


def trainer_logprobs(graph, params, texts, drawn, temperature=1.0):
  """{(group, sample): log-probs} by the trainer's packed forward."""
  keys = sorted(drawn)
  group = np.array([g for g, _ in keys])
  lengths = np.array([len(drawn[k]["tokens"]) for k in keys])
  tokens = np.zeros((len(keys), lengths.max()), np.int32)
  old = np.zeros(tokens.shape, np.float32)
  for i, key in enumerate(keys):
    tokens[i, : lengths[i]] = drawn[key]["tokens"]
    old[i, : lengths[i]] = drawn[key]["logprobs"]
  row = max(len(t) for t in texts) + tokens.shape[1] + 4
  packed, used = packing.pack(
    group,
    texts,
    tokens,
    lengths,
    np.ones(len(keys), np.float32),
    np.ones(len(keys), np.float32),
    old,
    row_length=row,
    rows_per_micro=4,
    max_micro=len(keys),
  )
  updater = update.Updater(
    graph,
    update.Objective(temperature=temperature),
    optimizer.OptimizerOptions(),
  )
  scored = np.asarray(jax.device_get(updater.score(params, packed, used)))
  layout = packing.plan(
    group, lengths, np.array([len(t) for t in texts]), row
  )
  out = {}
  for i, key in enumerate(keys):
    micro, line = divmod(int(layout.row[i]), 4)
    start = int(layout.start[i])
    out[key] = scored[micro, line, start : start + lengths[i]]
  return out
