"""Data types of tensors: wire names, sizes, and corresponding numpy types.

Only functions import numpy, so that the core can use the sizes without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ITEM_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
    "BYTES": 0,
}
"""Bytes of one element; 0 if elements differ in length (BYTES: 4-byte little-endian length, then the bytes)."""

BY_NUMBER = ("", *[name for name in ITEM_BYTES if name not in ("BF16", "BYTES")], "BYTES", "BF16")
"""The wire names by their numbers in Triton's interfaces; 0 is invalid."""
FROM_CONFIG = {f"TYPE_{name}": name for name in ITEM_BYTES if name != "BYTES"} | {"TYPE_STRING": "BYTES"}
TO_CONFIG = {name: config for config, name in FROM_CONFIG.items()}

_NUMPY = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
BY_NAME = {name: dtype for dtype, name in _NUMPY.items()} | {"bfloat16": "BF16"}
"""The wire names by the names of numpy, which most engines use."""

_to_numpy: dict[str, Any] = {}
_from_numpy: dict[Any, str] = {}


def _fill() -> None:
    import numpy as np

    for name, numpy_name in _NUMPY.items():
        _to_numpy[name] = np.dtype(numpy_name)
        _from_numpy[np.dtype(numpy_name)] = name
    try:
        import ml_dtypes
    except ImportError:
        # Without ml_dtypes, BF16 arrays are raw 16 bits (uint16). uint16 arrays are sent as UINT16.
        _to_numpy["BF16"] = np.dtype("uint16")
    else:
        _to_numpy["BF16"] = np.dtype(ml_dtypes.bfloat16)
        _from_numpy[np.dtype(ml_dtypes.bfloat16)] = "BF16"
    _to_numpy["BYTES"] = np.dtype("object")
    _from_numpy[np.dtype("object")] = "BYTES"


def to_numpy(name: str) -> np.dtype[Any]:
    """The numpy dtype for a wire name. Raises KeyError if the name is unknown."""
    if not _to_numpy:
        _fill()
    dtype: np.dtype[Any] = _to_numpy[name]
    return dtype


def from_numpy(dtype: np.dtype[Any]) -> str:
    """The wire name of a numpy dtype. Raises TypeError if it has none."""
    if not _from_numpy:
        _fill()
    name = _from_numpy.get(dtype)
    if name is None:
        if dtype.kind in "SU":
            return "BYTES"
        native = dtype.newbyteorder("=")
        name = _from_numpy.get(native)
        if name is None:
            raise TypeError(f"numpy dtype {dtype} has no wire type; use one of {', '.join(ITEM_BYTES)}")
    return name


def from_bfloat16(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Converts BF16, as uint16 bits or as an array of ml_dtypes, to float32."""
    import numpy as np

    wide = np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(bits.shape)


def elements(shape: tuple[int, ...]) -> int:
    """The product of the dims. Does not overflow, as Python integers are unbounded."""
    count = 1
    for dim in shape:
        count *= dim
    return count
