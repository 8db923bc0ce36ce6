"""Tensors that stay on a GPU: from one instance to the next, on the stand-in for CUDA, which counts what is copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.broker.config.settings import NEAR_LIMIT
from shmserve.dtypes import to_numpy
from shmserve.errors import HandleLost, InvalidRequest
from shmserve.protocol.messages import Handle, Row, Tensor, Wanted, Work
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOptimizationPolicyCuda,
    ModelOutput,
)
from shmserve.shm.extents import cuda as extents
from shmserve.shm.mapped import Mapped, OnDevice
from shmserve.workers.backends.device_inputs import DeviceInputs
from shmserve.workers.backends.identity import Identity
from shmserve.workers.backends.onnx import run
from shmserve.workers.backends.onnx.backend import Onnx
from shmserve.workers.backends.python.pb_requests import InferenceRequest, mark_device_inputs
from shmserve.workers.backends.python.pb_tensor import Tensor as PythonTensor
from shmserve.workers.gpu.shared import memory_of
from shmserve.workers.output_arenas import NEAR_KNOB
from tests.support.workers.gpu_harness import Array, Instance, adder, plan, standins, tensor
from tests.support.workers.worker_models import Graph

WIDTH = 40_000
HOST_TO_DEVICE, DEVICE_TO_HOST, WITHIN = 1, 2, 3


class Pair:
    """A producer and a consumer. The test is the broker between them."""

    def __init__(self, runtime: Any, folder: Path, consumer: str = "tensorrt") -> None:
        from shmserve.workers.backends.tensorrt.backend import TensorRT

        self.runtime = runtime
        adder(folder / "a", WIDTH)
        adder(folder / "b", WIDTH)
        self.producer = Instance(TensorRT, folder / "a", ModelConfig(name="m", backend="tensorrt"))
        kind: Any = TensorRT if consumer == "tensorrt" else Identity
        entry = {"data_type": "TYPE_FP32", "dims": (WIDTH,)}
        config = ModelConfig(
            name="m",
            backend=consumer,
            max_batch_size=8,
            input=(ModelInput(name="x", **entry),),  # type: ignore[arg-type]
            output=(ModelOutput(name="y", **entry),),  # type: ignore[arg-type]
        )
        self.consumer = Instance(kind, folder / "b", config, owner=8)
        self._told = 0

    def produce(self, *arrays: Array, near: tuple[str, ...] = ("y",), **more: Any) -> list[Row]:
        works = [replace(self.producer.work(x=array, **more), near=near) for array in arrays]
        self.runtime.state.calls.clear()
        return self.producer.run(*works)

    def pass_on(self, *rows: Row) -> list[Work]:
        """Maps first, then the handles as inputs."""
        for message in self.producer.maps[self._told :]:
            self._told += 1
            if message.name is not None:
                self.consumer.mapped.add(message.segment, message.size, name=message.name)
        works = []
        for number, row in enumerate(rows, 1000):
            assert row.error is None, row.error
            (made,) = row.outputs
            works.append(Work(number, made.shape[0], (replace(made, name="x"),), None, "internal"))
        return works

    def give_back(self, *rows: Row) -> None:
        for row in rows:
            data = row.outputs[0].data
            assert isinstance(data, tuple)
            self.producer.arenas.free(data)

    def copies(self) -> list[tuple[int, int]]:
        found = [(call[3] // (WIDTH * 4), call[4]) for call in self.runtime.state.named("memcpyAsync")]
        self.runtime.state.calls.clear()
        return found

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


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


def arrays(*shares: int, width: int = WIDTH) -> list[Array]:
    random = np.random.default_rng(5)
    return [random.integers(0, 1000, (share, width)).astype(np.float32) for share in shares]


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_nothing_passes_through_the_host(pair: Pair, shares: tuple[int, ...]) -> None:
    given = arrays(*shares)
    for _ in range(2):
        rows = pair.produce(*given)
        assert {kind for _, kind in pair.copies()} == {HOST_TO_DEVICE}
        found = pair.consumer.run(*pair.pass_on(*rows))
        gathered = [(share, WITHIN) for share in shares] if len(shares) > 1 else []
        assert pair.copies() == [*gathered, (sum(shares), DEVICE_TO_HOST)]
        for row, array in zip(found, given, strict=True):
            np.testing.assert_array_equal(pair.consumer.array(row), array + 2)
        pair.give_back(*rows)
    assert pair.producer.arenas.used == 0
    assert len(pair.runtime.state.opened) == 1  # once for the segment, not for each tensor


def test_a_graph_writes_where_it_was_recorded(runtime: Any, tmp_path: Path) -> None:
    from shmserve.workers.backends.tensorrt.backend import TensorRT

    adder(tmp_path, WIDTH)
    cuda = ModelOptimizationPolicyCuda(graphs=True)
    config = ModelConfig(name="m", backend="tensorrt", optimization=ModelOptimizationPolicy(cuda=cuda))
    with Instance(TensorRT, tmp_path, config) as instance:
        for count, kinds in ((1, {HOST_TO_DEVICE, WITHIN}), (2, {HOST_TO_DEVICE}), (1, {HOST_TO_DEVICE, WITHIN})):
            (x,) = arrays(count)
            runtime.state.calls.clear()
            (row,) = instance.run(replace(instance.work(x=x), near=("y",)))
            assert {call[4] for call in runtime.state.named("memcpyAsync")} == kinds
            (made,) = row.outputs
            (again,) = instance.run(Work(7, count, (replace(made, name="x"),), None, "internal"))
            np.testing.assert_array_equal(instance.array(again), x + 2)
            assert isinstance(made.data, tuple)
            instance.arenas.free(made.data)


def test_rows_are_given_back_one_by_one(pair: Pair) -> None:
    rows = pair.produce(*arrays(1, 1, 1))
    handles: list[Any] = [row.outputs[0].data[0] for row in rows]  # type: ignore[index]
    assert len({handle.segment for handle in handles}) == 1
    assert [handle.size for handle in handles] == [WIDTH * 4] * 3
    pair.give_back(rows[1])
    assert pair.producer.arenas.used >= 2 * WIDTH * 4
    pair.give_back(rows[2], rows[0])
    assert pair.producer.arenas.used == 0


def test_parts_on_the_host_and_on_the_device_in_one_batch(pair: Pair) -> None:
    first, second = arrays(1, 2)
    (row,) = pair.produce(first)
    (work,) = pair.pass_on(row)
    found = pair.consumer.run(work, pair.consumer.work(x=second), replace(work, request=2000))
    for one, wanted in zip(found, (first + 2, second + 1, first + 2), strict=True):
        np.testing.assert_array_equal(pair.consumer.array(one), wanted)
    pair.give_back(row)


def test_an_output_of_ones_own_as_an_input(pair: Pair) -> None:
    """What the same process exports it does not open."""
    (x,) = arrays(2)
    (row,) = pair.produce(x)
    (made,) = row.outputs
    (again,) = pair.producer.run(Work(7, 2, (replace(made, name="x"),), None, "internal"))
    np.testing.assert_array_equal(pair.producer.array(again), x + 2)
    assert pair.runtime.state.named("ipcOpenMemHandle") == []
    pair.give_back(row)


def test_a_model_that_cannot_read_there_gets_a_copy(runtime: Any, tmp_path: Path) -> None:
    pair = Pair(runtime, tmp_path, "identity")
    try:
        given = arrays(1, 2)
        rows = pair.produce(*given)
        pair.copies()
        found = pair.consumer.run(*pair.pass_on(*rows))
        assert pair.copies() == [(1, DEVICE_TO_HOST), (2, DEVICE_TO_HOST)]
        for row, array in zip(found, given, strict=True):
            np.testing.assert_array_equal(pair.consumer.array(row), array + 1)
        pair.give_back(*rows)
    finally:
        pair.close()


class OnnxHere(Onnx):
    """Its engine computes on the host, whose memory the stand-in's device memory is."""

    def load(self, config: ModelConfig) -> None:
        super().load(config)
        self.on_device, self._near = True, DeviceInputs()


@pytest.fixture
def onnx_pair(runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """TensorRT, and then ONNX Runtime: y = 3 x, z = x + y."""
    monkeypatch.setattr(run, "GPU", "cpu")
    made = Pair(runtime, tmp_path)
    made.consumer.close()
    graph = Graph().input("x", "FP32", [-1, WIDTH]).input("b", "FP32", [-1, WIDTH])
    graph.output("y", "FP32", [-1, WIDTH]).output("z", "FP32", [-1, WIDTH])
    graph.weight("w", np.full(1, 3, np.float32)).node("Mul", ["x", "w"], ["y"]).node("Add", ["y", "b"], ["z"])
    graph.save(tmp_path / "onnx")
    entry: dict[str, Any] = {"data_type": "TYPE_FP32", "dims": (WIDTH,)}
    config = ModelConfig(
        name="m",
        backend="onnxruntime",
        max_batch_size=8,
        input=(ModelInput(name="x", **entry), ModelInput(name="b", **entry)),
        output=(ModelOutput(name="y", **entry), ModelOutput(name="z", **entry)),
        instance_group=(ModelInstanceGroup(name="m_0", kind="KIND_CPU", count=1),),
    )
    made.consumer = Instance(OnnxHere, tmp_path / "onnx", config, owner=8)
    yield made
    made.close()


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_onnx_runtime_reads_and_writes_there(onnx_pair: Pair, shares: tuple[int, ...]) -> None:
    pair, given = onnx_pair, arrays(*shares)
    for near in ((), ("y",), ("y", "z")):
        rows = pair.produce(*given)
        pair.copies()
        works = [
            replace(work, inputs=(*work.inputs, pair.consumer.work(b=array * 2).inputs[0]), near=near)
            for work, array in zip(pair.pass_on(*rows), given, strict=True)
        ]
        found = pair.consumer.run(*works)
        # Only what many requests bring is put together there; nothing of x comes to the host.
        assert pair.copies() == ([(share, WITHIN) for share in shares] if len(shares) > 1 else [])
        for row, array in zip(found, given, strict=True):
            assert row.error is None, row.error
            wanted = {"y": (array + 1) * 3, "z": (array + 1) * 3 + array * 2}
            for made in row.outputs:
                assert isinstance(made.data, tuple)
                (handle,) = made.data
                assert (handle.segment in pair.consumer.mapped.on_device) == (made.name in near)
                if made.name in near:
                    device = memory_of(pair.consumer.mapped)
                    values = device.piece(handle, np.dtype(np.float32), made.shape).host()
                else:
                    values = pair.consumer.mapped.view(handle, np.dtype(np.float32), made.shape)
                np.testing.assert_array_equal(values, wanted[made.name])
                pair.consumer.arenas.free(made.data)
        pair.copies()
        pair.give_back(*rows)
    assert pair.consumer.arenas.used == 0


def test_onnx_runtime_and_a_gpu_that_fails(onnx_pair: Pair) -> None:
    rows = onnx_pair.produce(*arrays(1, 1))
    works = onnx_pair.pass_on(*rows)
    more = [replace(work, inputs=(*work.inputs, onnx_pair.consumer.work(b=arrays(1)[0]).inputs[0])) for work in works]
    onnx_pair.runtime.state.failures["memcpyAsync"] = 1
    for row in onnx_pair.consumer.run(*more):
        assert row.error is not None
        assert "the GPU failed" in row.error.text
    onnx_pair.consumer.failures.clear()  # whose traces refer to arrays
    for row in onnx_pair.consumer.run(*more):
        assert [onnx_pair.consumer.array(row, index).shape for index in (0, 1)] == [(1, WIDTH)] * 2
    onnx_pair.give_back(*rows)


@pytest.mark.parametrize("case", ["not asked", "another output", "a place", "small", "full"])
def test_what_goes_to_the_host_all_the_same(pair: Pair, case: str, tmp_path: Path) -> None:
    (x,) = arrays(1)
    near: tuple[str, ...] = ("y",)
    outputs = None
    producer = pair.producer
    if case == "not asked":
        near = ()
    elif case == "another output":
        near = ("z",)
    elif case == "a place":
        outputs = (Wanted("y", producer.client.allocate(x.nbytes).handle()),)
    elif case == "full":
        producer.arenas.near_limit = 4096
    elif case == "small":
        from shmserve.workers.backends.tensorrt.backend import TensorRT

        adder(tmp_path / "small", 8)
        producer = Instance(TensorRT, tmp_path / "small", ModelConfig(name="m", backend="tensorrt"))
        (x,) = arrays(1, width=8)
    (row,) = producer.run(replace(producer.work(x=x, outputs=outputs), near=near))
    np.testing.assert_array_equal(producer.array(row), x + 1)
    assert producer.mapped.on_device == {}
    if producer is not pair.producer:
        producer.close()


def test_the_usual_buffers_are_used_again_afterwards(pair: Pair) -> None:
    """A batch that lay elsewhere leaves nothing behind for the next one."""
    (x,) = arrays(2)
    (row,) = pair.produce(x)
    pair.consumer.run(*pair.pass_on(row))
    pair.give_back(row)
    (plain,) = pair.consumer.run(pair.consumer.work(x=x + 5))
    np.testing.assert_array_equal(pair.consumer.array(plain), x + 6)
    (plain,) = pair.producer.run(pair.producer.work(x=x + 7))
    np.testing.assert_array_equal(pair.producer.array(plain), x + 8)


def test_what_is_forgotten_is_closed(pair: Pair) -> None:
    (row,) = pair.produce(*arrays(1))
    pair.consumer.array(pair.consumer.run(*pair.pass_on(row))[0])
    (segment,) = pair.consumer.mapped.on_device
    pair.give_back(row)
    pair.consumer.mapped.remove(segment)
    assert pair.runtime.state.opened == {}
    (failed,) = pair.consumer.run(*pair.pass_on(row))
    assert failed.error is not None
    assert failed.error.code == "HANDLE_LOST"


def test_handles_that_lie(pair: Pair) -> None:
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    (given,) = work.inputs
    assert isinstance(given.data, tuple)
    (handle,) = given.data
    beyond = Handle(handle.segment, 1 << 40, handle.size)
    for data, shape in (((beyond,), given.shape), ((replace(handle, size=4),), (1, 1))):
        tensor = Tensor("x", "FP32", shape, data)
        (failed,) = pair.consumer.run(Work(1, 1, (tensor,), None, "internal"))
        assert failed.error is not None
        assert failed.error.code == "INVALID_ARG"
    pair.give_back(row)


def test_an_input_of_a_python_model_that_stays_there(pair: Pair) -> None:
    (x,) = arrays(1)
    (row,) = pair.produce(x)
    (work,) = pair.pass_on(row)
    memory = memory_of(pair.consumer.mapped)
    (handle,) = cast("tuple[Handle]", work.inputs[0].data)
    for wire, numpy in (("FP32", np.float32), ("BF16", to_numpy("BF16"))):
        shape = (1, WIDTH * 4 // np.dtype(numpy).itemsize)
        piece: Any = memory.piece(handle, np.dtype(numpy), shape)
        tensor = PythonTensor.__new__(PythonTensor)
        tensor._name, tensor._array, tensor._work = "x", piece, work
        request = InferenceRequest.__new__(InferenceRequest)
        request._inputs, request._work = [tensor], replace(work, inputs=(replace(work.inputs[0], dtype=wire),))
        mark_device_inputs([request])
        (found,) = request._inputs
        assert found.is_cpu() == (wire == "BF16"), "which nobody takes by its address"
        assert found.shape() == list(shape)
        assert found._array.tobytes() == (x + 1).tobytes(), "for other models it is in host memory"
        assert found._array is found._array
    pair.give_back(row)


class Driver:
    """What the driver knows of an allocation."""

    def __init__(self, room: int, status: int = 0) -> None:
        self.room, self.status = room, status

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        base._obj.value, size._obj.value = address.value - 100, self.room + 100
        return self.status


def test_memory_is_as_large_as_the_driver_says(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as its owner does."""
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    cuda = memory_of(pair.consumer.mapped).cuda
    (_, size) = next(iter(pair.consumer.mapped.on_device.values()))
    for driver, code, said in (
        (Driver(size - 1), "INVALID_ARG", f"has {size - 1} bytes, and was announced with {size}"),
        (Driver(size, 1), "HANDLE_LOST", "has no known size: error 1 of the driver"),
    ):
        monkeypatch.setattr(cuda, "_driver", driver)
        (failed,) = pair.consumer.run(work)
        assert failed.error is not None
        assert (failed.error.code, said in failed.error.text) == (code, True)
        assert pair.runtime.state.opened == {}, "what is not used is closed again"
    monkeypatch.setattr(cuda, "_driver", Driver(size))
    np.testing.assert_array_equal(pair.consumer.array(pair.consumer.run(work)[0]), arrays(1)[0] + 2)
    pair.give_back(row)


def test_memory_on_another_gpu_is_not_opened(pair: Pair) -> None:
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    memory_of(pair.consumer.mapped).cuda.uuid = b"another".ljust(16, b"\0")
    (failed,) = pair.consumer.run(work)
    assert failed.error is not None
    assert (failed.error.code, failed.error.text) == (
        "HANDLE_LOST", "the tensor is on another GPU than the model's instance"
    )  # fmt: skip
    assert pair.runtime.state.named("ipcOpenMemHandle") == []
    pair.consumer.mapped.on_gpu = False
    (failed,) = pair.consumer.run(work)
    assert failed.error is not None
    assert failed.error.text == "the tensor is on a GPU, and the model's instance is not"
    pair.consumer.mapped.on_gpu = True
    pair.give_back(row)


def test_an_owner_that_has_gone(pair: Pair) -> None:
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    pair.runtime.state.failures["ipcOpenMemHandle"] = 201
    (failed,) = pair.consumer.run(work)
    assert failed.error is not None
    assert failed.error.code == "HANDLE_LOST"
    assert "memory of another process on the GPU cannot be opened" in failed.error.text
    pair.give_back(row)


def test_names() -> None:
    exported = bytes(range(64))
    name = extents.name_of(exported, bytes(range(1, 17)))
    assert extents.is_device(name)
    assert len(name) <= 128  # what Map takes
    assert extents.parts_of(name) == (exported, bytes(range(1, 17)))
    # Libraries give as much of a uuid as there is before its first zero.
    cut = extents.name_of(exported, b"ab\0" + bytes(range(13)))
    assert cut == extents.name_of(exported, b"ab")
    for wrong in ("cuda:", "cuda:====", "cuda:" + "A" * 40, "cuda:" + "A" * 88, name[1:], "/shmserve"):
        with pytest.raises(InvalidRequest, match="does not contain an exported handle"):
            extents.parts_of(wrong)


def test_a_process_without_a_gpu() -> None:
    mapped = Mapped()
    mapped.add(5, 100, name=extents.name_of(bytes(64), bytes(16)))
    assert 5 in mapped
    with pytest.raises(InvalidRequest, match="already mapped"):
        mapped.add(5, 100, name=extents.name_of(bytes(64), bytes(16)))
    for read in (mapped.memory, mapped.address):
        with pytest.raises(OnDevice, match="the tensor is on a GPU, which this process cannot read"):
            read(Handle(5, 0, 10))
    assert issubclass(OnDevice, HandleLost)
    mapped.remove(5)
    assert 5 not in mapped
    with pytest.raises(InvalidRequest, match="is not mapped"):
        mapped.remove(5)


def test_outputs_whose_shape_only_the_run_tells_go_to_the_host(runtime: Any, tmp_path: Path) -> None:
    from shmserve.workers.backends.tensorrt.backend import TensorRT

    tensors = [tensor("input", "x", [-1], "INT32"), tensor("output", "where", [-1], "INT64")]
    plan(tmp_path, tensors, {"where": ["nonzero", "x"]}, {"x": [[1], [8], [100_000]]})
    given = ModelConfig(
        name="m",
        backend="tensorrt",
        input=(ModelInput(name="x", data_type="TYPE_INT32", dims=(-1,)),),
        output=(ModelOutput(name="where", data_type="TYPE_INT64", dims=(-1,)),),
    )
    x = np.ones(10_000, np.int32)
    with Instance(TensorRT, tmp_path, given) as instance:
        (row,) = instance.run(replace(instance.work(x=x), near=("where",)))
        np.testing.assert_array_equal(instance.array(row), np.arange(10_000))
    assert NEAR_KNOB == "cuda-memory-pool-byte-size" == NEAR_LIMIT
