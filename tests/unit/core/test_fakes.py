"""The fake worker of these tests and the real worker's batch queue interpret the protocol in the same way."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shmserve.core.policy import BatchPolicy, ModelPolicy
from shmserve.protocol.worker_messages import Execute, Withdraw, Withdrawn, Work
from shmserve.workers.batch.batch_queue import BatchQueue
from tests.support.core.fakes.worker import FakeWorker
from tests.support.hypothesis_profiles import examples


class Both(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeWorker(1, "m_0", ModelPolicy("m", 1, 10**6, (), (), BatchPolicy()))
        self.real = BatchQueue()
        self.executes = 0
        self.requests = 0
        self.known: list[int] = []
        self.unfinished = 0

    @rule(count=st.integers(1, 3), more=st.booleans(), join=st.integers(0, 3), is_open=st.booleans())
    def execute(self, count: int, more: bool, join: int, is_open: bool) -> None:
        self.executes += 1
        works = []
        for _ in range(count):
            self.requests += 1
            works.append(Work(self.requests, 1, (), None, "internal"))
        wanted = self.unfinished or (self.known[-join] if 0 < join <= len(self.known) else 0)
        order = Execute(self.executes, wanted, tuple(works), more, is_open)
        if not wanted:
            self.known.append(self.executes)
        self.unfinished = (wanted or self.executes) if more else 0
        self.fake.take(order)
        self.real.add(order)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(1, 200))
    def withdraw(self, which: int) -> None:
        request = which % self.requests + 1
        self.fake.take(Withdraw((request,)))
        said = self.fake.outbox.pop()
        assert isinstance(said, Withdrawn)
        assert self.real.withdraw((request,)) == said.requests

    @rule()
    def start(self) -> None:
        mine, theirs = self.fake.take_up(), self.real.start()
        self.fake.running = None
        if mine is None or theirs is None:
            assert mine is None
            assert theirs is None
            return
        assert (mine.number, mine.through) == (theirs.number, theirs.through)
        assert [work.request for work in mine.works] == [work.request for work in theirs.works]

    @invariant()
    def as_many_wait(self) -> None:
        assert sum(len(batch.works) for batch in self.fake.waiting) == len(self.real)


@pytest.mark.hypothesis
def test_the_fake_worker_and_the_batch_queue_agree() -> None:
    run_state_machine_as_test(Both, settings=settings(max_examples=examples(150, quick=50)))
