"""The models that there are: what was found in the repositories, and what workers completed it to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from shmserve.core.events import Deploy, Event, Refuse, Target
from shmserve.core.policy import ModelPolicy
from shmserve.errors import InvalidRequest, NotFound
from shmserve.messages import Load
from shmserve.repo.compile import Cores, compile_instances, compile_policy
from shmserve.repo.load import verify
from shmserve.repo.schema import ModelConfig, decode_config, encode_config
from shmserve.repo.store import BACKENDS, Found, scan


def backends() -> set[str]:
    """Those that come with us, and those that other packages bring by entry points."""
    return {*BACKENDS, *(entry.name for entry in entry_points(group="shmserve.backends"))}


class Catalog:
    def __init__(self, repositories: Sequence[Path], settings: dict[str, str], cores: Cores) -> None:
        """`settings` go to the workers; `cores` are divided among them."""
        self._cores = cores
        self._repositories = repositories
        self._settings = settings
        self._backends = backends()
        self._found: dict[str, Found] = {}
        self._completed: dict[tuple[str, int], ModelConfig] = {}

    def scan(self) -> tuple[list[Event], list[str]]:
        """What is to be deployed, and warnings."""
        events: list[Event] = []
        warnings: list[str] = []
        for found in scan(self._repositories, backends=self._backends):
            self._found[found.name] = found
            warnings += [f"model '{found.name}': {warning}" for warning in found.warnings]
            if found.problems or found.config is None:
                reason = "; ".join(found.problems) or "it has no configuration"
                for version in found.versions or (0,):
                    events.append((0, Refuse(found.name, version, reason)))
                warnings.append(f"model '{found.name}' is not served: {reason}")
                continue
            instances = compile_instances(found.config, self._cores)
            targets = tuple(Target(version, 0, instances) for version in found.versions)
            events.append((0, Deploy(found.name, targets)))
        return events, warnings

    def load_order(self, peer: int, model: str, version: int, instance: str) -> tuple[Load, int]:
        """The Load for a new worker, and the descriptor that goes with it, which the caller closes."""
        found = self._found[model]
        assert found.config is not None
        load = Load(peer, model, version, instance, str(found.path), self._settings)
        return load, config_descriptor(found.config)

    def complete(self, model: str, version: int, data: bytes) -> ModelPolicy:
        """Takes what a worker has completed the configuration to."""
        config = verify(decode_config(data), backends=self._backends)
        if config.name != model:
            raise InvalidRequest(f"the model has changed its own name to '{config.name}', which it may not")
        policy = compile_policy(config, version)
        self._completed[model, version] = config
        return policy

    def config(self, model: str, version: int) -> ModelConfig:
        config = self._completed.get((model, version))
        if config is None:
            raise NotFound(f"the configuration of model '{model}' version {version} is known when it has loaded")
        return config


def config_descriptor(config: ModelConfig) -> int:
    """A memfd with the configuration: it may be larger than any message."""
    descriptor = os.memfd_create("shmserve-config", os.MFD_CLOEXEC)
    os.pwrite(descriptor, encode_config(config), 0)
    return descriptor


def read_descriptor(descriptor: int, limit: int = 4 << 20) -> bytes:
    """All of a memfd that a worker has sent, and closes it."""
    try:
        return os.pread(descriptor, limit, 0)
    finally:
        os.close(descriptor)
