"""Hypothesis state machines: the core under everything that clients, workers, links and time can do."""
