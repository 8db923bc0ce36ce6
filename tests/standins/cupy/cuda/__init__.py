"""The package that holds the binding of the CUDA runtime."""

from . import runtime

__all__ = ["runtime"]
