"""`shmserve build`: builds a plan for this GPU from an ONNX file, in a separate process.

Invariant: the plan appears at its path only when it is complete; an existing file stays until then.

Exit codes: 0 done, 1 build failed, 2 invalid usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import ModelFailed, ServeError, Unsupported
from shmserve.gpu.interface import GpuDevice
from shmserve.paths import cache_dir, server_runtime_dir
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.gpus import discover
from shmserve.repo.storage.store import scan_model
from shmserve.system.files import new_file
from shmserve.terminal.tables import duration_text, shape_text, table
from shmserve.workers.backends.tensorrt.build_shapes import BadShapes, Ranges, from_config, from_words, with_batch
from shmserve.workers.backends.tensorrt.engine import LoadedEngine, load_plugins, logger_of
from shmserve.workers.gpu import api
from shmserve.workers.gpu.api import major, tensorrt
from shmserve.workers.process.log import log_message

ONNX = "model.onnx"
_HARDWARE = {"": "NONE", "ampere+": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}
_PRECISIONS = {"fp16": "FP16", "bf16": "BF16"}


class BuildOptions(Struct, forbid_unknown_fields=True):
    """The arguments of `shmserve build`, by name."""

    model: str
    out: str
    profile: list[list[str]] = []
    max_batch: int = 0
    version: int | None = None
    precision: str = ""
    workspace_mb: int = 0
    level: int | None = None
    timing_cache: str | None = None
    no_timing_cache: bool = False
    version_compatible: bool = False
    hardware: str = ""
    plugins: str = ""
    json: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    order = msgspec.json.decode(words[0], type=BuildOptions)
    try:
        _build(order)
    except BadShapes as error:
        return _end(str(error), 2)
    except Interrupted:
        return _end("interrupted; no plan was written", 130)
    except ServeError as error:
        return _end(str(error), 1)
    except OSError as error:
        return _end(f"{error.filename or order.out}: {error.strerror}", 1)
    return 0


def _end(text: str, code: int) -> int:
    print(f"shmserve build: {text}", file=sys.stderr)
    return code


def _build(order: BuildOptions) -> None:
    source, config = _source(order)
    out = Path(order.out)
    if out.is_dir() or not out.parent.is_dir():
        raise BadShapes(f"{out} is not the name of a file that can be written; name one in a directory that exists")
    cuda, trt = api.open_device(), tensorrt()
    if order.precision and major(trt) > 10:
        raise Unsupported(
            f"TensorRT {trt.__version__} computes in the types that the ONNX file has: convert that to "
            f"{order.precision} instead of giving --precision, which is for TensorRT 10"
        )
    logger = logger_of(trt, log_message)
    load_plugins(order.plugins)
    trt.init_libnvinfer_plugins(logger, "")
    started = time.perf_counter()
    with interrupts() as interrupted:
        progress = BuildProgress(trt, interrupted, quiet=order.json)
        plan, words = _built(order, trt, logger, source, config, progress.monitor, cuda.capability)
        progress.end()
        if plan is None:
            if interrupted():
                raise Interrupted
            raise ModelFailed(f"no plan could be built: {logger.last}")
    _write(out, plan)
    _report(order, trt, logger, out, time.perf_counter() - started, cuda, words)


def _source(order: BuildOptions) -> tuple[Path, ModelConfig | None]:
    """Returns the ONNX file, and the configuration if a model directory was given."""
    path = Path(order.model)
    if path.is_file():
        return path, None
    if not path.is_dir():
        raise BadShapes(f"{path} is neither an ONNX file nor the directory of a model")
    model = scan_model(Path(os.path.abspath(path)), gpus=discover().numbers)
    if model.problems or model.written is None:
        raise BadShapes("\n".join([f"the configuration of model '{model.name}' is wrong:", *model.problem_texts]))
    versions = [order.version] if order.version is not None else list(model.versions[-1:])
    for version in versions:
        file = path / str(version) / ONNX
        if (file / ONNX).is_file():
            return file / ONNX, model.written
        if file.is_file():
            return file, model.written
    which = f"version {versions[0]}" if versions else "any version"
    raise BadShapes(f"there is no file '{ONNX}' in {which} of model '{model.name}'")


def _built(
    order: BuildOptions, trt: Any, logger: Any, source: Path, config: ModelConfig | None, monitor: Any, capability: str
) -> tuple[Any, list[str]]:
    """Returns the plan, None if the build failed, and the lines to print about the timing cache."""
    builder = trt.Builder(logger)
    flags = 0 if order.precision else 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(os.fspath(source)):
        raise ModelFailed("\n".join([f"{source.name} cannot be read by TensorRT:", *_errors(parser)]))
    settings = builder.create_builder_config()
    settings.progress_monitor = monitor
    if order.workspace_mb:
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, order.workspace_mb << 20)
    if order.level is not None:
        settings.builder_optimization_level = order.level
    if order.version_compatible:
        settings.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if order.hardware:
        name = _HARDWARE[order.hardware]
        settings.hardware_compatibility_level = trt.HardwareCompatibilityLevel.__members__[name]
    if order.precision:
        settings.set_flag(trt.BuilderFlag.__members__[_PRECISIONS[order.precision]])
    for ranges in _ranges(order, config, network):
        profile = builder.create_optimization_profile()
        for name, (low, best, high) in ranges.items():
            profile.set_shape(name, low, best, high)
        settings.add_optimization_profile(profile)
    cache, words = _timing_cache(order, trt, settings, capability)
    plan = builder.build_serialized_network(network, settings)
    if plan is not None and cache is not None:
        try:
            _write(cache, settings.get_timing_cache().serialize())
        except OSError as error:  # not a reason to lose the plan
            words.append(f"the timing cache cannot be kept: {error.strerror}")
    return plan, words


def _errors(parser: Any) -> Iterator[str]:
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        yield f"  node '{error.node_name()}' ({error.node_operator()}): {error.desc()}"


def _ranges(order: BuildOptions, config: ModelConfig | None, network: Any) -> list[Ranges]:
    """Returns the profiles: as given, else from the configuration, else for batches up to --max-batch."""
    inputs = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        inputs[tensor.name] = tuple(tensor.shape)
    dynamic = {name: shape for name, shape in inputs.items() if -1 in shape}
    if order.profile:
        return [from_words(words, inputs) for words in order.profile]
    if not dynamic:
        return []
    if config is not None and (config.max_batch_size or config.input):
        return [from_config(config, dynamic, order.max_batch)]
    return [with_batch(dynamic, order.max_batch)]


# ------------------------------------------------------------------------------------------- timing cache


def _timing_cache(order: BuildOptions, trt: Any, settings: Any, capability: str) -> tuple[Path | None, list[str]]:
    """Loads the timing cache of earlier builds. Returns its path and the lines to print."""
    if order.no_timing_cache:
        return None, []
    path = Path(order.timing_cache) if order.timing_cache is not None else _cache_place(trt, capability)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        if order.timing_cache is not None:
            raise
        return None, [f"no timing cache: {path}: {error.strerror}"]
    if data and settings.set_timing_cache(settings.create_timing_cache(data), False):
        return path, [f"timing cache: {path}, {len(data)} bytes were there"]
    settings.set_timing_cache(settings.create_timing_cache(b""), False)
    state = "of another device or version, begun anew" if data else "new"
    return path, [f"timing cache: {path}, {state}"]


def _cache_place(trt: Any, capability: str) -> Path:
    return cache_dir(server_runtime_dir()) / f"tensorrt-{trt.__version__}-sm{capability}.cache"


# ------------------------------------------------------------------------------------------- results


def _write(path: Path, data: Any) -> None:
    """Writes a file atomically. Servers of other users can read it."""
    with new_file(path, 0o644) as part:
        part.write_bytes(data)


def _report(
    order: BuildOptions, trt: Any, logger: Any, out: Path, seconds: float, cuda: GpuDevice, words: Sequence[str]
) -> None:
    """Loads the plan once, as a server would, and prints its properties."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = order.version_compatible
    loaded = runtime.deserialize_cuda_engine(out.read_bytes())
    if loaded is None:
        raise ModelFailed(f"the plan was written, but cannot be loaded here: {logger.last}")
    engine = LoadedEngine(trt, runtime, loaded)
    size = out.stat().st_size
    if order.json:
        document = {
            "plan": os.fspath(out),
            "bytes": size,
            "seconds": round(seconds, 3),
            "tensorrt": trt.__version__,
            "compute_capability": cuda.capability,
            "inputs": [_input(engine, fact.name, fact.dtype, fact.dims) for fact in engine.inputs],
            "outputs": [{"name": f.name, "datatype": f.dtype, "shape": list(f.dims)} for f in engine.outputs],
            "profiles": engine.profiles,
        }
        print(json.dumps(document, indent=2))
        return
    rows = [["input", f.name, f.dtype, shape_text(f.dims), _allowed(engine, f.name)] for f in engine.inputs]
    rows += [["output", f.name, f.dtype, shape_text(f.dims), ""] for f in engine.outputs]
    print(table(["", "name", "type", "shape", "profiles"], rows))
    for line in words:
        print(line)
    print(
        f"{out}: {size / 2**20:.1f} MiB in {duration_text(seconds)}, for compute capability {cuda.capability} and "
        f"TensorRT {trt.__version__}"
    )


def _allowed(engine: LoadedEngine, name: str) -> str:
    if name in engine.on_host:
        return "values of shapes"
    return "; ".join(str(engine.range_of(name, profile)) for profile in range(engine.profiles))


def _input(engine: LoadedEngine, name: str, dtype: str, dims: tuple[int, ...]) -> dict[str, Any]:
    document: dict[str, Any] = {"name": name, "datatype": dtype, "shape": list(dims)}
    if name not in engine.on_host:
        ranges = [engine.range_of(name, profile) for profile in range(engine.profiles)]
        document["profiles"] = [{"min": list(r.low), "opt": list(r.best), "max": list(r.high)} for r in ranges]
    return document


# ------------------------------------------------------------------------------------------- progress and interruption
# The library calls back for both, from any thread. The display never blocks the build.

TICK_S = 0.1
_CLEAR = "\r\x1b[K"


class Interrupted(Exception):
    """SIGINT or SIGTERM was received, and the build has ended."""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGINT or SIGTERM was received. A build is one long call in which no
    Python handler runs, so the signal is detected through the wakeup descriptor, a pipe."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    received = False

    def look() -> bool:
        nonlocal received
        with suppress(BlockingIOError):
            received = bool(os.read(reading, 64)) or received
        return received

    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda *_: None) for number in numbers]  # the descriptor has recorded it
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield look
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class BuildProgress:
    def __init__(self, trt: Any, interrupted: Callable[[], bool], quiet: bool) -> None:
        self._terminal = sys.stderr.isatty()
        self._quiet = quiet
        self._steps: dict[str, tuple[int, int]] = {}
        """By running phase: completed steps and all steps."""
        self._shown = 0.0
        self.monitor = _monitor(trt, self, interrupted)

    def begin(self, phase: str, parent: str | None, steps: int) -> None:
        self._steps[phase] = (0, steps)
        if not self._quiet and not self._terminal and not parent:
            print(f"{phase} ({steps} steps)", file=sys.stderr, flush=True)

    def step(self, phase: str, done: int) -> None:
        self._steps[phase] = (done, self._steps.get(phase, (0, done))[1])
        now = time.monotonic()
        if self._terminal and not self._quiet and now - self._shown >= TICK_S:
            self._shown = now
            line = "  ".join(f"{name} {part}/{whole}" for name, (part, whole) in list(self._steps.items())[:3])
            print(f"{_CLEAR}{line[:100]}", end="", file=sys.stderr, flush=True)

    def finish(self, phase: str) -> None:
        self._steps.pop(phase, None)

    def end(self) -> None:
        if self._terminal and not self._quiet:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def _monitor(trt: Any, progress: BuildProgress, interrupted: Callable[[], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.begin(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step(phase_name, step + 1)
            return not interrupted()

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()


if __name__ == "__main__":
    sys.exit(main())
