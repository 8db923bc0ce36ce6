"""The files that a configuration names: labels, warm-up data, initial states of sequences.

Only files inside the model's directory can be opened, when they are checked and when they are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shmserve.dtypes import FROM_CONFIG, ITEM_BYTES
from shmserve.errors import InvalidRequest
from shmserve.repo.config.problems import ProblemFunction, nearest
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.files.safe_paths import open_inside, read_inside

WARMUP = "warmup"
INITIAL_STATE = "initial_state"
LABEL_BYTES = 16 * 1024 * 1024
"""Maximum size of a label file."""


class _Named(NamedTuple):
    """A file that the configuration names in the field `path`. `min_bytes` is its minimum size in bytes."""

    path: str
    folder: str
    name: str
    what: str
    min_bytes: int = 0


def check_files(config: ModelConfig, folder: Path, problem: ProblemFunction) -> None:
    """Reports each file that is missing or too short."""
    for named in _files(config):
        below = f"{named.folder}/{named.name}" if named.folder else named.name
        what = f"{named.what} '{below}'"
        try:
            descriptor = open_inside(folder, below, what)
        except InvalidRequest as error:
            near = nearest(named.name, _names(folder / named.folder))
            problem(named.path, f'{error}; did you mean "{near}"?' if near and near != named.name else str(error))
            continue
        try:
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size < named.min_bytes:
            problem(named.path, f"{what} has {size} bytes, expected {named.min_bytes}")


def _files(config: ModelConfig) -> Iterator[_Named]:
    for index, output in enumerate(config.output):
        if output.label_filename:
            yield _Named(f"output[{index}].label_filename", "", output.label_filename, "label file")
    for index, sample in enumerate(config.model_warmup):
        for key, sample_input in sample.inputs.items():
            if sample_input.input_data_file:
                path = f'model_warmup[{index}].inputs["{key}"].input_data_file'
                yield _Named(path, WARMUP, sample_input.input_data_file, "warm-up data")
    for index, state in enumerate(config.sequence_batching.state if config.sequence_batching is not None else ()):
        for place, initial in enumerate(state.initial_state):
            if initial.data_file:
                path = f"sequence_batching.state[{index}].initial_state[{place}].data_file"
                yield _Named(
                    path, INITIAL_STATE, initial.data_file, "initial state", data_bytes(initial.data_type, initial.dims)
                )


def data_bytes(data_type: str, dims: Sequence[int]) -> int:
    """Size of a tensor in bytes; 0 if it is not fixed."""
    return ITEM_BYTES.get(FROM_CONFIG.get(data_type, ""), 0) * math.prod(max(dim, 0) for dim in dims)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.isprintable())
    except OSError:
        return []


def read_labels(model_dir: Path, filename: str) -> tuple[str, ...]:
    """Reads the labels of all classes, one per line. An empty line is a class without a label.

    A final newline is optional. No line is skipped, because the index of a line is the class.
    """
    what = f"label file '{filename}'"
    data = read_inside(model_dir, filename, what, LABEL_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest(f"{what}: line {line} is not UTF-8: {error.reason}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InvalidRequest(f"{what}: line {line} has a NUL character; is this a text file?")
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    return tuple([line.removesuffix("\r") for line in lines])
