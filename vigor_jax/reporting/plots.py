"""The report's figures under one name; importing it imports matplotlib."""

from vigor_jax.reporting.plots_budget import difficulty
from vigor_jax.reporting.plots_budget import group_sizes
from vigor_jax.reporting.plots_budget import rounds_heat
from vigor_jax.reporting.plots_learning import accuracy
from vigor_jax.reporting.plots_learning import ratios
from vigor_jax.reporting.plots_learning import time_by_phase
from vigor_jax.reporting.plots_signal import mixed_prompts
from vigor_jax.reporting.plots_signal import pass_rates
from vigor_jax.reporting.plots_signal import signal_by_rule
from vigor_jax.reporting.plots_signal import signal_over_run
from vigor_jax.reporting.plots_signal import variance_by_rule
from vigor_jax.reporting.plots_signal import variance_over_run
from vigor_jax.reporting.style import colours
from vigor_jax.reporting.style import png
from vigor_jax.reporting.style import short
from vigor_jax.reporting.style import spread

__all__ = [
  "accuracy",
  "colours",
  "difficulty",
  "group_sizes",
  "mixed_prompts",
  "pass_rates",
  "png",
  "ratios",
  "rounds_heat",
  "short",
  "signal_by_rule",
  "signal_over_run",
  "spread",
  "time_by_phase",
  "variance_by_rule",
  "variance_over_run",
]
