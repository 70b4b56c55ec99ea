"""Rules in their lean form: the same allocation for fewer seconds.

What benchmarks/gain_in_seconds.py times and benchmarks/claims.py learns with:
equal rollouts once in the update, and at most 32 of them, which fill two
micro-batches of the demo's.
"""

UPDATE_ROLLOUTS = 32


def overrides() -> dict:
  """{name of a config's field: value}."""
  return {"policy.update_rollouts": UPDATE_ROLLOUTS}


def entry(rule: str) -> str:
  """The same as vigor_jax.compare takes it; `rule` may have settings."""
  return f"{rule}:policy.update_rollouts={UPDATE_ROLLOUTS}"
