"""Metrics, traces, logs and the state reported to the service manager."""
