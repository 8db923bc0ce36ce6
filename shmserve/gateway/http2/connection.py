"""One gRPC connection and its socket. Invariant: all output of one iteration of the event loop is one write."""

from __future__ import annotations

import asyncio
from typing import Any

from shmserve.errors import ServeError
from shmserve.gateway.http2.listener import RpcListener
from shmserve.gateway.http2.protocol import Http2
from shmserve.gateway.limits.turns import SMALL_READ_BYTES, FairReader
from shmserve.gateway.listeners.callers import peer_address
from shmserve.gateway.upstream.receive import SCRATCH, SMALL_SCRATCH
from shmserve.http2.frames import ErrorCode
from shmserve.protocol.grpc.codes import Code, RpcError

JOINED_BYTES = 128 * 1024
"""Output of one iteration up to this size is joined into one buffer."""
LAST_CALLS_S = 1.0
"""Grace period at shutdown for calls in transit from clients that do not acknowledge the PING."""


class Http2Connection(FairReader, asyncio.BufferedProtocol):
    """`client`: the client's address, if a PROXY header named it."""

    def __init__(self, listener: RpcListener, client: str = "") -> None:
        super().__init__()
        self._listener = listener
        self._client = client
        self._core: Http2 | None = None
        self._filling = False
        self._scheduled = False
        self._turn = listener.turn
        self._unsent = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if not self._listener.enter(self):
            transport.abort()
            return
        self._core = Http2(self._listener, self._client or peer_address(transport), self._wake)
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.leave(self)
        self.transport = None
        if self._core is not None:
            self._core.streams.lost()
            self._core.output.out.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        core = self._core
        if core is None:
            return SCRATCH
        space = core.space()
        self._filling = space is not None
        if space is not None:
            return self._listener.reads.bounded(self, space)
        return SMALL_SCRATCH if core.large else SCRATCH

    def buffer_updated(self, count: int) -> None:
        core = self._core
        if core is None:
            return
        self._scheduled = True  # flushed below
        if self._filling:
            core.fill(count)
        else:
            core.feed(bytes(SCRATCH[:count]))
            if core.more:
                self.transport.pause_reading()
                self._listener.backlog.put(self)
        self._flush()
        if count > SMALL_READ_BYTES and not core.more and not core.streams.over:
            self._listener.reads.count(self, count)

    @property
    def may_read(self) -> bool:
        """While frames wait, the backlog resumes reading."""
        return self._core is not None and not self._core.more

    def proceed(self) -> bool:
        """Processes delayed frames. True: frames are left."""
        core, transport = self._core, self.transport
        if core is None or transport is None or transport.is_closing():
            return False
        self._scheduled = True
        core.feed(b"")
        if not core.more:
            transport.resume_reading()
        self._flush()
        return core.more

    @property
    def spent(self) -> int:
        return 0 if self._core is None else self._core.spent

    @property
    def estimate(self) -> int:
        return 0 if self._core is None else self._core.estimate

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._core is not None:
            self._core.output.pause()
            self._turn = self._listener.turn

    def resume_writing(self) -> None:
        if self._core is not None:
            self._core.streams.resumed()

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._listener.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        core, transport = self._core, self.transport
        if core is None or transport is None:
            return
        output = core.output
        if output.out:
            out, output.out = output.out, []
            if output.bytes <= JOINED_BYTES:
                transport.write(b"".join(out))
            else:
                transport.writelines(out)
            core.streams.taken()
        if core.done:
            transport.close()

    def check_timeouts(self, waited: int) -> None:
        """Called on every turn of the slow clock."""
        core, transport, listener = self._core, self.transport, self._listener
        if core is None or transport is None:
            return
        unsent = transport.get_write_buffer_size()
        if not unsent or self._unsent - unsent < 0 or self._unsent - unsent >= listener.min_bytes:
            self._turn = listener.turn
        self._unsent = unsent
        if listener.turn - self._turn > waited:
            transport.abort()
            return
        core.life.check_timeouts(waited, listener.min_bytes, listener.idle_turns)
        self._flush()

    def stop(self) -> None:
        """Accepts no more calls after the current ones."""
        if self._core is not None:
            self._core.life.drain()
            self._listener.loop.call_later(LAST_CALLS_S, self._no_more)

    def give_up(self, error: ServeError) -> None:
        core = self._core
        if core is not None:
            core.life.no_more()
            for stream in list(core.streams.open.values()):
                stream.fail(RpcError(Code.UNAVAILABLE, str(error)))
            self._wake()

    def _no_more(self) -> None:
        if self._core is not None:
            self._core.life.no_more()
            self._wake()

    @property
    def idle_since(self) -> float | None:
        core, transport = self._core, self.transport
        if core is None or transport is None or transport.get_write_buffer_size():
            return None
        return None if any(stream.in_use for stream in core.streams.open.values()) else core.streams.idle_since

    def evict(self) -> None:
        if self._core is not None:
            self._core.streams.end(ErrorCode.NO_ERROR, "idle, closed for other clients (--limit http_connections)")
