"""The listener's interface for its HTTP/2 connections. Types only."""

from __future__ import annotations

from typing import Protocol

from shmserve.gateway.http2.interface import Application
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.limits.backlog import InputBacklog
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import Shares
from shmserve.gateway.limits.turns import JobTurns
from shmserve.protocol.grpc.codes import RpcError


class Expiring(Protocol):
    """A call with a deadline."""

    @property
    def expires(self) -> float | None: ...

    def fail(self, error: RpcError) -> None: ...


class Http2Host(Protocol):
    """State and functions that all connections of a listener share."""

    @property
    def limits(self) -> Http2Limits: ...

    @property
    def application(self) -> Application: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def shares(self) -> Shares: ...

    @property
    def backlog(self) -> InputBacklog: ...

    @property
    def turns(self) -> JobTurns: ...

    @property
    def turn(self) -> int:
        """Turn of the slow clock."""

    @property
    def stream_turns(self) -> int:
        """Turns of the slow clock that a stream of requests may be idle."""

    def now(self) -> float: ...

    def answered(self, code: int) -> None: ...

    def expire(self, stream: Expiring) -> None:
        """Calls `stream.fail` at its deadline, unless `keep` is called first."""

    def keep(self, stream: Expiring) -> None: ...
