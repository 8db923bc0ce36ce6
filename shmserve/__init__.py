"""shmserve: an inference server for one machine.

    import shmserve

    with shmserve.Client() as c:
        y = c.infer("mlp", {"x": x})["y"]

Invariant: importing this package imports nothing else. Names are resolved at first use, so that workers never load the
clients.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Client": "shmserve.clients.client",
    "Future": "shmserve.clients.future",
    "AsyncClient": "shmserve.clients.async_client",
    "Stream": "shmserve.clients.streams",
    "AsyncStream": "shmserve.clients.streams",
    "Raw": "shmserve.session",
    "Result": "shmserve.session",
    "TopK": "shmserve.session.encode",
    "ClassResult": "shmserve.session.decode",
    "parse_class": "shmserve.session.decode",
    "Tensor": "shmserve.functions",
    "model": "shmserve.functions",
    **dict.fromkeys(
        (
            "AlreadyExists",
            "Cancelled",
            "ConnectionLost",
            "DeadlineExceeded",
            "Denied",
            "HandleLost",
            "Internal",
            "InvalidRequest",
            "ModelFailed",
            "NotFound",
            "ProtocolError",
            "QueueTimeout",
            "ServeError",
            "Unavailable",
            "UnknownError",
            "Unsupported",
        ),
        "shmserve.errors",
    ),
}

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "ClassResult",
    "Client",
    "ConnectionLost",
    "DeadlineExceeded",
    "Denied",
    "Future",
    "HandleLost",
    "Internal",
    "InvalidRequest",
    "ModelFailed",
    "NotFound",
    "ProtocolError",
    "QueueTimeout",
    "Raw",
    "Result",
    "ServeError",
    "Stream",
    "Tensor",
    "TopK",
    "Unavailable",
    "UnknownError",
    "Unsupported",
    "__version__",
    "model",
    "parse_class",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
    elif name == "__version__":
        value = importlib.import_module("shmserve.version").version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from shmserve.clients.async_client import AsyncClient
    from shmserve.clients.client import Client
    from shmserve.clients.future import Future
    from shmserve.clients.streams import AsyncStream, Stream
    from shmserve.errors import (
        AlreadyExists,
        Cancelled,
        ConnectionLost,
        DeadlineExceeded,
        Denied,
        HandleLost,
        Internal,
        InvalidRequest,
        ModelFailed,
        NotFound,
        ProtocolError,
        QueueTimeout,
        ServeError,
        Unavailable,
        UnknownError,
        Unsupported,
    )
    from shmserve.functions import Tensor, model
    from shmserve.session import Raw, Result
    from shmserve.session.decode import ClassResult, parse_class
    from shmserve.session.encode import TopK

    __version__: str
