"""KServe's gRPC services for the proxies of Ray Serve, which pass each call to the ingress method of that name.

Invariant: messages stay bytes from the proxy to the server, so no process in between decodes a tensor.
"""

from __future__ import annotations

from typing import Any

import grpc

from shmserve.protocol.grpc.messages import HEALTH, INFERENCE, methods

STREAM = "ModelStreamInfer"
WATCH = "Watch"
SERVER_ONLY = frozenset(
    (
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryUnregister",
        "LogSettings",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryUnregister",
        "TraceSetting",
    )
)
"""Calls that concern one particular server, and so cannot go to any replica."""


class EncodedReply:
    """Encoded bytes in a form that Ray Serve accepts as a protobuf message."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


def paths() -> dict[str, str]:
    """Method -> path of each unary call."""
    results = {name: f"/{INFERENCE}/{name}" for name in methods(INFERENCE) if name != STREAM}
    return results | {name: f"/{HEALTH}/{name}" for name in methods(HEALTH) if name != WATCH}


def add_kserve_servicer_to_server(servicer: Any, server: Any) -> None:
    """For `grpc_servicer_functions` of Ray Serve. Ray replaces the handlers with its own."""
    for service in (INFERENCE, HEALTH):
        handlers = {name: _handler(servicer, name) for name in methods(service) if name != WATCH}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _handler(servicer: Any, name: str) -> Any:
    make = grpc.stream_stream_rpc_method_handler if name == STREAM else grpc.unary_unary_rpc_method_handler
    return make(getattr(servicer, name))
