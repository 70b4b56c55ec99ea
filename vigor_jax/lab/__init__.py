"""The allocation laboratory: tabular policies, exact gradients, real allocators.

`python -m vigor_jax.lab` has the commands; docs/allocation.md the results.
"""
