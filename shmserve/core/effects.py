"""Effects: what the core asks the shell to do. The shell executes them in order and decides nothing."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.policy import InstanceSpec
from shmserve.protocol.messages import Ask, Cancel, Handle, Tensor


class Send(Struct, gc=False):
    """Queue the message for this peer (client or worker). A Map is sent with its descriptor."""

    peer: int
    message: Any


class Spawn(Struct):
    """Start a worker process for this instance; its peer number is `peer`."""

    peer: int
    model: str
    version: int
    source: int
    instance: InstanceSpec


class Compose(Struct):
    """Check whether the models of this ensemble's steps, as currently served, are compatible. Composed is the
    response."""

    source: int
    number: int


class Kill(Struct):
    """Kill this worker process now. Exited follows when it has ended."""

    peer: int
    reason: str


class Close(Struct):
    """Close this client's connection after its outbox has been sent."""

    peer: int


class Pause(Struct):
    """Read nothing from this client before that time; its messages stay queued."""

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
    """A sampled request has been answered. `times`: when its batch was taken, ready, computed and placed, if it had
    one. `log`: the record that its caller asked for. `tensors`: its inputs and outputs, readable during this turn;
    None: not wanted. `number`: of the trace, from 1 in order of arrival; `parent`: the trace of the request for which
    this one was made, 0 for a client's request; `model`: the model whose trace settings apply."""

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


class Settled(Struct):
    """An operation (Deploy, Unload, Restart) has completed. `code` "": successfully."""

    operation: int
    code: str = ""
    text: str = ""


class Query(Struct):
    """Answer this query about the server or its models, or handle this operation or its cancellation."""

    peer: int
    ask: Ask | Cancel


class Drained(Struct):
    """No request is in flight and every worker has ended: the process may exit."""


Effect = Send | Spawn | Pause | Compose | Kill | Close | Free | Forget | Log | Traced | Settled | Query | Drained
