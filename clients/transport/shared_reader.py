"""How threads share one link. The rule of the file: whoever waits reads for all, and nobody reads who need not.

One thread at a time is the leader: it receives, without the lock, and settles whatever came, with it. Other waiting
threads are followers: each sleeps on a lock of its own, its gate, until its answer is here or it is its turn to lead.
A thread of ours, the reader, exists only while somebody wants to be called back.

All methods named for what a user does take the lock themselves; those with a leading underscore are called with it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from shmserve.clients.future import FINISHED, PENDING, Future
from shmserve.clients.transport.address import Address
from shmserve.clients.transport.link import CLOSED
from shmserve.clients.transport.threaded import ThreadedLink, monotonic
from shmserve.errors import Cancelled, ConnectionLost
from shmserve.session import StreamTicket

LINGER_S = 5.0
"""So long the reader waits for more to do before it ends."""


class SharedLink(ThreadedLink):
    def __init__(self, address: Address, name: str, reconnect_timeout: float, memory_bytes: int) -> None:
        self.collecting = False
        """A result was asked for since the last submit."""
        self.after: list[Future] = []
        """Settled futures with callbacks, which are called when the lock is free."""
        super().__init__(address, name, reconnect_timeout, memory_bytes)
        _all.add(self)

    def _start(self) -> None:
        super()._start()
        self.condition = threading.Condition(self.lock)
        self._gates: dict[Any, None] = {}
        self.reader: threading.Thread | None = None
        self._reader_leads = False
        self._reader_gate: Any = None
        """Where it sleeps while another thread leads."""
        self._parked: Any = None
        self._needing_reader = 0

    def _on_full(self) -> Any:
        return _flusher(weakref.ref(self))

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
        """Sleeps until the future is settled or nobody leads; the reader, which has none, until something is new."""
        gate = threading.Lock()
        gate.acquire()
        if threading.current_thread() is self.reader:
            self._reader_gate = gate
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
                self._expire(future)
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

    def give_up(self, flow: StreamTicket) -> None:
        """Its user closes it."""
        self.lock.acquire()
        try:
            if not flow.ended and self.session.cancel(flow) and self._link is not None:
                self.send_now()
            flow.give_up()
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
        else:
            self.nudge()  # what is in the outbox should go

    def nudge(self) -> None:
        """With the lock: a deadline was added that may be earlier than what the reader waits for."""
        if self._reader_leads and self._link is not None:
            self._link.wake()
        elif self._reader_gate is not None:
            self._open(self._reader_gate)

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


_all: weakref.WeakSet[SharedLink] = weakref.WeakSet()


def _forked() -> None:
    for shared in list(_all):
        shared.forked()


os.register_at_fork(after_in_child=_forked)


def _flusher(shared: weakref.ref[SharedLink]) -> Any:
    """Gives much dropped memory back at once. Called within the collector: it does nothing where it would wait."""

    def flush() -> None:
        found = shared()
        if found is None or found.lock._is_owned() or not found.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            link = found._link
            if link is not None and not link.in_use() and not found._unsent and not found.closed:
                for packet in found.session.take():
                    if found._unsent or not link.send(packet):
                        found._unsent.append(packet)
        except ConnectionLost:
            return  # the next call will see it as well, and has somebody to tell
        finally:
            found.lock.release()

    return flush
