r"""Qwen2.5-7B on MATH and DAPO-Math-17k: a published run of VIGOR.

    python -m vigor_jax.train --config=configs/qwen2p5_7b_math_dapo.py:vigor \
        --config.model.checkpoint=/models/Qwen2.5-7B --workdir=runs/7b_vigor

The training set is a seqio Mixture of both; an epoch is a permutation of their
union. The argument is the rule: `vigor`, `uniform`, `eb_widening` or another.
Fetch dapo_math too; other data, settings and what is open: as in
qwen2p5_3b_math.py, but for 8 chips of a v5p.

Expected: the paper reports 49.8 (GRPO) and 51.0 (VIGOR) as the average accuracy
over the six sets. This project has not run it: neither its results here nor its
time are known; `python -m vigor_jax.preflight` estimates the time of a step.

The paper's fourth model on these data, Phi-4-mini (42.9 and 43.4), is not
supported: its rotary positions (LongRoPE on a part of each head) and fused
projections are not implemented, and its checkpoint is refused by name.
"""

import pathlib

from vigor_jax.config import load_file
from vigor_jax.config import with_overrides
from vigor_jax.policy import families

_BASE = pathlib.Path(__file__).with_name("qwen2p5_3b_math.py")


def get_config(allocator="vigor"):
  """Returns the configuration for one rule."""
  base = load_file(f"{_BASE}:{allocator}")
  config = with_overrides(base, {"task.name": "mixture"})
  config.task.parts = "math,dapo_math"
  for field in ("template", "max_prompt_length", "max_completion_length"):
    config.task[field] = base.task[field]
  config.model.sizes.update(families.published("qwen2.5-7b"))
  config.topology = "v5p:2x2x2"
  config.mesh.fsdp = 4
  return config
