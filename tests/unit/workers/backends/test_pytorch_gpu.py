"""PyTorch models on the stand-in for CUDA: tensors that stay on the GPU, and batches that overlap.

PyTorch computes on the host, when the work that the stand-in has queued before in the stream of the model has run; its
results count as memory of the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.worker_messages import StepOptions, rows_of
from shmserve.repo.config import schema
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from shmserve.workers.batch.specs import inputs_of
from shmserve.workers.runner import OverlappingRunner, StackedRunner
from tests.support.cases import cases
from tests.support.optional import OnDemand, optional
from tests.support.workers.gpu.device_arrays import view
from tests.support.workers.gpu.device_pair import DEVICE_TO_HOST, WIDTH, Pair, arrays, gathered
from tests.support.workers.gpu.harness import Instance
from tests.support.workers.gpu.tensorrt_harness import Cuda, Gpu, Spec, rows
from tests.support.workers.models.worker_models import torch_forward
from tests.support.workers.worker_harness import assert_failed, config

torch = optional("torch")
DEVICE = "shmserve.workers.backends.pytorch.device"


class FakeDevice:
    """The functions of `device`, on the stand-in. `refuse`: the next capture fails."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.refuse = False
        self.captures = 0
        self.replays = 0
        self.settled = 0
        self.pools: list[Any] = []
        self.recorded: list[weakref.ref[Any]] = []
        self.cached = 0
        """Memory that PyTorch keeps."""

    def as_tensor(self, memory: Any, place: Any) -> Any:
        return torch.from_numpy(view(memory))

    def address_of(self, tensor: Any) -> int:
        address: int = tensor.data_ptr()
        self.runtime.state.foreign[address] = tensor.nbytes
        return address

    def stream_of(self, handle: int, place: Any) -> int:
        return handle

    @contextmanager
    def running_in(self, stream: int) -> Iterator[None]:
        found = self.runtime.state.stream(stream)
        found.run(found.asked)
        yield

    def graph_pool(self) -> object:
        return object()

    def capture(self, run: Callable[[], object], stream: int, pool: Any) -> Callable[[], None]:
        self.captures += 1
        self.pools.append(pool)
        if self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replay() -> None:
            self.replays += 1
            run()

        self.recorded.append(weakref.ref(replay))
        return replay

    def free_cached(self) -> None:
        self.runtime.state.total += self.cached
        self.cached = 0

    def settle_all(self, place: Any) -> None:
        self.settled += 1


@pytest.fixture
def fake(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice(gpu.runtime)
    names = "as_tensor address_of stream_of running_in graph_pool capture free_cached settle_all"
    for name in names.split():
        monkeypatch.setattr(f"{DEVICE}.{name}", getattr(fake, name))
    return fake


def tuned(given: ModelConfig, cuda: Any = None, **parameters: str) -> ModelConfig:
    values = {key: schema.ModelParameter(string_value=value) for key, value in parameters.items()}
    optimization = schema.ModelOptimizationPolicy(cuda=cuda)
    return replace(given, optimization=optimization, parameters={**given.parameters, **values})


def model(folder: Path, width: int, *lines: str, most: int = 8) -> ModelConfig:
    torch_forward(folder, "x", *(lines or ("return x + 1",)))
    group = ModelInstanceGroup(name="m_0", kind="KIND_CPU", count=1)
    row = ("FP32", (width,))
    given = config("pytorch", {"x": row}, {"y": row}, max_batch=most, parameters={"INTRA_OP_THREAD_COUNT": "1"})
    return replace(given, instance_group=(group,))


def load(folder: Path, given: ModelConfig) -> Instance:
    """Loads a model as on a GPU."""
    return Instance(gpu_backend(), folder, given)


def gpu_backend() -> Any:
    from shmserve.workers.backends.pytorch.backend import Torch, TorchModel

    class TorchHere(Torch):
        def load(self, config: ModelConfig) -> TorchModel:
            return TorchModel(self.context, config, *self._open(config), on_gpu=True)

    return TorchHere


def run(instance: Instance, *shares: int, width: int, add: float = 1) -> None:
    found = rows(*shares, width=width)
    for row, array in zip(instance.run(*[instance.work(x=array) for array in found]), found, strict=True):
        np.testing.assert_array_equal(instance.array(row), array + add)


def fly(instance: Instance, width: int) -> None:
    """Two batches at a time on the device."""
    flying: list[tuple[Any, Any]] = []
    for seed, shares in enumerate([(1, 2), (2,), (3, 1), (1,), (8,)]):
        found = rows(*shares, width=width, seed=seed)
        flying.append((instance.runner.begin([instance.work(x=array) for array in found]), found))
        if len(flying) == 2:
            check_first(instance, flying)
    check_first(instance, flying)


def check_first(instance: Instance, flying: list[tuple[Any, Any]]) -> None:
    batch, given = flying.pop(0)
    for row, array in zip(rows_of(instance.runner.finish(batch)[0]), given, strict=True):
        np.testing.assert_array_equal(instance.array(row), array + 1)


@pytest.mark.parametrize("width", [4, 5000, 40_000])
def test_batches_overlap(gpu: Gpu, fake: FakeDevice, tmp_path: Path, width: int) -> None:
    with load(tmp_path, model(tmp_path, width)) as instance:
        assert fake.settled == 1, "weights are copied before the first batch"
        assert type(instance.runner) is OverlappingRunner
        fly(instance, width)
        run(instance, 1, 2, 1, width=width)
        assert instance.arenas.used == 0


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_tensors_on_the_gpu_stay_there(gpu: Gpu, fake: FakeDevice, pair: Pair, tmp_path: Path, shares: Any) -> None:
    (tmp_path / "torch").mkdir()
    width = 40_000
    given = model(tmp_path / "torch", width, "x.add_(1)", "return x")
    pair.replace_consumer(gpu_backend(), tmp_path / "torch", given)
    sent = arrays(*shares)
    produced = pair.produce(*sent)
    for near in ((), ("y",)):
        pair.copies()
        found = pair.consumer.run(*[replace(work, step=StepOptions(near)) for work in pair.pass_on(*produced)])
        assert pair.copies() == [*gathered(shares), *([] if near else [(sum(shares), DEVICE_TO_HOST)])]
        for row, array in zip(found, sent, strict=True):
            pair.check(row, {"y": array + 2}, near)  # the model writes to a copy: the next run gets the same input
    pair.give_back(*produced)
    assert pair.consumer.arenas.used == 0


@cases(
    ("raise ValueError('told to')", "MODEL_FAILED", "told to"),
    ("return x.double()", "INTERNAL", "expects datatype TYPE_FP32 for output 'y', model provides TYPE_FP64"),
)
def test_a_batch_that_fails_frees_its_buffers(
    line: str, code: str, text: str, gpu: Gpu, fake: FakeDevice, tmp_path: Path
) -> None:
    given = model(tmp_path, 4, "if bool((x == 77).any()):", f"    {line}", "return x + 1")
    with load(tmp_path, given) as instance:
        running = instance.runner.begin([instance.work(x=np.ones((1, 4), np.float32))])
        for _ in range(3):
            failed = instance.runner.begin([instance.work(x=np.full((1, 4), 77, np.float32))])
            (row,) = instance.runner.finish(failed)[0]
            assert_failed(row, code, text)
        (row,) = instance.runner.finish(running)[0]
        np.testing.assert_array_equal(instance.array(row), np.full((1, 4), 2, np.float32))


def test_a_buffer_gets_the_memory_that_pytorch_keeps(gpu: Gpu, fake: FakeDevice, tmp_path: Path) -> None:
    with load(tmp_path, model(tmp_path, -1)) as instance:
        run(instance, 1, width=4)
        gpu.state.total, fake.cached = 100_000, 1_000_000
        run(instance, 1, width=40_000)
        assert fake.cached == 0
        (row,) = instance.run(instance.work(x=np.ones((1, 400_000), np.float32)))
        assert_failed(row, "UNAVAILABLE", "no room for 1600000 bytes on the GPU")
        run(instance, 1, width=40_000)


@pytest.mark.parametrize(
    ("installed", "why"), [(False, "tensors and models on a GPU need a package"), (True, "no GPU can be used here")]
)
def test_pytorch_copies_the_inputs_if_cupy_cannot(
    gpu: Gpu,
    fake: FakeDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    installed: bool,
    why: str,
) -> None:
    """CuPy is missing, or is for CUDA 13 and needs a newer driver than a PyTorch for CUDA 12."""
    settled: list[Any] = []
    monkeypatch.setattr(f"{DEVICE}.settle", settled.append)
    if installed:
        gpu.state.failures["setDevice"] = 35  # cudaErrorInsufficientDriver
    else:
        monkeypatch.setitem(__import__("sys").modules, "cupy.cuda.runtime", None)
    with load(tmp_path, model(tmp_path, 4)) as instance:
        assert type(instance.runner) is StackedRunner
        run(instance, 1, 2, width=4)
        assert len(settled) == 1
    assert f"batches do not overlap and run without CUDA graphs: {why}" in capfd.readouterr().err


def test_graphs_for_each_set_of_buffers(gpu: Gpu, fake: FakeDevice, tmp_path: Path) -> None:
    given = replace(
        tuned(model(tmp_path, 4), Cuda(graphs=True)),
        dynamic_batching=schema.ModelDynamicBatching(preferred_batch_size=(3,)),
    )
    with load(tmp_path, given) as instance:
        assert (fake.captures, len(set(map(id, fake.pools)))) == (6, 1)  # 1, 3 and 8 rows; one pool
        fly(instance, 4)  # 3, 2, 4, 1, 8 rows
        assert fake.replays == 3
        run(instance, 1, 2, width=4)
        assert fake.replays == 4


def test_a_graph_keeps_its_buffers_when_others_grow(gpu: Gpu, fake: FakeDevice, tmp_path: Path) -> None:
    shape = schema.ModelOptimizationPolicyCudaGraphSpecShape(dim=(4,))
    spec = Spec(batch_size=2, input={"x": shape})
    with load(tmp_path, tuned(model(tmp_path, -1), Cuda(graphs=True, graph_spec=(spec,)))) as instance:
        for width, replays in ((4, 1), (5000, 1), (4, 2), (40_000, 2), (4, 3)):
            run(instance, 1, 1, width=width)
            assert fake.replays == replays
        allocated = sorted(memory.size for memory in gpu.state.device.values())
        assert allocated.count(2 * 40_000 * 4) == 1, "one set of buffers ran all batches"
        assert 2 * 5000 * 4 not in allocated, "it was replaced, and no graph uses it"


@cases(
    (4, (), "inputs [8, 4]: RuntimeError: operation not permitted when stream is capturing"),
    (4, ("return x.double()",), "output 'y' is torch.float64 on cpu, not a FP32 tensor on the GPU"),
    (-1, (), "input 'x' has the shape [-1]: set its dims in graph_spec"),
    ids=["refused", "another type", "open dims"],
)
def test_models_that_cannot_be_captured_run_without_graphs(
    width: int, lines: Any, why: str, gpu: Gpu, fake: FakeDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.refuse = not lines
    with load(tmp_path, tuned(model(tmp_path, width, *lines), Cuda(graphs=True))) as instance:
        if not lines:
            fly(instance, 4)
        assert fake.replays == 0
    text = capfd.readouterr().err
    assert "batches run without CUDA graphs" in text
    assert why in text


torch_device = OnDemand(DEVICE)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(f"{DEVICE}.as_tensor", lambda memory, device: torch.from_numpy(view(memory)))
    monkeypatch.setattr(f"{DEVICE}.settle", found.append)
    return found


@pytest.fixture
def torch_pair(settled: list[Any], pair: Pair, tmp_path: Path) -> Pair:
    """The producer (x + 1), followed by PyTorch: y = 3 x, and z, for which the model writes to x."""
    (tmp_path / "torch").mkdir()
    torch_forward(tmp_path / "torch", "x", "y = 3 * x", "x.add_(1)", "return y, x")
    row = ("FP32", (WIDTH,))
    outputs = {"y__0": row, "z__1": row}
    parameters = {"INTRA_OP_THREAD_COUNT": "1", "ENABLE_CACHE_CLEANING": "true"}  # so that batches are not queued
    consumer = config("pytorch", {"x": row}, outputs, max_batch=8, parameters=parameters)
    pair.replace_consumer(gpu_backend(), tmp_path / "torch", consumer)
    return pair


@pytest.mark.parametrize("shares", [(1,), (3,), (1, 2, 1)], ids=str)
def test_pytorch_reads_and_writes_on_the_gpu(torch_pair: Pair, settled: list[Any], shares: tuple[int, ...]) -> None:
    pair, given = torch_pair, arrays(*shares)
    rows = pair.produce(*given)
    for near in ((), ("y__0",), ("y__0", "z__1")):
        work_items = [replace(work, step=StepOptions(near)) for work in pair.pass_on(*rows)]
        pair.copies()
        settled.clear()
        found = pair.consumer.run(*work_items)
        assert pair.copies() == gathered(shares)
        assert len(settled) == 1, "it waits for the GPU before it responds"
        for row, array in zip(found, given, strict=True):
            # The model writes to a copy: the input stays the same in each run.
            pair.check(row, {"y__0": (array + 1) * 3, "z__1": array + 2}, near)
    pair.give_back(*rows)
    assert pair.consumer.arenas.used == 0


def test_tensors_on_the_gpu_have_the_type_of_the_model(settled: list[Any]) -> None:
    for dtype, kind in (
        ("FP16", torch.float16),
        ("INT64", torch.int64),
        ("BOOL", torch.bool),
        ("BF16", torch.bfloat16),
    ):
        spec: Any = inputs_of(config("pytorch", {"x": (dtype, (2,))}, {}))[0]
        memory = np.arange(4 * spec.item, dtype=np.uint8) % 2
        tensor = torch_device.over(memory.ctypes.data, (2, 2), spec, torch.device("cpu"))
        assert (tensor.dtype, tuple(tensor.shape)) == (kind, (2, 2))
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == memory.tobytes()
