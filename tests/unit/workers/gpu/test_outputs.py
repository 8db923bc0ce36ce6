"""Outputs that are written on the GPU where their readers want them, on the stand-in for CUDA: to places of callers, in
batches of many too; and those that Python models make there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Handle, Row, Wanted, Work
from shmserve.workers.backends.python import pb_tensor, pb_utils
from shmserve.workers.backends.python.pb_tensor import DeviceTensor
from shmserve.workers.gpu.shared import memory_of
from tests.support.workers.device_arrays import read
from tests.support.workers.gpu_harness import Array, standins
from tests.unit.workers.gpu.test_tensors import DEVICE_TO_HOST, HOST_TO_DEVICE, WIDTH, WITHIN, Pair, arrays


@pytest.fixture
def runtime() -> Iterator[Any]:
    with standins() as (runtime, _):
        yield runtime
        assert runtime.state.left() == {}


@pytest.fixture
def pair(runtime: Any, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(runtime, tmp_path)
    yield made
    made.close()


class Places:
    """Memory on the GPU of the producer's, as places for the outputs of the consumer."""

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
def test_places_of_a_batch_are_written_there(pair: Pair, shares: tuple[int, ...]) -> None:
    given, places = arrays(*shares), Places(pair, list(shares))
    rows = pair.produce(*given)
    works = asked(pair, rows, list(places.handles))
    pair.copies()
    found = pair.consumer.run(*works)
    many = [(share, WITHIN) for share in shares] if len(shares) > 1 else []
    assert pair.copies() == [*many, *many], "the rows of many are put together there, and handed out there"
    for index, (row, array) in enumerate(zip(found, given, strict=True)):
        assert row.error is None, row.error
        assert row.outputs[0].data == (places.handles[index],)
        np.testing.assert_array_equal(places.read(index, len(array)), array + 2)
    assert pair.consumer.arenas.used == 0
    pair.give_back(*rows)
    places.close()


@pytest.mark.parametrize("case", ["one without", "one too small", "no room"])
def test_batches_that_are_handed_out_by_the_host(pair: Pair, case: str) -> None:
    given, places = arrays(1, 1), Places(pair, [1, 1])
    rows = pair.produce(*given)
    handles: list[Handle | None] = list(places.handles)
    if case == "one without":
        handles[1] = None
    elif case == "one too small":
        handles[1] = replace(places.handles[1], size=WIDTH * 4 - 4)
    else:
        pair.consumer.arenas.near_limit = 4096
    works = asked(pair, rows, handles)
    pair.copies()
    first, second = pair.consumer.run(*works)
    assert {kind for _, kind in pair.copies()} == {WITHIN, DEVICE_TO_HOST, HOST_TO_DEVICE}
    assert first.error is None, first.error
    np.testing.assert_array_equal(places.read(0, 1), given[0] + 2)
    if case == "one without":
        np.testing.assert_array_equal(pair.consumer.array(second), given[1] + 2)
    elif case == "one too small":
        assert second.error is not None
        assert f"has {WIDTH * 4} bytes; the memory given for it has {WIDTH * 4 - 4}" in second.error.text
    else:
        np.testing.assert_array_equal(places.read(1, 1), given[1] + 2)
    assert pair.consumer.arenas.used == 0
    pair.give_back(*rows)
    places.close()


def test_a_gpu_that_fails_when_rows_are_handed_out(pair: Pair) -> None:
    given, places = arrays(1, 1), Places(pair, [1, 1])
    rows = pair.produce(*given)
    works = asked(pair, rows, list(places.handles))
    memory: Any = memory_of(pair.consumer.mapped)
    within = memory._within
    memory._within = lambda parts: pair.runtime.state.failures.update(memcpyAsync=1) or within(parts)
    for row in pair.consumer.run(*works):
        assert row.error is not None
        assert "the GPU failed" in row.error.text
    pair.consumer.failures.clear()  # whose traces refer to arrays
    del memory._within
    pair.give_back(*rows)
    places.close()


# ------------------------------------------------------------------------------------------------ of python models


class Made:
    """What a library has on the GPU. The stand-in for cupy looks at `described`."""

    def __init__(self, runtime: Any, array: Array, number: int = 0, strides: Any = None) -> None:
        self._runtime, self._number = runtime, number
        self._array = np.ascontiguousarray(array)
        self.address = runtime.malloc(array.nbytes)
        self.stream = runtime.streamCreateWithFlags(1)
        shape, typestr = array.shape, array.dtype.str
        self.described = {"shape": shape, "typestr": typestr, "data": (self.address, False), "strides": strides}
        runtime.memcpyAsync(
            self.address, self._array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice, self.stream
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number

    def __dlpack__(self, **_: object) -> Any:
        raise AssertionError("the stand-in looks at what is described")

    def cpu(self) -> Array:
        return self._array

    def close(self) -> None:
        self._runtime.streamSynchronize(self.stream)
        self._runtime.streamDestroy(self.stream)
        self._runtime.free(self.address)


def test_a_tensor_that_a_model_makes_there(runtime: Any) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    made = Made(runtime, array)
    tensor = pb_utils.Tensor.from_dlpack("t", made)
    assert isinstance(tensor, DeviceTensor)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("t", [3, 4], 11, False)
    assert tensor.__dlpack_device__() == (2, 0)
    np.testing.assert_array_equal(read(tensor.piece.__cuda_array_interface__), array)  # nobody need wait any more
    with pytest.raises(pb_utils.TritonModelException, match=r"on a GPU, and no numpy array: take it by to_dlpack\(\)$"):
        tensor.as_numpy()
    np.testing.assert_array_equal(tensor._array, array)  # as a call of another model gets it
    made.close()


def test_what_cannot_be_taken_there_is_copied_by_its_library(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(12, dtype=np.float32)
    cupy = __import__("cupy")

    def refuse(_: Any) -> Any:
        raise BufferError("no bfloat16")

    for number, broken in ((1, False), (0, True)):
        made = Made(runtime, array, number)
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(cupy, "from_dlpack", refuse)
            tensor = pb_utils.Tensor.from_dlpack("t", made)
        assert tensor.is_cpu()
        np.testing.assert_array_equal(tensor.as_numpy(), array)
        made.close()


def test_a_tensor_there_must_be_contiguous(runtime: Any) -> None:
    made = Made(runtime, np.zeros((2, 2), np.float32), strides=(4, 8))
    with pytest.raises(pb_utils.TritonModelException, match="tensor 't' is not contiguous"):
        pb_utils.Tensor.from_dlpack("t", made)
    made.close()


def test_a_capsule_says_where_its_memory_is(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(12, dtype=np.float32)
    made = Made(runtime, array)
    cupy = __import__("cupy")
    made_of = cupy.from_dlpack(made)
    seen = []

    def take(source: Any) -> Any:
        seen.append((source.__dlpack_device__(), source.__dlpack__(stream=None)))
        return made_of

    monkeypatch.setattr(cupy, "from_dlpack", take)
    capsule = pb_utils.Tensor("x", array).to_dlpack()
    ctypes.c_int32.from_address(pb_tensor._device_at(capsule)).value = 2
    tensor = pb_utils.Tensor.from_dlpack("t", capsule)
    assert (tensor.is_cpu(), seen) == (False, [((2, 0), capsule)])
    ctypes.c_int32.from_address(pb_tensor._device_at(capsule)).value = 1
    assert pb_utils.Tensor.from_dlpack("t", capsule).as_numpy().tolist() == array.tolist()
    made.close()
