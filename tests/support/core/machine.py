"""What the state machines of the core share: events are collected into turns, and workers read and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.support.core.fakes import FakeClient, FakeWorker
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

MS = 10**6
P = ParamSpec("P")
R = TypeVar("R")


def run_machine(machine: type[RuleBasedStateMachine], count: int) -> None:
    """Tries `count` examples of 60 steps each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(count), stateful_step_count=60, suppress_health_check=list(HealthCheck)
        ),
    )


def not_a_rule(method: Callable[P, R]) -> Callable[P, R]:
    """The method of a parent, for a machine that calls it and does not have it as a rule."""

    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        return method(*arguments, **keywords)

    return call


class WorldMachine(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[FakeClient] = []
        self.unsent: list[tuple[int, Any]] = []
        self.numbers = 0

    def send(self, happened: list[tuple[int, Any]], together: bool = False) -> None:
        """In a turn of their own or, if `together`, in one with the next."""
        self.unsent += happened
        if not together:
            happened, self.unsent = self.unsent, []
            self.world.turn(happened)

    def workers(self, ready: Callable[[FakeWorker], Any]) -> list[FakeWorker]:
        return [worker for worker in self.world.workers.values() if not worker.dead and ready(worker)]

    @precondition(lambda self: self.workers(lambda worker: worker.inbox))
    @rule(which=st.integers(0, 30), count=st.sampled_from([1, 2, None]))
    def to_worker(self, which: int, count: int | None) -> None:
        reading = self.workers(lambda worker: worker.inbox)
        worker = reading[which % len(reading)]
        worker.read(count)
        self.world.let_start(worker)

    @precondition(lambda self: self.workers(lambda worker: worker.outbox))
    @rule(which=st.integers(0, 30), count=st.sampled_from([1, 2, None]), together=st.booleans())
    def from_worker(self, which: int, count: int | None, together: bool) -> None:
        reporting = self.workers(lambda worker: worker.outbox)
        self.send(self.world.heard(reporting[which % len(reporting)], count), together)

    @rule(which=st.integers(0, 30))
    def busy(self, which: int) -> None:
        """One worker reads everything, finishes its batch and reports it, so that requests make progress."""
        workers = self.workers(bool)
        if workers:
            worker = workers[which % len(workers)]
            worker.read()
            self.world.let_start(worker)
            if worker.running:
                worker.finish(self.world.now)
            self.send(self.world.heard(worker))

    # ------------------------------------------------------------------------------------ the end

    def let_run(self, worker: FakeWorker) -> None:
        self.world.let_start(worker)

    def give_room(self) -> None:
        """Enlarges the windows of streams."""

    def is_quiet(self) -> bool:
        state = self.world.core.state
        return self.world.core.deadline() is None and not state.requests and not state.sequences

    def finish_everything(self) -> None:
        """All links become fast, and everything that runs or waits ends."""
        world = self.world
        for _ in range(200):
            world.slow_to.clear()
            world.slow_from.clear()
            self.give_room()
            world.settle()
            for worker in self.workers(bool):
                self.let_run(worker)
            for worker in self.workers(lambda worker: worker.running):
                worker.finish(world.now)
            world.advance(world.now + 20 * MS)
            world.slow_to.clear()
            world.slow_from.clear()
            if self.is_quiet() and not world._pending and not self.workers(lambda worker: worker.outbox):
                return
        raise AssertionError("work is left")
