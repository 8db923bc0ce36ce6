"""Pre- and postprocessing of the text recogniser `ocr_rec`, a sample model whose network comes from another package.

Of third-party packages this module needs only numpy, so the example image is read and scaled here.
"""

from __future__ import annotations

import importlib.util
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.repo.onnx.protobuf import metadata

PICTURE = Path(__file__).parent / "examples" / "picture.png"
"""The example image, made by examples/make_picture.py."""
PACKAGE = "rapidocr_onnxruntime"
MODEL = "ocr_rec"
INPUT = "x"
OUTPUT = "softmax_11.tmp_0"
LINE_HEIGHT = 48
MIN_WIDTH = 320
BLANK = 0


def package_file(package: str, pattern: str) -> Path | None:
    """A file of a package, found without importing it; None if the package is not installed."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob(pattern)):
            return file
    return None


def model_file(kind: str = "rec") -> Path | None:
    """A network of the OCR package: det, which finds lines, cls, which tells which way up one is, or rec, which reads
    one."""
    return package_file(PACKAGE, f"models/*_{kind}_infer.onnx")


def read_characters() -> list[str]:
    """The character of each class of the recogniser, from the metadata of its file; class 0 is the CTC blank."""
    file = model_file()
    if file is None:
        raise FileNotFoundError("the OCR sample is not installed: pip install --no-deps rapidocr-onnxruntime")
    for key, value in metadata(file.read_bytes()):
        if key == "character":
            return ["", *value.splitlines(), " "]
    raise ValueError(f"{file.name} has no metadata entry `character`")


def to_input(picture: NDArray[Any]) -> NDArray[np.float32]:
    """Converts an image of one line of text, RGB [height, width, 3] uint8, to the recogniser's input, [1, 3, 48, W]."""
    height, width = picture.shape[:2]
    scaled = -(-LINE_HEIGHT * width // height)
    line = _resize(picture[:, :, ::-1].astype(np.float32), LINE_HEIGHT, scaled)
    padded = np.zeros((1, 3, LINE_HEIGHT, max(scaled, MIN_WIDTH)), np.float32)
    padded[0, :, :, :scaled] = line.transpose(2, 0, 1) / 127.5 - 1.0
    return padded


def to_text(probabilities: NDArray[Any], characters: list[str]) -> str:
    """Decodes the recogniser's output, [1, steps, classes] or [steps, classes], to text (greedy CTC)."""
    best = probabilities.reshape(-1, probabilities.shape[-1]).argmax(axis=1)
    changed = np.concatenate(([True], best[1:] != best[:-1]))
    return "".join(characters[index] for index in best[changed & (best != BLANK)]).strip()


def sample_picture() -> NDArray[np.uint8]:
    """The example image: one line of text, RGB [height, width, 3]."""
    return _read_png(PICTURE.read_bytes())


def _resize(picture: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Resizes an image bilinearly, with sample points at pixel centres."""
    for axis, size in ((0, height), (1, width)):
        have = picture.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (have / size) - 0.5, 0, have - 1)
        low = np.floor(at).astype(np.intp)
        high = np.minimum(low + 1, have - 1)
        share = (at - low).astype(np.float32).reshape(-1, *[1] * (2 - axis))
        picture = picture.take(low, axis) * (1 - share) + picture.take(high, axis) * share
    return picture


def _read_png(data: bytes) -> NDArray[np.uint8]:
    """Reads a PNG written by examples/make_picture.py: 8-bit RGB, rows without filters."""
    packed, at, size = b"", 8, (0, 0)
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, *form = struct.unpack(">IIBBBBB", body)
            if form != [8, 2, 0, 0, 0]:
                raise ValueError("only 8-bit RGB images without interlacing are supported")
            size = (height, width)
        elif kind == b"IDAT":
            packed += body
        at += length + 12
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(size[0], 1 + 3 * size[1])
    if rows[:, 0].any():
        raise ValueError("only images without row filters are supported")
    return rows[:, 1:].reshape(*size, 3)
