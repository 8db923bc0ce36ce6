"""Invalid requests and packets over both links.

Each gets its own error, with a code and the name of the wrong value. The connection continues if packet boundaries are
still known, and nothing remains in the server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from bench.hostile.client import SECRETS
from bench.hostile.run import BrokerSnapshot, compare, run_hostile, write_repository
from bench.lib.raw_client import Link, RawLane, RawSegment, Zmq
from bench.lib.setting import BenchServer, serving
from shmserve.protocol import messages
from shmserve.protocol.messages import Ask, Fail, Goodbye, Handle, Infer, Map, Ping, Pong, Reply, Tensor

pytestmark = pytest.mark.process

LINKS = {"lane": (RawLane, "lane.sock", "memfd"), "zmq": (Zmq, "broker.sock", "frames")}
ONE = (Tensor("x", "FP32", (1, 1), b"1234"),)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchServer]:
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    with serving(root) as served:
        yield served


def connect(server: BenchServer, kind: str, outputs: str = "") -> Any:
    make, name, usual = LINKS[kind]
    link: Any = make(str(server.runtime_dir / name))
    link.hello(outputs or usual)
    return link


def serves(link: Link) -> bool:
    """Whether the connection still serves."""
    link.send(Infer(999_999, "identity", 0, ONE))
    answer = link.receive_kind(Reply, Fail, Goodbye)
    return isinstance(answer, Reply) and answer.outputs[0].data == b"1234"


@pytest.fixture(params=list(LINKS))
def link(server: BenchServer, request: pytest.FixtureRequest) -> Iterator[Link]:
    with connect(server, request.param) as made:
        yield made
        assert serves(made)


def refused(link: Link, packet: Any, request: int = 5) -> Fail:
    """The single Fail that answers a message. The following Ping is also answered."""
    link.send(packet, Ping(3))
    got = [link.receive(), link.receive()]
    fails = [answer for answer in got if isinstance(answer, Fail)]
    assert len(fails) == 1, got
    assert Pong(3) in got
    assert fails[0].request == request
    assert not SECRETS.search(fails[0].text), fails[0].text
    return fails[0]


def tensor(name: Any = "x", dtype: Any = "FP32", shape: Any = (1, 4), data: Any = bytes(16)) -> Tensor:
    return Tensor(name, dtype, shape, data)


def infer(*tensors: Tensor, model: Any = "identity", version: Any = 0, **options: Any) -> Infer:
    more = messages.Options(**options) if options else None
    return Infer(5, model, version, tensors or (tensor(),), None, 0, more)


BAD: dict[str, tuple[Any, str, str]] = {
    "unknown model": (infer(model="nobody"), "NOT_FOUND", "'nobody'"),
    "unknown version": (infer(version=7), "NOT_FOUND", "'identity' version 7"),
    "unknown dtype": (infer(tensor(dtype="FLOAT9")), "INVALID_ARG", "'x'.*'FLOAT9'"),
    "too few bytes": (infer(tensor(data=bytes(15))), "INVALID_ARG", "'x'.*Expected 16, got 15"),
    "frame that is not there": (infer(tensor(data=9)), "INVALID_ARG", "'x'.*frame 9"),
    "handle of nobody": (infer(tensor(data=(Handle(77 << 32, 0, 16),))), "INVALID_ARG", "handle.*neither"),
    "handle of the broker": (infer(tensor(data=(Handle(1, 0, 16),))), "INVALID_ARG", "handle.*neither"),
    "handle larger than the tensor": (infer(tensor(data=(Handle(1, 0, 2**63 - 1),))), "INVALID_ARG", "got 9223372"),
    "sequence": (infer(sequence=7), "UNSUPPORTED", "'identity'.*sequence"),
    "long parameter": (infer(parameters={"p": "v" * 65_537}), "INVALID_ARG", "parameter 'p' has 65537 bytes.*65536"),
    "model name of 300": (infer(model="n" * 300), "PROTOCOL", "model.*128"),
    "10,000 tensors": (infer(*[tensor("x", "FP32", (1,), b"1")] * 10_000), "PROTOCOL", "inputs.*256"),
    "unknown question": (Ask(5, "nothing"), "INVALID_ARG", "'nothing'"),
    "question of 300": (Ask(5, "q" * 300), "PROTOCOL", "what.*128"),
}


@pytest.mark.parametrize(("message", "code", "words"), BAD.values(), ids=BAD)
def test_each_invalid_message_has_its_own_error(link: Link, message: Any, code: str, words: str) -> None:
    fail = refused(link, message)
    assert fail.code == code, fail
    assert re.search(words, fail.text, re.IGNORECASE | re.DOTALL), fail.text


STRINGS = {
    "length beyond the end": (2, b"\x03\x00\x00\x00abc\xff\xff\xff\xff"),
    "length of 4 GiB": (1, b"\xff\xff\xff\xff"),
    "too few strings": (3, b"\x01\x00\x00\x00a\x01\x00\x00\x00b"),
    "bytes behind the last": (1, b"\x01\x00\x00\x00abc"),
}


@pytest.mark.parametrize("case", list(STRINGS))
def test_string_tensors_with_inconsistent_lengths(link: Link, case: str) -> None:
    """The broker or the worker detects it; the error names the input."""
    count, body = STRINGS[case]
    link.send(Infer(5, "strings", 0, (Tensor("x", "BYTES", (1, count), body),)))
    fail = link.receive_kind(Reply, Fail)
    assert (fail.request, fail.code) == (5, "INVALID_ARG")
    assert "'x'" in fail.text
    assert not SECRETS.search(fail.text), fail.text


PACKETS: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 0, "packet"),
    "no array": (msgpack.packb({"a": 1}), 0, "packet"),
    "truncated": (msgpack.packb([[7, 5, "identity", 0, []]])[:-4], 0, "packet"),
    "bytes behind it": (msgpack.packb([]) + b"more", 0, "packet"),
    "claims 4 G messages": (b"\xdd\xff\xff\xff\xff", 0, "packet"),
    "message is no array": (msgpack.packb([5]), 0, "array"),
    "message without tag": (msgpack.packb([["text"]]), 0, "tag"),
    "unknown message type": (msgpack.packb([[99, 5]]), 5, "type 99"),
    "a message of the broker": (msgpack.packb([[33, 5, 1, []]]), 5, "type 33"),
    "too few fields": (msgpack.packb([[7, 5]]), 5, "Infer"),
    "wrong type": (msgpack.packb([[7, 5, 6, 0, []]]), 5, "Infer.*model"),
    "text that is not UTF-8": (b"\x91\x95\x07\x05\xa2\xff\xfe\x00\x90", 5, "Infer|read"),
    "unknown option": (msgpack.packb([[7, 5, "identity", 0, [], None, 0, {"colour": "red"}]]), 5, "colour"),
    "at the limit, all noise": (b"\xc1" * messages.PACKET_BYTES, 0, "packet"),
}


@pytest.mark.parametrize("case", list(PACKETS))
def test_each_broken_packet_is_reported(link: Link, case: str) -> None:
    packet, request, words = PACKETS[case]
    if not packet and isinstance(link, RawLane):
        pytest.skip("an empty SEQPACKET packet is the end of the connection")
    link.send_bytes(packet)
    link.send(Ping(3))
    got = [link.receive()]
    while got[-1] != Pong(3):
        got.append(link.receive())
    assert isinstance(got[0], Fail), got
    if case != "text that is not UTF-8":
        assert got[0].request == request
    assert got[0].code == "PROTOCOL"
    assert re.search(words, got[0].text, re.IGNORECASE), got[0].text
    assert not SECRETS.search(got[0].text)


def test_frames_over_the_limit_are_refused(server: BenchServer) -> None:
    with connect(server, "zmq") as link:
        count = 300_000
        packet = msgpack.packb([[7, 5, "identity", 0, [["x", "FP32", [1, count], 0]]]])
        link.send_bytes(packet, (bytes(4 * count),))
        fail = link.receive_kind(Fail)
        assert (fail.request, fail.code) == (5, "INVALID_ARG")
        assert str(messages.FRAME_BYTES) in fail.text


def test_a_frame_that_many_tensors_refer_to_is_not_copied_for_each(server: BenchServer) -> None:
    """One frame of 1 MiB, named 256 times, must not become 256 MiB in the server."""
    with connect(server, "zmq") as link:
        broker = server.broker_pid()
        before = BrokerSnapshot.of(broker).resident
        tensors = [[f"x{number}", "FP32", [1, 1 << 18], 0] for number in range(256)]
        for request in range(1, 6):
            link.send_bytes(msgpack.packb([[7, request, "identity", 0, tensors]]), (bytes(1 << 20),))
            assert link.receive_kind(Fail).request == request
        assert BrokerSnapshot.of(broker).resident - before < 64 << 20


SIZE = 1 << 16


@pytest.fixture
def lane(server: BenchServer) -> Iterator[RawLane]:
    with connect(server, "lane") as made:
        yield made


def test_an_unsealed_segment_is_refused(lane: RawLane) -> None:
    """An unsealed segment could be truncated while a worker uses it."""
    made = RawSegment(lane, SIZE, 1, seals=0)
    try:
        assert "seal" in lane.receive_kind(Fail).text.lower()
        assert refused(lane, infer(tensor(data=(Handle(made.id, 0, 16),)))).code == "INVALID_ARG"
    finally:
        made.close()


def test_descriptors_that_are_not_memory_are_refused(lane: RawLane, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    opened = [*os.pipe(), os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)]
    packet = msgpack.packb([[1, lane.owner << 32 | 9, SIZE, None, ""]])
    for descriptors in ((), *((descriptor,) for descriptor in opened)):
        lane.send_bytes(packet, descriptors)
        assert lane.receive_kind(Fail).code == ("INVALID_ARG" if descriptors else "PROTOCOL")
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["../x", "/shmserve-nothing"])
def test_invalid_segment_names_are_refused(server: BenchServer, name: str) -> None:
    """Only a worker maps a named segment: the request that needs it fails, and the server continues."""
    with connect(server, "zmq", "posix") as link:
        number = link.owner << 32 | 1
        link.send(Map(number, SIZE, name), infer(tensor(data=(Handle(number, 0, 16),))))
        answer = link.receive_kind(Reply, Fail, Goodbye)
        assert isinstance(answer, (Fail, Goodbye))
        assert not SECRETS.search(answer.text), answer.text
    with connect(server, "zmq") as link:
        assert serves(link)


def test_invalid_messages_leak_no_descriptors_or_segments(server: BenchServer) -> None:
    """All cases above, three times; compares descriptors and segments before and after."""
    before = BrokerSnapshot.of(server.broker_pid())
    for kind in LINKS:
        with connect(server, kind) as link:
            for _ in range(3):
                for message, _, _ in BAD.values():
                    link.send(message)
                for packet, _, _ in PACKETS.values():
                    if packet:
                        link.send_bytes(packet)
            link.send(Ping(4))
            assert link.receive_kind(Pong) == Pong(4)
    _, worse = compare(server, before)
    assert not worse


def test_hostile_clients_do_not_affect_a_valid_client(tmp_path: Path) -> None:
    found = run_hostile(tmp_path, 4_000, 0.5)
    assert found.harm == 0, found.examples
    assert found.answered > 0
    assert found.sent > 0
