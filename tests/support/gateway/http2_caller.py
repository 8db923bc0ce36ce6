"""A gRPC client in memory: the package `h2` as the peer of the gateway's HTTP/2 connection, and services for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.interface import Awaits, ServiceCall, TransportStream
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.http2.protocol import Http2
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import InputBacklog
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import CallerShares
from shmserve.gateway.limits.turns import JobTurns, ReadTurns
from shmserve.gateway.upstream.receive import Room
from tests.support.gateway.http2_frames import GOAWAY, HEADERS, message
from tests.support.gateway.http_connection import Transport
from tests.support.manual_loop import ManualLoop


class Echo:
    """Sends back every message, and records the events of its call."""

    awaits = Awaits.NEXT_REQUEST

    def __init__(self, stream: TransportStream) -> None:
        self.stream = stream
        self.events: list[Any] = []
        self.rooms: list[memoryview] = []

    def room(self, size: int, first: Buffer) -> Room | None:
        """Reserves memory for messages that begin with R."""
        if bytes(first[:1]) != b"R":
            return None
        self.rooms.append(memoryview(bytearray(size)))
        return Room(self.rooms[-1], lambda begin, end: None)

    def message(self, data: Buffer) -> None:
        data = bytes(data)
        self.events.append(data)
        self.stream.send([data[: len(data) // 2], memoryview(data)[len(data) // 2 :]])

    def half_closed(self) -> None:
        self.events.append("half closed")
        self.stream.finish(0)

    def cancelled(self) -> None:
        self.events.append("cancelled")

    def resume(self) -> None:
        self.events.append("resume")


class Unfinished(Echo):
    """Does not finish its call, so the stream stays open."""

    def half_closed(self) -> None:
        self.events.append("half closed")


class Host:
    """The listener of the connections, with a clock and an event loop that the test advances."""

    def __init__(
        self, application: Callable[[TransportStream], ServiceCall] = Echo, held_bytes: int = 1 << 30, **limits: Any
    ) -> None:
        self.budget = Budget(held_bytes)
        self.limits = Http2Limits(**limits)
        self.shares = CallerShares()
        self.loop = cast(Any, ManualLoop())
        self.turns = JobTurns(self.loop)
        self.reads = ReadTurns(self.loop)
        self.backlog = InputBacklog(self.loop)
        self.calls: list[Any] = []
        self.turn = 0
        self.stream_turns = 1000
        self.time = 0.0
        self.min_bytes, self.idle_turns = 100, 40
        self.answers: Counter[int] = Counter()
        self.expiring: set[Any] = set()
        self._make = application

    def application(self, stream: TransportStream) -> ServiceCall:
        self.calls.append(self._make(stream))
        return cast(ServiceCall, self.calls[-1])

    def now(self) -> float:
        return self.time

    @property
    def held(self) -> int:
        return self.budget.held

    def answered(self, code: int) -> None:
        self.answers[code] += 1

    def expire(self, stream: Any) -> None:
        self.expiring.add(stream)

    def keep(self, stream: Any) -> None:
        self.expiring.discard(stream)

    def enter(self, connection: Any) -> bool:
        return True

    def leave(self, connection: Any) -> None: ...

    def connect(self) -> tuple[Any, Transport]:
        """A connection with a transport."""
        connection, transport = Http2Connection(cast(Any, self)), Transport()
        connection.connection_made(transport)
        return connection, transport


class Caller:
    """`window`: initial window of each stream towards this client; `opening`: sent instead of the preface of `h2`."""

    def __init__(
        self, host: Host | None = None, window: int = 1 << 20, opening: bytes | None = None, address: str = "caller"
    ) -> None:
        self.host = host or Host()
        self.core = Http2(self.host, address, lambda: None)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.bodies: dict[int, bytearray] = {}
        self.ended: dict[int, dict[str, str]] = {}
        """Stream -> headers and trailers of its response."""
        self.reset: dict[int, int] = {}
        self.gone: list[tuple[int, bytes]] = []
        """Error codes and debug data of GOAWAY."""
        self.acknowledge = True
        if opening:
            self.raw([opening])
        elif opening is None:
            self.h2.initiate_connection()
            self.h2.update_settings({4: window})
            self.turn()

    def feed(self, data: bytes) -> None:
        """Feeds the connection, in as many iterations of the loop as necessary."""
        self.core.feed(data)
        while self.core.more or self.host.loop.soon:
            if self.core.more:
                self.core.feed(b"")
            self.host.loop.iterate()

    def turn(self) -> None:
        """Exchanges data until neither side has more."""
        while True:
            data = self.h2.data_to_send()
            if data:
                self.feed(data)
            out, self.core.output.out = self.core.output.out, []
            self.core.streams.taken()
            if not data and not out:
                return
            if out:
                for event in self.h2.receive_data(b"".join(map(bytes, out))):
                    self._process(event)

    def _process(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
            if self.acknowledge and event.flow_controlled_length:
                self.h2.increment_flow_control_window(event.flow_controlled_length)
                with suppress(h2.exceptions.StreamClosedError):  # the stream has ended in the meantime
                    self.h2.increment_flow_control_window(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            self.ended.setdefault(event.stream_id, {}).update({str(name): str(text) for name, text in event.headers})
        elif isinstance(event, h2.events.StreamReset):
            self.reset[event.stream_id] = int(event.error_code or 0)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.gone.append((int(event.error_code or 0), event.additional_data or b""))

    def begin(self, *more: tuple[str, str], path: str = "", end: bool = False) -> int:
        number = self.h2.get_next_available_stream_id()
        headers = [(name, path if path and name == ":path" else value) for name, value in HEADERS]
        self.h2.send_headers(number, [*headers, *more], end_stream=end)
        return number

    def send(self, number: int, data: bytes, end: bool = True) -> None:
        """Sends DATA within the windows, which the server may extend in the meantime."""
        while data:
            size = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size, len(data))
            assert size > 0, "the window is closed"
            self.h2.send_data(number, data[:size], end_stream=end and size == len(data))
            data = data[size:]
            self.turn()

    def call(self, data: bytes, *more: tuple[str, str]) -> tuple[bytes, int]:
        """Makes a unary call. Returns the response and the status."""
        number = self.begin(*more)
        self.send(number, message(data))
        return self.answer(number), self.status(number)

    def answer(self, number: int) -> bytes:
        answers = self.messages(number)
        assert len(answers) <= 1
        return answers[0] if answers else b""

    def messages(self, number: int) -> list[bytes]:
        body, found = bytes(self.bodies.get(number, b"")), []
        while body:
            size = int.from_bytes(body[1:5], "big")
            found.append(body[5 : 5 + size])
            body = body[5 + size :]
        return found

    def status(self, number: int) -> int:
        return int(self.ended[number]["grpc-status"])

    def raw(self, parts: Sequence[bytes]) -> list[tuple[int, int, int, bytes]]:
        """Feeds raw bytes. Returns the frames of the response: kind, flags, stream, payload."""
        for part in parts:
            self.feed(part)
        out, self.core.output.out = b"".join(map(bytes, self.core.output.out)), []
        self.core.streams.taken()
        frames = []
        while out:
            size = int.from_bytes(out[:3], "big")
            frames.append((out[3], out[4], int.from_bytes(out[5:9], "big"), out[9 : 9 + size]))
            out = out[9 + size :]
        return frames

    def goaways(self, *parts: bytes) -> list[tuple[int, int]]:
        """Feeds raw bytes. Returns the last stream and the error code of each GOAWAY of the response."""
        payloads = [payload for kind, _, _, payload in self.raw(parts) if kind == GOAWAY]
        return [(int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")) for payload in payloads]

    def errors(self, *parts: bytes) -> list[int]:
        """Feeds raw bytes. Returns the error codes that they ended the connection with: one or none."""
        codes = [code for _, code in self.goaways(*parts)]
        assert bool(codes) == self.core.streams.over
        return codes

    def look(self, times: int = 1) -> None:
        """Advances the slow clock, by a second each time."""
        for _ in range(times):
            self.host.turn += 1
            self.host.time += 1.0
            self.core.life.check_timeouts(4, self.host.min_bytes, self.host.idle_turns)
