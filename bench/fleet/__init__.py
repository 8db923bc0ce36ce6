"""Simulations of fleets of 100, 1,000 and 10,000 GPUs, and the plots of docs/sizing.md drawn from their results.

`python -m bench.fleet` writes the plots from results.json; with names of experiments, it runs these first.
"""
