"""Models of the measures: CuPy in Python models, which read and write on the GPU by DLPack, PyTorch, and chains."""

from __future__ import annotations

from pathlib import Path

from bench.lib import models
from bench.lib.child import Child
from bench.lib.models import Model

ON_DEVICE = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}

HEAD = """\
import cupy
import numpy as np
import triton_python_backend_utils as pb_utils


def array_of(request):
    x = pb_utils.get_input_tensor_by_name(request, "x")
    return cupy.asarray(x.as_numpy()) if x.is_cpu() else cupy.from_dlpack(x)


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.one(array_of(request))]) for request in requests]
"""
ADD = (
    HEAD
    + """
    def one(self, x):
        return pb_utils.Tensor.from_dlpack("y", x + 1)
"""
)
LAST = (
    HEAD
    + """
    def one(self, x):
        return pb_utils.Tensor("y", cupy.asnumpy(x[-1:]))
"""
)
MAKE = (
    HEAD
    + """
    def initialize(self, args):
        self.arrays = {}

    def one(self, x):
        size = int(cupy.asnumpy(x)[0])
        if size not in self.arrays:
            self.arrays[size] = cupy.full(size, 7, "float32")
        return pb_utils.Tensor.from_dlpack("y", self.arrays[size])
"""
)


def cupy_model(root: Path, name: str, source: str, dims: list[int], out: list[int], kind: str) -> None:
    model = Model("python", {"x": ("FP32", dims)}, {"y": ("FP32", out)}, kind=kind, parameters=dict(ON_DEVICE))
    models.write(root, name, model, {"model.py": source})


def torch_model(root: Path, name: str, file: Path, model: Model) -> None:
    models.write(root, name, model, {"model.pt": file})


def torch_file(path: Path, what: str, **arguments: object) -> Path:
    """`what`: a function of bench.gpu.resnet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Child(f"bench.gpu.resnet:{what}", path=str(path), **arguments) as child:
        child.ready()
    return path


def chain(
    root: Path, name: str, steps: list[str], dims: list[int], out: list[int], names: tuple[str, str] = ("x", "y")
) -> None:
    """An ensemble with the input x and the output y. `names`: those of the steps' tensors."""
    tensors = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
    parts = [
        f'step [ {{ model_name: "{step}" model_version: -1 input_map {{ key: "{names[0]}" value: "{source}" }} '
        f'output_map {{ key: "{names[1]}" value: "{target}" }} }} ]'
        for step, source, target in zip(steps, tensors, tensors[1:], strict=False)
    ]
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(
        f'name: "{name}" platform: "ensemble"\ninput [ {{ name: "x" data_type: TYPE_FP32 dims: {dims} }} ]\n'
        f'output [ {{ name: "y" data_type: TYPE_FP32 dims: {out} }} ]\nensemble_scheduling {{ {" ".join(parts)} }}\n'
    )
