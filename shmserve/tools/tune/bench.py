"""The interface that tuning needs from a server: apply a configuration, and run a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from shmserve.repo.config.schema import ModelConfig


class Observation(Struct, frozen=True):
    """One measurement. Latencies are in ns; `latencies` is a sorted sample of them. `p99_ns`: median of the windows'
    p99; refused requests count as infinitely late. `batches` and `rows`: what the server has run during the
    measurement. `overloaded`: stopped early because the queue kept growing."""

    per_s: float
    """Responses per second."""
    seconds: float
    p50_ns: float
    p99_ns: float
    latencies: tuple[int, ...] = ()
    batches: int = 0
    rows: int = 0
    failed: int = 0
    error: str = ""
    """The text of the first error."""
    refused: int = 0
    """Number of requests that a limit rejected, such as max_queue_size or a queue timeout; not counted as failed."""
    refusal: str = ""
    """The text of the first refusal."""
    overloaded: bool = False
    late_ns: float = 0.0
    """Open loop: how late requests were sent, at the 99th percentile. Their latencies include it."""

    @property
    def mean_batch(self) -> float:
        return self.rows / self.batches if self.batches else 0.0


class Bench(Protocol):
    """A server with the model, and callers for it. All requests have the goal's number of rows, except where `rows` is
    given. `length` replaces the dims of -1; 0: drawn from the goal's range."""

    def apply(self, config: ModelConfig) -> None:
        """Serves the model with this configuration."""
        ...

    def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
        """Each caller sends its next request when the last one is answered. A caller whose request was refused sends no
        more."""
        ...

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        """`rate` requests per second at random times; latencies count from the intended time."""
        ...

    def memory(self) -> int:
        """Bytes of memory of the model's processes."""
        ...

    def gpu_memory(self) -> int:
        """Bytes of their memory on GPUs."""
        ...


class SharedBench(Protocol):
    """A server under the loads of several models at once."""

    def open(self, rates: Sequence[float], seconds: float, give_up_ns: Sequence[float]) -> Sequence[Observation]:
        """The loads of `Bench.open`, of each model one, together for as long as the slowest needs."""
        ...
