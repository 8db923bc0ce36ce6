"""Interfaces: between the transport of gRPC and its services, and between a connection and its listener.

The transport and a service call each other, without coroutines and on one thread. A call that comes too late has no
effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import InputBacklog
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import CallerShares, Payer
from shmserve.gateway.limits.turns import JobTurns
from shmserve.gateway.upstream.receive import Room
from shmserve.protocol.grpc.codes import RpcError


class TransportStream(Protocol):
    """A call, as the transport presents it to a service."""

    @property
    def path(self) -> str:
        """For example "/inference.GRPCInferenceService/ModelInfer"."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Names are in lower case; headers of the protocol are left out. Shared between streams: never modify it."""

    def payer(self, token: str) -> Payer:
        """The account charged for requests to the broker. `token`: name of the token of the call, or ""."""

    @property
    def writable(self) -> bool:
        """Whether the client reads what is sent to it. `ServiceCall.resume` is called when the client reads again."""

    def send(self, parts: Sequence[Buffer]) -> None:
        """Sends one message. The pieces are not copied and must not change."""

    def finish(self, code: int, text: str = "") -> None: ...

    def pause(self) -> None:
        """Suspends calls of `message` and `half_closed` until `unpause`; flow control slows the client down."""

    def unpause(self) -> None: ...


class Awaits(Enum):
    """What a call needs from its client before it can continue."""

    NOTHING = 0
    REQUEST = 1
    """The only request of the call: the read timeout applies."""
    NEXT_REQUEST = 2
    """The next request of a stream, which may stay idle for longer."""


class ServiceCall(Protocol):
    """A call, as a service presents it to the transport. RpcError raised by `message` or `half_closed` ends the
    stream."""

    @property
    def awaits(self) -> Awaits: ...

    def message(self, data: Buffer) -> None:
        """Receives one complete message. A buffer other than `bytes` is only valid until this method returns."""

    def room(self, size: int, first: Buffer) -> Room | None:
        """Returns memory for a large message of `size` bytes, of which `first` has arrived. `message` is then called
        with this memory. None: the transport chooses the memory. Must not raise."""

    def half_closed(self) -> None:
        """Called when the client sends no more messages."""

    def cancelled(self) -> None:
        """Called when the response is not needed any more, or cannot be sent. Also called after an RpcError."""

    def resume(self) -> None:
        """The stream is writable again."""


Application = Callable[[TransportStream], ServiceCall]
"""RpcError fails the call at once."""


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
    def shares(self) -> CallerShares: ...

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
