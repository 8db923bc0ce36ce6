"""Reads the value of an input from a file: an array, JSON, an image, or raw bytes.

Invariant: only the suffix of a file decides how it is read, never its content.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.dtypes import to_numpy
from shmserve.extras import install_command, outdated
from shmserve.terminal.errors import Misuse
from shmserve.terminal.tables import shape_text
from shmserve.terminal.values import FLOATS, Spec, fit, from_text, from_value, objects

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
RAW = (".bin", ".raw")


def from_file(path: Path, spec: Spec) -> Any:
    """Reads a file by its suffix: .npy, .json (the value), an image, or raw bytes (.bin, .raw). For a BYTES input, any
    file other than .npy and .json is one string.
    """
    suffix = path.suffix.lower()
    readers: dict[str, Callable[[Path, Spec], Any]] = {".npy": _npy, ".json": _json}
    read = readers.get(suffix)
    if read is None and spec["datatype"] == "BYTES":
        read = _string
    elif read is None:
        read = _image if suffix in IMAGES else _raw if suffix in RAW else None
    if read is None:
        known = ", ".join([*readers, *IMAGES, *RAW])
        raise Misuse(f"input '{spec['name']}': unknown suffix of {path}; expected one of: {known}")
    try:
        return read(path, spec)
    except OSError as error:
        raise Misuse(f"input '{spec['name']}': cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Misuse(f"input '{spec['name']}': cannot read {path}: it is not text ({error.reason})") from error


def _json(path: Path, spec: Spec) -> Any:
    return from_text(path.read_text(), spec)


def _string(path: Path, spec: Spec) -> Any:
    return fit(objects([path.read_bytes()], (1,)), spec)


def _raw(path: Path, spec: Spec) -> Any:
    return _numbers(path.read_bytes(), str(path), spec)


def from_stdin(spec: Spec) -> Any:
    """Reads raw bytes: one string for a BYTES input, otherwise the bytes of the tensor."""
    data = sys.stdin.buffer.read()
    if spec["datatype"] == "BYTES":
        return fit(objects([data], (1,)), spec)
    return _numbers(data, "standard input", spec)


def _numbers(data: bytes, where: str, spec: Spec) -> Any:
    """Converts little-endian bytes to a tensor."""
    dtype = np.dtype(np.uint16) if spec["datatype"] == "BF16" else to_numpy(spec["datatype"])
    if len(data) % dtype.itemsize:
        raise Misuse(f"input '{spec['name']}': {where} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return fit(np.frombuffer(data, dtype), spec)


def _image(path: Path, spec: Spec) -> Any:
    """Reads pixels in the layout and size of the input: [.., 3, H, W] or [.., H, W, 3], with 1 instead of 3 for grey.
    Floats are from 0 to 1."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        text = f"reading {path} needs the package pillow: {install_command('bench')}"
        raise Misuse(text) from error
    if old := outdated("bench", ["pillow"]):
        raise Misuse(f"{path} cannot be read: {old}")
    shape = [int(dim) for dim in spec["shape"][-3:]]
    planes_first = len(shape) == 3 and shape[0] in (1, 3)
    if len(shape) < 3 or not (planes_first or shape[2] in (1, 3)):
        text = f"input '{spec['name']}' is {shape_text(spec['shape'])}, not [.., 3, H, W] or [.., H, W, 3]"
        raise Misuse(f"{text}: {path} cannot be an image of it; give .npy files")
    channels, height, width = shape if planes_first else (shape[2], shape[0], shape[1])
    try:
        with Image.open(path) as opened:
            picture = opened.convert("L" if channels == 1 else "RGB")
            picture = picture.resize((width if width > 0 else picture.width, height if height > 0 else picture.height))
    except UnidentifiedImageError as error:
        raise Misuse(f"input '{spec['name']}': {path} is not an image") from error
    except Image.DecompressionBombError as error:
        raise Misuse(f"input '{spec['name']}': {path} cannot be read: {error}") from error
    pixels: NDArray[Any] = np.asarray(picture).reshape(picture.height, picture.width, channels)
    pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1) if planes_first else pixels)
    if spec["datatype"] == "BF16":
        return from_value((pixels / 255.0).tolist(), spec)
    if spec["datatype"] in FLOATS:
        pixels = pixels / 255.0
    return fit(pixels.astype(to_numpy(spec["datatype"])), spec)


def _npy(file: Path, spec: Spec) -> Any:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise Misuse(f"input '{spec['name']}': cannot read {file}: {reason_of(error)}") from error
    if not isinstance(array, np.ndarray):
        raise Misuse(f"input '{spec['name']}': {file} is not a .npy file")
    dtype = spec["datatype"]
    if dtype == "BYTES":
        if array.dtype.kind not in "SU":
            raise Misuse(f"input '{spec['name']}' (BYTES): {file} holds {array.dtype}, not strings")
        return fit(objects(array.reshape(-1).tolist(), array.shape), spec)
    if dtype == "BF16":
        if array.dtype not in (np.dtype(np.uint16), np.dtype("V2")):
            raise Misuse(f"input '{spec['name']}' (BF16): {file} holds {array.dtype}, not 16-bit patterns (uint16)")
        return fit(array.view(np.uint16), spec)
    wanted = to_numpy(dtype)
    if array.dtype != wanted:
        raise Misuse(f"input '{spec['name']}' ({dtype}): {file} holds {array.dtype}; save it with .astype('{wanted}')")
    return fit(array, spec)


def reason_of(error: Exception) -> str:
    """Why a file cannot be read."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
