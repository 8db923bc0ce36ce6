"""Responses that a model sends on its own: any number for a request, from any thread, during a batch or later.

Invariants: the turn is the lock that guards all worker state (link, outbox, memory). The main thread holds it except
while the model runs and while it waits. One waiting thread at a time reads the link on behalf of all, so that no waiter
blocks the messages that it waits for.
"""

from __future__ import annotations

import os
import select
import threading
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import count
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar

from shmserve.errors import Cancelled, ConnectionLost, ModelFailed, Unavailable
from shmserve.protocol.messages import Failure
from shmserve.protocol.worker_messages import BUFFER_BYTES, Prefilled, Row, Unread
from shmserve.workers.model_calls.answer import Response
from shmserve.workers.model_calls.coroutines import SENT, settle_soon
from shmserve.workers.model_calls.stream import (
    IN_FORKED_PROCESS,
    NO_RESPONSE,
    SENDER_CLOSED,
    SENT_TWICE,
    ResponseSender,
    StreamClosed,
    bytes_of,
)

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work

KEPT = 1024
"""Maximum number of queued responses of a request whose caller does not read, if the model does not wait for room."""
Sent = TypeVar("Sent")
_FINAL = "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
CANCELLED = Failure(Cancelled.code, "the request was cancelled while the model answered it")
_STOPPED = Failure(Unavailable.code, "the model is being unloaded; its answer ends here")


def _unconnected(*_: object) -> Any:
    raise RuntimeError("there is no link to the server")


class OpenResponses:
    """Created by the main thread, which holds the turn from then on, except while the model runs in it."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self.open: dict[int, ResponseSender] = {}
        """By request: the streams whose last response has not been reported."""
        self.lost: Exception | None = None
        """The error after which the link can no longer be read, from whichever thread read it."""
        self.connected = False
        self.turn = threading.Lock()
        self.turn.acquire()
        self._condition = threading.Condition(self.turn)
        self.withdrawn: set[int] = set()
        """Cancelled requests without a stream, in the running or the next batch. The loop clears it after a batch."""
        self._forgotten: deque[ResponseSender] = deque()
        self._tickets = count(1)
        """One for each call of `send_soon` or `announce`."""
        self._last_ticket = self._served = 0
        """A ticket that was taken lately, and how many calls have had the turn: if fewer, others follow."""
        self._poll = select.poll()
        self._wakeup_fd = -1
        self._reading = False
        self._stopped = False
        self._forked = False
        self.listening = False
        """Whether there is a link on which replies can arrive."""
        self._read: Callable[[], object] = _unconnected
        self._deferred: deque[Any] = deque()
        self._ended: Callable[[], None] = lambda: None
        self._send_response: Callable[[Row], None] = _unconnected
        self._add_report: Callable[[Unread | Prefilled], None] = _unconnected
        self._row: Callable[[Work, Response], Row] = _unconnected
        self._discard: Callable[[Row], None] = _unconnected
        self._flush: Callable[[], None] = _unconnected

    def listen(
        self, descriptor: int, read: Callable[[], object], deferred: deque[Any], ended: Callable[[], None]
    ) -> None:
        """`read` handles all orders that have arrived on the link with this `descriptor` and flushes the outbox, which
        also sends the `deferred` messages of finalizers. `ended` is called, with the turn, when nothing more will
        arrive. Called before the model is loaded, because it may make calls then; never called without a link."""
        self._read, self._deferred, self._ended = read, deferred, ended
        self.listening = True
        self._poll.register(descriptor, select.POLLIN)

    def connect(
        self,
        send_response: Callable[[Row], None],
        report: Callable[[Unread | Prefilled], None],
        row: Callable[[Work, Response], Row],
        discard: Callable[[Row], None],
        flush: Callable[[], None],
    ) -> None:
        """`send_response` queues a response, `report` a report about a request, and `flush` sends them. `row` creates a
        response, `discard` frees one that is not sent."""
        self._send_response, self._add_report = send_response, report
        self._row, self._discard, self._flush = row, discard, flush
        self.connected = True

    # ------------------------------------------------------------------------------------ for the loop

    @property
    def decoupled(self) -> bool:
        """Whether a request may get any number of responses. Otherwise it gets one, and its batch waits for it."""
        return self._decoupled

    def set_decoupled(self, decoupled: bool) -> None:
        """Called by a backend that needs this object before the configuration is complete."""
        self._decoupled = decoupled

    @property
    def shared(self) -> bool:
        """Whether other threads may need the turn while the main thread waits for orders."""
        return self._decoupled or self._wakeup_fd >= 0 or threading.active_count() > 1

    def share(self) -> None:
        """Called if threads that Python does not know may need the turn."""
        self._open_wakeup_fd()

    def wait(self) -> None:
        """Returns when an order may have arrived. Raises the error of a lost link."""
        if self.lost is None:
            self._wait()
        if self.lost is not None:
            raise self.lost

    def read(self) -> None:
        """Called after the main thread has read the link: wakes threads that wait for messages."""
        if self._forgotten:
            self._end_forgotten()
        if self._reading:
            self._signal_reader()
        self._condition.notify_all()

    def widen_window(self, request: int, count: int) -> bool:
        """Adds room for responses. False: the request has no open stream, or none yet."""
        stream = self.open.get(request)
        if stream is None:
            return False
        stream.room += count
        stream.unread = False
        self._send_kept(stream)
        return True

    def cancel(self, requests: Iterable[int]) -> None:
        """Cancels requests that are running, about to run, or have just ended."""
        for request in requests:
            stream = self.open.get(request)
            if stream is None:
                self.withdrawn.add(request)
                continue
            stream.cancelled = True
            if stream.abort is not None and all(one.dropped for one in stream.answered_with):
                # Abort before the futures of kept responses resolve, or a coroutine would continue until its loop
                # processes the cancellation.
                stream.abort()
            self._drop_kept(stream)

    def stop(self, linked: bool) -> None:
        """Ends all open streams, wakes all waiters, and releases the turn permanently. `linked`: the link is still
        open."""
        if self._stopped:
            return
        self._stopped = True
        if not linked:
            self.lost = self.lost or ConnectionLost("the worker has ended")
        for stream in list(self.open.values()):
            self.fail(stream, _STOPPED)
        self.connected = self.listening = False
        self._ended()
        self._condition.notify_all()
        self._signal_reader()
        self.turn.release()

    def forked(self) -> None:
        """Called in a process that the model forked: the link belongs to the parent. The lock is replaced, because a
        thread that exists only in the parent may hold it."""
        self.turn = threading.Lock()
        self._condition = threading.Condition(self.turn)
        self.connected = self.listening = False
        self._forked = self._stopped = True

    def close(self) -> None:
        """Called after `stop`, when no thread of the model runs any more."""
        wakeup_fd, self._wakeup_fd = self._wakeup_fd, -1
        if wakeup_fd >= 0:
            os.close(wakeup_fd)

    # ------------------------------------------------------------------------------------ for the backend

    def begin(self, work: Work) -> ResponseSender:
        stream = self.open[work.request] = ResponseSender(work)
        stream.cancelled = work.request in self.withdrawn
        self._open_wakeup_fd()
        return stream

    def begin_late(self, work: Work) -> ResponseSender:
        """`begin` while the model runs, without the turn."""
        with self.turn:
            return self.begin(work)

    def fail(self, stream: ResponseSender, failure: Failure) -> None:
        """Ends a stream that the model will not answer any more. With the turn."""
        stream.cancelled = True
        self._end(stream, failure)
        self._drop_kept(stream)

    def take_over(self, request: int) -> bool:
        """Returns whether the request was still open; the model can no longer answer it. With the turn."""
        stream = self.open.pop(request, None)
        if stream is None:
            return False
        stream.cancelled = stream.over = True
        self._drop_kept(stream)
        return True

    def withdraw_sent(self, request: int) -> Response | None:
        """The response that was sent for a request of a model that is not decoupled: it takes precedence over what
        `execute` returns or raises. Nothing can be sent after this. With the turn.
        """
        stream = self.open.get(request)
        if stream is None or not self.take_over(request):
            return None
        stream.final = True
        return stream.response

    def collect(self, stream: ResponseSender) -> Response | None:
        """Waits for the model's last response; returns the response of a model that is not decoupled."""
        while not (stream.final or stream.over):
            self._end_forgotten()
            if not stream.over:
                self._wait()
        self.open.pop(stream.work.request, None)
        return stream.response

    # ------------------------------------------------------------------------------------ for the model, in any thread

    def check(self) -> None:
        """Raises if no reply can arrive any more."""
        self.check_process()
        if self.lost is not None or self._stopped or not self.listening:
            raise ConnectionLost("the server cannot be called: this worker has no link to it, or is stopping")

    def check_process(self) -> None:
        """Raises in a process that the model forked."""
        if self._forked:
            raise ConnectionLost(IN_FORKED_PROCESS)

    def wait_for(self, ready: Callable[[], bool], even_if_lost: bool = False) -> None:
        """Waits until `ready()`; `even_if_lost`: also after the link is lost. Without the turn."""
        with self.turn:
            self._open_wakeup_fd()
            while not ready():
                if not even_if_lost:
                    self.check()
                self._wait()

    def wake(self) -> None:
        """Wakes waiters whose condition may have changed. Without the turn."""
        with self.turn:
            self._changed()

    def read_while(self, wanted: Callable[[], bool], over: Callable[[], None]) -> None:
        """Reads the link for waiters that must not block. Called without the turn; calls `over` with it."""
        with self.turn:
            self._open_wakeup_fd()
            while wanted() and self.lost is None and not self._stopped:
                self._wait()
            over()

    def wake_reader(self) -> None:
        """Wakes the reading thread to send `deferred`. In any thread, also from finalizers."""
        if self._reading:
            self._signal_reader()

    def send(self, stream: ResponseSender, response: Response | None, final: bool) -> Awaitable[None]:
        """Sends a response, or the end of the responses. If the caller accepts no more for now, the response is queued;
        the model waits only if the queued ones are too large."""
        if self._nothing_to_send(stream, response):
            return SENT
        sent_at = monotonic_ns()
        with self.turn:
            if not self._begin_to_send(stream, response, final):
                return SENT
            if self._sent_at_once(stream, response, final, sent_at):
                return SENT
            row = self._row_of(stream, response, final, sent_at)
            size = bytes_of(row)
            while stream.kept and stream.kept_bytes + size > BUFFER_BYTES and not stream.dropped:
                if not stream.unread:
                    stream.unread = True
                    self._send_over(self._add_report, Unread(stream.work.request))
                self._wait()
            stream.final = stream.final or final
            stream.keep(row, None)
            self._send_kept(stream)
            return SENT

    def send_soon(
        self, stream: ResponseSender, response: Response | None, final: bool, loop: AbstractEventLoop | None
    ) -> Awaitable[None]:
        """Like `send`, for callers that must not block: a response without room is queued. A coroutine of `loop` can
        and should await the result. Responses of threads that wait for the turn at the same time are sent together."""
        if self._nothing_to_send(stream, response):
            return SENT
        sent_at = monotonic_ns()
        self._last_ticket = next(self._tickets)
        with self.turn:
            self._served += 1
            try:
                return self._send_or_keep(stream, response, final, loop, sent_at)
            finally:
                self._flush_unless_followed()

    def announce(self) -> Callable[[], None]:
        """Returns a function. Responses of `send_soon` are sent together when it is called. In any thread."""
        self._last_ticket = next(self._tickets)
        return self._flush_announced

    def _flush_announced(self) -> None:
        with self.turn:
            self._served += 1
            self._flush_unless_followed()

    def _send_or_keep(
        self,
        stream: ResponseSender,
        response: Response | None,
        final: bool,
        loop: AbstractEventLoop | None,
        sent_at: int,
    ) -> Awaitable[None]:
        if not self._begin_to_send(stream, response, final):
            return SENT
        if self._sent_at_once(stream, response, final, sent_at):
            return SENT
        if len(stream.kept) >= KEPT and response is not None:
            text = f"{KEPT} answers wait for a caller that does not read"
            advice = "; the model should await what send() returns" if loop is not None else ""
            self.fail(stream, Failure(Unavailable.code, text + advice))
            return SENT
        row = self._row_of(stream, response, final, sent_at)
        stream.final = stream.final or final
        sent: Future[None] | None = None if loop is None else loop.create_future()
        stream.keep(row, sent)
        return SENT if sent is None else sent

    def report_prefilled(self, stream: ResponseSender, tokens: int) -> None:
        """The prompt of a request has been computed. In any thread."""
        with self.turn:
            if self.connected and not stream.over:
                self._send_over(self._add_report, Prefilled(stream.work.request, tokens))

    def is_cancelled(self, request: int, stream: ResponseSender | None) -> bool:
        """Whether the request was cancelled, according to the messages received so far."""
        if self.connected and self.turn.acquire(blocking=False):
            try:
                if not self._reading:
                    self._read_link()
            finally:
                self.turn.release()
        return stream.cancelled if stream is not None else request in self.withdrawn

    def forget(self, stream: ResponseSender) -> None:
        """Called by finalizers, in any thread, if the model dropped a stream without a last response."""
        self._forgotten.append(stream)
        self._signal_reader()

    def fail_all(self, streams: Iterable[ResponseSender], failure: Failure) -> None:
        """Fails streams because the code that would have answered them failed. In any thread."""
        with self.turn:
            for stream in streams:
                if stream.work.request in self.open and not stream.over:
                    self.fail(stream, failure)

    # ------------------------------------------------------------------------------------ with the turn

    def _nothing_to_send(self, stream: ResponseSender, response: Response | None) -> bool:
        """Returns whether the stream is over; raises StreamClosed for an invalid send. Checked first without the turn,
        because acquiring the turn may block until the next batch."""
        if self._forked:
            raise StreamClosed(IN_FORKED_PROCESS)
        second = response is not None and stream.response is not None and not (self._decoupled or stream.over)
        if second or stream.final:
            raise StreamClosed(SENT_TWICE if second else SENDER_CLOSED)
        return stream.over

    def _begin_to_send(self, stream: ResponseSender, response: Response | None, final: bool) -> bool:
        """Returns False if there is nothing to send now. Raises StreamClosed if the model breaks the protocol."""
        if self._nothing_to_send(stream, response):
            return False
        if self._decoupled:
            return True
        if response is None and stream.response is None:
            raise StreamClosed(NO_RESPONSE)
        stream.response = stream.response or response
        stream.final = final
        if final:
            self._changed()
        return False

    def _sent_at_once(self, stream: ResponseSender, response: Response | None, final: bool, sent_at: int) -> bool:
        """Returns False if the response has to be queued, because the caller accepts no more, or behind others."""
        free = response is None or response.error is not None
        if stream.dropped or ((stream.room or free) and not stream.kept):
            self._send(stream, response, final, sent_at)
            return True
        return False

    def _send(self, stream: ResponseSender, response: Response | None, final: bool, sent_at: int) -> None:
        stream.final = stream.final or final
        if stream.over:
            return
        if stream.cancelled:
            if final:
                self._end(stream, None)
            return
        if not self.connected:
            if response is not None and response.error is not None:
                self._end(stream, response.error)
            elif final:
                self._end(stream, None)
            return
        self._report(stream, self._row_of(stream, response, final, sent_at))

    def _row_of(self, stream: ResponseSender, response: Response | None, final: bool, sent_at: int) -> Row:
        """`sent_at`: when the model called send. Waiting for room after that does not count as compute time."""
        computed_ns = max(0, sent_at - stream.since)
        if response is None:
            return Row(stream.work.request, (), times=(computed_ns, 0))
        began = monotonic_ns()
        row = self._row(stream.work, response)
        row.more = not final and row.error is None
        stream.since = monotonic_ns()
        row.times = (computed_ns, stream.since - began)
        return row

    def _report(self, stream: ResponseSender, row: Row) -> None:
        if row.more:
            stream.since = monotonic_ns()
        if _takes_room(row):
            stream.room -= 1
        if not row.more:
            self.open.pop(stream.work.request, None)
            stream.over = True
        self._send_over(self._send_response, row)
        if stream.over:
            self._changed()

    def _send_over(self, send: Callable[[Sent], None], sent: Sent) -> None:
        if self.lost is None:
            send(sent)
            self._flush_unless_followed()

    def _flush_unless_followed(self) -> None:
        """Sends what is queued, unless a call of `send_soon` or `announce` is open, which does so next. A lost link is
        recorded and not raised to the model; the main thread raises it."""
        if self._served < self._last_ticket or self.lost is not None or not self.connected:
            return
        try:
            self._flush()
        except ConnectionLost as error:
            self._link_lost(error)

    def _end(self, stream: ResponseSender, failure: Failure | None) -> None:
        """Sends the last response, with CANCELLED for a cancelled stream."""
        if stream.over:
            return
        if stream.cancelled and failure is None:
            failure = CANCELLED
        self.open.pop(stream.work.request, None)
        stream.over = True
        if not self._decoupled or not self.connected:
            stream.response = stream.response or Response(error=failure)
        else:
            times = (max(0, monotonic_ns() - stream.since), 0)
            self._send_over(self._send_response, Row(stream.work.request, (), failure, times=times))
        self._changed()

    def _send_kept(self, stream: ResponseSender) -> None:
        """Sends kept responses while there is room."""
        kept = stream.kept
        while kept and not stream.dropped and (stream.room or not _takes_room(kept[0][0])):
            row, sent = stream.pop_kept()
            self._report(stream, row)
            settle_soon(sent)
        if stream.dropped:
            self._drop_kept(stream)

    def _drop_kept(self, stream: ResponseSender) -> None:
        last = False
        while stream.kept:
            row, sent = stream.pop_kept()
            last = last or not row.more
            self._discard(row)
            settle_soon(sent)
        if last:
            self._end(stream, None)

    def _end_forgotten(self) -> None:
        while self._forgotten:
            stream = self._forgotten.popleft()
            if stream.over or stream.final:
                continue
            what = f"last response ({_FINAL})" if self._decoupled else "response"
            failure = Failure(ModelFailed.code, f"the model dropped the request without a {what}")
            if stream.kept:
                stream.keep(Row(stream.work.request, (), failure), None)
            else:
                self._end(stream, None if stream.cancelled else failure)

    # ------------------------------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Waits until something may have changed. Called with the turn, which is released while waiting."""
        if self._reading or self.lost is not None:
            self._condition.wait()
            return
        self._reading = True
        if self._deferred and self.listening and self.lost is None:  # after this check, `wake_reader` wakes this thread
            self._reading = False
            self._read_link()
            return
        self.turn.release()
        try:
            self._poll.poll()
        finally:
            self.turn.acquire()
            self._reading = False
        if self._wakeup_fd >= 0:
            with suppress(BlockingIOError):  # woken by the link, not by the eventfd
                os.eventfd_read(self._wakeup_fd)
        self._read_link()

    def _read_link(self) -> None:
        """Reads the link. An error ends all streams, and the main thread raises it."""
        try:
            if self.listening and self.lost is None:
                self._read()
        except Exception as error:
            self._link_lost(error)
            for stream in list(self.open.values()):
                stream.cancelled = stream.over = True
            self.open.clear()
        self._end_forgotten()
        self._condition.notify_all()

    def _link_lost(self, error: Exception) -> None:
        self.lost = error
        self._ended()
        self._changed()

    def _changed(self) -> None:
        """Wakes all waiters."""
        self._condition.notify_all()
        if self._reading:
            self._signal_reader()

    def _open_wakeup_fd(self) -> None:
        if self._wakeup_fd < 0:
            self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll.register(self._wakeup_fd, select.POLLIN)

    def _signal_reader(self) -> None:
        """Wakes the thread that reads the link. In any thread."""
        if self._wakeup_fd >= 0:
            os.eventfd_write(self._wakeup_fd, 1)


def _takes_room(row: Row) -> bool:
    """Whether a row consumes room. A row that only ends the stream is always allowed."""
    return row.more or bool(row.outputs)
