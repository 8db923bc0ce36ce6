"""Models that do the same in every backend, for the conformance suite. Each is a folder of a model repository.

The rule: what a model computes is so simple that numpy says what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.messages import Options, Tensor
from shmserve.repo.schema import ModelConfig
from tests.worker_harness import config

NUMERIC = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
DTYPES = (*NUMERIC, "BF16", "BYTES")

PYTHON_ECHO = """\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        wish = json.loads(request.parameters())
        if "raise" in wish:
            raise ValueError(wish["raise"])
        if "error" in wish:
            return pb_utils.InferenceResponse([], pb_utils.TritonError(wish["error"]))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("y" + tensor.name()[1:], tensor.as_numpy()) for tensor in request.inputs()]
        )
"""

PYTHON_ADD = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "a").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "b")
            total = a + (100 if b is None else b.as_numpy())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("sum", total.astype("float32"))]))
        return responses
"""


class Kind(NamedTuple):
    """A backend in the suite. `dtypes` are those that its echo model has in one model."""

    name: str
    echo: Callable[[Path, Sequence[str], Sequence[int], int], ModelConfig]
    failing: Callable[[Path], ModelConfig]
    fail: Callable[[Tensor], tuple[list[Tensor], Options | None]]
    dtypes: tuple[tuple[str, ...], ...]


def _tensors(prefix: str, dtypes: Sequence[str], dims: Sequence[int]) -> dict[str, tuple[str, Sequence[int]]]:
    return {f"{prefix}{dtype}": (config_name(dtype), dims) for dtype in dtypes}


def config_name(dtype: str) -> str:
    return "STRING" if dtype == "BYTES" else dtype


def _echo_config(backend: str, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    return config(backend, _tensors("x", dtypes, dims), _tensors("y", dtypes, dims), max_batch=max_batch)


def version_folder(folder: Path) -> Path:
    path = folder / "1"
    path.mkdir(parents=True, exist_ok=True)
    return path


# ---------------------------------------------------------------------------------------------- identity


def identity_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    return _echo_config("identity", dtypes, dims, max_batch)


def identity_failing(folder: Path) -> ModelConfig:
    x = {"x": ("FP32", (-1,))}
    return config("identity", x, {"y": ("FP32", (-1,))}, max_batch=8, parameters={"triggers": "1"})


def _identity_fail(x: Tensor) -> tuple[list[Tensor], Options | None]:
    return [x], Options(parameters={"fail": "told to"})


# ---------------------------------------------------------------------------------------------- python


def python_model(folder: Path, source: str) -> None:
    (version_folder(folder) / "model.py").write_text(source)


def python_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    python_model(folder, PYTHON_ECHO)
    return _echo_config("python", dtypes, dims, max_batch)


def python_failing(folder: Path) -> ModelConfig:
    python_model(folder, PYTHON_ECHO)
    return config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=8)


def _python_fail(x: Tensor) -> tuple[list[Tensor], Options | None]:
    return [x], Options(parameters={"raise": "told to"})


# ---------------------------------------------------------------------------------------------- onnx


class Graph:
    """Collects what an ONNX model is made of. Dims: -1 is dynamic."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.weights: list[Any] = []

    def input(self, name: str, dtype: str, dims: Sequence[int]) -> Graph:
        self.inputs.append(_value_info(name, dtype, dims))
        return self

    def output(self, name: str, dtype: str, dims: Sequence[int]) -> Graph:
        self.outputs.append(_value_info(name, dtype, dims))
        return self

    def weight(self, name: str, array: Any) -> Graph:
        from onnx import numpy_helper

        self.weights.append(numpy_helper.from_array(array, name))
        return self

    def node(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Graph:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, outputs, **attributes))
        return self

    def save(self, folder: Path) -> Path:
        import onnx
        from onnx import helper

        graph = helper.make_graph(self.nodes, "graph", self.inputs, self.outputs, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 9
        onnx.checker.check_model(model)
        path = version_folder(folder) / "model.onnx"
        onnx.save(model, str(path))
        return path


def _value_info(name: str, dtype: str, dims: Sequence[int]) -> Any:
    from onnx import TensorProto, helper

    names = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16", "BYTES": "STRING"}
    number = getattr(TensorProto, names.get(dtype, dtype))
    shape = [f"{name}_{index}" if dim == -1 else dim for index, dim in enumerate(dims)]
    return helper.make_tensor_value_info(name, number, shape)


def onnx_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    graph = Graph()
    full = [-1, *dims] if max_batch else list(dims)
    for dtype in dtypes:
        graph.input(f"x{dtype}", dtype, full).output(f"y{dtype}", dtype, full)
        graph.node("Identity", [f"x{dtype}"], [f"y{dtype}"])
    graph.save(folder)
    return _echo_config("onnxruntime", dtypes, dims, max_batch)


def onnx_failing(folder: Path) -> ModelConfig:
    """y = x; but it first looks up place x[0, 0] of four, which fails where there is none."""
    import numpy as np

    graph = Graph().input("x", "FP32", [-1, -1]).output("y", "FP32", [-1, -1]).output("looked", "FP32", [-1, -1])
    graph.weight("table", np.zeros(4, np.float32))
    graph.node("Identity", ["x"], ["y"]).node("Cast", ["x"], ["place"], to=7)
    graph.node("Gather", ["table", "place"], ["looked"])
    graph.save(folder)
    x, y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,)), "looked": ("FP32", (-1,))}
    return config("onnxruntime", x, y, max_batch=8)


def _onnx_fail(x: Tensor) -> tuple[list[Tensor], Options | None]:
    import numpy as np

    values = np.full(x.shape, 77, np.float32)
    return [Tensor(x.name, x.dtype, x.shape, values.tobytes())], None


KINDS = (
    Kind("identity", identity_echo, identity_failing, _identity_fail, (DTYPES,)),
    Kind("python", python_echo, python_failing, _python_fail, (DTYPES,)),
    Kind("onnxruntime", onnx_echo, onnx_failing, _onnx_fail, ((*NUMERIC, "BYTES"), ("BF16", "FP32"))),
)
