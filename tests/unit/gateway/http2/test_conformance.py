"""HTTP/2 conformance: the cases of h2spec, by section of RFC 9113 (HTTP/2) and RFC 7541 (HPACK), as raw frames.

h2spec follows RFC 7540; where RFC 9113 changed a rule, its newer form is checked (priorities are ignored, for example).
Where the RFC allows a stream error to be treated as a connection error, the table has this server's behaviour. The last
rows are floods of frames without effect, which the RFC lets a server end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import hpack
import pytest

from tests.support.cases import cases
from tests.support.gateway.http2_caller import Caller, Host, Unfinished
from tests.support.gateway.http2_frames import (
    CALM,
    CLOSED,
    COMPRESSION,
    CONTINUATION,
    DATA,
    END,
    END_HEADERS,
    FLOW,
    GOAWAY,
    HEAD,
    HEADERS,
    HELLO,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL,
    PUSH,
    REFUSED,
    RST,
    SETTINGS,
    SIZE,
    WINDOW,
    frame,
    message,
    number,
    unary,
)


class Fails(NamedTuple):
    """The error of a stream; `stream` 0: the error of the connection."""

    code: int
    stream: int = 0


def raw_block(headers: Sequence[tuple[str, str]]) -> bytes:
    """Literals without indexing: they may be malformed, and do not change the table."""
    encoded = b""
    for name, value in headers:
        encoded += b"\0"
        for text in (name.encode("latin-1"), value.encode("latin-1")):
            encoded += (bytes([len(text)]) if len(text) < 127 else b"\x7f" + bytes([len(text) - 127])) + text
    return encoded


def block(*more: tuple[str, str], without: str = "", first: Sequence[tuple[str, str]] = ()) -> bytes:
    return raw_block([*first, *[pair for pair in HEADERS if pair[0] != without], *more])


def head(stream: int = 1, flags: int = END_HEADERS, payload: bytes | None = None) -> bytes:
    return frame(HEAD, flags, stream, block() if payload is None else payload)


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + number(value))


def whole(payload: bytes) -> bytes:
    return head(payload=payload, flags=END_HEADERS | END)


def data(payload: bytes = b"", flags: int = 0, stream: int = 1) -> bytes:
    return frame(DATA, flags, stream, payload)


def trailers(*headers: tuple[str, str]) -> bytes:
    return head() + head(flags=END_HEADERS | END, payload=raw_block(headers))


BODY = message(b"x")
DONE = data(BODY, END)
RESET = head() + frame(RST, 0, 1, number(8))
MANY = 10_001
FIELDS = raw_block([("x-dummy", "y" * 100)])

CASES: dict[str, tuple[bytes, Fails | None]] = {
    "3.4 invalid preface": (b"INVALID CONNECTION PREFACE\r\n\r\n", Fails(PROTOCOL)),
    "3.4 preface without SETTINGS": (PREFACE + frame(PING, 0, 0, bytes(8)), Fails(PROTOCOL)),
    "4.1 unknown type": (frame(0x16, 0, 0, bytes(8)), None),
    "4.1 unknown flags": (frame(PING, 0x16, 0, bytes(8)), None),
    "4.1 reserved bit of the stream": (frame(PING, 0, 1 << 31, bytes(8)), None),
    "4.1 large unknown frame": (frame(0x16, 0, 0, bytes(50_000)), None),
    "4.2 DATA of 2^14": (head() + data(bytes(1 << 14)), None),
    "4.2 DATA over the limit": (head() + data(bytes((1 << 20) + 1)), Fails(SIZE)),
    "4.3 invalid header block": (head(payload=b"\x40"), Fails(COMPRESSION)),
    "4.3 HEADERS of another stream inside of a header block": (head(flags=0) + head(3), Fails(PROTOCOL)),
    "4.3 DATA inside of a header block": (head(flags=0) + data(b"x"), Fails(PROTOCOL)),
    "4.3 an unknown frame inside of a header block": (head(flags=0) + frame(0x16, 0, 0), Fails(PROTOCOL)),
    "5.1 idle: DATA": (data(b"test"), Fails(PROTOCOL)),
    "5.1 idle: RST_STREAM": (frame(RST, 0, 1, number(8)), Fails(PROTOCOL)),
    "5.1 idle: WINDOW_UPDATE": (frame(WINDOW, 0, 1, number(100)), Fails(PROTOCOL)),
    "5.1 idle: CONTINUATION": (frame(CONTINUATION, 4, 1, block()), Fails(PROTOCOL)),
    "5.1 idle: PRIORITY": (frame(PRIORITY, 0, 1, bytes(5)), None),
    "5.1 half closed: DATA": (head(flags=5) + data(b"test"), Fails(CLOSED, 1)),
    "5.1 half closed: HEADERS": (head(flags=5) + head(flags=5), Fails(CLOSED, 1)),
    "5.1 half closed: WINDOW_UPDATE": (head(flags=5) + frame(WINDOW, 0, 1, number(1)), None),
    "5.1 half closed: PRIORITY": (head(flags=5) + frame(PRIORITY, 0, 1, bytes(5)), None),
    "5.1 reset: DATA": (RESET + data(b"test"), Fails(CLOSED, 1)),
    "5.1 reset: HEADERS": (RESET + head(flags=5), Fails(CLOSED)),
    "5.1 reset: RST_STREAM": (RESET + frame(RST, 0, 1, number(8)), None),
    "5.1 reset: WINDOW_UPDATE": (RESET + frame(WINDOW, 0, 1, number(1)), None),
    "5.1.1 an even stream": (head(2), Fails(PROTOCOL)),
    "5.1.1 a smaller number than before": (head(5, 5) + head(3, 5), Fails(PROTOCOL)),
    "5.1.1 HEADERS of stream 0": (head(0), Fails(PROTOCOL)),
    "5.1.2 one stream too many": (b"".join(head(2 * n + 1, 5) for n in range(9)), Fails(REFUSED, 17)),
    "5.3.2 HEADERS that depend on themselves": (head(flags=0x25, payload=number(1) + b"\0" + block()), None),
    "5.3.2 PRIORITY that depends on itself": (frame(PRIORITY, 0, 1, number(1) + b"\0"), None),
    "6.1 DATA of stream 0": (data(b"x", stream=0), Fails(PROTOCOL)),
    "6.1 padding as long as the payload": (head() + data(b"\x05test.", PADDED), None),
    "6.1 more padding than payload": (head() + data(b"\x06test.", PADDED), Fails(PROTOCOL)),
    "6.1 no padding where there should be": (head() + data(b"", PADDED), Fails(PROTOCOL)),
    "6.1 padding": (head() + data(b"\x03" + BODY + bytes(3), PADDED | END), None),
    "6.2 padding": (head(flags=0xD, payload=b"\x03" + block() + bytes(3)), None),
    "6.2 more padding than payload": (head(flags=0xD, payload=b"\xff" + bytes(8)), Fails(PROTOCOL)),
    "6.2 half a priority": (head(flags=0x25, payload=bytes(3)), Fails(PROTOCOL)),
    "6.3 PRIORITY of stream 0": (frame(PRIORITY, 0, 0, bytes(5)), Fails(PROTOCOL)),
    "6.3 PRIORITY of 4 bytes": (frame(PRIORITY, 0, 1, bytes(4)), Fails(SIZE)),
    "6.4 RST_STREAM of stream 0": (frame(RST, 0, 0, number(8)), Fails(PROTOCOL)),
    "6.4 RST_STREAM of 3 bytes": (head() + frame(RST, 0, 1, bytes(3)), Fails(SIZE)),
    "6.5 ACK with a payload": (frame(SETTINGS, 1, 0, bytes(6)), Fails(SIZE)),
    "6.5 SETTINGS of a stream": (frame(SETTINGS, 0, 1), Fails(PROTOCOL)),
    "6.5 SETTINGS of 3 bytes": (frame(SETTINGS, 0, 0, bytes(3)), Fails(SIZE)),
    "6.5.2 ENABLE_PUSH of 2": (setting(2, 2), Fails(PROTOCOL)),
    "6.5.2 INITIAL_WINDOW_SIZE over 2^31 - 1": (setting(4, 1 << 31), Fails(FLOW)),
    "6.5.2 MAX_FRAME_SIZE below 2^14": (setting(5, (1 << 14) - 1), Fails(PROTOCOL)),
    "6.5.2 MAX_FRAME_SIZE over 2^24 - 1": (setting(5, 1 << 24), Fails(PROTOCOL)),
    "6.5.2 an unknown setting": (setting(0xFF, 1), None),
    "6.6 PUSH_PROMISE of a client": (frame(PUSH, 4, 1, number(2)), Fails(PROTOCOL)),
    "6.7 PING of a stream": (frame(PING, 0, 1, bytes(8)), Fails(PROTOCOL)),
    "6.7 PING of 6 bytes": (frame(PING, 0, 0, bytes(6)), Fails(SIZE)),
    "6.8 GOAWAY of a stream": (frame(GOAWAY, 0, 1, bytes(8)), Fails(PROTOCOL)),
    "6.8 GOAWAY of 7 bytes": (frame(GOAWAY, 0, 0, bytes(7)), Fails(SIZE)),
    "6.8 GOAWAY with an unknown error and a text": (frame(GOAWAY, 0, 0, bytes(7) + b"\x63text"), None),
    "6.9 WINDOW_UPDATE by 0": (frame(WINDOW, 0, 0, number(0)), Fails(PROTOCOL)),
    "6.9 WINDOW_UPDATE of a stream by 0": (head() + frame(WINDOW, 0, 1, number(0)), Fails(PROTOCOL, 1)),
    "6.9 WINDOW_UPDATE of 3 bytes": (frame(WINDOW, 0, 0, bytes(3)), Fails(SIZE)),
    "6.9.1 the largest window": (frame(WINDOW, 0, 0, number((1 << 31) - 1 - 65_535)), None),
    "6.9.1 a window of 2^31": (frame(WINDOW, 0, 0, number((1 << 31) - 65_535)), Fails(FLOW)),
    "6.9.1 a window of a stream over 2^31 - 1": (head() + frame(WINDOW, 0, 1, number((1 << 31) - 1)), Fails(FLOW, 1)),
    "6.9.2 a window that SETTINGS make too large": (
        head() + frame(WINDOW, 0, 1, number((1 << 31) - 65_536)) + setting(4, 65_537), Fails(FLOW)),
    "6.10 two CONTINUATION frames": (
        head(flags=1) + frame(CONTINUATION, 0, 1, FIELDS) + frame(CONTINUATION, 4, 1, FIELDS), None),
    "6.10 CONTINUATION of stream 0": (head(flags=1) + frame(CONTINUATION, 4, 0, FIELDS), Fails(PROTOCOL)),
    "6.10 CONTINUATION after CONTINUATION with the end": (
        head(flags=1) + frame(CONTINUATION, 4, 1, FIELDS) + frame(CONTINUATION, 4, 1, FIELDS), Fails(PROTOCOL)),
    "7 RST_STREAM with an unknown error": (head() + frame(RST, 0, 1, number(0xFF)), None),
    "8.1 trailers that do not end the stream": (head() + head(), Fails(PROTOCOL, 1)),
    "8.1 trailers": (trailers(("x-more", "1")), None),
    "8.1 a pseudo header among the trailers": (trailers((":path", "/x")), Fails(PROTOCOL, 1)),
    "8.1 a bad name among the trailers": (trailers(("X-More", "1")), Fails(PROTOCOL, 1)),
    "8.1 a bad value among the trailers": (trailers(("x-more", "1\r\nx: y")), Fails(PROTOCOL, 1)),
    "8.1.1 the right content-length": (head(payload=block(("content-length", "6"))) + DONE, None),
    "8.1.1 the right content-length, with trailers": (
        head(payload=block(("content-length", "6"))) + data(BODY) + head(flags=5, payload=FIELDS), None),
    "8.1.1 less DATA than content-length": (head(payload=block(("content-length", "7"))) + DONE, Fails(PROTOCOL, 1)),
    "8.1.1 less DATA than content-length, with trailers": (
        head(payload=block(("content-length", "7"))) + data(BODY) + head(flags=5, payload=FIELDS),
        Fails(PROTOCOL, 1)),
    "8.1.1 more DATA than content-length": (
        head(payload=block(("content-length", "8"))) + data(BODY) * 2, Fails(PROTOCOL, 1)),
    "8.1.1 content-length and no DATA": (whole(block(("content-length", "1"))), Fails(PROTOCOL, 1)),
    "8.1.1 two values of content-length": (
        head(payload=block(("content-length", "6"), ("content-length", "6"))), Fails(PROTOCOL, 1)),
    "8.1.1 a content-length that is not a number": (head(payload=block(("content-length", "+6"))), Fails(PROTOCOL, 1)),
    **{f"8.2.1 the name {name!r}": (whole(block((name, "1"))), Fails(PROTOCOL, 1))
       for name in ("X-Upper", "", "with space", "with\nlf", "with\0nul", "with\x7f", "with\xe4", "with:colon")},
    **{f"8.2.1 the value {value!r}": (whole(block(("x-more", value))), Fails(PROTOCOL, 1))
       for value in ("a\rb", "a\nb", "a\0b", "\n", "a\r\n")},
    **{f"8.2.1 the value {value!r}, which gRPC permits": (whole(block(("x-more", value))), None)
       for value in (" a", "a ", "\ta", "a\t", " ")},
    **{f"8.2.1 the path {path!r}": (
        whole(block(without=":path", first=[(":path", path)])), Fails(PROTOCOL, 1)) for path in ("/a ", "/\t")},
    "8.2.1 an empty value": (whole(block(("x-more", ""))), None),
    "8.2.1 a value with spaces inside and bytes over 0x7f": (whole(block(("x-more", "a b\t\xe4"))), None),
    **{f"8.2.2 {name}": (whole(block((name, value))), Fails(PROTOCOL, 1))
       for name, value in (("connection", "close"), ("proxy-connection", "x"), ("keep-alive", "1"),
                           ("transfer-encoding", "chunked"), ("upgrade", "h2c"))},
    "8.2.2 te other than trailers": (whole(block(("te", "trailers, deflate"), without="te")), Fails(PROTOCOL, 1)),
    "8.3 an unknown one": (whole(block(first=[(":test", "ok")])), Fails(PROTOCOL, 1)),
    "8.3 after a regular one": (whole(block((":authority", "x"), without=":authority")), Fails(PROTOCOL, 1)),
    "8.3 with a line break": (whole(block(without=":authority", first=[(":authority", "a\r\nb")])), Fails(PROTOCOL, 1)),
    **{f"8.3.1 without {name}": (whole(block(without=name)), Fails(PROTOCOL, 1))
       for name in (":method", ":scheme", ":path")},
    **{f"8.3.1 {name} twice": (whole(block(first=[(name, value)])), Fails(PROTOCOL, 1)) for name, value in HEADERS[:4]},
    **{f"8.3.1 :path {path!r}": (
        whole(block(without=":path", first=[(":path", path)])), Fails(PROTOCOL, 1)) for path in ("", "x")},
    "HPACK 2.3.3 an index beyond the tables": (whole(block() + b"\xbe"), Fails(COMPRESSION)),
    "HPACK 2.3.3 the name of an index beyond the tables": (whole(block() + b"\x7f\x01\x01a"), Fails(COMPRESSION)),
    "HPACK 4.2 a change of the table's size at the end": (whole(block() + b"\x20"), Fails(COMPRESSION)),
    "HPACK 5.1 an integer without an end": (whole(block() + b"\x7f" + b"\xff" * 20), Fails(COMPRESSION)),
    "HPACK 5.2 padding of a Huffman string over 7 bits": (
        whole(block() + b"\x00\x01x\x84\x49\x50\x9f\xff"), Fails(COMPRESSION)),
    "HPACK 5.2 zeros as padding of a Huffman string": (
        whole(block() + b"\x00\x01x\x83\x49\x50\x90"), Fails(COMPRESSION)),
    "HPACK 5.2 EOS inside of a Huffman string": (
        whole(block() + b"\x00\x01x\x87\xff\xff\xff\xff\x49\x50\x9f"), Fails(COMPRESSION)),
    "HPACK 5.2 a string beyond the block": (whole(block() + b"\x00\x01x\x05ab"), Fails(COMPRESSION)),
    "HPACK 6.1 index 0": (whole(block() + b"\x80"), Fails(COMPRESSION)),
    "HPACK 6.3 a table above the limit": (whole(b"\x3f\xff\xff\x07" + block()), Fails(COMPRESSION)),
    "3.4 an acknowledgement at first": (PREFACE + frame(SETTINGS, 1, 0), Fails(PROTOCOL)),
    "6.2 no padding where there should be": (frame(HEAD, 0xC, 1), Fails(PROTOCOL)),
    "6.5 large SETTINGS": (frame(SETTINGS, 0, 0, bytes(6000)), Fails(SIZE)),
    "HPACK 4.2 three sizes of the table": (whole(b"\x20\x3f\x85\x01\x20" + block()), Fails(COMPRESSION)),
    "headers over the limit, announced": (head(payload=bytes(40_000))[:50], Fails(CALM)),
    "many CONTINUATION frames": (head(flags=0) + frame(CONTINUATION, 0, 1) * 1000, Fails(CALM)),
    "large CONTINUATION frames": (head(flags=0) + frame(CONTINUATION, 0, 1, bytes(16_384)) * 3, Fails(CALM)),
    "many PING frames": (frame(PING, 0, 0, bytes(8)) * 4, Fails(CALM)),
    "many SETTINGS frames": (frame(SETTINGS, 0, 0) * MANY, Fails(CALM)),
    "many empty DATA frames": (head() + data() * MANY, Fails(CALM)),
    "many PRIORITY frames": (frame(PRIORITY, 0, 1, bytes(5)) * MANY, Fails(CALM)),
    "many unknown frames": (frame(200, 0, 1) * MANY, Fails(CALM)),
    "many resets of an ended call": (RESET + frame(RST, 0, 1, number(8)) * MANY, Fails(CALM)),
    "a window that grows byte by byte": (
        setting(4, 0) + unary(1, bytes(20_000)) + frame(WINDOW, 0, 1, number(1)) * MANY, Fails(CALM)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    sent, expected = CASES[name]
    caller = Caller(Host(Unfinished, streams=8), opening=b"")
    frames = caller.raw([sent if name.startswith("3.4") else HELLO + sent])
    ends = [int.from_bytes(payload[4:8], "big") for kind, _, _, payload in frames if kind == GOAWAY]
    resets = [(int.from_bytes(payload, "big"), stream) for kind, _, stream, payload in frames if kind == RST]
    calls = caller.host.calls
    if expected is not None and not expected.stream:
        assert ends == [expected.code]
        assert caller.core.streams.over
        assert not caller.core.streams.open
        assert not caller.host.held
        assert caller.raw([unary(101, b"y")]) == [], "further input is ignored"
        return
    assert ends == []
    assert resets == ([] if expected is None else [expected])
    if expected is not None:
        assert not any(stream.number == expected.stream for stream in caller.core.streams.open.values())
        if expected.code == REFUSED:
            assert len(calls) == 8
            return
        malformed = name.startswith(("8.2", "8.3"))
        assert [call.events[-1] for call in calls] == ["cancelled"] * len(calls)
        assert len(calls) <= 1 - malformed
    caller.raw([unary(101, b"y")])
    assert calls[-1].events == [b"y", "half closed"], "the connection goes on"


def test_answers_to_settings_and_pings() -> None:
    caller = Caller(opening=b"")
    frames = caller.raw([HELLO, frame(PING, 0, 0, b"12345678"), frame(SETTINGS, 1, 0), frame(PING, 1, 0, bytes(8))])
    assert frames[0][:3] == (SETTINGS, 0, 0), "the server's preface comes first"
    assert [one for one in frames if one[0] == SETTINGS and one[1] == 1] == [(SETTINGS, 1, 0, b"")]
    assert [one for one in frames if one[0] == PING] == [(PING, 1, 0, b"12345678")]


def test_data_stays_within_the_flow_control_window() -> None:
    """6.9.1 and 6.9.2: DATA stays within the window, even while SETTINGS have made it negative."""
    caller = Caller(opening=b"")

    def sizes(*parts: bytes) -> list[int]:
        return [len(payload) for kind, _, _, payload in caller.raw(parts) if kind == DATA]

    assert sizes(HELLO, setting(4, 3), unary(1, bytes(20))) == [3]
    assert sizes(setting(4, 2), frame(WINDOW, 0, 1, number(1))) == []
    assert sizes(frame(WINDOW, 0, 1, number(5))) == [5]
    assert sizes(setting(4, 100)) == [17]


def test_frames_for_a_stream_that_ended_here_first_are_ignored() -> None:
    """5.1: they were in transit when the server reset the stream."""
    caller = Caller(Host(Unfinished), opening=HELLO + head())
    caller.host.calls[0].stream.finish(0)
    assert {one[0] for one in caller.raw([])} == {HEAD, RST}
    late = [data(b"late"), frame(WINDOW, 0, 1, number(1)), head(flags=5)]
    assert caller.raw(late) == []
    assert caller.raw([data(b"x")])[0][::3] == (RST, number(CLOSED)), "not after its end"


@cases(
    (("content-type", "text/html"), b"415"),
    (("content-type", "application/grpc-web"), b"415"),
    ((":method", "GET"), b"405"),
)
def test_requests_that_are_not_grpc_get_an_http_status(field: tuple[str, str], status: bytes) -> None:
    pseudo, regular = ([field], []) if field[0] == ":method" else ([], [field])
    caller = Caller(opening=b"")
    frames = caller.raw([HELLO, whole(block(*regular, without=field[0], first=pseudo)), unary(3, b"x")])
    answer = next(payload for kind, _, stream, payload in frames if kind == HEAD and stream == 1)
    assert dict(hpack.Decoder().decode(answer, raw=True)) == {b":status": status}
    assert caller.host.calls[0].events == [b"x", "half closed"]


@pytest.mark.parametrize("field", [b"\x40\x01a\x00", b"\x00\x01a\x00"])
def test_too_many_fields_are_refused_before_they_are_decoded(field: bytes) -> None:
    caller = Caller(opening=b"")
    assert caller.errors(HELLO, whole(field * 129)) == [CALM]
    assert caller.core.spent < 10
