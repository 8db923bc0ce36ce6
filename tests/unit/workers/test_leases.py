"""A worker's lease: what it runs, what ends it, and what its log shows."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from time import monotonic_ns
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.protocol import codec
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    PACKET_BYTES,
    BrokerMessage,
    Cancel,
    Columns,
    Fail,
    Failure,
    Handle,
    Infer,
    Options,
    Pong,
    Reply,
    ReplyBatch,
    Tensor,
    TensorForm,
    Wanted,
)
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver, Lend, Revoke, Row, WorkerReport
from shmserve.shm import lease_log
from shmserve.shm.extents import memfd
from shmserve.shm.lease_log import RECORDS, LeaseLog
from shmserve.shm.mapped import Mapped
from shmserve.workers.leases import LeaseHolder
from shmserve.workers.link import BrokerLink
from shmserve.workers.outbox import Outbox
from tests.support.cases import cases

CLIENT = 3
OWN, OTHERS = CLIENT << OWNER_SHIFT | 1, (CLIENT + 1) << OWNER_SHIFT | 1
"""Segments of the client, and of another one."""
PAGE = 4096
FORMS = (TensorForm("a", "FP32", (-1, 2)), TensorForm("b", "INT8", (3,)))
_reports = codec.Codec(WorkerReport).decode
_answers = codec.Codec(BrokerMessage).decode


class Runner:
    """A runner that answers with what the test has set, and counts its batches."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.discarded: list[Row] = []
        self.times = (0, 0, 0, 0)
        self.answer: list[Row] = [Row(0, (Tensor("y", "FP32", (1,), bytes(4)),))]

    def run_batch(self, work_items: Sequence[Any]) -> Any:
        self.ran += work_items
        now = monotonic_ns()
        self.times = (now, now + 1, now + 2, now + 3)
        return self.answer, self.times, ()

    def discard(self, row: Row) -> None:
        self.discarded.append(row)


class Streams:
    def __init__(self) -> None:
        self.shared = False
        self.reads = 0

    def read(self) -> None:
        self.reads += 1


class Lent:
    """A worker with a lease, its broker and its client."""

    def __init__(
        self,
        rows: int = 4,
        streams: Streams | None = None,
        default: bool = True,
        send_buffer: int = 0,
        batch: int = 0,
    ) -> None:
        self.broker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.broker.setblocking(False)
        self.link = BrokerLink(theirs)
        self.outbox = Outbox(self.link)
        self.runner = Runner()
        self.mapped = Mapped()
        self.holder = LeaseHolder(self.link, self.outbox, self.runner, self.mapped, streams)  # type: ignore[arg-type]
        for segment in (OWN, OTHERS):
            extent = memfd.create(PAGE)
            self.mapped.add(segment, PAGE, fd=os.dup(extent.fd))
            extent.close()
        self.client, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.setblocking(False)
        if send_buffer:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        page = lease_log.create()
        self.log = LeaseLog(page)
        self.holder.lend(Lend(5, "m", 2, default, FORMS, rows, CLIENT, batch=batch), [end.detach(), page])

    def serve(self) -> None:
        """Serves one packet; receive() would wait for more."""
        assert self.holder._lease is not None  # noqa: SLF001
        self.holder._serve(self.holder._lease)  # noqa: SLF001

    def reports(self) -> list[Any]:
        self.outbox.flush()
        found: list[Any] = []
        while True:
            try:
                found += _reports(self.broker.recv(PACKET_BYTES))
            except BlockingIOError:
                return found

    def close(self) -> None:
        if self.holder.active:
            self.holder.end()
        self.client.close()
        self.broker.close()
        self.link.close()
        self.log.close()
        self.mapped.close()


@pytest.fixture
def lent() -> Iterator[Lent]:
    made = Lent()
    yield made
    made.close()


def infer(number: int = 1, rows: int = 1, length: int = 2, **more: Any) -> Infer:
    a = Tensor("a", "FP32", (rows, length, 2), bytes(rows * length * 8))
    b = Tensor("b", "INT8", (rows, 3), bytes(rows * 3))
    return Infer(number, more.pop("model", "m"), more.pop("version", 0), more.pop("inputs", (a, b)), **more)


def packet(*messages: Any) -> bytes:
    return codec.encode(list(messages))


def serve_one(lent: Lent, data: bytes) -> Any:
    """Serves one packet. Returns the answer, or None if the lease has ended."""
    lent.client.send(data)
    lent.serve()
    try:
        found = lent.client.recv(PACKET_BYTES)
    except BlockingIOError:
        raise AssertionError("neither an answer nor the end") from None
    return _answers(found)[0] if found else None


@pytest.mark.parametrize(("rows", "length"), [(1, 2), (4, 7), (2, 0)])
def test_a_request_is_answered_and_recorded(lent: Lent, rows: int, length: int) -> None:
    request = infer(9, rows, length)
    assert serve_one(lent, packet(request)) == Reply(9, 2, lent.runner.answer[0].outputs)
    (work,) = lent.runner.ran
    assert (work.request, work.rows, work.inputs) == (-2, rows, request.inputs)
    (record,) = lent.log.take()
    assert record[1:] == (*lent.runner.times, rows, 0, 1)
    assert lent.log.running()[0] == 0


def test_errors_of_the_model_are_answers(lent: Lent) -> None:
    lent.runner.answer = [Row(0, (), Failure("MODEL_FAILED", "not today"))]
    assert serve_one(lent, packet(infer(3))) == Fail(3, "MODEL_FAILED", "not today")
    lent.runner.answer = []
    answer = serve_one(lent, packet(infer(4)))
    assert (answer.request, answer.code) == (4, "INTERNAL")
    row = Row(0, (Tensor("y", "FP32", (1,), (Handle(1, 0, 4),)),))
    lent.runner.answer = [row]
    assert type(serve_one(lent, packet(infer(5)))) is Fail
    assert lent.runner.discarded == [row]
    assert lent.holder.active


def in_memory(segment: int = OWN, offset: int = 64, size: int = 16, parts: int = 1) -> Infer:
    """A request with its first input, of 16 bytes, in shared memory."""
    a, b = infer().inputs
    a.data = (Handle(segment, offset, size),) * parts
    return infer(inputs=(a, b))


@cases(
    infer(version=2),
    infer(inputs=infer().inputs[::-1]),
    in_memory(offset=0),
    in_memory(offset=PAGE - 16),
    ids=["a named version", "inputs in another order", "the client's memory", "the end of it"],
)
def test_valid_requests_are_run(valid: Infer, lent: Lent) -> None:
    assert type(serve_one(lent, packet(valid))) is Reply
    (work,) = lent.runner.ran
    assert work.inputs == valid.inputs


WHOLE = Tensor("a", "FP32", (5, 2), bytes(40)), Tensor("b", "INT8", (3,), bytes(3))


@cases(
    ({"default": False}, infer(version=2), 1),
    ({"rows": 0}, infer(inputs=WHOLE), 0),
    ids=["a version that is not the default", "a model without a batch dimension"],
)
def test_what_is_lent_decides_which_requests_are_valid(how: dict[str, Any], valid: Infer, rows: int) -> None:
    with closing(Lent(**how)) as lent:
        assert type(serve_one(lent, packet(valid))) is Reply
        assert lent.runner.ran[0].rows == rows
        assert serve_one(lent, packet(infer())) is None


A, B = infer().inputs
BAD = {
    "garbage": b"\xc1",
    "no message": packet(),
    "two requests": packet(infer(1), infer(2)),
    "another message": packet(Cancel(1)),
    "another model": packet(infer(model="n")),
    "another version": packet(infer(version=1)),
    "wanted outputs": packet(infer(outputs=(Wanted("y"),))),
    "options": packet(infer(options=Options(priority=1))),
    "too many rows": packet(infer(rows=5)),
    "no rows": packet(infer(rows=0)),
    "a missing input": packet(infer(inputs=(A,))),
    "an input twice": packet(infer(inputs=(A, A))),
    "an unknown input": packet(infer(inputs=(A, Tensor("c", "INT8", (1, 3), bytes(3))))),
    "another type": packet(infer(inputs=(A, Tensor("b", "UINT8", (1, 3), bytes(3))))),
    "another dim": packet(infer(inputs=(A, Tensor("b", "INT8", (1, 4), bytes(4))))),
    "another rank": packet(infer(inputs=(A, Tensor("b", "INT8", (1, 3, 1), bytes(3))))),
    "no rank": packet(infer(inputs=(Tensor("a", "FP32", (), bytes(4)), B))),
    "a negative dim": packet(infer(inputs=(Tensor("a", "FP32", (1, -2, 2), b""), B))),
    "rows that differ": packet(infer(inputs=(A, Tensor("b", "INT8", (2, 3), bytes(6))))),
    "too few bytes": packet(infer(inputs=(A, Tensor("b", "INT8", (1, 3), bytes(2))))),
    "memory of another client": packet(in_memory(OTHERS)),
    "memory of the broker": packet(in_memory(1)),
    "an unknown segment": packet(in_memory(OWN + 1)),
    "a handle beyond the segment": packet(in_memory(offset=PAGE - 15)),
    "a handle far beyond it": packet(in_memory(offset=2**63 - 1)),
    "a handle of another size": packet(in_memory(size=15)),
    "two handles": packet(in_memory(size=8, parts=2)),
    "no handle": packet(in_memory(parts=0)),
    "a frame": packet(infer(inputs=(A, Tensor("b", "INT8", (1, 3), 0)))),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
@pytest.mark.parametrize("before", [False, True], ids=["first", "after a good one"])
def test_invalid_packets_end_the_lease_and_are_not_run(lent: Lent, data: bytes, before: bool) -> None:
    if before:
        assert type(serve_one(lent, packet(infer()))) is Reply
    assert serve_one(lent, data) is None
    assert len(lent.runner.ran) == before
    assert lent.reports() == [LeaseOver(5)]
    assert not lent.holder.active


def test_descriptors_of_the_client_are_not_received(lent: Lent) -> None:
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(lent.client, [packet(infer())], [0, 1, 2])
    lent.serve()
    assert len(os.listdir("/proc/self/fd")) == before
    assert type(_answers(lent.client.recv(PACKET_BYTES))[0]) is Reply


def test_a_client_that_leaves_ends_the_lease(lent: Lent) -> None:
    lent.client.close()
    assert lent.holder.receive() is None
    assert lent.reports() == [LeaseOver(5)]


def test_a_client_that_does_not_read_ends_the_lease() -> None:
    lent = Lent(send_buffer=1)
    number = 0
    while lent.holder.active:
        number += 1
        lent.client.send(packet(infer(number)))
        lent.serve()
    assert lent.reports() == [LeaseOver(5)]
    lent.close()


def test_orders_of_the_broker_take_precedence_over_requests(lent: Lent) -> None:
    lent.client.send(packet(infer()))
    lent.broker.send(packet(Revoke(5)))
    received = lent.holder.receive()
    assert received is not None
    assert received[0] == [Revoke(5)]
    assert not lent.runner.ran


def test_a_revoked_lease_answers_what_has_arrived(lent: Lent) -> None:
    run = lent.runner.run_batch

    def run_batch(work_items: Sequence[Any]) -> Any:
        assert _reports(lent.broker.recv(PACKET_BYTES)) == [Pong(7)], "sent before a model runs, for whatever time"
        return run(work_items)

    lent.runner.run_batch = run_batch  # type: ignore[method-assign]
    lent.client.send(packet(infer()))
    lent.outbox.add(Pong(7))
    lent.holder.revoke(Revoke(5))
    assert type(_answers(lent.client.recv(PACKET_BYTES))[0]) is Reply
    assert lent.client.recv(PACKET_BYTES) == b""
    assert lent.reports() == [LeaseOver(5)]


def test_revoking_an_unknown_lease_is_answered_too(lent: Lent) -> None:
    lent.holder.revoke(Revoke(4))
    assert lent.reports() == [LeaseOver(4)]
    assert lent.holder.active


def test_a_lease_that_is_revoked_while_a_request_runs_ends_after_its_answer(lent: Lent) -> None:
    run = lent.runner.run_batch

    def run_batch(work_items: Sequence[Any]) -> Any:
        lent.holder.revoke(Revoke(5))
        assert lent.log.running()[0] == 1
        return run(work_items)

    lent.runner.run_batch = run_batch  # type: ignore[method-assign]
    assert type(serve_one(lent, packet(infer()))) is Reply
    assert lent.client.recv(PACKET_BYTES) == b""
    assert lent.reports() == [LeaseOver(5)]


def test_a_half_full_log_is_reported_and_a_full_log_ends_the_lease(lent: Lent) -> None:
    for number in range(1, RECORDS + 1):
        assert lent.holder.active
        assert type(serve_one(lent, packet(infer(number)))) is Reply
    reports = lent.reports()
    assert reports[0] == LeaseLogged(5)
    assert reports[-1] == LeaseOver(5)


def test_a_model_with_threads_cannot_be_leased() -> None:
    streams = Streams()
    lent = Lent(streams=streams)
    assert type(serve_one(lent, packet(infer()))) is Reply
    assert streams.reads == 1
    streams.shared = True
    assert lent.holder.receive() is None
    assert lent.reports() == [LeaseOver(5, True)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        lent.holder.lend(Lend(6, "m", 2, True, FORMS, 4, CLIENT), [theirs.detach(), lease_log.create()])
        assert ours.recv(1) == b""
    assert lent.reports() == [LeaseOver(6, True)]
    lent.close()


# ------------------------------------------------------------------------------------ several requests in flight


@pytest.fixture
def several() -> Iterator[Lent]:
    made = Lent(batch=8)
    yield made
    made.close()


def serve_all(lent: Lent, *messages: Any) -> list[Any]:
    lent.client.send(packet(*messages))
    lent.serve()
    found = lent.client.recv(PACKET_BYTES)
    return list(_answers(found)) if found else []


OUTPUT = (Tensor("y", "FP32", (2, 1), bytes(8)),)


def test_a_packet_is_run_as_a_batch_and_has_one_record(several: Lent) -> None:
    """Its second request fails, and the model does not answer the third. Their order is that of the requests."""
    several.runner.answer = [Row(-3, (), Failure("MODEL_FAILED", "no")), Row(-2, OUTPUT)]
    requests = [infer(number, 2) for number in (7, 8, 11)]
    missing = Fail(11, "INTERNAL", "the model sent no response to this request")
    assert serve_all(several, *requests) == [Reply(7, 2, OUTPUT), Fail(8, "MODEL_FAILED", "no"), missing]
    assert [(work.request, work.rows, work.inputs) for work in several.runner.ran] == [
        (-2 - index, 2, request.inputs) for index, request in enumerate(requests)
    ]
    (record,) = several.log.take()
    assert record[1:] == (*several.runner.times, 2, 2, 3)


def test_the_results_of_a_packet_may_be_columns(several: Lent) -> None:
    columns = Columns((TensorForm("y", "FP32", (1,)),), (-2, -3), (1, 1), ((bytes(4),), (bytes(4),)))
    several.runner.answer = columns  # type: ignore[assignment]
    assert serve_all(several, infer(7), infer(9)) == [ReplyBatch(2, replace(columns, requests=(7, 9)))]


def test_the_log_shows_which_requests_are_running(several: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run_batch = several.runner.run_batch

    def run(work_items: Sequence[Any]) -> Any:
        seen.append(several.log.running()[:2])
        return run_batch(work_items)

    monkeypatch.setattr(several.runner, "run_batch", run)
    serve_all(several, infer(7), infer(8), infer(11))
    assert seen == [(7, 11)]
    assert several.log.running()[0] == 0


@cases(
    [infer(1, 3), infer(2, 3), infer(3, 3)],
    [infer(1), infer(2, length=3)],
    [infer(1), infer(2, 2)],
    [infer(1), infer(1)],
    [infer(2), infer(1)],
    [infer(1), infer(3), infer(2)],
    [infer(1), infer(2, model="n")],
    [infer(1), infer(2, outputs=())],
    [infer(1), Cancel(2)],
    [],
    ids=["rows", "shape", "sizes", "twice", "order", "last", "model", "outputs", "other", "none"],
)
def test_other_packets_end_the_lease(messages: list[Any], several: Lent) -> None:
    assert serve_all(several, *messages) == []
    assert several.runner.ran == []
    assert not several.holder.active


def test_a_lease_for_one_request_takes_no_more(lent: Lent) -> None:
    assert serve_all(lent, infer(1), infer(2)) == []
    assert lent.runner.ran == []
    with closing(Lent(rows=0)) as whole:
        inputs = Tensor("a", "FP32", (4, 2), bytes(32)), Tensor("b", "INT8", (3,), bytes(3))
        assert serve_all(whole, infer(1, inputs=inputs), infer(2, inputs=inputs)) == []
        assert whole.runner.ran == []
