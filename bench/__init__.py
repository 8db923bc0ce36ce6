"""Measurements: the server against what this machine could do without it. `python -m bench.run --list`."""
