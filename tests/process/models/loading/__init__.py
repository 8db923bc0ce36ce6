"""Loads, reloads, rollbacks and unloads of models on disk."""
