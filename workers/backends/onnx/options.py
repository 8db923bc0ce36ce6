"""Converts a model's configuration to a plan for ONNX Runtime: providers, session options, run options.

Invariant: pure functions from texts to a plan. The engine is not imported; its capabilities are arguments. Each
parameter has a row in a table, with the check of its value; the tables in docs/onnx.md are generated from these rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.repo.rules.optimization import onnx_level_problem
from shmserve.workers.backends.onnx.providers import (
    CUDA,
    EXTEND,
    MAX_BYTES,
    SEARCH,
    TENSORRT,
    Providers,
    cpu_providers,
    gpu_providers,
)
from shmserve.workers.backends.parameters import Check, choice, flag, text_of, whole

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig

_MAX_THREADS = 1024

GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

SHRINKAGE = "memory.enable_memory_arena_shrinkage"
ENTRIES = ("session.", "optimization.", "ep.", "mlas.")
"""Prefixes of parameters that are passed on as entries of the session's configuration."""


class Parameter(NamedTuple):
    """`default` "": the engine's own. `check` returns the value in the engine's form or raises."""

    check: Check
    default: str
    meaning: str


PARAMETERS = {
    "intra_op_thread_count": Parameter(
        whole(_MAX_THREADS), "0", "threads within one operator; 0: as many as this instance may use"
    ),
    "inter_op_thread_count": Parameter(
        whole(_MAX_THREADS), "0", "threads for parallel operators, with `execution_mode` 1; 0: chosen by the engine"
    ),
    "execution_mode": Parameter(
        choice({"0": "0", "1": "1"}), "0", "0: operators run one after another; 1: in parallel"
    ),
    "enable_mem_arena": Parameter(flag, "1", "0: host memory is returned to the system immediately after use"),
    "enable_mem_pattern": Parameter(flag, "1", "0: no memory plans for recurring shapes"),
    SHRINKAGE: Parameter(
        text_of(r"(cpu|gpu):\d+(;(cpu|gpu):\d+)*", "devices like 'gpu:0;cpu:0'"),
        "",
        "memory pools to shrink after each run; any gpu means the instance's own",
    ),
    "cpu_mem_limit": Parameter(
        whole(MAX_BYTES), "0", "not in Triton: maximum bytes of the host memory pool, including weights; 0: no limit"
    ),
    "gpu_mem_limit": Parameter(whole(MAX_BYTES), "", "maximum bytes of the GPU memory pool"),
    "arena_extend_strategy": Parameter(
        choice(EXTEND), "0", "growth of these two pools. 0: by powers of two; 1: by the requested size"
    ),
    "cudnn_conv_algo_search": Parameter(
        choice(SEARCH), "0", "cuDNN's search for convolution algorithms. 0: exhaustive; 1: heuristic; 2: default"
    ),
    "cudnn_conv_use_max_workspace": Parameter(flag, "", "whether this search may use unlimited workspace memory"),
    "do_copy_in_default_stream": Parameter(flag, "", "whether copies wait for the GPU's default stream"),
}
_OF_CUDA = (
    "gpu_mem_limit",
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
)

SETTINGS = {
    "default-max-batch-size": Parameter(
        whole(1 << 30), "4", "`max_batch_size` of models that can batch and do not set it"
    ),
    "enable-global-threadpool": Parameter(flag, "0", "1: the process has one thread pool, instead of one per session"),
    "intra_op_thread_count": Parameter(
        whole(_MAX_THREADS), "0", "default of this parameter; with a global thread pool, the size of that pool"
    ),
    "inter_op_thread_count": Parameter(whole(_MAX_THREADS), "0", "the same"),
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
    given = {key: entry.string_value for key, entry in config.parameters.items()}
    values = {key: _value(given, key) for key in PARAMETERS}
    for key in SETTINGS:
        _setting(setting, key)
    intra, inter = (
        int(values[key] if given.get(key) else _setting(setting, key) or "0")
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
    entries |= {key: value for key, value in given.items() if key.startswith(ENTRIES)}
    pool = None
    if _setting(setting, "enable-global-threadpool") == "1":
        pool = (intra or threads, inter)
        attributes["use_per_session_threads"] = 0
    arena = _arena(values)
    if arena is not None:
        entries["session.use_env_allocators"] = "1"
    run = _run(values[SHRINKAGE], providers, values["enable_mem_arena"] == "1", device)
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
        notes=tuple(_typos(given)),
    )


def _providers(
    config: ModelConfig, kind: str, device: int, available: Collection[str], values: dict[str, str], threads: int
) -> Providers:
    optimization = config.optimization
    accelerators = optimization.execution_accelerators if optimization is not None else None
    if kind == "KIND_GPU" or (kind == "KIND_AUTO" and CUDA in available):
        old = {key: values[key] for key in _OF_CUDA if key in config.parameters}
        wanted = accelerators.gpu_execution_accelerator if accelerators is not None else ()
        return gpu_providers(config.name, wanted, device, available, old, kind == "KIND_GPU")
    listed = accelerators.cpu_execution_accelerator if accelerators is not None else ()
    return cpu_providers(config.name, listed, available, threads)


def _value(given: dict[str, str], key: str) -> str:
    row = PARAMETERS[key]
    text = given.get(key, "")
    return row.check(f"parameter {key}", text or row.default) if text or row.default else ""


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
    if values["enable_mem_arena"] == "0":
        raise InvalidRequest(
            f"parameter cpu_mem_limit {limit} limits the memory pool, which enable_mem_arena 0 turns off: remove "
            "one of the two"
        )
    grows = list(EXTEND.values()).index(values["arena_extend_strategy"])
    return {"max_mem": limit, "arena_extend_strategy": grows}


def _run(shrinkage: str, providers: Providers, arena: bool, device: int) -> dict[str, str]:
    """Returns the run options. An instance has at most one GPU, so any `gpu:` in the parameter means that one."""
    on_gpu = any(name == CUDA for name, _ in providers.listed)
    parts = [part for part in shrinkage.split(";") if part.startswith("cpu:")]
    if parts and not arena:
        raise InvalidRequest(
            f"parameter {SHRINKAGE} '{shrinkage}' shrinks the host memory pool, which enable_mem_arena 0 turns off"
        )
    if on_gpu and "gpu:" in shrinkage:
        parts.append(f"gpu:{device}")
    return {SHRINKAGE: ";".join(parts)} if parts else {}


def _typos(given: dict[str, str]) -> list[str]:
    """Returns notes about likely typos. Unknown parameters are not errors, because they may be for other components."""
    notes = []
    for key in given:
        if key not in PARAMETERS and not key.startswith(ENTRIES):
            near = difflib.get_close_matches(key, PARAMETERS, 1, 0.8)
            if near:
                notes.append(f"parameter '{key}' is unknown to onnxruntime; did you mean '{near[0]}'?")
    return notes
