"""The base of the core's state machines: collects events into turns, and lets workers read and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hypothesis import HealthCheck, currently_in_test_context, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from shmserve.protocol.messages import Columns, Infer, InferBatch, TensorForm
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.world import START, World
from tests.support.hypothesis_profiles import examples

MS = 10**6
P = ParamSpec("P")
R = TypeVar("R")


def run_machine(machine: type[RuleBasedStateMachine], count: int) -> None:
    """Tries `count` examples of 60 steps each, and a quarter of them in `make test`."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(count, quick=max(count // 4, 8)),
            stateful_step_count=60,
            suppress_health_check=list(HealthCheck),
        ),
    )


def not_a_rule(method: Callable[P, R]) -> Callable[P, R]:
    """The method of a parent class, for a machine that calls it but does not have it as a rule."""

    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        return method(*arguments, **keywords)

    return call


def in_batches(happened: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """The same requests, with consecutive ones as one InferBatch where a client may send that."""
    found: list[tuple[int, Any]] = []
    last: Any = None
    for peer, message in happened:
        key = _form_of(peer, message)
        if key is None or key != last:
            found.append((peer, message if key is None else _batch([message])))
        else:
            known = found[-1][1].columns
            added = _batch([message]).columns
            known.requests += added.requests
            known.rows += added.rows
            known.data += added.data
        last = key
    return found


def _form_of(peer: int, message: Any) -> Any:
    """The form that all requests of an InferBatch share; None if this request cannot be in one."""
    if not isinstance(message, Infer) or message.options is not None or message.outputs is not None:
        return None
    if any(not isinstance(tensor.data, bytes) or not tensor.shape for tensor in message.inputs):
        return None
    if len({tensor.shape[0] for tensor in message.inputs}) != 1:
        return None
    forms = tuple((tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in message.inputs)
    return peer, message.model, message.version, message.timeout_us, message.payer, forms


def _batch(messages: list[Infer]) -> InferBatch:
    first = messages[0]
    columns = Columns(
        tuple(TensorForm(tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in first.inputs),
        tuple(message.request for message in messages),
        tuple(message.inputs[0].shape[0] for message in messages),
        tuple(tuple(one.data for one in message.inputs if isinstance(one.data, bytes)) for message in messages),
    )
    return InferBatch(first.model, first.version, columns, first.timeout_us, first.payer)


class Turn:
    """The events of a turn, as a comment in the shortest failing example."""

    def __init__(self, now: int, happened: list[tuple[int, Any]]) -> None:
        self.now, self.happened = now, happened

    def __repr__(self) -> str:
        return "\n".join(f"# {(self.now - START) / MS:g} ms, from {peer}: {event}" for peer, event in self.happened)


class WorldMachine(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[FakeClient] = []
        self.unsent: list[tuple[int, Any]] = []
        self.numbers = 0

    def send(self, happened: list[tuple[int, Any]], together: bool = False) -> None:
        """Sends events in a separate turn or, if `together`, in one turn with the next events."""
        self.unsent += happened
        if not together:
            happened, self.unsent = self.unsent, []
            if happened and currently_in_test_context():
                note(Turn(self.world.now, happened))
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
        """All links become fast, and all running and waiting requests end."""
        world = self.world
        for _ in range(400):
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
            if self.is_quiet() and not world.pending and not self.workers(lambda worker: worker.outbox):
                return
        raise AssertionError(f"work is left:\n{self.remaining()}")

    def remaining(self) -> str:
        state = self.world.core.state
        lines = [request.details() for request in state.requests.values()]
        for version, instance in state.instances.values():
            lines.append(f"{version.label}, {instance.spec.name}: {instance.state.name}, {instance.details()}")
        lines += [f"{version.label}: {version.waits} requests wait" for version in state.ready.values()]
        return "\n".join(lines)
