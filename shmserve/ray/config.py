"""The settings of a server on a node, and of the Ray Serve application."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmserve.errors import InvalidRequest
from shmserve.paths import python
from shmserve.repo.storage.model_files import is_model_path

REVISION = "{revision}"
_ENDPOINTS = ("--http-port", "0", "--grpc-port", "0", "--allow-metrics", "false")
_ONE_CALLER = ("--limit", "caller_share=1")
"""The replica may use all shares, since it sends all requests that arrive over the network."""


class ServerConfig(msgspec.Struct, frozen=True):
    """`models`: repositories, files, or addresses of remote repositories. `options`: flags of `shmserve serve`.
    `gateway`: listen for HTTP and gRPC on free ports of 127.0.0.1.
    """

    models: tuple[str, ...]
    options: tuple[str, ...] = ()
    gateway: bool = False

    def command(self, runtime_dir: Path) -> list[str]:
        words = [*python(), "-m", "shmserve.broker.main", "--runtime-dir", str(runtime_dir)]
        for model in self.models:
            words += [model] if is_model_path(Path(model)) else ["--model-repository", model]
        words += [*_ENDPOINTS, *_ONE_CALLER] if self.gateway else ["--no-gateway"]
        return [*words, *self.options]


class AppConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `shmserve.ray:app`; docs/ray.md describes them."""

    models: str | tuple[str, ...]
    revision: str = ""
    options: str | tuple[str, ...] = ()
    replicas: int = 0
    max_replicas: int = 0
    queue_ms: float = 50.0
    autoscaling: dict[str, Any] = {}
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = {}
    multiplexed: bool = False
    retries: int = 3
    max_ongoing_requests: int = 1000
    max_input_bytes: int = 64 << 20
    health_seconds: float = 2.0
    start_seconds: float = 600.0
    drain_seconds: float = 60.0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> AppConfig:
        """Builds it from the arguments of `serve run` (all text) or of a Serve configuration file."""
        try:
            config = msgspec.convert(dict(arguments), cls, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"invalid argument of shmserve.ray:app: {error}") from None
        if not config.repositories:
            raise InvalidRequest("invalid argument of shmserve.ray:app: 'models' names no repository")
        if config.max_replicas and config.max_replicas < config.replicas:
            raise InvalidRequest(
                f"invalid argument of shmserve.ray:app: max_replicas={config.max_replicas} is below "
                f"replicas={config.replicas}"
            )
        return config

    @property
    def repositories(self) -> tuple[str, ...]:
        """The repositories, with `{revision}` replaced by the revision."""
        named = (self.models,) if isinstance(self.models, str) else self.models
        return tuple(model.replace(REVISION, self.revision) for model in named if model)

    @property
    def autoscaled(self) -> bool:
        return self.max_replicas > 0

    def server(self) -> ServerConfig:
        options = tuple(shlex.split(self.options)) if isinstance(self.options, str) else self.options
        if self.multiplexed:
            options = ("--model-control-mode", "explicit", "--strict-readiness", "false", *options)
        return ServerConfig(self.repositories, options, gateway=True)
