"""Simulations of one batching model, and the plots of docs/batching.md drawn from their results."""
