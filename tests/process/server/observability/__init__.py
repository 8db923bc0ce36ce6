"""Logs, metrics and traces of a complete server."""
