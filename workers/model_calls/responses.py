"""What a model sends by itself: answers to its requests, as many as it likes, from any thread, during a batch or later.

The rule: whoever touches what the worker has (its link, what it says, its memory) has the turn, a lock. The main thread
has it but while the model runs and while it waits. Who waits reads the link for all, one at a time, so that nobody who
waits for news keeps them from coming.
"""

from __future__ import annotations

import os
import select
import threading
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from shmserve.errors import Cancelled, ConnectionLost, ModelFailed, Unavailable
from shmserve.protocol.messages import Failure, Row
from shmserve.workers.model_calls.answer import Answer
from shmserve.workers.model_calls.coroutines import SENT, settle_soon
from shmserve.workers.model_calls.stream import CLOSED, FORKED, NONE, ONE, Closed, Stream

if TYPE_CHECKING:
    from shmserve.protocol.messages import Work

KEPT = 1024
"""So many answers of one request are kept for a caller that does not read, where the model does not wait for it."""
_FINAL = "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
_STOPPED = Failure(Unavailable.code, "the model is being unloaded; its answer ends here")


class Streams:
    """Made by the main thread, which has the turn from then on."""

    def __init__(self, decoupled: bool) -> None:
        self.decoupled = decoupled
        """Requests are answered as often as the model likes. Otherwise once, and their batch waits for it."""
        self.open: dict[int, Stream] = {}
        """By request: those whose last answer has not been told."""
        self.lost: Exception | None = None
        """Why the link can no longer be read, found by whoever had read it."""
        self.connected = False
        self.turn = self._turn = threading.Lock()
        self._turn.acquire()
        self._news = threading.Condition(self._turn)
        self.leave = self._turn.release
        """The model runs in the main thread now."""
        self.enter = self._turn.acquire
        self.withdrawn: set[int] = set()
        """Requests without a stream, of the batch that runs or runs next, that nobody waits for any more."""
        self._forgotten: deque[Stream] = deque()
        self._poll = select.poll()
        self._bell = -1
        self._reading = False
        self._stopped = False
        self._forked = False
        self.listening = False
        """There is a link that answers can come on."""
        self.later: deque[Any] = deque()
        """What is to be said as soon as somebody can."""
        self.ended: Callable[[], None] = lambda: None
        """Called, with the turn, when nothing will come any more."""

    def listen(self, descriptor: int, read: Callable[[], object]) -> None:
        """What `read` handles can be waited for from now on, though nobody wants answers of the model yet."""
        self._read = read
        self.listening = True
        self._poll.register(descriptor, select.POLLIN)

    def connect(
        self,
        descriptor: int,
        read: Callable[[], object],
        tell: Callable[[Row], None],
        row: Callable[[Work, Answer], Row],
        discard: Callable[[Row], None],
    ) -> None:
        """`read` handles all orders that have come on the link of this `descriptor` and sends what is to be said,
        `tell` sends an answer, `row` makes one, `discard` frees one that is not sent. -1: there is no link."""
        self._read, self._tell, self._row, self._discard = read, tell, row, discard
        if descriptor >= 0:
            self._poll.register(descriptor, select.POLLIN)
        self.connected = self.listening = True

    # ------------------------------------------------------------------------------------ for the loop

    @property
    def shared(self) -> bool:
        """Whether others may want the turn while the main thread waits for orders."""
        return self.decoupled or self._bell >= 0 or threading.active_count() > 1

    def wait(self) -> None:
        """Returns when something may have come. Raises what keeps the link from being read."""
        if self.lost is None:
            self._wait()
        if self.lost is not None:
            raise self.lost

    def read(self) -> None:
        """The main thread has read the link: others may wait for what came."""
        if self._forgotten:
            self._end_forgotten()
        if self._reading:
            self._ring()
        self._news.notify_all()

    def more(self, request: int, count: int) -> bool:
        """False: the model does not answer this request, or not yet."""
        stream = self.open.get(request)
        if stream is None:
            return False
        stream.room += count
        self._pour(stream)
        return True

    def cancel(self, requests: Iterable[int]) -> None:
        """Nobody waits for these any more. They are running, are about to, or have just ended."""
        for request in requests:
            stream = self.open.get(request)
            if stream is None:
                self.withdrawn.add(request)
                continue
            stream.cancelled = True
            wanted = (one for one in stream.together if not (one.cancelled or one.over))
            if stream.loop is not None and stream.task is not None and not any(wanted):
                # Before a wait for room ends: the coroutine would run ahead until its loop gets to this.
                stream.loop.call_soon_threadsafe(stream.task.cancel)
            self._drop_kept(stream)

    def stop(self, tell: bool) -> None:
        """Ends what is open, and lets everybody go on: nobody has the turn any more. `tell`: there is a link."""
        if self._stopped:
            return
        self._stopped = True
        if not tell:
            self.lost = self.lost or ConnectionLost("the worker has ended")
        for stream in list(self.open.values()):
            self.fail(stream, _STOPPED)
        self.connected = self.listening = False
        self.ended()
        self._news.notify_all()
        self._ring()
        self._turn.release()

    def forked(self) -> None:
        """In a process that the model has forked: the link stays its parent's alone. The lock may be held by a thread
        that exists in the parent only."""
        self.turn = self._turn = threading.Lock()
        self._news = threading.Condition(self._turn)
        self.connected = self.listening = False
        self._forked = self._stopped = True

    def close(self) -> None:
        """After `stop`, when no thread of the model runs any more."""
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    # ------------------------------------------------------------------------------------ for the backend

    def begin(self, work: Work) -> Stream:
        stream = self.open[work.request] = Stream(work)
        stream.cancelled = work.request in self.withdrawn
        self._hang_bell()
        return stream

    def begin_late(self, work: Work) -> Stream:
        """While the model runs."""
        with self._turn:
            return self.begin(work)

    def fail(self, stream: Stream, failure: Failure) -> None:
        """The model will not answer it any more. With the turn."""
        stream.cancelled = True
        self._end(stream, failure)
        self._drop_kept(stream)

    def take_over(self, request: int) -> bool:
        """Whether it is still to be answered; from now on not by the model. With the turn."""
        stream = self.open.pop(request, None)
        if stream is None:
            return False
        stream.cancelled = stream.over = True
        self._drop_kept(stream)
        return True

    def withdraw_sent(self, request: int) -> Answer | None:
        """The answer that was sent for a request of a model that is not decoupled: it takes precedence over what
        `execute` returns or raises. Nothing can be sent from now on. With the turn."""
        stream = self.open.get(request)
        if stream is None or not self.take_over(request):
            return None
        stream.final = True
        return stream.answer

    def collect(self, stream: Stream) -> Answer | None:
        """Waits until the model has sent its last answer: the only one, where requests have one."""
        while not (stream.final or stream.over):
            self._end_forgotten()
            if not stream.over:
                self._wait()
        self.open.pop(stream.work.request, None)
        return stream.answer

    # ------------------------------------------------------------------------------------ for the model, in any thread

    def check(self) -> None:
        """Raises where nothing will come any more."""
        self.check_process()
        if self.lost is not None or self._stopped or not self.listening:
            raise ConnectionLost("the server cannot be asked: this worker has no link to one, or is about to end")

    def check_process(self) -> None:
        """Raises in a process that the model has forked."""
        if self._forked:
            raise ConnectionLost(FORKED)

    def wait_for(self, ready: Callable[[], bool], whatever: bool = False) -> None:
        """Until it is so; `whatever`: also where the link has been lost. Without the turn."""
        with self._turn:
            self._hang_bell()
            while not ready():
                if not whatever:
                    self.check()
                self._wait()

    def wake(self) -> None:
        """Something that is waited for may be so now. Without the turn."""
        with self._turn:
            self._changed()

    def read_while(self, wanted: Callable[[], bool], over: Callable[[], None]) -> None:
        """For others, who cannot wait themselves. Without the turn, which is still had when it is `over`."""
        with self._turn:
            self._hang_bell()
            while wanted() and self.lost is None and not self._stopped:
                self._wait()
            over()

    def nudge(self) -> None:
        """Something is to be said. In any thread, also within the collector."""
        if self._reading:
            self._ring()

    def send(self, stream: Stream, answer: Answer | None, final: bool) -> Awaitable[None]:
        """Sends an answer, or says that there are no more. Waits until its caller wants to have it."""
        if self._nothing_to_send(stream, answer):
            return SENT
        sent_at = monotonic_ns()
        with self._turn:
            if not self._begin_to_send(stream, answer, final):
                return SENT
            if answer is not None and answer.error is None:
                while not (stream.room or stream.cancelled or stream.over):
                    self._wait()
            self._send(stream, answer, final, sent_at)
            return SENT

    def send_soon(
        self, stream: Stream, answer: Answer | None, final: bool, loop: AbstractEventLoop | None
    ) -> Awaitable[None]:
        """The same for who must not wait: it is kept. A coroutine of `loop` can await what it gets, and should."""
        if self._nothing_to_send(stream, answer):
            return SENT
        sent_at = monotonic_ns()
        with self._turn:
            if not self._begin_to_send(stream, answer, final):
                return SENT
            free = answer is None or answer.error is not None
            if stream.cancelled or stream.over or ((stream.room or free) and not stream.kept):
                self._send(stream, answer, final, sent_at)
                return SENT
            if len(stream.kept) >= KEPT and answer is not None:
                text = f"{KEPT} answers wait for a caller that does not read"
                advice = "; the model should await what send() returns" if loop is not None else ""
                self.fail(stream, Failure(Unavailable.code, text + advice))
                return SENT
            row = self._made(stream, answer, final, sent_at)
            stream.final = stream.final or final
            if loop is None:
                stream.kept.append((row, None))
                return SENT
            sent: Future[None] = loop.create_future()
            stream.kept.append((row, sent))
            return sent

    def is_cancelled(self, request: int, stream: Stream | None) -> bool:
        """Whether its caller has gone, as far as the broker has said so by now."""
        if self.connected and self._turn.acquire(blocking=False):
            try:
                if not self._reading:
                    self._look()
            finally:
                self._turn.release()
        return stream.cancelled if stream is not None else request in self.withdrawn

    def forget(self, stream: Stream) -> None:
        """The model has dropped it without a last answer. Called within the collector, in any thread."""
        self._forgotten.append(stream)
        self._ring()

    def fail_all(self, streams: Iterable[Stream], failure: Failure) -> None:
        """What would have answered these has failed. In any thread."""
        with self._turn:
            for stream in streams:
                if stream.work.request in self.open and not stream.over:
                    self.fail(stream, failure)

    # ------------------------------------------------------------------------------------ with the turn

    def _nothing_to_send(self, stream: Stream, answer: Answer | None) -> bool:
        """Without the turn, which a batch to come may be waited for with: its request is over, for whatever reason."""
        if self._forked:
            raise Closed(FORKED)
        second = answer is not None and stream.answer is not None and not (self.decoupled or stream.over)
        if second or stream.final:
            raise Closed(ONE if second else CLOSED)
        return stream.over

    def _begin_to_send(self, stream: Stream, answer: Answer | None, final: bool) -> bool:
        """False: there is nothing to be sent. Closed where the model breaks the rules."""
        if self._nothing_to_send(stream, answer):
            return False
        if self.decoupled:
            return True
        if answer is None and stream.answer is None:
            raise Closed(NONE)
        stream.answer = stream.answer or answer
        stream.final = final
        if final:
            self._changed()
        return False

    def _send(self, stream: Stream, answer: Answer | None, final: bool, sent_at: int) -> None:
        stream.final = stream.final or final
        if stream.over:
            return
        if stream.cancelled:
            if final:
                self._end(stream, None)
            return
        if not self.connected:
            if answer is not None and answer.error is not None:
                self._end(stream, answer.error)
            elif final:
                self._end(stream, None)
            return
        self._out(stream, self._made(stream, answer, final, sent_at))

    def _made(self, stream: Stream, answer: Answer | None, final: bool, sent_at: int) -> Row:
        """`sent_at`: when the model sent it. What it waits for room after that is not the model's time."""
        computed_ns = max(0, sent_at - stream.since)
        if answer is None:
            return Row(stream.work.request, (), times=(computed_ns, 0))
        began = monotonic_ns()
        row = self._row(stream.work, answer)
        row.more = not final and row.error is None
        stream.since = monotonic_ns()
        row.times = (computed_ns, stream.since - began)
        return row

    def _out(self, stream: Stream, row: Row) -> None:
        if row.more:
            stream.since = monotonic_ns()
        if _takes_room(row):
            stream.room -= 1
        if not row.more:
            self.open.pop(stream.work.request, None)
            stream.over = True
        self._say(row)
        if stream.over:
            self._changed()

    def _say(self, row: Row) -> None:
        """The model is not told that there is no link any more: the main thread will see."""
        if self.lost is not None:
            return
        try:
            self._tell(row)
        except ConnectionLost as error:
            self._lose(error)

    def _end(self, stream: Stream, failure: Failure | None) -> None:
        """Its last answer; where it was cancelled, that it was."""
        if stream.over:
            return
        if stream.cancelled and failure is None:
            failure = Failure(Cancelled.code, "the request was cancelled while the model answered it")
        self.open.pop(stream.work.request, None)
        stream.over = True
        if not self.decoupled or not self.connected:
            stream.answer = stream.answer or Answer(error=failure)
        else:
            times = (max(0, monotonic_ns() - stream.since), 0)
            self._say(Row(stream.work.request, (), failure, times=times))
        self._changed()

    def _pour(self, stream: Stream) -> None:
        """What was kept goes out, as far as there is room."""
        kept = stream.kept
        while kept and not stream.over and (stream.room or not _takes_room(kept[0][0])):
            row, sent = kept.popleft()
            self._out(stream, row)
            settle_soon(sent)
        if stream.over:
            self._drop_kept(stream)

    def _drop_kept(self, stream: Stream) -> None:
        last = False
        while stream.kept:
            row, sent = stream.kept.popleft()
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
            what = f"last response ({_FINAL})" if self.decoupled else "response"
            failure = Failure(ModelFailed.code, f"the model dropped the request without a {what}")
            if stream.kept:
                stream.kept.append((Row(stream.work.request, (), failure), None))
            else:
                self._end(stream, None if stream.cancelled else failure)

    # ------------------------------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Until something may have changed. With the turn, which others have meanwhile."""
        if self._reading or self.lost is not None:
            self._news.wait()
            return
        self._reading = True
        if self.later and self.listening and self.lost is None:  # from now on its maker wakes us
            self._reading = False
            self._look()
            return
        self._turn.release()
        try:
            self._poll.poll()
        finally:
            self._turn.acquire()
            self._reading = False
        if self._bell >= 0:
            with suppress(BlockingIOError):  # it was not the bell
                os.eventfd_read(self._bell)
        self._look()

    def _look(self) -> None:
        """Reads the link. What goes wrong is the main thread's to tell, and the end of every stream."""
        try:
            if self.listening and self.lost is None:
                self._read()
        except Exception as error:
            self._lose(error)
            for stream in list(self.open.values()):
                stream.cancelled = stream.over = True
            self.open.clear()
        self._end_forgotten()
        self._news.notify_all()

    def _lose(self, error: Exception) -> None:
        self.lost = error
        self.ended()
        self._changed()

    def _changed(self) -> None:
        """Somebody may wait for this."""
        self._news.notify_all()
        if self._reading:
            self._ring()

    def _hang_bell(self) -> None:
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll.register(self._bell, select.POLLIN)

    def _ring(self) -> None:
        """Wakes who reads, in any thread."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)


def _takes_room(row: Row) -> bool:
    """An answer that only ends is always allowed."""
    return row.more or bool(row.outputs)
