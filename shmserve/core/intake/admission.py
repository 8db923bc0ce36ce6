"""What connected clients request: infer, cancel, announce memory, return handles, query.

Invariant: every action is checked here against shmserve.protocol.roles, whichever endpoint it came through.
"""

from __future__ import annotations

import re

from shmserve.core.effects import Forget, Free, Query
from shmserve.core.events import Framed, Garbled, OwnSegment, OwnSegmentGone
from shmserve.core.exit import exit, responses
from shmserve.core.intake import waiting
from shmserve.core.intake.connections import Connections
from shmserve.core.intake.intake import Intake
from shmserve.core.intake.queries import QueryQueue
from shmserve.core.intake.quotas import Quotas
from shmserve.core.intake.refusals import refuse
from shmserve.core.ledger import INTERNAL
from shmserve.core.records import ClientState, Request
from shmserve.core.state import WORKERS_FROM, State
from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol import roles
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    DEVICE,
    NAME_LENGTH,
    OWNER_SHIFT,
    Ask,
    Cancel,
    Handle,
    Infer,
    InferBatch,
    Map,
    More,
    Return,
    Unmap,
)

_DEVICE_NAME = re.compile(rf"{DEVICE}[A-Za-z0-9+/]{{107}}=")
"""base64 of the 64 bytes of a device memory export and the 16 bytes of the device's UUID."""
_SEGMENT_NAME = re.compile(rf"/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_LENGTH - 2}}}")


class Admission:
    def __init__(
        self, state: State, intake: Intake, quotas: Quotas, queries: QueryQueue, connections: Connections
    ) -> None:
        self._state = state
        self._intake = intake
        self._quotas = quotas
        self._queries = queries
        self._connections = connections
        self._require_hello = connections.require_hello

    # ------------------------------------------------------------------------------------ inference

    def infer(self, peer: int, message: Infer, now: int, blocks: tuple[Handle, ...] = ()) -> None:
        client = self._state.clients.get(peer)
        if client is None or not client.outputs:
            self._require_hello(peer)
            if blocks:
                self._state.effects.append(Free(blocks))
            return
        try:
            self._intake.ask(client, message.request, message, now, blocks)
        except ServeError as error:
            if blocks:
                self._state.effects.append(Free(blocks))
            refuse(self._state, client, message.model, message.request, error)

    def infer_batch(self, peer: int, message: InferBatch, now: int) -> None:
        """Admits requests of one form."""
        columns = message.columns
        if not columns.regular or len(columns.requests) > BATCH_REQUESTS:
            text = (
                f"an InferBatch has {len(columns.requests)} requests, {len(columns.rows)} rows and {len(columns.data)} "
                f"data; expected as many of each, from 1 to {BATCH_REQUESTS}, with one item of data for each form"
            )
            self._connections.garbled(peer, Garbled(0, text), now)
            return
        client = self._state.clients.get(peer)
        if client is None or not client.outputs:
            self._require_hello(peer)
        else:
            self._intake.ask_columns(client, message, now)

    def framed(self, peer: int, event: Framed, now: int) -> None:
        self.infer(peer, event.infer, now, event.blocks)

    def check(self, request: Request, message: Infer, now: int) -> None:
        """Admits a request that has waited for its model to load."""
        try:
            again = waiting.message_of(request, message, now)
            self._intake.ask(request.client, request.client_number, again, now, waited=request)
        except ServeError as error:
            self._state.observers.refused(self._state.ready.get(message.model), error)
            raise

    def cancel(self, peer: int, message: Cancel, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            return
        request = client.requests.get(message.request)
        if request is None:  # already answered (the messages crossed), or an operation instead of a request
            self._state.effects.append(Query(peer, message))
        else:
            exit.fail_early(self._state, request, "CANCELLED", "the request was cancelled by its caller")

    # ------------------------------------------------------------------------------------ memory and queries

    def own_segment(self, peer: int, event: OwnSegment, now: int) -> None:
        self._state.ledger.announce(0, event.announcement, INTERNAL)

    def more(self, peer: int, message: More, now: int) -> None:
        client = self._require_hello(peer)
        if client is not None:
            responses.more(self._state, client.requests.get(message.request), message.count)

    def map(self, peer: int, message: Map, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            self._drop_segment(peer, message.segment)
            return
        try:
            self._connections.check_role(client, "map" if message.name is None else "register")
            self._quotas.check_segments(client)
            if message.name is not None and message.name.startswith(DEVICE):
                self._check_device_segment(client, message.name, message.size)
            elif message.name is not None:
                self._check_segment_name(client, message.name)
            elif client.plane != "lane":
                raise InvalidRequest("over ZeroMQ a segment must be announced by name")
            self._state.ledger.announce(peer, message, client.audience)
            client.segments.add(message.segment)
        except ServeError as error:
            self._drop_segment(peer, message.segment)
            self._connections.disconnect(client, error)

    def _drop_segment(self, peer: int, number: int) -> None:
        """Closes the descriptor of a segment that was not accepted."""
        if number >> OWNER_SHIFT == peer and number not in self._state.ledger.segments:
            self._state.effects.append(Forget(number))

    def own_segment_gone(self, peer: int, event: OwnSegmentGone, now: int) -> None:
        self._state.ledger.withdraw(0, event.segment)

    def _check_device_segment(self, client: ClientState, name: str, size: int) -> None:
        """Workers open device memory by this name alone, so it must have exactly the expected form."""
        if client.plane != "lane":
            raise InvalidRequest("GPU memory can only be announced over the lane")
        if not _DEVICE_NAME.fullmatch(name) or not size:
            raise InvalidRequest("the name of a segment on a GPU does not contain an exported handle and a device UUID")

    def _check_segment_name(self, client: ClientState, name: str) -> None:
        """A client must not be able to make a worker open memory of the server or of another client."""
        if not _SEGMENT_NAME.fullmatch(name):
            raise InvalidRequest(f"a segment name must be a slash, then up to {NAME_LENGTH - 1} of A-Z a-z 0-9 . _ -")
        for segment in self._state.ledger.segments.values():
            # The same user may announce a name again: a client reconnected before its old connection was found dead.
            if segment.announcement.name == name and (
                segment.owner >= WORKERS_FROM or segment.audience != client.audience
            ):
                raise InvalidRequest("a segment of this name has already been announced")

    def unmap(self, peer: int, message: Unmap, now: int) -> None:
        client = self._require_hello(peer)
        if client is not None:
            try:
                self._state.ledger.withdraw(peer, message.segment)
                client.segments.discard(message.segment)
            except ServeError as error:
                self._connections.refuse(client, 0, error, now)

    def give_back(self, peer: int, message: Return, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            return
        client.reclaiming = False
        for handle in message.handles:
            try:
                self._state.ledger.take_back(client, handle)
            except ServeError as error:
                self._connections.refuse(client, 0, error, now)
                if client.disconnecting:
                    return

    def ask(self, peer: int, message: Ask, now: int) -> None:
        client = self._require_hello(peer)
        if client is None:
            return
        try:
            if message.what:  # otherwise it continues the body of an operation that was already allowed
                if message.what not in roles.QUERIES:
                    raise roles.unknown(message.what)
                self._connections.check_role(client, message.what)
            self._queries.put(peer, message)
        except ServeError as error:
            self._connections.refuse(client, message.request, error, now)
