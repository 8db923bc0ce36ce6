"""Tickets for requests of ZeroMQ clients, and the checks of their tensors. Invariant: tensors have no handles, since no
memory is shared over TCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from shmserve.errors import InvalidRequest, ServeError
from shmserve.gateway.kserve.answers import Buffer, Held
from shmserve.gateway.upstream.requests import PendingCall, PendingStream
from shmserve.protocol.messages import Ask, Infer, Reply, Tensor
from shmserve.session.encode import TopK


class ZmqLimits(Struct, frozen=True):
    """Limits of the ZeroMQ endpoint."""

    input_bytes: int = 64 << 20
    """Maximum size of the inputs of one request, and of the body of one operation."""
    unsent_bytes: int = 64 << 20
    connections: int = 1024
    key_connections: int = 256


class Recipient(Protocol):
    """Receives replies, parts and errors."""

    def answered(self, ticket: PeerRequest | PeerStream, answer: Reply | Held) -> None: ...

    def query_answered(self, ticket: PeerQuery, answer: Any) -> None: ...

    def part(self, ticket: PeerStream, answer: Reply | Held | None, last: bool) -> None: ...

    def failed(self, ticket: PeerRequest | PeerStream, error: ServeError) -> None: ...


class PeerRequest(PendingCall):
    """A request of a peer with one reply."""

    __slots__ = ("peer", "request")

    def __init__(self, peer: Recipient, request: int) -> None:
        self.peer = peer
        self.request = request

    def settle(self, answer: Any) -> None:
        self.peer.answered(self, answer)

    def fail(self, error: ServeError) -> None:
        self.peer.failed(self, error)


class PeerQuery(PeerRequest):
    __slots__ = ("what",)

    def __init__(self, peer: Recipient, ask: Ask) -> None:
        super().__init__(peer, ask.request)
        self.what = ask.what

    def settle(self, answer: Any) -> None:
        self.peer.query_answered(self, answer)


class PeerStream(PendingStream):
    """A request of a peer that is answered in parts. Parts are passed on as they arrive, since the client itself asks
    for more."""

    __slots__ = ("peer", "request")

    def __init__(self, peer: Recipient, request: int, window: int) -> None:
        super().__init__(window)
        self.peer = peer
        self.request = request

    def part(self, result: Any, last: bool) -> None:
        self.begun = True
        self.ended = last
        self.peer.part(self, result, last)

    def settle(self, answer: Any) -> None:
        self.ended = True
        self.peer.answered(self, answer)

    def fail(self, error: ServeError) -> None:
        self.peer.failed(self, error)


def piece_of(tensor: Tensor, frames: Sequence[Buffer]) -> Buffer:
    data = tensor.data
    if isinstance(data, bytes):
        return data
    if isinstance(data, tuple):
        raise InvalidRequest(f"input '{tensor.name}' is in shared memory, which is not supported over tcp: send frames")
    if not 0 <= data < len(frames):
        raise InvalidRequest(f"input '{tensor.name}' refers to frame {data}, but the message has {len(frames)} frames")
    return frames[data]


def outputs_of(infer: Infer) -> dict[str, TopK | None] | None:
    if infer.outputs is None:
        return None
    outputs: dict[str, TopK | None] = {}
    for wanted in infer.outputs:
        if wanted.place is not None:
            raise InvalidRequest(
                f"output '{wanted.name}' is requested in shared memory, which is not supported over tcp"
            )
        if wanted.name in outputs:
            raise InvalidRequest(f"output '{wanted.name}' is requested twice")
        outputs[wanted.name] = TopK(wanted.classes) if wanted.classes else None
    return outputs
