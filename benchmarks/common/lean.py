"""Rules in their lean form: the same allocation for fewer seconds.

What benchmarks/gain_in_seconds.py times and benchmarks/claims.py learns with:
equal rollouts once in the update, and at most 40 of them; two rounds
after the opening one in place of three, which costs nothing where most prompts
are solved and verdicts are right, and much elsewhere (docs/results.md).
"""

UPDATE_ROLLOUTS = 40
SETTINGS = {
  "eb_effective": {"rounds": 2},
  "eb_predicted": {"rounds": 2},
}


def overrides(rule: str) -> dict:
  """{name of a config's field: value}."""
  own = {
    f"allocation.{rule}.{field}": value
    for field, value in SETTINGS.get(rule, {}).items()
  }
  return own | {"policy.update_rollouts": UPDATE_ROLLOUTS}


def entry(rule: str) -> str:
  """The same as vigor_jax.compare takes it; `rule` may have settings."""
  name = rule.partition(":")[0]
  own = [f"{k}={v}" for k, v in SETTINGS.get(name, {}).items()]
  return ":".join([rule, *own, f"policy.update_rollouts={UPDATE_ROLLOUTS}"])
