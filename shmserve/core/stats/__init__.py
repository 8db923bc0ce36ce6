"""Counters and durations of model versions, and of the callers who use them."""
