"""A grid of runs: its cells, the processes that run them, its console."""
