"""The sampler as an Engine of google-jetstream 0.2.2.

JetStream decides which request gets which slot and when; the tokens are drawn
by the programs of decode.py. The decode state is the sampler's own, with a row
of the prefix store for every slot:

    prefill    one prompt through the model, in the smallest bucket for it
    insert     its keys and values into the slot's row; the slot is active
    generate   one chunk of C decode steps for all slots

`generate` returns C tokens a slot ("speculations" in JetStream's words); those
after a row's end are marked as not valid, which ends the request. An exception
in one of JetStream's threads kills the process, so nothing here raises on what
a request holds: the server refuses before, and here it is clamped.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple, Sequence

import jax
import jax.numpy as jnp
from jetstream.engine import engine_api
from jetstream.engine import token_utils
from jetstream.engine import tokenizer_api
from jetstream.engine import tokenizer_pb2
import numpy as np

from vigor_jax.policy import transformer
from vigor_jax.sampling import decode as decode_lib
from vigor_jax.sampling import random as random_lib
from vigor_jax.sampling import state as state_lib
from vigor_jax.sampling import weights as weights_lib
from vigor_jax.sampling.settings import Settings

Array = jax.Array
# Lengths to which JetStream pads prompts; its BOS takes one place.
LENGTHS = tuple(2**i for i in range(4, 16))
LONGEST_PROMPT = LENGTHS[-1] - 1
# Stream of the addressed random numbers: not training's, not evaluation's.
STREAM = 3
# The ring's clock is set back before it runs out of 32 bits.
_LATE = 2**30


class Prefix(NamedTuple):
  """A prompt that waits for a slot.

  Attributes:
    prompt: state.Prefixes of one row.
    number: of the request, the address of its random numbers.
    limit: longest completion.
  """

  prompt: Any
  number: int
  limit: int


class DecodeState(NamedTuple):
  """Prompts [S rows] and completions of all slots."""

  prefixes: Any
  slots: Any


# ---------------------------------------------------------------- programs


def _prefill(weights, dtype, leaves, tokens: Array, length: Array):
  """state.Prefixes of the one prompt tokens[0, :length[0]]."""
  store = state_lib.empty_prefixes(weights.sizes, 1, tokens.shape[1], dtype)
  return decode_lib.prefill(weights, leaves, store, tokens, length,
                            jnp.zeros(1, jnp.int32))


def _insert(state: DecodeState, prompt, words: Array, cut: tuple
            ) -> DecodeState:
  """The state with a prompt in a slot, which then draws from it.

  Args:
    words: int32 [4]: slot, limit, number of the request, seed.
    cut: temperature, top_k, top_p, min_p.
  """
  slot, limit, number, seed = words

  def put(store, new):
    at = [0] * store.ndim
    at[-4] = slot  # Rows; stacked layers come before them.
    return jax.lax.dynamic_update_slice(store, new, at)

  kv = jax.tree.map(put, state.prefixes.kv, prompt.kv)
  prefixes = state_lib.Prefixes(
      kv, state.prefixes.lengths.at[slot].set(prompt.lengths[0]),
      state.prefixes.last_token.at[slot].set(prompt.last_token[0]))
  slots = state_lib.unpack(state.slots)
  # Nobody needs the ring: count from its start, where chunks are cheapest.
  idle = ~jnp.any(slots.active)
  time = jnp.where(idle, 0, slots.time)
  key = random_lib.row_keys(random_lib.step_key(seed, STREAM, 0),
                            number, jnp.int32(0))
  set_at = lambda array, value: array.at[slot].set(value)
  slots = slots._replace(
      time=time, written=jnp.where(idle, -1, slots.written),
      prefix=set_at(slots.prefix, slot),
      base=set_at(slots.base, prompt.lengths[0] - 1),
      began=set_at(slots.began, time),
      token=set_at(slots.token, prompt.last_token[0]),
      generated=set_at(slots.generated, 0),
      limit=set_at(slots.limit, limit),
      active=set_at(slots.active, True),
      row_key=set_at(slots.row_key, key),
      settings=tuple(map(set_at, slots.settings, cut)))
  return DecodeState(prefixes, state_lib.pack(slots))


def _generate(weights, settings: Settings, leaves, state: DecodeState,
              stop_ids: Array):
  """(state after one chunk, int32 [S, 2C + 1]: tokens | valid | length).

  The length is that of the first token of the chunk, so that JetStream, which
  compares it with a request's limit, hands the chunk out.
  """
  before = state_lib.unpack(state.slots)
  chunk, ring = settings.chunk, settings.ring
  # Nothing waits in a queue: JetStream fills the slots.
  queue = jnp.zeros((len(state_lib.QUEUE_DTYPES), 1), jnp.int32)
  control = jnp.array(state_lib.Control(
      tail=0, max_chunks=1, max_ended=settings.slots, more=0, reset=0, seed=0,
      stream=STREAM, step=0), jnp.int32)
  packed, _ = decode_lib.decode(
      weights, leaves, state.prefixes, state.slots, queue, control, stop_ids,
      chunk=chunk, shapes=settings.shapes(weights.sizes), rows=settings.slots)
  slots = state_lib.unpack(packed)
  column = before.generated[:, None] + jnp.arange(chunk)
  fresh = column < slots.generated[:, None]
  tokens = jnp.take_along_axis(
      slots.record.tokens, jnp.minimum(column, settings.max_new_tokens - 1), 1)
  data = jnp.concatenate(
      [tokens, fresh.astype(jnp.int32), before.generated[:, None] + 1], 1)
  if ring:
    # By whole turns of the ring: columns keep their places, ages their order.
    back = jnp.where(slots.time > _LATE, (slots.time // ring - 2) * ring, 0)
    slots = slots._replace(time=slots.time - back, began=slots.began - back,
                           written=jnp.maximum(slots.written - back, -1))
  return DecodeState(state.prefixes, state_lib.pack(slots)), data


@functools.lru_cache(maxsize=None)
def _programs(graph, sizes, settings: Settings):
  """Weights and jitted programs, shared by the engines of a model."""
  weights = weights_lib.of(graph, sizes)
  dtype = jnp.dtype(settings.cache_dtype)
  return (weights, jax.jit(functools.partial(_prefill, weights, dtype)),
          jax.jit(_insert, donate_argnums=(0,)),
          jax.jit(functools.partial(_generate, weights, settings),
                  donate_argnums=(1,)))


# ------------------------------------------------------------------ engine


class Tokenizer(tokenizer_api.Tokenizer):
  """Text to ids and back, as JetStream wants it.

  JetStream puts a BOS before every prompt, also where a family has none. Here
  it is a mere place holder that `Engine.prefill` takes away: a real BOS is
  part of the prompt's own ids.
  """

  pad_id, bos_id, eos_id = 0, 0, -1

  def __init__(self, vocabulary, stop_ids: Sequence[int]):
    self._vocabulary = vocabulary
    self._stop = frozenset(map(int, stop_ids))

  def encode(self, s: str, **kwargs):
    """(padded ids, their number), the place holder included."""
    return token_utils.pad_tokens(
        np.asarray(self._vocabulary.encode(s), np.int32), self.bos_id,
        self.pad_id, **kwargs)

  def decode(self, token_ids: list[int], **kwargs) -> str:
    return self._vocabulary.decode(token_ids)

  @property
  def stop_tokens(self) -> frozenset[int]:
    return self._stop


class Engine(engine_api.Engine):
  """One model on one device, S slots; see the module's docstring.

  Args:
    graph: nnx graph of the transformer.
    sizes: its sizes.
    params: its parameters.
    settings: static shapes; prefixes and queue are the slots.
    vocabulary: for requests that come as text.
    stop_ids: ids that end a completion; they are not handed out.
    seed: of the random numbers; the n-th request has numbers of its own.
    temperature, top_k, top_p, min_p: of all requests: the protocol carries
      none. See `logits.sample`.

  Raises:
    ValueError: prompts longer than JetStream can pad, or no stop id.
  """

  def __init__(self, graph, sizes: transformer.Sizes, params,
               settings: Settings, *, vocabulary, stop_ids: Sequence[int],
               seed: int = 0, temperature: float = 0.0, top_k: int = 0,
               top_p: float = 1.0, min_p: float = 0.0):
    if settings.prompt_buckets[-1] > LONGEST_PROMPT:
      raise ValueError(
          f"prompts of {settings.prompt_buckets[-1]} tokens: JetStream takes "
          f"at most {LONGEST_PROMPT}")
    if not len(stop_ids):
      raise ValueError("the engine needs at least one stop id")
    self.sizes, self.settings = sizes, settings
    self._vocabulary, self._ids = vocabulary, tuple(map(int, stop_ids))
    self._seed = seed
    self._cut = (np.float32(temperature), np.int32(top_k), np.float32(top_p),
                 np.float32(min_p))
    self._params = params
    # A fixed width, so that another set of stop ids does not compile.
    padded = np.full(max(8, len(self._ids)), -1, np.int32)
    padded[: len(self._ids)] = self._ids
    self._stop_ids = jnp.asarray(padded)
    self._dtype = jnp.dtype(settings.cache_dtype)
    self._numbers = itertools.count()
    self._weights, self._prefill, self._insert, self._generate = _programs(
        graph, sizes, settings)

  # ------------------------------------------------- what JetStream calls

  def load_params(self) -> tuple[Array, ...]:
    """The weights as the programs take them."""
    return self._weights.prepare(self._params)

  def prefill(self, *, params, existing_prefix=None, padded_tokens,
              true_length: int) -> Prefix:
    """Runs a prompt through the model.

    Args:
      params: of `load_params`.
      existing_prefix: must be None.
      padded_tokens: int [N], the first of them JetStream's BOS.
      true_length: tokens before the padding; of more than fit, the last ones
        are kept.
    """
    del existing_prefix
    longest = self.settings.prompt_buckets[-1]
    tokens = np.asarray(padded_tokens)[1: true_length][-longest:]
    tokens = np.clip(tokens, 0, self.sizes.vocab - 1)
    count = max(len(tokens), 1)
    bucket = next(b for b in self.settings.prompt_buckets if b >= count)
    block = np.zeros((1, bucket), np.int32)
    block[0, : len(tokens)] = tokens
    prompt = self._prefill(params, block, np.array([count], np.int32))
    return Prefix(prompt, next(self._numbers), self.settings.max_new_tokens)

  def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int
             ) -> DecodeState:
    """Puts a prompt into a slot, whatever it held."""
    limit = min(max(int(prefix.limit), 1), self.settings.max_new_tokens)
    words = np.array([slot, limit, prefix.number & 0x7FFFFFFF, self._seed],
                     np.int32)
    return self._insert(decode_state, prefix.prompt, words, self._cut)

  def generate(self, params, decode_state: DecodeState
               ) -> tuple[DecodeState, engine_api.ResultTokens]:
    """A chunk of tokens for every active slot."""
    state, data = self._generate(params, decode_state, self._stop_ids)
    c = self.settings.chunk
    return state, engine_api.ResultTokens(
        data=data, tokens_idx=(0, c), valid_idx=(c, 2 * c),
        length_idx=(2 * c, 2 * c + 1), samples_per_slot=1)

  def init_decode_state(self) -> DecodeState:
    """All slots free."""
    s = self.settings
    state = DecodeState(
        state_lib.empty_prefixes(self.sizes, s.slots, s.prompt_buckets[-1],
                                 self._dtype),
        state_lib.empty_state(self.sizes, s.slots, s.ring, s.max_new_tokens,
                              self._dtype))
    # On a device by name, as what the programs return is where the weights
    # are: another kind of argument would compile them a second time.
    return jax.device_put(state, self.get_prefix_destination_sharding())

  def warm_up(self, params) -> None:
    """Compiles every program; a server compiles nothing after it."""
    state = self.init_decode_state()
    for bucket in self.settings.prompt_buckets:
      prefix = self.prefill(params=params, true_length=bucket + 1,
                            padded_tokens=np.zeros(bucket + 1, np.int32))
      state = self.insert(prefix, state, slot=0)
    _, result = self.generate(params, state)
    result.convert_to_numpy()
    self._numbers = itertools.count()

  def get_prefix_destination_sharding(self):
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
    return tokenizer_pb2.TokenizerParameters()

  def build_tokenizer(self, metadata) -> Tokenizer:
    del metadata  # It could only name a file.
    return Tokenizer(self._vocabulary, self._ids)

  @property
  def max_concurrent_decodes(self) -> int:
    return self.settings.slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    """The smallest of JetStream's lengths for the longest prompt and a BOS."""
    return next(n for n in LENGTHS if n > self.settings.prompt_buckets[-1])

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))

  @property
  def colocated_cpus(self) -> None:
    return None
