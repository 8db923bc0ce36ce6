"""The worker's end of the link: how messages are packed, and output on stderr."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import ConnectionLost, Internal, ProtocolError
from shmserve.protocol import codec
from shmserve.protocol.descriptors import DESCRIPTORS
from shmserve.protocol.messages import CHUNK_BYTES, PACKET_BYTES, Columns, Failure, Map, Ping, Pong, Tensor, TensorForm
from shmserve.protocol.worker_messages import Done, Row, Rows, WorkerReport
from shmserve.system.polling import PollBudget
from shmserve.workers import link as workers_link
from shmserve.workers.link import BrokerLink
from shmserve.workers.outbox import Outbox, in_chunks, row_bytes
from shmserve.workers.process import log as saying
from shmserve.workers.process.log import (
    TEXT_LIMIT,
    escaped,
    log_message,
    log_traceback,
    missing_module,
    public,
    trace_of,
)

decode = codec.Codec(WorkerReport).decode
Ends = tuple[BrokerLink, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = BrokerLink(theirs)
    yield link, ours
    link.close()
    ours.close()


def test_packets_are_received_one_by_one(ends: Ends) -> None:
    link, broker = ends
    assert link.drain() is None
    broker.send(codec.encode([Ping(1), Ping(2)]))
    broker.send(codec.encode([Ping(3)]))
    assert link.receive() == ([Ping(1), Ping(2)], [])
    assert link.drain() == ([Ping(3)], [])
    assert link.drain() is None


def test_descriptors_arrive_with_their_packet_and_are_not_inheritable(ends: Ends) -> None:
    link, broker = ends
    read, write = os.pipe()
    socket.send_fds(broker, [codec.encode([Map(1, 1), Map(2, 2)])], [read, write])
    orders, descriptors = link.receive()
    assert orders == [Map(1, 1), Map(2, 2)]
    assert [os.fstat(fd).st_ino for fd in descriptors] == [os.fstat(read).st_ino] * 2
    assert [os.get_inheritable(fd) for fd in descriptors] == [False, False]
    for fd in (read, write, *descriptors):
        os.close(fd)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_closed_link_raises_connection_lost(ends: Ends, blocking: bool) -> None:
    link, broker = ends
    broker.send(codec.encode([Ping(1)]))
    broker.close()
    assert link.receive()[0] == [Ping(1)]
    with pytest.raises(ConnectionLost, match="closed the link"):
        link.receive() if blocking else link.drain()
    with pytest.raises(ConnectionLost, match="broke"):
        link.send([Pong(1)])


def test_invalid_packets_are_refused(ends: Ends) -> None:
    link, broker = ends
    read, write = os.pipe()
    for data in (b"\xc1", b"\0" * (PACKET_BYTES + 2)):
        socket.send_fds(broker, [data], [read])
        with pytest.raises(ProtocolError):
            link.receive()
    os.close(read)
    os.close(write)


def test_large_packets(ends: Ends) -> None:
    link, broker = ends
    rows = [Rows(number, (Row(number, (Tensor("y", "FP32", (1000,), b"x" * 4000),)),) * 40) for number in range(3)]
    assert len(codec.encode(rows)) > PACKET_BYTES
    link.send(rows)
    found = []
    for _ in rows:
        packet = broker.recv(1 << 18)
        assert len(packet) <= PACKET_BYTES
        found += decode(packet)
    assert found == rows
    with pytest.raises(Internal, match="a Rows message of"):
        link.send([Rows(1, rows[0].rows * 2)])


def test_more_descriptors_than_the_kernel_takes_at_once(ends: Ends) -> None:
    link, broker = ends
    read, write = os.pipe()
    count = DESCRIPTORS + 50
    link.send([Map(number, 1) if number % 2 else Map(number, 1, "name") for number in range(2 * count)], [read] * count)
    found: list[Any] = []
    descriptors: list[int] = []
    while len(found) < 2 * count:
        data, came, _, _ = socket.recv_fds(broker, 1 << 18, 253)
        messages = decode(data)
        assert len(came) == sum(message.name is None for message in messages)
        found += messages
        descriptors += came
    assert [message.segment for message in found] == list(range(2 * count))
    for fd in (read, write, *descriptors):
        os.close(fd)


def test_the_outbox_sends_one_packet(ends: Ends) -> None:
    link, broker = ends
    outbox = Outbox(link)
    outbox.flush()  # nothing to say, so nothing is sent
    read, write = os.pipe()
    outbox.add(Map(1, 1), read)
    outbox.add(Pong(5))
    os.close(read)  # its owner may close it before it is sent
    outbox.flush()
    data, descriptors, _, _ = socket.recv_fds(broker, 1 << 18, 4)
    assert decode(data) == [Map(1, 1), Pong(5)]
    assert [os.fstat(fd).st_ino for fd in descriptors] == [os.fstat(write).st_ino]
    for fd in (write, *descriptors):
        os.close(fd)


Y = TensorForm("y", "FP32", (1000,))


@pytest.mark.parametrize("in_columns", [False, True], ids=["rows", "columns"])
def test_many_results_are_sent_in_chunks(ends: Ends, in_columns: bool) -> None:
    link, broker = ends
    rows = tuple(Row(number, (Tensor("y", "FP32", (1, 1000), bytes([number] * 4000)),)) for number in range(100))
    if in_columns:
        data = tuple((bytes([number] * 4000),) for number in range(100))
        columns = Columns((Y,), tuple(range(100)), (1,) * 100, data)
        done = Done(7, (), (1, 2, 3, 4), 9, 10, columns=columns)
    else:
        done = Done(7, rows, (1, 2, 3, 4), 9, 10)
    chunks = in_chunks([Pong(1), done])
    assert chunks[0] == Pong(1)
    assert [type(chunk) for chunk in chunks[1:]] == [Rows] * (len(chunks) - 2) + [Done]
    assert all(len(codec.encode([chunk])) < CHUNK_BYTES + 8192 for chunk in chunks)
    assert sum((chunk.rows for chunk in chunks[1:]), ()) == rows
    assert chunks[-1] == Done(7, chunks[-1].rows, (1, 2, 3, 4), 9, 10)
    outbox = Outbox(link)
    outbox.add(done)
    outbox.flush()
    found: list[Row] = []
    while len(found) < 100:
        for message in decode(broker.recv(1 << 18)):
            assert message.batch == 7
            found += message.rows
    assert tuple(found) == rows


def test_few_results_in_columns_stay_in_columns(ends: Ends) -> None:
    link, broker = ends
    done = Done(7, (), (1, 2, 3, 4), columns=Columns((Y,), (1, 2), (1, 1), ((bytes(4000),),) * 2))
    outbox = Outbox(link)
    outbox.add(done)
    outbox.flush()
    assert decode(broker.recv(1 << 18)) == [done]


def test_the_size_of_a_row_is_not_underestimated() -> None:
    rows = [
        Row(2**63 - 1, ()),
        Row(1, (Tensor("y" * 100, "FP32", (1,) * 8, bytes(4096)),) * 20),
        Row(1, (), Failure("MODEL_FAILED", "é" * 4096)),
        Row(1, (), None, {f"key{number}": "ü" * 100 for number in range(60)}),
    ]
    for row in rows:
        # The difference between a chunk and a packet is enough for what is not counted.
        assert len(codec.encode([row])) <= row_bytes(row) + (PACKET_BYTES - CHUNK_BYTES) // 2


def test_a_log_message_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    log_message("one\ntwo\r\x1b[31m\u2028three é", "warning")
    assert capfd.readouterr().err == "warning: one\\ntwo\\r\\x1b[31m\\u2028three é\n"
    assert escaped("plain") == "plain"


def test_a_traceback_is_logged_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        log_traceback("it failed", error)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "error: it failed"
    assert lines[-2:] == ["error:   ValueError: first", "error:   second"]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The traceback of an error raised through a function of ours.py, which calls model.py beside it."""
    texts = {
        "model": "import json\n\ndef initialize():\n    json.loads('{')\n",
        "syntax": "class X(:",
        "ours": """
            from importlib import import_module
            from shmserve.errors import ModelFailed

            def wraps():
                try:
                    import_module("model").initialize()
                except ValueError as inner:
                    raise ModelFailed("failed") from inner

            def fails():
                raise ModelFailed("the text says all")

            def has_a_bug():
                {}["a bug"]

            def imports():
                import_module("syntax")
        """,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = (*saying._OURS, str(tmp_path / "ours.py"))  # noqa: SLF001 - the frames that are hidden
    monkeypatch.setattr(saying, "_OURS", ours)

    def trace(name: str) -> list[str]:
        with pytest.raises(Exception) as caught:
            getattr(import_module("ours"), name)()
        error = caught.value
        return trace_of(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))

    return trace


def test_internal_frames_are_left_out_of_a_traceback(trace: Callable[[str], list[str]], tmp_path: Path) -> None:
    lines = trace("wraps")
    assert f'  File "{tmp_path}/model.py", line 4, in initialize' in lines
    assert any("json/decoder.py" in line for line in lines), "frames of libraries stay"
    assert not [line for line in lines if "ours.py" in line]
    assert lines[-1] == "shmserve.errors.ModelFailed: failed"


def test_a_traceback_of_internal_frames_only(trace: Callable[[str], list[str]], tmp_path: Path) -> None:
    assert trace("fails") == ["shmserve.errors.ModelFailed: the text says all"]
    assert any("ours.py" in line for line in trace("has_a_bug")), "a fault of ours keeps its frames"
    lines = trace("imports")
    assert f'  File "{tmp_path}/syntax.py", line 1' in lines
    assert lines[-1].startswith("SyntaxError: ")
    assert not [line for line in lines if "frozen" in line]


def test_a_missing_module_without_a_name_is_reported_with_its_text() -> None:
    text = missing_module(ModuleNotFoundError("install 'tool[extra]' for this"))
    assert text == "it imports a package that is not installed: install 'tool[extra]' for this"


def test_error_texts_for_callers_contain_no_paths() -> None:
    folder = str(Path("/", "srv", "models", "m"))
    assert public(f"no file {folder}/1/data.bin there", folder) == "no file <model>/1/data.bin there"
    assert public("Error at /build/engine/core/session.cc:31 in node /layer/MatMul") == (
        "Error at session.cc:31 in node /layer/MatMul"
    )
    assert public("1/2 and a/b.c") == "1/2 and a/b.c"
    long = public("x" * (TEXT_LIMIT + 5))
    assert long.endswith(f"... ({TEXT_LIMIT + 5} characters in all)")
    assert len(long) < TEXT_LIMIT + 50


def test_the_worker_polls_for_an_order_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeps only after the budget, or if another process wants the core."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.closing(BrokerLink(ours, busy_poll_ns=10**12)) as link:
        for number in range(100):  # short waits, so that the budget grows
            theirs.send(codec.encode([Ping(number)]))
            assert link.receive() == ([Ping(number)], [])
            link._polling.waited(link._polling.ns + 1, 0, True)  # type: ignore[union-attr]  # noqa: SLF001 - time that was waited before
        polls = iter(range(3))

        def core_is_free(since: int) -> bool:
            if next(polls) == 1:
                theirs.send(codec.encode([Ping(7)]))
            return True

        monkeypatch.setattr(workers_link, "core_is_free", core_is_free)
        assert link.receive() == ([Ping(7)], [])
        assert next(polls) == 2

        def broker_takes_the_core(since: int) -> bool:
            theirs.send(codec.encode([Ping(8)]))
            return False

        suspended: list[int] = []
        monkeypatch.setattr(PollBudget, "preempted", lambda self, now: suspended.append(now))
        monkeypatch.setattr(workers_link, "core_is_free", broker_takes_the_core)
        assert link.receive() == ([Ping(8)], [])
        assert not suspended

        def other_takes_the_core(since: int) -> bool:
            timer.start()
            return False

        with contextlib.closing(socket.socket(fileno=os.dup(theirs.fileno()))) as later:
            timer = threading.Timer(0.01, later.send, [codec.encode([Ping(9)])])
            monkeypatch.setattr(workers_link, "core_is_free", other_takes_the_core)
            assert link.receive() == ([Ping(9)], [])
            timer.join()
        assert len(suspended) == 1
