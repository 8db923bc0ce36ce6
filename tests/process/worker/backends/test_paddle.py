"""PaddlePaddle models: both formats, names, and inputs and outputs from the model. Expected values come from numpy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.repo.config.schema import (
    ModelConfig,
    ModelOptimizationPolicy,
    ModelOptimizationPolicyExecutionAccelerators,
    ModelOptimizationPolicyExecutionAcceleratorsAccelerator,
    ModelParameter,
)
from shmserve.system.procfs import anonymous_bytes
from tests.support.cases import cases
from tests.support.workers.in_process import load_failure
from tests.support.workers.models import paddle_models
from tests.support.workers.models.worker_models import on_gpu
from tests.support.workers.worker_harness import WorkerProcess, config, work

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed: make test-engines", allow_module_level=True)
import paddle

pytestmark = pytest.mark.process
LAYERS = 12
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
X = np.arange(8, dtype=np.float32).reshape(2, 4)
COUNTS = np.array([[3], [5]], np.int64)


def linear() -> tuple[list[Any], list[Any]]:
    """x @ WEIGHTS, and the counts doubled."""
    x, counts = paddle_models.data("x", [-1, 4]), paddle_models.data("counts", [-1, 1], "INT64")
    weights = paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(WEIGHTS))
    product = paddle.static.nn.fc(x, 3, weight_attr=weights, bias_attr=False)
    return [x, counts], [product, paddle.scale(counts, 2)]


def bare(file: str) -> ModelConfig:
    return replace(config("paddle", {}, {}), default_model_filename=file)


def run(given: ModelConfig, folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Loads the model in a worker, and runs it for two requests in one batch."""
    with WorkerProcess(given, folder) as worker:
        found = worker.loaded()
        x_name, counts_name = (entry.name for entry in found.input)
        rows = worker.run(
            *[
                work(number, worker.tensor(x_name, X + number), worker.tensor(counts_name, COUNTS + number))
                for number in range(2)
            ]
        )
        outputs = []
        for row in rows:
            assert row.error is None, row.error
            dtypes = {"FP32": np.float32, "INT64": np.int64}
            outputs.append({tensor.name: worker.array(tensor, dtypes[tensor.dtype]) for tensor in row.outputs})
    return found, {name: [output[name] for output in outputs] for name in outputs[0]}


def check(product: Any, doubled: Any) -> None:
    for number in range(2):
        assert np.allclose(product[number], (X + number) @ WEIGHTS, atol=1e-5)
        assert np.array_equal(doubled[number], 2 * (COUNTS + number))


@pytest.mark.parametrize("older", [False, True], ids=["json", "pdmodel"])
def test_inputs_and_outputs_are_read_from_the_model(older: bool, tmp_path: Path) -> None:
    paddle_models.save(tmp_path, linear, older)
    file = "model.pdmodel" if older else "model.json"
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == sorted([file, "model.pdiparams"])
    found, outputs = run(bare(file), tmp_path)
    assert [(entry.name, entry.data_type, tuple(entry.dims)) for entry in found.input] == [
        ("x", "TYPE_FP32", (4,)),
        ("counts", "TYPE_INT64", (1,)),
    ]
    assert [(entry.data_type, tuple(entry.dims)) for entry in found.output] == [
        ("TYPE_FP32", (3,)),
        ("TYPE_INT64", (1,)),
    ]
    assert found.max_batch_size == 4
    assert found.dynamic_batching is not None
    check(*[outputs[entry.name] for entry in found.output])


@cases(
    (("x", "counts"), ("OUTPUT__0", "OUTPUT__1"), 1),
    (("INPUT__0", "INPUT__1"), ("scores", "doubled"), 1),
    (("x", "counts"), ("fetch_name_0", "fetch_name_1"), -1),
    ids=["by position", "in order", "by name"],
)
def test_configured_names_match_the_model(
    inputs: tuple[str, str], outputs: tuple[str, str], order: int, tmp_path: Path
) -> None:
    """Version 3 names all outputs fetch_name_N."""
    paddle_models.save(tmp_path, linear)
    given = config(
        "paddle",
        {inputs[0]: ("FP32", (4,)), inputs[1]: ("INT64", (1,))},
        dict([(outputs[0], ("FP32", (3,))), (outputs[1], ("INT64", (1,)))][::order]),
        max_batch=8,
        parameters={"cpu_threads": "1", "enable_mkldnn": "false"},
    )
    _, found = run(replace(given, default_model_filename="model.json"), tmp_path)
    check(found[outputs[0]], found[outputs[1]])


def accelerated(name: str, **parameters: str) -> ModelOptimizationPolicy:
    entry = ModelOptimizationPolicyExecutionAcceleratorsAccelerator(name=name, parameters=parameters)
    accelerators = ModelOptimizationPolicyExecutionAccelerators(cpu_execution_accelerator=(entry,))
    return ModelOptimizationPolicy(execution_accelerators=accelerators)


def test_bfloat16_is_less_precise(tmp_path: Path) -> None:
    paddle_models.save(tmp_path, linear)
    parameters = {"enable_mkldnn_bfloat16": ModelParameter(string_value="true")}
    (_, exact), (_, ours), (_, tritons) = (
        run(replace(bare("model.json"), **setting), tmp_path)
        for setting in ({}, {"parameters": parameters}, {"optimization": accelerated("mkldnn", use_fp16="1")})
    )
    for name, values in exact.items():
        np.testing.assert_allclose(ours[name], values, rtol=0.02, atol=0.02)
        np.testing.assert_array_equal(ours[name], tritons[name])
    assert any(not np.array_equal(ours[name], exact[name]) for name in exact)


def test_memory_of_intermediate_tensors(tmp_path: Path) -> None:
    def convolutions() -> tuple[list[Any], list[Any]]:
        x = y = paddle_models.data("x", [-1, 3, 64, 64])
        for layer in range(LAYERS):
            y = paddle.nn.functional.relu(paddle.nn.Conv2D(64 if layer else 3, 64, 3, padding=1)(y))
        return [x], [paddle.mean(y, axis=[2, 3])]

    paddle_models.save(tmp_path, convolutions, older=True)
    used = {}
    for optimized, cleared in (("false", "false"), ("true", "false"), ("false", "true")):
        flags = {"enable_memory_optim": optimized, "clear_intermediate_tensors": cleared, "enable_mkldnn": "false"}
        parameters = {key: ModelParameter(string_value=value) for key, value in flags.items()}
        given = replace(bare("model.pdmodel"), parameters=parameters, max_batch_size=8)
        with WorkerProcess(given, tmp_path) as worker:
            worker.loaded()
            (row,) = worker.run(work(0, worker.tensor("x", np.ones((8, 3, 64, 64), np.float32))))
            assert row.error is None, row.error
            used[optimized, cleared] = anonymous_bytes(worker.process.pid)[0]
    layer = 8 * 64 * 64 * 64 * 4
    for settings in (("true", "false"), ("false", "true")):
        assert used["false", "false"] - used[settings] > LAYERS // 2 * layer, used


def test_accelerators_and_their_parameters_are_validated(tmp_path: Path) -> None:
    paddle_models.save(tmp_path, linear)
    given = bare("model.json")
    good = replace(given, optimization=accelerated("mkldnn", cpu_threads="1", capacity="4", use_int8="true"))
    found, outputs = run(good, tmp_path)
    check(*[outputs[entry.name] for entry in found.output])
    for name, parameters, text in (
        ("cuda", {}, "unknown cpu_execution_accelerator name 'cuda'"),
        ("ort", {}, "'ort' is not supported"),
        ("mkldnn", {"speed": "1"}, "has no parameter 'speed'"),
        ("mkldnn", {"cpu_threads": "many"}, 'parameters["cpu_threads"]: the value must be an integer'),
    ):
        bad = replace(given, optimization=accelerated(name, **parameters))
        assert text in load_failure(bad, tmp_path).text


def test_mismatched_configurations_are_refused(tmp_path: Path) -> None:
    paddle_models.save(tmp_path, linear)
    x, counts = ("FP32", (4,)), ("INT64", (1,))
    outputs = {"fetch_name_0": ("FP32", (3,)), "fetch_name_1": ("INT64", (1,))}
    good = replace(
        config("paddle", {"x": x, "counts": counts}, outputs, max_batch=8), default_model_filename="model.json"
    )
    wider = replace(good, input=(replace(good.input[0], dims=(5,)), good.input[1]))
    assert "input 'x' has shape [-1, 5] in the configuration" in load_failure(wider, tmp_path).text
    other = replace(good, output=(replace(good.output[0], data_type="TYPE_FP64"), good.output[1]))
    assert "output 'fetch_name_0' is FP64 in the configuration and FP32" in load_failure(other, tmp_path).text
    few = replace(good, input=good.input[:1])
    assert "it also has the input 'counts'" in load_failure(few, tmp_path).text
    optional = replace(good, input=(good.input[0], replace(good.input[1], optional=True)))
    assert "input 'counts' is optional" in load_failure(optional, tmp_path).text
    assert "set kind: KIND_CPU" in load_failure(on_gpu(good), tmp_path).text


UNNAMED = b'{"program": {"regions": [{"blocks": [{"ops": [{"#": "1.data", "A": []}]}]}]}}'


@pytest.mark.parametrize(
    ("file", "content"), [("model.json", b'{"a": 1}'), ("model.json", UNNAMED), ("model.pdmodel", b'{"a": 1}')]
)
def test_an_invalid_model_file_is_refused(file: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / file).write_bytes(content)
    failure = load_failure(bare(file), tmp_path)
    assert failure.code == "INVALID_ARG"
    assert f"'{file}' is not a model of PaddlePaddle" in failure.text
