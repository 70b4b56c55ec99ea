"""RL from verifiable rewards with variance-informed rollout budgets, in JAX.

Start with `python -m vigor_jax.train --help`, or read `train.py`.
"""

import os

__version__ = "0.1.0"

# The host's matrices have a hundred rows: what BLAS threads wait for each other
# is many times what they save, the more so the more cores there are. NumPy
# reads this when it is first imported; a value that is set stands.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
