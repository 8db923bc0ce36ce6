"""Backends on the stand-ins for the GPU libraries of tests/standins."""
