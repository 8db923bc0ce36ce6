"""Requests that belong together and need the same instance in order."""
