"""CUDA graphs: runs that the engine has recorded.

Invariant: a recorded run uses the addresses from its recording, so each shape has its own tensors on the device, which
never move; inputs are copied into them. After the first MAX_SHAPES shapes, further ones run without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from shmserve.errors import Unsupported
from shmserve.workers.backends.onnx.run import bound_run_of, contiguous
from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
GRAPH = "gpu_graph_id"
MAX_SHAPES = 16
"""Bounded because each recorded graph keeps its tensors in device memory."""


class Recorded:
    """One set of shapes: its tensors, and the engine's id of its graph."""

    def __init__(
        self, session: Any, device: tuple[str, int], number: int, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """`inputs` and `outputs` are pairs of spec and shape."""
        self._binding = session.io_binding()
        self._run = bound_run_of(session, self._binding)
        self._inputs = [_tensor(spec, shape, device) for spec, shape in inputs]
        self._outputs = [_tensor(spec, shape, device) for spec, shape in outputs]
        self._specs = [spec for spec, _ in outputs]
        for (spec, _), value in zip(inputs, self._inputs, strict=True):
            self._binding.bind_ortvalue_input(spec.name, value)
        for spec, value in zip(self._specs, self._outputs, strict=True):
            self._binding.bind_ortvalue_output(spec.name, value)
        self._options = ort.RunOptions()
        self._options.add_run_config_entry(GRAPH, str(number))

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        for value, array in zip(self._inputs, arrays, strict=True):
            value.update_inplace(contiguous(array))
        self._run(self._options)
        return [value.numpy() for value in self._outputs]  # from the device, so each is a copy


class OnnxGraphs:
    """The recorded shapes of a session."""

    def __init__(
        self, model: str, session: Any, device: tuple[str, int], inputs: Sequence[Spec], outputs: Sequence[Spec]
    ) -> None:
        """`device` is the engine's name for the device and its number."""
        for what, specs in (("input", inputs), ("output", outputs)):
            for spec in specs:
                if not spec.item or spec.dtype == "BF16":
                    raise Unsupported(f"{_cannot(model)}: {what} '{spec.name}' is {spec.dtype}")
                if what == "output" and not spec.fixed:
                    raise Unsupported(
                        f"{_cannot(model)}: the size of output '{spec.name}' {list(spec.dims)} is not known before it "
                        "is computed; give its dims, or turn enable_cuda_graph off"
                    )
        self._session = session
        self._device = device
        self._input_specs = tuple(inputs)
        self._output_specs = tuple(outputs)
        self._recorded: dict[Any, Recorded] = {}

    def of(self, arrays: Sequence[Array | None], rows: int) -> Recorded | None:
        """Returns the recorded run for these shapes; None if there are too many shapes or an input is absent."""
        key = tuple(None if array is None else array.shape for array in arrays)
        recorded = self._recorded.get(key)
        if recorded is not None or None in key or len(self._recorded) >= MAX_SHAPES:
            return recorded
        if any(0 in shape for shape in key if shape is not None):
            return None
        inputs = list(zip(self._input_specs, key, strict=True))
        outputs = [(spec, (rows, *spec.shape) if spec.batched else spec.shape) for spec in self._output_specs]
        # Ids start at 1: -1 records nothing, and 0 is the engine's default.
        number = len(self._recorded) + 1
        self._recorded[key] = recorded = Recorded(self._session, self._device, number, inputs, outputs)
        return recorded


def _tensor(spec: Spec, shape: tuple[int, ...], device: tuple[str, int]) -> Any:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, spec.numpy.type, *device)


def _cannot(model: str) -> str:
    return f"unable to load model '{model}': runs cannot be recorded as CUDA graphs"
