"""ONNX models on the memory of requests, without a process: the addresses that the engine reads and writes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import ModelFailed, Unsupported
from shmserve.protocol.messages import Handle, Tensor, Wanted
from shmserve.protocol.worker_messages import Row
from shmserve.shm.views import address_of
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.onnx.backend import Onnx
from shmserve.workers.backends.onnx.graphs import MAX_SHAPES, OnnxGraphs
from shmserve.workers.backends.onnx.providers import CPU, CUDA
from shmserve.workers.backends.onnx.run import Binding, OutputTarget, needs_own_binding
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.specs import inputs_of, outputs_of
from tests.support.hypothesis_profiles import examples
from tests.support.workers.batch_parts import Array, Parts
from tests.support.workers.models.worker_models import Graph, on_gpu
from tests.support.workers.worker_harness import config, work

WIDTH = 4096


def context(folder: Path) -> Context:
    return Context("m", 1, "m_0_0", folder, folder / "1", {}, 1)


class Watched:
    """A model, y = -x, and the addresses that its engine has read and written in the last run of a binding."""

    def __init__(self, folder: Path, parts: Parts, patch: pytest.MonkeyPatch) -> None:
        self.parts = parts
        self.read: list[int] = []
        self.written: list[int] = []
        bound = Binding.run

        def watched(binding: Binding, inputs: Any, targets: Any, options: Any) -> Any:
            self.read = [address_of(array) for _, array in inputs]
            self.written = [address_of(target.array) for target in targets]
            return bound(binding, inputs, targets, options)

        patch.setattr(Binding, "run", watched)
        negative(folder)
        self.model = Onnx(context(folder)).load(parts.config)

    def run(self, *arrays: Array, place: Handle | None = None) -> tuple[list[Row], list[int]]:
        """The rows of one batch, and the addresses of its inputs."""
        tensors = [self.parts.tensor("x", array, [0]) for array in arrays]
        outputs = (Wanted("y", place),) if place else None
        work_items = [work(number, tensor, outputs=outputs) for number, tensor in enumerate(tensors, 1)]
        (group,), _ = self.parts.gather.groups(work_items)
        results = Results(self.parts.scatter, group.work_items, group.rows)
        self.model.execute(group, results)
        return results.rows(), [address_of(self.values(tensor)) for tensor in tensors]

    def address(self, tensor: Tensor) -> int:
        """The address of an output, in the mapping through which it was written."""
        assert isinstance(tensor.data, tuple)
        (handle,) = tensor.data
        arena = self.parts.arenas._by_segment[handle.segment]  # noqa: SLF001 - others see another mapping
        segment = next(segment for segment in arena.segments if segment.id == handle.segment)
        return address_of(np.frombuffer(segment.memory, np.uint8)) + handle.offset

    def values(self, tensor: Tensor) -> Array:
        assert isinstance(tensor.data, tuple)
        return self.parts.mapped.view(tensor.data[0], np.dtype(np.float32), tensor.shape)


def negative(folder: Path) -> None:
    graph = Graph().input("x", "FP32", (-1, WIDTH)).output("y", "FP32", (-1, WIDTH))
    graph.node("Neg", ["x"], ["y"]).save(folder)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    row = ("FP32", (WIDTH,))
    with Parts(config("onnxruntime", {"x": row}, {"y": row}, max_batch=16)) as parts:
        made = Watched(tmp_path, parts, monkeypatch)
        yield made
        made.model.close()


def arrays_of(*rows: int) -> list[Array]:
    random = np.random.default_rng(7)
    return [random.standard_normal((count, WIDTH)).astype(np.float32) for count in rows]


def test_a_single_request_is_not_copied(watched: Watched) -> None:
    """The engine reads the input in the caller's memory, and writes the output to memory that the caller reads, which
    the caller may also choose."""
    for (x,) in (arrays_of(1), arrays_of(3)):
        (row,), addresses = watched.run(x)
        assert watched.read == addresses
        assert watched.written == [watched.address(row.outputs[0])]
        assert (watched.values(row.outputs[0]) == -x).all()
    place = watched.parts.share(bytes(x.nbytes))
    (row,), addresses = watched.run(x, place=place)
    assert row.outputs[0].data == (place,)
    found = watched.parts.mapped.writable(place, np.dtype(np.float32), x.shape)
    assert (watched.read, watched.written) == (addresses, [address_of(found)])
    assert (found == -x).all()


def test_a_batch_is_gathered_once_into_the_same_buffer(watched: Watched) -> None:
    buffers = set()
    for rows in ((1, 2, 3), (2, 2, 2), (1, 1)):
        xs = arrays_of(*rows)
        found, addresses = watched.run(*xs)
        assert len(watched.read) == 1
        assert watched.read[0] not in addresses
        buffers.add(watched.read[0])
        # One output for all requests, each of which holds a part: nothing is copied.
        (start,) = watched.written
        for row, x in zip(found, xs, strict=True):
            assert watched.address(row.outputs[0]) == start
            assert (watched.values(row.outputs[0]) == -x).all()
            start += x.nbytes
    assert len(buffers) == 1


class Lone:
    """A group of one request whose input is larger than the machine's memory."""

    rows = 0

    def __init__(self, array: Array) -> None:
        self._array = array

    def array(self, index: int) -> Array:
        return self._array

    def computing(self) -> None:
        """Called before a run. Measures nothing."""


@pytest.mark.parametrize("count", [1, 2000], ids=["plain", "bound"])
def test_the_engine_does_not_copy_its_input(tmp_path: Path, count: int) -> None:
    """An input of a terabyte, in which only the pages that the model reads exist."""
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [count])
    graph.weight("at", np.arange(5, 5 + count)).node("Gather", ["x", "at"], ["y"]).save(tmp_path)
    model = config("onnxruntime", {"x": ("FP32", (-1,))}, {"y": ("FP32", (count,))})
    loaded = Onnx(context(tmp_path)).load(model)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 1 << 40, flags=flags)
    x = np.ndarray((1 << 38,), np.float32, memory)
    x[5 : 5 + count] = np.arange(count)
    x.flags.writeable = False
    with Parts(model) as parts:
        results = Results(parts.scatter, [work(1, rows=0)], 0)
        loaded.execute(Lone(x), results)  # type: ignore[arg-type]
        assert parts.read(results.rows()[0].outputs[0]).tolist() == list(range(count))
    loaded.close()
    del x
    memory.close()


def session_of(folder: Path) -> Any:
    """sum = x + w, of a known size; where = the indexes at which x is not zero, of an unknown size."""
    graph = Graph().input("x", "FP32", [-1]).input("w", "FP32", [1])
    graph.output("sum", "FP32", [-1]).output("where", "INT64", [1, -1]).weight("w", np.array([10], np.float32))
    path = graph.node("Add", ["x", "w"], ["sum"]).node("NonZero", ["x"], ["where"]).save(folder)
    return engine(path)


def engine(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


_SESSIONS: list[Any] = []
SPECS = config(
    "onnxruntime", {"x": ("FP32", (-1,)), "w": ("FP32", (1,))}, {"sum": ("FP32", (-1,)), "where": ("INT64", (1, -1))}
)
steps = st.tuples(
    st.integers(0, 5),  # how long x is
    st.booleans(),  # the same memory as before
    st.booleans(),  # with w
    st.sampled_from([(0,), (1,), (0, 1)]),  # the wanted outputs
    st.booleans(),  # sum into given memory
)


@settings(max_examples=examples(60))
@given(run=st.lists(steps, min_size=1, max_size=8))
def test_runs_of_one_binding_are_independent(tmp_path_factory: pytest.TempPathFactory, run: Any) -> None:
    if not _SESSIONS:
        _SESSIONS.append(session_of(tmp_path_factory.mktemp("model")))
    binding = Binding(_SESSIONS[0], True)
    x_spec, w_spec = inputs_of(SPECS)
    specs = outputs_of(SPECS)
    xs, sums = np.zeros(5, np.float32), np.zeros(5, np.float32)
    kept: list[tuple[Array, list[Any]]] = []
    for number, (length, same, with_w, wanted, given_place) in enumerate(run):
        x = xs[:length] if same else np.empty(length, np.float32)
        x[:] = np.arange(length) * (number % 3)
        w = np.array([number], np.float32)
        target = sums[:length] if same else np.empty(length, np.float32)
        targets = [OutputTarget(specs[index], target if index == 0 and given_place else None) for index in wanted]
        outputs = binding.run([(x_spec, x), (w_spec, w)] if with_w else [(x_spec, x)], targets, None)
        expected = [x + (w if with_w else 10), np.array(x.nonzero())]
        values = iter(outputs)
        for index, one in zip(wanted, targets, strict=True):
            found: Any = next(values) if one.array is None else one.array
            assert found.tolist() == expected[index].tolist()
            if one.array is None:
                kept.append((found, found.tolist()))
    # Later runs do not change arrays that the engine has allocated.
    assert all(found.tolist() == before for found, before in kept)


class Counting:
    """A session with one binding, which counts bound tensors."""

    def __init__(self, session: Any) -> None:
        self._bound = session.io_binding()
        self.run_with_iobinding = session.run_with_iobinding
        self.count = 0

    def io_binding(self) -> Counting:
        return self

    def __getattr__(self, name: str) -> Any:
        self.count += name in ("bind_input", "bind_output")
        return getattr(self._bound, name)


@pytest.mark.parametrize("keeps", [True, False], ids=["host", "device"])
def test_an_array_at_the_same_address_is_not_bound_again(tmp_path: Path, keeps: bool) -> None:
    """Unless binding copies it to the device."""
    counting = Counting(session_of(tmp_path))
    binding = Binding(counting, keeps)
    (x_spec, _), (spec, _) = inputs_of(SPECS), outputs_of(SPECS)
    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)
    counts = []
    for number in range(3):
        x[:] = number
        assert binding.run([(x_spec, x)], [OutputTarget(spec, y)], None) == []
        assert y.tolist() == [10 + number] * 4
        counts.append(counting.count)
    assert counts == ([2, 2, 2] if keeps else [2, 3, 4])


def test_a_binding_works_after_a_failed_run(tmp_path: Path) -> None:
    binding = Binding(session_of(tmp_path), True)
    (x_spec, _), (spec, _) = inputs_of(SPECS), outputs_of(SPECS)
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    binding.run([(x_spec, x)], [OutputTarget(spec, y)], None)
    with pytest.raises(RuntimeError):
        binding.run([(x_spec, x)], [OutputTarget(spec, np.zeros(3, np.float32))], None)
    y[:] = 0
    binding.run([(x_spec, x)], [OutputTarget(spec, y)], None)
    assert y.tolist() == [11] * 4


def test_an_output_of_the_engine_keeps_its_binding(tmp_path: Path) -> None:
    """For bfloat16, which the engine cannot convert to numpy."""
    Graph().input("x", "BF16", [-1]).output("y", "BF16", [-1]).node("Identity", ["x"], ["y"]).save(tmp_path)
    model = config("onnxruntime", {"x": ("BF16", (-1,))}, {"y": ("BF16", (-1,))})
    (x_spec,), (spec,) = inputs_of(model), outputs_of(model)
    session = engine(tmp_path / "1" / "model.onnx")
    kept = []
    for number in range(1, 20):
        x = np.full(1000, number, np.uint16)
        targets = [OutputTarget(spec, None)]
        assert needs_own_binding(targets)
        (y,) = Binding(session, True, once=True).run([(x_spec, x.view(x_spec.numpy))], targets, None)
        kept.append(y)
    assert [set(y.view(np.uint16).tolist()) for y in kept] == [{number} for number in range(1, 20)]


def test_recorded_runs_have_tensors_of_their_own(tmp_path: Path) -> None:
    """Tested on the host, where the engine records nothing, but the copies are the same."""
    graph = Graph().input("x", "FP32", [-1, 3]).input("z", "FP32", [-1, 3]).output("y", "FP32", [-1, 3])
    path = graph.node("Sub", ["x", "z"], ["y"]).save(tmp_path)
    model = config("onnxruntime", {"x": ("FP32", (3,)), "z": ("FP32", (3,))}, {"y": ("FP32", (3,))}, max_batch=64)
    graphs = OnnxGraphs("m", engine(path), ("cpu", 0), inputs_of(model), outputs_of(model))
    random = np.random.default_rng(1)
    seen: dict[int, Any] = {}
    for rows in (1, 4, 1, 4, 4):
        x, z = (random.standard_normal((rows, 3)).astype(np.float32) for _ in range(2))
        recorded = graphs.of([x, z], rows)
        assert recorded is not None
        assert seen.setdefault(rows, recorded) is recorded
        (y,) = recorded.run([x, z])
        assert y.tolist() == (x - z).tolist()
    assert graphs.of([x, None], 4) is None
    assert graphs.of([x[:0], z[:0]], 0) is None
    for rows in range(1, 40):
        x = np.zeros((rows, 3), np.float32)
        assert (graphs.of([x, x], rows) is None) == (rows > MAX_SHAPES and rows not in seen)


@pytest.mark.parametrize(
    ("dtype", "dims", "text"),
    [("FP32", (-1,), "is not known before"), ("STRING", (1,), "is BYTES"), ("BF16", (1,), "is BF16")],
)
def test_outputs_of_strings_or_unknown_size_cannot_be_recorded(dtype: str, dims: Sequence[int], text: str) -> None:
    model = config("onnxruntime", {"x": ("FP32", (1,))}, {"y": (dtype, dims)}, max_batch=2)
    with pytest.raises(Unsupported, match=f"output 'y'.*{text}"):
        OnnxGraphs("m", None, ("cuda", 0), inputs_of(model), outputs_of(model))


def test_options_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Any] = []
    kind = ort.InferenceSession

    def opened(*arguments: Any, **how: Any) -> Any:
        sessions.append(kind(*arguments, **how))
        return sessions[-1]

    monkeypatch.setattr(ort, "InferenceSession", opened)
    negative(tmp_path)
    parameters = {
        "intra_op_thread_count": "2",
        "inter_op_thread_count": "3",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "0",
        "session.set_denormal_as_zero": "1",
    }
    model = config("onnxruntime", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=2, parameters=parameters)
    loaded = Onnx(context(tmp_path)).load(model)
    options = sessions[0].get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    loaded.close()


def test_a_file_that_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelFailed, match="unable to load model 'm': "):
        Onnx(context(tmp_path)).load(config("onnxruntime", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}))


def test_a_provider_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    negative(tmp_path)
    arguments: dict[str, Any] = {}

    class CpuSession:
        """The session that the engine returns if the libraries of CUDA are missing."""

        def __init__(self, path: str, options: Any, **how: Any) -> None:
            arguments.update(how)

        def get_providers(self) -> list[str]:
            return [CPU]

    monkeypatch.setattr(ort, "InferenceSession", CpuSession)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    model = on_gpu(config("onnxruntime", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}), 3)
    with pytest.raises(Unsupported, match=r"CUDAExecutionProvider did not start\. It needs the libraries of CUDA"):
        Onnx(context(tmp_path)).load(model)
    assert arguments == {"providers": [(CUDA, {"device_id": "0"}), (CPU, {})], "enable_fallback": 0}
