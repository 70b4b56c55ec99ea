"""Rules in their lean form: the same allocation for fewer seconds.

What benchmarks/gain_in_seconds.py times and benchmarks/claims.py learns with:
as few rollouts in the update as leave its variance at most one and a half times
what it was.
"""

UPDATE_NOISE = 0.5


def overrides() -> dict:
  """{name of a config's field: value}."""
  return {"policy.update_noise": UPDATE_NOISE}


def entry(rule: str) -> str:
  """The same as vigor_jax.compare takes it; `rule` may have settings."""
  return f"{rule}:policy.update_noise={UPDATE_NOISE}"
