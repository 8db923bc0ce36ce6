"""Inputs of a model from arguments, from files, and from a random generator.

Invariant: dtype and shape come from the model's metadata; a value that does not fit is an error, never converted.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmserve.dtypes import to_numpy
from shmserve.protocol.messages import DIMS
from shmserve.terminal.errors import Misuse
from shmserve.terminal.output import from_bfloat16
from shmserve.terminal.tables import bytes_text, shape_text

Spec = Mapping[str, Any]
"""A tensor in the metadata: name, datatype, shape."""
Arrays = dict[str, NDArray[Any]]
"""Input name -> array. BF16 as its bits, uint16."""

FLOATS = ("FP16", "FP32", "FP64", "BF16")
RANDOM_BELOW = 100
RANDOM_LETTERS = 8
WIDE_BYTES = 8
"""Bytes of a random number, before it is converted to the input's dtype."""
STRING_BYTES = 8 + RANDOM_LETTERS + 33
"""Bytes of a random string, as an object, and of the reference to it."""
SHOWN = 60
"""The most characters of a refused value to show."""


class InputSource(NamedTuple):
    """Command-line arguments that select inputs. `texts` and `shapes` are unparsed."""

    texts: Sequence[str] = ()
    file: str | None = None
    random: bool = False
    batch: int | None = None
    shapes: Sequence[str] = ()
    seed: int | None = None

    def check(self) -> None:
        """Checks what does not depend on the model."""
        if not self.random:
            for name, value in (("batch", self.batch), ("seed", self.seed), ("shape", self.shapes or None)):
                if value is not None:
                    raise Misuse(f"--{name} is for random data: give --random too")


def specs(metadata: Mapping[str, Any]) -> dict[str, Spec]:
    return {spec["name"]: spec for spec in metadata["inputs"]}


def describe(known: Mapping[str, Spec]) -> str:
    return ", ".join(f"{name} ({spec['datatype']} {shape_text(spec['shape'])})" for name, spec in known.items())


def _spec(known: Mapping[str, Spec], name: str) -> Spec:
    spec = known.get(name)
    if spec is None:
        raise Misuse(f"the model has no input '{name}'; it has {describe(known)}")
    return spec


# ------------------------------------------------------------------------------------------ sources


def inputs(source: InputSource, model: str, known: Mapping[str, Spec], largest: Callable[[], int]) -> Arrays:
    """All inputs of one request. `largest` returns the model's max_batch_size; it is only called if needed."""
    arrays: Arrays = {}
    if source.file is not None:
        arrays.update(from_json(source.file, known))
    arrays.update(from_arguments(source.texts, known))
    if source.random:
        left = {name: spec for name, spec in known.items() if name not in arrays}
        if source.batch is not None:
            most = largest()
            if source.batch > most:
                raise Misuse(f"--batch {source.batch}: the max_batch_size of model '{model}' is {most}")
        arrays.update(random(left, source.batch, shapes_from(source.shapes, left), source.seed))
    if known and not arrays:
        example = next(iter(known))
        raise Misuse(
            f"model '{model}' needs {describe(known)}: "
            f"give --input {example}=VALUE, a JSON file, or --random for data without a meaning"
        )
    return arrays


def from_arguments(texts: Sequence[str], known: Mapping[str, Spec]) -> Arrays:
    """Parses texts of the form NAME=VALUE or NAME=@FILE.npy."""
    arrays: Arrays = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise Misuse(f"--input {text}: write NAME=VALUE, e.g. x=1,2,3, or NAME=@FILE.npy")
        spec = _spec(known, name)
        arrays[name] = from_npy(Path(value[1:]), spec) if value.startswith("@") else from_text(value, spec)
    return arrays


def from_json(file: str, known: Mapping[str, Spec]) -> Arrays:
    """Reads a JSON document: {"inputs": {NAME: VALUE}}, or the KServe protocol's list of tensors. `-` is stdin."""
    where = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        document = json.loads(text, parse_float=_float)
    except (OSError, ValueError, RecursionError) as error:
        raise Misuse(f"cannot read inputs from {where}: {_reason(error)}") from error
    inputs = document.get("inputs") if isinstance(document, dict) else None
    if isinstance(inputs, dict):
        return {name: from_value(value, _spec(known, name)) for name, value in inputs.items()}
    if not isinstance(inputs, list):
        raise Misuse(f'{where} has no inputs: write {{"inputs": {{"NAME": [[1, 2, 3]]}}}}')
    arrays: Arrays = {}
    for entry in inputs:
        if not isinstance(entry, dict) or not {"name", "shape", "data"} <= entry.keys():
            raise Misuse(f"{where}: an input in a list needs name, shape and data")
        name = str(entry["name"])
        arrays[name] = from_value(entry["data"], _spec(known, name), shape=entry["shape"])
    return arrays


def random(
    known: Mapping[str, Spec], batch: int | None, shapes: Mapping[str, tuple[int, ...]], seed: int | None
) -> Arrays:
    """Random data for these inputs. Variable dims are 1, the first one `batch`."""
    generator = np.random.default_rng(seed)
    return {name: _random(spec, shapes.get(name) or _shape(spec, batch), generator) for name, spec in known.items()}


def shapes_from(texts: Sequence[str], known: Mapping[str, Spec]) -> dict[str, tuple[int, ...]]:
    """Parses texts of the form NAME=D1,D2,...: full shapes of inputs whose variable dims should not be 1."""
    shapes = {}
    for text in texts:
        name, _, dims = text.partition("=")
        spec = _spec(known, name)
        if not re.fullmatch(r"\d+(,\d+)*", dims):
            raise Misuse(f"--shape {text}: write NAME=D1,D2,..., e.g. {name}=1,3,48,320")
        shape = tuple(int(dim) for dim in dims.split(","))
        if not _matches(shape, spec["shape"]):
            raise Misuse(f"--shape {text} does not fit input '{name}', which is {shape_text(spec['shape'])}")
        shapes[name] = shape
    return shapes


def _shape(spec: Spec, batch: int | None) -> tuple[int, ...]:
    shape = [1 if dim < 0 else dim for dim in spec["shape"]]
    if batch is not None:
        if not shape or spec["shape"][0] >= 0:
            raise Misuse(
                f"input '{spec['name']}' is {shape_text(spec['shape'])}: the model takes no batches, leave out --batch"
            )
        shape[0] = batch
    return tuple(shape)


def _random(spec: Spec, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    dtype = spec["datatype"]
    _check_size(spec["name"], shape, STRING_BYTES if dtype == "BYTES" else WIDE_BYTES)
    if dtype == "BYTES":
        letters = generator.integers(ord("a"), ord("z") + 1, (math.prod(shape), RANDOM_LETTERS), np.uint8)
        return _objects([row.tobytes() for row in letters], shape)
    if dtype == "BOOL":
        return generator.integers(0, 2, shape).astype(np.bool_)
    if dtype in FLOATS:
        return _floats(generator.random(shape), spec)
    return generator.integers(0, RANDOM_BELOW, shape).astype(to_numpy(dtype))


def _check_size(name: str, shape: tuple[int, ...], item_bytes: int) -> None:
    """Misuse if the data cannot fit into this machine's memory."""
    size = math.prod(shape) * item_bytes
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > machine:
        text = f"random data for input '{name}' of shape {shape_text(shape)} would take {bytes_text(size)}"
        raise Misuse(f"{text}, this machine has {bytes_text(machine)}; give a smaller --shape or --batch, or --input")


# ------------------------------------------------------------------------------------------ values


def from_text(text: str, spec: Spec) -> Any:
    """A JSON literal, or values separated by commas or spaces; for BYTES, the text itself if it is not JSON."""
    try:
        value = json.loads(text, parse_float=_float)
    except (ValueError, RecursionError):
        value = (
            text if spec["datatype"] == "BYTES" else [_word(word, spec) for word in re.split(r"[,\s]+", text.strip())]
        )
    else:
        if spec["datatype"] == "BYTES" and not isinstance(value, (str, list)):
            value = text  # 42 is a valid string
    return from_value(value, spec)


def _word(word: str, spec: Spec) -> int | float | bool:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for convert in (int, _float):
        try:
            return convert(word)
        except ValueError:
            continue
    raise Misuse(f"input '{spec['name']}' ({spec['datatype']}): '{_short(word)}' is not a number")


def _float(text: str) -> float:
    """ValueError if a finite number overflows to infinity."""
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{_short(text)} is too large for a number")
    return value


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def from_value(value: Any, spec: Spec, shape: Sequence[int] | None = None) -> Any:
    """Converts numbers, strings or nested lists of them to a tensor of the model's dtype and shape."""
    flat: list[Any] = []
    dims = _flatten(value, flat, spec["name"], DIMS)
    if shape is not None:
        if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise Misuse(f"input '{spec['name']}': shape {shape} is no list of sizes")
        if math.prod(shape) != len(flat):
            raise Misuse(f"input '{spec['name']}': {len(flat)} values do not fill shape {shape_text(shape)}")
        dims = tuple(shape)
    dtype = spec["datatype"]
    if dtype == "BYTES":
        _all_are(flat, (str,), "a string", spec)
        array = _objects(flat, dims)
    elif dtype == "BOOL":
        for item in flat:
            if item not in (0, 1):
                raise _unfit(item, "true or false", spec)
        array = np.array(flat, np.bool_).reshape(dims)
    elif dtype in FLOATS:
        _all_are(flat, (int, float), "a number", spec)
        try:
            array = np.array(flat, np.float64).reshape(dims)
        except OverflowError:
            raise _unfit(max(flat, key=abs), f"within the range of {dtype}", spec) from None
    else:
        array = _integers(flat, spec).reshape(dims)
    array = fit(array, spec)
    return _floats(array, spec) if dtype in FLOATS else array


def _flatten(value: Any, flat: list[Any], name: str, dims: int) -> tuple[int, ...]:
    """Appends the leaves to `flat` and returns the shape. Misuse if lists have different lengths."""
    if not isinstance(value, list):
        flat.append(value)
        return ()
    if not dims:
        raise Misuse(f"input '{name}': a tensor has at most {DIMS} dims")
    shapes = {_flatten(item, flat, name, dims - 1) for item in value}
    if len(shapes) > 1:
        raise Misuse(f"input '{name}': the lists in it have different lengths")
    return (len(value), *(shapes.pop() if shapes else ()))


def _all_are(flat: list[Any], kinds: tuple[type, ...], what: str, spec: Spec) -> None:
    for item in flat:
        if type(item) not in kinds:
            raise _unfit(item, what, spec)


def _unfit(item: Any, what: str, spec: Spec) -> Misuse:
    return Misuse(f"input '{spec['name']}' ({spec['datatype']}): {_short(json.dumps(item))} is not {what}")


def _integers(flat: list[Any], spec: Spec) -> NDArray[Any]:
    info = np.iinfo(to_numpy(spec["datatype"]))
    _all_are(flat, (int,), "an integer", spec)
    for item in flat:
        if not info.min <= item <= info.max:
            raise _unfit(item, f"within {info.min} ... {info.max}", spec)
    return np.array(flat, info.dtype)


def _floats(values: NDArray[np.float64], spec: Spec) -> Any:
    """Converts to the model's precision; Misuse if a finite number overflows."""
    dtype = spec["datatype"]
    single = np.dtype(np.float32) if dtype == "BF16" else to_numpy(dtype)
    with np.errstate(over="ignore"):
        rounded = values.astype(single)
    if dtype == "BF16":
        bits = _bfloat16(rounded)
        rounded = from_bfloat16(bits)
    lost = np.isinf(rounded) & np.isfinite(values)
    if lost.any():
        raise _unfit(values[lost].flat[0].item(), f"within the range of {dtype}", spec)
    return bits if dtype == "BF16" else rounded


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float, rounded to nearest, ties to even."""
    wide = values.view(np.uint32).astype(np.uint64)
    rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _objects(items: Sequence[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


# ------------------------------------------------------------------------------------------ files and shapes


def from_npy(file: Path, spec: Spec) -> Any:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise Misuse(f"input '{spec['name']}': cannot read {file}: {_reason(error)}") from error
    if not isinstance(array, np.ndarray):
        raise Misuse(f"input '{spec['name']}': {file} is no .npy file")
    dtype = spec["datatype"]
    if dtype == "BYTES":
        if array.dtype.kind not in "SU":
            raise Misuse(f"input '{spec['name']}' (BYTES): {file} holds {array.dtype}, not strings")
        return fit(_objects(array.reshape(-1).tolist(), array.shape), spec)
    if dtype == "BF16":
        if array.dtype not in (np.dtype(np.uint16), np.dtype("V2")):
            raise Misuse(f"input '{spec['name']}' (BF16): {file} holds {array.dtype}, not 16-bit patterns (uint16)")
        return fit(array.view(np.uint16), spec)
    wanted = to_numpy(dtype)
    if array.dtype != wanted:
        raise Misuse(f"input '{spec['name']}' ({dtype}): {file} holds {array.dtype}; save it with .astype('{wanted}')")
    return fit(array, spec)


def _matches(shape: Sequence[int], pattern: Sequence[int]) -> bool:
    return len(shape) == len(pattern) and all(
        free < 0 or size == free for size, free in zip(shape, pattern, strict=True)
    )


def fit(array: NDArray[Any], spec: Spec) -> NDArray[Any]:
    """Adapts the array to the model's shape: unchanged, as a batch of one, or, if flat, reshaped to the only possible
    shape (with a first dim of 1 if that resolves it)."""
    pattern = spec["shape"]
    if _matches(array.shape, pattern):
        return array
    if pattern and pattern[0] < 0 and _matches(array.shape, pattern[1:]):
        return array[None]
    if array.ndim <= 1:
        for shape in (pattern, [1, *pattern[1:]] if pattern and pattern[0] < 0 else pattern):
            if sum(dim < 0 for dim in shape) <= 1 and 0 not in shape:
                known = math.prod(dim for dim in shape if dim >= 0)
                if (array.size == known) if min(shape, default=0) >= 0 else (array.size and array.size % known == 0):
                    return array.reshape(shape)
    raise Misuse(
        f"input '{spec['name']}' ({spec['datatype']}): a value of shape {shape_text(array.shape)} does not fit "
        f"{shape_text(pattern)}"
    )


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
