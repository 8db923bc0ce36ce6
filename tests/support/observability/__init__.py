"""Collectors and queries of traces and metrics."""
