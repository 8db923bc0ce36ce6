"""One call over HTTP/2: its state, and the messages that it receives. Invariant: an announced size is checked and
counted before memory is allocated for it."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TypeVar
from weakref import WeakValueDictionary

from shmserve.errors import Unavailable
from shmserve.gateway import gzip_stream
from shmserve.gateway.http2 import heads, limits
from shmserve.gateway.http2.abuse import AbuseCounters, ClosedStreams
from shmserve.gateway.http2.interface import Awaits, Http2Host, ServiceCall
from shmserve.gateway.http2.output import Http2Output, Sender
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import CONNECTION_WORK, REQUEST_WORK, WorkBudget
from shmserve.gateway.limits.body_budget import BudgetAccount
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.proxies import named_in
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedJob, SlicedWork
from shmserve.gateway.upstream.receive import TRUSTED_BYTES, ReceiveBuffer, Room
from shmserve.http2 import frames
from shmserve.http2.frames import ErrorCode
from shmserve.protocol.grpc.codes import Code, RpcError

log = logging.getLogger("shmserve.gateway")
T = TypeVar("T")

LARGE = 64 * 1024
"""Messages of at least this size are not copied here."""
KNOWN_BYTES = 1024
"""With fewer bytes of a message, the service may not be able to choose memory for it yet."""


class StreamState(IntEnum):
    """RFC 9113, 5.1. A stream is idle before it has an object. None is reserved, as the server pushes nothing."""

    OPEN = 0
    HALF_CLOSED_REMOTE = 1
    """The client sends no more."""
    HALF_CLOSED_LOCAL = 2
    """The response has ended."""
    CLOSED = 3


class StreamEvent(IntEnum):
    END_RECEIVED = 0
    END_SENT = 1
    RESET_RECEIVED = 2
    """Also if the client has disconnected."""
    RESET_SENT = 3


OPEN, HALF_CLOSED_REMOTE, HALF_CLOSED_LOCAL, CLOSED = StreamState
END_RECEIVED, END_SENT, RESET_RECEIVED, RESET_SENT = StreamEvent
"""Module-level names, because reading an attribute of an Enum takes 0.2 us."""
_MOVES = {
    (OPEN, END_RECEIVED): HALF_CLOSED_REMOTE,
    (OPEN, END_SENT): HALF_CLOSED_LOCAL,
    (OPEN, RESET_RECEIVED): CLOSED,
    (OPEN, RESET_SENT): CLOSED,
    (HALF_CLOSED_REMOTE, END_SENT): CLOSED,
    (HALF_CLOSED_REMOTE, RESET_RECEIVED): CLOSED,
    (HALF_CLOSED_REMOTE, RESET_SENT): CLOSED,
    (HALF_CLOSED_LOCAL, END_RECEIVED): CLOSED,
    (HALF_CLOSED_LOCAL, RESET_RECEIVED): CLOSED,
    (HALF_CLOSED_LOCAL, RESET_SENT): CLOSED,
}


class _NoCall:
    """Stands in for the call of a stream before it starts and after it ends."""

    awaits = Awaits.NOTHING

    def message(self, data: Buffer) -> None: ...
    def room(self, size: int, first: Buffer) -> Room | None: ...
    def half_closed(self) -> None: ...
    def cancelled(self) -> None: ...
    def resume(self) -> None: ...


NO_CALL = _NoCall()


def notify(service: Callable[[], None]) -> None:
    """Calls a service. Its exceptions are logged and affect no other call."""
    try:
        service()
    except Exception:
        log.exception("a service failed")


class Http2Stream:
    __slots__ = (
        "_account",
        "_buffer",
        "_end_waits",
        "_flag",
        "_held",
        "_job",
        "_length",
        "_moved",
        "_moved_at",
        "_prefix",
        "_sender",
        "_streams",
        "_waiting",
        "_wanted",
        "call",
        "expires",
        "head",
        "number",
        "silent",
        "state",
        "taken",
        "used",
    )

    def __init__(self, streams: Http2Streams, number: int, head: heads.Http2Head, expires: float | None) -> None:
        self._streams = streams
        self.number = number
        self.head = head
        self.expires = expires
        self.state = OPEN
        self.call: ServiceCall = NO_CALL
        self._account = streams.account_of(head)
        self._sender = Sender(streams.output, self._account, self, number, head, streams.initial_window)
        self.taken = 0
        """Bytes received since the last WINDOW_UPDATE."""
        self.silent = True
        """No message has arrived."""
        self.used = streams.listener.turn
        """Turn of the slow clock at which the last message was sent or received."""
        self._moved = 0
        """Bytes of messages received since the turn `_moved_at` of the slow clock; `_sender` counts those sent."""
        self._moved_at = 0
        self._length = 0
        """Number of bytes of DATA received, if the client sent content-length."""
        self._prefix = b""
        self._buffer: ReceiveBuffer | None = None
        self._flag = 0
        self._held = 0
        self._waiting: deque[bytes] | None = None
        """Bytes received while paused; None: not paused."""
        self._wanted = True
        """The service accepts more messages."""
        self._job: SlicedJob | None = None
        """Inflates a message, or waits for the next iteration of the loop. Messages after it are queued."""
        self._end_waits = False

    # ------------------------------------------------------------------------------------ state

    @property
    def over(self) -> bool:
        return self.state is CLOSED

    def _move(self, event: StreamEvent) -> None:
        """The only writer of `state`."""
        before = self.state
        self.state = _MOVES[before, event]
        if self.state is CLOSED:
            self._sender.close()
            if self._job is not None:
                self._job.cancel()
                self._job = None
            self._buffer = self._waiting = None
            if self._held:
                self._free_held(self._held)
            self._streams.forget(self, before is HALF_CLOSED_REMOTE or event is not RESET_SENT)

    def stop_receiving(self) -> None:
        """The client has ended the stream, but the service is not told."""
        if self.state in (OPEN, HALF_CLOSED_LOCAL):
            self._move(END_RECEIVED)

    def end_received(self) -> None:
        """The client sends no more."""
        if self.state is not CLOSED:
            self._move(END_RECEIVED)
            self._half_closed()

    def end_sent(self) -> None:
        self._move(END_SENT)
        if self.state is HALF_CLOSED_LOCAL:  # gRPC needs no more of the request
            self._streams.output.out.append(frames.reset(self.number, ErrorCode.NO_ERROR))
            self._move(RESET_SENT)

    def cancel(self, event: StreamEvent = RESET_RECEIVED) -> None:
        """Called when the client has disconnected or cancelled the call, or has violated the protocol."""
        call, self.call = self.call, NO_CALL
        if self.state is not CLOSED:
            self._move(event)
        notify(call.cancelled)

    def fail(self, error: RpcError) -> None:
        """Ends the call with an error, and drops queued responses."""
        call, self.call = self.call, NO_CALL
        if self.state is not CLOSED:
            self._sender.drop()
            if self._sender.ending:
                self._streams.output.write(frames.reset(self.number, ErrorCode.CANCEL))
                self._move(RESET_SENT)
            else:
                self._sender.finish(error.code, error.text)
        notify(call.cancelled)

    def fail_internally(self) -> None:
        """Ends the call after an unexpected exception; the connection continues."""
        log.exception("a service failed")
        self.fail(RpcError(Code.INTERNAL, "internal error of the gateway; see its log"))

    # ------------------------------------------------------------------------------------ progress

    @property
    def stuck(self) -> bool:
        """Whether progress depends on the client: it must read responses, or send the rest of a message."""
        return bool(self._sender.queued) or ((self._buffer is not None or bool(self._prefix)) and self._waiting is None)

    def stall(self) -> None:
        self._streams.watch(self)

    def watch_from(self, turn: int) -> None:
        """Measures the client's progress from now on."""
        self._moved_at, self._moved, self._sender.moved = turn, 0, 0

    def has_stalled(self, turn: int, waited: int, min_bytes: int) -> bool:
        """Whether less than `min_bytes` bytes have moved for longer than `waited` turns."""
        if self._moved + self._sender.moved >= min_bytes:
            self.watch_from(turn)
        return turn - self._moved_at > waited

    @property
    def in_use(self) -> bool:
        """Whether a response is due or the stream made progress recently. Other streams are open but idle."""
        return self.call.awaits is Awaits.NOTHING or self._streams.listener.turn - max(self.used, self._moved_at) <= 1

    # ------------------------------------------------------------------------------------ interface for services

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    def payer(self, token: str) -> Payer:
        return self._streams.shares.payer(token, named_in(self.metadata.get))

    @property
    def writable(self) -> bool:
        return self._sender.writable

    def send(self, parts: Sequence[Buffer]) -> None:
        if self.state is not CLOSED and not self._sender.ending:
            self.used = self._streams.listener.turn
            self._sender.send(parts)

    def finish(self, code: int, text: str = "") -> None:
        if self.state is not CLOSED and not self._sender.ending:
            self.call = NO_CALL
            self._sender.finish(code, text)

    def resume(self) -> None:
        notify(self.call.resume)

    def proceed(self) -> None:
        """Called when the connection is writable again."""
        self._sender.proceed()

    def widen(self, size: int) -> int:
        """Changes the window for responses. Returns the new one, which may be too large."""
        return self._sender.widen(size)

    @property
    def unsent(self) -> int:
        """Bytes of queued responses."""
        return self._sender.queued

    def pause(self) -> None:
        self._wanted = False
        if self._waiting is None and self.state is not CLOSED:
            self._waiting = deque()

    def unpause(self) -> None:
        self._wanted = True
        self._receive_on()

    def _receive_on(self) -> None:
        waiting = self._waiting
        if waiting is None or self.over or not self._wanted or self._job is not None:
            return
        self._waiting = None
        ends, self._end_waits = self._end_waits, False
        while waiting:
            data = waiting.popleft()
            self._free_held(len(data))
            self.receive(data, 0, len(data))
            if self._stopped(waiting):
                self._end_waits = ends
                return
        if ends:
            self._half_closed()
        else:
            self._streams.grant(self)

    @property
    def paused(self) -> bool:
        return self._waiting is not None

    def _stopped(self, more: deque[bytes]) -> bool:
        """Whether to stop: the call is over, or paused again, which queues the rest."""
        if self._waiting is not None:
            self._waiting.extend(more)
            return True
        return self.over

    def serve(self, call: ServiceCall) -> None:
        """Sets the call that receives messages, unless the stream has ended already."""
        if self.state is not CLOSED and not self._sender.ending:
            self.call = call

    # ------------------------------------------------------------------------------------ received data

    def fits(self, body: int, ended: bool) -> bool:
        """Counts DATA. False if it does not match content-length."""
        self._length += body
        length = self.head.length or 0
        return self._length <= length and (not ended or self._length == length)

    def receive(self, data: bytes, at: int, end: int) -> None:
        """Processes bytes of messages."""
        while at < end and self.state is not CLOSED:
            if self._streams.work.left < 0 and self._waiting is None:
                self._run(self._next_turn(), lambda result: None)
            if self._waiting is not None:
                self._wait(data[at:end])
                return
            if self._buffer is not None:
                place = self._buffer.space()
                size = min(end - at, len(place))
                place[:size] = memoryview(data)[at : at + size]
                at += size
                self.fill(size)
            elif self._prefix or end - at < 5:
                size = min(end - at, 5 - len(self._prefix))
                self._prefix += data[at : at + size]
                at += size
                if len(self._prefix) == 5:
                    prefix, self._prefix = self._prefix, b""
                    self._begin(prefix[0], int.from_bytes(prefix[1:], "big"))
                else:
                    self._streams.watch(self)
            else:
                size, flag = int.from_bytes(data[at + 1 : at + 5], "big"), data[at]
                at += 5
                if size <= end - at:
                    if size > self._streams.listener.limits.message_bytes:
                        self.fail(message_size_error(size, self._streams.listener.limits.message_bytes))
                        return
                    self._deliver(flag, data[at : at + size] if size < LARGE else memoryview(data)[at : at + size])
                    at += size
                else:
                    self._begin(flag, size, memoryview(data)[at:end])
                    return

    def _begin(self, flag: int, size: int, first: Buffer = b"") -> None:
        """Starts a message of which only `first` has arrived."""
        if size > self._streams.listener.limits.message_bytes:
            self.fail(message_size_error(size, self._streams.listener.limits.message_bytes))
            return
        if not size:
            self._deliver(flag, b"")
            return
        self._flag = flag
        trusted = len(first) >= KNOWN_BYTES and size <= self._streams.trusted_bytes
        if trusted:
            self._streams.trusted_bytes -= size
        self._buffer = ReceiveBuffer(size, self._room if size >= LARGE and not flag else None, trusted)
        self._streams.watch(self)
        if self.hold(len(first)) and self._received(self._buffer.begin, first):
            self._moved += len(first)

    def _room(self, arrived: Buffer) -> Room | None:
        assert self._buffer is not None
        try:
            return self.call.room(self._buffer.size, arrived)
        except Exception:
            log.exception("a service failed")
            return None

    def space(self, size: int) -> memoryview | None:
        """Memory into which the next bytes of a message are read directly."""
        if self._buffer is None or self._waiting is not None or self.over:
            return None
        return self._buffer.space()[:size]

    def fill(self, size: int) -> None:
        """Called when the next `size` bytes of the message have been read into `space`."""
        buffer = self._buffer
        if buffer is None or not self.hold(size):
            return
        self._moved += size
        if self._received(buffer.add, size) and buffer.full:
            self._buffer = None
            if buffer.size >= LARGE:
                self._streams.trusted_bytes = min(self._streams.trusted_bytes + buffer.size, TRUSTED_BYTES)
            self._free_held(buffer.size)
            self._deliver(self._flag, buffer.memory)

    def _received(self, receive: Callable[[T], object], what: T) -> bool:
        try:
            receive(what)
        except Unavailable as error:
            self.fail(RpcError(Code.UNAVAILABLE, str(error)))
            return False
        return True

    def _deliver(self, flag: int, data: Buffer) -> None:
        self.silent = False
        self.used = self._streams.listener.turn
        self._streams.idle_since = self._streams.listener.now()
        self._streams.work.spend(REQUEST_WORK)
        if not flag:
            self._pass_on(data)
        elif flag != 1:
            self.fail(RpcError(Code.INTERNAL, "a message does not begin with a valid gRPC prefix"))
        elif not self.head.encoding:
            self.fail(RpcError(Code.INTERNAL, "a message is flagged as compressed, but the call has no grpc-encoding"))
        elif self.hold(len(data)):
            self._inflate(data)

    def _inflate(self, data: Buffer) -> None:
        streams = self._streams

        def hold(size: int) -> None:
            self._account.take(size)
            self._held += size
            streams.work.spend(size // limits.INFLATED_BYTES)

        def work() -> SlicedWork[Buffer]:
            if streams.work.left < 0:
                yield from self._next_turn()
            return (yield from inflate_message(self.head.encoding, data, streams.listener.limits.message_bytes, hold))

        def then(result: Buffer) -> None:
            self._pass_on(result)
            self._free_held(len(data) + len(result))

        self._run(work(), then)

    def _next_turn(self) -> SlicedWork[None]:
        """Waits for the next iteration of the loop, when this connection has a new work budget."""
        yield
        self._streams.work.begin(CONNECTION_WORK)

    def _run(self, work: SlicedWork[T], then: Callable[[T], None]) -> None:
        """Runs `work`; the stream is paused until it is done."""

        def done(result: T) -> None:
            waited, self._job = self._job is not None, None
            then(result)
            if waited:
                self._receive_on()

        def failed(error: Exception) -> None:
            self._job = None
            if isinstance(error, Unavailable):
                error = RpcError(Code.UNAVAILABLE, str(error))
            if isinstance(error, RpcError):
                self.fail(error)
            else:
                self.fail_internally()

        job = self._streams.listener.turns.run(work, done, failed)
        if job.running:
            self._job = job
            if self._waiting is None:
                self._waiting = deque()

    def _pass_on(self, data: Buffer) -> None:
        try:
            self.call.message(data)
        except RpcError as error:
            self.fail(error)
        except Exception:
            self.fail_internally()

    def _half_closed(self) -> None:
        if self._waiting is not None:
            self._end_waits = True
            return
        if self._buffer is not None or self._prefix:
            self.fail(RpcError(Code.INTERNAL, "the last message of the call is incomplete"))
            return
        try:
            self.call.half_closed()
        except RpcError as error:
            self.fail(error)
        except Exception:
            self.fail_internally()

    def _wait(self, data: bytes) -> None:
        assert self._waiting is not None
        if self.hold(len(data)):
            self._waiting.append(data)

    def hold(self, size: int) -> bool:
        """Counts bytes that the call keeps. False: they exceed a share, and the call has failed."""
        try:
            self._account.take(size)
        except Unavailable as error:
            self.fail(RpcError(Code.UNAVAILABLE, str(error)))
            return False
        self._held += size
        return True

    def _free_held(self, size: int) -> None:
        size = min(size, self._held)
        if size:
            self._held -= size
            self._account.give(size)


class Http2Streams:
    """The streams of one connection, the work that it has done, and the work that it may still do. `address`: the peer
    address of its socket. `wake`: see `Http2Output`."""

    def __init__(self, listener: Http2Host, address: str, wake: Callable[[], None]) -> None:
        self.listener = listener
        self.shares = listener.shares.connect(address)
        self._account = listener.budget.account(address)
        self._of_callers: WeakValueDictionary[str, BudgetAccount] = WeakValueDictionary()
        """Accounts of the callers of a proxy, by address, while they have calls."""
        self.output = Http2Output(listener, wake)
        self.over = False
        """The connection accepts no more input. The owner closes it once its output is sent."""
        self.open: dict[int, Http2Stream] = {}
        self.initial_window = frames.DEFAULT_WINDOW
        """The window for responses on a new stream."""
        self.greeted = False
        self.last = 0
        """The highest stream id that the client opened."""
        self.trusted_bytes = 0
        """Bytes of complete large messages, less those for which memory was reserved before they arrived."""
        self.watched: set[Http2Stream] = set()
        self.work = WorkBudget()
        self.abuse = AbuseCounters()
        self.closed = ClosedStreams()
        self.quiet_since = listener.turn
        """Turn of the slow clock at which the last call ended."""
        self.idle_since = listener.now()
        """The same as a time; each message sets it too."""
        self.sent_since_ping = False
        """Part of a response, or a WINDOW_UPDATE, was sent after the client's last ping. This resets its strikes."""

    # ------------------------------------------------------------------------------------ streams

    def account_of(self, head: heads.Http2Head) -> BudgetAccount:
        """Counts what a call holds. Without a proxy, all calls of the connection have the same account."""
        if not self.shares.is_of_proxy:
            return self._account
        address = self.shares.address(named_in(head.metadata.get))
        account = self._of_callers.get(address)
        if account is None:
            account = self._of_callers[address] = self.listener.budget.account(address)
        return account

    def refuse(self, number: int, reason: ErrorCode) -> None:
        """Resets a stream for a protocol violation of the client."""
        self.output.write(frames.reset(number, reason))
        self.abuse.reset()

    def reset(self, stream: Http2Stream, reason: ErrorCode, ended: bool = False) -> None:
        """`ended`: the client has ended the stream."""
        if ended:
            stream.stop_receiving()
        stream.cancel(RESET_SENT)
        self.refuse(stream.number, reason)

    def fits(self, stream: Http2Stream, body: int, ended: bool) -> bool:
        """Checks received DATA against content-length, and resets the stream on a mismatch."""
        if stream.fits(body, ended):
            return True
        self.reset(stream, ErrorCode.PROTOCOL_ERROR, ended)
        return False

    # ------------------------------------------------------------------------------------ interface for streams

    def watch(self, stream: Http2Stream) -> None:
        """Progress now depends on the client: apply the read timeout."""
        if stream not in self.watched:
            self.watched.add(stream)
            stream.watch_from(self.listener.turn)

    def grant(self, stream: Http2Stream) -> None:
        if not stream.over and stream.taken > limits.STREAM_WINDOW // 2:
            self.grant_bytes(stream.number, stream.taken)
            stream.taken = 0

    def grant_bytes(self, number: int, size: int) -> None:
        self.sent_since_ping = True
        self.output.write(frames.window_update(number, size))

    def forget(self, stream: Http2Stream, ended: bool) -> None:
        """The stream is closed. `ended`: the client sends nothing more on it."""
        del self.open[stream.number]
        self.closed.add(stream.number, ended)
        self.watched.discard(stream)
        if stream.expires is not None:
            self.listener.keep(stream)
        if not self.open:
            self.quiet_since = self.listener.turn
            self.idle_since = self.listener.now()
            self.output.wake()

    # ------------------------------------------------------------------------------------ interface for the owner

    def resumed(self) -> None:
        """Called when the socket is writable again."""
        output = self.output
        self.abuse.unsent_replies = 0
        output.resume()
        for stream in list(self.open.values()):
            if not output.writable:
                break
            stream.proceed()

    def taken(self) -> None:
        """`out` has been passed to the socket."""
        size, self.output.bytes = self.output.bytes, 0
        if size:
            self.sent_since_ping = True
        if size >= limits.AHEAD_BYTES and self.output.accepts:
            self.resumed()

    # ------------------------------------------------------------------------------------ disconnects

    def end(self, reason: ErrorCode, text: str) -> None:
        if not self.over:
            self.output.out.append(frames.goaway(self.last, reason, text))
            self.lost()
            self.output.wake()

    def lost(self) -> None:
        """Called when the client has disconnected."""
        self.over = True
        for stream in list(self.open.values()):
            stream.cancel()
        self.shares.close()


def message_size_error(size: int, limit: int) -> RpcError:
    return RpcError(
        Code.RESOURCE_EXHAUSTED,
        f"Received message larger than max ({size} vs. {limit}); raise --grpc-max-input-size of the gateway",
    )


def inflate_message(encoding: str, data: Buffer, limit: int, hold: Callable[[int], None]) -> SlicedWork[Buffer]:
    """Inflates a message. Calls `hold` with the number of bytes produced."""
    try:
        result = yield from gzip_stream.inflate(gzip_stream.WBITS[encoding], data, limit, hold)
    except zlib.error:
        raise RpcError(Code.INTERNAL, f"the message is not valid {encoding}") from None
    except gzip_stream.Overflow as error:
        raise message_size_error(error.args[0], limit) from None
    except gzip_stream.Incomplete:
        raise RpcError(Code.INTERNAL, f"the message is not one complete {encoding} stream") from None
    return bytes(result) if len(result) < SLICE_BYTES else memoryview(result)
