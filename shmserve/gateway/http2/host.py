"""What all connections of HTTP/2 share, as one of them sees it. The rule of the file: types only."""

from __future__ import annotations

from typing import Protocol

from shmserve.gateway.http2.backlog import Backlog
from shmserve.gateway.http2.codes import RpcError
from shmserve.gateway.http2.limits import Limits
from shmserve.gateway.http2.seam import Application
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import Shares
from shmserve.gateway.limits.turns import Turns


class Expiring(Protocol):
    """A call with a deadline."""

    @property
    def expires(self) -> float | None: ...

    def fail(self, error: RpcError) -> None: ...


class Host(Protocol):
    """What all connections share."""

    @property
    def limits(self) -> Limits: ...

    @property
    def application(self) -> Application: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def shares(self) -> Shares: ...

    @property
    def backlog(self) -> Backlog: ...

    @property
    def turns(self) -> Turns: ...

    @property
    def turn(self) -> int:
        """Of the slow clock."""

    @property
    def stream_turns(self) -> int:
        """So many turns of it a stream of requests may be idle."""

    def now(self) -> float: ...

    def answered(self, code: int) -> None: ...

    def expire(self, stream: Expiring) -> None:
        """`stream.fail` is called when its time is over, unless `keep` comes first."""

    def keep(self, stream: Expiring) -> None: ...
