"""What stands between the transport of gRPC and its services. The rule of the file: no coroutine, one thread; either
side calls the other, and a call that comes too late does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.upstream.receive import Room


class Stream(Protocol):
    """One call of a caller, as its connection gives it to a service."""

    @property
    def path(self) -> str:
        """As in "/inference.GRPCInferenceService/ModelInfer"."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Names in lower case, without those of the protocol; shared between streams, so never changed."""

    @property
    def expires(self) -> float | None:
        """On the clock of the loop. The transport itself ends the stream then."""

    @property
    def peer(self) -> str:
        """For logs."""

    def payer(self, token: str) -> Payer:
        """Who is charged for what this call asks the broker. `token`: the name of the one that came with it, or ""."""

    @property
    def writable(self) -> bool:
        """Whether the caller takes what he is sent. `Call.resume` says when he does again."""

    def send(self, parts: Sequence[Buffer]) -> None:
        """One message, in pieces of bytes that are not copied and must not change."""

    def finish(self, code: int, text: str = "") -> None: ...

    def pause(self) -> None:
        """No `message` and no `half_closed` until `unpause`; the caller is slowed down."""

    def unpause(self) -> None: ...


class Awaits(Enum):
    """What a call has to get from its caller before anything happens."""

    NOTHING = 0
    REQUEST = 1
    """The only one: the read timeout runs."""
    NEXT_REQUEST = 2
    """Of a stream, which may be idle for longer."""


class Call(Protocol):
    """The same, as a service sees it. RpcError of `message` and `half_closed` ends the stream."""

    @property
    def awaits(self) -> Awaits: ...

    def message(self, data: Buffer) -> None:
        """One whole message of the caller; what is no `bytes` is valid until this returns."""

    def room(self, size: int, first: Buffer) -> Room | None:
        """Where a large message of so many bytes is to be read to, `first` of which are here; None: anywhere. `message`
        is given the memory of this then. Raises nothing."""

    def half_closed(self) -> None:
        """The caller sends no more."""

    def cancelled(self) -> None:
        """No answer is wanted any more, or none can be given: it comes after an RpcError, too."""

    def resume(self) -> None:
        """The stream is writable again."""


Application = Callable[[Stream], Call]
"""RpcError: answered at once."""
