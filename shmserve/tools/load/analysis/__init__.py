"""Turns the times of responses into results: `windows` groups them, `latencies` counts them in HDR histograms,
`confidence` decides when they are stable, and `compare` compares two saved runs.

`server_side` and `usage` add the server's own counts for the same period, and its use of processors and GPUs.
"""
