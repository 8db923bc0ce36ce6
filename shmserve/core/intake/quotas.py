"""Quotas shared by all clients, and those of a single client that need a counter.

Invariant: when a total is exhausted, only clients that have at least their equal share are rejected, so a client that
needs little is served while another one floods the server. A total can therefore be exceeded, at most twofold.

This module alone handles misbehaving clients. Each client has a token bucket of protocol errors (`count_error`): a
client above the rate is paused, and a client with BURST_S seconds' worth of errors is disconnected. Because it could
reconnect and start with a full bucket, each user has a bucket of disconnects (`count_disconnect`), which delays the
user's new connections. The broker only executes `Pause`: it stops reading a lane, so that the client's sends block. The
ZeroMQ socket is shared by all clients and must be read, so there the client's input is queued, up to a limit.
"""

from __future__ import annotations

from collections import Counter

from shmserve.core.effects import Effect, Pause
from shmserve.core.limits import BURST_S, PATIENCE_S, SECOND
from shmserve.core.records import ClientState, Payer, Version
from shmserve.core.state import State
from shmserve.errors import Unavailable
from shmserve.protocol.messages import PACKET_BYTES
from shmserve.protocol.roles import OPERATE

DISCONNECT_NS = SECOND // 4
DISCONNECT_BURST = 4
"""Token bucket for disconnects of a user's clients: a burst of DISCONNECT_BURST, refilled by one per DISCONNECT_NS.
When it is empty, new connections are delayed."""
LONGEST_NS = 2 * SECOND
"""Longest delay of a new connection."""


class Quotas:
    """`busy` and `heavy`: with fewer requests in flight and fewer bytes held by the client, no quota can be exhausted,
    so the fast path of a request only compares against these."""

    def __init__(self, state: State) -> None:
        limits = state.limits
        self._state = state
        self._limits = limits
        self._users: dict[str, int] = {}
        self._disconnect_levels: dict[str, int] = {}
        """User -> level of the token bucket of disconnects, as a time."""
        self._counted: list[Effect] = []
        """The effects of the turn in which the following were counted. That is done when a limit is reached."""
        self._parties = 0
        """Clients and callers between whom a total is divided."""
        self._queued = 0
        """Bytes inside the messages of all requests in flight."""
        self._bytes: Counter[Payer] = Counter()
        """The same by caller."""
        message_bytes = min(limits.model_queue_bytes, limits.queue_bytes)
        self.busy = min(limits.requests, limits.model_queue, message_bytes // PACKET_BYTES)
        self.heavy = min(limits.client_held_bytes, limits.held_bytes // limits.connections)
        self._error_ns = SECOND // limits.client_errors if limits.client_errors else 0

    # ------------------------------------------------------------------------------------ connections

    def enter(self, client: ClientState) -> None:
        limits, count = self._limits, len(self._state.clients)
        used = self._users.get(client.user, 0)
        if count >= limits.connections and not client.granted & OPERATE:
            raise Unavailable(
                f"{count} clients are connected, the limit (connections); {_retry('one has disconnected')}"
            )
        if used >= limits.uid_connections:
            raise Unavailable(
                f"this user has {used} connections, the limit (uid_connections); close some, or share them"
            )
        self._users[client.user] = used + 1
        pause_until = self._disconnect_levels.get(client.user, 0) - DISCONNECT_BURST * DISCONNECT_NS
        if pause_until > self._state.now:
            self._state.effects.append(Pause(client.number, pause_until))

    def count_disconnect(self, client: ClientState, now: int) -> None:
        """Counts a disconnect for misbehaviour, which delays further connections of this user."""
        level = max(self._disconnect_levels.get(client.user, 0), now) + DISCONNECT_NS
        if self._error_ns and level - now <= DISCONNECT_BURST * DISCONNECT_NS + LONGEST_NS:
            self._disconnect_levels[client.user] = level

    def leave(self, client: ClientState) -> None:
        remaining = self._users[client.user] - 1
        if remaining:
            self._users[client.user] = remaining
        else:
            del self._users[client.user]

    def check_segments(self, client: ClientState) -> None:
        limits = self._limits
        if len(client.segments) >= limits.client_segments:
            raise Unavailable(
                f"this client has {len(client.segments)} segments, its limit (client_segments); use larger ones"
            )
        total = len(self._state.ledger.segments)
        if total >= limits.segments and self._has_share(len(client.segments), limits.segments):
            raise Unavailable(
                f"there are {total} segments, the limit (segments), {len(client.segments)} of them of this client; "
                f"{_retry('others have been removed')}"
            )

    # ------------------------------------------------------------------------------------ requests

    def check_queue(self, payer: Payer, version: Version, inline: int) -> None:
        """Raises if the payer may not have another request in flight with this many bytes inside its message. Called if
        there are at least `busy` requests."""
        total = len(self._state.requests)
        limits, used = self._limits, payer.in_flight
        waits, waiting = version.waits, version.waiting_bytes
        if total >= limits.requests and self._has_share(used, limits.requests):
            raise Unavailable(
                f"{total} requests are in flight, the limit (requests), {used} of them of this client; "
                f"{_retry('responses have arrived')}"
            )
        if waits >= limits.model_queue and self._has_share(used, limits.model_queue):
            raise Unavailable(
                f"{waits} requests are queued for model '{version.model}', the limit (model_queue); "
                f"{_retry('responses have arrived')}, or add instances"
            )
        if waiting + inline > limits.model_queue_bytes and self._has_share(
            self._bytes_of(payer) + inline, limits.model_queue_bytes
        ):
            raise Unavailable(
                f"{waiting} bytes are queued for model '{version.model}', the limit is {limits.model_queue_bytes} "
                f"(model_queue_bytes); {_retry('responses have arrived')}, or send less inside messages"
            )
        self._count()
        queued = self._queued + inline
        if queued > limits.queue_bytes and self._has_share(self._bytes_of(payer) + inline, limits.queue_bytes):
            raise Unavailable(
                f"{queued} bytes are inside requests in flight, the limit is {limits.queue_bytes} (queue_bytes); "
                f"{_retry('responses have arrived')}, or send less inside messages"
            )

    def check_inputs(self, client: ClientState, size: int) -> None:
        """Raises if the requests in flight of the client may not refer to this many more bytes of shared memory."""
        limit, used = self._limits.client_input_bytes, client.input_bytes
        if used + size <= limit:
            return
        if size > limit:
            raise Unavailable(
                f"the request has {size} bytes of inputs in shared memory, and the limit of a client is {limit} "
                "(client_input_bytes); send smaller requests, or raise it with --limit"
            )
        raise Unavailable(
            f"{used} bytes of inputs in shared memory are in flight for this client, and this request has {size} more, "
            f"over the limit of {limit} (client_input_bytes); wait for responses first"
        )

    def held(self, client: ClientState) -> str:
        """Why the client holds too many bytes of outputs; empty if it does not."""
        limits, used, total = self._limits, client.held_bytes, self._state.ledger.held_bytes
        if used > limits.client_held_bytes:
            limit = f"the limit of {limits.client_held_bytes} (client_held_bytes)"
            return f"this client holds {used} bytes of responses, over {limit}; drop results that are no longer needed"
        if total > limits.held_bytes and self._has_share(used, limits.held_bytes):
            return (
                f"clients hold {total} bytes of responses, over the limit of {limits.held_bytes} (held_bytes), {used} "
                "of them this client; drop results that are no longer needed"
            )
        return ""

    def admitted(self, payer: Payer, inline: int) -> None:
        """A request that `check_queue` has allowed was admitted."""
        self._queued += inline
        if self._bytes:
            self._bytes[payer] += inline

    def _has_share(self, used: int, limit: int) -> bool:
        self._count()
        return used * self._parties >= limit

    def _count(self) -> None:
        state = self._state
        if self._counted is state.effects:
            return
        self._counted = state.effects
        clients = state.clients.values()
        self._parties = sum([callers.count_active() for callers in state.callers.values()])
        self._parties += sum([not client.callers.active for client in clients])
        self._queued = sum([client.bytes for client in clients])
        self._bytes.clear()

    def _bytes_of(self, payer: Payer) -> int:
        if isinstance(payer, ClientState):
            return payer.bytes
        if not self._bytes:
            for request in self._state.requests.values():
                self._bytes[request.payer] += request.inline
        return self._bytes[payer]

    # ------------------------------------------------------------------------------------ protocol errors

    def count_error(self, client: ClientState, now: int) -> str:
        """Counts a protocol error. Returns the reason if the client exceeds the limit, else ""."""
        rate = self._limits.client_errors
        if not rate:
            return ""
        client.error_level = max(client.error_level, now) + self._error_ns
        if client.error_level - now <= BURST_S * SECOND:
            pause_until = client.error_level - PATIENCE_S * SECOND
            if pause_until > now:
                self._state.effects.append(Pause(client.number, pause_until))
            return ""
        return (
            f"this client causes more than {rate} protocol errors per second, its limit (client_errors); "
            f"{_retry('the client is fixed')}"
        )


def _retry(when: str) -> str:
    return f"try again when {when}"
