"""What one worker's process is given beyond its place: how much memory, and which interpreter.

The rule of the file: values only; who keeps to them is elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from shmserve.repo.compile import environment, gpu_memory_limit, memory_limit
from shmserve.repo.config.schema import ModelConfig


class Terms(Struct, frozen=True):
    """`memory`: bytes at most; 0: as many as it likes. `environment`: where its interpreter is; "": the server's own.
    `unpacked`: where archives of interpreters are unpacked to. `gpu_memory`: as `memory`, on its GPU."""

    memory: int = 0
    environment: str = ""
    unpacked: str = ""
    gpu_memory: int = 0


NOTHING = Terms()


def terms_of(config: ModelConfig, folder: Path, given: Terms) -> Terms:
    """Those of a model; `given` for what it does not say itself."""
    own, on_gpu = memory_limit(config), gpu_memory_limit(config)
    return Terms(
        given.memory if own is None else own,
        environment(config, str(folder)),
        given.unpacked,
        given.gpu_memory if on_gpu is None else on_gpu,
    )
