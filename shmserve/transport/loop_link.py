"""A session and its link on an event loop. Invariant: no call blocks."""

from __future__ import annotations

import asyncio
import select
import time
import weakref
from collections.abc import Callable

from shmserve.errors import Cancelled, ConnectionLost, ServeError, Unavailable
from shmserve.session import Incoming, Session, Ticket
from shmserve.system.polling import LoopPolling
from shmserve.transport.address import Address, no_server
from shmserve.transport.link import CLIENT_SESSION, CLOSED, MAX_PAUSE_S, PAUSE_S, ServerLink, SessionLink, open_link

BURST = 32
"""Maximum number of packets read before other callbacks of the loop run."""
HOLD_S = 0.005
"""Time for which returns wait for a request."""
RETRY_S = 0.002
"""Retry interval for a full link: ZeroMQ does not reliably signal that the link is writable again."""

monotonic = time.monotonic


def _has_input(descriptor: int) -> bool:
    """Whether the descriptor is readable, which includes the end of the connection."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class LoopLink(SessionLink):
    """`hold_bytes`: returns of dropped outputs wait up to HOLD_S for the next request until they have this total size,
    because a message of their own would wake the server once more; 0: they do not wait. Only a link that is used by no
    other thread may hold returns.

    `busy_poll_ns`: maximum time for which the loop polls for an answer instead of sleeping."""

    TAKES_OFFERS = True

    def __init__(
        self,
        address: Address,
        name: str,
        reconnect_timeout: float,
        memory_bytes: int,
        *,
        make_session: Callable[..., Session] = CLIENT_SESSION,
        hold_bytes: int = 0,
        busy_poll_ns: int = 0,
    ) -> None:
        self._hold_bytes = hold_bytes
        self._busy_poll_ns = busy_poll_ns
        self._polling: LoopPolling | None = None
        super().__init__(address, name, reconnect_timeout, memory_bytes, make_session)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: list[int] = []
        self._writing = False
        self._connecting: asyncio.Task[None] | None = None
        self._sending_soon = False
        self._flushing_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._held: asyncio.TimerHandle | None = None
        """Sends the returns that wait for a request."""

    def _flusher(self) -> Callable[[], None]:
        reference = weakref.ref(self)

        def flush() -> None:
            link = reference()
            if link is None or link._flushing_soon or link.closed:
                return
            loop = link._loop
            if loop is None or loop.is_closed():
                return
            if link._may_hold():
                if link._held is None:
                    link._held = loop.call_later(HOLD_S, link._release_held)
            else:
                link._flushing_soon = True
                loop.call_soon_threadsafe(link._send)

        return flush

    def _may_hold(self) -> bool:
        return 0 < self.session.memory.drops.bytes < self._hold_bytes

    def _release_held(self) -> None:
        self._held = None
        self.flush()

    def bind(self) -> asyncio.AbstractEventLoop:
        """Binds the client to the running loop. If its previous loop was closed, it moves to the new one."""
        if self.closed:
            raise Unavailable("the client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return loop
        if self._loop is not None:
            if not self._loop.is_closed():
                raise RuntimeError("this AsyncClient belongs to another event loop; create one per event loop")
            self._loop = None  # nothing can be scheduled there
            self._lose(ConnectionLost("its event loop was closed"))
            self.session.fail_all(ConnectionLost("the event loop was closed before the response arrived"))
            self._connecting = self._timer = self._held = None
            self._sending_soon = self._flushing_soon = self._writing = False
        self._loop = loop
        self._polling = LoopPolling(loop, self._busy_poll_ns) if self._busy_poll_ns else None
        return loop

    # ------------------------------------------------------------------------------------ sending

    def send_soon(self, with_deadline: bool = False) -> None:
        """Schedules one send for all requests of this loop iteration."""
        loop = self._loop
        if loop is None:
            return
        if not self._sending_soon:
            self._sending_soon = True
            loop.call_soon(self._send)
        if with_deadline:
            self._arm()

    def flush(self) -> None:
        if self._link is not None and (self.session.outbox.messages or self.session.has_returns):
            self._send()

    def _send(self) -> None:
        self._sending_soon = False
        self._flushing_soon = False
        if self.closed:
            return
        if self._link is None:
            if self._connecting is None and self._loop is not None:
                self._connecting = self._loop.create_task(self._connect())
            return  # all unanswered requests are sent once connected
        self._unsent += self.session.take()
        self._push()
        self._poll()

    def _poll(self) -> None:
        """Keeps the loop awake for the answers to requests in flight."""
        if self._polling is not None and self._link is not None and self.session.tickets:
            self._polling.wait(True)

    def _push(self) -> None:
        link, loop = self._link, self._loop
        if link is None or loop is None:
            return
        try:
            while self._unsent and link.send(self._unsent[0]):
                del self._unsent[0]
        except ConnectionLost as error:
            self._lose(error)
            return
        if self.address.kind != "unix":
            loop.call_soon(self._readable)  # sending may have consumed the signal for incoming packets
        if bool(self._unsent) != self._writing:
            self._writing = bool(self._unsent)
            if self.address.kind != "unix":
                self._writing = False
                loop.call_later(RETRY_S, self._push)
            elif self._writing:
                loop.add_writer(link.descriptors()[0], self._push)
            else:
                loop.remove_writer(link.descriptors()[0])

    # ------------------------------------------------------------------------------------ leases

    def open_lease(self, lease: int, fd: int) -> None:
        super().open_lease(lease, fd)
        self._watch_leases()

    def close_lease(self, lease: int) -> list[bytes]:
        self._unwatch_leases()
        packets = super().close_lease(lease)
        self._watch_leases()
        return packets

    def _watch_leases(self) -> None:
        link, loop = self._link, self._loop
        if link is not None and loop is not None:
            for descriptor in link.descriptors()[1:]:
                loop.add_reader(descriptor, self._lease_readable, descriptor)
            self._watched = link.descriptors()

    def _unwatch_leases(self) -> None:
        if self._loop is not None:
            for descriptor in self._watched[1:]:
                self._loop.remove_reader(descriptor)
            del self._watched[1:]

    def _lease_readable(self, descriptor: int) -> None:
        """Called when a lease's socket is readable: an answer, or the end of the lease. After the end, nothing arrives
        until LeaseEnd closes the socket. If there is nothing to read, the answer was already read in this iteration of
        the loop, after a packet of the lane.
        """
        link = self._link
        expected = link is not None and link.awaits_lease
        self._readable()
        if expected or link is None or self._link is not link or link.awaits_lease or self._loop is None:
            return
        if descriptor in self._watched and _has_input(descriptor):
            self._loop.remove_reader(descriptor)

    # ------------------------------------------------------------------------------------ receiving

    @property
    def has_input(self) -> bool:
        """Whether messages of the server have arrived that have not been read."""
        return any(map(_has_input, self._watched))

    def _readable(self) -> None:
        session = self.session
        if self._polling is not None:
            self._polling.wake(time.monotonic_ns())
        for _ in range(BURST):
            link = self._link
            if link is None:
                return
            try:
                awaited = link.awaits_lease
                incoming = link.receive(0)
                if incoming is None:
                    break
                answered = awaited and not link.awaits_lease
                if answered and session.lease_answered():
                    self._send()  # before the answers are processed, so that the worker need not wait for that
                session.receive(*incoming)
            except ServeError as error:
                self._lose(error)
                return
            if answered or (not session.tickets and self.address.kind == "unix"):
                break  # no answer is due at once; the loop reports other packets
        else:
            if self._loop is not None:
                self._loop.call_soon(self._readable)
        if session.urgent or (session.memory.drops.full and not self._may_hold()):
            self._send()
        else:
            self._poll()

    # ------------------------------------------------------------------------------------ deadlines

    def _arm(self) -> None:
        deadline = self.session.deadline()
        timer = self._timer
        if timer is not None:
            if deadline is not None and self._timer_at <= deadline:
                return
            timer.cancel()
            self._timer = None
        if deadline is not None and self._loop is not None:
            self._timer_at = deadline
            self._timer = self._loop.call_later(max(0.0, deadline - monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.session.tick(monotonic())
        if self.session.outbox.messages:
            self.send_soon()
        self._arm()

    def cancel(self, ticket: Ticket) -> None:
        if self.session.cancel(ticket) and self._link is not None:
            self.send_soon()

    # ------------------------------------------------------------------------------------ connections

    def _lose(self, error: ServeError) -> None:
        link = self._link
        if link is None:
            return
        self._unwatch(link)
        super()._lose(error)
        if self.session.tickets:
            self.send_soon()

    def _unwatch(self, link: ServerLink) -> None:
        self._unsent.clear()
        if self._loop is not None and not self._loop.is_closed():
            for descriptor in self._watched:
                self._loop.remove_reader(descriptor)
            if self._writing:
                self._loop.remove_writer(link.descriptors()[0])
        self._watched = []
        self._writing = False

    async def _connect(self) -> None:
        limit = monotonic() + self._reconnect_timeout
        pause = PAUSE_S
        try:
            while True:
                try:
                    link, welcome = await self._greet(limit)
                    break
                except ConnectionLost:
                    if not self._was_connected or monotonic() + pause >= limit:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
            self._adopt(link, welcome)
        except ServeError as error:
            self.session.fail_all(error)
        except asyncio.CancelledError:
            self.session.fail_all(Cancelled(CLOSED))
            raise
        finally:
            self._connecting = None

    def _adopt(self, link: ServerLink, welcome: Incoming) -> None:
        try:
            self._process_welcome(welcome)
        except ServeError:
            link.close()
            raise
        self._link = link
        self._was_connected = True
        self._watched = link.descriptors()
        assert self._loop is not None
        for descriptor in self._watched:
            self._loop.add_reader(descriptor, self._readable)
        self._send()

    async def _greet(self, limit: float) -> tuple[ServerLink, Incoming]:
        loop = asyncio.get_running_loop()
        link = open_link(self.address)
        readable = asyncio.Event()
        watched = link.descriptors()
        try:
            self._say_hello(link)
            alarm = loop.call_later(max(0.0, limit - monotonic()) + 0.001, readable.set)
            for descriptor in watched:
                loop.add_reader(descriptor, readable.set)
            try:
                while True:
                    incoming = link.receive(0)
                    if incoming is not None:
                        return link, incoming
                    if monotonic() >= limit:
                        raise no_server(self.address, "no response")
                    readable.clear()
                    await readable.wait()
            finally:
                alarm.cancel()
                for descriptor in watched:
                    loop.remove_reader(descriptor)
        except BaseException:
            link.close()
            raise

    # ------------------------------------------------------------------------------------ closing

    async def close(self, error: ServeError | None = None) -> None:
        """`error`: of the requests in flight."""
        if self.closed:
            return
        self.closed = True
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        for timer in (self._timer, self._held):
            if timer is not None:
                timer.cancel()
        self._timer = self._held = None
        link, self._link = self._link, None
        if link is not None:
            try:
                if not self._unsent:
                    for packet in [*self.session.take(), self.session.bye()]:
                        if not link.send(packet):
                            break  # closing the link implies Bye
            except ConnectionLost:
                pass  # already disconnected
            self._unwatch(link)
            link.close(linger=True)
        self.session.fail_all(error or Cancelled(CLOSED))
        self.session.disconnected()
        self.session.close()

    def forked(self) -> None:
        link, session, closed = self._link, self.session, self.closed
        LoopLink.__init__(
            self,
            self.address,
            self._name,
            self._reconnect_timeout,
            self._memory_bytes,
            make_session=self._make_session,
            hold_bytes=self._hold_bytes,
            busy_poll_ns=self._busy_poll_ns,
        )
        self.closed = closed
        if link is not None:
            link.abandon()
        session.queries.close()
        session.memory.close()
