"""Values for one worker process: its memory limits and its interpreter."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from shmserve.repo.compile import environment
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.parameters import GPU_MEMORY_LIMIT, MEMORY_LIMIT


class WorkerResources(Struct, frozen=True):
    """`memory` and `gpu_memory`: limits in bytes on the host and on its GPU; 0: no limit. `environment`: the
    interpreter's environment; "": the server's own. `unpacked`: directory for unpacked environment archives."""

    memory: int = 0
    environment: str = ""
    unpacked: str = ""
    gpu_memory: int = 0


DEFAULTS = WorkerResources()


def resources_of(
    config: ModelConfig, folder: Path, defaults: WorkerResources, backend_folder: Path | None = None
) -> WorkerResources:
    """The resources of a worker of this model. `backend_folder`: directory of its backend, if not built in."""
    own, on_gpu = MEMORY_LIMIT.read(config), GPU_MEMORY_LIMIT.read(config)
    return WorkerResources(
        defaults.memory if own is None else own,
        environment(config, str(folder), backend_folder),
        defaults.unpacked,
        defaults.gpu_memory if on_gpu is None else on_gpu,
    )
