"""What the core wants done. The shell carries effects out in their order and decides nothing."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.policy import InstanceSpec
from shmserve.protocol.messages import Ask, Cancel, Handle, Tensor


class Send(Struct, gc=False):
    """Put the message into the outbox of that peer (client or worker). A Map carries its descriptor with it."""

    peer: int
    message: Any


class Spawn(Struct):
    """Start a worker process for this instance; it is known as `peer` from now on."""

    peer: int
    model: str
    version: int
    source: int
    instance: InstanceSpec


class Compose(Struct):
    """Look whether the models of this ensemble's steps, as they are served now, fit together. Composed follows."""

    source: int
    number: int


class Kill(Struct):
    """End this worker process now. Exited follows when it has gone."""

    peer: int
    reason: str


class Close(Struct):
    """End this client's connection, after what is in its outbox."""

    peer: int


class Pause(Struct):
    """Hear nothing of this client before that time; what it sends meanwhile waits."""

    peer: int
    until: int


class Free(Struct):
    """Blocks of the broker's own arena that nobody needs any more."""

    handles: tuple[Handle, ...]


class Forget(Struct):
    """The segment has gone: close its descriptor."""

    segment: int


class Log(Struct):
    """For the operator. `level` is a name of logging's."""

    level: str
    text: str
    fields: dict[str, Any] | None = None
    """What the text is about, for programs: model, version, instance, client and more."""


class Traced(Struct):
    """A request of a sample has been answered. `times`: when its batch was taken, ready, computed and placed, if it had
    one; `log`: its caller has asked for a record too. `tensors`: those it was asked with, and those it was answered
    with, which can be read in this turn; None: they are not wanted. `number`: of the trace, from 1 in the order of
    arrival; `parent`: of the trace of the request for which this one was made, 0 for a client's; `model`: whose
    settings count."""

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
    """An operation (Deploy, Unload, Restart) is over. `code` "": it has succeeded."""

    operation: int
    code: str = ""
    text: str = ""


class Query(Struct):
    """Answer this question about the server or its models, or see to this operation, or to its cancellation."""

    peer: int
    ask: Ask | Cancel


class Drained(Struct):
    """Nothing is in flight and every worker has gone: the process may end."""


Effect = Send | Spawn | Pause | Compose | Kill | Close | Free | Forget | Log | Traced | Settled | Query | Drained
