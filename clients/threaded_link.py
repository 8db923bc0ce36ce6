"""A link that several threads use, and its session.

Invariant: every method is called with the lock held and releases it only while it waits for the kernel. One thread at a
time is the leader. Only the leader connects or receives, without the lock.

KeyboardInterrupt can be raised after any call. Therefore the lock is released inside the `try` that takes it again, and
a thread that was interrupted between the two and finds itself the leader later gives up the link (`_stop_leading`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from shmserve.errors import Cancelled, ConnectionLost, ServeError, Unavailable
from shmserve.session import Incoming, Ticket
from shmserve.transport.address import no_server
from shmserve.transport.link import (
    CLOSED,
    INTERRUPTED,
    MAX_PAUSE_S,
    PAUSE_S,
    ServerLink,
    SessionLink,
    open_link,
)

READ_EVERY = 16
"""Number of packets sent without reading after which pending input is read: a full socket would block the server."""

monotonic = time.monotonic
get_ident = threading.get_ident


class ThreadedLink(SessionLink):
    def _start(self) -> None:
        super()._start()
        self.lock = threading.RLock()
        self.outbox = self.session.outbox
        self.uncollected = 0
        """Approximate number of received answers whose results were not collected yet."""
        self._dialed: ServerLink | None = None
        self._leading = False
        self._leader = 0
        """The identifier of the leading thread."""
        self._unread = 0
        self._closing = threading.Event()

    def _flusher(self) -> Callable[[], None]:
        """The callback may run in a thread that holds the lock, so it gives up instead of waiting; the next call then
        sends the returns.
        """
        reference = weakref.ref(self)

        def flush() -> None:
            shared = reference()
            if shared is None or shared.lock._is_owned() or not shared.lock.acquire(blocking=False):  # type: ignore[attr-defined]
                return
            try:
                link = shared._link
                if link is not None and not link.in_use() and not shared._unsent and not shared.closed:
                    for packet in shared.session.take():
                        if shared._unsent or not link.send(packet):
                            shared._unsent.append(packet)
            except ConnectionLost:
                return  # the next call also detects it, and can report it
            finally:
                shared.lock.release()

        return flush

    # ------------------------------------------------------------------------------------ sending

    def send_now(self, ticket: Ticket | None = None) -> None:
        """Send everything in the outbox. Waits until the link is writable, up to the ticket's deadline. Called with the
        lock held."""
        if self.closed:
            self.session.fail_all(Cancelled("the client is closed"))
            raise Unavailable("the client is closed")
        if self._link is None:
            if self._leading:
                return  # another thread is connecting, and all unanswered requests are sent after that
            self._connect(ticket.deadline if ticket is not None else None)
            if self._link is None:
                return
        try:
            if not self._unsent:
                for packet in self.session.take():
                    if self._unsent or not self._link.send(packet):
                        self._unsent.append(packet)
            else:
                self._unsent += self.session.take()
                self._push()
        except ConnectionLost as error:
            self._lose(error)
            return
        if self._unsent:
            self._push_all(ticket)
        self._unread += 1
        if self._unread >= READ_EVERY and not self._leading:
            self._read_pending()

    def _push(self) -> None:
        link = self._link
        while self._unsent and link is not None and link.send(self._unsent[0]):
            del self._unsent[0]

    def _push_all(self, ticket: Ticket | None) -> None:
        """Send while the link is full. Reads in between, since the server may be blocked on sending to us."""
        while self._unsent and self._link is not None and not self.closed:
            deadline = ticket.deadline if ticket is not None else None
            wait = None if deadline is None else deadline - monotonic()
            if ticket is not None and wait is not None and wait <= 0:
                self.session.expire(ticket)
                return
            try:
                if self._leading:
                    link = self._link
                    try:
                        self.lock.release()
                        link.wait_writable(wait)
                    finally:
                        self.lock.acquire()
                else:
                    self._lead(wait, False)
                self._push()
            except ConnectionLost as error:
                self._lose(error)

    # ------------------------------------------------------------------------------------ reading

    def _lead(self, wait: float | None, wakeable: bool) -> None:
        """Receive one packet on behalf of all threads, with the lock released."""
        link = self._link
        assert link is not None
        to_send = bool(self._unsent)
        incoming: Incoming | ServeError | None = INTERRUPTED
        self._leader = get_ident()
        self._leading = True
        try:
            self.lock.release()
            incoming = link.receive_or_event(wait, to_send) if to_send or wakeable else link.receive(wait)
        except ServeError as error:
            incoming = error
        finally:
            self.lock.acquire()
            self._leading = False
            if link is not self._link:
                link.close()  # the link was closed in the meantime
                incoming = None
            elif isinstance(incoming, ServeError):
                self._lose(incoming)  # even after KeyboardInterrupt: a packet may have been read and lost
        if incoming is not None and not isinstance(incoming, ServeError):
            self._process(incoming)

    def _stop_leading(self) -> None:
        """Stop leading after an interrupt that `_lead` or `_connect` did not notice."""
        self._leading = False
        self._lose(INTERRUPTED)

    def _process(self, incoming: Incoming) -> None:
        session = self.session
        self._unread = 0
        try:
            settled = session.receive(*incoming)
        except ServeError as error:
            self._lose(error)
            return
        if settled:
            self.uncollected = settled
        if self._unsent:
            try:
                self._push()
            except ConnectionLost as error:
                self._lose(error)
        if not self._unsent and (session.urgent or session.memory.drops.full):
            self.send_now()

    def _read_pending(self) -> None:
        """Read pending packets without waiting."""
        for _ in range(READ_EVERY):
            link = self._link
            if link is None or self._leading:
                return
            try:
                incoming = link.receive(0)
            except ServeError as error:
                self._lose(error)
                return
            if incoming is None:
                self._unread = 0
                return
            before = self.uncollected
            self._process(incoming)
            self.uncollected += before

    # ------------------------------------------------------------------------------------ connections

    def _close_link(self, link: ServerLink, linger: bool) -> None:
        if self._leading:
            link.interrupt()  # the leader closes it
        else:
            link.close(linger)

    def _connect(self, until: float | None) -> None:
        """Open a link while other threads wait. On failure, all unanswered requests fail."""
        end = monotonic() + self._reconnect_timeout
        limit = end if until is None else min(end, until)
        tired = False
        failure: ServeError = ConnectionLost("connecting was interrupted")
        dialed: tuple[ServerLink, Incoming] | None = None
        self._leader = get_ident()
        self._leading = True
        try:
            self.lock.release()
            dialed = self._dial(limit)
        except ServeError as error:
            failure = error
            early = limit < end and isinstance(error, ConnectionLost)
            tired = early and (self._was_connected or monotonic() >= limit)
        finally:
            self.lock.acquire()
            self._leading = False
            self._dialed = None
            if dialed is None and (self.closed or not tired):  # otherwise only the leader's own wait has timed out
                self.session.fail_all(Cancelled(CLOSED) if self.closed else failure)
        if dialed is None:
            return
        link, welcome = dialed
        try:
            self._process_welcome(welcome)
            if self.closed:
                raise Cancelled(CLOSED)
        except ServeError as error:
            link.close()
            self.session.fail_all(error)
            return
        self._link = link
        self._was_connected = True

    def _dial(self, limit: float) -> tuple[ServerLink, Incoming]:
        """A new link and its Welcome packet. Retries if a server was connected before, so that it can restart."""
        pause = PAUSE_S
        while True:
            try:
                return self._greet(limit)
            except ConnectionLost:
                if not self._was_connected or monotonic() + pause >= limit or self.closed:
                    raise
            self._closing.wait(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _greet(self, limit: float) -> tuple[ServerLink, Incoming]:
        link = self._dialed = open_link(self.address)
        try:
            self._say_hello(link)
            while (incoming := link.receive(limit - monotonic())) is None:
                if monotonic() >= limit:
                    raise no_server(self.address, "no response")
        except BaseException:
            link.close()
            raise
        return link, incoming
