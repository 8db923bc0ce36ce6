"""Tensors that stay on a GPU from one instance to the next. The stand-in counts the copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import HandleLost, InvalidRequest, Unavailable
from shmserve.protocol.messages import Handle, Tensor, Wanted
from shmserve.protocol.worker_messages import StepOptions, Work
from shmserve.repo.config.schema import ModelConfig, ModelOptimizationPolicy, ModelOptimizationPolicyCuda
from shmserve.shm.extents import cuda as extents
from shmserve.shm.mapped import Mapped, OnDevice
from shmserve.workers.backends.device_inputs import DeviceInputs
from shmserve.workers.backends.identity import Identity
from shmserve.workers.backends.onnx import run
from shmserve.workers.backends.onnx.backend import Onnx, OnnxModel, device_inputs
from shmserve.workers.backends.python.backend import Python
from shmserve.workers.gpu.shared import memory_of
from tests.support.workers.gpu.device_pair import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    WIDTH,
    WITHIN,
    Pair,
    adding,
    arrays,
    gathered,
)
from tests.support.workers.gpu.harness import Instance, adder
from tests.support.workers.models.worker_models import Graph, python_model
from tests.support.workers.worker_harness import assert_failed, config


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_tensors_are_not_copied_through_the_host(pair: Pair, shares: tuple[int, ...]) -> None:
    given = arrays(*shares)
    for _ in range(2):
        rows = pair.produce(*given)
        assert {kind for _, kind in pair.copies()} == {HOST_TO_DEVICE}
        found = pair.consumer.run(*pair.pass_on(*rows))
        assert pair.copies() == [*gathered(shares), (sum(shares), DEVICE_TO_HOST)]
        for row, array in zip(found, given, strict=True):
            np.testing.assert_array_equal(pair.consumer.array(row), array + 2)
        pair.give_back(*rows)
    assert pair.producer.arenas.used == 0
    assert pair.opened == 1  # once for the segment, not for each tensor


def test_a_cuda_graph_writes_to_its_recorded_addresses(runtime: Any, tmp_path: Path) -> None:
    from shmserve.workers.backends.tensorrt.backend import TensorRT

    adder(tmp_path, WIDTH)
    cuda = ModelOptimizationPolicyCuda(graphs=True)
    graphs = ModelConfig(name="m", backend="tensorrt", optimization=ModelOptimizationPolicy(cuda=cuda))
    with Instance(TensorRT, tmp_path, graphs) as instance:
        for count, kinds in ((1, {HOST_TO_DEVICE, WITHIN}), (2, {HOST_TO_DEVICE}), (1, {HOST_TO_DEVICE, WITHIN})):
            (x,) = arrays(count)
            runtime.state.calls.clear()
            (row,) = instance.run(replace(instance.work(x=x), step=StepOptions(("y",))))
            assert {call[4] for call in runtime.state.named("memcpyAsync")} == kinds
            (output,) = row.outputs
            (again,) = instance.run(Work(7, count, (replace(output, name="x"),), None, "internal"))
            np.testing.assert_array_equal(instance.array(again), x + 2)
            instance.free(output)


def test_parts_on_the_host_and_on_the_device_in_one_batch(pair: Pair) -> None:
    first, second = arrays(1, 2)
    (row,) = pair.produce(first)
    (work,) = pair.pass_on(row)
    found = pair.consumer.run(work, pair.consumer.work(x=second), replace(work, request=2000))
    for one, wanted in zip(found, (first + 2, second + 1, first + 2), strict=True):
        np.testing.assert_array_equal(pair.consumer.array(one), wanted)
    pair.give_back(row)


def test_an_instance_reads_its_own_output_without_opening_it(pair: Pair) -> None:
    (x,) = arrays(2)
    (row,) = pair.produce(x)
    (output,) = row.outputs
    (again,) = pair.producer.run(Work(7, 2, (replace(output, name="x"),), None, "internal"))
    np.testing.assert_array_equal(pair.producer.array(again), x + 2)
    assert not pair.opened
    pair.give_back(row)


def test_a_backend_that_cannot_read_the_gpu_gets_a_copy(pair: Pair, tmp_path: Path) -> None:
    pair.replace_consumer(Identity, tmp_path, adding("identity"))
    given = arrays(1, 2)
    rows = pair.produce(*given)
    pair.copies()
    found = pair.consumer.run(*pair.pass_on(*rows))
    assert pair.copies() == [(1, DEVICE_TO_HOST), (2, DEVICE_TO_HOST)]
    for row, array in zip(found, given, strict=True):
        np.testing.assert_array_equal(pair.consumer.array(row), array + 1)
    pair.give_back(*rows)


class OnnxHere(Onnx):
    """ONNX Runtime computes on the host, whose memory serves as device memory of the fake."""

    def load(self, config: ModelConfig) -> OnnxModel:
        return OnnxModelHere(config, self._open(config), DeviceInputs())


class OnnxModelHere(OnnxModel):
    def use(self, near: DeviceInputs) -> None:
        self._near = near


@pytest.fixture
def onnx_pair(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The producer, followed by ONNX Runtime: y = 3 x, z = b + y."""
    monkeypatch.setattr(run, "GPU", "cpu")
    graph = Graph().input("x", "FP32", [-1, WIDTH]).input("b", "FP32", [-1, WIDTH])
    graph.output("y", "FP32", [-1, WIDTH]).output("z", "FP32", [-1, WIDTH])
    graph.weight("w", np.full(1, 3, np.float32)).node("Mul", ["x", "w"], ["y"]).node("Add", ["y", "b"], ["z"])
    graph.save(tmp_path / "onnx")
    row = ("FP32", (WIDTH,))
    consumer = config("onnxruntime", {"x": row, "b": row}, {"y": row, "z": row}, max_batch=8)
    pair.replace_consumer(OnnxHere, tmp_path / "onnx", consumer)
    return pair


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_onnx_runtime_reads_and_writes_on_the_gpu(onnx_pair: Pair, shares: tuple[int, ...]) -> None:
    pair, given = onnx_pair, arrays(*shares)
    for near in ((), ("y",), ("y", "z")):
        rows = pair.produce(*given)
        pair.copies()
        work_items = [
            replace(work, inputs=(*work.inputs, pair.consumer.work(b=array * 2).inputs[0]), step=StepOptions(near))
            for work, array in zip(pair.pass_on(*rows), given, strict=True)
        ]
        found = pair.consumer.run(*work_items)
        assert pair.copies() == gathered(shares), "no part of x is copied to the host"
        for row, array in zip(found, given, strict=True):
            y = (array + 1) * 3
            pair.check(row, {"y": y, "z": y + array * 2}, near)
        pair.give_back(*rows)
    assert pair.consumer.arenas.used == 0


@pytest.mark.parametrize("shares", [(1,), (1, 2, 1)], ids=str)
def test_onnx_runtime_gets_large_inputs_on_the_gpu(onnx_pair: Pair, shares: tuple[int, ...]) -> None:
    """They are copied directly from callers' memory, which is pinned, as is that of outputs."""
    pair, given = onnx_pair, arrays(*shares)
    consumer, registered = pair.consumer, pair.runtime.state.registered
    consumer.model.use(DeviceInputs(memory_of(consumer.mapped).cuda))
    pinned: set[int] = set()
    for _ in range(2):
        pair.copies()
        work_items = [consumer.work(x=array, b=array * 2) for array in given]
        found = consumer.run(*work_items)
        assert registered.keys() == (pinned or registered.keys()), "segments are pinned once"
        pinned = set(registered)
        assert len(pinned) >= 2, "those of inputs and of outputs"
        assert pair.copies() == [(share, HOST_TO_DEVICE) for share in shares] * 2
        for row, array in zip(found, given, strict=True):
            pair.check(row, {"y": array * 3, "z": array * 5}, ())
    assert consumer.arenas.used == 0


def test_onnx_runtime_runs_on_a_gpu_that_cupy_cannot_use(
    onnx_pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise Unavailable("no GPU can be used here: the driver is too old")

    monkeypatch.setattr("shmserve.workers.gpu.api.open_device", refuse)
    plan: Any = SimpleNamespace(device=0)
    device_inputs(onnx_pair.consumer.backend.context, "m", plan).close()
    assert "ONNX Runtime copies the tensors to the GPU: no GPU can be used here" in capfd.readouterr().err


def test_a_gpu_failure_in_onnx_runtime_fails_one_batch(onnx_pair: Pair) -> None:
    rows = onnx_pair.produce(*arrays(1, 1))
    work_items = onnx_pair.pass_on(*rows)
    more = [
        replace(work, inputs=(*work.inputs, onnx_pair.consumer.work(b=arrays(1)[0]).inputs[0])) for work in work_items
    ]
    onnx_pair.fail("memcpyAsync")
    for row in onnx_pair.consumer.run(*more):
        assert_failed(row, "MODEL_FAILED", "the GPU failed")
    onnx_pair.consumer.failures.clear()  # their tracebacks refer to arrays
    for row in onnx_pair.consumer.run(*more):
        assert [onnx_pair.consumer.array(row, index).shape for index in (0, 1)] == [(1, WIDTH)] * 2
    onnx_pair.give_back(*rows)


@pytest.mark.parametrize("second", ["memcpyAsync", "malloc"])
def test_inputs_are_released_after_their_copies(onnx_pair: Pair, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the second input fails, when the first one is queued."""
    pair, consumer = onnx_pair, onnx_pair.consumer
    device: Any = memory_of(consumer.mapped).cuda
    near = DeviceInputs(device)
    consumer.model.use(near)
    locate = near.locate

    def then_fail(group: Any, index: int, spec: Any) -> Any:
        if index == 1:
            pair.fail(second)
        return locate(group, index, spec)

    monkeypatch.setattr(near, "locate", then_fail)
    (x,) = arrays(1)
    synchronized: list[int] = []
    wait = device.synchronize_stream

    def watched(stream: int) -> None:
        synchronized.append(stream)
        wait(stream)

    monkeypatch.setattr(device, "synchronize_stream", watched)
    (row,) = consumer.run(consumer.work(x=x, b=x * 2))
    assert row.error is not None
    assert len(synchronized) == 1
    consumer.failures.clear()  # their tracebacks refer to arrays


@pytest.mark.parametrize("case", ["not asked", "another output", "a place", "small", "full"])
def test_outputs_that_are_copied_to_the_host(pair: Pair, case: str, tmp_path: Path) -> None:
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
        adder(tmp_path / "small", 8)
        producer = Instance(type(producer.backend), tmp_path / "small", adding("tensorrt", 8))
        (x,) = arrays(1, width=8)
    (row,) = producer.run(replace(producer.work(x=x, outputs=outputs), step=StepOptions(near)))
    np.testing.assert_array_equal(producer.array(row), x + 1)
    assert producer.mapped.on_device == {}
    if producer is not pair.producer:
        producer.close()


def test_handles_outside_of_a_segment_are_refused(pair: Pair) -> None:
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    (given,) = work.inputs
    assert isinstance(given.data, tuple)
    (handle,) = given.data
    beyond = Handle(handle.segment, 1 << 40, handle.size)
    for data, shape in (((beyond,), given.shape), ((replace(handle, size=4),), (1, 1))):
        tensor = Tensor("x", "FP32", shape, data)
        (failed,) = pair.consumer.run(Work(1, 1, (tensor,), None, "internal"))
        assert_failed(failed, "INVALID_ARG")
    pair.give_back(row)


NEAR = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
SEEN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.seen(request.inputs()[0]) for request in requests]

    def seen(self, x):
        found = np.array([[x.is_cpu(), *x.shape()]], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", found)])
"""


@pytest.mark.parametrize("dtype", ["FP32", "BF16"])
def test_an_input_of_a_python_model_stays_on_the_gpu(pair: Pair, dtype: str, tmp_path: Path) -> None:
    """Unless it is BF16, which numpy and cupy do not have."""
    width = WIDTH if dtype == "FP32" else 2 * WIDTH
    python_model(tmp_path / "python", SEEN)
    consumer = config("python", {"x": (dtype, (-1,))}, {"y": ("FP32", (3,))}, max_batch=8, parameters=NEAR)
    pair.consumer.close()
    pair.consumer = pair.open_consumer(Python, tmp_path / "python", consumer)
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    tensor = replace(work.inputs[0], dtype=dtype, shape=(1, width))
    (found,) = pair.consumer.run(replace(work, inputs=(tensor,)))
    np.testing.assert_array_equal(pair.consumer.array(found), [[dtype == "BF16", 1, width]])
    pair.give_back(row)


def test_the_driver_must_confirm_the_size_of_an_allocation(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    device = memory_of(pair.consumer.mapped).cuda
    (_, size) = next(iter(pair.consumer.mapped.on_device.values()))

    def unknown(address: int) -> int:
        raise HandleLost("no known size")

    for room, code, text in (
        (lambda address: size - 1, "INVALID_ARG", f"has {size - 1} bytes, and was announced with {size}"),
        (unknown, "HANDLE_LOST", "no known size"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(device, "room", room)
            (failed,) = pair.consumer.run(work)
        assert_failed(failed, code, text)
        assert not pair.opened, "a refused allocation is closed again"
    np.testing.assert_array_equal(pair.consumer.array(pair.consumer.run(work)[0]), arrays(1)[0] + 2)
    pair.give_back(row)


def test_memory_on_another_gpu_is_not_opened(pair: Pair) -> None:
    (row,) = pair.produce(*arrays(1))
    (work,) = pair.pass_on(row)
    pair.fail("ipcOpenMemHandle", 201)  # its process has ended
    (failed,) = pair.consumer.run(work)
    assert_failed(failed, "HANDLE_LOST", "memory of another process on the GPU can no longer be opened")
    memory_of(pair.consumer.mapped).cuda.uuid = b"another".ljust(16, b"\0")
    (failed,) = pair.consumer.run(work)
    assert_failed(failed, "HANDLE_LOST", "the tensor is on another GPU than the model's instance")
    assert not pair.opened
    pair.give_back(row)


def test_a_uuid_may_be_cut_at_its_first_zero() -> None:
    """As libraries return it."""
    exported, uuid = bytes(range(64)), b"ab\0" + bytes(range(13))
    assert extents.name_of(exported, uuid) == extents.name_of(exported, b"ab")
    assert extents.parts_of(extents.name_of(exported, bytes(range(1, 17)))) == (exported, bytes(range(1, 17)))


def test_a_process_without_a_gpu_can_map_but_not_read() -> None:
    mapped = Mapped()
    mapped.add(5, 100, name=extents.name_of(bytes(64), bytes(16)))
    assert 5 in mapped
    with pytest.raises(InvalidRequest, match="already mapped"):
        mapped.add(5, 100, name=extents.name_of(bytes(64), bytes(16)))
    for read in (mapped.memory, mapped.address):
        with pytest.raises(OnDevice, match="the tensor is on a GPU, which this process cannot read"):
            read(Handle(5, 0, 10))
    assert issubclass(OnDevice, HandleLost)
    with pytest.raises(HandleLost, match="the tensor is on a GPU, and the model's instance is not"):
        memory_of(mapped)
    mapped.remove(5)
    assert 5 not in mapped
    with pytest.raises(InvalidRequest, match="is not mapped"):
        mapped.remove(5)
