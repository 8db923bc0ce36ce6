"""The worker process: one model instance, its batches, its outputs. It knows messages, never the broker or the core."""
