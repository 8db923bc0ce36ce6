"""How threads share one link. The rule of the file: whoever waits reads for all, and nobody reads who need not.

One thread at a time is the leader: it receives, without the lock, and settles whatever came, with it. Other waiting
threads are followers: each sleeps on a lock of its own, its gate, until its answer is here or it is its turn to lead.
A thread of ours, the reader, exists only while somebody wants to be called back.

All methods named for what a user does take the lock themselves; those with a leading underscore are called with it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from shmserve.clients.future import FINISHED, PENDING, Future
from shmserve.clients.transport import Address, Incoming, Link, no_server, open_link
from shmserve.errors import Cancelled, ConnectionLost, ServeError, Unavailable
from shmserve.session import Packet, Session

CLOSED = "the client was closed before the answer came"
PAUSE_S = 0.01
PAUSE_MOST_S = 0.25
LINGER_S = 5.0
"""So long the reader waits for more to do before it ends."""
READ_EVERY = 16
"""After so many packets sent with nothing read, what has come is taken in: else the server would wait for us."""

monotonic = time.monotonic


class Engine:
    def __init__(self, address: Address, name: str, reconnect_timeout: float, memory_bytes: int) -> None:
        self.address = address
        self.uncollected = 0
        """About how many answers have come whose result nobody has asked for yet."""
        self.collecting = False
        """A result was asked for since the last submit."""
        self.after: list[Future] = []
        """Settled futures with callbacks, which are called when the lock is free."""
        self.closed = False
        self._name = name
        self._reconnect_timeout = reconnect_timeout
        self._memory_bytes = memory_bytes
        self._start()
        _all.add(self)

    def _start(self) -> None:
        """Also for a forked child: nothing of the parent is used or given back there."""
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.session = Session(
            self.address.memory, memory_bytes=self._memory_bytes, on_full=_flusher(weakref.ref(self))
        )
        self.outbox = self.session.outbox
        self._unsent: list[Packet] = []
        self._link: Link | None = None
        self._dialed: Link | None = None
        self._was_connected = False
        self._leading = False
        self._unread = 0
        self._gates: dict[Any, None] = {}
        self._closing = threading.Event()
        self.reader: threading.Thread | None = None
        self._reader_leads = False
        self._parked: Any = None
        self._needing_reader = 0

    # ------------------------------------------------------------------------------------ sending

    def send_now(self, future: Future | None = None) -> None:
        """With the lock: everything in the outbox goes out. Waits for room, within the future's deadline."""
        if self.closed:
            self.session.fail_all(Cancelled("the client is closed"))
            raise Unavailable("the client is closed")
        if self._link is None:
            if self._leading:
                return  # another thread is connecting; all that is unanswered will be sent then
            self._connect(future.deadline if future is not None else None)
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
            self._push_all(future)
        self._unread += 1
        if self._unread >= READ_EVERY and not self._leading:
            self._read_what_is_there()

    def _push(self) -> None:
        link = self._link
        while self._unsent and link is not None and link.send(self._unsent[0]):
            del self._unsent[0]

    def _push_all(self, future: Future | None) -> None:
        """The link is full. What has come is read meanwhile: the server may be waiting for that."""
        while self._unsent and self._link is not None and not self.closed:
            deadline = future.deadline if future is not None else None
            wait = None if deadline is None else deadline - monotonic()
            if future is not None and wait is not None and wait <= 0:
                self.session.expire(future)
                return
            try:
                if self._leading:
                    link = self._link
                    self.lock.release()
                    try:
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
        """Receives one packet for all. The lock is free meanwhile."""
        link = self._link
        assert link is not None
        to_send = bool(self._unsent)
        self._leading = True
        self.lock.release()
        incoming: Incoming | ServeError | None = ConnectionLost("reading was interrupted")
        try:
            incoming = link.receive(wait, to_send, wakeable)
        except ServeError as error:
            incoming = error
        finally:
            self.lock.acquire()
            self._leading = False
            if link is not self._link:
                link.close()  # it was given up meanwhile
                incoming = None
            elif isinstance(incoming, ServeError):
                self._lose(incoming)  # also after KeyboardInterrupt, when a packet may have been read and lost
        if incoming is not None and not isinstance(incoming, ServeError):
            self._take_in(incoming)

    def _take_in(self, incoming: Incoming) -> None:
        session = self.session
        self._unread = 0
        try:
            settled = session.receive(*incoming)
        except ServeError as error:
            self._lose(error)
            return
        if settled:
            self.uncollected = settled
        if session.goodbye is not None:
            self._lose(session.goodbye)
            return
        if self._unsent:
            try:
                self._push()
            except ConnectionLost as error:
                self._lose(error)
        elif session.urgent or session.memory.drops.full:
            self.send_now()

    def _read_what_is_there(self) -> None:
        """Whatever can be had without waiting."""
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
            self._take_in(incoming)
            self.uncollected += before

    # ------------------------------------------------------------------------------------ connections

    def _lose(self, error: ServeError) -> None:
        """The link has ended, or is of no use. What can be sent again waits for the next one, but not if the server
        itself ended the link and said why."""
        link, self._link = self._link, None
        if link is None:
            return
        self._unsent.clear()
        self.session.disconnected()
        if self._leading:
            link.interrupt()  # the leader closes it
        else:
            link.close()
        if self.closed:
            self.session.fail_all(Cancelled(CLOSED))
        elif self.session.goodbye is not None:
            self.session.fail_all(self.session.goodbye)

    def _connect(self, until: float | None) -> None:
        """Makes a link, while others wait. Where it cannot, everything unanswered fails."""
        end = monotonic() + self._reconnect_timeout
        limit = end if until is None else min(end, until)
        failure: ServeError = ConnectionLost("connecting was interrupted")
        found: tuple[Link, Incoming] | None = None
        self._leading = True
        self.lock.release()
        try:
            found = self._dial(limit)
        except ServeError as error:
            failure = error
        finally:
            self.lock.acquire()
            self._leading = False
            self._dialed = None
            if found is None and (limit == end or monotonic() < limit):
                self.session.fail_all(Cancelled(CLOSED) if self.closed else failure)
        if found is None:
            return
        try:
            self.session.receive(*found[1])
            if not self.session.connected:
                raise self.session.goodbye or ConnectionLost(f"{self.address.url} is no shmserve server")
            if self.closed:
                raise Cancelled(CLOSED)
        except ServeError as error:
            found[0].close()
            self.session.fail_all(error)
            return
        self._link = found[0]
        self._was_connected = True

    def _dial(self, limit: float) -> tuple[Link, Incoming]:
        """A link, and the packet with its Welcome. A server that was there before is given time to come back."""
        pause = PAUSE_S
        while True:
            try:
                return self._greet(limit)
            except ConnectionLost:
                if not self._was_connected or monotonic() + pause >= limit or self.closed:
                    raise
            self._closing.wait(pause)
            pause = min(2 * pause, PAUSE_MOST_S)

    def _greet(self, limit: float) -> tuple[Link, Incoming]:
        link = self._dialed = open_link(self.address)
        try:
            link.send(self.session.hello(os.getpid(), self._name))
            incoming = link.receive(limit - monotonic())
            while incoming is None:
                wait = limit - monotonic()
                if wait <= 0:
                    raise no_server(self.address, "it does not answer")
                incoming = link.receive(wait)
        except BaseException:
            link.close()
            raise
        return link, incoming

    # ------------------------------------------------------------------------------------ waiting

    def wait(self, future: Future, timeout: float | None) -> bool:
        """Until the future is settled, or cancelled. False: `timeout` seconds have passed."""
        end = None if timeout is None else monotonic() + timeout
        lock = self.lock
        lock.acquire()
        try:
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
                        self.session.expire(future)
                        continue
                    if end is not None and now >= end:
                        return False
                    wait = min(moment for moment in (end, deadline) if moment is not None) - now
                if self._leading:
                    self._follow(future, wait)
                elif self._link is not None:
                    self._lead(wait, False)
        finally:
            self._leave()
        return True

    def _follow(self, future: Future | None, wait: float | None) -> None:
        """Sleeps until the future is settled or nobody leads."""
        gate = threading.Lock()
        gate.acquire()
        self._gates[gate] = None
        gates = future.watch().gates if future is not None else []
        gates.append(gate)
        self.lock.release()
        try:
            gate.acquire(timeout=-1 if wait is None else max(0.0, wait))
        finally:
            self.lock.acquire()
            self._gates.pop(gate, None)
            gates.remove(gate)

    def _open(self, gate: Any) -> None:
        if self._gates.pop(gate, self) is None:
            gate.release()

    def _leave(self) -> None:
        """A call ends: another waiting thread leads, the lock is given back, callbacks are called."""
        if self._gates and not self._leading:
            self._open(next(iter(self._gates)))
        self.lock.release()
        if self.after:
            self.call_back()

    def call_back(self) -> None:
        """Without the lock."""
        while self.after:
            try:
                future = self.after.pop()
            except IndexError:
                return  # another thread was faster
            future.call_back()

    def tell(self, future: Future) -> None:
        """With the lock: a watched future is settled, has failed or was cancelled."""
        watch = future.watch()
        for gate in watch.gates:
            self._open(gate)
        if watch.counted:
            watch.counted = False
            self._needing_reader -= 1
        for waiter in watch.waiters:
            if future._state is not FINISHED:
                waiter.add_cancelled(future)
            elif future._exception is not None:
                waiter.add_exception(future)
            else:
                waiter.add_result(future)
        if watch.callbacks:
            self.after.append(future)

    # ------------------------------------------------------------------------------------ what futures do

    def look(self, future: Future) -> None:
        """Sends what is to be sent, and takes in what has come."""
        self.lock.acquire()
        try:
            if self.outbox.messages or self._link is None:
                self.send_now(future)
            if not self._leading:
                self._read_what_is_there()
            if future._state is PENDING and future.deadline is not None and monotonic() >= future.deadline:
                self.session.expire(future)
                self.send_now()
        finally:
            self._leave()

    def cancel(self, future: Future) -> None:
        self.lock.acquire()
        try:
            if future._state is PENDING and self.session.cancel(future):
                future.mark_cancelled()
                if self._link is not None:
                    self.send_now()
        finally:
            self._leave()

    def flush(self) -> None:
        self.lock.acquire()
        try:
            if self.outbox.messages or self.session.has_returns:
                self.send_now()
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """For who asks again and again; ends when the client is closed."""
        self._closing.wait(seconds)

    # ------------------------------------------------------------------------------------ the reader

    def need_reader(self, future: Future) -> None:
        """With the lock: somebody wants to be told of it without asking."""
        watch = future.watch()
        if watch.counted or self.closed:
            return
        watch.counted = True
        self._needing_reader += 1
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, name="shmserve-reader", daemon=True)
            self.reader.start()
        elif self._parked is not None:
            self._parked.release()
            self._parked = None
        elif self._reader_leads and self._link is not None:
            self._link.wake()  # what is in the outbox should go

    def nudge(self) -> None:
        """With the lock: a deadline was added that may be earlier than what the reader waits for."""
        if self._reader_leads and self._link is not None:
            self._link.wake()

    def _read(self) -> None:
        """The reader thread. It leads only while somebody wants to be told; then it waits a while for more."""
        lock = self.lock
        lock.acquire()
        try:
            while not self.closed and lock is self.lock:
                if not self._needing_reader:
                    if not self._park():
                        break
                    continue
                if self.outbox.messages or self._link is None:
                    self.send_now()
                deadline = self.session.deadline()
                wait = None if deadline is None else max(0.0, deadline - monotonic())
                if self._leading:
                    self._follow(None, wait)
                elif self._link is not None:
                    self._reader_leads = True
                    try:
                        self._lead(wait, True)
                    finally:
                        self._reader_leads = False
                self.session.tick(monotonic())
                if self.after:
                    lock.release()
                    try:
                        self.call_back()
                    finally:
                        lock.acquire()
        finally:
            self.reader = None
            self._leave()

    def _park(self) -> bool:
        """Lets others lead. False: nothing came up for a while."""
        if self._gates and not self._leading:
            self._open(next(iter(self._gates)))
        gate = self._parked = threading.Lock()
        gate.acquire()
        self.lock.release()
        try:
            gate.acquire(timeout=LINGER_S)
        finally:
            self.lock.acquire()
            self._parked = None
        return self._needing_reader > 0

    # ------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """What is unanswered is cancelled. May be called again, and from any thread."""
        self.lock.acquire()
        try:
            if self.closed:
                return
            link = self._link
            if link is not None and not self._unsent:
                try:
                    for packet in [*self.session.take(), self.session.bye()]:
                        if not link.send(packet):
                            break  # the end of the link says as much
                except ConnectionLost:
                    pass  # it has ended first
            self.closed = True
            self._closing.set()
            self.session.fail_all(Cancelled(CLOSED))
            if self._parked is not None:
                self._parked.release()
                self._parked = None
            reader = self.reader
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
                self._open(gate)
        finally:
            self._leave()
        if reader is not None and reader is not threading.current_thread():
            reader.join()

    def forked(self) -> None:
        """In the child. Its threads, its link and its memory are the parent's; it begins anew at the first call."""
        link, session = self._link, self.session
        self.after = []
        self._start()
        if link is not None:
            link.abandon()
        for ticket in session.tickets.values():
            if isinstance(ticket, Future):
                ticket._watch = None  # who waits for it is not in this process
        session.fail_all(ConnectionLost("it was asked by the parent process, before the fork"))
        session.close()

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None:
            link.close()


_all: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    for engine in list(_all):
        engine.forked()


os.register_at_fork(after_in_child=_forked)


def _flusher(engine: weakref.ref[Engine]) -> Any:
    """Gives much dropped memory back at once. Called within the collector: it does nothing where it would wait."""

    def flush() -> None:
        found = engine()
        if found is None or found.lock._is_owned() or not found.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            if found._link is not None and not found._unsent and not found.closed:
                for packet in found.session.take():
                    if found._unsent or not found._link.send(packet):
                        found._unsent.append(packet)
        except ConnectionLost:
            return  # the next call will see it as well, and has somebody to tell
        finally:
            found.lock.release()

    return flush
