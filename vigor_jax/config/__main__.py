"""Checks a configuration and prints it resolved, without running anything.

    python -m vigor_jax.config --config=FILE.py [--config.field=VALUE ...]
"""

import sys

from vigor_jax import config

if __name__ == "__main__":
  args = config.parse_flags(sys.argv, __doc__, needs_workdir=False)
  print(config.pretty(args.config))
