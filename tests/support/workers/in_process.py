"""A model loaded in this process as a worker loads it, for libraries that are slow to import and for loads that fail.

It has no shared memory: use inputs and outputs that fit into messages, and a real worker for all others.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.dtypes import from_numpy
from shmserve.errors import ServeError
from shmserve.protocol.messages import Failure, Tensor
from shmserve.protocol.worker_messages import Load, Row, Work
from shmserve.repo.config.schema import ModelConfig, encode_config
from shmserve.shm.strings import encode_bytes
from shmserve.workers.loading import THREADS, LoadedModel, load, load_error
from tests.support.workers.worker_harness import WORKER, Array, array_of


@contextmanager
def loaded(given: ModelConfig, folder: Path, settings: dict[str, str] | None = None) -> Iterator[LoadedModel]:
    threads = os.environ.get(THREADS)
    os.environ[THREADS] = "1"  # an engine with more threads starts some that stay
    path, kept, modules = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    try:
        order = Load(WORKER, given.name, 1, "m_0_0", str(folder), settings or {})
        model = load(order, encode_config(given), None)
        try:
            yield model
        finally:
            model.close()
            model.arenas.close()
            model.mapped.close()
    finally:
        del os.environ[THREADS]
        if threads is not None:
            os.environ[THREADS] = threads
        sys.path[:], sys.dont_write_bytecode = path, kept
        for name in set(sys.modules) - modules:
            if name.startswith(("1.", "triton_python_backend", "c_python_backend")) or name == "1":
                del sys.modules[name]


def run(model: LoadedModel, *work_items: Work) -> list[Row]:
    rows: list[Row] = model.runner.run(work_items)[0]
    return rows


def inline(name: str, array: Array) -> Tensor:
    """A tensor in the message."""
    dtype = from_numpy(array.dtype)
    return Tensor(name, dtype, array.shape, encode_bytes(array) if dtype == "BYTES" else array.tobytes())


def floats(values: Any, name: str = "x") -> Tensor:
    return inline(name, np.asarray(values, np.float32))


def value(row: Row, index: int = 0) -> Array:
    """An output of a request, which must have succeeded."""
    assert row.error is None, row.error
    output = row.outputs[index]
    assert isinstance(output.data, bytes)
    return array_of(output, output.data)


def completed(given: ModelConfig, folder: Path, settings: dict[str, str] | None = None) -> ModelConfig:
    with loaded(given, folder, settings) as model:
        return model.config


AS_GIVEN = {"disable-auto-complete-config": "true"}
"""The settings of a server that does not complete configurations."""


def load_failure(given: ModelConfig, folder: Path, settings: dict[str, str] | None = None) -> Failure:
    try:
        with loaded(given, folder, settings):
            pass
    except Exception as error:
        failure = load_error(error, str(folder))
        assert str(folder) not in failure.text
        return failure
    raise AssertionError("the model was loaded")


def assert_refused(
    given: ModelConfig, folder: Path, kind: type[ServeError], text: str, settings: dict[str, str] | None = None
) -> None:
    """The model does not load, for a reason that matches a regular expression."""
    failure = load_failure(given, folder, settings)
    assert failure.code == kind.code, failure
    assert re.search(text, failure.text), failure
