"""A caller of gRPC for the tests: `h2` as the client of the core, bytes handed over in memory. The rule of the file:
what the caller says is made by h2 or by hand, never by what is tested.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from shmserve.gateway.http2.backlog import FrameBacklog
from shmserve.gateway.http2.interface import Application, Awaits, ServiceCall, TransportStream
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.http2.protocol import Http2
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import Shares
from shmserve.gateway.limits.turns import JobTurns, ReadTurns
from shmserve.gateway.upstream.receive import Room

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Echo/Unary"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


class Echo:
    """Sends back every message, and notes what it is told."""

    awaits = Awaits.NEXT_REQUEST

    def __init__(self, stream: TransportStream) -> None:
        self.stream = stream
        self.told: list[Any] = []
        self.rooms: list[memoryview] = []

    def room(self, size: int, first: Buffer) -> Room | None:
        """For messages that begin with an R."""
        if bytes(first[:1]) != b"R":
            return None
        self.rooms.append(memoryview(bytearray(size)))
        return Room(self.rooms[-1], lambda begin, end: None)

    def message(self, data: Buffer) -> None:
        data = bytes(data)
        self.told.append(data)
        self.stream.send([data[: len(data) // 2], memoryview(data)[len(data) // 2 :]])

    def half_closed(self) -> None:
        self.told.append("half closed")
        self.stream.finish(0)

    def cancelled(self) -> None:
        self.told.append("cancelled")

    def resume(self) -> None:
        self.told.append("resume")


class Host:
    """What connections share, with a clock that is set by hand."""

    def __init__(
        self, application: Callable[[TransportStream], ServiceCall] = Echo, held_bytes: int = 1 << 30, **limits: Any
    ) -> None:
        self.budget = Budget(held_bytes)
        self.limits = Http2Limits(**limits)
        self.shares = Shares()
        self.later: deque[Callable[[], None]] = deque()
        self.loop = cast(Any, SimpleNamespace(call_soon=self.later.append))
        self.turns = JobTurns(self.loop)
        self.reads = ReadTurns(self.loop)
        self.backlog = FrameBacklog(self.loop)
        self.calls: list[Any] = []
        self.turn = 0
        self.stream_turns = 1000
        self.time = 0.0
        self.answers: Counter[int] = Counter()
        self.expiring: set[Any] = set()
        self._make = application

    @property
    def application(self) -> Application:
        return self._new

    def _new(self, stream: TransportStream) -> ServiceCall:
        made = self._make(stream)
        self.calls.append(made)
        return made

    def turn_once(self) -> None:
        for _ in range(len(self.later)):
            self.later.popleft()()

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


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


class Caller:
    """`window`: what this caller takes of a stream; `greet`: whether the connection is begun at once."""

    def __init__(self, host: Host | None = None, window: int = 1 << 20, greet: bool = True) -> None:
        self.host = host or Host()
        self.core = Http2(self.host, "caller", lambda: None)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.events: list[h2.events.Event] = []
        self.bodies: dict[int, bytearray] = {}
        self.ended: dict[int, dict[str, str]] = {}
        """Trailers of the calls that have ended."""
        self.reset: dict[int, int] = {}
        self.gone: list[tuple[int, bytes]] = []
        """Reasons and texts of GOAWAY."""
        self.acknowledge = True
        if greet:
            self.h2.initiate_connection()
            self.h2.update_settings({4: window})
            self.turn()

    def feed(self, data: bytes) -> None:
        """In as many turns of the loop as it takes."""
        self.core.feed(data)
        while self.core.more or self.host.later:
            if self.core.more:
                self.core.feed(b"")
            self.host.turn_once()

    def turn(self) -> None:
        """Until neither side has anything to say."""
        while True:
            data = self.h2.data_to_send()
            if data:
                self.feed(data)
            out, self.core.out = self.core.out, []
            self.core.taken()
            if not data and not out:
                return
            if out:
                for event in self.h2.receive_data(b"".join(map(bytes, out))):
                    self._saw(event)

    def _saw(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, h2.events.DataReceived):
            self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
            if self.acknowledge and event.flow_controlled_length:
                self.h2.increment_flow_control_window(event.flow_controlled_length)
                with suppress(h2.exceptions.StreamClosedError):  # it has ended meanwhile
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
        """DATA, as far as the windows go; what the other side grants meanwhile is used."""
        while data:
            size = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size, len(data))
            assert size > 0, "the window is closed"
            self.h2.send_data(number, data[:size], end_stream=end and size == len(data))
            data = data[size:]
            self.turn()

    def call(self, data: bytes, *more: tuple[str, str]) -> tuple[bytes, int]:
        """One unary call: what was answered, and its status."""
        number = self.begin(*more)
        self.send(number, message(data))
        return self.answer(number), self.status(number)

    def answer(self, number: int) -> bytes:
        found = self.messages(number)
        assert len(found) <= 1
        return found[0] if found else b""

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
        """Frames as answers to bytes made by hand: kind, flags, stream, payload."""
        for part in parts:
            self.feed(part)
        out, self.core.out = b"".join(map(bytes, self.core.out)), []
        self.core.taken()
        found = []
        while out:
            size = int.from_bytes(out[:3], "big")
            found.append((out[3], out[4], int.from_bytes(out[5:9], "big"), out[9 : 9 + size]))
            out = out[9 + size :]
        return found
