"""State that the calls of a gRPC listener share."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from shmserve.errors import InvalidRequest, ServeError
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.header_forwarding import Forward, HeaderParameters
from shmserve.gateway.grpc.plans import RpcPlan, RpcPlans, plan_in_slices
from shmserve.gateway.grpc.wire import ResponseEncoder, tensor_at
from shmserve.gateway.http2.interface import TransportStream
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.status import grpc_of, grpc_text_of
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.turns import JobTurns, SlicedWork
from shmserve.gateway.upstream.documents import BadLoad
from shmserve.gateway.upstream.link import GatewayLink, Piece, partial_room
from shmserve.gateway.upstream.receive import Room
from shmserve.gateway.upstream.regions import Regions
from shmserve.gateway.upstream.requests import NO_TIME, ModelRequest, RequestSender
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.grpc.messages import HEALTH, INFERENCE
from shmserve.protocol.messages import INLINE_BYTES
from shmserve.session import Ticket
from shmserve.shm.extents.base import ALIGN

STOPPING = "the gateway is stopping"
WATCH_S = 1.0
"""Interval at which watched health is queried."""


class LongCall(Protocol):
    """A call that does not end by itself."""

    def stop(self) -> None:
        """Called when the gateway stops: requests in flight are answered, then the call ends."""


class HealthWatcher(Protocol):
    """A call that reports changes of the server's health."""

    def show(self, ready: bool) -> None: ...


class _HealthQuery(Ticket):
    __slots__ = ("_poll",)

    def __init__(self, poll: HealthPoll) -> None:
        self._poll = poll

    def settle(self, answer: Any) -> None:
        self._poll.take(bool(answer["ready"]))

    def fail(self, error: ServeError) -> None:
        self._poll.take(False)


class HealthPoll:
    """Queries the server's health while calls watch it, once for all of them. A watch is therefore not charged for its
    queries."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._watchers: dict[HealthWatcher, None] = {}
        self._ready: bool | None = None
        """The last answer; None: there is none yet."""
        self._query: _HealthQuery | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watcher: HealthWatcher) -> None:
        self._watchers[watcher] = None
        if self._ready is not None:
            watcher.show(self._ready)
        elif self._query is None:
            self._ask()

    def remove(self, watcher: HealthWatcher) -> None:
        self._watchers.pop(watcher, None)
        if self._watchers:
            return
        self._ready = None
        if self._query is not None:
            self._link.cancel(self._query)
            self._query = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self, ready: bool) -> None:
        self._ready, self._query = ready, None
        self._timer = self._link.bind().call_later(WATCH_S, self._ask)
        for watcher in list(self._watchers):
            watcher.show(ready)

    def _ask(self) -> None:
        self._timer = None
        self._query = _HealthQuery(self)
        self._link.session.ask(self._query, "ready", NO_TIME)
        self._link.send_soon()


class Services:
    """`forward`: selects the metadata that is passed on to models."""

    def __init__(
        self,
        link: GatewayLink,
        message_bytes: int,
        access: EndpointAccess,
        regions: Regions,
        forward: Forward | None = None,
    ) -> None:
        self.link = link
        self.sender = RequestSender(link, regions)
        self.answers = ResponseEncoder()
        self.plan = RpcPlans().plan
        self._message_bytes = message_bytes
        self.names = frozenset(("", INFERENCE, HEALTH))
        """Services whose health can be queried."""
        self.long_calls: set[LongCall] = set()
        """Health watches and streams of requests."""
        self.health = HealthPoll(link)
        self.decoupled: set[str] = set()
        """Models that are decoupled, as their responses have shown."""
        self.stopping = False
        self.access = access
        self._headers = HeaderParameters(forward, lambda: link.session.wants_trace_context)

    @property
    def turns(self) -> JobTurns:
        return self.link.turns

    def plan_in_slices(self, head: bytes) -> SlicedWork[RpcPlan]:
        """The typed contents are also copied to memory that workers can read."""
        plan = yield from plan_in_slices(head, self._message_bytes)
        inputs = yield from self.sender.placed_tensors(plan.plan.inputs)
        return replace(plan, plan=replace(plan.plan, inputs=tuple(inputs)))

    def request(
        self, stream: TransportStream, payer: Payer, plan: RpcPlan, raw: list[Piece], request_id: str
    ) -> ModelRequest:
        forwarded = self._headers.of(stream.metadata.items()) if self._headers.active else None
        pieces = self._pieces(plan, raw)
        return ModelRequest(payer, plan.model, plan.version, plan.plan, pieces, request_id, forwarded)

    def room(self, size: int, first: Buffer) -> Room | None:
        """Shared memory for a request of which only `first` has arrived, such that its first large tensor is aligned
        and can be read by models in place."""
        start = tensor_at(first)
        if start is None:
            return None
        return partial_room(self.link.session.memory, size, -start % ALIGN)

    def in_room(self, raw: list[Piece]) -> list[Piece]:
        """Passes on aligned tensors without a copy."""
        pieces = []
        for piece in raw:
            if len(piece) > INLINE_BYTES:
                array = np.frombuffer(piece, np.uint8)
                if array.__array_interface__["data"][0] % ALIGN == 0:
                    piece = array
            pieces.append(piece)
        return pieces

    def _pieces(self, plan: RpcPlan, raw: list[Piece]) -> list[Piece]:
        """The bytes of each input."""
        specs = plan.plan.inputs
        if raw:
            if plan.contents:
                raise InvalidRequest(
                    f"contents field must not be specified when using raw_input_contents for '{plan.contents}' for "
                    f"model '{plan.model}'"
                )
            if len(raw) != plan.raw:
                raise InvalidRequest(
                    f"raw_input_contents has {len(raw)} tensors, and {plan.raw} inputs for model '{plan.model}' are "
                    "not in shared memory"
                )
            if plan.raw == len(specs):
                return raw
        remaining = iter(raw)
        return [next(remaining, b"") if spec.follows else self.sender.local_input(spec) for spec in specs]

    # ------------------------------------------------------------------------------------ shutdown

    def enter(self, call: LongCall) -> None:
        """Ends the call when the gateway stops. RpcError: it is stopping already."""
        if self.stopping:
            raise RpcError(Code.UNAVAILABLE, STOPPING)
        self.long_calls.add(call)

    def close(self) -> None:
        """Stops accepting requests and ends health watches and idle streams. Requests in flight are answered."""
        self.stopping = True
        for call in list(self.long_calls):
            call.stop()


def code_of(error: ServeError) -> Code:
    # Triton answers every failed load with INTERNAL.
    return Code.INTERNAL if isinstance(error, BadLoad) else Code[grpc_of(error)]


def rpc_error(error: ServeError, request_id: str = "") -> RpcError:
    return RpcError(code_of(error), grpc_text_of(error, request_id))
