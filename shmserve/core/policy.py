"""What the core knows of a model: frozen values, compiled from its configuration (`repo.compile`)."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class TimeoutAction(Enum):
    REJECT = "reject"
    DELAY = "delay"


class TensorSpec(Struct, frozen=True):
    """An input or output as callers see it. `dims` has no batch dimension; -1 is any size."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False


class QueuePolicy(Struct, frozen=True):
    """How long and how many may wait at one priority level. 0: no limit."""

    action: TimeoutAction = TimeoutAction.REJECT
    timeout_ns: int = 0
    allow_override: bool = False
    max_size: int = 0


class BatchPolicy(Struct, frozen=True):
    """Dynamic batching. `levels` 0: no priorities. Level 1 is the most urgent."""

    preferred: tuple[int, ...] = ()
    delay_ns: int = 0
    preserve_ordering: bool = False
    levels: int = 0
    default_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    level_policies: dict[int, QueuePolicy] = {}


class InstanceSpec(Struct, frozen=True):
    """One worker process. `cpus` empty: those of the broker. `threads`: how many an engine may use; 0: as it likes."""

    name: str
    kind: str = "KIND_CPU"
    device: int = 0
    cpus: tuple[int, ...] = ()
    passive: bool = False
    threads: int = 0


class ModelPolicy(Struct, frozen=True):
    """One version of one model. `max_batch` 0: tensors have no batch dimension. `batching` None: one at a time."""

    name: str
    version: int
    max_batch: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: BatchPolicy | None = None
    execution_limit_ns: int | None = None
    """A batch that takes longer hangs. None: the server's limit; 0: no limit."""
    retry: bool = True
    """Requests that lost their worker in a batch of many are run again, each alone, once."""
