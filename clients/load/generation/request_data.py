"""The inputs of the requests: from texts and files, cycled, and random for what is not given.

Invariant: dtype and shape come from the model's metadata; a value that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.clients.load.plan import Inputs
from shmserve.clients.load.targets.base import ModelFacts
from shmserve.dtypes import to_numpy
from shmserve.extras import install_command
from shmserve.terminal import inputs
from shmserve.terminal.errors import Misuse
from shmserve.terminal.inputs import Arrays, Spec
from shmserve.terminal.tables import shape_text

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
RAW = (".bin", ".raw")
MOST_BYTES = 256 << 20
"""Random requests differ as long as they need no more memory than this."""


def request_inputs(given: Inputs, model: str, facts: ModelFacts) -> list[Arrays]:
    """The inputs of each different request. Lists of different lengths are cycled until the longest ends."""
    known = facts.inputs
    lists: dict[str, list[Any]] = {}
    for text in given.texts:
        name, values = _from_text(text, known)
        lists[name] = values
    documents = _from_data(given.data, known) if given.data is not None else []
    fixed = {name for document in documents for name in document}
    left = {name: spec for name, spec in known.items() if name not in lists and name not in fixed}
    if given.batch is not None and given.batch > facts.max_batch:
        raise Misuse(f"--batch {given.batch}: the max_batch_size of model '{model}' is {facts.max_batch}")
    shapes = inputs.shapes_from(given.shapes, left)
    randoms = [inputs.random(left, given.batch, shapes, given.seed)] if left else []
    if left:
        size = max(1, sum(getattr(array, "nbytes", 0) for array in randoms[0].values()))
        count = max(1, min(given.distinct, MOST_BYTES // size))
        randoms += [inputs.random(left, given.batch, shapes, given.seed + number) for number in range(1, count)]
    longest = max([len(values) for values in lists.values()] + [len(documents), len(randoms), 1])
    return [
        {name: values[number % len(values)] for name, values in lists.items()}
        | (documents[number % len(documents)] if documents else {})
        | (randoms[number % len(randoms)] if randoms else {})
        for number in range(longest)
    ]


def mean_rows(requests: Sequence[Arrays], max_batch: int) -> float:
    """Files may have different numbers of rows. A request without inputs has one."""
    if not max_batch:
        return 1
    return fmean(int(next(iter(arrays.values())).shape[0]) if arrays else 1 for arrays in requests)


def _from_text(text: str, known: Mapping[str, Spec]) -> tuple[str, list[Any]]:
    """NAME=VALUE as for `infer`, or NAME=@FILE, or NAME=@DIRECTORY: each of its files in turn, by name."""
    name, separator, value = text.partition("=")
    if not separator or not value.startswith("@"):
        ((name, array),) = inputs.from_arguments([text], known).items()
        return name, [array]
    spec = known.get(name)
    if spec is None:
        raise Misuse(f"the model has no input '{name}'; it has {inputs.describe(known)}")
    return name, [from_file(file, spec) for file in _files(Path(value[1:]), f"--input {text}")]


def _files(path: Path, what: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not found:
        raise Misuse(f"{what}: the directory has no files")
    return found


def _from_data(text: str, known: Mapping[str, Spec]) -> list[Arrays]:
    """JSON files as for `infer`: one file, or all of a directory in turn."""
    return [inputs.from_json(str(file), known) for file in _files(Path(text), f"--data {text}")]


def from_file(path: Path, spec: Spec) -> Any:
    """By the file's suffix: .npy, .json (the value), an image, or raw bytes (.bin, .raw). For a BYTES input, every file
    but .npy and .json is one string.
    """
    suffix = path.suffix.lower()
    readers: dict[str, Callable[[Path, Spec], Any]] = {".npy": inputs.from_npy, ".json": _json}
    read = readers.get(suffix)
    if read is None and spec["datatype"] == "BYTES":
        read = _string
    elif read is None:
        read = _image if suffix in IMAGES else _raw if suffix in RAW else None
    if read is None:
        known = ", ".join([*readers, *IMAGES, *RAW])
        raise Misuse(f"input '{spec['name']}': cannot tell what {path} holds by its suffix; known are {known}")
    try:
        return read(path, spec)
    except OSError as error:
        raise Misuse(f"input '{spec['name']}': cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Misuse(f"input '{spec['name']}': cannot read {path}: it is not text ({error.reason})") from error


def _json(path: Path, spec: Spec) -> Any:
    return inputs.from_text(path.read_text(), spec)


def _string(path: Path, spec: Spec) -> Any:
    array = np.empty(1, object)
    array[0] = path.read_bytes()
    return inputs.fit(array, spec)


def _raw(path: Path, spec: Spec) -> Any:
    """The tensor's bytes, little-endian."""
    data, dtype = path.read_bytes(), np.dtype(np.uint16) if spec["datatype"] == "BF16" else to_numpy(spec["datatype"])
    if len(data) % dtype.itemsize:
        raise Misuse(f"input '{spec['name']}': {path} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    return inputs.fit(np.frombuffer(data, dtype), spec)


def _image(path: Path, spec: Spec) -> Any:
    """Pixels in the layout and size of the input: [.., 3, H, W] or [.., H, W, 3], 1 for grey; floats from 0 to 1."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        text = f"reading {path} needs the package pillow: {install_command('bench')}"
        raise Misuse(text) from error
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
    pixels: NDArray[Any] = np.asarray(picture).reshape(picture.height, picture.width, channels)
    pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1) if planes_first else pixels)
    if spec["datatype"] == "BF16":
        return inputs.from_value((pixels / 255.0).tolist(), spec)
    if spec["datatype"] in inputs.FLOATS:
        pixels = pixels / 255.0
    return inputs.fit(pixels.astype(to_numpy(spec["datatype"])), spec)
