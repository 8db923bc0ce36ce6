"""Outputs on a GPU: in memory of callers, and from Python models."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Handle, Wanted
from shmserve.protocol.worker_messages import Row, Work
from shmserve.workers.backends.python import pb_tensor, pb_utils
from shmserve.workers.backends.python.pb_tensor import DeviceTensor
from shmserve.workers.gpu.shared import memory_of
from tests.support.workers.batch_parts import Array
from tests.support.workers.gpu.device_arrays import Foreign, read
from tests.support.workers.gpu.device_pair import DEVICE_TO_HOST, HOST_TO_DEVICE, WIDTH, WITHIN, Pair, arrays, gathered
from tests.support.workers.worker_harness import assert_failed


class Places:
    """Memory of the producer on the GPU, into which the consumer writes its outputs."""

    def __init__(self, pair: Pair, rows: list[int]) -> None:
        self._arenas = pair.producer.arenas
        self._blocks = [self._arenas.allocate_near("internal", count * WIDTH * 4) for count in rows]
        self.handles = [Handle(block.segment, block.offset, block.size) for block in self._blocks]

    def read(self, index: int, rows: int) -> Array:
        address = self._blocks[index].address
        return read({"shape": (rows, WIDTH), "typestr": "<f4", "data": (address, False)})

    def close(self) -> None:
        self._arenas.free(self.handles)


def asked(pair: Pair, rows: list[Row], places: list[Handle | None]) -> list[Work]:
    return [
        replace(work, outputs=(Wanted("y", place),)) for work, place in zip(pair.pass_on(*rows), places, strict=True)
    ]


@pytest.mark.parametrize("shares", [(1,), (1, 1), (1, 2, 1)], ids=str)
def test_outputs_are_written_to_memory_of_the_caller_on_the_gpu(pair: Pair, shares: tuple[int, ...]) -> None:
    given, places = arrays(*shares), Places(pair, list(shares))
    rows = pair.produce(*given)
    work_items = asked(pair, rows, list(places.handles))
    pair.copies()
    found = pair.consumer.run(*work_items)
    assert pair.copies() == gathered(shares) * 2, "inputs are gathered and outputs scattered on the GPU"
    for index, (row, array) in enumerate(zip(found, given, strict=True)):
        assert row.error is None, row.error
        assert row.outputs[0].data == (places.handles[index],)
        np.testing.assert_array_equal(places.read(index, len(array)), array + 2)
    assert pair.consumer.arenas.used == 0
    pair.give_back(*rows)
    places.close()


@pytest.mark.parametrize("case", ["one without", "one too small", "no room"])
def test_batches_that_the_host_scatters(pair: Pair, case: str) -> None:
    given, places = arrays(1, 1), Places(pair, [1, 1])
    rows = pair.produce(*given)
    handles: list[Handle | None] = list(places.handles)
    if case == "one without":
        handles[1] = None
    elif case == "one too small":
        handles[1] = replace(places.handles[1], size=WIDTH * 4 - 1)
    else:
        pair.consumer.arenas.near_limit = 4096
    work_items = asked(pair, rows, handles)
    pair.copies()
    first, second = pair.consumer.run(*work_items)
    assert {kind for _, kind in pair.copies()} == {WITHIN, DEVICE_TO_HOST, HOST_TO_DEVICE}
    assert first.error is None, first.error
    np.testing.assert_array_equal(places.read(0, 1), given[0] + 2)
    if case == "one without":
        np.testing.assert_array_equal(pair.consumer.array(second), given[1] + 2)
    elif case == "one too small":
        text = f"has {WIDTH * 4} bytes; the memory given for it has {WIDTH * 4 - 1}"
        assert_failed(second, "INVALID_ARG", text)
    else:
        np.testing.assert_array_equal(places.read(1, 1), given[1] + 2)
    assert pair.consumer.arenas.used == 0
    pair.give_back(*rows)
    places.close()


def test_a_gpu_failure_while_outputs_are_scattered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given, places = arrays(1, 1), Places(pair, [1, 1])
    rows = pair.produce(*given)
    work_items = asked(pair, rows, list(places.handles))
    device: Any = memory_of(pair.consumer.mapped).cuda
    copy = device.copy

    def fail(*arguments: Any) -> None:
        pair.fail("memcpyAsync")
        copy(*arguments)

    monkeypatch.setattr(device, "copy", fail)
    for row in pair.consumer.run(*work_items):
        assert_failed(row, "MODEL_FAILED", "the GPU failed")
    pair.consumer.failures.clear()  # their tracebacks refer to arrays
    pair.give_back(*rows)
    places.close()


class LibraryArray(Foreign):
    """An array of a library that only exports DLPack. The stand-in for cupy reads `described`."""

    def __init__(self, runtime: Any, array: Array, number: int = 0, strides: Any = None) -> None:
        super().__init__(runtime, array)
        self._number, self._array = number, array
        self.described = self.__dict__.pop("__cuda_array_interface__") | {"strides": strides}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number

    def __dlpack__(self, **_: object) -> Any:
        raise AssertionError("the stand-in reads `described`")

    def cpu(self) -> Array:
        return self._array


def test_a_python_model_makes_a_tensor_on_the_gpu(runtime: Any) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    source = LibraryArray(runtime, array)
    tensor = pb_utils.Tensor.from_dlpack("t", source)
    assert isinstance(tensor, DeviceTensor)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("t", [3, 4], 11, False)
    assert tensor.__dlpack_device__() == (2, 0)
    np.testing.assert_array_equal(read(tensor.piece.__cuda_array_interface__), array)
    with pytest.raises(
        pb_utils.TritonModelException, match=r"on a GPU and cannot be a numpy array: use to_dlpack\(\)$"
    ):
        tensor.as_numpy()
    source.close()


def test_an_array_that_cupy_cannot_take_is_copied_by_its_library(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(12, dtype=np.float32)
    cupy = __import__("cupy")

    def refuse(_: Any) -> Any:
        raise BufferError("no bfloat16")

    for number, broken in ((1, False), (0, True)):
        source = LibraryArray(runtime, array, number)
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(cupy, "from_dlpack", refuse)
            tensor = pb_utils.Tensor.from_dlpack("t", source)
        assert tensor.is_cpu()
        np.testing.assert_array_equal(tensor.as_numpy(), array)
        source.close()


def test_a_tensor_on_the_gpu_must_be_contiguous(runtime: Any) -> None:
    source = LibraryArray(runtime, np.zeros((2, 2), np.float32), strides=(4, 8))
    with pytest.raises(pb_utils.TritonModelException, match="tensor 't' is not contiguous"):
        pb_utils.Tensor.from_dlpack("t", source)
    source.close()


def test_the_device_of_a_capsule_decides_which_library_takes_it(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(12, dtype=np.float32)
    source = LibraryArray(runtime, array)
    cupy = __import__("cupy")
    cupy_array = cupy.from_dlpack(source)
    seen = []

    def take(capsule_source: Any) -> Any:
        seen.append((capsule_source.__dlpack_device__(), capsule_source.__dlpack__(stream=None)))
        return cupy_array

    monkeypatch.setattr(cupy, "from_dlpack", take)
    capsule = pb_utils.Tensor("x", array).to_dlpack()
    device = ctypes.c_int32.from_address(pb_tensor._device_at(capsule))  # noqa: SLF001 - a model reads the device by this offset
    device.value = 2
    tensor = pb_utils.Tensor.from_dlpack("t", capsule)
    assert (tensor.is_cpu(), seen) == (False, [((2, 0), capsule)])
    device.value = 1
    assert pb_utils.Tensor.from_dlpack("t", capsule).as_numpy().tolist() == array.tolist()
    source.close()
