"""Rules in their lean form: about the same allocation for fewer seconds.

What benchmarks/gain_in_seconds.py times and benchmarks/claims.py learns with:
as few rollouts in the update as leave its variance at most one and a half times
what it was, and, for a rule that looks at prompts before it opens them, a wide
opening in place of later ones: fewer rounds, and each prompt is prefilled with
the others.
"""

UPDATE_NOISE = 0.5
# At a budget of 256: 96 prompts x 2 rollouts fill the demo's 64 slots three
# times, and 864 prompts are looked at (by default 896).
WIDE = {"open_share": 0.375, "pool": 0.0, "window": 9.0, "rounds": 2}


def overrides(rule: str) -> dict:
  """{name of a config's field: value}."""
  own = {f"allocation.{rule}.{k}": v for k, v in _wide(rule).items()}
  return {**own, "policy.update_noise": UPDATE_NOISE}


def entry(rule: str) -> str:
  """The same as vigor_jax.compare takes it; `rule` may have settings."""
  return f"{wide(rule)}:policy.update_noise={UPDATE_NOISE}"


def wide(rule: str) -> str:
  """`entry` with all rollouts in the update."""
  own = [f"{k}={v}" for k, v in _wide(rule.split(":")[0]).items()]
  return ":".join([rule, *own])


def narrow(rule: str) -> str:
  """`entry` with the rule's own opening and rounds."""
  return f"{rule}:policy.update_noise={UPDATE_NOISE}"


def _wide(rule: str) -> dict:
  return WIDE if rule == "eb_predicted" else {}
