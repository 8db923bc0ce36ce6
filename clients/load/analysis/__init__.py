"""From times of responses to results: `windows` groups them, `latencies` counts them in HDR histograms, `confidence`
decides when they are stable, `compare` compares two saved runs.

`server_side` and `usage` add what the server counted meanwhile, and what it used of processors and GPUs.
"""
