"""The loop: when batches begin, also with a backend that overlaps them, and what the broker sees of it.

The backend runs in the test's thread. It sends the next orders while it begins, computes or finishes a batch, so each
test has one order of events.
"""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import ModelFailed
from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_BYTES, Ping, Pong, Tensor
from shmserve.protocol.worker_messages import (
    Done,
    Execute,
    Expect,
    Started,
    Stop,
    Withdraw,
    Withdrawn,
    Work,
    WorkerReport,
    rows_of,
)
from shmserve.workers import overlap
from shmserve.workers.backends.base import OverlappingModel
from shmserve.workers.backends.identity import Identity
from shmserve.workers.inbox import WorkerInbox
from shmserve.workers.link import BrokerLink
from shmserve.workers.loading import LoadedModel
from shmserve.workers.loop import Loop
from shmserve.workers.model_calls.responses import OpenResponses
from shmserve.workers.outbox import Outbox
from tests.support.workers.batch_parts import CONTEXT, WORKER, Parts
from tests.support.workers.worker_harness import config

MOST = 4
_reports = codec.Codec(WorkerReport).decode


class Batch:
    """A batch of the fake: y = x + 1, computed when it is finished."""

    def __init__(self, device: Device, number: int, inputs: Any, outputs: Any) -> None:
        self.device, self.number, self.inputs, self.outputs = device, number, inputs, outputs

    def computed(self) -> bool:
        return self.device.at("query", self.number)

    def finish(self) -> None:
        device = self.device
        assert device.running.pop(0) is self, "batches are finished in order"
        device.at("finish", self.number)
        if self.number in device.failing:
            raise ModelFailed(f"batch {self.number} failed")
        array = self.inputs.array(0)
        if self.outputs.direct(0, array.shape):
            self.outputs.place(0, array.shape)[...] = array + 1
        else:
            self.outputs.put(0, array + 1)


class Device(OverlappingModel):
    """`plan`: what to do at a moment, such as ("begin", 2); the result is that of `computed`. `events`: the moments,
    without queries; begins have the rows of the batch."""

    overlaps = True

    def __init__(self) -> None:
        self.plan: dict[tuple[str, int], list[Callable[[], Any]]] = {}
        self.events: list[tuple[Any, ...]] = []
        self.failing: set[int] = set()
        self.refused: set[int] = set()
        self.running: list[Batch] = []
        self._number = 0

    def at(self, moment: str, number: int) -> bool:
        if moment == "finish":
            self.events.append((moment, number))
        planned = self.plan.get((moment, number))
        return bool(planned.pop(0)()) if planned else True

    def begin(self, inputs: Any, outputs: Any) -> Batch:
        self._number += 1
        self.events.append(("begin", self._number, inputs.rows))
        self.at("begin", self._number)
        if self._number in self.refused:
            raise ModelFailed(f"batch {self._number} was refused")
        inputs.computing()
        batch = Batch(self, self._number, inputs, outputs)
        self.running.append(batch)
        assert len(self.running) <= 2
        return batch


class Broker:
    """The other end of the link. All reports are read after the loop has ended."""

    def __init__(self, descriptor: int = 0) -> None:
        """`descriptor`: the least number of the worker's descriptor."""
        self.sock, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if descriptor:
            with ours:
                ours = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, descriptor))
        self.link = BrokerLink(ours)
        self.parts = Parts(config("identity", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=MOST))
        self.device = Device()
        self.runner: Any = self.parts.runner(self.device)
        self.values: dict[int, np.ndarray[Any, Any]] = {}

    def send(self, *orders: Any) -> None:
        self.sock.send(codec.encode(list(orders)))

    def later(self, *orders: Any, computed: bool = False) -> Callable[[], bool]:
        def act() -> bool:
            self.send(*orders)
            return computed

        return act

    def execute(self, number: int, *shares: int, join: int = 0, width: int = 2, open: bool = True) -> Execute:
        """Requests have the numbers 10 * number, 10 * number + 1, and so on."""
        work_items = []
        for index, share in enumerate(shares):
            x = np.full((share, width), 100 * number + index, np.float32)
            self.values[10 * number + index] = x
            work_items.append(
                Work(10 * number + index, share, (Tensor("x", "FP32", x.shape, x.tobytes()),), None, "internal")
            )
        return Execute(number, join, tuple(work_items), False, open)

    def run(self, *orders: Any) -> list[Any]:
        """Runs the loop until Stop. Returns its reports, without the results; these are checked."""
        outbox = Outbox(self.link)
        inbox = WorkerInbox(WORKER, self.link, outbox, self.parts.mapped, self.parts.arenas)
        parts = self.parts
        model = LoadedModel(
            parts.config, Identity(CONTEXT), self.device, parts.arenas, parts.mapped, self.runner, inbox
        )
        Loop(self.link, outbox, model).run(list(orders), [])
        reports: list[Any] = []
        self.sock.setblocking(False)
        while True:
            try:
                reports += _reports(self.sock.recv(PACKET_BYTES))
            except BlockingIOError:
                return reports

    def check(self, done: Done, *requests: int) -> None:
        """The report has these requests, all answered with x + 1."""
        rows = list(rows_of(done.columns or done.rows))
        assert [row.request for row in rows] == list(requests)
        for row in rows:
            assert row.error is None, row.error
            np.testing.assert_array_equal(self.parts.read(row.outputs[0]), self.values[row.request] + 1)

    def close(self) -> None:
        self.link.close()
        self.sock.close()
        self.parts.close()


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(overlap, "SHORT_NS", 0)
    broker = Broker()
    yield broker
    broker.close()


def starts(reports: Sequence[Any]) -> list[tuple[int, int, int]]:
    """The reports of batches, as (number, next, through); a start on its own has the number 0."""
    return [
        (0, report.batch, report.through)
        if isinstance(report, Started)
        else (report.batch, report.next, report.through)
        for report in reports
        if isinstance(report, (Started, Done))
    ]


def dones(reports: Sequence[Any]) -> list[Done]:
    return [report for report in reports if isinstance(report, Done)]


def test_full_batches_begin_before_the_one_before_has_ended(broker: Broker) -> None:
    device = broker.device
    device.plan["begin", 1] = [broker.later(broker.execute(3, 4))]
    device.plan["finish", 2] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 2, 1, open=False), broker.execute(2, 1, 3))
    assert device.events == [
        ("begin", 1, 3),
        ("begin", 2, 4),
        ("finish", 1),
        ("begin", 3, 4),
        ("finish", 2),
        ("finish", 3),
    ]
    assert starts(reports) == [(1, 2, 2), (2, 3, 3), (3, 0, 0)]
    for done, requests in zip(dones(reports), ((10, 11), (20, 21), (30,)), strict=True):
        broker.check(done, *requests)


def test_a_batch_with_room_begins_when_the_one_before_is_computed(broker: Broker) -> None:
    """Until then it grows, also by an order that arrives while the worker waits for the device."""
    device = broker.device
    device.plan["begin", 2] = [broker.later(broker.execute(3, 1))]
    device.plan["query", 2] = [broker.later(broker.execute(4, 2, join=3)), lambda: False, lambda: True]
    device.plan["finish", 2] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 1))
    # Nothing was waiting at the end of a batch before the first: the worker waited for the device alone.
    assert device.events[:3] == [("begin", 1, 1), ("finish", 1), ("begin", 2, 1)]
    assert device.events[3:] == [("begin", 3, 3), ("finish", 2), ("finish", 3)]
    assert starts(reports) == [(1, 2, 2), (2, 3, 4), (3, 0, 0)]
    broker.check(dones(reports)[2], 30, 40)


def test_a_link_with_a_high_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker passes its own number, which is high if it has many connections."""
    monkeypatch.setattr(overlap, "SHORT_NS", 0)
    broker = Broker(overlap.SELECTABLE)
    assert broker.link.fileno() >= overlap.SELECTABLE
    try:
        test_a_batch_with_room_begins_when_the_one_before_is_computed(broker)
    finally:
        broker.close()


def test_a_batch_that_becomes_full_begins_at_once(broker: Broker) -> None:
    device = broker.device
    queries = [broker.later(broker.execute(3, 1)), broker.later(broker.execute(4, 3, join=3)), lambda: True]
    device.plan["query", 2] = queries
    device.plan["finish", 3] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 1))
    assert device.events[2:] == [("begin", 2, 1), ("begin", 3, 4), ("finish", 2), ("finish", 3)]
    assert len(queries) == 1, "the device is not asked again"
    assert starts(reports) == [(1, 2, 2), (2, 3, 4), (3, 0, 0)]


def test_requests_that_have_begun_are_not_given_back(broker: Broker) -> None:
    device = broker.device
    device.plan["begin", 2] = [broker.later(broker.execute(3, 1, 1), Withdraw((20, 31)))]
    device.plan["finish", 3] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 4))
    assert [report.requests for report in reports if isinstance(report, Withdrawn)] == [(31,)]
    broker.check(dones(reports)[1], 20)
    broker.check(dones(reports)[2], 30)


def test_requests_that_have_begun_are_still_compared(broker: Broker) -> None:
    """Also if they are recalled: their outputs must not reach the broker as a response."""
    device = broker.device
    device.plan["begin", 3] = [broker.later(Withdraw((30, 31)))]
    device.plan["finish", 3] = [broker.later(Stop())]
    full = broker.execute(3, 3, 1)
    expected = Tensor("y", "FP32", (3, 2), (broker.values[30] + 1).tobytes())
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 1), Expect(30, (expected,)), full)
    compared, plain = rows_of(dones(reports)[2].rows)
    assert (compared.request, compared.outputs, compared.parameters) == (30, (), {"equal": True})
    assert plain.parameters is None


def test_a_batch_of_which_all_is_withdrawn_does_not_begin(broker: Broker) -> None:
    device = broker.device
    device.plan["query", 2] = [broker.later(broker.execute(3, 1)), broker.later(Withdraw((30,)), computed=True)]
    device.plan["finish", 2] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 1))
    assert [event[1] for event in device.events if event[0] == "begin"] == [1, 2]
    assert starts(reports) == [(1, 2, 2), (2, 0, 0)]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("how", ["failing", "refused"])
def test_a_batch_that_fails_fails_alone(broker: Broker, failing: int, how: str) -> None:
    """At its end, or when it begins while the one before is on the device."""
    device = broker.device
    getattr(device, how).add(failing)
    device.plan["begin", 3] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 4, open=False), broker.execute(2, 2, 2), broker.execute(3, 4))
    assert starts(reports) == [(1, 2, 2), (2, 3, 3), (3, 0, 0)]
    for number, done in enumerate(dones(reports), 1):
        requests = (20, 21) if number == 2 else (10 * number,)
        if number != failing:
            broker.check(done, *requests)
            continue
        rows = list(rows_of(done.columns or done.rows))
        assert [row.request for row in rows] == list(requests)
        assert all(row.error is not None and f"batch {number}" in row.error.text for row in rows)
    assert broker.parts.arenas.used == 0


def test_stop_while_two_batches_are_on_the_device(broker: Broker) -> None:
    broker.device.plan["begin", 2] = [broker.later(broker.execute(3, 1), Stop())]
    reports = broker.run(broker.execute(1, 4, open=False), broker.execute(2, 4))
    assert starts(reports) == [(1, 2, 2), (2, 3, 3), (3, 0, 0)]
    assert broker.device.running == []


def test_requests_that_do_not_stack_run_in_their_turn(broker: Broker) -> None:
    """A batch of several groups is not begun early: its groups run one after another when the batch before is done."""
    device = broker.device
    other = broker.execute(3, 2, width=3).work_items[0]
    mixed = broker.execute(2, 2)
    device.plan["finish", 3] = [broker.later(Stop())]
    reports = broker.run(
        broker.execute(1, 4, open=False), Execute(2, 0, (*mixed.work_items, other), False, True), broker.execute(4, 4)
    )
    assert device.events == [
        ("begin", 1, 4),
        ("finish", 1),
        ("begin", 2, 2),
        ("finish", 2),
        ("begin", 3, 2),
        ("finish", 3),
        ("begin", 4, 4),
        ("finish", 4),
    ]
    assert starts(reports) == [(1, 2, 2), (2, 4, 4), (4, 0, 0)]
    broker.check(dones(reports)[1], 20, 30)


def test_orders_are_answered_while_the_worker_waits_for_the_device(broker: Broker) -> None:
    device = broker.device
    device.plan["query", 2] = [broker.later(Ping(7)), lambda: True]
    device.plan["finish", 2] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 1))
    kinds = [type(report) for report in reports]
    assert kinds == [Done, Pong, Done]


def test_the_device_is_not_asked_during_short_batches(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker waits for the device alone, which is exact."""
    monkeypatch.setattr(overlap, "SHORT_NS", 10**12)
    device = broker.device
    queries = [lambda: True]
    device.plan["query", 2] = queries
    device.plan["begin", 2] = [broker.later(broker.execute(3, 1))]
    device.plan["finish", 3] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 1, open=False), broker.execute(2, 1))
    assert len(queries) == 1
    assert starts(reports) == [(1, 2, 2), (2, 3, 3), (3, 0, 0)]


def test_no_time_is_counted_for_two_batches(broker: Broker) -> None:
    broker.device.plan["begin", 3] = [broker.later(Stop())]
    reports = broker.run(broker.execute(1, 4, open=False), broker.execute(2, 4), broker.execute(3, 4))
    times = [moment for done in dones(reports) for moment in done.times]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.fixture
def plain(broker: Broker) -> Broker:
    """The backend runs one batch at a time, like most."""
    broker.device.overlaps = False
    broker.runner = broker.parts.runner(broker.device)
    return broker


def reading(broker: Broker, packets: list[list[Any]]) -> Callable[[], None]:
    """Reads the packet that was sent before this moment, and stops the worker."""

    def read() -> None:
        packets.append(_reports(broker.sock.recv(PACKET_BYTES)))
        broker.send(Stop())

    return read


def test_requests_join_and_leave_a_waiting_batch_until_it_starts(plain: Broker) -> None:
    device = plain.device
    more = (plain.execute(2, 1, 1), plain.execute(3, 1, join=2), Withdraw((21, 10, 99)), Ping(5))
    device.plan["begin", 1] = [plain.later(*more)]
    device.plan["begin", 2] = [plain.later(Stop())]
    reports = plain.run(plain.execute(1, 1, open=False))
    assert reports[:2] == [Withdrawn((21,)), Pong(5)], "before the next batch runs"
    assert starts(reports) == [(1, 2, 3), (2, 0, 0)]
    plain.check(dones(reports)[0], 10)
    plain.check(dones(reports)[1], 20, 30)


def test_the_end_of_one_batch_and_the_start_of_the_next_are_one_packet(plain: Broker) -> None:
    packets: list[list[Any]] = []
    plain.device.plan["begin", 1] = [plain.later(plain.execute(2, 1), Withdraw((7,)))]
    plain.device.plan["begin", 2] = [reading(plain, packets)]
    plain.check(dones(plain.run(plain.execute(1, 1, open=False)))[0], 20)
    ((withdrawn, done),) = packets
    assert withdrawn == Withdrawn(())
    assert (type(done), done.batch, done.next) == (Done, 1, 2)


def test_cancelled_requests_are_forgotten_after_their_batch(plain: Broker) -> None:
    streams = plain.device.streams = OpenResponses(decoupled=False)
    plain.check(dones(plain.run(plain.execute(1, 1, open=False), Withdraw((10,)), Stop()))[0], 10)
    assert streams.withdrawn == set()


def test_an_open_batch_is_reported_when_it_starts(plain: Broker) -> None:
    packets: list[list[Any]] = []
    plain.device.plan["begin", 1] = [reading(plain, packets)]
    assert starts(plain.run(plain.execute(1, 1))) == [(1, 0, 0)]
    assert starts(packets[0]) == [(0, 1, 1)]


def test_a_stop_in_one_packet_with_other_orders_finishes_all_batches(plain: Broker) -> None:
    executes = [replace(plain.execute(number, 1, open=number == 4), more=number == 6) for number in range(2, 7)]
    plain.device.plan["begin", 1] = [plain.later(*executes, Withdraw((40,)), Stop())]
    reports = plain.run(plain.execute(1, 1, open=False))
    assert reports[0] == Withdrawn((40,))
    assert starts(reports) == [(1, 2, 2), (2, 3, 3), (3, 5, 5), (5, 6, 6), (6, 0, 0)]
    for done, number in zip(dones(reports), (1, 2, 3, 5, 6), strict=True):
        plain.check(done, 10 * number)
