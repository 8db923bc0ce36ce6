"""The probe inside this process, which has its memory and a stand-in for a GPU: `python -m ...hosted CASE LIBRARY`. A
process can load one library, so each case needs its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import Options, Tensor, Value
from shmserve.protocol.worker_messages import Row, StepOptions, Work
from shmserve.repo.storage.store import scan_model
from shmserve.shm.strings import encode_bytes
from shmserve.workers.backends.native import records
from shmserve.workers.backends.native.backend import Native
from shmserve.workers.batch.results import Results
from tests.support.ensemble_models import config_text
from tests.support.workers.gpu.harness import Instance, standins
from tests.support.workers.native_backends import model
from tests.support.workers.worker_harness import assert_failed

CONFIG = config_text(
    "probe", "IN TEXT:STRING:[-1]:optional:true", "OUT TEXT:STRING", "max_batch_size: 8 instance_group { kind: %s }"
)
X = np.arange(4000, dtype=np.float32).reshape(4, 1000)
FREED = {"CPU": "freed", "CPU_PINNED": "freed once", "GPU": "freed once"}


@contextmanager
def probe(library: Path, kind: str, settings: dict[str, str]) -> Iterator[Instance]:
    with tempfile.TemporaryDirectory() as folder:
        model(Path(folder), "m", library, CONFIG % kind)
        scanned = scan_model(Path(folder) / "m", gpus=(0,))
        assert scanned.config is not None, scanned
        with Instance(Native, Path(folder) / "m", scanned.config, settings, on_gpu=kind == "KIND_GPU") as instance:
            yield instance


def run(instance: Instance, *inputs: Tensor, do: str = "", near: tuple[str, ...] = ()) -> Row:
    step = StepOptions(near=near) if near else None
    options = Options(parameters={"do": do})
    (row,) = instance.run(Work(1, len(X), inputs, None, "internal", options, step=step))
    assert not instance.failures, instance.failures
    return row


def said(row: Row) -> dict[str, Value]:
    assert row.parameters is not None
    return row.parameters


def inputs(library: Path) -> None:
    """Inputs in parts and strings arrive as they are stored."""
    words = np.array([["a"], [""], ["\u00fc" * 3000], ["b"]], object)
    encoded = encode_bytes(words)
    with probe(library, "KIND_CPU", {}) as instance, patch.object(records, "encode_bytes", None):
        parts = instance.tensor("IN", X, [0, 1, 3])
        for data in (encoded, (instance.share(encoded),)):
            row = run(instance, parts, Tensor("TEXT", "BYTES", words.shape, data))
            assert said(row)["buffers"] == 3
            np.testing.assert_array_equal(instance.array(row), X)
            assert [word.decode() for word in instance.array(row, 1)[:, 0]] == list(words[:, 0])
        assert_failed(
            run(instance, parts, Tensor("TEXT", "BYTES", words.shape, encoded[:-1])), "INVALID_ARG", "element 3"
        )


def place(library: Path) -> None:
    """A large input and output are where the caller and the next step of an ensemble have them: nothing is copied."""
    seen: list[int] = []
    describe = records._buffer  # noqa: SLF001 - what the backend gets

    def seen_by_backend(part: Any) -> tuple[int, int, int]:
        words = describe(part)
        seen.append(words[0])
        return words

    with probe(library, "KIND_CPU", {}) as instance:
        given = instance.tensor("IN", X, [0])
        with patch.object(records, "_buffer", seen_by_backend), patch.object(Results, "put", None):
            first = run(instance, given)
            between = first.outputs[0].data
            second = run(instance, Tensor("IN", "FP32", X.shape, between))
        handles = [handle for data in (given.data, between) if isinstance(data, tuple) for handle in data]
        memory = [np.frombuffer(instance.mapped.memory(handle), np.uint8) for handle in handles]
        assert seen == [array.__array_interface__["data"][0] for array in memory]
        np.testing.assert_array_equal(instance.array(second), X)
        instance.free(first.outputs[0])


def host(library: Path) -> None:
    """An instance on the CPU gets ordinary memory only."""
    with probe(library, "KIND_CPU", {}) as instance:
        row = run(instance, instance.tensor("IN", X), do="describe")
        assert said(row)["instance"] == 'CPU 0 {"cpu":{}} 0'
        refused = "instance 'm_0_0' is not on a GPU: use memory on the host"
        assert {name: said(row)[name] for name in FREED} == FREED | {"CPU_PINNED": refused, "GPU": refused}
        row = run(instance, instance.tensor("IN", X), do="prefer gpu", near=("OUT",))
        assert said(row)["written"] == records.CPU


def gpu(library: Path) -> None:
    """An instance on a GPU gets memory there, leaves outputs there for the next step, and reads inputs there."""
    with standins() as (runtime, _):
        with probe(library, "KIND_GPU", {"pinned-memory-pool-byte-size": "1000"}) as instance:
            row = run(instance, instance.tensor("IN", X), do="describe")
            assert said(row)["instance"] == 'GPU 0 {"gpu_0":{}} 0'
            assert {name: said(row)[name] for name in FREED} == FREED
            first = run(instance, instance.tensor("IN", X), do="prefer gpu", near=("OUT",))
            assert (said(first)["read"], said(first)["written"]) == (records.CPU, records.GPU)
            between = first.outputs[0].data
            assert isinstance(between, tuple)
            assert between[0].segment in instance.mapped.on_device
            second = run(instance, Tensor("IN", "FP32", X.shape, between), do="prefer gpu")
            assert (said(second)["read"], said(second)["written"]) == (records.GPU, records.CPU)
            np.testing.assert_array_equal(instance.array(second), X)
            assert not runtime.state.named("memcpyAsync"), "the backend reads and writes in place"
            instance.free(first.outputs[0])
        assert "pinned" not in runtime.state.left()
        assert runtime.state.violations == []


def initialization(library: Path) -> None:
    """The error of a backend that refuses its settings is that of the load."""
    with (
        pytest.raises(InvalidRequest, match="the backend refuses these settings"),
        probe(library, "KIND_CPU", {"probe,refuse": "1"}),
    ):
        pass


def finalization(library: Path) -> None:
    """An error of the last steps is reported by the worker, and does not keep it from the next one."""
    with (
        pytest.raises(ModelFailed, match="the model cannot be finalized") as failed,
        probe(library, "KIND_CPU", {"probe,unfinished": "1"}),
    ):
        pass
    assert "the instance cannot be finalized" in str(failed.value.__context__)


if __name__ == "__main__":
    {case.__name__: case for case in (inputs, place, host, gpu, initialization, finalization)}[sys.argv[1]](
        Path(sys.argv[2])
    )
