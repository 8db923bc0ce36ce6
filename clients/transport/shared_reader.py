"""Lets several threads share one link without a dedicated reader thread (leader/follower pattern).

One of the waiting threads is the leader: it receives packets, without holding the lock, and then settles the futures
of all threads, with the lock. The others are followers: each sleeps on a lock of its own, its gate, until its future is
settled or it becomes the leader. A separate reader thread exists only while there are futures with callbacks or other
watchers, which must be notified even if no thread waits.

Methods that users call, also through a future, take the lock themselves. All others are called with the lock held,
unless their docstring says otherwise.
"""

from __future__ import annotations

import threading
from typing import Any

from shmserve.clients.future import FINISHED, PENDING, Future
from shmserve.clients.transport.link import CLOSED
from shmserve.clients.transport.threaded import ThreadedLink, get_ident, monotonic
from shmserve.errors import Cancelled, ConnectionLost
from shmserve.session import StreamTicket

LINGER_S = 5.0
"""Idle time after which the reader thread ends."""


class SharedLink(ThreadedLink):
    """The link behind a client's futures. It implements `AnswerReader`."""

    def _start(self) -> None:
        super()._start()
        self.collecting = False
        """Whether a result was collected since the last submit."""
        self.after: list[Future] = []
        """Settled futures whose callbacks are run once the lock is released."""
        self.condition = threading.Condition(self.lock)
        """For concurrent.futures, which uses the condition of each future."""
        self._gates: dict[Any, None] = {}
        """Gates of the sleeping followers, in the order in which they become the leader."""
        self.reader: threading.Thread | None = None
        self._reader_leads = False
        self._reader_gate: Any = None
        """The gate on which the reader thread sleeps while another thread leads."""
        self._parked: Any = None
        """The gate on which the reader thread sleeps while no future needs it."""
        self._needing_reader = 0
        """Number of unsettled futures that have watchers."""

    # ------------------------------------------------------------------------------------ waiting

    def wait(self, future: Future, timeout: float | None) -> bool:
        """Wait until the future is settled or cancelled. False after `timeout` seconds."""
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
            self._leave()
        return True

    def _expire(self, future: Future) -> None:
        self.session.expire(future)
        if self._link is not None:
            self.send_now()  # the Cancel

    def _follow(self, future: Future | None, wait: float | None) -> None:
        """Sleep until the future is settled or the leader stops. The reader thread, without a future, sleeps until
        there is work.
        """
        if self._leader == get_ident():
            self._resign()
            return
        gate = threading.Lock()
        gate.acquire()
        if threading.current_thread() is self.reader:
            self._reader_gate = gate
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

    def _open(self, gate: Any) -> None:
        """Wake up the thread that sleeps on the gate. Does nothing if it has been woken already."""
        if gate in self._gates:
            del self._gates[gate]  # an interrupt cannot come between the two, as it could after a call of pop
            gate.release()

    def _leave(self) -> None:
        """End of each call, without the lock: wake up a follower if there is no leader, and run callbacks."""
        if self._gates and not self._leading:
            with self.lock:
                self._wake_follower()
        if self.after:
            self.call_back()

    def _wake_follower(self) -> None:
        if self._gates and not self._leading:
            self._open(next(iter(self._gates)))

    def call_back(self) -> None:
        """Run the callbacks of settled futures. Called without the lock."""
        while self.after:
            try:
                future = self.after.pop()
            except IndexError:
                return  # another thread was faster
            future.call_back()

    def tell(self, future: Future) -> None:
        """Notify the watchers of a future that was settled, has failed or was cancelled. Called with the lock held."""
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

    # ------------------------------------------------------------------------------------ called by futures

    def look(self, future: Future) -> None:
        """Send buffered requests, read pending packets without waiting, and expire the future if it is due."""
        try:
            with self.lock:
                if self.outbox.messages or self._link is None:
                    self.send_now(future)
                if not self._leading:
                    self._read_what_is_there()
                if future._state is PENDING and future.deadline is not None and monotonic() >= future.deadline:
                    self._expire(future)
        finally:
            self._leave()

    def cancel(self, future: Future) -> None:
        try:
            with self.lock:
                if future._state is PENDING and self.session.cancel(future):
                    future.mark_cancelled()
                    if self._link is not None:
                        self.send_now()
        finally:
            self._leave()

    def give_up(self, flow: StreamTicket) -> None:
        """Close a stream on behalf of its user."""
        try:
            with self.lock:
                if not flow.ended and self.session.cancel(flow) and self._link is not None:
                    self.send_now()
                flow.give_up()
        finally:
            self._leave()

    def flush(self) -> None:
        try:
            with self.lock:
                if self.outbox.messages or self.session.has_returns:
                    self.send_now()
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """Sleep between polls; ends early when the client is closed."""
        self._closing.wait(seconds)

    # ------------------------------------------------------------------------------------ the reader thread

    def need_reader(self, future: Future) -> None:
        """Ensure that the reader thread runs until this future is settled. Called with the lock held."""
        watch = future.watch()
        if watch.counted or self.closed:
            return
        watch.counted = True
        self._needing_reader += 1
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, name="shmserve-reader", daemon=True)
            self.reader.start()
        elif self._parked is not None:
            self._unpark()
        else:
            self.nudge()  # it may sleep while the request is still in the outbox

    def nudge(self) -> None:
        """Wake up the reader thread, so that it sends the outbox and computes its timeout again. Called with the lock
        held."""
        if self._reader_leads and self._link is not None:
            self._link.wake()
        elif self._reader_gate is not None:
            self._open(self._reader_gate)

    def _read(self) -> None:
        """The reader thread. It reads while futures have watchers, and ends after LINGER_S without any."""
        lock = self.lock
        needed = True
        while needed and lock is self.lock:  # a callback may have forked, which replaces the lock
            with lock:
                needed = False
                try:
                    needed = self._read_until_callbacks()
                finally:
                    if not needed:
                        self.reader = None
            self._leave()

    def _read_until_callbacks(self) -> bool:
        """False: the reader thread is not needed any more."""
        while not self.closed:
            if not self._needing_reader:
                if not self._park():
                    return False
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
                return True
        return False

    def _park(self) -> bool:
        """Let another thread lead, and sleep until a future needs the reader thread. False: none did for LINGER_S."""
        self._wake_follower()
        gate = self._parked = threading.Lock()
        gate.acquire()
        self.lock.release()
        try:
            gate.acquire(timeout=LINGER_S)
        finally:
            self.lock.acquire()
            self._parked = None
        return self._needing_reader > 0

    def _unpark(self) -> None:
        gate, self._parked = self._parked, None
        gate.release()

    # ------------------------------------------------------------------------------------ closing

    def close(self) -> None:
        """Cancel all unanswered requests and close the link. Idempotent, and callable from any thread."""
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
                if self._parked is not None:
                    self._unpark()
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
        """Called without the lock."""
        link, session = self._link, self.session
        self._start()
        if link is not None:
            link.abandon()
        for ticket in session.tickets.values():
            if isinstance(ticket, Future):
                ticket._watch = None  # its waiters are in the parent process
        session.fail_all(ConnectionLost("the request was sent by the parent process, before the fork"))
        session.close()
