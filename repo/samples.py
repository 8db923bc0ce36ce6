"""Builds the sample model repository from the packaged examples. Networks that are not packaged are taken from other
installed Python packages. Also contains the pre- and postprocessing of the text recogniser `ocr_rec`.

Run it with `python -m shmserve.repo.samples DEST [SET] ...`. Of third-party packages this module needs only numpy, so
samples can be built from an installed wheel, without `onnx` or an inference engine.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.repo.onnx.protobuf import Node, metadata, wrapped

EXAMPLES = Path(__file__).parent / "examples"
OCR_PACKAGE = "rapidocr_onnxruntime"
OCR_MODEL = "ocr_rec"
OCR_INPUT = "x"
OCR_OUTPUT = "softmax_11.tmp_0"
LINE_HEIGHT = 48
LEAST_WIDTH = 320
BLANK = 0
VAD_PACKAGE = "silero_vad"
VAD_RATE = 16_000
VAD_CHUNK = 512
VAD_CONTEXT = 64
"""Number of audio samples of the previous chunk that precede each chunk as context."""

SETS = {
    "basic": ("add_sub", "cnn", "mlp", "ocr_rec"),
    "ocr": ("ocr", "ocr_boxes", "ocr_det", "ocr_prepare", "ocr_rec", "ocr_text"),
    "sentiment": ("sentiment", "sentiment_classifier", "sentiment_labels", "sentiment_tokenizer"),
    "vad": ("vad",),
}
BASIC = ("basic",)
_PICTURES = {"cv2": "opencv-python-headless", "pyclipper": "pyclipper", "PIL": "pillow"}
"""Modules that the Python models of the set `ocr` import -> the packages to install for them."""

Say = Callable[[str], object]


def build(dest: Path, show: Say = print, sets: Iterable[str] = BASIC) -> list[str]:
    """Write these sets of samples to `dest` and return the names of the models. Unchanged files are not written again.

    A set is skipped if it needs a package that is not installed; of the set `basic`, only the model is.
    """
    names: dict[str, None] = {}
    for part in sets:
        absent = _absent(part)
        if absent:
            ways = " and ".join(f"`pip install {words}`" for words in absent)
            show(f"  {part}: skipped; {ways} install{'' if len(absent) > 1 else 's'} what it needs")
            continue
        for name in SETS[part]:
            made = {} if name in names else _from_packages(name)
            if made is None:
                show(f"  {name}: skipped; `pip install --no-deps rapidocr-onnxruntime` installs its model")
                continue
            if name not in names:
                _write(name, made, dest)
                show(f"  {name}")
            names[name] = None
    return sorted(names)


def _absent(part: str) -> list[str]:
    """The `pip install` arguments, one text for each command, that provide what the set lacks."""
    if part == "ocr":
        pictures = [package for module, package in _PICTURES.items() if importlib.util.find_spec(module) is None]
        return [" ".join(pictures)] * bool(pictures) + ["--no-deps rapidocr-onnxruntime"] * (ocr_model_file() is None)
    return ["--no-deps silero-vad"] if part == "vad" and vad_model_file() is None else []


def _from_packages(name: str) -> dict[str, bytes] | None:
    """The files of a model that come from other packages: path -> content. None if a package is missing."""
    if name == "vad":
        file = vad_model_file()
        return {"1/model.onnx": vad_model(file.read_bytes())} if file is not None else None
    kind = {"ocr_det": "det", "ocr_rec": "rec"}.get(name)
    if kind is not None:
        file = ocr_model_file(kind)
        return {"1/model.onnx": file.read_bytes()} if file is not None else None
    if name == "ocr_text":
        return {"1/characters.txt": "\n".join(ocr_characters()[1:-1]).encode()}
    return {}


def _write(name: str, made: dict[str, bytes], dest: Path) -> None:
    source = EXAMPLES / name
    (dest / name / "1").mkdir(parents=True, exist_ok=True)
    for path, data in made.items():
        _put(data, dest / name / path)
    for file in sorted(source.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            _put(file.read_bytes(), dest / name / file.relative_to(source))


def _put(data: bytes, target: Path) -> None:
    """Write a file atomically, as a running server may read it at any moment. An unchanged file keeps its mtime."""
    if target.is_file() and target.read_bytes() == data:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_bytes(data)
    fresh.replace(target)


def _package_file(package: str, pattern: str) -> Path | None:
    """A file of a package, found without importing it; None if the package is not installed."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob(pattern)):
            return file
    return None


# ---------------------------------------------------------------------------------------------- the voice detector


def vad_model_file() -> Path | None:
    return _package_file(VAD_PACKAGE, "data/silero_vad.onnx")


def vad_model(network: bytes) -> bytes:
    """Wrap the network of the package so that it can be served as a sequence model.

    The batch becomes the first dimension of every tensor. What must be kept between chunks, the recurrent state and the
    last samples of the chunk (context), becomes pairs of inputs and outputs. The sample rate is fixed at 16 kHz.
    """
    before = [
        Node("Concat", ["CONTEXT", "CHUNK"], ["input"], {"axis": 1}),
        Node("Transpose", ["STATE"], ["state"], {"perm": [1, 0, 2]}),
    ]
    after = [
        Node("Identity", ["output"], ["PROBABILITY"]),
        Node("Transpose", ["stateN"], ["STATE_OUT"], {"perm": [1, 0, 2]}),
        Node("Slice", ["CHUNK", "context_from", "context_to", "context_axis"], ["CONTEXT_OUT"]),
    ]
    state, context = ("batch", 2, 128), ("batch", VAD_CONTEXT)
    return wrapped(
        network,
        before,
        after,
        {"CHUNK": ("batch", VAD_CHUNK), "STATE": state, "CONTEXT": context},
        {"PROBABILITY": ("batch", 1), "STATE_OUT": state, "CONTEXT_OUT": context},
        {
            "sr": np.array(VAD_RATE),
            "context_from": np.array([VAD_CHUNK - VAD_CONTEXT]),
            "context_to": np.array([VAD_CHUNK]),
            "context_axis": np.array([1]),
        },
    )


# ------------------------------------------------------------------------------------------- the text recogniser


def ocr_model_file(kind: str = "rec") -> Path | None:
    """A network of the OCR package: det, which finds lines, or rec, which reads one."""
    return _package_file(OCR_PACKAGE, f"models/*_{kind}_infer.onnx")


def ocr_characters(model: Path | None = None) -> list[str]:
    """The character of each class of the recogniser, from the metadata of its file; class 0 is the CTC blank."""
    file = model or ocr_model_file()
    if file is None:
        raise FileNotFoundError("the OCR sample is not installed: pip install --no-deps rapidocr-onnxruntime")
    for key, value in metadata(file.read_bytes()):
        if key == "character":
            return ["", *value.splitlines(), " "]
    raise ValueError(f"{file.name} has no metadata entry `character`")


def ocr_input(picture: NDArray[Any]) -> NDArray[np.float32]:
    """Convert an image of one line of text, RGB [height, width, 3] uint8, to the recogniser's input, [1, 3, 48, W]."""
    height, width = picture.shape[:2]
    scaled = -(-LINE_HEIGHT * width // height)
    line = _resize(picture[:, :, ::-1].astype(np.float32), LINE_HEIGHT, scaled)
    made = np.zeros((1, 3, LINE_HEIGHT, max(scaled, LEAST_WIDTH)), np.float32)
    made[0, :, :, :scaled] = line.transpose(2, 0, 1) / 127.5 - 1.0
    return made


def ocr_text(probabilities: NDArray[Any], characters: list[str]) -> str:
    """Decode the recogniser's output, [1, steps, classes] or [steps, classes], to text (greedy CTC)."""
    best = probabilities.reshape(-1, probabilities.shape[-1]).argmax(axis=1)
    changed = np.concatenate(([True], best[1:] != best[:-1]))
    return "".join(characters[index] for index in best[changed & (best != BLANK)]).strip()


def sample_picture() -> NDArray[np.uint8]:
    """The example image: one line of text, RGB [height, width, 3]."""
    return _read_png((EXAMPLES / "picture.png").read_bytes())


def _resize(picture: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Resize an image bilinearly, with sample points at pixel centres."""
    for axis, size in ((0, height), (1, width)):
        have = picture.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (have / size) - 0.5, 0, have - 1)
        low = np.floor(at).astype(np.intp)
        high = np.minimum(low + 1, have - 1)
        share = (at - low).astype(np.float32).reshape(-1, *[1] * (2 - axis))
        picture = picture.take(low, axis) * (1 - share) + picture.take(high, axis) * share
    return picture


def _read_png(data: bytes) -> NDArray[np.uint8]:
    """Read a PNG written by examples/make_picture.py: 8-bit RGB, rows without filters."""
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


def main(arguments: list[str]) -> int:
    known = [*SETS, "all"]
    if not arguments or not set(arguments[1:]) <= set(known):
        print(f"usage: python -m shmserve.repo.samples DEST [{' | '.join(known)}] ...", file=sys.stderr)
        return 2
    sets = arguments[1:] or BASIC
    build(Path(arguments[0]), sets=SETS if "all" in sets else sets)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
