"""Converts `optimization.execution_accelerators` to execution providers of ONNX Runtime with their options.

Invariant: a requested provider is available or the load fails with advice on how to install it; there is no silent
fallback. Unknown options are passed to the engine, which checks them, except memory addresses, which are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.rules.optimization import ONNX_ON_CPU, ONNX_ON_GPU, accelerator_problem
from shmserve.workers.backends.parameters import Check, as_it_is, choice, flag, text_of, whole

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelOptimizationPolicyExecutionAcceleratorsAccelerator as Accelerator

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
XNNPACK = "XnnpackExecutionProvider"
DNNL = "DnnlExecutionProvider"

_ON_GPU = dict(zip(ONNX_ON_GPU, (TENSORRT, CUDA), strict=True))
_ON_CPU = dict(zip(ONNX_ON_CPU, (OPENVINO, XNNPACK, DNNL), strict=True))
_HOW = {
    CUDA: "pip install onnxruntime-gpu in place of onnxruntime",
    TENSORRT: "pip install onnxruntime-gpu in place of onnxruntime, and tensorrt",
    OPENVINO: "pip install onnxruntime-openvino in place of onnxruntime",
}
_BUILD = "it needs a build of onnxruntime that has it"

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


class Providers(Struct, frozen=True):
    """`intra_op` above 0: the number of threads for the engine itself, if the provider has its own pool."""

    listed: tuple[tuple[str, dict[str, str]], ...]
    required: tuple[str, ...] = ()
    captures: bool = False
    intra_op: int = 0


def gpu_providers(
    model: str,
    accelerators: Sequence[Accelerator],
    device: int,
    available: Collection[str],
    old: dict[str, str],
    required: bool,
) -> Providers:
    """`old`: CUDA options given as parameters of the model. CUDA is always listed, after other providers."""
    options = _given(model, accelerators, _ON_GPU)
    cuda = old | {key: _checked("cuda", CUDA_OPTIONS, key, text) for key, text in options.get("cuda", {}).items()}
    listed = [(CUDA, {"device_id": str(device)} | cuda)]
    if "tensorrt" in options:
        listed.insert(0, (TENSORRT, {"device_id": str(device)} | _tensorrt(options["tensorrt"])))
    names = tuple(name for name, _ in listed)
    _there(model, names, available, "instance_group kind KIND_GPU" if len(listed) == 1 else "it")
    captures = any(
        options.get(key) == "1" for _, options in listed for key in ("enable_cuda_graph", "trt_cuda_graph_enable")
    )
    return Providers((*listed, (CPU, {})), names if required else (), captures)


def cpu_providers(
    model: str, accelerators: Sequence[Accelerator], available: Collection[str], threads: int
) -> Providers:
    """`threads`: the CPU limit of this instance."""
    options = _given(model, accelerators, _ON_CPU)
    listed = []
    own_threads = 0
    for name, parameters in options.items():
        for key in parameters:
            _no_address(name, key)
        if name == "openvino":
            parameters = {"device_type": "CPU", "num_of_threads": str(threads)} | parameters
        elif name == "xnnpack":
            parameters = {"intra_op_num_threads": str(threads)} | parameters
            own_threads = 1  # two thread pools would compete for the same CPUs
        listed.append((_ON_CPU[name], parameters))
    names = tuple(name for name, _ in listed)
    _there(model, names, available, "it")
    return Providers((*listed, (CPU, {})), names, intra_op=own_threads)


def _given(model: str, accelerators: Sequence[Accelerator], known: dict[str, str]) -> dict[str, dict[str, str]]:
    requested: dict[str, dict[str, str]] = {}
    for accelerator in accelerators:
        if text := accelerator_problem(accelerator.name, known, requested):
            raise InvalidRequest(f"unable to load model '{model}': {text}")
        requested[accelerator.name.lower()] = accelerator.parameters
    return requested


def _there(model: str, names: Sequence[str], available: Collection[str], who: str) -> None:
    for name in names:
        if name not in available:
            has = ", ".join(entry for entry in available if entry != "AzureExecutionProvider")
            raise Unsupported(
                f"unable to load model '{model}': {who} needs {name}, and the onnxruntime that is installed has only "
                f"{has}: {_HOW.get(name, _BUILD)}"
            )


def lost(model: str, name: str) -> Unsupported:
    """The error for a provider that is installed but did not start."""
    libraries = {CUDA: "the libraries of CUDA and cuDNN", TENSORRT: "the libraries of TensorRT and CUDA"}
    return Unsupported(
        f"unable to load model '{model}': {name} did not start. It needs {libraries.get(name, 'its libraries')} of "
        "the version that this onnxruntime was built for, and a device; the log says what is missing"
    )


def _tensorrt(given: dict[str, str]) -> dict[str, str]:
    options = {}
    for key, text in given.items():
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
        options[option] = _checked("tensorrt", TENSORRT_OPTIONS, option, text, key)
    return options


def _checked(accelerator: str, table: dict[str, Check], key: str, text: str, label: str = "") -> str:
    """Checks an option. Options newer than this table are passed on unchecked."""
    _no_address(accelerator, key)
    return table.get(key, as_it_is)(f"{accelerator} parameter {label or key}", text)


def _no_address(accelerator: str, key: str) -> None:
    if key == "device_id" and accelerator in _ON_GPU:
        raise InvalidRequest(
            f"{accelerator} parameter device_id cannot be given: `gpus` of the instance_group says the device"
        )
    if any(part in key for part in _ADDRESSES):
        raise InvalidRequest(f"{accelerator} parameter {key} cannot be given: it is an address in the process")
