"""Models with the same behaviour in every backend, for the conformance suite. Each is a folder of a model repository.

The models compute simple functions, for which numpy is the oracle.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import tests
from shmserve.protocol.messages import Options, Tensor
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from tests.support.workers.models import dali_models, paddle_models, tensorflow_models, tflite_models
from tests.support.workers.worker_harness import config, echo_config

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
    """A backend in the suite. `dtypes`: the data types in one echo model."""

    name: str
    echo: Callable[[Path, Sequence[str], Sequence[int], int], ModelConfig]
    failing: Callable[[Path], ModelConfig] | None
    """None: its models cannot fail on an input."""
    fail: Callable[[Tensor], tuple[list[Tensor], Options | None]] | None
    dtypes: tuple[tuple[str, ...], ...]
    library: str = ""
    """The package that its tests need; without it they are skipped."""
    packages: str = ""
    """A directory with fakes of its packages."""
    isolates: bool = False
    """Whether an error of the engine fails only the request that caused it, not the whole batch."""
    width: int = 0
    """The only width of the batched echo model, if it has one; 0: any."""


def needs(kind: Kind) -> None:
    """Skips the test if the library of the backend is not installed."""
    folder, _, module = kind.library.rpartition(".")
    if folder and importlib.util.find_spec(folder) is None:
        pytest.skip(f"{folder} is not installed")
    if module and importlib.util.find_spec(kind.library) is None:
        pytest.skip(f"{kind.library} is not installed")


def version_folder(folder: Path) -> Path:
    path = folder / "1"
    path.mkdir(parents=True, exist_ok=True)
    return path


def on_gpu(given: ModelConfig, number: int = 0) -> ModelConfig:
    return replace(given, instance_group=(ModelInstanceGroup(name="m_0", kind="KIND_GPU", count=1, gpus=(number,)),))


def identity_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    return echo_config("identity", dtypes, dims, max_batch)


def identity_failing(folder: Path) -> ModelConfig:
    x = {"x": ("FP32", (-1,))}
    return config("identity", x, {"y": ("FP32", (-1,))}, max_batch=8, parameters={"triggers": "1"})


def _told_to_fail(x: Tensor) -> tuple[list[Tensor], Options | None]:
    return [x], Options(parameters={"fail": "told to", "raise": "told to"})


def python_model(folder: Path, source: str) -> None:
    (version_folder(folder) / "model.py").write_text(source)


def python_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    python_model(folder, PYTHON_ECHO)
    return echo_config("python", dtypes, dims, max_batch)


def python_failing(folder: Path) -> ModelConfig:
    python_model(folder, PYTHON_ECHO)
    return config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=8)


class Graph:
    """Collects the parts of an ONNX model. Dims: -1 is dynamic."""

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
    return echo_config("onnxruntime", dtypes, dims, max_batch)


def onnx_failing(folder: Path) -> ModelConfig:
    """y = x, after a lookup of element x[0, 0] of four, which fails if it does not exist."""
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


sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
"""Without this, the import of the engine sends telemetry."""


def openvino_save(folder: Path, parameters: Sequence[Any], results: Sequence[Any]) -> Path:
    import openvino

    path = version_folder(folder) / "model.xml"
    openvino.save_model(openvino.Model(list(results), list(parameters), "model"), path, compress_to_fp16=False)
    return path


def openvino_input(name: str, dtype: str, dims: Sequence[int]) -> Any:
    from openvino import Type, opset13

    names = {"BOOL": "boolean", "FP16": "f16", "FP32": "f32", "FP64": "f64", "BF16": "bf16"}
    kind = getattr(Type, names.get(dtype, dtype.lower().replace("uint", "u").replace("int", "i")))
    found = opset13.parameter(list(dims), kind)
    found.output(0).set_names({name})
    return found


def openvino_result(name: str, node: Any) -> Any:
    from openvino import opset13

    found = opset13.result(node)
    found.output(0).set_names({name})
    return found


def openvino_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    from openvino import opset13

    full = [-1, *dims] if max_batch else list(dims)
    inputs = [openvino_input(f"x{dtype}", dtype, full) for dtype in dtypes]
    results = [
        openvino_result(f"y{dtype}", opset13.reshape(node, opset13.shape_of(node), False))
        for dtype, node in zip(dtypes, inputs, strict=True)
    ]
    openvino_save(folder, inputs, results)
    return echo_config("openvino", dtypes, dims, max_batch)


def openvino_failing(folder: Path) -> ModelConfig:
    """y = x, through a reshape with as many rows as the largest value, which fails if that is not a divisor."""
    import numpy as np
    from openvino import opset13

    x = openvino_input("x", "FP32", [-1, -1])
    most = opset13.convert(opset13.reduce_max(x, np.array([0, 1]), True), "i64")
    shape = opset13.concat([opset13.reshape(most, np.array([1]), False), np.array([-1])], 0)
    there_and_back = opset13.reshape(opset13.reshape(x, shape, False), opset13.shape_of(x), False)
    openvino_save(folder, [x], [openvino_result("y", there_and_back)])
    return config("openvino", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=8)


def torch_script(folder: Path, source: str) -> Path:
    """Saves the class Model in the source text as TorchScript."""
    import torch

    path = version_folder(folder) / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript warns that it is deprecated
        torch.jit.script(torch_class(folder, source)().eval()).save(str(path))
    return path


def torch_class(folder: Path, source: str) -> Any:
    """A class from a source text, which must be in a file because model compilers read it."""
    script = folder / "torch_model.py"
    script.write_text(f"from typing import *\n\nimport torch\nfrom torch import Tensor\n\n\n{source}")
    spec = importlib.util.spec_from_file_location(f"torch_model_{next(_NUMBERS)}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model


_NUMBERS = itertools.count()


def torch_forward(folder: Path, arguments: str, *lines: str) -> Path:
    body = "".join(f"        {line}\n" for line in lines)
    return torch_script(folder, f"class Model(torch.nn.Module):\n    def forward(self, {arguments}):\n{body}")


def torch_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    arguments = [f"x{dtype}: {'List[str]' if dtype == 'BYTES' else 'Tensor'}" for dtype in dtypes]
    torch_forward(folder, ", ".join(arguments), f"return {', '.join(f'x{dtype}' for dtype in dtypes)},")
    return echo_config("pytorch", dtypes, dims, max_batch)


def torch_failing(folder: Path) -> ModelConfig:
    torch_forward(folder, "x", "if bool((x == 77).any()):", "    raise ValueError('told to')", "return x")
    return config("pytorch", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=8)


MOST = 1 << 20
"""Maximum of a variable dim in the profile of a plan."""


def _plan(folder: Path, dtypes: Sequence[str], dims: Sequence[int], op: str) -> None:
    from tests.support.workers.gpu.harness import plan, tensor

    names = {"FP32": "FLOAT", "FP16": "HALF"}
    tensors, profile = [], {}
    for dtype in dtypes:
        for mode, prefix in (("input", "x"), ("output", "y")):
            tensors.append(tensor(mode, f"{prefix}{dtype}", dims, names.get(dtype, dtype)))
        profile[f"x{dtype}"] = [[most if dim == -1 else dim for dim in dims] for most in (0, 1, MOST)]
    plan(folder, tensors, {f"y{dtype}": [op, f"x{dtype}"] for dtype in dtypes}, profile)


def tensorrt_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    _plan(folder, dtypes, [-1, *dims] if max_batch else dims, "copy")
    return on_gpu(echo_config("tensorrt", dtypes, dims, max_batch))


def tensorrt_failing(folder: Path) -> ModelConfig:
    from tests.support.workers.gpu.harness import plan, tensor

    tensors = [tensor("input", "x", [-1, -1]), tensor("output", "y", [-1, -1])]
    plan(folder, tensors, {"y": ["refuse 77", "x"]}, {"x": [[1, 1], [1, 1], [8, 8]]})
    return on_gpu(config("tensorrt", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=8))


TREE_VALUES = 100
"""The tree echo model returns integers from 0 to this, exclusive: it has a leaf for each."""


def tree_model(features: int) -> Any:
    """A model that outputs its features, with one tree per feature."""
    from treelite.model_builder import Metadata, ModelBuilder, PostProcessorFunc, TreeAnnotation

    builder = ModelBuilder(
        threshold_type="float32",
        leaf_output_type="float32",
        metadata=Metadata(features, "kRegressor", False, features, [1] * features, (1, 1)),
        tree_annotation=TreeAnnotation(features, list(range(features)), [0] * features),
        postprocessor=PostProcessorFunc("identity"),
        base_scores=[0.0] * features,
    )
    for feature in range(features):
        builder.start_tree()
        keys = itertools.count(1)
        todo = [(0, 0, TREE_VALUES)]
        while todo:
            key, low, high = todo.pop()
            builder.start_node(key)
            if high - low == 1:
                builder.leaf(float(low))
            else:
                middle, left, right = (low + high) // 2, next(keys), next(keys)
                builder.numerical_test(
                    feature, middle, default_left=True, opname="<", left_child_key=left, right_child_key=right
                )
                todo += [(left, low, middle), (right, middle, high)]
            builder.end_node()
        builder.end_tree()
    return builder.commit()


def trees_echo(folder: Path, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    """The width is TREES_WIDTH, unless the last dim differs."""
    features = TREES_WIDTH if dims[-1] == -1 else dims[-1]
    tree_model(features).serialize(version_folder(folder) / "checkpoint.tl")
    found = echo_config("fil", dtypes, (*dims[:-1], features), max_batch)
    return replace(found, default_model_filename="checkpoint.tl")


TREES_WIDTH = 4
STANDIN_DTYPES = ("BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "FP32", "BF16")
STANDINS = str(tests.STANDINS)
TENSORRT = Kind("tensorrt", tensorrt_echo, tensorrt_failing, _onnx_fail, (STANDIN_DTYPES,), "", STANDINS)
"""Uses the fakes of TensorRT and a GPU, which a worker only loads if its environment names them."""
KINDS = (
    Kind("identity", identity_echo, identity_failing, _told_to_fail, (DTYPES,)),
    Kind("python", python_echo, python_failing, _told_to_fail, (DTYPES,)),
    Kind("onnxruntime", onnx_echo, onnx_failing, _onnx_fail, ((*NUMERIC, "BYTES"), ("FP32", "BF16", "BYTES"))),
    Kind("openvino", openvino_echo, openvino_failing, _onnx_fail, ((*NUMERIC, "BF16"),), "openvino"),
    Kind("pytorch", torch_echo, torch_failing, _onnx_fail, (DTYPES,), "torch"),
    Kind("dali", dali_models.echo, dali_models.failing, _onnx_fail, (NUMERIC,), "nvidia.dali", isolates=True),
    Kind("tflite", tflite_models.echo, tflite_models.failing, _onnx_fail, (tflite_models.DTYPES,), "ai_edge_litert"),
    Kind("tensorflow", tensorflow_models.echo, tensorflow_models.failing, _onnx_fail, (DTYPES,), "tensorflow"),
    Kind("paddle", paddle_models.echo, paddle_models.failing, _onnx_fail, (paddle_models.DTYPES,), "paddle"),
    Kind("fil", trees_echo, None, None, (("FP32",), ("FP64",)), "treelite", width=TREES_WIDTH),
)
