"""Counters and durations of model versions.

`statistics` contains the counters of a version, which the other packages of the core update as requests and batches
complete. Durations are counted in the power-of-two buckets of `histogram`; `latencies` adds optional quantiles and
first response times. `activity` derives what is queued and running now from the core's tables.
"""
