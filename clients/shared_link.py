"""A session and its link that several threads share, without a dedicated reader thread (leader/follower pattern).

One of the waiting threads is the leader: it receives packets, without holding the lock, and then settles the futures of
all threads, with the lock. The others are followers: each sleeps on its own lock, its gate, until its future is settled
or it becomes the leader. A separate reader thread exists only while there are futures with callbacks or other watchers,
which must be notified even if no thread waits.

Methods that users call, also through a future, take the lock themselves. All others are called with the lock held,
unless their docstring says otherwise, and release it only while they wait for the kernel. Only the leader connects or
receives.

KeyboardInterrupt can be raised after any call. Therefore the lock is released inside the `try` that takes it again, and
a thread that was interrupted between the two and finds itself the leader later gives up the link (`_stop_leading`).
Each call ends with `_end_call` in a `finally`: the exception could come between the start of a context manager written
in Python and its block, and leave the lock locked.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from shmserve.clients.future import PENDING, Future
from shmserve.errors import Cancelled, ConnectionLost, ServeError, Unavailable
from shmserve.session import Incoming, StreamTicket, Ticket
from shmserve.transport.address import Address, no_server
from shmserve.transport.link import CLOSED, INTERRUPTED, MAX_PAUSE_S, PAUSE_S, ServerLink, SessionLink, open_link

LINGER_S = 5.0
"""Idle time after which the reader thread ends."""
READ_EVERY = 16
"""Number of packets sent without reading after which pending input is read: a full socket would block the server."""

monotonic = time.monotonic
get_ident = threading.get_ident


class _ReaderThread(threading.Thread):
    """Reads while futures have watchers. Exists only while it runs."""

    def __init__(self, link: SharedLink) -> None:
        super().__init__(name="shmserve-reader", daemon=True)
        self._link = link
        self.leads = False
        self.gate: Any = None
        """The gate on which it sleeps while another thread leads."""
        self.parked: Any = None
        """The gate on which it sleeps while no future needs it."""

    def run(self) -> None:
        self._link.read(self)

    def unpark(self) -> None:
        gate, self.parked = self.parked, None
        if gate is not None:
            gate.release()


class SharedLink(SessionLink):
    """The link behind a client's futures. It implements `ResponseReader`."""

    def __init__(self, address: Address, name: str, reconnect_timeout: float, memory_bytes: int) -> None:
        super().__init__(address, name, reconnect_timeout, memory_bytes)
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
        self.result_collected = False
        """Whether a result was collected since the last submit."""
        self.to_call_back: list[Future] = []
        """Settled futures whose callbacks are run once the lock is released."""
        self.condition = threading.Condition(self.lock)
        """For concurrent.futures, which uses the condition of each future."""
        self._gates: dict[Any, None] = {}
        """Gates of the sleeping followers, in the order in which they become the leader."""
        self.reader: _ReaderThread | None = None
        self._needing_reader = 0
        """Number of unsettled futures that have watchers."""

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
        """Sends everything in the outbox. Waits until the link is writable, up to the ticket's deadline. Called with
        the lock held."""
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
        """Sends while the link is full. Reads in between, since the server may be blocked on sending to us."""
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
        """Receives one packet on behalf of all threads, with the lock released."""
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
        """Stops leading after an interrupt that `_lead` or `_connect` did not notice."""
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
        """Reads pending packets without waiting."""
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
        """Opens a link while other threads wait. On failure, all unanswered requests fail."""
        end = monotonic() + self._reconnect_timeout
        limit = end if until is None else min(end, until)
        leader_timed_out = False
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
            leader_timed_out = early and (self._was_connected or monotonic() >= limit)
        finally:
            self.lock.acquire()
            self._leading = False
            self._dialed = None
            if dialed is None and (self.closed or not leader_timed_out):  # otherwise the others continue to wait
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

    # ------------------------------------------------------------------------------------ waiting

    def wait(self, future: Future, timeout: float | None) -> bool:
        """Waits until the future is settled or cancelled. False after `timeout` seconds."""
        end = None if timeout is None else monotonic() + timeout
        try:
            with self.lock:
                while future._state is PENDING:
                    if self.outbox.messages or self._link is None:
                        self.send_now(future)
                        if future._state is not PENDING:
                            break
                    deadline = future.deadline
                    wait = None
                    if end is not None or deadline is not None:
                        now = monotonic()
                        if deadline is not None and now >= deadline:
                            self._expire(future)
                            break
                        if end is not None and now >= end:
                            return False
                        wait = min(moment for moment in (end, deadline) if moment is not None) - now
                    if self._leading:
                        self._follow(future, wait)
                    elif self._link is not None:
                        self._lead(wait, False)
        finally:
            self._end_call()
        return True

    def _expire(self, future: Future) -> None:
        self.session.expire(future)
        if self._link is not None:
            self.send_now()  # the Cancel

    def _follow(self, future: Future | None, wait: float | None) -> None:
        """Sleeps until the future is settled or the leader stops. The reader thread, without a future, sleeps until
        there is work.
        """
        if self._leader == get_ident():
            self._stop_leading()
            return
        gate = threading.Lock()
        gate.acquire()
        reader = self.reader
        if reader is not None and threading.current_thread() is reader:
            reader.gate = gate
        self._gates[gate] = None
        gates = future.watch().gates if future is not None else []
        gates.append(gate)
        try:
            self.lock.release()
            gate.acquire(timeout=-1 if wait is None else max(0.0, wait))
        finally:
            self.lock.acquire()
            self._gates.pop(gate, None)
            gates.remove(gate)

    def _open_gate(self, gate: Any) -> None:
        """Wakes up the thread that sleeps on the gate. Does nothing if it has been woken already."""
        if gate in self._gates:
            del self._gates[gate]  # an interrupt cannot come between lookup and removal, as it could with a call of pop
            gate.release()

    def _end_call(self) -> None:
        """Ends each call, without the lock: wakes up a follower if there is no leader, and runs callbacks."""
        if self._gates and not self._leading:
            with self.lock:
                self._wake_follower()
        if self.to_call_back:
            self.call_back()

    def _wake_follower(self) -> None:
        if self._gates and not self._leading:
            self._open_gate(next(iter(self._gates)))

    def call_back(self) -> None:
        """Runs the callbacks of settled futures. Called without the lock."""
        while self.to_call_back:
            try:
                future = self.to_call_back.pop()
            except IndexError:
                return  # another thread has taken it
            future.call_back()

    def notify(self, future: Future) -> None:
        """Notifies the watchers of a future that was settled, has failed or was cancelled. Called with the lock
        held."""
        watch = future.watch()
        for gate in watch.gates:
            self._open_gate(gate)
        if watch.counted:
            watch.counted = False
            self._needing_reader -= 1
        future.notify_waiters()
        if watch.callbacks:
            self.to_call_back.append(future)

    # ------------------------------------------------------------------------------------ called by futures

    def poll(self, future: Future) -> None:
        """Sends buffered requests, reads pending packets without waiting, and expires the future if it is due."""
        try:
            with self.lock:
                if self.outbox.messages or self._link is None:
                    self.send_now(future)
                if not self._leading:
                    self._read_pending()
                if future._state is PENDING and future.deadline is not None and monotonic() >= future.deadline:
                    self._expire(future)
        finally:
            self._end_call()

    def cancel(self, future: Future) -> None:
        try:
            with self.lock:
                if future._state is PENDING and self.session.cancel(future):
                    future.mark_cancelled()
                    if self._link is not None:
                        self.send_now()
        finally:
            self._end_call()

    def close_stream(self, flow: StreamTicket) -> None:
        """Closes a stream on behalf of its user."""
        try:
            with self.lock:
                if not flow.ended and self.session.cancel(flow) and self._link is not None:
                    self.send_now()
                flow.close()
        finally:
            self._end_call()

    def flush(self) -> None:
        try:
            with self.lock:
                if self.outbox.messages or self.session.has_returns:
                    self.send_now()
        finally:
            self._end_call()

    def pause(self, seconds: float) -> None:
        """Sleeps between polls; ends early when the client is closed."""
        self._closing.wait(seconds)

    # ------------------------------------------------------------------------------------ the reader thread

    def ensure_reader(self, future: Future) -> None:
        """Ensures that the reader thread runs until this future is settled. Called with the lock held."""
        watch = future.watch()
        if watch.counted or self.closed:
            return
        watch.counted = True
        self._needing_reader += 1
        if self.reader is None:
            self.reader = _ReaderThread(self)
            self.reader.start()
        elif self.reader.parked is not None:
            self.reader.unpark()
        else:
            self.wake_reader(self.reader)  # it may sleep while the request is still in the outbox

    def wake_reader(self, reader: _ReaderThread) -> None:
        """Wakes up the reader thread, so that it sends the outbox and computes its timeout again. Called with the lock
        held."""
        if reader.leads and self._link is not None:
            self._link.wake()
        elif reader.gate is not None:
            self._open_gate(reader.gate)

    def read(self, reader: _ReaderThread) -> None:
        """The reader thread. It reads while futures have watchers, and ends after LINGER_S without any."""
        lock = self.lock
        needed = True
        while needed and lock is self.lock:  # a callback may have forked, which replaces the lock
            with lock:
                needed = False
                try:
                    needed = self._read_until_callbacks(reader)
                finally:
                    if not needed:
                        self.reader = None
            self._end_call()

    def _read_until_callbacks(self, reader: _ReaderThread) -> bool:
        """Returns False if the reader thread is not needed any more."""
        while not self.closed:
            if not self._needing_reader:
                if not self._park(reader):
                    return False
                continue
            if self.outbox.messages or self._link is None:
                self.send_now()
            deadline = self.session.deadline()
            wait = None if deadline is None else max(0.0, deadline - monotonic())
            if self._leading:
                self._follow(None, wait)
            elif self._link is not None:
                reader.leads = True
                try:
                    self._lead(wait, True)
                finally:
                    reader.leads = False
            self.session.tick(monotonic())
            if self.to_call_back:
                return True
        return False

    def _park(self, reader: _ReaderThread) -> bool:
        """Lets another thread lead, and sleeps until a future needs the reader thread. False: none did for LINGER_S."""
        self._wake_follower()
        gate = reader.parked = threading.Lock()
        gate.acquire()
        self.lock.release()
        try:
            gate.acquire(timeout=LINGER_S)
        finally:
            self.lock.acquire()
            reader.parked = None
        return self._needing_reader > 0

    # ------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Cancels all unanswered requests and closes the link. Idempotent, and callable from any thread."""
        try:
            with self.lock:
                if self.closed:
                    return
                link = self._link
                if link is not None and not self._unsent:
                    try:
                        for packet in [*self.session.take(), self.session.bye()]:
                            if not link.send(packet):
                                break  # closing the link implies Bye
                    except ConnectionLost:
                        pass  # already disconnected
                self.closed = True
                self._closing.set()
                self.session.fail_all(Cancelled(CLOSED))
                reader = self.reader
                if reader is not None:
                    reader.unpark()
                busy = link or self._dialed
                if busy is not None and self._leading:
                    busy.interrupt()
                while self._leading:
                    self._follow(None, None)
                if self._link is not None:
                    self._link.close(linger=True)
                    self._link = None
                self.session.disconnected()
                self.session.close()
                for gate in list(self._gates):
                    self._open_gate(gate)
        finally:
            self._end_call()
        if reader is not None and reader is not threading.current_thread():
            reader.join()

    def forked(self) -> None:
        """Called without the lock."""
        link, session, closed = self._link, self.session, self.closed
        SharedLink.__init__(self, self.address, self._name, self._reconnect_timeout, self._memory_bytes)
        self.closed = closed
        if link is not None:
            link.abandon()
        for ticket in session.tickets.values():
            if isinstance(ticket, Future):
                ticket.drop_watch()  # its waiters are in the parent process
        session.fail_all(ConnectionLost("the request was sent by the parent process, before the fork"))
        session.close()
