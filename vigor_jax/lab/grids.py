"""The cells behind docs/allocation.md, in the order they are measured."""

from __future__ import annotations

from vigor_jax.lab.experiment import HEADLINE, UNIFORMS, Cell
from vigor_jax.lab.learner import Estimator, Rule
from vigor_jax.lab.world import PRESETS, World

RATE = 0.4  # the best rate of most cells
NOISES = (0.05, 0.1, 0.2)
# (easy, hard) shares of the phase diagram, beside the presets.
SHARES = ((0.0, 0.4), (0.4, 0.0), (0.4, 0.4), (0.0, 0.75), (0.75, 0.0))
VIGOR, EB = Rule("vigor"), Rule("eb_widening")
SHORT = (*UNIFORMS, VIGOR, EB)

PRESET_WORLDS = tuple(
  World.preset(name, reward=reward)
  for reward in ("sparse", "graded")
  for name in PRESETS
)
SHARE_WORLDS = tuple(World(easy, hard) for easy, hard in SHARES)
NOISE_WORLDS = tuple(World.preset("sparse_signal", noise=q) for q in NOISES)
OTHER_NOISE_WORLDS = (
  World.preset("plain", noise=0.1),
  World.preset("sparse_signal", reward="graded", noise=0.1),
)
ABLATION_WORLDS = (World.preset("sparse_signal"),)
FIXED_WORLDS = (World.preset("sparse_signal", num_prompts=512),)


def _with(name: str, prompts: int = 32, train_on: str = "all", **options):
  return Rule(name, prompts, tuple(sorted(options.items())), train_on)


# What the rivals need to spend 256 rollouts on 32 prompts is their default.
RIVALS = tuple(
  Rule(name)
  for name in (
    "streaming_vigor", "eb_streaming", "dynamic_sampling", "pods", "greso",
    "vip", "cero", "knapsack", "gvm", "reinforce_ada", "pilot_commit", "speed",
  )
)  # fmt: skip

SCHEDULES = (
  _with("vigor", rounds=2, initial_rollouts=4, keep=0.25, growth=4.0),
  _with("vigor", rounds=2, initial_rollouts=4),
  _with("vigor", 16, initial_rollouts=4),
  _with("vigor", 64, initial_rollouts=1),
  _with("vigor", 64, rounds=2, initial_rollouts=2),
  _with("vigor", ties="index"),
  _with("vigor", train_on="survivors"),
)
PIECES = (
  _with("eb_widening", pool=0.0),
  _with("eb_widening", low_success_exponent=0.0),
  _with("eb_widening", saturation=0.5),
  _with("eb_widening", saturation=1e6),
)
FORMS = (
  Estimator("grpo", "prompt_mean"),
  Estimator("grpo", "rollout_mean"),
  Estimator("dr_grpo", "prompt_mean"),
)


def cells(quick: bool = False) -> list[Cell]:
  """Every cell, the ones that matter most first."""
  found = [Cell(w, r) for w in PRESET_WORLDS for r in HEADLINE]
  if quick:
    return [c for c in found if c.world.reward == "sparse"]
  found += [Cell(w, r) for w in SHARE_WORLDS for r in SHORT]
  found += [
    Cell(w, r) for w in NOISE_WORLDS + OTHER_NOISE_WORLDS for r in SHORT
  ]
  found += [Cell(w, r) for w in FIXED_WORLDS for r in SHORT + RIVALS]
  found += [Cell(w, r, rate=RATE) for w in FIXED_WORLDS for r in SHORT + RIVALS]
  found += [Cell(w, r) for w in ABLATION_WORLDS for r in SCHEDULES + PIECES]
  found += [
    Cell(w, r, form)
    for w in ABLATION_WORLDS
    for form in FORMS
    for r in (UNIFORMS[0], VIGOR)
  ]
  return found
