"""Hostile clients of the ZeroMQ listener, its limits, and its shutdown."""

from __future__ import annotations

import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import shmserve
from shmserve.errors import Unavailable
from tests.support.broker.fake_broker import FakeBroker, echo
from tests.support.cases import cases
from tests.support.gateway.zmq_listener import HELLO, Bare, ListenerThread
from tests.support.patience import PATIENCE_S


@cases(
    ([7, 1, "echo", 0, []], "CONNECTION_LOST", "the first message of a connection must be Hello"),
    ([6, 9, 0, "x", "frames"], "PROTOCOL", "protocol version 9 is not supported, only"),
    ([6, 1, 0, "x", "posix"], "PROTOCOL", "only be sent as 'frames'"),
)
def test_an_invalid_first_message_ends_the_connection(message: Any, code: str, text: str, bare: Any) -> None:
    one = bare(greet=False)
    one.send(message)
    tag, received, words = one.receive()
    assert (tag, received) == (39, code)
    assert text in words
    one.send([4, 1])  # ignored
    one.send(HELLO)
    assert one.receive()[0] == 32


NO_MEMORY = "shared memory is not supported over tcp: send tensors in frames"


def of(*data: Any) -> list[Any]:
    """A request with inputs of this data."""
    return [7, 4, "echo", 0, [["x", "UINT8", [1], one] for one in data]]


@cases(
    ([1, 1 << 32, 4096, "/name"], 39, ("INVALID_ARG", NO_MEMORY)),
    ([2, 1], 39, ("INVALID_ARG", NO_MEMORY)),
    (HELLO, 39, ("PROTOCOL", "second Hello on one connection")),
    ([3, [[1, 0, 8]]], 34, (0, "INVALID_ARG", "this client holds no handles to return")),
    ([9, 4, "nonsense"], 34, (4, "INVALID_ARG", "unknown query 'nonsense'; known queries: live")),
    ([9, 4, "live", "", 0, b"body"], 34, (4, "INVALID_ARG", "the query 'live' takes no body")),
    ([7, 0, "echo", 0, []], 34, (0, "INVALID_ARG", "request number 0 is 0 or already in flight")),
    (of([[1, 0, 1]]), 34, (4, "INVALID_ARG", "input 'x' is in shared memory")),
    (of(1), 34, (4, "INVALID_ARG", "input 'x' refers to frame 1, but the message has 1 frames")),
    (of(-1), 34, (4, "INVALID_ARG", "input 'x' refers to frame -1, but the message has 1 frames")),
    ([*of(), [["x", [1, 0, 1]]]], 34, (4, "INVALID_ARG", "output 'x' is requested in shared memory")),
    ([*of(), [["x"], ["x"]]], 34, (4, "INVALID_ARG", "output 'x' is requested twice")),
    (
        [12, "echo", 0, [[["x", "UINT8", []]], [4, 5], [1, 1], [[b"a"], [b"b"]]]],
        34,
        (0, "INVALID_ARG", "InferBatch is not supported over tcp: send each request as Infer"),
    ),
    ([99, 4], 34, (4, "PROTOCOL", "unknown message type 99")),
    (5, 34, (0, "PROTOCOL", "a message must be an array that begins with its tag")),
)
def test_invalid_messages_are_refused(
    message: Any, tag: int, fields: tuple[Any, ...], bare: Any, broker: FakeBroker
) -> None:
    one = bare()
    before = len(broker.requests)
    one.send(message, frames=(b"frame",))
    *received, text = one.receive()
    assert received == [tag, *fields[:-1]]
    assert fields[-1] in text
    assert tag == 39 or one.quiet()
    assert len(broker.requests) == before


def test_the_number_of_an_operation_whose_body_is_incomplete_is_taken(bare: Any, broker: FakeBroker) -> None:
    broker.answers["load"] = {"loaded": True}
    one = bare()
    one.send([9, 4, "load", "m", 0, b"{", True])
    one.send(of(b"a"))
    assert one.receive() == [34, 0, "INVALID_ARG", "request number 4 is 0 or already in flight"]
    one.send([9, 4, "", "", 0, b"}"])
    assert one.receive()[:3] == [37, 4, b'{"loaded": true}']


def test_a_frame_of_several_inputs_is_counted_for_each(bare: Any) -> None:
    one = bare()
    one.send([7, 4, "echo", 0, [[f"x{n}", "UINT8", [1 << 20], 0] for n in range(256)]], frames=(bytes(1 << 20),))
    assert one.receive()[:3] == [34, 4, "INVALID_ARG"]


def test_a_flood_of_invalid_bytes_ends_the_connection(bare: Any, listener: ListenerThread) -> None:
    one = bare()
    one.socket.send(b"\xc1garbage")
    assert one.receive()[:3] == [34, 0, "PROTOCOL"]
    one.socket.send_multipart([b"", b"frame"])
    assert one.receive()[:3] == [34, 0, "PROTOCOL"]
    for _ in range(1100):
        one.socket.send(b"\xc1")
    with listener.client("bob") as honest:
        assert honest.live()
    last = one.receive()
    while last[0] == 34:
        last = one.receive()
    assert last[:2] == [39, "UNAVAILABLE"]
    assert "client_errors" in last[2]


def test_a_client_that_does_not_read_is_disconnected(bare: Any, listener: ListenerThread, broker: FakeBroker) -> None:
    one = bare(kept=1)
    frame = bytes(3 << 20)
    number = 0
    with listener.client("bob") as honest:
        assert honest.live()
        while listener.listener.peers == 2:
            number += 1
            one.send([7, number, "hold", 0, [["x", "UINT8", [len(frame)], 0]]], frames=(frame,))
            broker.answer()
            assert honest.live()


def test_requests_and_connections_of_a_key_are_limited(
    bare: Any, listener: ListenerThread, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener.listener.link.shares.requests, "calm_calls", 100)
    monkeypatch.setattr(listener.listener.link.shares.requests, "calls", 400)
    first = bare()
    for number in range(1, 102):
        first.send([7, number, "hold", 0, []])
    assert first.receive()[:3] == [34, 101, "UNAVAILABLE"]
    others = [bare() for _ in range(5)]
    seventh = bare(greet=False)
    seventh.send(HELLO)
    assert seventh.receive()[:2] == [39, "UNAVAILABLE"]
    assert all(other.quiet() for other in others)


def read_to_the_end(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):  # also an end
        while connection.recv(4096):
            pass


def test_other_protocols_at_the_port_do_not_affect_clients(listener: ListenerThread) -> None:
    host, port = "127.0.0.1", int(listener.url.rpartition(":")[2])
    with socket.create_connection((host, port), 20) as half_open:
        with socket.create_connection((host, port), 20) as web:
            web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
            read_to_the_end(web)
        with listener.client() as honest:
            assert honest.live()
        assert half_open.fileno() > 0


def test_connections_without_a_handshake_are_limited(bare: Any, listener: ListenerThread) -> None:
    one = bare()
    host, port = "127.0.0.1", int(listener.url.rpartition(":")[2])
    with ExitStack() as crowd:
        made = [crowd.enter_context(socket.create_connection((host, port), 20)) for _ in range(40)]
        for refused in made[20:]:  # the limit is 16, one of them of alice
            read_to_the_end(refused)
        assert one.quiet()
    # libzmq reports the ends one by one; until then, a new connection may be refused and is tried again.
    with listener.client() as honest:
        assert honest.live()


def test_shutdown_answers_requests_in_flight_and_refuses_others(broker: FakeBroker) -> None:
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        listener = ListenerThread(Path(folder), broker.lane)
        with Bare(listener, "alice") as one:
            one.send([7, 5, "hold", 0, [["x", "UINT8", [1], b"a"]]])
            peer, infer, frames = broker.next_parked()
            listener.begin_to_stop()
            while not listener.do(lambda: listener.listener.stopping):
                pass
            one.send([7, 6, "echo", 0, [["x", "UINT8", [1], b"a"]]])
            assert one.receive() == [34, 6, Unavailable.code, "the gateway is stopping"]
            broker.do(lambda: echo(broker, peer, infer, frames))
            assert one.receive()[:2] == [33, 5]
        listener.join()


def test_several_listeners_can_share_a_port(broker: FakeBroker, tmp_path: Path) -> None:
    with ExitStack() as made:
        endpoints = [ListenerThread(tmp_path, broker.lane) for _ in range(2)]
        for listener in endpoints:
            made.callback(listener.stop)
        port = endpoints[0].do(lambda: endpoints[0].listener.open("tcp://[::1]:0", share=True))
        assert endpoints[1].do(lambda: endpoints[1].listener.open(f"tcp://[::1]:{port}", share=True)) == port
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            endpoints[1].do(lambda: endpoints[1].listener.open(f"tcp://[::1]:{port}"))
        with ExitStack() as clients:
            for _ in range(4):
                url, keys_of_alice = f"tcp://[::1]:{port}", endpoints[0].keys("alice")
                assert clients.enter_context(shmserve.Client(url, **keys_of_alice, timeout=PATIENCE_S)).live()
            assert sum(listener.listener.peers for listener in endpoints) == 4
