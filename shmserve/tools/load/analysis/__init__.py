"""Turns the times of responses into results: `windows` groups them, `latencies` counts them in HDR histograms,
`confidence` decides when they are stable, and `compare` compares two saved runs.

`usage` adds the server's use of processors and GPUs in the same period.
"""
