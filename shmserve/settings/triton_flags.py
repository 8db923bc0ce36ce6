"""Triton's flags without an equivalent here. Most are accepted, so that command lines can be reused, and the log says
what happens instead. A flag is refused if the server cannot do what it requests.
"""

from __future__ import annotations

from typing import Any

from shmserve.settings.flag import Flag


def _ignored(name: str, kind: str, metavar: str, note: str) -> Flag:
    return Flag(name, kind, metavar, f"no effect: {note}", note=note)


def _refused(name: str, note: str) -> Flag:
    return Flag(name, "boolean", "", f"true is refused: {note}", refused=note)


_THREADS = "gateways run event loops; --gateways N adds processes"
_NO_SAGEMAKER = "there is no SageMaker endpoint"
_NO_VERTEX = "there is no Vertex AI endpoint"
_MEMORY = (
    "--gpu-memory-budget limits the memory of all models on a GPU, --instance-gpu-memory-limit and a model's parameter "
    "gpu_memory_limit_mb that of an instance"
)

TRITON_FLAGS = (
    _ignored("http-thread-count", "integer", "N", _THREADS),
    _ignored("grpc-infer-thread-count", "integer", "N", _THREADS),
    _ignored("grpc-infer-allocation-pool-size", "integer", "N", "memory for parsed requests is always recycled"),
    _ignored(
        "grpc-max-response-pool-size",
        "integer",
        "N",
        "responses of a stream are queued until the caller reads them, up to --limit client_outbox_bytes",
    ),
    _ignored(
        "grpc-http2-max-pings-without-data", "integer", "N", "the number of keepalive pings does not depend on data"
    ),
    _ignored("buffer-manager-thread-count", "integer", "N", "each instance gathers its batches in its own process"),
    _ignored("enable-peer-access", "boolean", "", "tensors are copied between GPUs through the host"),
    _ignored("model-load-gpu-limit", "fraction", "DEVICE:FRACTION", _MEMORY),
    _ignored(
        "min-supported-compute-capability",
        "decimal",
        "X.Y",
        "if a GPU is too old for the engine, the engine reports it and the model fails to load",
    ),
    _ignored("cuda-virtual-address-size", "pool", "GPU:N", "GPU memory is allocated in blocks"),
    _refused(
        "allow-sagemaker",
        f"{_NO_SAGEMAKER}; serve HTTP with --http-port 8080 behind a proxy that maps /ping to /v2/health/ready and "
        "/invocations to /v2/models/MODEL/infer",
    ),
    _ignored("sagemaker-port", "integer", "N", _NO_SAGEMAKER),
    _ignored("sagemaker-safe-port-range", "text", "N-N", _NO_SAGEMAKER),
    _ignored("sagemaker-thread-count", "integer", "N", _NO_SAGEMAKER),
    _refused(
        "allow-vertex-ai",
        f"{_NO_VERTEX}; serve HTTP with --http-port 8080 and give the container the routes /v2/health/ready (health) "
        "and /v2/models/MODEL/infer (predict)",
    ),
    _ignored("vertex-ai-port", "integer", "N", _NO_VERTEX),
    _ignored("vertex-ai-thread-count", "integer", "N", _NO_VERTEX),
    _ignored("vertex-ai-default-model", "text", "MODEL", _NO_VERTEX),
)


def notes(values: dict[str, Any]) -> list[str]:
    """Lines for the log about flags that were set but have no effect."""
    noted = [flag for flag in TRITON_FLAGS if flag.note and values.get(flag.dest) is not None]
    return [f"--{flag.name} has no effect: {flag.note}" for flag in noted]


def refusals(values: dict[str, Any]) -> list[str]:
    """Errors for flags that were set to a value that the server refuses."""
    refused = [flag for flag in TRITON_FLAGS if flag.refused and values.get(flag.dest)]
    return [f"--{flag.name} true is not supported: {flag.refused}" for flag in refused]
