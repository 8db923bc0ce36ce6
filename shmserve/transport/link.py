"""The interface of links to a server, which move packets without interpreting them, and a session with such a link."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

from shmserve.errors import Cancelled, ConnectionLost, ServeError
from shmserve.protocol.trace_context import TRACE_PARENT, TRACE_STATE
from shmserve.session import Incoming, Packet, Session
from shmserve.session.arguments import check_memory_bytes, check_name, check_seconds
from shmserve.transport.address import Address

_SAMPLED = 1


def current_context() -> dict[str, str] | None:
    """The request parameters for the current span, if it is sampled. Does not import OpenTelemetry: if the application
    has not imported it, there is no span."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid or not context.trace_flags & _SAMPLED:
        return None
    parameters = {TRACE_PARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        parameters[TRACE_STATE] = context.trace_state.to_header()
    return parameters


CLOSED = "the client was closed before the response arrived"
PAUSE_S = 0.01
"""Delay before the first reconnect; doubled after each failure, up to MAX_PAUSE_S."""
MAX_PAUSE_S = 0.25
INTERRUPTED = ConnectionLost("reading was interrupted")
CLIENT_SESSION = partial(Session, trace_context=current_context)


class ServerLink(Protocol):
    """Any thread may send; only one thread at a time may receive."""

    def send(self, packet: Packet) -> bool:
        """False if the link is full. Raises ConnectionLost when it has ended."""

    def receive(self, wait: float | None) -> Incoming | None:
        """The next packet; None if nothing came within about `wait` seconds (None: no limit), or if the lease ended
        over which an answer was expected. Raises ConnectionLost when the link has ended.
        """

    def receive_or_event(self, wait: float | None, to_send: bool) -> Incoming | None:
        """Like `receive`, but also returns None if `wake` was called or, with `to_send`, if the link can take a packet
        again.
        """

    def in_use(self) -> bool:
        """Whether a thread is inside a call of this link. That may be the current thread, as the garbage collector runs
        anywhere; code that runs in the collector must then not send.
        """

    def wait_writable(self, wait: float | None) -> None:
        """Returns when the link may be writable again, or after `wait` seconds."""

    def wake(self) -> None:
        """Wakes up a thread that waits in `receive_or_event`."""

    @property
    def awaits_lease(self) -> bool:
        """Whether an answer is expected on the socket of a lease."""

    def open_lease(self, lease: int, fd: int) -> None:
        """Keeps the socket of a lease. `send` uses it for packets of the lease, and `receive` also returns packets that
        arrive there. Takes ownership of the descriptor.
        """

    def close_lease(self, lease: int) -> list[bytes]:
        """Closes the socket of a lease, and returns the packets that have arrived there."""

    def descriptors(self) -> list[int]:
        """Descriptors that an event loop watches for reading. They are only hints: read until nothing is left."""

    def interrupt(self) -> None:
        """Ends the link for a thread that waits for a packet; called before `close`."""

    def close(self, linger: bool = False) -> None:
        """`linger`: deliver the last packets first."""

    def abandon(self) -> None:
        """Forgets the link in a forked child, without sending anything; it belongs to the parent."""


def open_link(address: Address) -> ServerLink:
    """Raises ConnectionLost if there is no listener. Over ZeroMQ, only `receive` can detect that."""
    if address.kind == "unix":
        from shmserve.transport import lane

        return lane.connect(address)
    from shmserve.transport.zmq import ZmqLink

    return ZmqLink(address)


class SessionLink(ABC):
    """A session, and the link that carries its packets: one after another, as the server may restart. `make_session`
    gets the arguments of a Session that depend on the link."""

    TAKES_OFFERS = False
    """Whether it tells the session when the worker of a lease has answered."""

    def __init__(
        self,
        address: Address,
        name: str,
        reconnect_timeout: float,
        memory_bytes: int,
        make_session: Callable[..., Session] = CLIENT_SESSION,
    ) -> None:
        check_name("client", name)
        check_seconds("reconnect_timeout", reconnect_timeout)
        check_memory_bytes(memory_bytes)
        self.address = address
        self.closed = False
        self._name = name
        self._reconnect_timeout = reconnect_timeout
        self._memory_bytes = memory_bytes
        self._make_session = make_session
        self.session = self._make_session(
            self.address.memory,
            memory_bytes=self._memory_bytes,
            frame_bytes=self.address.frame_bytes,
            on_full=self._flusher(),
            lease_sockets=_LeaseSockets(self) if self.address.kind == "unix" else None,
        )
        self._link: ServerLink | None = None
        self._unsent: list[Packet] = []
        self._was_connected = False
        _all.add(self)

    def open_lease(self, lease: int, fd: int) -> None:
        link = self._link
        if link is None:
            os.close(fd)
        else:
            link.open_lease(lease, fd)

    def close_lease(self, lease: int) -> list[bytes]:
        link = self._link
        return link.close_lease(lease) if link is not None else []

    @abstractmethod
    def _flusher(self) -> Callable[[], None]:
        """The session's `on_full` callback, which sends returns of dropped memory. It may run inside the garbage
        collector, in any thread, and must not keep this object alive.
        """

    def _say_hello(self, link: ServerLink) -> None:
        with contextlib.suppress(ConnectionLost):  # a server that refuses connections has sent the reason: read it
            link.send(self.session.hello(os.getpid(), self._name))

    def _process_welcome(self, incoming: Incoming) -> None:
        """Processes the first packet of a new link. Raises the server's reason if it does not accept the client."""
        self.session.receive(*incoming)
        if not self.session.connected:
            raise ConnectionLost(f"{self.address.url} is not a shmserve server")

    def _lose(self, error: ServeError) -> None:
        """Drops a link that has ended or is unusable. Requests that can be resent are kept for the next link, unless
        the server ended this one with a reason.
        """
        link, self._link = self._link, None
        if link is None:
            return
        self._unsent.clear()
        unusable = error is INTERRUPTED or not isinstance(error, ConnectionLost)
        if unusable:  # over ZeroMQ the server would not detect it
            with contextlib.suppress(ConnectionLost):
                link.send(self.session.bye())
        self.session.disconnected()
        self._close_link(link, unusable)
        if self.closed:
            self.session.fail_all(Cancelled(CLOSED))
        elif self.session.goodbye is not None:
            self.session.fail_all(self.session.goodbye)

    def _close_link(self, link: ServerLink, linger: bool) -> None:
        link.close(linger)

    @abstractmethod
    def forked(self) -> None:
        """Constructs the object again in a forked child, which must not use or release anything of the parent: threads,
        link and memory belong to it. The first call opens a new link."""

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None:
            link.close()


class _LeaseSockets:
    """Refers weakly to the owner of the session, which would otherwise be kept alive by a cycle."""

    def __init__(self, owner: SessionLink) -> None:
        self._owner = weakref.ref(owner)
        self.offers = owner.TAKES_OFFERS

    def open_lease(self, lease: int, fd: int) -> None:
        owner = self._owner()
        if owner is None:
            os.close(fd)
        else:
            owner.open_lease(lease, fd)

    def close_lease(self, lease: int) -> list[bytes]:
        owner = self._owner()
        return owner.close_lease(lease) if owner is not None else []


_all: weakref.WeakSet[SessionLink] = weakref.WeakSet()


def _forked() -> None:
    for link in list(_all):
        link.forked()


os.register_at_fork(after_in_child=_forked)
