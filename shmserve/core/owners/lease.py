"""The record of a lease."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.records import ClientState, Instance, Payer, Version
from shmserve.protocol.messages import Failure


class Lease(Struct, eq=False):
    """An idle instance, lent to a client that sends one request at a time. The core sends nothing else to the instance
    until the worker has ended the lease."""

    number: int
    client: ClientState
    payer: Payer
    """Who pays for all requests over the lease, as their log does not say so."""
    version: Version
    instance: Instance
    default: bool
    """The lease also serves requests that name no version."""
    revoked: bool = False
    served: int = 0
    recorded: int = 0
    """When the last request in its log arrived."""
    resumed: int = 0
    """When its worker last resumed after calls to other models. The execution limit excludes these calls, so it applies
    from then on."""
    error: Failure | None = None
    """The error of the request that its worker was running when it died; None: the client may send it again."""
