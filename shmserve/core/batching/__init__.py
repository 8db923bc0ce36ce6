"""Queues of model versions, the batches formed from them, and their dispatch to workers."""
