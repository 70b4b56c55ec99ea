"""Checks a configuration and prints it resolved, without running anything.

    python -m vigor_jax.config --config=FILE.py [--config.field=VALUE ...]
"""

import sys

from vigor_jax import config
from vigor_jax import endings

if __name__ == "__main__":
  with endings.one_message():
    args = config.parse_flags(sys.argv, __doc__, needs_workdir=False)
    print(config.pretty(args.config))
