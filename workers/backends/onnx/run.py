"""Bound runs of an ONNX Runtime session, on memory that the engine does not own.

Invariant: the engine reads inputs in place and writes outputs to where they will be read. A value that the engine
allocates lives as long as the array that refers to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from shmserve.dtypes import elements
from shmserve.repo.onnx.protobuf import strings
from shmserve.shm.views import address_of
from shmserve.workers.backends.base import GpuTensor
from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]

GPU = "cuda"
"""The engine's name for the GPU of this process, which is its first one."""
NOWHERE = (-1, ())
"""The place of tensors on a GPU. No host array has this place, so a change of location always binds again."""
_BFLOAT16 = 16
"""The number of the ONNX type: the engine does not support any numpy type for bfloat16."""


def element_of(spec: Spec) -> Any:
    return _BFLOAT16 if spec.dtype == "BF16" else spec.numpy.type


def contiguous(array: Array) -> Array:
    """Returns the array, copied only if it is not contiguous. np.ascontiguousarray would add a dimension to a
    scalar."""
    return array if array.flags.c_contiguous else array.copy()


def runner_of(session: Any) -> Any:
    """Returns the object with `run`. The engine's Python layer checks names on each run, which takes longer than a
    small model and was done at load; its inner session takes the same arguments."""
    return getattr(session, "_sess", session)


def bound_run_of(session: Any, binding: Any) -> Callable[[Any], None]:
    """Returns the function that runs a binding of the session with the given run options."""
    inner = runner_of(session)
    if inner is session:
        return partial(session.run_with_iobinding, binding)
    return partial(inner.run_with_iobinding, getattr(binding, "_iobinding", binding))


class OutputTarget(NamedTuple):
    """An output of a bound run. `array` None: its shape is unknown, or it cannot be written to where it is read."""

    spec: Spec
    array: Array | GpuTensor | None


class Binding:
    """The binding of a session. Tensors at the same place as in the last run are not bound again."""

    def __init__(self, session: Any, keeps: bool, once: bool = False) -> None:
        """`keeps`: inputs are bound by address; otherwise binding copies them to a device each time. `once`: this
        binding is for one run and keeps the values that the engine allocates."""
        self._once = once
        self._bound = session.io_binding()
        self._run = bound_run_of(session, self._bound)
        self._keeps = keeps
        self._inputs: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._outputs: dict[str, tuple[int, tuple[int, ...]] | None] = {}

    def run(
        self, inputs: Sequence[tuple[Spec, Array | GpuTensor]], targets: Sequence[OutputTarget], options: Any
    ) -> list[Array]:
        """Returns the outputs of the targets without an array, in order."""
        try:
            held = self._bind_inputs(inputs)
            self._bind_outputs(targets)
            self._run(options)
            if all(target.array is not None for target in targets):
                return []
            values = self._bound.get_outputs()
            outputs = [
                view_of(value, t.spec, self._bound) for value, t in zip(values, targets, strict=True) if t.array is None
            ]
            if not self._once:
                self._renew(targets)
        except BaseException:
            self._forget()
            raise
        del held  # memory bound by address must stay valid until the run is over
        return outputs

    def _bind_inputs(self, inputs: Sequence[tuple[Spec, Array | GpuTensor]]) -> list[Any]:
        known = self._inputs
        if len(inputs) != len(known) or any(spec.name not in known for spec, _ in inputs):
            self._bound.clear_binding_inputs()
            known.clear()
        held: list[Any] = []
        for spec, value in inputs:
            if isinstance(value, GpuTensor):
                self._bound.bind_input(spec.name, GPU, 0, element_of(spec), value.shape, value.address)
                known[spec.name] = NOWHERE
                continue
            if not spec.item:
                held.append(strings_value(value))
                self._bound.bind_ortvalue_input(spec.name, held[-1])
                known[spec.name] = (0, value.shape)
                continue
            array = contiguous(value)
            held.append(array)
            place = (address_of(array), array.shape)
            if not self._keeps or known.get(spec.name) != place:
                self._bound.bind_input(spec.name, "cpu", 0, element_of(spec), array.shape, place[0])
                known[spec.name] = place
        return held

    def _bind_outputs(self, targets: Sequence[OutputTarget]) -> None:
        known = self._outputs
        if [target.spec.name for target in targets] != list(known):
            self._bound.clear_binding_outputs()
            known.clear()
        for spec, array in targets:
            if isinstance(array, GpuTensor):
                self._bound.bind_output(spec.name, GPU, 0, element_of(spec), array.shape, array.address)
                known[spec.name] = NOWHERE
                continue
            place = None if array is None else (address_of(array), array.shape)
            if spec.name in known and known[spec.name] == place:
                continue
            if array is None:
                self._bound.bind_output(spec.name, "cpu")
            else:
                self._bound.bind_output(spec.name, "cpu", 0, element_of(spec), array.shape, address_of(array))
            known[spec.name] = place

    def _renew(self, targets: Sequence[OutputTarget]) -> None:
        """Binds allocated outputs again, so that the next run does not overwrite the returned values."""
        for spec, array in targets:
            if array is None:
                self._bound.bind_output(spec.name, "cpu")

    def _forget(self) -> None:
        self._bound.clear_binding_inputs()
        self._bound.clear_binding_outputs()
        self._inputs.clear()
        self._outputs.clear()


def needs_own_binding(targets: Sequence[OutputTarget]) -> bool:
    """Whether an output needs a separate binding: only its binding can keep the engine's BF16 value alive."""
    return any(array is None and spec.dtype == "BF16" for spec, array in targets)


def view_of(value: Any, spec: Spec, owner: Any) -> Array:
    """Returns a value of the engine as an array. `owner`: the object that keeps it alive if the array cannot."""
    if spec.dtype != "BF16":
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    raw = (ctypes.c_uint8 * (elements(shape) * spec.item)).from_address(value.data_ptr())
    raw.kept = (owner, value)  # type: ignore[attr-defined]
    return np.ndarray(shape, spec.numpy, memoryview(raw))


def strings_value(array: Array) -> Any:
    """Returns a value of the engine with these strings, which must be str.

    A binding does not accept strings from an array, only values that the engine created. So a model that consists of
    one constant with these strings is run.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    session = ort.InferenceSession(strings(array, "strings"), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    bound.bind_output("strings", "cpu")
    session.run_with_iobinding(bound)
    return bound.get_outputs()[0]
