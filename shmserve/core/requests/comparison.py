"""The record of a request that is repeated at a shadow."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.records import Version
from shmserve.core.requests.client import ClientState
from shmserve.core.traffic import Shadow
from shmserve.protocol.messages import Fail, FailHeld, Part, Reply, Tensor


class Comparison(Struct, eq=False):
    """A request at a shadow. `answered_by`: the version that has answered the client. `keeper`: the client that keeps
    the inputs of its request `client_number`, if any of them are in its memory."""

    shadow: Shadow
    answered_by: Version
    expected: tuple[Tensor, ...]
    size: int
    keeper: ClientState | None
    client_number: int
    result: Reply | Part | Fail | FailHeld | None = None
