"""One call over HTTP/2: assembles the messages of the client; `sending` cuts responses into frames. Invariant: an
announced size is checked and counted before memory is allocated for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from shmserve.errors import Unavailable
from shmserve.gateway.http2 import heads
from shmserve.gateway.http2 import limits as most
from shmserve.gateway.http2.abuse import AbuseCounters, ClosedStreams
from shmserve.gateway.http2.host import Http2Host
from shmserve.gateway.http2.interface import ServiceCall
from shmserve.gateway.http2.messages import inflate_message, message_size_error
from shmserve.gateway.http2.sending import NO_CALL, Channel, Sending, notify
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import CONNECTION_WORK, REQUEST_WORK
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.proxies import named_in
from shmserve.gateway.limits.turns import Job, SlicedWork
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


class Http2Stream(Sending):
    _core: Http2Streams
    __slots__ = (
        "_buffer", "_end_waits", "_flag", "_held", "_job", "_prefix", "_waiting", "_wanted", "expires", "length",
        "silent", "taken", "turn",
    )  # fmt: skip

    def __init__(
        self, core: Http2Streams, number: int, head: heads.Http2Head, window: int, expires: float | None
    ) -> None:
        super().__init__(core, number, head, window)
        self.expires = expires
        self.length = 0
        """Number of bytes of DATA received, if the client sent content-length."""
        self.taken = 0
        """Bytes received since the last WINDOW_UPDATE."""
        self.turn = 0
        self.silent = True
        """No message has arrived."""
        self._prefix = b""
        self._buffer: ReceiveBuffer | None = None
        self._flag = 0
        self._held = 0
        self._waiting: deque[bytes] | None = None
        """Bytes received while paused; None: not paused."""
        self._wanted = True
        """The service accepts more messages."""
        self._job: Job | None = None
        """Inflates a message, or waits for the next iteration of the loop. Messages after it are queued."""
        self._end_waits = False

    # ------------------------------------------------------------------------------------ interface for services

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    def payer(self, token: str) -> Payer:
        return self._core.shares.payer(token, named_in(self.metadata.get))

    @property
    def stuck(self) -> bool:
        """Whether progress depends on the client: it must read responses, or send the rest of a message."""
        return bool(self._queue) or ((self._buffer is not None or bool(self._prefix)) and self._waiting is None)

    def pause(self) -> None:
        self._wanted = False
        if self._waiting is None and not self.over:
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
            self.ended()
        else:
            self._core.grant(self)

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
        if not self.over and self._end is None:
            self.call = call

    # ------------------------------------------------------------------------------------ received data

    def receive(self, data: bytes, at: int, end: int) -> None:
        """Processes bytes of messages."""
        while at < end and not self.over:
            if self._core.work < 0 and self._waiting is None:
                self._run(self._next_turn(), lambda found: None)
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
                    self._core.watch(self)
            else:
                size, flag = int.from_bytes(data[at + 1 : at + 5], "big"), data[at]
                at += 5
                if size <= end - at:
                    if size > self._core.limits.message_bytes:
                        self.fail(message_size_error(size, self._core.limits.message_bytes))
                        return
                    self._deliver(flag, data[at : at + size] if size < LARGE else memoryview(data)[at : at + size])
                    at += size
                else:
                    self._begin(flag, size, memoryview(data)[at:end])
                    return

    def _begin(self, flag: int, size: int, first: Buffer = b"") -> None:
        """Starts a message of which only `first` has arrived."""
        if size > self._core.limits.message_bytes:
            self.fail(message_size_error(size, self._core.limits.message_bytes))
            return
        if not size:
            self._deliver(flag, b"")
            return
        self._flag = flag
        trusted = len(first) >= KNOWN_BYTES and size <= self._core.trusted_bytes
        if trusted:
            self._core.trusted_bytes -= size
        self._buffer = ReceiveBuffer(size, self._room if size >= LARGE and not flag else None, trusted)
        self._core.watch(self)
        if self._hold(len(first)) and self._received(self._buffer.begin, first):
            self.moved += len(first)

    def _room(self, arrived: Buffer) -> Room | None:
        assert self._buffer is not None
        try:
            return self.call.room(self._buffer.size, arrived)
        except Exception:
            log.exception("a service failed")
            return None

    def space(self, most: int) -> memoryview | None:
        """Memory into which the next bytes of a message are read directly."""
        if self._buffer is None or self._waiting is not None or self.over:
            return None
        return self._buffer.space()[:most]

    def fill(self, size: int) -> None:
        """Called when the next `size` bytes of the message have been read into `space`."""
        buffer = self._buffer
        if buffer is None or not self._hold(size):
            return
        self.moved += size
        if self._received(buffer.add, size) and buffer.full:
            self._buffer = None
            if buffer.size >= LARGE:
                self._core.trusted_bytes = min(self._core.trusted_bytes + buffer.size, TRUSTED_BYTES)
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
        self.used = self._core.listener.turn
        self._core.idle_since = self._core.listener.now()
        self._core.work -= REQUEST_WORK
        if not flag:
            self._pass_on(data)
        elif flag != 1:
            self.fail(RpcError(Code.INTERNAL, "a message does not begin with a valid gRPC prefix"))
        elif not self.head.encoding:
            self.fail(RpcError(Code.INTERNAL, "a message is flagged as compressed, but the call has no grpc-encoding"))
        elif self._hold(len(data)):
            self._inflate(data)

    def _inflate(self, data: Buffer) -> None:
        core = self._core

        def hold(size: int) -> None:
            core.account.take(size)
            self._held += size
            core.work -= size // most.INFLATED_BYTES

        def work() -> SlicedWork[Buffer]:
            if core.work < 0:
                yield from self._next_turn()
            return (yield from inflate_message(self.head.encoding, data, core.limits.message_bytes, hold))

        def then(found: Buffer) -> None:
            self._pass_on(found)
            self._free_held(len(data) + len(found))

        self._run(work(), then)

    def _next_turn(self) -> SlicedWork[None]:
        """Waits for the next iteration of the loop, when this connection has a new work budget."""
        yield
        self._core.work = CONNECTION_WORK

    def _run(self, work: SlicedWork[T], then: Callable[[T], None]) -> None:
        """Runs `work`; the stream is paused until it is done."""

        def done(found: T) -> None:
            waited, self._job = self._job is not None, None
            then(found)
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

        job = self._core.listener.turns.run(work, done, failed)
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

    def ended(self) -> None:
        """Called when the client sends no more."""
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

    def fail_internally(self) -> None:
        """Ends the call after an unexpected exception; the connection continues."""
        log.exception("a service failed")
        self.fail(RpcError(Code.INTERNAL, "internal error of the gateway; see its log"))

    def _wait(self, data: bytes) -> None:
        assert self._waiting is not None
        if self._hold(len(data)):
            self._waiting.append(data)

    def hold_head(self, size: int) -> bool:
        """Counts decoded headers, which the call keeps."""
        return self._hold(size)

    def _hold(self, size: int) -> bool:
        try:
            self._core.account.take(size)
        except Unavailable as error:
            self.fail(RpcError(Code.UNAVAILABLE, str(error)))
            return False
        self._held += size
        return True

    def _free_held(self, size: int) -> None:
        size = min(size, self._held)
        if size:
            self._held -= size
            self._core.account.give(size)

    # ------------------------------------------------------------------------------------ completion

    def _push(self) -> None:
        self._core.watch(self)
        self._core.push(self)

    def fail(self, error: RpcError) -> None:
        """Ends the call with an error, and drops queued responses."""
        call, self.call = self.call, NO_CALL
        if not self.over:
            self._drop_answers()
            if self._end is None:
                self.finish(error.code, error.text)
            else:
                self._core.out.append(frames.reset(self.number, frames.ErrorCode.CANCEL))
                self.close()
                self._core.wake()
        notify(call.cancelled)

    def cancel(self) -> None:
        """Called when the client has disconnected or cancelled the call."""
        call, self.call = self.call, NO_CALL
        if not self.over:
            self.close()
        notify(call.cancelled)

    def close(self) -> None:
        self.over = True
        self._drop_answers()
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self._buffer = self._waiting = None
        self._free_held(self._held)
        self._core.forget(self)


class Http2Streams(Channel):
    """The calls of one connection, the work that it has done, and the work that it may still do."""

    def __init__(self, listener: Http2Host, address: str, wake: Callable[[], None]) -> None:
        super().__init__(listener, address, wake)
        self.over = False
        """The connection accepts no more input. The owner closes it once `out` is sent."""
        self.streams: dict[int, Http2Stream] = {}
        self.stream_window = frames.DEFAULT_WINDOW
        self.greeted = False
        self.last = 0
        """The highest stream id that the client opened."""
        self.large = False
        """The last DATA frame was large."""
        self.trusted_bytes = 0
        """Bytes of complete large messages, less those for which memory was reserved before they arrived."""
        self.unsent: dict[Http2Stream, None] = {}
        """Streams with queued output."""
        self.watched: set[Http2Stream] = set()
        self.work = 0
        """Work left in this iteration of the loop."""
        self.spent = 0
        """Set by the backlog."""
        self.abuse = AbuseCounters()
        self.closed = ClosedStreams()
        self.quiet_since = listener.turn
        """Turn of the slow clock at which the last call ended."""
        self.idle_since = listener.now()
        """The same as a time; each message sets it too."""
        self.sent_since_ping = False
        """Part of a response, or a WINDOW_UPDATE, was sent after the client's last ping. This resets its strikes."""

    def next_turn(self) -> None:
        """Called on every turn of the slow clock."""
        self.abuse.next_turn()

    # ------------------------------------------------------------------------------------ streams

    def send_reset(self, number: int, reason: ErrorCode) -> None:
        self.out.append(frames.reset(number, reason))
        self.wake()

    def refuse(self, number: int, reason: ErrorCode) -> None:
        """Resets a stream for a protocol violation of the client."""
        self.send_reset(number, reason)
        self.abuse.reset()

    def reset(self, stream: Http2Stream, reason: ErrorCode) -> None:
        stream.cancel()
        self.refuse(stream.number, reason)

    def fits(self, stream: Http2Stream, body: int, ended: bool) -> bool:
        """Checks received DATA against content-length, and resets the stream on a mismatch."""
        stream.length += body
        length = stream.head.length or 0
        if stream.length <= length and (not ended or stream.length == length):
            return True
        stream.half = ended
        self.reset(stream, ErrorCode.PROTOCOL_ERROR)
        return False

    # ------------------------------------------------------------------------------------ interface for streams

    def watch(self, stream: Http2Stream) -> None:
        """Progress now depends on the client: apply the read timeout."""
        if stream not in self.watched:
            self.watched.add(stream)
            stream.turn = self.listener.turn
            stream.moved = 0

    def grant(self, stream: Http2Stream) -> None:
        if not stream.over and stream.taken > most.STREAM_WINDOW // 2:
            self.grant_bytes(stream.number, stream.taken)
            stream.taken = 0

    def grant_bytes(self, number: int, size: int) -> None:
        self.out.append(frames.window_update(number, size))
        self.sent_since_ping = True
        self.wake()

    def push(self, stream: Http2Stream) -> None:
        """Queues the stream, and sends as much as the windows allow."""
        self.unsent[stream] = None
        while self.writable and stream.pump(most.QUANTUM, resume=False):
            pass
        if not stream.queued:
            self.unsent.pop(stream, None)
        self.wake()

    def forget(self, stream: Http2Stream) -> None:
        if self.streams.pop(stream.number, None) is None:
            return
        self.closed.add(stream.number, stream.half)
        self.watched.discard(stream)
        self.unsent.pop(stream, None)
        if stream.expires is not None:
            self.listener.keep(stream)
        if not self.streams:
            self.quiet_since = self.listener.turn
            self.idle_since = self.listener.now()
            self.wake()

    # ------------------------------------------------------------------------------------ interface for the owner

    def pump(self) -> None:
        """Sends queued data of the streams, round robin."""
        moved = True
        while moved and self.window > 0 and self.unsent:
            moved = False
            for stream in list(self.unsent):
                if not self.writable:
                    return
                if not stream.queued:
                    self.unsent.pop(stream, None)
                elif stream.pump(most.QUANTUM):
                    moved = True
                    self.wake()

    def resumed(self) -> None:
        """Called when the socket is writable again."""
        self.accepts = True
        self.abuse.unsent_replies = 0
        self.pump()
        for stream in list(self.streams.values()):
            if not self.writable:
                break
            stream.go_on()

    def taken(self) -> None:
        """`out` has been passed to the socket."""
        size, self.out_bytes = self.out_bytes, 0
        if size:
            self.sent_since_ping = True
        if size >= most.AHEAD_BYTES and self.accepts:
            self.resumed()

    # ------------------------------------------------------------------------------------ disconnects

    def end(self, reason: ErrorCode, text: str) -> None:
        if not self.over:
            self.over = True
            self.out.append(frames.goaway(self.last, reason, text))
            self.lost()
            self.wake()

    def lost(self) -> None:
        """Called when the client has disconnected."""
        self.over = True
        for stream in list(self.streams.values()):
            stream.cancel()
        self.shares.close()
