"""As much of cupy as is used here: its binding of the CUDA runtime."""

from . import cuda

__all__ = ["cuda"]
