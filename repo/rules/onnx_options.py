"""The parameters of models of ONNX Runtime, and the options of its execution accelerators.

Invariant: the engine is not imported. Each parameter has a row in a table, with the check of its value; the table in
docs/onnx.md is generated from these rows. Options that are newer than the tables are passed on unchecked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.rules.values import Check, as_it_is, choice, flag, text_of, whole

ONNX_ON_GPU = ("tensorrt", "cuda")
"""The accelerators on a GPU, in the order in which they may claim an operator."""
ONNX_ON_CPU = ("openvino", "xnnpack", "dnnl")
MAX_THREADS = 1024
EXTEND = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
SEARCH = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
MAX_BYTES = (1 << 63) - 1
_NUMBER = whole(MAX_BYTES)
_SHAPES = text_of(r"[^:,]+:\d+(x\d+)*(,[^:,]+:\d+(x\d+)*)*", "shapes like 'x:1x3x224x224,mask:1x128'")

CUDA_OPTIONS: dict[str, Check] = {
    "gpu_mem_limit": _NUMBER,
    "arena_extend_strategy": choice(EXTEND),
    "cudnn_conv_algo_search": choice(SEARCH),
    "cudnn_conv_use_max_workspace": flag,
    "cudnn_conv1d_pad_to_nc1d": flag,
    "do_copy_in_default_stream": flag,
    "enable_cuda_graph": flag,
    "enable_skip_layer_norm_strict_mode": flag,
    "fuse_conv_bias": flag,
    "prefer_nhwc": flag,
    "sdpa_kernel": _NUMBER,
    "tunable_op_enable": flag,
    "tunable_op_tuning_enable": flag,
    "tunable_op_max_tuning_duration_ms": _NUMBER,
    "use_ep_level_unified_stream": flag,
    "use_tf32": flag,
}

_PRECISIONS = {"FP32": "", "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TENSORRT_OPTIONS: dict[str, Check] = {
    "trt_auxiliary_streams": whole(1 << 16),
    "trt_bf16_enable": flag,
    "trt_build_heuristics_enable": flag,
    "trt_builder_optimization_level": whole(5),
    "trt_context_memory_sharing_enable": flag,
    "trt_cuda_graph_enable": flag,
    "trt_detailed_build_log": flag,
    "trt_dla_core": whole(64),
    "trt_dla_enable": flag,
    "trt_dump_ep_context_model": flag,
    "trt_dump_subgraphs": flag,
    "trt_engine_cache_enable": flag,
    "trt_engine_cache_path": as_it_is,
    "trt_engine_cache_prefix": as_it_is,
    "trt_ep_context_embed_mode": choice({"0": "0", "1": "1"}),
    "trt_ep_context_file_path": as_it_is,
    "trt_extra_plugin_lib_paths": as_it_is,
    "trt_force_sequential_engine_build": flag,
    "trt_force_timing_cache": flag,
    "trt_fp16_enable": flag,
    "trt_int8_calibration_table_name": as_it_is,
    "trt_int8_enable": flag,
    "trt_int8_use_native_calibration_table": flag,
    "trt_layer_norm_fp32_fallback": flag,
    "trt_max_partition_iterations": whole(1 << 31, 1),
    "trt_max_workspace_size": _NUMBER,
    "trt_min_subgraph_size": whole(1 << 31, 1),
    "trt_profile_max_shapes": _SHAPES,
    "trt_profile_min_shapes": _SHAPES,
    "trt_profile_opt_shapes": _SHAPES,
    "trt_sparsity_enable": flag,
    "trt_tactic_sources": as_it_is,
    "trt_timing_cache_enable": flag,
    "trt_timing_cache_path": as_it_is,
}
_ADDRESSES = ("user_compute_stream", "gpu_external_", "bytestream")
"""Parts of names of options that are pointers."""

SHRINKAGE = "memory.enable_memory_arena_shrinkage"
ENTRIES = ("session.", "optimization.", "ep.", "mlas.")
"""Prefixes of parameters that are passed on as entries of the session's configuration."""


class OnnxOption(NamedTuple):
    """`default` "": the engine's own. `check` returns the value in the engine's form or raises."""

    check: Check
    default: str
    meaning: str


PARAMETERS = {
    "intra_op_thread_count": OnnxOption(
        whole(MAX_THREADS), "0", "threads within one operator; 0: as many as this instance may use"
    ),
    "inter_op_thread_count": OnnxOption(
        whole(MAX_THREADS), "0", "threads for parallel operators, with `execution_mode` 1; 0: chosen by the engine"
    ),
    "execution_mode": OnnxOption(
        choice({"0": "0", "1": "1"}), "0", "0: operators run one after another; 1: in parallel"
    ),
    "enable_mem_arena": OnnxOption(flag, "1", "0: host memory is returned to the system immediately after use"),
    "enable_mem_pattern": OnnxOption(flag, "1", "0: no memory plans for recurring shapes"),
    SHRINKAGE: OnnxOption(
        text_of(r"(cpu|gpu):\d+(;(cpu|gpu):\d+)*", "devices like 'gpu:0;cpu:0'"),
        "",
        "memory pools to shrink after each run; any gpu means the instance's own",
    ),
    "cpu_mem_limit": OnnxOption(
        whole(MAX_BYTES), "0", "not in Triton: maximum bytes of the host memory pool, including weights; 0: no limit"
    ),
    "gpu_mem_limit": OnnxOption(whole(MAX_BYTES), "", "maximum bytes of the GPU memory pool"),
    "arena_extend_strategy": OnnxOption(
        choice(EXTEND), "0", "growth of these two pools. 0: by powers of two; 1: by the requested size"
    ),
    "cudnn_conv_algo_search": OnnxOption(
        choice(SEARCH), "0", "cuDNN's search for convolution algorithms. 0: exhaustive; 1: heuristic; 2: default"
    ),
    "cudnn_conv_use_max_workspace": OnnxOption(flag, "", "whether this search may use unlimited workspace memory"),
    "do_copy_in_default_stream": OnnxOption(flag, "", "whether copies wait for the GPU's default stream"),
}
OF_CUDA = (
    "gpu_mem_limit",
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
)


def value_of(parameters: Mapping[str, str], key: str, what: str) -> str:
    """The checked value of a parameter, or its default; "": the engine's own."""
    row = PARAMETERS[key]
    text = parameters.get(key, "")
    return row.check(what, text or row.default) if text or row.default else ""


def parameter_problems(parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The parameters of a model that cannot be used, and why."""
    values: dict[str, str] = {}
    for key in PARAMETERS:
        try:
            values[key] = value_of(parameters, key, "the value")
        except InvalidRequest as error:
            yield key, error.message
    if len(values) == len(PARAMETERS):
        yield from pool_conflict(values)


def pool_conflict(values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The checked parameters that need the pool of host memory although there is none, each with why it is wrong."""
    if values["enable_mem_arena"] == "1":
        return
    limit, shrinkage = values["cpu_mem_limit"], values[SHRINKAGE]
    if limit != "0":
        yield (
            "cpu_mem_limit",
            (
                f"parameter cpu_mem_limit {limit} limits the memory pool, which enable_mem_arena 0 turns off: remove "
                "one of the two"
            ),
        )
    if "cpu:" in shrinkage:
        text = f"parameter {SHRINKAGE} '{shrinkage}' shrinks the host memory pool, which enable_mem_arena 0 turns off"
        yield SHRINKAGE, text


def option_problems(accelerator: str, options: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The options of an accelerator that cannot be used, and why."""
    for key, text in options.items():
        try:
            if accelerator == "tensorrt":
                tensorrt_options({key: text})
            else:
                checked(accelerator, CUDA_OPTIONS if accelerator == "cuda" else {}, key, text)
        except InvalidRequest as error:
            yield key, error.message


def tensorrt_options(parameters: dict[str, str]) -> dict[str, str]:
    options = {}
    for key, text in parameters.items():
        if key == "precision_mode":
            name = _PRECISIONS.get(text.upper())
            if name is None:
                raise InvalidRequest(
                    f"tensorrt parameter precision_mode must be one of {', '.join(_PRECISIONS)}, not '{text}'"
                )
            if name:
                options[name] = "1"
            continue
        option = _RENAMED.get(key, key)
        if not option.startswith("trt_"):
            raise InvalidRequest(
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator; it has precision_mode, "
                f"{', '.join(_RENAMED)} and those of the provider, which begin with trt_"
            )
        options[option] = checked("tensorrt", TENSORRT_OPTIONS, option, text, key)
    return options


def checked(accelerator: str, table: dict[str, Check], key: str, text: str, label: str = "") -> str:
    """Checks an option. Options newer than this table are passed on unchecked."""
    refuse_address(accelerator, key)
    return table.get(key, as_it_is)(f"{accelerator} parameter {label or key}", text)


def refuse_address(accelerator: str, key: str) -> None:
    if key == "device_id" and accelerator in ONNX_ON_GPU:
        raise InvalidRequest(
            f"{accelerator} parameter device_id cannot be given: `gpus` of the instance_group says the device"
        )
    if any(part in key for part in _ADDRESSES):
        raise InvalidRequest(f"{accelerator} parameter {key} cannot be given: it is an address in the process")


def typos(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Parameters that are likely typos, with a note. Unknown parameters are not errors, because they may be for other
    components."""
    for key in names:
        if key not in PARAMETERS and not key.startswith(ENTRIES):
            near = difflib.get_close_matches(key, PARAMETERS, 1, 0.8)
            if near:
                yield key, f"unknown to onnxruntime; did you mean '{near[0]}'?"
