"""Client connections: Hello, roles, protocol errors, and disconnects.

Invariant: after `disconnect`, all further input of the client is ignored.
"""

from __future__ import annotations

from shmserve.core.effects import Close
from shmserve.core.events import Closed, Garbled, Opened
from shmserve.core.exit import exit
from shmserve.core.intake.queries import QueryQueue
from shmserve.core.intake.quotas import Quotas
from shmserve.core.limits import SECOND
from shmserve.core.records import ClientState
from shmserve.core.state import State
from shmserve.errors import ConnectionLost, Internal, ProtocolError, ServeError, Unavailable
from shmserve.protocol import roles
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    FRAME_BYTES,
    INLINE_BYTES,
    PACKET_BYTES,
    PROTOCOL,
    Bye,
    Fail,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Welcome,
)

_PLANES = {"lane": ("memfd",), "zmq": ("posix", "frames")}
"""Ways to return large outputs, by kind of link."""


class Connections:
    def __init__(self, state: State, quotas: Quotas, queries: QueryQueue, server: str) -> None:
        """`server`: name and version, for clients."""
        self._state = state
        self._quotas = quotas
        self._queries = queries
        self._server = server
        self._logged_at: dict[str, int] = {}
        """User -> time of the last log entry about its clients."""

    # ------------------------------------------------------------------------------------ connect and disconnect

    def opened(self, peer: int, event: Opened, now: int) -> None:
        client = ClientState(
            event.peer,
            event.audience,
            event.plane,
            self._state.ledger,
            user=event.audience,
            granted=event.roles,
            callers=self._state.callers_of(event.audience, bool(event.roles & roles.FORWARD)),
        )
        try:
            self._quotas.enter(client)
        except Unavailable as error:
            self.disconnect(client, error)
            return
        self._state.clients[event.peer] = client

    def hello(self, peer: int, message: Hello, now: int) -> None:
        client = self._state.clients.get(peer)
        if client is None or client.disconnecting:
            return
        if not client.granted:
            self.disconnect(client, roles.no_role())
        elif message.protocol != PROTOCOL:
            text = (
                f"protocol {message.protocol} is not supported, only {PROTOCOL}; use a client of the server's version"
            )
            self.disconnect(client, ProtocolError(text))
        elif client.outputs:
            self.disconnect(client, ProtocolError("Hello was sent twice on one connection"))
        elif message.outputs not in _PLANES[client.plane]:
            allowed = " or ".join(_PLANES[client.plane])
            text = f"outputs '{message.outputs}' are not possible over this kind of link; use {allowed}"
            self.disconnect(client, ProtocolError(text))
        else:
            client.said_hello(message)
            limits = self._state.limits
            announced = {
                "packet_bytes": PACKET_BYTES,
                "inline_bytes": INLINE_BYTES,
                "frame_bytes": FRAME_BYTES,
                "batch_requests": BATCH_REQUESTS,
                "client_requests": limits.client_requests,
                "client_questions": limits.client_questions,
                "client_segments": limits.client_segments,
                "client_held_bytes": limits.client_held_bytes,
                "device_memory": int(client.plane == "lane" and roles.allows("register", client.roles)),
                "named_memory": int(roles.allows("register", client.roles)),
                "trace_context": int(self._state.observers.traces.contexts_per_second > 0),
            }
            self._state.send(peer, Welcome(PROTOCOL, client.number, self._server, announced))

    def closed(self, peer: int, event: Closed, now: int) -> None:
        """Releases everything of a disconnected client: requests, holds and segments."""
        self._queries.gone(event.peer)
        client = self._state.clients.pop(event.peer, None)
        if client is None:
            return
        client.gone = True
        self._quotas.leave(client)
        exit.cancel_all(self._state, client)
        self._state.ledger.client_died(client)

    def bye(self, peer: int, message: Bye, now: int) -> None:
        self._state.effects.append(Close(peer))

    def ping(self, peer: int, message: Ping, now: int) -> None:
        if self.require_hello(peer) is not None:
            self._state.send(peer, Pong(message.number))

    def disconnect(self, client: ClientState, error: ServeError) -> None:
        """Reports the error to the client and disconnects it."""
        if not isinstance(error, (Unavailable, ConnectionLost, Internal)):
            self._quotas.count_disconnect(client, self._state.now)
        client.shut_out()
        self._queries.gone(client.number)
        self._log_client("info", client, f"disconnected: {error.message}")
        self._state.send(client.number, Goodbye(error.code, error.message))
        self._state.effects.append(Close(client.number))

    def disconnect_peer(self, peer: int, error: ServeError) -> None:
        """Disconnects the client because of an error that it did not cause."""
        client = self._state.clients.get(peer)
        if client is not None and not client.disconnecting:
            self.disconnect(client, error)

    # ------------------------------------------------------------------------------------ checks and errors

    def garbled(self, peer: int, event: Garbled, now: int) -> None:
        client = self._state.clients.get(peer)
        if client is not None and not client.disconnecting:
            # A request in flight gets its own response instead of this error.
            number = 0 if event.request in client.requests else event.request
            self._state.send(peer, Fail(number, event.code, event.text))
            self._count_error(client, now)

    def require_hello(self, peer: int) -> ClientState | None:
        """Returns the client if it has sent Hello. Otherwise disconnects it with an error."""
        client = self._state.clients.get(peer)
        if client is None or client.disconnecting:
            return None
        if not client.outputs:
            # This includes clients that have not noticed that the server was restarted.
            self.disconnect(client, ConnectionLost("the first message of a connection must be Hello"))
            return None
        return client

    def check_role(self, client: ClientState, action: str) -> None:
        """Raises if the role is missing, and logs it once per connection."""
        if roles.allows(action, client.roles):
            return
        error = roles.refusal(action, client.roles)
        if not client.denied:
            client.denied = True
            self._log_client("warning", client, f"was denied: {error.message}")
        raise error

    def refuse(self, client: ClientState, number: int, error: ServeError, now: int) -> None:
        """Rejects a request or, with number 0, another message."""
        self._state.send(client.number, Fail(number, error.code, error.message))
        if not isinstance(error, Unavailable):  # which is not the client's error
            self._count_error(client, now)

    def _count_error(self, client: ClientState, now: int) -> None:
        """Counts a protocol error. Disconnects the client if there are too many in a short time."""
        text = self._quotas.count_error(client, now)
        if text and not client.disconnecting:
            self._quotas.count_disconnect(client, now)
            self.disconnect(client, Unavailable(text))

    def _log_client(self, level: str, client: ClientState, text: str) -> None:
        """Logs at most one entry per second and user, so that clients that keep reconnecting cannot fill the log."""
        now, user = self._state.now, client.user
        if now - self._logged_at.get(user, -SECOND) >= SECOND:
            self._logged_at[user] = now
            self._state.log(level, f"client {client.number} ({user}) {text}", client=client.number, user=user)
