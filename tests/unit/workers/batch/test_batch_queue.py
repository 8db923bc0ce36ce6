"""The batches that wait at a worker, against what the messages promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import ProtocolError
from shmserve.protocol.messages import Execute, Work
from shmserve.workers.batch.batch_queue import BatchQueue


def execute(batch: int, *requests: int, join: int = 0, more: bool = False, open: bool = False) -> Execute:
    return Execute(batch, join, tuple(Work(request, 1, (), None, "internal") for request in requests), more, open)


def started(waiting: BatchQueue, *, last: bool = False) -> tuple[int, int, list[int]] | None:
    batch = waiting.start(last=last)
    return None if batch is None else (batch.number, batch.through, [work.request for work in batch.works])


def test_batches_start_in_order_and_once() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, 11))
    waiting.add(execute(2, 12))
    assert started(waiting) == (1, 1, [10, 11])
    assert started(waiting) == (2, 2, [12])
    assert started(waiting) is None


def test_a_join_extends_what_waits() -> None:
    waiting = BatchQueue()
    waiting.add(execute(3, 10, open=True))
    waiting.add(execute(4, 11, 12, join=3))
    waiting.add(execute(7, 13, join=3))
    assert len(waiting) == 4
    assert started(waiting) == (3, 7, [10, 11, 12, 13])


def test_a_join_that_comes_too_late_is_a_batch_of_its_own() -> None:
    waiting = BatchQueue()
    waiting.add(execute(3, 10))
    assert started(waiting) == (3, 3, [10])
    waiting.add(execute(4, 11, join=3))
    assert started(waiting) == (4, 4, [11])


def test_joins_that_come_too_late_stay_together() -> None:
    """Whoever sent them sees them as one batch: when it is told that 4 has started, it may not miss 5."""
    waiting = BatchQueue()
    waiting.add(execute(3, 10))
    waiting.start()
    waiting.add(execute(4, 11, join=3))
    waiting.add(execute(5, 12, join=3))
    waiting.add(execute(6, 13, join=4))
    assert started(waiting) == (4, 6, [11, 12, 13])


def test_more_holds_a_batch_back_until_the_next_execute() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, more=True))
    assert started(waiting) is None
    waiting.add(execute(2, 11, join=1, more=True))
    assert started(waiting) is None
    waiting.add(execute(3, 12, join=1))
    assert started(waiting) == (1, 3, [10, 11, 12])


def test_more_after_a_join_that_came_too_late() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10))
    waiting.start()
    waiting.add(execute(2, 11, join=1, more=True))
    assert started(waiting) is None
    waiting.add(execute(3, 12, join=1))
    assert started(waiting) == (2, 3, [11, 12])


def test_an_unfinished_batch_runs_at_the_end() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, more=True))
    assert started(waiting, last=True) == (1, 1, [10])
    waiting.add(execute(2, 11))
    assert started(waiting) == (2, 2, [11])


def test_open_is_what_any_part_says() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10))
    waiting.add(execute(2, 11, join=1, open=True))
    batch = waiting.start()
    assert batch is not None
    assert batch.open


def test_withdraw_names_those_that_were_there() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, 11, 12, open=True))
    assert waiting.withdraw((12, 99, 10, 12)) == (12, 10)
    assert waiting.withdraw((10,)) == ()
    assert started(waiting) == (1, 1, [11])
    assert waiting.withdraw((11,)) == ()


def test_nothing_is_taken_out_of_what_runs_as_far_as_its_owner_knows() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, 11))
    assert waiting.withdraw((10,)) == ()
    assert started(waiting) == (1, 1, [10, 11])


def test_an_emptied_batch_does_not_start_but_can_be_joined() -> None:
    """The order to join may have been sent before the answer to Withdraw was seen."""
    waiting = BatchQueue()
    waiting.add(execute(1, 10, open=True))
    assert waiting.withdraw((10,)) == (10,)
    assert started(waiting) is None
    waiting.add(execute(2, 11, join=1))
    assert started(waiting) == (1, 2, [11])


def test_a_new_batch_replaces_an_emptied_one() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, open=True))
    waiting.withdraw((10,))
    waiting.add(execute(2, 11))
    waiting.add(execute(3, 12, join=2))
    assert started(waiting) == (2, 3, [11, 12])
    assert started(waiting) is None


def test_an_emptied_part_still_waits_for_the_rest() -> None:
    waiting = BatchQueue()
    waiting.add(execute(1, 10, more=True, open=True))
    waiting.withdraw((10,))
    waiting.add(execute(2, 11))
    assert started(waiting) == (1, 2, [11])


@pytest.mark.parametrize("number", [2, 1])
def test_numbers_rise(number: int) -> None:
    waiting = BatchQueue()
    waiting.add(execute(2, 10))
    with pytest.raises(ProtocolError, match="batch numbers must rise"):
        waiting.add(execute(number, 11))


def test_an_execute_has_requests() -> None:
    with pytest.raises(ProtocolError, match="Execute 1 has no requests"):
        BatchQueue().add(execute(1))


class Sender:
    """The broker's side as it is meant to be: at most one batch waits, and joins name its first number.

    What the worker does is told to it late, as over a link."""

    def __init__(self) -> None:
        self.waiting = BatchQueue()
        self.number = 0
        self.request = 0
        self.pieces: list[tuple[int, list[int]]] = []  # of the batch that it thinks waits
        self.told: list[tuple[str, tuple[int, ...]]] = []
        self.ran: list[int] = []
        self.withdrawn: list[int] = []

    def send(self, sizes: list[int]) -> None:
        for index, size in enumerate(sizes):
            self.number += 1
            requests = list(range(self.request + 1, self.request + size + 1))
            self.request += size
            join = self.pieces[0][0] if self.pieces else 0
            self.waiting.add(execute(self.number, *requests, join=join, more=index < len(sizes) - 1, open=True))
            self.pieces.append((self.number, requests))

    def start(self) -> None:
        batch = self.waiting.start()
        if batch is not None:
            self.ran += [work.request for work in batch.works]
            self.told.append(("started", (batch.number, batch.through, *(work.request for work in batch.works))))

    def withdraw(self, requests: list[int]) -> None:
        found = self.waiting.withdraw(tuple(requests))
        self.withdrawn += found
        self.told.append(("withdrawn", found))

    def hear(self) -> None:
        if not self.told:
            return
        what, numbers = self.told.pop(0)
        if what == "withdrawn":
            self.pieces = [(number, [r for r in had if r not in numbers]) for number, had in self.pieces]
            if not any(had for _, had in self.pieces):
                self.pieces = []
            return
        first, through, *ran = numbers
        assert first in [number for number, _ in self.pieces]
        gone = [request for number, had in self.pieces if number <= through for request in had]
        assert set(ran) <= set(gone)
        # What it has asked for and not heard of may be missing from the batch, and nothing else.
        pending = {request for kind, found in self.told if kind == "withdrawn" for request in found}
        assert set(gone) - set(ran) <= pending | set(self.withdrawn)
        self.pieces = [piece for piece in self.pieces if piece[0] > through]


moves: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda sizes: ("send", sizes)),
    st.just(("start", [])),
    st.lists(st.integers(1, 12), max_size=4).map(lambda requests: ("withdraw", requests)),
    st.just(("hear", [])),
)


@given(st.lists(moves, max_size=40))
def test_both_sides_agree_however_late_the_reports_are(steps: list[tuple[str, list[int]]]) -> None:
    sender = Sender()
    for what, value in steps:
        if what == "send":
            sender.send(value)
        elif what == "withdraw":
            sender.withdraw(value)
        elif what == "start":
            sender.start()
        else:
            sender.hear()
    for _ in range(len(steps) * 3 + 1):
        sender.start()
    while sender.told:
        sender.hear()
    # Each request ran once or was withdrawn once.
    assert sorted(sender.ran + sender.withdrawn) == list(range(1, sender.request + 1))
    assert not any(had for _, had in sender.pieces)
