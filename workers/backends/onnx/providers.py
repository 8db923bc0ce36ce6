"""Converts `optimization.execution_accelerators` to execution providers of ONNX Runtime with their options.

Invariant: a requested provider is available or the load fails with advice on how to install it; there is no silent
fallback. Unknown options are passed to the engine, which checks them, except memory addresses, which are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.rules.onnx_options import (
    CUDA_OPTIONS,
    ONNX_ON_CPU,
    ONNX_ON_GPU,
    checked,
    refuse_address,
    tensorrt_options,
)
from shmserve.repo.rules.optimization import accelerator_problem

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


class Providers(Struct, frozen=True):
    """`intra_op` above 0: the number of threads for the engine itself, if the provider has its own pool."""

    listed: tuple[tuple[str, dict[str, str]], ...]
    required: tuple[str, ...]
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
    options = _options_of(model, accelerators, _ON_GPU)
    cuda = old | {key: checked("cuda", CUDA_OPTIONS, key, text) for key, text in options.get("cuda", {}).items()}
    listed = [(CUDA, {"device_id": str(device)} | cuda)]
    if "tensorrt" in options:
        listed.insert(0, (TENSORRT, {"device_id": str(device)} | tensorrt_options(options["tensorrt"])))
    names = tuple(name for name, _ in listed)
    _check_available(model, names, available, "instance_group kind KIND_GPU" if len(listed) == 1 else "it")
    captures = any(
        options.get(key) == "1" for _, options in listed for key in ("enable_cuda_graph", "trt_cuda_graph_enable")
    )
    return Providers((*listed, (CPU, {})), names if required else (), captures)


def cpu_providers(
    model: str, accelerators: Sequence[Accelerator], available: Collection[str], threads: int
) -> Providers:
    """`threads`: the CPU limit of this instance."""
    options = _options_of(model, accelerators, _ON_CPU)
    listed = []
    own_threads = 0
    for name, parameters in options.items():
        for key in parameters:
            refuse_address(name, key)
        if name == "openvino":
            parameters = {"device_type": "CPU", "num_of_threads": str(threads)} | parameters
        elif name == "xnnpack":
            parameters = {"intra_op_num_threads": str(threads)} | parameters
            own_threads = 1  # two thread pools would compete for the same CPUs
        listed.append((_ON_CPU[name], parameters))
    names = tuple(name for name, _ in listed)
    _check_available(model, names, available, "it")
    return Providers((*listed, (CPU, {})), names, intra_op=own_threads)


def _options_of(model: str, accelerators: Sequence[Accelerator], known: dict[str, str]) -> dict[str, dict[str, str]]:
    requested: dict[str, dict[str, str]] = {}
    for accelerator in accelerators:
        if text := accelerator_problem(accelerator.name, known, requested):
            raise InvalidRequest(f"unable to load model '{model}': {text}")
        requested[accelerator.name.lower()] = accelerator.parameters
    return requested


def _check_available(model: str, names: Sequence[str], available: Collection[str], who: str) -> None:
    for name in names:
        if name not in available:
            has = ", ".join(entry for entry in available if entry != "AzureExecutionProvider")
            raise Unsupported(
                f"unable to load model '{model}': {who} needs {name}, and the onnxruntime that is installed has only "
                f"{has}: {_HOW.get(name, _BUILD)}"
            )


def not_started(model: str, name: str) -> Unsupported:
    """The error for a provider that is installed but did not start."""
    libraries = {CUDA: "the libraries of CUDA and cuDNN", TENSORRT: "the libraries of TensorRT and CUDA"}
    return Unsupported(
        f"unable to load model '{model}': {name} did not start. It needs {libraries.get(name, 'its libraries')} of "
        "the version that this onnxruntime was built for, and a device; the log says what is missing"
    )
