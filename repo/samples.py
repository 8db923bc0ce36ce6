"""The sample model repository: made from the packaged examples, and the OCR sample's arithmetic on both sides.

`python -m shmserve.repo.samples DEST` writes it. The rule of the file: it needs numpy and nothing else, so that the
samples of an installed wheel can be made without the `onnx` package and without an inference engine.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXAMPLES = Path(__file__).parent / "examples"
OCR_PACKAGE = "rapidocr_onnxruntime"
OCR_MODEL = "ocr_rec"
OCR_INPUT = "x"
OCR_OUTPUT = "softmax_11.tmp_0"
LINE_HEIGHT = 48
LEAST_WIDTH = 320
BLANK = 0

Say = Callable[[str], object]


def build(dest: Path, say: Say = print) -> list[str]:
    """Writes the sample repository to `dest`, leaves what is there and equal, and returns the names of its models."""
    names = []
    for source in sorted(path for path in EXAMPLES.iterdir() if (path / "config.pbtxt").is_file()):
        files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        if source.name == OCR_MODEL:
            model = ocr_model_file()
            if model is None:
                say(f"  {OCR_MODEL}: left out; `pip install --no-deps rapidocr-onnxruntime` brings its model")
                continue
            _put(model, dest / OCR_MODEL / "1" / "model.onnx")
        for file in files:
            _put(file, dest / source.name / file.relative_to(source))
        names.append(source.name)
        say(f"  {source.name}")
    return names


def _put(source: Path, target: Path) -> None:
    """Copies a file through a rename, so that a server that looks in this moment never sees half of one."""
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, fresh)
    fresh.replace(target)


# ------------------------------------------------------------------------------------------- the text recogniser


def ocr_model_file() -> Path | None:
    """The recogniser inside the OCR package, found without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(OCR_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted((Path(folder) / "models").glob("*_rec_infer.onnx")):
            return file
    return None


def ocr_characters(model: Path | None = None) -> list[str]:
    """What each class of the recogniser stands for. The list is in the model file's own metadata."""
    file = model or ocr_model_file()
    if file is None:
        raise FileNotFoundError("the OCR sample is not installed: pip install --no-deps rapidocr-onnxruntime")
    for key, value in _metadata(file.read_bytes()):
        if key == "character":
            return ["", *value.splitlines(), " "]
    raise ValueError(f"{file.name} has no metadata entry `character`")


def ocr_input(picture: NDArray[Any]) -> NDArray[np.float32]:
    """A picture of one line of text, RGB [height, width, 3] uint8 -> the input of the recogniser, [1, 3, 48, W]."""
    height, width = picture.shape[:2]
    scaled = -(-LINE_HEIGHT * width // height)
    line = _resize(picture[:, :, ::-1].astype(np.float32), LINE_HEIGHT, scaled)
    made = np.zeros((1, 3, LINE_HEIGHT, max(scaled, LEAST_WIDTH)), np.float32)
    made[0, :, :, :scaled] = line.transpose(2, 0, 1) / 127.5 - 1.0
    return made


def ocr_text(probabilities: NDArray[Any], characters: list[str]) -> str:
    """The answer of the recogniser, [1, steps, classes] or [steps, classes] -> the text (greedy CTC)."""
    best = probabilities.reshape(-1, probabilities.shape[-1]).argmax(axis=1)
    changed = np.concatenate(([True], best[1:] != best[:-1]))
    return "".join(characters[index] for index in best[changed & (best != BLANK)]).strip()


def sample_picture() -> NDArray[np.uint8]:
    """The picture beside the examples: one line of text, RGB [height, width, 3]."""
    return _read_png((EXAMPLES / "picture.png").read_bytes())


def _resize(picture: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Bilinear, sample points at the middle of pixels."""
    for axis, size in ((0, height), (1, width)):
        have = picture.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (have / size) - 0.5, 0, have - 1)
        low = np.floor(at).astype(np.intp)
        high = np.minimum(low + 1, have - 1)
        share = (at - low).astype(np.float32).reshape(-1, *[1] * (2 - axis))
        picture = picture.take(low, axis) * (1 - share) + picture.take(high, axis) * share
    return picture


def _read_png(data: bytes) -> NDArray[np.uint8]:
    """Reads what examples/make_picture.py writes: 8-bit RGB, rows without filters."""
    packed, at, size = b"", 8, (0, 0)
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, *form = struct.unpack(">IIBBBBB", body)
            if form != [8, 2, 0, 0, 0]:
                raise ValueError("only 8-bit RGB pictures without interlace are read here")
            size = (height, width)
        elif kind == b"IDAT":
            packed += body
        at += length + 12
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(size[0], 1 + 3 * size[1])
    if rows[:, 0].any():
        raise ValueError("only pictures without row filters are read here")
    return rows[:, 1:].reshape(*size, 3)


def _metadata(model: bytes) -> Iterator[tuple[str, str]]:
    """The metadata_props of an ONNX file (field 14 of its outermost protobuf message)."""
    for number, body in _fields(memoryview(model)):
        if number == 14:
            entry = dict(_fields(body))
            yield bytes(entry[1]).decode(), bytes(entry[2]).decode()


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The length-delimited fields of a protobuf message; the other kinds are stepped over."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 2:
            length, at = _varint(message, at)
            yield tag >> 3, message[at : at + length]
            at += length
        elif kind == 0:
            at = _varint(message, at)[1]
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"not an ONNX file: protobuf wire type {kind}")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m shmserve.repo.samples DEST", file=sys.stderr)
        return 2
    build(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
