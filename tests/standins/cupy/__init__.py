"""The required part of cupy: its binding of the CUDA runtime, and arrays."""

from numpy import float32, float64, int32, uint8

from . import cuda
from .arrays import asarray, asnumpy, empty, from_dlpack, full, ndarray, zeros

__all__ = [
    "asarray", "asnumpy", "cuda", "empty", "float32", "float64", "from_dlpack", "full", "int32", "ndarray", "uint8",
    "zeros",
]  # fmt: skip
