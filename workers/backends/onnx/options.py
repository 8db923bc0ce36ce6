"""Converts a model's configuration to a plan for ONNX Runtime: providers, session options, run options.

Invariant: pure functions from texts to a plan. The engine is not imported; its capabilities are arguments. The
table of settings in docs/onnx.md is generated from the one here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.repo.rules.onnx_options import (
    ENTRIES,
    EXTEND,
    MAX_THREADS,
    OF_CUDA,
    PARAMETERS,
    SHRINKAGE,
    OnnxOption,
    pool_conflict,
    typos,
    value_of,
)
from shmserve.repo.rules.optimization import onnx_level_problem
from shmserve.repo.rules.values import flag, whole
from shmserve.workers.backends.onnx.providers import (
    CUDA,
    TENSORRT,
    Providers,
    cpu_providers,
    gpu_providers,
)

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig

GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

SETTINGS = {
    "default-max-batch-size": OnnxOption(
        whole(1 << 30), "4", "`max_batch_size` of models that can batch and do not set it"
    ),
    "enable-global-threadpool": OnnxOption(flag, "0", "1: the process has one thread pool, instead of one per session"),
    "intra_op_thread_count": OnnxOption(
        whole(MAX_THREADS), "0", "default of this parameter; with a global thread pool, the size of that pool"
    ),
    "inter_op_thread_count": OnnxOption(whole(MAX_THREADS), "0", "the same for parallel operators"),
}
"""The keys of `--backend-config=onnxruntime,KEY=VALUE`."""


class SessionPlan(Struct, frozen=True):
    """`attributes` of the session options, `entries` of the session's configuration, `run` of the configuration of each
    run. `pool`: the threads of the process, `arena`: its host memory pool. `required` providers must have started in
    the session. `captures`: runs are recorded as CUDA graphs. `notes` are for the log."""

    providers: tuple[tuple[str, dict[str, str]], ...]
    required: tuple[str, ...]
    attributes: dict[str, int | str]
    entries: dict[str, str]
    run: dict[str, str]
    pool: tuple[int, int] | None
    arena: dict[str, int] | None
    device: int
    captures: bool
    notes: tuple[str, ...]

    @property
    def on_host(self) -> bool:
        """Whether all computation uses host memory, so that bound inputs are not copied."""
        return not any(name in (CUDA, TENSORRT) for name, _ in self.providers)


def plan(
    config: ModelConfig,
    kind: str,
    device: int,
    available: Collection[str],
    threads: int,
    setting: Callable[[str], str] = lambda key: "",
) -> SessionPlan:
    """`available`: the providers of this engine. `threads`: the CPU limit of this instance. `setting`: returns a value
    of --backend-config, or ""."""
    parameters = {key: entry.string_value for key, entry in config.parameters.items()}
    values = {key: value_of(parameters, key, f"parameter {key}") for key in PARAMETERS}
    for _, text in pool_conflict(values):
        raise InvalidRequest(text)
    for key in SETTINGS:
        _setting(setting, key)
    intra, inter = (
        int(values[key] if parameters.get(key) else _setting(setting, key) or "0")
        for key in ("intra_op_thread_count", "inter_op_thread_count")
    )
    providers = _providers(config, kind, device, available, values, intra or threads)
    parallel = values["execution_mode"] == "1"
    attributes: dict[str, int | str] = {
        "intra_op_num_threads": providers.intra_op or intra or threads,
        "inter_op_num_threads": inter,
        "execution_mode": "ORT_PARALLEL" if parallel else "ORT_SEQUENTIAL",
        "enable_cpu_mem_arena": int(values["enable_mem_arena"]),
        "enable_mem_pattern": int(values["enable_mem_pattern"] == "1" and not parallel),
        "graph_optimization_level": _graph_level(config),
    }
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries |= {key: value for key, value in parameters.items() if key.startswith(ENTRIES)}
    pool = None
    if _setting(setting, "enable-global-threadpool") == "1":
        pool = (intra or threads, inter)
        attributes["use_per_session_threads"] = 0
    arena = _arena(values)
    if arena is not None:
        entries["session.use_env_allocators"] = "1"
    run = _run(values[SHRINKAGE], providers, device)
    if providers.captures:
        run["gpu_graph_id"] = "-1"
    return SessionPlan(
        providers=providers.listed,
        required=providers.required,
        attributes=attributes,
        entries=entries,
        run=run,
        pool=pool,
        arena=arena,
        device=device,
        captures=providers.captures,
        notes=tuple(f"parameter '{key}' is {note}" for key, note in typos(parameters)),
    )


def _providers(
    config: ModelConfig, kind: str, device: int, available: Collection[str], values: dict[str, str], threads: int
) -> Providers:
    optimization = config.optimization
    accelerators = optimization.execution_accelerators if optimization is not None else None
    if kind == "KIND_GPU" or (kind == "KIND_AUTO" and CUDA in available):
        old = {key: values[key] for key in OF_CUDA if key in config.parameters}
        wanted = accelerators.gpu_execution_accelerator if accelerators is not None else ()
        return gpu_providers(config.name, wanted, device, available, old, kind == "KIND_GPU")
    listed = accelerators.cpu_execution_accelerator if accelerators is not None else ()
    return cpu_providers(config.name, listed, available, threads)


def _setting(setting: Callable[[str], str], key: str) -> str:
    text = setting(key)
    return SETTINGS[key].check(f"--backend-config onnxruntime,{key}", text) if text else ""


def _graph_level(config: ModelConfig) -> str:
    graph = config.optimization.graph if config.optimization is not None else None
    level = graph.level if graph is not None else 0
    if text := onnx_level_problem(level):
        raise InvalidRequest(f"optimization.graph.level {text}")
    return GRAPH_LEVELS[level]


def _arena(values: dict[str, str]) -> dict[str, int] | None:
    limit = int(values["cpu_mem_limit"])
    if not limit:
        return None
    grows = list(EXTEND.values()).index(values["arena_extend_strategy"])
    return {"max_mem": limit, "arena_extend_strategy": grows}


def _run(shrinkage: str, providers: Providers, device: int) -> dict[str, str]:
    """Returns the run options. An instance has at most one GPU, so any `gpu:` in the parameter means that one."""
    on_gpu = any(name == CUDA for name, _ in providers.listed)
    parts = [part for part in shrinkage.split(";") if part.startswith("cpu:")]
    if on_gpu and "gpu:" in shrinkage:
        parts.append(f"gpu:{device}")
    return {SHRINKAGE: ";".join(parts)} if parts else {}
