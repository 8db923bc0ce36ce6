"""Triton's flags without an equivalent here. Most are accepted, so that command lines can be reused, and the log says
what happens instead. A flag is refused if the server cannot do what it requests.
"""

from __future__ import annotations

from typing import Any

from shmserve.broker.config.flag import Flag

TRITON = "Triton's flags without effect here"


def _ignored(name: str, kind: str, metavar: str, note: str) -> Flag:
    return Flag(name, kind, TRITON, f"no effect: {note}", None, metavar, note=note)


def _refused(name: str, note: str) -> Flag:
    return Flag(name, "boolean", TRITON, f"only false: {note}", None, refused=note)


_THREADS = "gateways run event loops; --gateways N adds processes"
_SAGEMAKER = ("no SageMaker endpoint; serve HTTP with --http-port 8080 behind a proxy that maps /ping to "
              "/v2/health/ready and /invocations to /v2/models/MODEL/infer")  # fmt: skip
_VERTEX = ("no Vertex AI endpoint; serve HTTP with --http-port 8080 and give the container the routes "
           "/v2/health/ready (health) and /v2/models/MODEL/infer (predict)")  # fmt: skip

TRITON_FLAGS = (
    _ignored("http-thread-count", "integer", "N", _THREADS),
    _ignored("grpc-infer-thread-count", "integer", "N", _THREADS),
    _ignored("grpc-infer-allocation-pool-size", "integer", "N", "memory for parsed requests is always recycled"),
    _ignored("grpc-max-response-pool-size", "integer", "N",
             "responses of a stream are queued until the caller reads them, up to --limit client_outbox_bytes"),
    _ignored("grpc-http2-max-pings-without-data", "integer", "N",
             "the number of keepalive pings does not depend on data"),
    _ignored("buffer-manager-thread-count", "integer", "N", "each instance gathers its batches in its own process"),
    _ignored("enable-peer-access", "boolean", "", "tensors are copied between GPUs through the host"),
    _ignored("model-load-gpu-limit", "fraction", "DEVICE:FRACTION",
             "--gpu-memory-budget limits the memory of all models on a GPU; --instance-gpu-memory-limit and a model's "
             "parameter gpu_memory_limit_mb that of an instance"),
    _ignored("min-supported-compute-capability", "decimal", "X.Y",
             "if a GPU is too old for the engine, the engine reports it and the model fails to load"),
    _ignored("cuda-virtual-address-size", "pool", "GPU:N", "GPU memory is allocated in blocks"),
    _ignored("cache-directory", "text", "DIR", "the response cache is built in (--cache-config local,size=BYTES)"),
    _refused("allow-sagemaker", _SAGEMAKER),
    _ignored("sagemaker-port", "integer", "N", "no SageMaker endpoint"),
    _ignored("sagemaker-safe-port-range", "text", "N-N", "no SageMaker endpoint"),
    _ignored("sagemaker-thread-count", "integer", "N", "no SageMaker endpoint"),
    _refused("allow-vertex-ai", _VERTEX),
    _ignored("vertex-ai-port", "integer", "N", "no Vertex AI endpoint"),
    _ignored("vertex-ai-thread-count", "integer", "N", "no Vertex AI endpoint"),
    _ignored("vertex-ai-default-model", "text", "MODEL", "no Vertex AI endpoint"),
)  # fmt: skip


def fraction(text: str) -> tuple[int, float]:
    """Parses DEVICE:FRACTION. Raises ValueError."""
    device, _, share = text.partition(":")
    try:
        if device.isascii() and device.isdecimal() and 0 <= float(share) <= 1:
            return int(device), float(share)
    except ValueError:
        pass
    raise ValueError(f"found '{text}', expected DEVICE:FRACTION, as in 0:0.9")


def decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number") from None


def notes(values: dict[str, Any]) -> list[str]:
    """Log lines for flags that were given but have no effect."""
    given = [flag for flag in TRITON_FLAGS if flag.note and values.get(flag.dest) is not None]
    return [f"--{flag.name} has no effect: {flag.note}" for flag in given]


def refusals(values: dict[str, Any]) -> list[str]:
    given = [flag for flag in TRITON_FLAGS if flag.refused and values.get(flag.dest)]
    return [f"--{flag.name} true is not supported: {flag.refused}" for flag in given]
