"""What a training step costs over a bare loop, and its host time.

  python benchmarks/step_overhead.py [--quick] [--config=configs/arithmetic.py]

The bare loop is what one file would hold (class Bare): a jitted sampling scan
over a fixed [B] batch with a cache, verdicts, advantages by reshape, a jitted
update of the padded [B, L] batch; and the same with the rollouts of zero
advantage dropped to a static half. It and the real step (rounds, packing,
record, files) under uniform, vigor and eb_widening train the same policy on
the same prompts, taking turns in one process on one core. Seconds are the
process's CPU seconds, lower quartiles over steps, so that other work on the
machine stays out; wall seconds are printed beside them. Generation with
uniform is also timed at other slot counts than the demo's.

Host time in allocation and buffers is time/allocate's share of a step, for
the demo's model and for one of 4.5M parameters (whose verdicts are noise, so
that it has something to train on). The warm start takes most
of the time: about 2 minutes, less with --quick.
"""

import argparse
import json
import os
import tempfile
import time

RULES = ("uniform", "vigor", "eb_widening")
LARGER = dict(layers=6, width=256, heads=8, kv_heads=4, head_dim=32, ffn=704)
SLOTS = (32, 64, 96, 128, 256)
TARGETS = {
  **{f"{rule}_over_bare": {"max": 2.0} for rule in RULES},
  "generation_per_token_vigor_over_uniform": {"max": 1.15},
  "demo_slots_over_best": {"max": 1.1},
  "compiles_after_two_steps": {"max": 0},
  **{f"allocate_share_{rule}": {"max": 0.05} for rule in RULES},
  "allocate_share_4m": {"max": 0.01},
}


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


class Real:
  """The training step of vigor_jax.train, its record included."""

  def __init__(self, config, params, folder):
    from vigor_jax import experiment, record, step

    self.parts = experiment.build(config)
    self.config = config
    self.params = params if params is not None else self.parts.fresh_params(0)
    self.train = step.TrainingStep(self.parts)
    self.state = self.parts.updater.init(copy(self.params))
    self.record = record.Record(config, folder, quiet=True, total_steps=10**6)
    self.parts.sampler.warm_up(self.state.params)

  def step(self, number, scorer=None):
    """(tokens, line of metrics.jsonl) of one training step."""
    from vigor_jax import compilation, measure

    record, begun = self.record, time.perf_counter()
    timer = measure.PhaseTimer()
    rollouts = self.train.collect(self.state.params, number, timer)
    self.generation = time.process_time()
    self.state, done = self.train.learn(self.state, rollouts, number, timer)
    tokens = rollouts.tokens
    record.counters.add(rollouts.buffer.size, tokens)
    line = {
      **record.counters.values(),
      **done.metrics(),
      "compiles": compilation.count(),
      **timer.metrics(time.perf_counter() - begun),
    }
    record.train_line(number + 1, line)
    record.group_line(number + 1, rollouts.group_record())
    return tokens, line


def copy(params):
  import jax

  return jax.tree.map(jax.numpy.copy, params)


def measured(step, number, scorer):
  """Seconds of a step (CPU and wall), and what it returned."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = step(number, scorer)
  return time.process_time() - cpu, time.perf_counter() - wall, cpu, result


def demo(config, folder, steps):
  """Figures of the demo's model: bare loops and rules taking turns."""
  import numpy as np
  from flax import nnx

  from vigor_jax import compilation, starting

  runs, params = {}, None
  for rule in RULES:
    own = config.copy_and_resolve_references()
    own.allocation.name = rule
    real = Real(own, params, os.path.join(folder, rule))
    if params is None:
      params = starting.initial_params(
        real.parts, os.path.join(folder, rule))[0]
      real.state = real.parts.updater.init(copy(params))
    runs[rule] = real
  parts = runs["uniform"].parts
  plain = nnx.to_pure_dict(params)
  for name, half in (("bare", False), ("bare_half", True)):
    runs[name] = Bare(config, parts.task, parts.sizes, plain, half)

  times = {name: [] for name in runs}
  compiled = None
  for number in range(steps + 2):
    if number == 2:
      compiled = compilation.count()
    for name, run in runs.items():
      cpu, wall, begun, result = measured(run.step, number, parts.scorer)
      row = dict(cpu=cpu, wall=wall)
      if name in RULES:
        tokens, line = result
        row.update(
          per_token=(run.generation - begun) / tokens,
          allocate=share(line),
          active=line["policy/active_rollouts"],
          useful=line["policy/useful_share"],
          utilisation=line["slots/utilisation"],
        )
      if number >= 2:
        times[name].append(row)
  compiles = compilation.count() - compiled
  for run in runs.values():
    if isinstance(run, Real):
      run.record.close()

  def low(name, key):
    return float(np.percentile([r[key] for r in times[name]], 25))

  figures = {"compiles_after_two_steps": compiles}
  for name in runs:
    figures[f"{name}_cpu_ms"] = 1e3 * low(name, "cpu")
    figures[f"{name}_wall_ms"] = 1e3 * low(name, "wall")
  for rule in RULES:
    figures[f"{rule}_over_bare"] = low(rule, "cpu") / low("bare", "cpu")
    figures[f"{rule}_over_bare_half"] = low(rule, "cpu") / low(
      "bare_half", "cpu"
    )
    figures[f"allocate_share_{rule}"] = float(
      np.median([r["allocate"] for r in times[rule]])
    )
    for key in ("active", "useful", "utilisation"):
      figures[f"{key}_{rule}"] = float(np.mean([r[key] for r in times[rule]]))
  figures["generation_per_token_vigor_over_uniform"] = low(
    "vigor", "per_token"
  ) / low("uniform", "per_token")
  return figures | slot_counts(config, params, steps)


def share(line):
  """time/allocate's share of a step."""
  phases = ("prefill", "decode", "reward", "allocate", "update", "other")
  return line["time/allocate"] / sum(line[f"time/{p}"] for p in phases)


class Generation:
  """Uniform's rollouts alone, with a slot count of its own."""

  def __init__(self, config, params, slots):
    from vigor_jax import experiment, rollouts

    config = config.copy_and_resolve_references()
    config.allocation.name = "uniform"
    config.sampling.slots = slots
    self.parts = experiment.build(config)
    self.params = copy(params)
    self.collector = rollouts.Collector(self.parts)
    self.parts.sampler.warm_up(self.params)

  def per_token(self, number):
    """CPU seconds per generated token of one step."""
    from vigor_jax import measure

    begun = time.process_time()
    rollouts = self.collector.collect(
      self.params, number, measure.PhaseTimer()
    )
    spent = time.process_time() - begun
    self.parts.stream.advance(rollouts.groups.taken)
    return spent / rollouts.tokens


def slot_counts(config, params, steps):
  """Uniform's generation at the demo's slot count and at others."""
  import numpy as np

  own = config.sampling.slots
  runs = {n: Generation(config, params, n) for n in sorted({own, *SLOTS})}
  times = {n: [] for n in runs}
  for number in range(steps + 1):
    for n, run in runs.items():
      times[n].append(run.per_token(number))
  cost = {n: float(np.percentile(t[1:], 25)) for n, t in times.items()}
  return {
    **{f"generation_us_per_token_{n}": 1e6 * c for n, c in cost.items()},
    "demo_slots_over_best": cost[own] / min(cost.values()),
  }


def larger(config, folder, steps):
  """Share of allocation and buffers in a step of a 4.5M model."""
  import numpy as np

  config = config.copy_and_resolve_references()
  config.allocation.name = "vigor"
  config.model.sizes.update(LARGER)
  config.reward.noise = 0.3
  real = Real(config, None, os.path.join(folder, "larger"))
  lines = [real.step(number)[1] for number in range(steps + 1)][1:]
  real.record.close()
  return {
    "parameters_4m": real.parts.sizes.num_params,
    "allocate_share_4m": float(np.median([share(line) for line in lines])),
    "active_4m": float(np.mean([r["policy/active_rollouts"] for r in lines])),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true")
  parser.add_argument("--config", default="configs/arithmetic.py")
  args = parser.parse_args()
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # Before JAX loads.
  from vigor_jax import host_memory
  from vigor_jax.config import loading

  host_memory.keep()
  config = loading.load_file(args.config)
  with tempfile.TemporaryDirectory() as folder:
    figures = demo(config, folder, 10 if args.quick else 60)
    figures |= larger(config, folder, 2 if args.quick else 8)
  for name, value in figures.items():
    print(f"{name:44s} {value:.4g}")
  ok = all(figures[n] <= t["max"] for n, t in TARGETS.items())
  rounded = {k: float(f"{v:.4g}") for k, v in figures.items()}
  print(
    json.dumps(
      dict(name="step_overhead", figures=rounded, targets=TARGETS, ok=ok)
    )
  )
  return 0 if ok else 1


if __name__ == "__main__":
  raise SystemExit(main())
