"""Versions and their instances: traffic, scaling and sleep."""
