r"""Qwen2.5-1.5B on MATH: the smallest published run of VIGOR.

    python -m vigor_jax.train --config=configs/qwen2p5_1p5b_math.py:vigor \
        --config.model.checkpoint=/models/Qwen2.5-1.5B --workdir=runs/1p5b_vigor

The argument is the rule: `vigor`, `uniform`, `eb_widening` or another. Data,
settings and what is open: as in qwen2p5_3b_math.py, but for half as many chips.

Expected: the paper reports 29.5 (GRPO) and 30.1 (VIGOR) as the average accuracy
over the six sets. This project has not run it: neither its results here nor its
time are known; `python -m vigor_jax.preflight` estimates the time of a step.
"""

import pathlib

from vigor_jax.config import load_file
from vigor_jax.policy import families

_BASE = pathlib.Path(__file__).with_name("qwen2p5_3b_math.py")


def get_config(allocator="vigor"):
  """Returns the configuration for one rule."""
  config = load_file(f"{_BASE}:{allocator}")
  config.model.sizes.update(families.published("qwen2.5-1.5b"))
  config.topology = "v5e:2x4"
  config.mesh.fsdp = 4
  return config
