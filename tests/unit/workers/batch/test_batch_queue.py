"""The batches that wait at a worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import ProtocolError
from shmserve.protocol.batch_queue import BatchQueue
from shmserve.protocol.messages import Columns, Options, Tensor, TensorForm
from shmserve.protocol.worker_messages import Execute, Work


def work_of(request: int, name: str = "x") -> Work:
    """The n-th request has n bytes in rows of one, and a different audience."""
    return Work(request, request, (Tensor(name, "INT8", (request,), bytes(request)),), None, f"uid:{request}")


def execute(batch: int, *requests: int, join: int = 0, more: bool = False, open: bool = False) -> Execute:
    return Execute(batch, join, tuple(work_of(request) for request in requests), more, open)


def in_columns(order: Execute, name: str = "x") -> Execute:
    """The same order in columns, with inputs of this name."""
    requests = tuple(work.request for work in order.work_items)
    data = tuple((bytes(request),) for request in requests)
    columns = Columns((TensorForm(name, "INT8", ()),), requests, requests, data)
    audiences = tuple(f"uid:{request}" for request in requests)
    return Execute(order.batch, order.join, (), order.more, order.open, columns, audiences)


FORMS: dict[str, Callable[[Execute], Execute]] = {
    "works": lambda order: order,
    "columns": in_columns,
    "works and columns in turn": lambda order: in_columns(order) if order.batch % 2 else order,
    "columns of two forms": lambda order: in_columns(order, "xy"[order.batch % 2]),
}
"""How the Executes of a test are sent, which may only affect speed."""


CASES = {
    "batches start in order and once": "add 1: 10 11; add 2: 12; start 1-1: 10 11; start 2-2: 12; start",
    "a join extends a waiting batch": "add 3 open: 10; add 4 join 3: 11 12; add 7 join 3: 13; start 3-7: 10 11 12 13",
    "a late join becomes a batch": "add 3: 10; start 3-3: 10; add 4 join 3: 11; start 4-4: 11",
    # The sender sees late joins as one batch: if 4 is reported as started, 5 must be in it.
    "late joins stay together": """add 3: 10; start 3-3: 10; add 4 join 3: 11; add 5 join 3: 12; add 6 join 4: 13;
        start 4-6: 11 12 13""",
    "more holds a batch back until the next execute": """add 1 more: 10; start; add 2 join 1 more: 11; start;
        add 3 join 1: 12; start 1-3: 10 11 12""",
    "more after a late join": """add 1: 10; start 1-1: 10; add 2 join 1 more: 11; start;
        add 3 join 1: 12; start 2-3: 11 12""",
    "an unfinished batch runs at the end": "add 1 more: 10; last 1-1: 10; add 2: 11; start 2-2: 11",
    "withdraw names the requests that waited": """add 1 open: 10 11 12; withdraw 12 99 10 12: 12 10; withdraw 10:;
        start 1-1: 11; withdraw 11:""",
    "nothing is withdrawn from a batch that is not open": "add 1: 10 11; withdraw 10:; start 1-1: 10 11",
    # A join may have been sent before the answer to Withdraw was received.
    "an empty batch does not start but can be joined": """add 1 open: 10; withdraw 10: 10; start;
        add 2 join 1: 11; start 1-2: 11""",
    "a new batch replaces an empty one": """add 1 open: 10; withdraw 10: 10; add 2: 11; add 3 join 2: 12;
        start 2-3: 11 12; start""",
    "an empty part still waits for the rest": "add 1 more open: 10; withdraw 10: 10; add 2: 11; start 1-2: 11",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_queued_orders_form_the_expected_batches(steps: str, form: Callable[[Execute], Execute]) -> None:
    """`start 4-6: 11 12` expects batch 4 with the Executes up to 6; `start` alone expects that none starts. `last` is a
    start after the last Execute. `withdraw 1 2: 2` expects that only 2 is withdrawn."""
    queue = BatchQueue()
    sent: dict[int, Work] = {}
    for step in steps.split(";"):
        what, _, numbers = step.partition(":")
        verb, *words = what.split()
        requests = [int(number) for number in numbers.split()]
        if verb == "add":
            join = int(words[words.index("join") + 1]) if "join" in words else 0
            order = form(execute(int(words[0]), *requests, join=join, more="more" in words, open="open" in words))
            name = "x" if order.columns is None else order.columns.forms[0].name
            sent.update((request, work_of(request, name)) for request in requests)
            queue.add(order)
        elif verb == "withdraw":
            assert queue.withdraw(tuple(map(int, words))) == tuple(requests), step
        else:
            batch = queue.start(last=verb == "last")
            through = [] if batch is None else [f"{batch.number}-{batch.through}"]
            assert through == words, step
            work_items = list(() if batch is None else batch.work_items)
            assert [work.request for work in work_items] == requests, step
            assert work_items == [sent[request] for request in requests], "each has its own inputs"


def test_a_batch_is_open_if_any_part_is_open() -> None:
    queue = BatchQueue()
    queue.add(execute(1, 10))
    queue.add(execute(2, 11, join=1, open=True))
    assert len(queue) == 2
    batch = queue.start()
    assert batch is not None
    assert batch.open


@pytest.mark.parametrize("number", [2, 1])
def test_batch_numbers_must_rise(number: int) -> None:
    waiting = BatchQueue()
    waiting.add(execute(2, 10))
    with pytest.raises(ProtocolError, match="batch numbers must rise"):
        waiting.add(execute(number, 11))


def test_an_execute_without_requests_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Execute 1 has no requests"):
        BatchQueue().add(execute(1))


@pytest.mark.parametrize("waiting", ["works", "columns"])
def test_a_response_window_is_widened_wherever_the_request_waits(waiting: str) -> None:
    queue = BatchQueue()
    queue.add(FORMS[waiting](execute(1, 10, open=True)))
    stream = work_of(11)
    stream.options = Options(window=2)
    queue.add(Execute(2, 1, (stream,)))
    queue.widen_window(11, 3)
    queue.widen_window(10, 3)
    batch = queue.start()
    assert batch is not None
    assert [work.options for work in batch.work_items] == [None, Options(window=5)]


IRREGULAR = {
    "no requests": (Columns((TensorForm("x", "INT8", ()),), (), (), ()), ()),
    "fewer rows than requests": (Columns((TensorForm("x", "INT8", ()),), (1, 2), (1,), ((b"1",),) * 2), ("a", "a")),
    "an input missing": (Columns((TensorForm("x", "INT8", ()),), (1, 2), (1, 1), ((b"1",), ())), ("a", "a")),
    "an audience missing": (Columns((TensorForm("x", "INT8", ()),), (1, 2), (1, 1), ((b"1",),) * 2), ("a",)),
}


@pytest.mark.parametrize(("columns", "audiences"), IRREGULAR.values(), ids=IRREGULAR)
def test_irregular_columns_are_refused(columns: Columns, audiences: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError, match="irregular columns"):
        BatchQueue().add(Execute(1, 0, (), False, False, columns, audiences))


class Sender:
    """A correct broker: at most one batch waits, and joins name its first number. Reports of the worker arrive late."""

    def __init__(self, form: Callable[[Execute], Execute]) -> None:
        self.form = form
        self.waiting = BatchQueue()
        self.number = 0
        self.request = 0
        self.pieces: list[tuple[int, list[int]]] = []  # pieces of the waiting batch, as far as the sender knows
        self.reports: list[tuple[str, tuple[int, ...]]] = []
        self.ran: list[int] = []
        self.withdrawn: list[int] = []

    def send(self, sizes: list[int]) -> None:
        for index, size in enumerate(sizes):
            self.number += 1
            requests = list(range(self.request + 1, self.request + size + 1))
            self.request += size
            join = self.pieces[0][0] if self.pieces else 0
            order = execute(self.number, *requests, join=join, more=index < len(sizes) - 1, open=True)
            self.waiting.add(self.form(order))
            self.pieces.append((self.number, requests))

    def start(self) -> None:
        batch = self.waiting.start()
        if batch is not None:
            self.ran += [work.request for work in batch.work_items]
            self.reports.append(
                ("started", (batch.number, batch.through, *(work.request for work in batch.work_items)))
            )

    def withdraw(self, requests: list[int]) -> None:
        found = self.waiting.withdraw(tuple(requests))
        self.withdrawn += found
        self.reports.append(("withdrawn", found))

    def receive(self) -> None:
        if not self.reports:
            return
        what, numbers = self.reports.pop(0)
        if what == "withdrawn":
            self.pieces = [(number, [r for r in had if r not in numbers]) for number, had in self.pieces]
            if not any(had for _, had in self.pieces):
                self.pieces = []
            return
        first, through, *ran = numbers
        assert first in [number for number, _ in self.pieces]
        gone = [request for number, had in self.pieces if number <= through for request in had]
        assert set(ran) <= set(gone)
        # Requests with an unanswered Withdraw may be missing from the batch, and nothing else.
        pending = {request for kind, found in self.reports if kind == "withdrawn" for request in found}
        assert set(gone) - set(ran) <= pending | set(self.withdrawn)
        self.pieces = [piece for piece in self.pieces if piece[0] > through]


moves: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda sizes: ("send", sizes)),
    st.just(("start", [])),
    st.lists(st.integers(1, 12), max_size=4).map(lambda requests: ("withdraw", requests)),
    st.just(("receive", [])),
)


@given(st.lists(moves, max_size=40), st.sampled_from(list(FORMS)))
def test_broker_and_worker_agree_whenever_reports_arrive(steps: list[tuple[str, list[int]]], form: str) -> None:
    sender = Sender(FORMS[form])
    for what, value in steps:
        if what == "send":
            sender.send(value)
        elif what == "withdraw":
            sender.withdraw(value)
        elif what == "start":
            sender.start()
        else:
            sender.receive()
    for _ in range(len(steps) * 3 + 1):
        sender.start()
    while sender.reports:
        sender.receive()
    # Each request ran once or was withdrawn once.
    assert sorted(sender.ran + sender.withdrawn) == list(range(1, sender.request + 1))
    assert not any(had for _, had in sender.pieces)
