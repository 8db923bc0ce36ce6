"""OpenVINO models: inputs and outputs from the model, batches of a fixed size, parameters, and placement of outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest, ModelFailed, NotFound, ServeError, Unsupported
from shmserve.protocol.messages import Return, Tensor, Wanted
from shmserve.repo.config.schema import ModelConfig
from tests.support.cases import cases
from tests.support.workers.in_process import AS_GIVEN, assert_refused, floats, loaded, run, value
from tests.support.workers.models.worker_models import (
    Graph,
    on_gpu,
    openvino_input,
    openvino_result,
    openvino_save,
    version_folder,
)
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, running, work

if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

X, Y = {"x": ("FP32", (3,))}, {"y": ("FP32", (3,))}


def double(folder: Path, dims: tuple[int, ...], dtype: str = "FP32") -> None:
    from openvino import opset13

    x = openvino_input("x", dtype, dims)
    openvino_save(folder, [x], [openvino_result("y", opset13.add(x, x))])


@pytest.mark.process
def test_inputs_and_outputs_are_read_from_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine must not send telemetry, which would create a directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    double(tmp_path, (-1, 3, -1))
    with WorkerProcess(config("openvino", {}, {}), tmp_path) as worker:
        found = worker.loaded()
        (x_found,), (y_found,) = found.input, found.output
        assert (x_found.name, x_found.data_type, tuple(x_found.dims)) == ("x", "TYPE_FP32", (3, -1))
        assert (y_found.name, y_found.data_type, tuple(y_found.dims)) == ("y", "TYPE_FP32", (3, -1))
        assert found.max_batch_size == 4
        assert found.dynamic_batching is not None
        x = np.arange(6).reshape(1, 3, 2)
        for row in worker.run(work(1, floats(x)), work(2, floats(x))):
            assert worker.value(row).tolist() == (2 * x).tolist()
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.process
def test_outputs_of_known_shape_are_written_in_place(tmp_path: Path) -> None:
    """Whatever outputs are requested, and wherever, the engine writes only those, and only there."""
    from openvino import opset13

    x = openvino_input("x", "FP32", (1, 2000))  # its batch is made dynamic
    results = [openvino_result(name, opset13.multiply(x, np.float32(scale))) for name, scale in (("y", 2), ("z", 3))]
    openvino_save(tmp_path, [x], results)
    dims = ("FP32", (2000,))
    given = config("openvino", {"x": dims}, {"y": dims, "z": dims}, max_batch=8)
    with running(given, tmp_path) as worker:
        place = worker.place(8000)
        held: list[tuple[Tensor, np.ndarray[Any, Any]]] = []
        wishes: list[list[Wanted] | None] = [None, [Wanted("z", place)], [Wanted("y")], [], None]
        wishes += [[Wanted("y", place), Wanted("z")], [Wanted("z")]]
        for number, wanted in enumerate(wishes, 1):
            array = np.full((1, 2000), number, np.float32)
            numbers = (10 * number, 10 * number + 1)[: 1 + number % 2]
            rows = worker.run(*[work(each, worker.tensor("x", array), outputs=wanted) for each in numbers])
            for row in rows:
                assert row.error is None, row.error
                held += [(output, array * {"y": 2, "z": 3}[output.name]) for output in row.outputs]
            placed = [output for row in rows for output in row.outputs if output.data == (place,)]
            held = [pair for pair in held if pair[0] in placed or pair[0].data != (place,)]
            for output, expected in held:
                assert (worker.array(output, np.float32) == expected).all()
        for output, _ in held:
            if output.data != (place,):
                worker.send(Return(output.data))  # type: ignore[arg-type]


def test_a_model_with_a_fixed_batch_size_needs_padding(tmp_path: Path) -> None:
    double(tmp_path, (4, 3))
    parameters = {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES", "ENABLE_BATCH_PADDING": "YES", "NUM_STREAMS": "AUTO"}
    with loaded(config("openvino", X, Y, max_batch=4, parameters=parameters), tmp_path) as model:
        for count in (1, 4, 3):
            rows = run(model, *[work(number, floats([[number, 2, 3]])) for number in range(1, count + 1)])
            for number, row in enumerate(rows, 1):
                assert value(row).tolist() == [[2 * number, 4, 6]]
    del parameters["ENABLE_BATCH_PADDING"]
    with loaded(config("openvino", X, Y, max_batch=4, parameters=parameters), tmp_path) as model:
        (row,) = run(model, work(1, floats([[1, 2, 3]])))
        assert_failed(row, "MODEL_FAILED", "and this one has 1: set parameter ENABLE_BATCH_PADDING")
        (row,) = run(model, work(2, floats([[1, 2, 3]] * 4)))
        assert row.error is None


@pytest.mark.parametrize("choice", ["", "NO"])
def test_a_batch_size_fixed_by_an_operator(tmp_path: Path, choice: str) -> None:
    """As in models of Triton's tests: the inputs could have any number of rows, but the output could not."""
    from openvino import opset13

    x = openvino_input("x", "FP32", (4, 3))
    shaped = opset13.reshape(opset13.multiply(x, np.float32(2)), np.array([4, 3]), special_zero=False)
    openvino_save(tmp_path, [x], [openvino_result("y", shaped)])
    parameters = {"ENABLE_BATCH_PADDING": choice} if choice else {}
    with loaded(config("openvino", X, Y, max_batch=4, parameters=parameters), tmp_path) as model:
        (row,) = run(model, work(1, floats([[1, 2, 3]] * 4)))
        assert value(row).tolist() == [[2, 4, 6]] * 4
        (row,) = run(model, work(2, floats([[1, 2, 3]] * 2)))
        if choice:
            text = "batches of 4 rows, and this one has 2: set parameter ENABLE_BATCH_PADDING"
            assert_failed(row, "MODEL_FAILED", text)
        else:
            assert value(row).tolist() == [[2, 4, 6]] * 2


def test_an_onnx_file_is_reshaped_to_the_configured_dims(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [1, 5]).output("y", "FP32", [-1, -1]).node("Neg", ["x"], ["y"])
    graph.save(tmp_path)
    parameters = {"RESHAPE_IO_LAYERS": "YES", "PERFORMANCE_HINT": "latency", "HINT_BF16": "YES"}
    given = config("openvino", X, Y, max_batch=2, parameters=parameters)
    with loaded(replace(given, default_model_filename="model.onnx"), tmp_path) as model:
        (row,) = run(model, work(1, floats([[1, 2, 3]] * 2)))
        assert value(row).tolist() == [[-1, -2, -3]] * 2


def fixed(folder: Path, batch: int, max_batch: int, **parameters: str) -> ModelConfig:
    double(folder, (batch, 3))
    return config("openvino", X, Y, max_batch=max_batch, parameters=parameters)


def strings(folder: Path) -> ModelConfig:
    from openvino import Type, opset13

    x = opset13.parameter([-1], Type.string)
    x.output(0).set_names({"x"})
    openvino_save(folder, [x], [openvino_result("y", opset13.shape_of(x))])
    return config("openvino", {"x": ("STRING", (-1,))}, {"y": ("INT64", (1,))})


def other(folder: Path, outputs: Any = Y) -> ModelConfig:
    double(folder, (-1, 3))
    return config("openvino", X, outputs, max_batch=4)


def nothing(folder: Path) -> ModelConfig:
    version_folder(folder)
    return config("openvino", X, Y)


def broken(folder: Path) -> ModelConfig:
    (version_folder(folder) / "model.xml").write_text("<net/>")
    return config("openvino", X, Y)


SKIP = {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"}


@cases(
    (nothing, NotFound, "version 1 of model 'm' has no file 'model.xml'"),
    (broken, ModelFailed, "read"),
    (strings, Unsupported, "tensor 'x' of the model is of type string, which is not supported"),
    (lambda folder: other(folder, {"y": ("FP16", (3,))}), InvalidRequest, "is FP16 in the .* and FP32 in the"),
    (lambda folder: fixed(folder, 2, 4, **SKIP), InvalidRequest, "max_batch_size is 4, and the first .* is 2"),
    (lambda folder: fixed(folder, 4, 2, **SKIP), InvalidRequest, "or, with parameter ENABLE_BATCH_PADDING"),
    (lambda folder: fixed(folder, 1, 4, TARGET_DEVICE="NPU"), Unsupported, "device NPU, .* it finds: CPU"),
    (lambda folder: fixed(folder, 1, 4, NUM_STREAMS="many"), InvalidRequest, "NUM_STREAMS of model 'm'"),
    (lambda folder: fixed(folder, 1, 4, PERFORMANCE_HINT="FAST"), InvalidRequest, "must be one of LATENCY, "),
    (lambda folder: fixed(folder, 1, 4, INFERENCE_NUM_THREADS="-1"), InvalidRequest, "INFERENCE_NUM_THREADS"),
    (lambda folder: on_gpu(other(folder), 1), Unsupported, "device GPU.1, which OpenVINO does not find"),
)
def test_unsupported_models_are_refused(make: Any, kind: type[ServeError], text: str, tmp_path: Path) -> None:
    assert_refused(make(tmp_path), tmp_path, kind, text, AS_GIVEN)


def test_an_invalid_setting_is_refused(tmp_path: Path) -> None:
    double(tmp_path, (-1, 3))
    settings = {"openvino,default-max-batch-size": "some"}
    text = "default-max-batch-size must be an integer"
    assert_refused(config("openvino", {}, {}), tmp_path, InvalidRequest, text, settings)
