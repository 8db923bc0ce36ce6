"""The rules that a configuration must keep, beyond being well written."""
