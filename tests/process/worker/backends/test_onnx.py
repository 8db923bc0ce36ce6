"""ONNX models and their engine: completed configurations, files, memory limits, providers, unsupported types."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper

from shmserve.protocol.messages import Tensor
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelInstanceGroup,
    ModelOperations,
    ModelOptimizationPolicy,
    ModelOptimizationPolicyExecutionAccelerators,
    ModelOptimizationPolicyExecutionAcceleratorsAccelerator,
)
from tests.support.cases import cases
from tests.support.workers.in_process import completed, inline, load_failure, loaded, run, value
from tests.support.workers.models.worker_models import Graph, version_folder
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, running, work

pytestmark = pytest.mark.process


def described(config: ModelConfig) -> tuple[int, list[Any], list[Any]]:
    return (
        config.max_batch_size,
        [(entry.name, entry.data_type, entry.dims) for entry in config.input],
        [(entry.name, entry.data_type, entry.dims) for entry in config.output],
    )


@cases(
    ([-1, 20], 0, {}, 4),
    ([-1, 20], 0, {"onnxruntime,default-max-batch-size": "7"}, 7),
    ([-1, 20], 2, {}, 2),
    ([3, -1], 0, {}, 0),
    ids=["default", "setting", "given", "fixed size"],
)
def test_a_configuration_is_completed_from_the_model(
    dims: list[int], max_batch: int, settings: dict[str, str], expected: int, tmp_path: Path
) -> None:
    Graph().input("x", "INT64", dims).output("y", "INT64", dims).node("Identity", ["x"], ["y"]).save(tmp_path)
    found = completed(config("onnxruntime", {}, {}, max_batch=max_batch), tmp_path, settings)
    shape = tuple(dims[1:] if expected else dims)
    assert described(found) == (expected, [("x", "TYPE_INT64", shape)], [("y", "TYPE_INT64", shape)])
    if not max_batch:
        assert (found.dynamic_batching is not None) == (expected > 0)


def test_a_model_with_only_a_batch_dimension(tmp_path: Path) -> None:
    """Callers see dims [1], the model sees none."""
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [-1])
    graph.node("Neg", ["x"], ["y"]).save(tmp_path)
    with WorkerProcess(config("onnxruntime", {}, {}), tmp_path) as worker:
        assert described(worker.loaded())[1] == [("x", "TYPE_FP32", (1,))]
        xs = [np.array([[value]], np.float32) for value in (1, 2, 3)]
        for shared in (False, True):
            work_items = [work(number, worker.tensor("x", x, shared=shared)) for number, x in enumerate(xs)]
            for row, x in zip(worker.run(*work_items), xs, strict=True):
                assert row.outputs[0].shape == (1, 1)
                assert worker.value(row) == -x
        many = np.arange(5000, dtype=np.float32)[:, None]
        (row,) = worker.run(work(9, worker.tensor("x", many)))
        assert (worker.value(row) == -many).all()


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_dims_of_1_represent_a_scalar(tmp_path: Path, dims: tuple[int, ...]) -> None:
    Graph().input("x", "FP32", []).output("y", "FP32", []).node("Neg", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("FP32", dims)}, {"y": ("FP32", dims)})
    with loaded(given, tmp_path) as model:
        ((row,), *_) = model.runner.run([work(1, Tensor("x", "FP32", dims, np.float32(7).tobytes()))])
        assert row.error is None, row.error
        assert (row.outputs[0].shape, row.outputs[0].data) == (dims, np.float32(-7).tobytes())


def test_a_string_that_is_not_utf_8_fails_its_request(tmp_path: Path) -> None:
    graph = Graph().input("x", "BYTES", [-1, 1]).output("y", "BYTES", [-1, 1])
    graph.node("Identity", ["x"], ["y"]).save(tmp_path)
    given = config("onnxruntime", {"x": ("STRING", (1,))}, {"y": ("STRING", (1,))}, max_batch=4)
    with loaded(given, tmp_path) as model:
        good, bad = np.array([["é".encode()]], object), np.array([[b"\xff"]], object)
        rows = run(model, work(1, inline("x", good)), work(2, inline("x", bad)))
        assert value(rows[0]).tolist() == good.tolist()
        assert_failed(rows[1], "INVALID_ARG", "not UTF-8")


LARGE = 1 << 20  # elements, 4 MiB
X = np.arange(LARGE, dtype=np.float32)
VECTOR = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}


def negative(folder: Path, dim: int = -1) -> None:
    Graph().input("x", "FP32", [dim]).output("y", "FP32", [dim]).node("Neg", ["x"], ["y"]).save(folder)


def small(worker: WorkerProcess) -> list[float]:
    (row,) = worker.run(work(1, worker.tensor("x", np.array([1, 2], np.float32)), rows=0))
    found: list[float] = worker.value(row).tolist()
    return found


def refused(given: ModelConfig, folder: Path) -> str:
    return load_failure(given, folder).text


def test_a_request_over_the_host_memory_limit_fails(tmp_path: Path) -> None:
    """The engine allocates an output of unknown size. That request fails, the next one does not. Other settings of the
    session and its runs are accepted, and a likely typo is logged."""
    negative(tmp_path)
    parameters = {
        "cpu_mem_limit": str(1 << 20),
        "memory.enable_memory_arena_shrinkage": "cpu:0;gpu:0",
        "session.use_device_allocator_for_initializers": "1",
        "intra_op_thread_cout": "2",
    }
    settings = {"onnxruntime,enable-global-threadpool": "1", "onnxruntime,intra_op_thread_count": "1"}
    with running(config("onnxruntime", *VECTOR, parameters=parameters), tmp_path, settings=settings) as worker:
        (row,) = worker.run(work(1, worker.tensor("x", X), rows=0))
        assert row.error is not None
        assert "Available memory of 1048576 is smaller than requested bytes of 4194304" in row.error.text
        assert ".cc" not in row.error.text
        assert small(worker) == [-1, -2]
        assert "did you mean 'intra_op_thread_count'?" in worker.said()


def test_a_model_directory_with_external_weights(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    graph = Graph().input("x", "FP32", [-1, 64]).output("y", "FP32", [-1, 64]).weight("w", weights)
    path = graph.node("MatMul", ["x", "w"], ["y"]).save(tmp_path)
    proto = onnx.load(str(path))
    path.unlink()
    path.mkdir()
    onnx.save(proto, str(path / "model.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (path / "weights.bin").stat().st_size == weights.nbytes
    with loaded(config("onnxruntime", {}, {}), tmp_path) as model:
        assert model.config.input[0].dims == (64,)
        x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
        (row,) = run(model, work(1, inline("x", x)))
        np.testing.assert_allclose(value(row), x @ weights, rtol=1e-4, atol=1e-4)
    (path / "weights.bin").unlink()
    assert "weights.bin" in refused(config("onnxruntime", {}, {}), tmp_path)
    shutil.rmtree(path)
    path.mkdir()
    assert "has no file 'model.onnx'" in refused(config("onnxruntime", {}, {}), tmp_path)


LIBRARY = """\
/* A library of no operators: the engine calls it with its options, and NULL is success. */
void *RegisterCustomOps(void *options, const void *api) { return options && api ? 0 : api; }
"""


def with_library(name: str) -> ModelConfig:
    return replace(config("onnxruntime", *VECTOR), model_operations=ModelOperations(op_library_filename=(name,)))


def test_custom_operator_libraries_are_loaded(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    negative(tmp_path)
    assert "model 'm' has no file 'libours.so'" in refused(with_library("libours.so"), tmp_path)
    (tmp_path / "libours.so").write_text("no library")
    assert "unable to load model 'm': " in refused(with_library("libours.so"), tmp_path)
    if compiler is None:
        pytest.skip("there is no C compiler here")
    (tmp_path / "ours.c").write_text(LIBRARY)
    command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libours.so"), str(tmp_path / "ours.c")]
    subprocess.run(command, check=True)
    for folder in (tmp_path, version_folder(tmp_path)):
        if folder != tmp_path:
            (tmp_path / "libours.so").rename(folder / "libours.so")
        with running(with_library("libours.so"), tmp_path) as worker:
            assert small(worker) == [-1, -2]
            assert "libours.so" in Path(f"/proc/{worker.process.pid}/maps").read_text()


def save(folder: Path, graph: onnx.GraphProto) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(version_folder(folder) / "model.onnx"))


def classifier(folder: Path) -> None:
    """y = -x, and a sequence that contains it, as exporters of classifiers write them."""
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("SequenceConstruct", ["y"], ["all"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 2]) for name in "xy")
    sequence = helper.make_tensor_sequence_value_info("all", TensorProto.FLOAT, None)
    save(folder, helper.make_graph(nodes, "graph", [x], [y, sequence]))


def test_an_output_of_sequence_type_can_be_omitted(tmp_path: Path) -> None:
    classifier(tmp_path)
    text = refused(config("onnxruntime", {}, {}), tmp_path)
    assert "tensor 'all' of the model has the type seq(tensor(float)), which is not supported" in text
    y = {"y": ("FP32", (2,))}
    assert "'all'" in refused(config("onnxruntime", {}, y | {"all": ("FP32", (2,))}), tmp_path)
    with loaded(config("onnxruntime", {}, y), tmp_path) as model:
        assert [entry.name for entry in model.config.input] == ["x"]
        (row,) = run(model, work(1, inline("x", np.array([[1, 2]], np.float32))))
        assert value(row).tolist() == [[-1, -2]]


def test_inputs_of_optional_type_are_refused(tmp_path: Path) -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    given = helper.make_value_info("x", helper.make_optional_type_proto(tensor))
    y = helper.make_tensor_value_info("y", TensorProto.BOOL, [])
    nodes = [helper.make_node("OptionalHasElement", ["x"], ["y"])]
    save(tmp_path, helper.make_graph(nodes, "graph", [given], [y]))
    text = refused(config("onnxruntime", {"x": ("FP32", (2,))}, {"y": ("BOOL", (1,))}), tmp_path)
    assert "has the type optional(tensor(float)), which is not supported: make it a plain tensor" in text


def accelerated(kind: str, name: str = "", **parameters: str) -> ModelConfig:
    Accelerator = ModelOptimizationPolicyExecutionAcceleratorsAccelerator
    listed = (Accelerator(name, parameters),) if name else ()
    accelerators = (
        ModelOptimizationPolicyExecutionAccelerators(gpu_execution_accelerator=listed)
        if kind == "KIND_GPU"
        else ModelOptimizationPolicyExecutionAccelerators(cpu_execution_accelerator=listed)
    )
    return replace(
        config("onnxruntime", *VECTOR),
        instance_group=(ModelInstanceGroup(name="m_0", kind=kind, count=1, gpus=(0,)),),  # type: ignore[arg-type]
        optimization=ModelOptimizationPolicy(execution_accelerators=accelerators),
    )


def runs_like_the_cpu(folder: Path, given: ModelConfig) -> None:
    random = np.random.default_rng(3)
    weights = random.standard_normal((256, 2048)).astype(np.float32)
    graph = Graph().input("x", "FP32", [-1, 256]).output("y", "FP32", [-1, 2048]).weight("w", weights)
    graph.node("MatMul", ["x", "w"], ["h"]).node("Tanh", ["h"], ["y"]).save(folder)
    both = config("onnxruntime", {"x": ("FP32", (256,))}, {"y": ("FP32", (2048,))}, max_batch=8)
    given = replace(given, max_batch_size=8, input=both.input, output=both.output)
    with running(given, folder) as worker:
        number = 0
        for shares in ((1,), (2, 1), (1,), (3,), (8,), (2, 1)):
            xs = [random.standard_normal((rows, 256)).astype(np.float32) for rows in shares]
            work_items: list[Any] = [work(number := number + 1, worker.tensor("x", x)) for x in xs]
            for row, x in zip(worker.run(*work_items), xs, strict=True):
                found = worker.value(row)
                np.testing.assert_allclose(found, np.tanh(x @ weights), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif("OpenVINOExecutionProvider" not in ort.get_available_providers(), reason="no onnxruntime-openvino")
def test_the_openvino_accelerator(tmp_path: Path) -> None:
    runs_like_the_cpu(tmp_path, accelerated("KIND_CPU", "openvino", precision="FP32"))
    shutil.rmtree(tmp_path / "1")
    negative(tmp_path)
    assert "no_such_option" in refused(accelerated("KIND_CPU", "openvino", no_such_option="1"), tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="no onnxruntime-gpu")
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no GPU")
@cases(
    ("", {}),
    ("cuda", {"cudnn_conv_algo_search": "HEURISTIC", "gpu_mem_limit": str(1 << 30), "use_tf32": "0"}),
    ("cuda", {"enable_cuda_graph": "1"}),
    ("tensorrt", {"precision_mode": "FP16", "max_workspace_size_bytes": str(1 << 28)}),
    ids=["cuda", "cuda with options", "cuda graphs", "tensorrt"],
)
def test_on_a_gpu(name: str, parameters: dict[str, str], tmp_path: Path) -> None:
    if name == "tensorrt" and "TensorrtExecutionProvider" not in ort.get_available_providers():
        pytest.skip("no TensorRT")
    runs_like_the_cpu(tmp_path, accelerated("KIND_GPU", name, **parameters))
