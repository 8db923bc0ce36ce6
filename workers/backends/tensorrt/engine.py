"""A TensorRT engine: finds and loads it and checks it against the configuration.

Invariant: an engine that does not match its configuration is refused at load, with an error that names both sides.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unavailable, Unsupported
from shmserve.repo.config.complete import TensorFacts
from shmserve.workers.backends import model_facts
from shmserve.workers.process.device import group_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput
    from shmserve.workers.backends.base import Context
    from shmserve.workers.batch.specs import Spec

DTYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "BOOL": "BOOL",
    "UINT8": "UINT8",
}
_HEADER = b"ftrt" + bytes(4)
"""The tag of a plan, and the version of its format. The version of TensorRT is in the bytes 24 to 27."""
_LOADED: set[str] = set()
"""Plug-in libraries loaded by this process. They register once and are not unloaded."""

Shape = tuple[int, ...]


class Range(Struct, frozen=True):
    """The shapes that a profile allows for an input, with the batch dimension."""

    low: Shape
    best: Shape
    high: Shape

    def holds(self, shape: Shape) -> bool:
        return len(shape) == len(self.low) and all(
            low <= dim <= high for low, dim, high in zip(self.low, shape, self.high, strict=True)
        )

    def __str__(self) -> str:
        return f"{list(self.low)} to {list(self.high)}" if self.low != self.high else str(list(self.low))


class LoadedEngine:
    """An engine, its inputs and outputs, and the ranges of its profiles."""

    def __init__(self, trt: Any, runtime: Any, engine: Any) -> None:
        self.trt = trt
        self.engine = engine
        self._runtime = runtime  # must outlive the engine
        self.inputs: list[TensorFacts] = []
        self.outputs: list[TensorFacts] = []
        self.on_host: set[str] = set()
        """Tensors whose values determine shapes: the library reads them from host memory."""
        self.profiles: int = engine.num_optimization_profiles
        for index in range(engine.num_io_tensors):
            self._add_tensor(engine.get_tensor_name(index))

    def _add_tensor(self, name: str) -> None:
        trt, engine = self.trt, self.engine
        kind = engine.get_tensor_dtype(name).name
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise Unsupported(f"tensor '{name}' of the engine is {kind}, which is not supported")
        if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            raise Unsupported(
                f"tensor '{name}' of the engine has the layout {engine.get_tensor_format(name).name}; only row-major "
                "tensors (LINEAR) are supported"
            )
        fact = TensorFacts(name, dtype, tuple(engine.get_tensor_shape(name)))
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        (self.inputs if is_input else self.outputs).append(fact)
        if engine.get_tensor_location(name) == trt.TensorLocation.HOST:
            self.on_host.add(name)

    def range_of(self, name: str, profile: int) -> Range:
        """Returns the range of an input in device memory."""
        return Range(*(tuple(shape) for shape in self.engine.get_tensor_profile_shape(name, profile)))

    def largest_batch(self, profiles: Sequence[int]) -> int:
        """Returns the most rows that all inputs may have in one of these profiles."""
        names = [fact.name for fact in self.inputs if fact.name not in self.on_host and fact.dims]
        return max(min((self.range_of(name, profile).high[0] for name in names), default=0) for profile in profiles)


class ProfileShapes:
    """The shapes of a profile, for graphs."""

    def __init__(self, engine: LoadedEngine, profile: int) -> None:
        self._engine = engine
        self._profile = profile

    def best(self, spec: Spec) -> Shape:
        return self._engine.range_of(spec.name, self._profile).best

    def refusal(self, spec: Spec, shape: Shape) -> str:
        limits = self._engine.range_of(spec.name, self._profile)
        return "" if limits.holds(shape) else f"is outside of profile {self._profile}, which allows {limits}"


def open_engine(config: ModelConfig, context: Context, trt: Any, logger: Any, capability: str) -> LoadedEngine:
    load_plugins(context.setting("tensorrt", "plugins"))
    if not trt.init_libnvinfer_plugins(logger, ""):
        raise Unavailable("the plug-ins of TensorRT cannot be set up")
    runtime = trt.Runtime(logger)
    if context.setting("tensorrt", "version-compatible", "false").lower() in ("true", "1"):
        # Such an engine contains its own runtime, as code that is executed: only for trusted files.
        runtime.engine_host_code_allowed = True
    path = context.model_file(config, "model.plan", name=config.cc_model_filenames.get(capability))
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except ValueError:
            raise InvalidRequest(f"file '{path.name}' of model '{config.name}' is empty") from None
    with data:
        engine, version = runtime.deserialize_cuda_engine(data), _version(data)
    if engine is None:
        raise InvalidRequest(
            f"unable to load plan of model '{config.name}'{f', built by TensorRT {version}' * bool(version)}: "
            f"{logger.last}; a plan works on the kind of GPU and the version of "
            f"TensorRT that built it (here: compute capability {capability}, TensorRT {trt.__version__}), unless it "
            "was built to be compatible; `shmserve build` makes one for this machine from the ONNX file"
        )
    return LoadedEngine(trt, runtime, engine)


def _version(plan: mmap.mmap) -> str:
    """The version of TensorRT in the header of a plan, e.g. "8.6.1.6"; "" if it has none."""
    return ".".join(map(str, plan[24:28])) if plan[:8] == _HEADER and len(plan) >= 28 else ""


def load_plugins(paths: str) -> None:
    """Loads the operator's plug-in libraries, `a.so;b.so`, which register their plug-ins when loaded."""
    for path in filter(None, (part.strip() for part in paths.split(";"))):
        if path in _LOADED:
            continue
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise Unavailable(
                f"a library of plug-ins (--backend-config tensorrt,plugins) cannot be loaded: {error}"
            ) from error
        _LOADED.add(path)


def logger_of(trt: Any, log_message: Callable[[str, str], None]) -> Any:
    """Returns the library's logger. `last` is the text of the last error, for calls that only report failure."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = "the library gives no reason"

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = msg
                log_message(f"TensorRT: {msg}", "error")
            elif severity == trt.ILogger.Severity.WARNING:
                log_message(f"TensorRT: {msg}", "warning")

    return Logger()


# ------------------------------------------------------------------------------------------- profiles


def profiles_of(config: ModelConfig, instance: str) -> tuple[int, ...]:
    group = group_of(config, instance)
    return (0,) if group is None else _numbers(group[0].profile)


def largest_batch(config: ModelConfig, engine: LoadedEngine) -> int:
    """Returns the most rows that each instance of the model can run at once."""
    groups = [_numbers(group.profile) for group in config.instance_group] or [(0,)]
    for profiles in groups:
        check_profiles(config.name, engine, profiles)
    return min(engine.largest_batch(profiles) for profiles in groups)


def _numbers(profile: Sequence[str]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(text) for text in profile)) or (0,)


def check_profiles(model: str, engine: LoadedEngine, profiles: Sequence[int]) -> None:
    for profile in profiles:
        if profile >= engine.profiles:
            raise InvalidRequest(
                f"instance_group of model '{model}' names profile {profile}; the engine has {engine.profiles}, "
                "numbered from 0"
            )


# ------------------------------------------------------------------------------------------- checks


def match(config: ModelConfig, engine: LoadedEngine, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> None:
    """Raises unless the configuration matches the engine; it may leave out outputs."""
    model = config.name
    model_facts.match(model, "input", inputs, engine.inputs, flat=(-1,), whose="engine")
    model_facts.match(model, "output", outputs, engine.outputs, whose="engine")
    model_facts.none_missing(model, inputs, engine.inputs)
    entries: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    declared = {entry.name: entry.is_shape_tensor for entry in entries}
    for entry in entries:
        if entry.is_non_linear_format_io:
            raise Unsupported(f"tensor '{entry.name}' of model '{model}': is_non_linear_format_io is not supported")
    for name, is_shape in declared.items():
        if is_shape != (name in engine.on_host):
            raise InvalidRequest(
                f"unable to load model '{model}': tensor '{name}' is {'no' if is_shape else 'a'} shape tensor in the "
                f"engine, is_shape_tensor: {str(is_shape).lower()} in the configuration"
            )
    if engine.on_host and config.max_batch_size > 0:
        raise Unsupported(
            f"model '{model}' has shape tensors ({', '.join(sorted(engine.on_host))}), whose values hold for a whole "
            f"batch: set max_batch_size: 0 (it is {config.max_batch_size})"
        )
    optional = [spec.name for spec in inputs if spec.optional]
    if optional:
        raise Unsupported(f"model '{model}': an engine has no optional inputs, but {', '.join(optional)} is optional")


def check_batch(config: ModelConfig, engine: LoadedEngine, profiles: Sequence[int]) -> None:
    largest = engine.largest_batch(profiles)
    if config.max_batch_size > largest:
        raise InvalidRequest(
            f"unable to load model '{config.name}': max_batch_size is {config.max_batch_size}, and profile(s) "
            f"{', '.join(map(str, profiles))} of the engine allow batches up to {largest}"
        )
