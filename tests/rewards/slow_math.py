"""The math reward with a judge that hangs or grows on request."""

from vigor_jax.rewards import math as math_reward


def verify(completion, answer, **metadata):
  if completion == "spin":
    return float(7 ** (7 ** (7**7)) % 2)  # One C call, deaf to signals.
  if completion == "grow":
    return float(len([0] * (1 << 40)))
  return math_reward._judge(completion, answer)


verify.time_limit = 2.0
verify.memory_limit = math_reward.verify.memory_limit
verify.timeout_verdict = 0.0
