"""One script a system, each run by its own environment's Python as `python -m peers.NAME INPUTS SUM`."""
