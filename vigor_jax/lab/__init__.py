"""The allocation laboratory: tabular policies, the allocators that train.

`python -m vigor_jax.lab` has the commands; docs/allocation.md the results.
"""
