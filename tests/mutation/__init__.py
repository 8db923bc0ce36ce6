"""Faults injected into the source, to see which tests detect them: `make mutation`."""
