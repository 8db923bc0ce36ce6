"""Simulations of one batching model, and the plots of docs/explanation/batching.md that are made from their results."""
