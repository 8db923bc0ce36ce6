"""Memory limits and interpreter of one worker process: values only, enforced elsewhere."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from shmserve.repo.compile import environment, gpu_memory_limit, memory_limit
from shmserve.repo.config.schema import ModelConfig


class Terms(Struct, frozen=True):
    """`memory`: limit in bytes; 0: no limit. `environment`: the interpreter's environment; "": the server's own.
    `unpacked`: directory for unpacked environment archives. `gpu_memory`: as `memory`, for its GPU."""

    memory: int = 0
    environment: str = ""
    unpacked: str = ""
    gpu_memory: int = 0


NOTHING = Terms()


def terms_of(config: ModelConfig, folder: Path, given: Terms, backend_folder: Path | None = None) -> Terms:
    """The terms of a model; `given` holds the defaults, `backend_folder` is that of a backend that is not built in."""
    own, on_gpu = memory_limit(config), gpu_memory_limit(config)
    return Terms(
        given.memory if own is None else own,
        environment(config, str(folder), backend_folder),
        given.unpacked,
        given.gpu_memory if on_gpu is None else on_gpu,
    )
