"""All connections of gRPC, and what they share. The rule of the file: one slow clock for all of them, and one for
deadlines while there are any, so that no call costs a timer.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import Counter
from collections.abc import Callable

from shmserve.clients.gateway.grpc.codes import Code, RpcError
from shmserve.clients.gateway.http2.connection import Connection
from shmserve.clients.gateway.http2.limits import Limits
from shmserve.clients.gateway.http2.seam import Application
from shmserve.clients.gateway.http2.stream import Stream
from shmserve.clients.gateway.listen import Listener
from shmserve.errors import Unavailable

TURNS = 4
"""So many turns of the slow clock are a read timeout."""
LEAST_RATE = 1024
"""Bytes a second, either way."""
DEADLINE_S = 0.02
"""Deadlines are looked at so often."""


class RpcDoor:
    """`stopped` is called when no new calls are taken any more."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, application: Application, limits: Limits,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.application = application
        self.limits = limits
        self.now = loop.time
        self.turn = 0
        self.turn_s = _turn_s(limits)
        self.turns = math.ceil(limits.read_timeout_s / self.turn_s)
        """So many turns are a read timeout."""
        self.least_bytes = max(1, int(LEAST_RATE * self.turn_s))
        self.idle_turns = math.ceil(limits.idle_timeout_s / self.turn_s)
        self.stopping = False
        self.answers: Counter[int] = Counter()
        self._held = 0
        self._connections: set[Connection] = set()
        self._stopped = stopped
        self._listener = Listener(loop, lambda: Connection(self), limits.read_timeout_s)
        self._empty = asyncio.Event()
        self._due: dict[int, set[Stream]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_for = 0
        """The bucket that it is for."""
        self._clock = loop.call_later(self.turn_s, self._tick)

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        return await self._listener.open(address, port, share, tls)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Certificates have been read again."""
        if tls is not None:
            await self._listener.reopen(tls)

    @property
    def connections(self) -> int:
        return len(self._connections)

    # ------------------------------------------------------------------------------------ what connections call

    def enter(self, connection: Connection) -> bool:
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections and not self.stopping

    def leave(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def hold(self, size: int) -> None:
        """`size` below 0: they are held no longer."""
        held = self._held + size
        if size > 0 and held > self.limits.held_bytes:
            raise Unavailable(
                f"the messages of all calls together would be over {self.limits.held_bytes} bytes; send again later, "
                "or raise --http-max-held-size of the gateway"
            )
        self._held = held

    @property
    def held(self) -> int:
        return self._held

    def answered(self, code: int) -> None:
        self.answers[code] += 1

    # ------------------------------------------------------------------------------------ deadlines

    def expire(self, stream: Stream) -> None:
        assert stream.expires is not None
        bucket = _bucket(stream.expires)
        self._due.setdefault(bucket, set()).add(stream)
        if self._alarm is None or bucket < self._alarm_for:
            self._set_alarm(bucket)

    def keep(self, stream: Stream) -> None:
        assert stream.expires is not None
        bucket = _bucket(stream.expires)
        found = self._due.get(bucket)
        if found is not None:
            found.discard(stream)
            if not found:
                del self._due[bucket]

    def _set_alarm(self, bucket: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_for = bucket
        self._alarm = self.loop.call_at(max(bucket + 1, _bucket(self.now()) + 1) * DEADLINE_S, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = _bucket(self.now())
        for bucket in [bucket for bucket in self._due if bucket < now]:
            for stream in self._due.pop(bucket):
                stream.fail(RpcError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        if self._due and self._alarm is None:
            self._set_alarm(min(self._due))

    # ------------------------------------------------------------------------------------ time

    def _tick(self) -> None:
        self.turn += 1
        self._clock = self.loop.call_later(self.turn_s, self._tick)
        for connection in list(self._connections):
            connection.look(self.turns)

    # ------------------------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Takes no new calls, and waits for the answers to those that are here, as long as the limit says."""
        self.stopping = True
        self._listener.close()
        self._stopped()
        for connection in list(self._connections):
            connection.stop()
        if self._connections:
            self._empty.clear()
            waiting = self.loop.create_task(self._empty.wait())
            await asyncio.wait([waiting], timeout=self.limits.exit_timeout_s)
            for connection in list(self._connections):
                connection.abort()
            await waiting
        self._clock.cancel()
        if self._alarm is not None:
            self._alarm.cancel()


def _turn_s(limits: Limits) -> float:
    """The slow clock goes as fast as the shortest of what it measures wants it."""
    spans = [limits.read_timeout_s, limits.idle_timeout_s, limits.keepalive_s, limits.keepalive_timeout_s]
    spans += [span for span in (limits.age_s, limits.age_grace_s) if span]
    return max(0.02, min(spans) / TURNS)


def _bucket(at: float) -> int:
    return int(at / DEADLINE_S)
