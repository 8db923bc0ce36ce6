"""Inputs of a model, from arguments, files, or a random generator.

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
from shmserve.terminal.errors import Misuse
from shmserve.terminal.files import from_file, from_stdin, reason_of
from shmserve.terminal.tables import bytes_text, shape_text
from shmserve.terminal.values import FLOATS, Spec, from_text, from_value, matches, number, objects, rounded

Arrays = dict[str, NDArray[Any]]
"""Input name -> array; BF16 as uint16 bits."""

RANDOM_BELOW = 100
RANDOM_LETTERS = 8
WIDE_BYTES = 8
"""Size of a random number before it is converted to the input's dtype."""
STRING_BYTES = 8 + RANDOM_LETTERS + 33
"""Size of a random string as a Python object, with a reference to it."""


class InputSource(NamedTuple):
    """Command-line arguments that select inputs. `texts` and `shapes` are unparsed."""

    texts: Sequence[str] = ()
    file: str | None = None
    random: bool = False
    batch: int | None = None
    shapes: Sequence[str] = ()
    seed: int | None = None

    def check(self) -> None:
        """Checks the arguments that do not depend on the model."""
        if self.file == "-" and any(text.endswith("=@-") for text in self.texts):
            raise Misuse("standard input can be read only once: give either - or --input NAME=@-")
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
    """All inputs of one request. `largest` returns the model's max_batch_size, and is called only if needed."""
    arrays: Arrays = {}
    if source.file is not None:
        arrays.update(from_json(source.file, known))
    arrays.update(from_arguments(source.texts, known))
    if source.random:
        remaining = {name: spec for name, spec in known.items() if name not in arrays}
        if source.batch is not None:
            maximum = largest()
            if source.batch > maximum:
                raise Misuse(f"--batch {source.batch}: the max_batch_size of model '{model}' is {maximum}")
        arrays.update(random(remaining, source.batch, shapes_from(source.shapes, remaining), source.seed))
    if known and not arrays:
        example = next(iter(known))
        raise Misuse(
            f"model '{model}' needs {describe(known)}: "
            f"give --input {example}=VALUE, a JSON file, or --random for random data"
        )
    return arrays


def from_arguments(texts: Sequence[str], known: Mapping[str, Spec]) -> Arrays:
    """Parses texts of the form NAME=VALUE, NAME=@FILE, or NAME=@- for standard input."""
    arrays: Arrays = {}
    if sum(text.endswith("=@-") for text in texts) > 1:
        raise Misuse("--input: standard input, @-, can be read only once")
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise Misuse(f"--input {text}: write NAME=VALUE, e.g. x=1,2,3, or NAME=@FILE")
        spec = _spec(known, name)
        if value == "@-":
            arrays[name] = from_stdin(spec)
        else:
            arrays[name] = from_file(Path(value[1:]), spec) if value.startswith("@") else from_text(value, spec)
    return arrays


def from_json(file: str, known: Mapping[str, Spec]) -> Arrays:
    """Reads a JSON document: {"inputs": {NAME: VALUE}}, or the KServe protocol's list of tensors. `-` is stdin."""
    where = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        document = json.loads(text, parse_float=number)
    except (OSError, ValueError, RecursionError) as error:
        is_input = isinstance(error, FileNotFoundError) and "=" in file
        hint = f"; to send one input, write --input {file}" if is_input else ""
        raise Misuse(f"cannot read inputs from {where}: {reason_of(error)}{hint}") from error
    tensors = document.get("inputs") if isinstance(document, dict) else None
    if isinstance(tensors, dict):
        return {name: from_value(value, _spec(known, name)) for name, value in tensors.items()}
    if not isinstance(tensors, list):
        raise Misuse(f'{where} has no inputs: write {{"inputs": {{"NAME": [[1, 2, 3]]}}}}')
    arrays: Arrays = {}
    for entry in tensors:
        if not isinstance(entry, dict) or not {"name", "shape", "data"} <= entry.keys():
            raise Misuse(f"{where}: an input in a list needs name, shape and data")
        name = str(entry["name"])
        arrays[name] = from_value(entry["data"], _spec(known, name), shape=entry["shape"])
    return arrays


def random(
    known: Mapping[str, Spec], batch: int | None, shapes: Mapping[str, tuple[int, ...]], seed: int | None
) -> Arrays:
    """Random data for these inputs. Variable dims are 1, but a variable first dim is `batch` if given."""
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
        if not matches(shape, spec["shape"]):
            raise Misuse(f"--shape {text} does not fit input '{name}', which is {shape_text(spec['shape'])}")
        shapes[name] = shape
    return shapes


def _shape(spec: Spec, batch: int | None) -> tuple[int, ...]:
    shape = [1 if dim < 0 else dim for dim in spec["shape"]]
    if batch is not None:
        if not shape or spec["shape"][0] >= 0:
            raise Misuse(
                f"input '{spec['name']}' is {shape_text(spec['shape'])}: the model takes no batches: leave out --batch"
            )
        shape[0] = batch
    return tuple(shape)


def _random(spec: Spec, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    dtype = spec["datatype"]
    _check_size(spec["name"], shape, STRING_BYTES if dtype == "BYTES" else WIDE_BYTES)
    if dtype == "BYTES":
        letters = generator.integers(ord("a"), ord("z") + 1, (math.prod(shape), RANDOM_LETTERS), np.uint8)
        return objects([row.tobytes() for row in letters], shape)
    if dtype == "BOOL":
        return generator.integers(0, 2, shape).astype(np.bool_)
    if dtype in FLOATS:
        return rounded(generator.random(shape), spec)
    return generator.integers(0, RANDOM_BELOW, shape).astype(to_numpy(dtype))


def _check_size(name: str, shape: tuple[int, ...], item_bytes: int) -> None:
    """Raises Misuse if the data cannot fit into this machine's memory."""
    size = math.prod(shape) * item_bytes
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > machine:
        text = f"random data for input '{name}' of shape {shape_text(shape)} would take {bytes_text(size)}"
        raise Misuse(
            f"{text}, and this machine has {bytes_text(machine)}: give a smaller --shape or --batch, or --input"
        )
