"""The ZeroMQ listener without a socket: its options, its file of keys, and random messages."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

import shmserve
from shmserve.clients.cli.parser import parser
from shmserve.gateway.limits.caller_shares import CallerShares
from shmserve.gateway.limits.proxies import is_local
from shmserve.gateway.zmq_tcp import start as zmqtcp_start
from shmserve.gateway.zmq_tcp.keys import KeyEntry, parse
from shmserve.gateway.zmq_tcp.listener import host_of
from shmserve.gateway.zmq_tcp.peer import Peer, ZmqLimits
from shmserve.protocol.roles import INFER, OBSERVE, OPERATE
from shmserve.session import Session
from shmserve.terminal.errors import Misuse
from shmserve.transport import keys
from tests.support.cases import cases
from tests.support.gateway.zmq_listener import HELLO

LIMITS = ZmqLimits(input_bytes=4 << 20)
GOOD = "--zmq-server-key server.key --zmq-keys keys"


@cases(
    ("--zmq-address tcp://127.0.0.1:8790", "needs --zmq-server-key and --zmq-keys: every client needs a key"),
    ("--zmq-address tcp://127.0.0.1:8790 --zmq-keys keys", "needs --zmq-server-key and --zmq-keys"),
    ("--zmq-keys keys", "--zmq-keys without --zmq-address"),
    (f"--zmq-address tcp://* {GOOD}", "is not tcp://HOST:PORT"),
    (f"--zmq-address ipc:///tmp/x {GOOD}", "is not tcp://HOST:PORT"),
    (f"--zmq-address tcp://127.0.0.1:99999 {GOOD}", "is not tcp://HOST:PORT"),
    ("--zmq-address tcp://[::1]:0 --zmq-server-key server.pub --zmq-keys keys", "chmod 600"),
    ("--zmq-address tcp://[::1]:0 --zmq-server-key none --zmq-keys keys", "cannot read keys from"),
    ("--zmq-address tcp://[::1]:0 --zmq-server-key server.key --zmq-keys bad", "bad, line 2: 'x' is"),
    ("--zmq-address tcp://[::1]:0 --zmq-server-key server.key --zmq-keys open", "chmod go-w open"),
)
def test_r15_the_endpoint_needs_keys(options: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, public = keys.write_pair(tmp_path, "server", keys.make_pair(), "infer")
    for name, roles in (("keys", "infer"), ("bad", "infer,x"), ("open", "infer")):
        (tmp_path / name).write_text(f"# one\n{public.read_text().split()[0]} {roles}\n")
    (tmp_path / "open").chmod(0o622)
    with pytest.raises(Misuse, match=re.escape(text)):
        zmqtcp_start.check(parser().parse_args(["gateway", *options.split()]))


def test_r15_the_endpoint_needs_curve_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.has", lambda what: what != "curve")
    options = f"gateway --zmq-address tcp://127.0.0.1:8790 {GOOD}"
    with pytest.raises(shmserve.Unsupported, match="was built without CURVE"):
        zmqtcp_start.check(parser().parse_args(options.split()))
    with pytest.raises(shmserve.Unsupported, match="was built without CURVE"):
        keys.make_pair()


def test_the_endpoint_is_off_by_default_and_local_addresses_are_recognised() -> None:
    assert zmqtcp_start.check(parser().parse_args(["gateway"])) is None
    local = ("127.0.0.1", "[::1]", "localhost")
    for address in (*local, "0.0.0.0", "*", "[::]", "192.0.2.1", "host.example"):
        assert is_local(host_of(f"tcp://{address}:8790")[0]) is (address in local)


@cases(
    ("short infer", "line 1: expected a public key of 40 characters"),
    ("#" * 40, "line 1: the key has no roles"),
    (f"{'a' * 40} infer\n{'a' * 40} observe", "line 2: duplicate key"),
)
def test_invalid_files_of_keys_are_refused(line: str, text: str) -> None:
    with pytest.raises(shmserve.InvalidRequest, match=text):
        parse(line, "file")


def test_files_of_keys() -> None:
    first, second = "#" * 40, "z" * 40
    entries = parse(f"# a comment\n\n{first} infer,operate  Alice of there \n#\n{second} observe\n", "file")
    assert entries == {first: KeyEntry(INFER | OPERATE, "Alice of there"), second: KeyEntry(OBSERVE, "")}


def test_a_packet_of_many_messages_is_processed_in_slices() -> None:
    session = Session("memfd", memory_bytes=1 << 24)
    link = SimpleNamespace(session=session, shares=CallerShares(), cancel=session.cancel)
    host: Any = SimpleNamespace(link=link, limits=LIMITS, stopping=False, dirty=lambda peer: None)
    peer = Peer(host, b"me", 1, "key", KeyEntry(INFER, ""), "127.0.0.1")
    slices = peer.receive(msgpack.packb([HELLO, *[[4, number] for number in range(3)]]), [])
    assert [len(peer.outbox) for _ in slices] == [1, 2, 3, 4]
    slices = peer.receive(msgpack.packb([[4, 5], [4, 6]]), [])
    next(slices)
    peer.end()
    assert list(slices) == [], "the rest of a client that has gone is dropped"
    session.close()
