"""RL from verifiable rewards with variance-informed rollout budgets, in JAX.

Start with `python -m vigor_jax.train --help`, or read `train.py`.
"""

__version__ = "0.1.0"
