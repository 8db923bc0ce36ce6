"""The messages between the broker and the process that exports spans: MessagePack, in the packets of a socket pair."""

from __future__ import annotations

from msgspec import Struct


class SpanRecord(Struct, array_like=True, gc=False):
    """A traced request. `number`: of its trace, unique while the server runs. `parent`: the number of the trace of the
    request for which it was made, 0 for a client's; `root`: that of the client's request.

    `trace`, `caller` and `state`: the trace context that the client gave, or "". `times`: ns of the monotonic clock at
    which its batch was taken, its inputs were ready, its outputs computed and placed; empty if no batch has run."""

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

    @property
    def spans(self) -> int:
        """How many spans are made of it: the request, and with a batch the queue and the batch."""
        return 3 if self.times else 1


class ExportStatus(Struct, array_like=True):
    """Spans since the process was started: exported, refused by the collector or not delivered, and dropped because the
    queue was full."""

    exported: int = 0
    failed: int = 0
    dropped: int = 0
