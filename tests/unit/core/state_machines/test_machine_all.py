"""The state machine with everything at once: plain, ranked, ordered and kept models, sequences, streams, ensembles with
mapped steps and conditions, with and without the rate limiter, under clients, operators, deaths and slow links.

In addition to the checks of test_machine.py, each response must belong to its request (see everything.py), no worker
gets the end of an unknown sequence, and at the end no slot, stream, sequence or resource is in use.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.limits import Limits
from shmserve.core.state import State
from shmserve.protocol.messages import Cancel, Fail, FailHeld, Handle, Infer, Map, More, Options, Wanted
from shmserve.protocol.worker_messages import Prefilled, Unread
from shmserve.tools.timeline import Collected, TraceTimeline
from tests.support.clients.trace_events import check
from tests.support.core.everything import MODELS, MS, SEQUENCES, STREAMS, Everything, with_members
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.machine import in_batches, not_a_rule, run_machine
from tests.support.core.policies import scaling_of
from tests.unit.core.state_machines.test_machine import BROKER_SEGMENT, LIMITS
from tests.unit.core.state_machines.test_machine_operations import OperatedMachine, _loads, _may_leave

NAMES = sorted(MODELS)
RARE = ["come", "go", "segment", "unmap", "crash", "deploy", "deploy", "unload", "restart", "fail", "resize", "long"]
GIVEN = [None, None, Options(priority=1), Options(priority=3), Options(queue_timeout_us=2000), Options(window=1)]
ALL_LIMITS = replace(LIMITS, cache_bytes=2200, leaving_ns=25 * MS)


class EverythingMachine(OperatedMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world: Everything = Everything(ALL_LIMITS, False)

    def new_world(self, limits: Limits, limited: bool) -> Everything:
        return Everything(limits, limited)

    @initialize(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), limited=st.booleans())
    def begin(self, names: list[str], limited: bool) -> None:
        self.world = self.new_world(ALL_LIMITS, limited)
        self.names = with_members(names)
        self.world.core.state.observers.record((), 10**6)
        self.world.turn([(0, events.OwnSegment(Map(BROKER_SEGMENT, 1 << 40)))])
        for name in self.names:
            served = MODELS[name]
            self.world.deploy(served.policy, served.instances, served.large)
            for worker in self.workers(bool):
                self.world.turn(self.world.heard(worker))
        self.connect(0, False)
        self.connect(1, False)

    # ------------------------------------------------------------------------------------ requests

    def make_ask(
        self, client: FakeClient, name: str, rows: int, where: str, value: int, options: Options | None,
        wanted: tuple[str, ...] | None = None, timeout_ms: int = 0,
    ) -> tuple[int, Any]:  # fmt: skip
        policy = MODELS[name].policy
        message = self.make_request(client, policy, rows, where, 1, True, None if wanted != ("placed",) else wanted)
        if wanted is not None and wanted != ("placed",):
            message.outputs = tuple(Wanted(spec.name) for spec in policy.outputs[: len(wanted)])
        elif message.outputs is not None:
            message.outputs = tuple(Wanted(policy.outputs[-1].name, output.place) for output in message.outputs)
        for tensor in message.inputs:
            if isinstance(tensor.data, bytes):
                tensor.data = bytes([value]) * len(tensor.data)
            elif where == "frame":
                for block in references((tensor,)):
                    self.world.put(BROKER_SEGMENT, block.offset, block.size, value)
        message.options, message.timeout_us = options, timeout_ms * 1000
        if name in STREAMS and (options is None or not options.window):
            message.options = replace(options or Options(), window=2)
        client.sends(message.request, message.options.window if message.options is not None else 0)
        if where != "forged":
            self.world.expect(client.peer, message)
        if timeout_ms:
            self.deadlines[client.peer, message.request] = self.world.now + timeout_ms * MS
        if where == "frame":
            blocks = tuple(references(message.inputs))
            self.blocks += blocks
            return client.peer, events.Framed(message, blocks)
        return client.peer, message

    @precondition(lambda self: self.clients)
    @rule(
        which=st.integers(0, 9),
        which_model=st.integers(0, 9),
        count=st.integers(1, 4),
        rows=st.sampled_from([1, 1, 1, 2, 0]),
        where=st.sampled_from(["inline", "inline", "own", "held", "forged", "frame"]),
        value=st.integers(0, 5),
        options=st.sampled_from(GIVEN),
        timeout_ms=st.sampled_from([0, 0, 0, 1, 3, 9]),
        wanted=st.sampled_from([None, None, ("one",), ("one", "two"), ("placed",)]),
        together=st.booleans(),
        batched=st.booleans(),
    )
    def infer(
        self, which: int, which_model: int, count: int, rows: int, where: str, value: int, options: Options | None,
        timeout_ms: int, wanted: tuple[str, ...] | None, together: bool, batched: bool = False,
    ) -> None:  # fmt: skip
        client, name = self.choose_client(which), self.names[which_model % len(self.names)]
        happened = [self.make_ask(client, name, rows, where, value, options, wanted, timeout_ms) for _ in range(count)]
        self.send(in_batches(happened) if batched else happened, together)

    def _simple(self, client: FakeClient, name: str, rows: int) -> tuple[int, Infer]:
        options = None
        if name in SEQUENCES:
            options = Options(sequence=1 + client.peer % 2, sequence_start=True)
        return self.make_ask(client, name, rows, "inline", self.numbers % 200, options)

    @precondition(lambda self: self.clients and any(name in SEQUENCES for name in self.names))
    @rule(
        which=st.integers(0, 9), which_model=st.integers(0, 3), number=st.integers(1, 4), start=st.booleans(),
        end=st.booleans(), count=st.integers(1, 3), timeout_ms=st.sampled_from([0, 0, 0, 0, 2]),
        together=st.booleans(),
    )  # fmt: skip
    def sequence(
        self, which: int, which_model: int, number: int, start: bool, end: bool, count: int, timeout_ms: int,
        together: bool,
    ) -> None:  # fmt: skip
        names = [name for name in self.names if name in SEQUENCES]
        client, name = self.choose_client(which), names[which_model % len(names)]
        happened = []
        for index in range(count):
            first, last = start and not index, end and index == count - 1
            options = Options(sequence=number, sequence_start=first, sequence_end=last)
            happened.append(self.make_ask(client, name, 1, "inline", number, options, None, timeout_ms))
        self.send(happened, together)

    # ------------------------------------------------------------------------------------ streams

    @precondition(lambda self: self.workers(lambda worker: worker.streams))
    @rule(
        which=st.integers(0, 30),
        pick=st.integers(0, 9),
        how=st.sampled_from(["part", "part", "last", "end", "error", "unread", "prefill"]),
    )
    def part(self, which: int, pick: int, how: str) -> None:
        streaming = self.workers(lambda worker: worker.streams)
        worker = streaming[which % len(streaming)]
        request = sorted(worker.streams)[pick % len(worker.streams)]
        if request in worker.cancelled:
            worker.part(request, error=("CANCELLED", "given up"))
        elif how == "error":
            worker.part(request, error=("MODEL_FAILED", "no"))
        elif how == "unread":
            worker.outbox.append(Unread(request))
        elif how == "prefill":
            worker.outbox.append(Prefilled(request, pick))
        elif how == "end" or not worker.room[request]:
            worker.part(request, True, True)
        else:
            worker.part(request, how == "last")

    @precondition(lambda self: any(client.windows for client in self.clients))
    @rule(which=st.integers(0, 9), pick=st.integers(0, 9), count=st.integers(1, 3), together=st.booleans())
    def more(self, which: int, pick: int, count: int, together: bool) -> None:
        asking = [client for client in self.clients if client.windows]
        client = asking[which % len(asking)]
        known = sorted(client.windows)[-3:]
        request = known[pick % len(known)]
        client.windows[request] += count
        self.send([(client.peer, More(request, count))], together)

    # ------------------------------------------------------------------------------------ workers and operators

    @precondition(lambda self: self.workers(lambda worker: worker.running))
    @rule(
        which=st.integers(0, 30),
        rows_first=st.integers(0, 1),
        error=st.booleans(),
        took=st.integers(0, 9),
        again=st.integers(0, 2),
    )
    def finish(self, which: int, rows_first: int, error: bool, took: int, again: int) -> None:
        running = self.workers(lambda worker: worker.running)
        worker = running[which % len(running)]
        sequence = worker.policy.sequence
        assert worker.running is not None
        if sequence is not None and sequence.iterative:
            worker.again = [work.request for work in worker.running.work_items][:again]
        failure = ("MODEL_FAILED", "no") if error and took == 1 else None
        worker.finish(self.world.now, took * MS, rows_first, failure)

    @rule(which=st.integers(0, 30))
    def busy(self, which: int) -> None:
        """All workers read and finish, and their reports are read, so that work proceeds."""
        for worker in self.workers(bool):
            worker.read()
            self.world.let_start(worker)
            if worker.running and (which + worker.peer) % 3:
                worker.finish(self.world.now)
            self.send(self.world.heard(worker), which % 2 == 0)

    @precondition(lambda self: self.clients)
    @rule(
        what=st.sampled_from(RARE),
        which=st.integers(0, 9),
        number=st.integers(0, 3),
        flag=st.booleans(),
        together=st.booleans(),
    )
    def happen(self, what: str, which: int, number: int, flag: bool, together: bool) -> None:
        """Events that are rarer than requests and answers."""
        name = self.names[which % len(self.names)]
        if what == "come" and len(self.clients) < 5:
            self.connect(number, flag)
        elif what == "go" and len(self.clients) > 1:
            self.gone(which, 1)
        elif what == "segment":
            self.segment(which, together)
        elif what == "unmap":
            self.unmap(which, together)
        elif what == "crash":
            self.crash(which)
        elif what == "deploy":
            if MODELS[name].policy.steps is None and flag:
                self.world.scalings[name] = scaling_of(name, f"1-{2 + which % 3}", up="1ms", down="20ms")
            else:
                self.world.scalings.pop(name, None)
            target = self.world.target(MODELS[name].policy, number, 1 + which % 3)
            self.operate(events.Deploy(name, (target,), 0, flag and number == 0), together)
        elif what == "unload" and not number:
            self.operate(events.Unload(name), together)
        elif what == "restart":
            self.restart(which, flag, together)
        elif what == "long":
            self.long_time(which, 2 * number, 1 + which)
        elif what == "resize":
            self.resize(which, number, flag)
        elif what == "fail" and self.workers(_loads):
            self.cannot_load(which, flag)

    @precondition(lambda self: self.workers(_may_leave))
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        leaving = self.workers(_may_leave)
        worker = leaving[which % len(leaving)]
        self.send([])
        worker.end_streams()
        self.world.crash(worker, "exit code 0")

    # The events of `happen` are not separate rules.

    connect = not_a_rule(OperatedMachine.connect)
    gone = not_a_rule(OperatedMachine.gone)
    segment = not_a_rule(OperatedMachine.segment)
    unmap = not_a_rule(OperatedMachine.unmap)
    crash = not_a_rule(OperatedMachine.crash)
    unload = not_a_rule(OperatedMachine.unload)
    restart = not_a_rule(OperatedMachine.restart)
    deploy = not_a_rule(OperatedMachine.deploy)
    resize = not_a_rule(OperatedMachine.resize)
    long_time = not_a_rule(OperatedMachine.long_time)
    cannot_load = not_a_rule(OperatedMachine.cannot_load)

    # ------------------------------------------------------------------------------------ the end

    def give_room(self) -> None:
        """Enlarges the windows of all streams that are full."""
        for client in self.clients:
            self.world.turn(self._room_of(client))

    def _room_of(self, client: FakeClient) -> list[tuple[int, Any]]:
        full = [request for request in client.open if client.windows.get(request) == 0]
        client.windows |= dict.fromkeys(full, 9)
        return [(client.peer, More(request, 9)) for request in full]

    def let_run(self, worker: FakeWorker) -> None:
        super().let_run(worker)
        for request in list(worker.streams):
            worker.part(request, True, True, ("CANCELLED", "given up") if request in worker.cancelled else None)

    def copies(self) -> list[Handle]:
        return sorted(self.world.own_memory.placed, key=lambda handle: (handle.segment, handle.offset))

    def teardown(self) -> None:
        self.send([])
        self.finish_everything()
        state = self.world.core.state
        for worker in self.workers(lambda w: w.policy.sequence is not None and not w.policy.sequence.iterative):
            assert not self.world.kept_by(worker), f"{worker.name} was never told of the end of a sequence"
        for model in state.models.values():
            for version in model.generations():
                state.cache.purge(version)
                assert not version.users, version.label
                assert not version.service.order, version.label
                if version.service.sequence_slots is not None:
                    assert not version.service.sequence_slots.count, version.label
                    assert not version.service.sequence_slots.latest, version.label
                for instance in version.instances:
                    assert not instance.streams, instance.details()
        assert not state.cache.bytes
        assert not state.changes.retiring_instances
        if state.limiter is not None:
            assert not state.limiter._running  # noqa: SLF001 - nothing else shows what is left
            assert not any(state.limiter._used.values())  # noqa: SLF001 - nothing else shows what is left
        self.check_recording(state)
        self.world.turn([])
        super().teardown()

    def check_recording(self, state: State) -> None:
        """The recording has all answered requests, and gives a valid timeline."""
        recording = state.observers.recording
        if recording is None:
            return  # the machine has not started
        collected = Collected(10**6)
        collected.add(msgspec.json.decode(msgspec.json.encode(recording.take(10**6))))
        check(TraceTimeline(collected).events())
        numbers = {request.number for batch in collected.batches for request in batch.requests}
        numbers |= collected.ends.keys()
        served = [version.statistics for model in state.models.values() for version in model.versions.values()]
        assert not collected.missing
        assert len(numbers) >= sum(counted.success_count for counted in served)


@pytest.mark.hypothesis
def test_the_ledger_balances_with_all_features_combined() -> None:
    run_machine(EverythingMachine, 60)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_model_of_the_machine_answers_a_request(name: str, limited: bool) -> None:
    machine = EverythingMachine()
    machine.begin([name], limited)
    client = machine.clients[0]
    options = Options(sequence=5, sequence_start=True, sequence_end=True) if name in SEQUENCES else None
    machine.send([machine.make_ask(client, name, 1, "inline", 3, options)], False)
    machine.finish_everything()
    (answer,) = client.answers.values()
    assert answer.outputs or name in STREAMS, answer
    machine.teardown()


def test_a_refused_request_to_a_decoupled_model_keeps_no_memory() -> None:
    machine = EverythingMachine()
    machine.begin(["e_turn"], False)
    machine.happen(flag=False, number=1, together=False, what="deploy", which=0)
    machine.busy(which=0)
    machine.happen(flag=False, number=0, together=False, what="segment", which=0)
    machine.infer(
        count=1, options=None, rows=1, timeout_ms=0, together=False, value=0, wanted=("placed",), where="inline",
        which=0, which_model=2,
    )  # fmt: skip
    machine.teardown()


def test_a_sequence_continues_in_the_turn_that_replaces_its_model() -> None:
    """Uses an ensemble, whose requests choose a generation before any of their steps has begun."""
    state = EverythingMachine()
    state.begin(limited=False, names=["e_nest", "det", "e_seq"])
    state.load(counts=[3, 3, 3, 3], which=0, which_model=0)
    state.happen(flag=True, number=1, together=False, what="deploy", which=5)
    state.busy(which=15)
    state.happen(flag=False, number=0, together=True, what="deploy", which=5)
    state.sequence(count=3, end=True, number=1, start=True, timeout_ms=2, together=True, which=7, which_model=1)
    state.cancel(pick=20, together=False, which=2)
    state.busy(which=19)
    state.sequence(count=3, end=True, number=1, start=True, timeout_ms=0, together=True, which=1, which_model=1)
    state.teardown()


@pytest.mark.parametrize("way", ["alone", "columns", "frame"])
@pytest.mark.parametrize("name", NAMES)
def test_the_counters_of_a_model_are_the_sums_over_its_clients(name: str, way: str) -> None:
    """Some requests of two clients succeed, are cancelled, fail at the worker, expire, or are refused."""
    machine = EverythingMachine()
    machine.begin([name], False)
    happened = []
    for number in range(4):
        for client in machine.clients:
            sequence = Options(sequence=1 + number, sequence_start=True, sequence_end=True)
            options = sequence if name in SEQUENCES else None
            where = "frame" if way == "frame" and client.plane == "zmq" else "inline"
            happened.append(machine.make_ask(client, name, 1, where, number, options, timeout_ms=9 * (number == 3)))
    happened.sort(key=lambda event: event[0])
    machine.send(in_batches(happened) if way == "columns" else happened)
    machine.send([(client.peer, Cancel(max(client.open))) for client in machine.clients if client.open])
    for worker in machine.workers(lambda worker: worker.inbox):
        worker.read()
        machine.world.let_start(worker)
    machine.finish(0, 0, True, 1, 0)
    machine.world.advance(machine.world.now + 10 * MS)
    machine.finish_everything()
    machine.send([(0, events.Drain(0))])
    machine.send([machine.make_ask(client, name, 1, "inline", 1, None) for client in machine.clients])
    answers = [answer for client in machine.clients for answer in client.answers.values()]
    failed = sum(isinstance(answer, Fail | FailHeld) for answer in answers)
    state = machine.world.core.state
    counted = state.models[name].versions[1].statistics
    assert counted.success_count == len(answers) - failed
    assert sum(counted.failures) == failed
    assert len(answers) == 5 * len(machine.clients)
    assert state.observers.refusals == {"UNAVAILABLE": len(machine.clients)}
