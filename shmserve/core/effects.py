"""Effects: what the core asks the shell to do. The shell executes them in order and decides nothing."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.policy import InstanceSpec
from shmserve.protocol.messages import Ask, Cancel, Handle, Lease, Tensor
from shmserve.protocol.trace_context import TraceContext
from shmserve.protocol.worker_messages import Lend


class Send(Struct, gc=False):
    """Queue the message for this peer (client or worker). The shell adds the segment's descriptor to a Map."""

    peer: int
    message: Any


class Spawn(Struct):
    """Start a worker process for this instance; its peer number is `peer`. `source`: that of `events.Target`. `urgent`:
    requests wait for it, and nothing else serves them."""

    peer: int
    model: str
    version: int
    source: int
    instance: InstanceSpec
    urgent: bool = False


class Compose(Struct):
    """Check whether the models of an ensemble's steps, as currently served, are compatible. `source` identifies the
    ensemble, `number` this check; the response is an `events.Composed` with both."""

    source: int
    number: int


class Kill(Struct):
    """Kill this worker process now. The event Exited follows when it has ended."""

    peer: int
    reason: str


class StartLease(Struct):
    """Create the socket pair and the log of a lease. Send them with these messages to the client and to the worker."""

    client: int
    worker: int
    of_client: Lease
    of_worker: Lend


class ReadLease(Struct):
    """Read the log of this lease; LeaseRead follows. `final`: the worker has ended the lease, so remove the log."""

    lease: int
    final: bool = False


class Close(Struct):
    """Close this client's connection after its outbox has been sent."""

    peer: int


class Pause(Struct):
    """Stop reading from this client until that time (ns). Its messages stay queued."""

    peer: int
    until: int


class Free(Struct):
    """Free unused blocks of the broker's own arena."""

    handles: tuple[Handle, ...]


class Forget(Struct):
    """The segment no longer exists: close its descriptor."""

    segment: int


class Log(Struct):
    """A log entry for the operator. `level` is a level name of `logging`."""

    level: str
    text: str
    fields: dict[str, Any] | None = None
    """Structured fields: model, version, instance, client and more."""


class Traced(Struct):
    """A sampled request has been answered: write its trace.

    `times`: ns at which its batch was taken, its inputs were ready, its outputs computed and placed; empty if it has no
    completed batch. `log`: the log entry for the request's `trace_id`, if it has one. `timestamps`, `tensors`: what the
    trace settings ask for. `tensors` are its inputs and outputs, which are readable only during this turn. `number`:
    the number of the trace. `parent`: the trace number of the request on whose behalf this one was sent; 0 if a client
    sent it. `root`: the trace number of the client's request. `context`: the trace context of that request. `model`:
    the model whose trace settings apply.
    """

    fields: dict[str, Any]
    arrived: int
    times: tuple[int, ...]
    answered: int
    log: Log | None
    tensors: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    timestamps: bool = True
    number: int = 0
    parent: int = 0
    model: str = ""
    root: int = 0
    context: TraceContext | None = None


class Settled(Struct):
    """An operation (Deploy, Unload, Restart) has ended. `code` is that of its error, "" if it succeeded."""

    operation: int
    code: str = ""
    text: str = ""


class Query(Struct):
    """Answer a query about the server or its models, or start or cancel an operation."""

    peer: int
    ask: Ask | Cancel


class Drained(Struct):
    """No request is in flight and every worker has ended: the process may exit."""


Effect = (
    Send
    | Spawn
    | Pause
    | Compose
    | Kill
    | StartLease
    | ReadLease
    | Close
    | Free
    | Forget
    | Log
    | Traced
    | Settled
    | Query
    | Drained
)
