"""Ahead-of-time compilation for accelerators that are not there.

  chips.py     topologies by name, memory limits and peak rates
  hlo.py       optimised HLO text as data
  cost.py      bytes, collectives and cycles of it; FLOPs of a jaxpr
  programs.py  the programs that a configuration compiles
  estimate.py  what a step costs, what binds, what fits
  page.py      the HTML table
"""
