"""Each engine in a worker process."""
