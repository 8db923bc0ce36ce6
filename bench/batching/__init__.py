"""Simulations of one batching model, and the plots of docs/explanation/batching.md drawn from their results."""
