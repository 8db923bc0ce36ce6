"""Tensors of requests to the inputs of a batch, and its outputs to the rows of requests."""
