"""Interface between the transport of gRPC and its services. Either side calls the other, without coroutines and on one
thread. A call that comes too late has no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.upstream.receive import Room


class TransportStream(Protocol):
    """A call, as the transport presents it to a service."""

    @property
    def path(self) -> str:
        """For example "/inference.GRPCInferenceService/ModelInfer"."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Names in lower case, without those of the protocol. Shared between streams: never modify it."""

    def payer(self, token: str) -> Payer:
        """The account charged for requests to the broker. `token`: name of the token of the call, or ""."""

    @property
    def writable(self) -> bool:
        """Whether the client reads what it is sent. `ServiceCall.resume` is called when it reads again."""

    def send(self, parts: Sequence[Buffer]) -> None:
        """Sends one message. The pieces are not copied and must not change."""

    def finish(self, code: int, text: str = "") -> None: ...

    def pause(self) -> None:
        """Stops calls of `message` and `half_closed` until `unpause`; flow control slows the client down."""

    def unpause(self) -> None: ...


class Awaits(Enum):
    """What a call needs from its client before it can continue."""

    NOTHING = 0
    REQUEST = 1
    """The only request: the read timeout runs."""
    NEXT_REQUEST = 2
    """The next request of a stream, which may be idle for longer."""


class ServiceCall(Protocol):
    """A call, as a service presents it to the transport. RpcError of `message` and `half_closed` ends the stream."""

    @property
    def awaits(self) -> Awaits: ...

    def message(self, data: Buffer) -> None:
        """One complete message. A buffer other than `bytes` is valid until this returns."""

    def room(self, size: int, first: Buffer) -> Room | None:
        """Memory for a large message of `size` bytes, of which `first` have arrived; None: any memory. `message` is
        then called with this memory. Must not raise."""

    def half_closed(self) -> None:
        """The client sends no more messages."""

    def cancelled(self) -> None:
        """The response is not wanted any more, or cannot be sent. Also called after an RpcError."""

    def resume(self) -> None:
        """The stream is writable again."""


Application = Callable[[TransportStream], ServiceCall]
"""RpcError fails the call at once."""
