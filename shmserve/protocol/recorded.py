"""The records of `record`, the operation behind `shmserve trace`: arrays in the JSON of its answers.

Times are ns of the server's monotonic clock."""

from __future__ import annotations

from msgspec import Struct


class RecordedRequest(Struct, array_like=True, gc=False):
    """`number` is the broker's, `own` the client's. `parent`: the request for which this one, a step or a call of a
    model, was made; 0: a client made it. `gone`: its client had an answer, or had left, before the batch was done."""

    number: int
    client: int
    own: int
    id: str
    parent: int
    rows: int
    arrived: int
    gone: bool = False


class RecordedBatch(Struct, array_like=True, tag="batch"):
    """A batch that is done. `times`: ns at which the batch was taken, its inputs were ready, its outputs were computed,
    and its outputs were placed. `lease`: the number of the lease that its request came over, or 0."""

    model: str
    version: int
    instance: str
    number: int
    reason: str
    rows: int
    times: tuple[int, ...]
    answered: int
    lease: int
    requests: list[RecordedRequest]


class RecordedEnd(Struct, array_like=True, tag="end"):
    """The end of a request that failed, or that no batch answers. `kind`: queued (it did not reach a batch), cached,
    ensemble, stream or batch."""

    model: str
    version: int
    kind: str
    code: str
    ended: int
    request: RecordedRequest
