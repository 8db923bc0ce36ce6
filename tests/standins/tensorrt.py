"""A fake of TensorRT without a device: plans are JSON, numpy computes, and invalid calls fail as in TensorRT.

Invariant: work is computed only when its stream is synchronized, with the addresses and shapes that applied when it was
enqueued.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
from collections.abc import Sequence
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np

runtime: Any = importlib.import_module("cupy.cuda.runtime")
__version__ = os.environ.get("STANDIN_TENSORRT", "11.4.0.106")
_OLD = __version__.startswith("10.")

DataType = Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4")
TensorIOMode = Enum("TensorIOMode", "NONE INPUT OUTPUT")
TensorLocation = Enum("TensorLocation", "DEVICE HOST")
TensorFormat = Enum("TensorFormat", "LINEAR CHW4")
ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
MemoryPoolType = Enum("MemoryPoolType", "WORKSPACE")
HardwareCompatibilityLevel = Enum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
BuilderFlag: Any = Enum("BuilderFlag", ["VERSION_COMPATIBLE", "TF32", *(["FP16", "BF16"] if _OLD else [])])  # type: ignore[misc]
_NUMPY: dict[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64,
    "BOOL": np.bool_, "UINT8": np.uint8,
}  # fmt: skip
_FROM_ONNX = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 11: "DOUBLE"}
calls: list[tuple[Any, ...]] = []


class NetworkDefinitionCreationFlag(IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class ILogger:
    class Severity(Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self) -> None:
        self.made = True

    def log(self, severity: ILogger.Severity, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    def __init__(self) -> None:
        self.made = True


class IProgressMonitor:
    def __init__(self) -> None:
        self.made = True


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    calls.append(("init_libnvinfer_plugins", namespace))
    return logger.made


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert logger.made
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        calls.append(("deserialize_cuda_engine", len(serialized_engine)))
        try:
            plan = json.loads(bytes(serialized_engine))
        except ValueError:
            self._logger.log(ILogger.ERROR, "the serialization magic tag is wrong")
            return None
        if plan.get("host_code") and not self.engine_host_code_allowed:
            self._logger.log(ILogger.ERROR, "the engine contains host code, which is not allowed")
            return None
        return ICudaEngine(plan, self._logger)


class ICudaEngine:
    def __init__(self, plan: Any, logger: ILogger) -> None:
        self.plan = plan
        self.logger = logger
        self.contexts = 0
        self._tensors = {tensor["name"]: tensor for tensor in plan["tensors"]}
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(plan["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return str(list(self._tensors)[index])

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self._tensors[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name]["shape"])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation[self._tensors[name].get("location", "DEVICE")]

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self._tensors[name].get("format", "LINEAR")]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        assert self.get_tensor_mode(name) is TensorIOMode.INPUT
        given = self.plan["profiles"][profile_index].get(name)
        shape = self.get_tensor_shape(name)
        return [tuple(one) for one in given] if given is not None else [shape] * 3

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext:
        calls.append(("create_execution_context", strategy.name))
        self.contexts += 1
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self.active_optimization_profile = 0 if engine.contexts == 1 else -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        calls.append(("set_optimization_profile_async", profile_index))
        runtime.state.stream(stream_handle)
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return False
        self.active_optimization_profile = profile_index
        self.shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        calls.append(("set_input_shape", name, tuple(shape)))
        low, _, high = self._engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        if len(low) != len(shape) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            self._engine.logger.log(ILogger.ERROR, f"dims {list(shape)} of '{name}' are outside of the profile")
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        calls.append(("set_tensor_address", name, memory))
        if self._engine.get_tensor_location(name) is TensorLocation.DEVICE:
            runtime.state.within(memory, 1)
        self.addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert output_allocator.made
        self.allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name in self._names("INPUT")
            if (-1 in self._engine.get_tensor_shape(name) and name not in self.shapes)
            or (self._engine.get_tensor_location(name) is TensorLocation.HOST and name not in self.addresses)
        ]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self._engine.get_tensor_mode(name) is TensorIOMode.INPUT:
            return self.shapes.get(name, self._engine.get_tensor_shape(name))
        what, source, *more = self._engine.plan["ops"][name]
        if what == "nonzero":
            return (-1,)
        if what == "shaped":
            return tuple(_array(self.addresses[more[0]], (2,), "INT64").tolist())
        return self.get_tensor_shape(str(source))

    def execute_async_v3(self, stream_handle: int) -> bool:
        calls.append(("execute_async_v3", stream_handle, self.active_optimization_profile))
        if self.active_optimization_profile < 0 or self.infer_shapes():
            return False
        stream = runtime.state.stream(stream_handle)
        for name in self._names("OUTPUT"):
            what, source, *more = self._engine.plan["ops"][name]
            if what in ("nonzero", "refuse 77"):
                stream.run(stream.asked)
            shape, given = self.get_tensor_shape(name), self.get_tensor_shape(source)
            inputs = _array(self.addresses[source], given, self._dtype(source))
            if what == "refuse 77" and (inputs == 77).any():
                self._engine.logger.log(ILogger.ERROR, "it was told to refuse 77")
                return False
            if what == "nonzero":
                (inputs,) = np.nonzero(inputs.ravel())
                shape = inputs.shape
            memory = self.addresses.get(name, 0)
            allocator = self.allocators.get(name)
            if allocator is not None:
                size = int(np.prod(shape)) * np.dtype(_NUMPY[self._dtype(name)]).itemsize
                memory = allocator.reallocate_output_async(name, memory, size, 256, stream_handle)
                allocator.notify_shape(name, shape)
            if not memory:
                self._engine.logger.log(ILogger.ERROR, f"tensor '{name}' has no address")
                return False
            outputs = _array(memory, shape, self._dtype(name))
            used = (memory, outputs.nbytes), (self.addresses[source], 1)
            stream.add(lambda what=what, a=inputs, b=outputs, more=more: _compute(what, a, b, more), *used)
        return True

    def _dtype(self, name: str) -> str:
        return str(self._engine.get_tensor_dtype(name).name)

    def _names(self, mode: str) -> list[str]:
        return [tensor["name"] for tensor in self._engine.plan["tensors"] if tensor["mode"] == mode]


def _compute(what: str, inputs: Any, outputs: Any, more: list[Any]) -> None:
    if what == "crash":
        raise runtime.CUDARuntimeError(700)
    outputs[...] = (inputs + more[0] if what == "add" else inputs).reshape(outputs.shape).astype(outputs.dtype)


def _array(address: int, shape: Sequence[int], dtype: str) -> Any:
    kind = np.dtype(_NUMPY[dtype])
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind).reshape(shape)


class _Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]


class OnnxParser:
    def __init__(self, network: _Network, logger: ILogger) -> None:
        assert logger.made
        self._network = network
        self.num_errors = 0

    def parse_from_file(self, model: str) -> bool:
        import onnx

        graph = onnx.load(model).graph
        if any(node.op_type == "Unheard" for node in graph.node):
            self.num_errors = 1
            return False
        for found, values in ((self._network.inputs, graph.input), (self._network.outputs, graph.output)):
            for value in values:
                kind = value.type.tensor_type
                dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
                dtype = DataType[_FROM_ONNX[kind.elem_type]]
                found.append(SimpleNamespace(name=value.name, shape=dims, dtype=dtype, is_shape_tensor=False))
        return True

    def get_error(self, index: int) -> Any:
        texts = {"desc": "no importer for the operator", "node_name": "the_node", "node_operator": "Unheard"}
        return Mock(**{f"{name}.return_value": text for name, text in texts.items()})


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        self.shapes[input] = [list(min), list(opt), list(max)]


class _TimingCache(NamedTuple):
    data: bytes

    def serialize(self) -> bytes:
        return b"times " + str(len(self.data)).encode()


class _Config:
    def __init__(self) -> None:
        self.flags: list[str] = []
        self.pools: dict[str, int] = {}
        self.profiles: list[_Profile] = []
        self.progress_monitor: Any = None
        self.builder_optimization_level = 3
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self._cache: _TimingCache | None = None

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self.pools[pool.name] = pool_size

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag.name)

    def add_optimization_profile(self, profile: _Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> _TimingCache:
        return _TimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: _TimingCache, ignore_mismatch: bool) -> bool:
        if cache.data.startswith(b"other"):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> _TimingCache | None:
        return self._cache


class Builder:
    def __init__(self, logger: ILogger) -> None:
        assert logger.made
        self._logger = logger

    def create_network(self, flags: int = 0) -> _Network:
        return _Network(flags)

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _Config) -> bytes | None:
        names = [tensor.name for tensor in network.inputs if -1 in tensor.shape]
        if any(name not in profile.shapes for name in names for profile in config.profiles or [_Profile()]):
            self._logger.log(ILogger.ERROR, "an input with dynamic dims has no profile")
            return None
        monitor = config.progress_monitor
        monitor.phase_start("Building", None, 2)
        for step in range(2):
            if not monitor.step_complete("Building", step):
                return None
        monitor.phase_finish("Building")
        tensors = [
            {"name": tensor.name, "mode": mode, "dtype": tensor.dtype.name, "shape": tensor.shape}
            for mode, group in (("INPUT", network.inputs), ("OUTPUT", network.outputs))
            for tensor in group
        ]
        plan = {
            "tensors": tensors,
            "profiles": [profile.shapes for profile in config.profiles] or [{}],
            "ops": {tensor.name: ["copy", network.inputs[0].name] for tensor in network.outputs},
            "host_code": "VERSION_COMPATIBLE" in config.flags,
            "built": {
                "flags": config.flags,
                "pools": config.pools,
                "level": config.builder_optimization_level,
                "hardware": config.hardware_compatibility_level.name,
                "network": network.flags,
            },
        }
        return json.dumps(plan).encode()
