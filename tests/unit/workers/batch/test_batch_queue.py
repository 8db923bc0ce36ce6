"""The batches that wait at a worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
