"""The messages between the broker and the process that exports spans: MessagePack in packets of a socket pair."""

from __future__ import annotations

from msgspec import Struct


class SpanRecord(Struct, array_like=True, gc=False):
    """A traced request. `number` identifies its trace while the server runs. `parent`: the number of the request that
    caused it, 0 for a request of a client. `root`: the number of the client's request.

    `trace`, `caller` and `state`: the trace context of the client, or "". `times` (ns of the monotonic clock): when its
    batch was taken, its inputs were ready, its outputs were computed, and its outputs were placed; empty if no batch
    ran."""

    number: int
    parent: int
    root: int
    trace: str
    caller: str
    state: str
    kind: str
    model: str
    version: int
    id: str
    client: int
    rows: int
    code: str
    arrived: int
    answered: int
    times: tuple[int, ...]
    instance: str
    batch: int
    batch_rows: int
    reason: str
    lease: int

    def spans(self, names: str) -> int:
        """The number of its spans: request and, if a batch ran, queue and batch. With Triton's names, a request of a
        client has one more, and none has a queue."""
        if names == "triton":
            return 1 + (not self.parent) + bool(self.times)
        return 3 if self.times else 1


class ExportStatus(Struct, array_like=True):
    """Numbers of spans since the process started: exported, failed (rejected by the collector or not delivered), and
    dropped because the queue was full."""

    exported: int = 0
    failed: int = 0
    dropped: int = 0
