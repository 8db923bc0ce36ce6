"""The core's record of a client, and of a worker that is a client because its model calls others."""

from __future__ import annotations

from msgspec import Struct

from shmserve.protocol.messages import OWNER_SHIFT, Handle


class ClientState(Struct, eq=False):
    """`outputs` is how it receives large outputs: memfd, posix or frames; empty until it has sent Hello.

    Outputs are placed for its `audience`: the users who may map them. `roles` are bits of shmserve.protocol.roles, set
    from Hello until it is disconnected (`disconnecting`). Its connection counts for its `user`.
    """

    number: int
    audience: str
    plane: str
    outputs: str = ""
    name: str = ""
    requests: dict[int, int] = {}
    """Client-side number of each request in flight -> the broker's number."""
    steps: int = 0
    """Requests of steps of its ensembles."""
    bytes: int = 0
    """Bytes inside the messages of its requests in flight, including steps."""
    input_bytes: int = 0
    """Bytes of shared memory that its requests refer to as inputs, until no worker reads them any more."""
    segments: set[int] = set()
    mapped: set[int] = set()
    holds: set[tuple[int, int]] = set()
    held_bytes: int = 0
    gone: bool = False
    reclaiming: bool = False
    user: str = ""
    granted: int = 0
    roles: int = 0
    disconnecting: bool = False
    denied: bool = False
    leases: bool = False
    """It accepts leases."""
    keeps: bool = False
    """It accepts ReplyHeld."""
    error_level: int = 0
    """Level of its token bucket of protocol errors, as a time: each error advances it by 1 s / client_errors."""

    def has_placed(self, handle: Handle) -> bool:
        """Was this output placed in the client's own memory, as it requested? Such outputs are not holds."""
        return handle.segment >> OWNER_SHIFT == self.number


class CallingWorker(ClientState, eq=False):
    """A worker that calls other models, with the peer number of its process. It cannot choose where outputs are placed,
    so it holds all of them, even those that its own process has written."""

    waits_for: int = 0
    """Calls that block the instance."""
    since: int = 0
    """Since when it has been blocked."""

    def has_placed(self, handle: Handle) -> bool:
        return False
