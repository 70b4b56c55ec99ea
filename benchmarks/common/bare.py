"""The bare loop that a training step is measured against, in one file.

A jitted sampling scan over a fixed [B] batch with a cache, verdicts, advantages
by reshape, a jitted update of the padded [B, L] batch. JAX is imported when the
loop is made: a benchmark chooses its cores before.
"""


class Bare:
  """Uniform GRPO in one file: nothing but a sampler, a loss and Adam."""

  def __init__(self, config, task, sizes, params, half):
    import jax
    import numpy as np
    import optax

    self.jax, self.np = jax, np
    self.config, self.task, self.sizes = config, task, sizes
    self.half = half
    self.length = config.sampling.max_new_tokens
    self.tx = optax.chain(
      optax.clip_by_global_norm(config.optimizer.clip_norm),
      optax.adam(config.optimizer.learning_rate, b2=config.optimizer.b2),
    )
    self.params = jax.tree.map(jax.numpy.copy, params)
    self.opt = self.tx.init(self.params)
    self.stream = task.stream(config.seed)
    self.sample = jax.jit(self._sample)
    self.update = jax.jit(self._update, donate_argnums=(0, 1))

  def _layer(self, p, x, rope, attend):
    jax, jnp = self.jax, self.jax.numpy
    cos, sin = rope

    def norm(x, scale):
      y = x * jax.lax.rsqrt(
        jnp.mean(x * x, -1, keepdims=True) + self.sizes.norm_eps
      )
      return y * scale

    def rotate(x):
      a, b = jnp.split(x, 2, -1)
      return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    y = norm(x, p["attn_norm"]["scale"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, p[name]) for name in "qkv")
    out, cache = attend(rotate(q), rotate(k), v)
    x = x + jnp.einsum("bthk,hkd->btd", out, p["o"])
    y = norm(x, p["mlp_norm"]["scale"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], cache

  def _attention(self, q, k, v, mask):
    jax, jnp = self.jax, self.jax.numpy
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bthd,buhd->bhtu", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.einsum("bhtu,buhd->bthd", weights, v)

  def _forward(self, params, tokens, positions, attends):
    """(logits, caches); `attends`: one callback per layer."""
    jax, jnp = self.jax, self.jax.numpy
    half = jnp.arange(0, self.sizes.head_dim, 2) / self.sizes.head_dim
    angle = positions[..., None] / self.sizes.rope_theta**half
    rope = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    x, caches = params["embed"][tokens], []
    for i, attend in enumerate(attends):
      layer = jax.tree.map(lambda a, i=i: a[i], params["blocks"])
      x, cache = self._layer(layer, x, rope, attend)
      caches.append(cache)
    x = x * jax.lax.rsqrt(
      jnp.mean(x * x, -1, keepdims=True) + self.sizes.norm_eps
    )
    x = x * params["final_norm"]["scale"]
    return x @ params["embed"].T, caches

  def _sample(self, params, prompts, key):
    """Prompts [P, T] -> tokens and log-probs [B, L]."""
    jax, jnp = self.jax, self.jax.numpy
    p, t = prompts.shape
    n, total = self.config.rollout_budget // p, t + self.length
    causal = jnp.tril(jnp.ones((t, t), bool))

    def whole(q, k, v):
      pad = ((0, 0), (0, self.length), (0, 0), (0, 0))
      padded = jnp.pad(k, pad), jnp.pad(v, pad)
      return self._attention(q, k, v, causal), padded

    layers = self.sizes.layers
    logits, caches = self._forward(
      params, prompts, jnp.arange(t)[None], [whole] * layers
    )
    caches = jax.tree.map(lambda a: jnp.repeat(a, n, 0), caches)

    def draw(logits, key):
      token = jax.random.categorical(key, logits)
      picked = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
      return token, picked - jax.nn.logsumexp(logits, -1)

    def step(carry, inputs):
      token, caches = carry
      at, key = inputs
      mask = (jnp.arange(total) <= at)[None, None, None]

      def one(cache):
        def attend(q, k, v):
          put = jax.lax.dynamic_update_slice_in_dim
          keys, values = put(cache[0], k, at, 1), put(cache[1], v, at, 1)
          return self._attention(q, keys, values, mask), (keys, values)

        return attend

      logits, caches = self._forward(
        params, token[:, None], at[None, None], list(map(one, caches))
      )
      token, logprob = draw(logits[:, 0], key)
      return (token, caches), (token, logprob)

    keys = jax.random.split(key, self.length)
    first, logprob = draw(jnp.repeat(logits[:, -1], n, 0), keys[0])
    _, rest = jax.lax.scan(
      step, (first, caches), (t + jnp.arange(self.length - 1), keys[1:])
    )
    join = lambda a, b: jnp.concatenate([a[:, None], b.T], 1)
    return join(first, rest[0]), join(logprob, rest[1])

  def _update(self, params, opt, tokens, old, mask, advantages):
    """GRPO with clipping over padded rows [N, T + L]."""
    jax, jnp = self.jax, self.jax.numpy
    t = tokens.shape[1]
    causal = jnp.tril(jnp.ones((t, t), bool))
    attend = lambda q, k, v: (self._attention(q, k, v, causal), None)

    def loss(params):
      logits, _ = self._forward(
        params, tokens, jnp.arange(t)[None], [attend] * self.sizes.layers
      )
      logits = logits[:, -self.length - 1 : -1]
      targets = tokens[:, -self.length :]
      logprob = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
      ratio = jnp.exp(logprob - jax.nn.logsumexp(logits, -1) - old)
      a = advantages[:, None]
      gain = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
      per_rollout = (gain * mask).sum(1) / mask.sum(1)
      return -per_rollout.sum() / self.config.rollout_budget

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = self.tx.update(grads, opt, params)
    return jax.tree.map(jnp.add, params, updates), opt, value

  def step(self, number, scorer):
    """One training step; returns tokens generated."""
    jax, np = self.jax, self.np
    prompts = self.stream.peek(self.config.prompts_per_step)
    self.stream.advance(np.ones(len(prompts.texts), bool))
    tokens = np.stack(prompts.tokens)
    n = self.config.rollout_budget // len(tokens)
    out, logprobs = jax.device_get(
      self.sample(self.params, tokens, jax.random.key(number))
    )
    ends = np.isin(out, self.task.stop_ids)
    lengths = np.where(ends.any(1), ends.argmax(1) + 1, self.length)
    repeat = lambda values: [v for v in values for _ in range(n)]
    rewards = scorer.score(
      self.task.decode(out, lengths),
      repeat(prompts.answers),
      repeat(prompts.metadata),
    ).reshape(-1, n)
    advantages = (rewards - rewards.mean(1, keepdims=True)).reshape(-1)
    mask = np.arange(self.length) < lengths[:, None]
    rows = np.arange(len(out))
    if self.half:
      rows = np.argsort(advantages == 0, kind="stable")[: len(out) // 2]
    whole = np.concatenate([np.repeat(tokens, n, 0), out], 1)
    self.params, self.opt, loss = self.update(
      self.params,
      self.opt,
      whole[rows],
      logprobs[rows],
      mask[rows].astype(np.float32),
      advantages[rows].astype(np.float32),
    )
    float(loss)
    return int(lengths.sum())
