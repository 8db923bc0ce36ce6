"""Logs, metrics and traces of a whole server."""
