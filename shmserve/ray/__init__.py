"""shmserve on Ray (the extra `ray`): every node runs a complete server, and Ray chooses the nodes.

Online, `serve_app.app` builds a Ray Serve application of two deployments: `replica` owns the server of its node
(`node_server`), and `ingress` receives KServe requests over HTTP and gRPC and passes each to a replica that `routing`
chooses. Python programs call replicas through `handle`. Offline, `predictor` runs a model in
`ray.data.Dataset.map_batches`; the actors of a node share a server.

`host` is the process between the owners and their server. It stops the server when the last owner has ended, even if
that owner was killed.

Invariant: importing this package does not import ray, and nothing else of shmserve imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AppConfig": "shmserve.ray.config",
    "Handle": "shmserve.ray.handle",
    "Predictor": "shmserve.ray.predictor",
    "QueueTimePolicy": "shmserve.ray.autoscaling",
    "add_kserve_servicer_to_server": "shmserve.ray.grpc_services",
    "app": "shmserve.ray.serve_app",
}

__all__ = ["AppConfig", "Handle", "Predictor", "QueueTimePolicy", "add_kserve_servicer_to_server", "app"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shmserve.extras import install_command, outdated

    if old := outdated("ray"):
        raise ImportError(f"shmserve.ray cannot be used: {old}")
    try:
        result = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(f"shmserve.ray needs Ray: {install_command('ray')}", name=error.name) from error
    globals()[name] = result
    return result


if TYPE_CHECKING:
    from shmserve.ray.autoscaling import QueueTimePolicy
    from shmserve.ray.config import AppConfig
    from shmserve.ray.grpc_services import add_kserve_servicer_to_server
    from shmserve.ray.handle import Handle
    from shmserve.ray.predictor import Predictor
    from shmserve.ray.serve_app import app
