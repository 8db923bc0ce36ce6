"""Python models in a worker: requests, responses, streams and calls of other models."""
