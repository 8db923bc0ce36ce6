"""Requests that models make to other models, and deadlocks between their instances."""
