"""Sequences under a state machine of all possible events, compared with the rules in plain Python.

Messages between broker and workers are held back until a rule delivers them. `check()` runs after every turn. At the
end, everything continues until it is quiet: then every request has been answered once, and nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from shmserve.core import events
from shmserve.core.batching import sequence_scheduler
from shmserve.core.effects import Kill, Send
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, IdControl, InstanceSpec, ModelPolicy, SequencePolicy, TensorSpec
from shmserve.core.records import Instance, Request, Sequence, SequenceSlots, Version
from shmserve.core.state import State
from shmserve.core.states import SequenceState
from shmserve.protocol.batch_queue import QueuedBatch
from shmserve.protocol.messages import Cancel, Fail, FailHeld, Infer, Options, Reply, Tensor
from shmserve.protocol.worker_messages import EndSequences, Work
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.machine import MS, WorldMachine, run_machine
from tests.support.core.world import World

Asked = tuple[int, int]
"""Client and its number of the request."""


@dataclass(eq=False)
class Story:
    """A sequence, from its START until no state of it is left. Another START before its END belongs to it."""

    name: int | str
    user: str
    generation: int
    active: int
    asked: list[Asked] = field(default_factory=list)
    starts: set[Asked] = field(default_factory=set)
    waits_for_answer: set[Asked] = field(default_factory=set)
    over: bool = False
    broken: bool = False
    begun: int = 0
    """Number of requests in `asked` that a worker has begun."""
    told: int | str | None = None
    """The id under which workers know the sequence: a different one if a sequence of another user has the same id."""
    at: tuple[int, int] | None = None
    """Worker and slot."""


@dataclass
class Kept:
    """The state of one worker process for an id."""

    story: Story
    ended: bool = False
    """The worker was notified of the end: by a request with END that has run, or by the broker."""


class Rules:
    """The rules of sequences, as the model for the state machine.

    Its input are the messages that clients send and receive, and the requests that workers start, finish and are sent.
    It decides which requests must be accepted, and asserts what workers may see. It does not depend on slots, batches
    or queues.
    """

    def __init__(self, idle_ns: int, slots: int, direct: bool) -> None:
        self.idle_ns, self.slots, self.direct = idle_ns, slots, direct
        self.generation = 0
        self.live: dict[tuple[str, int | str], Story] = {}
        """Live sequences, by user and id."""
        self.of: dict[Asked, Story] = {}
        self.ends: set[Asked] = set()
        self.kept: dict[int, dict[int | str, Kept]] = {}
        self.running: dict[Asked, int] = {}
        self.again: set[Asked] = set()

    # ------------------------------------------------------------------------------------ what clients do

    def must_take(self, asked: Asked, user: str, name: int | str, start: bool, end: bool, now: int) -> bool:
        """Whether this request must be accepted. If so, it is part of a sequence from now on."""
        story = self.live.get((user, name))
        if story is not None and not story.waits_for_answer and now >= story.active + self.idle_ns:
            del self.live[user, name]
            story = None
        if not start and (story is None or story.over):
            return False
        if story is None or story.over or (start and story.generation != self.generation):
            if story is not None:
                story.over = True
            story = self.live[user, name] = Story(name, user, self.generation, now)
        story.asked.append(asked)
        story.waits_for_answer.add(asked)
        story.active = now
        story.over = end
        self.of[asked] = story
        if start:
            story.starts.add(asked)
        if end:
            self.ends.add(asked)
        return True

    def answered(self, asked: Asked, given_up: bool, now: int) -> None:
        story = self.of.get(asked)
        if story is None:
            return
        story.waits_for_answer.discard(asked)
        story.active = now
        if given_up:
            self.broken(story)
        elif story.over and not story.waits_for_answer and self.live.get((story.user, story.name)) is story:
            del self.live[story.user, story.name]

    def broken(self, story: Story) -> None:
        story.broken = True
        if self.live.get((story.user, story.name)) is story:
            del self.live[story.user, story.name]

    # ------------------------------------------------------------------------------------ what workers see

    def begins(self, worker: int, slot: int, asked: Asked, name: int | str, start: bool, end: bool) -> None:
        story = self.of[asked]
        kept = self.kept.setdefault(worker, {})
        story.told = name if story.told is None else story.told
        assert name == story.told, "a worker knows a sequence by two ids"
        assert asked not in self.running, "a request runs twice at a time"
        if asked in self.again:
            self.again.remove(asked)
            assert story.asked[story.begun - 1] == asked
            assert not start, "START was said twice"
        else:
            assert story.asked[story.begun] == asked, f"{asked} of {story} is not its next one"
            assert start == (asked in story.starts)
            story.begun += 1
        assert end == (asked in self.ends)
        for other in story.asked:
            assert other not in self.running, "two requests of a sequence run at a time"
        if story.begun == 1 and story.at is None:
            story.at = (worker, slot)
            before = kept.get(name)
            assert before is None or before.ended, f"{name} begins at a worker that keeps an older one"
            kept[name] = Kept(story)
        assert story.at == (worker, slot), "a sequence has moved"
        assert kept[name].story is story
        assert not kept[name].ended, f"{name} goes on where it is over"
        assert self._living(worker) <= self.slots
        assert (0 <= slot < self.slots) if self.direct else slot == -1
        self.running[asked] = worker

    def finishes(self, worker: int, asked: Asked, again: bool) -> None:
        assert self.running.pop(asked) == worker
        story = self.of[asked]
        if again:
            self.again.add(asked)
        elif asked in self.ends:
            assert story.told is not None
            self.kept[worker][story.told].ended = True

    def told(self, worker: int, name: int | str) -> None:
        """Handles EndSequences. A sequence that the worker has never begun is ignored."""
        kept = self.kept.get(worker, {}).get(name)
        if kept is not None:
            story = kept.story
            assert not any(asked in self.running for asked in story.asked), "told that it is over while it runs"
            assert story.broken or story.over or not story.waits_for_answer, f"{name} goes on: {story}"
            kept.ended = True
            if not story.broken and self.live.get((story.user, story.name)) is story:
                del self.live[story.user, story.name]  # it was idle

    def dies(self, worker: int, bound: list[Story]) -> None:
        """`bound`: the sequences with a slot at this worker."""
        self.kept.pop(worker, None)
        for asked in [asked for asked, at in self.running.items() if at == worker]:
            del self.running[asked]
            self.broken(self.of[asked])
        for story in bound:
            self.broken(story)

    def _living(self, worker: int) -> int:
        return sum(not kept.ended for kept in self.kept[worker].values())

    def left_at_workers(self) -> list[int | str]:
        """Ids for which some worker keeps state."""
        return [name for kept in self.kept.values() for name, one in kept.items() if not one.ended]


IDLE = 50 * MS
LIMITS = Limits(crashes=0, backoff_ns=2 * MS, backoff_max_ns=4 * MS, execution_ns=0, load_ns=0, leaving_ns=10**15)
GIVEN_UP = ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
OWN = 0
"""Stands for the id of a request without one, which is a separate sequence."""


def policy(max_batch: int, sequence: SequencePolicy, varies: bool = True) -> ModelPolicy:
    x = TensorSpec("x", "FP32", (-1 if varies else 1,))
    return ModelPolicy("m", 1, max_batch, (x,), (TensorSpec("y", "FP32", (-1,)),), sequence=sequence)


def direct(slots: int, utilization: float = 0.0, delay_ms: int = 0) -> SequencePolicy:
    return SequencePolicy(True, slots, IDLE, delay_ms * MS, utilization, id_control=IdControl("ID", "UINT64"))


def oldest(slots: int, preferred: tuple[int, ...] = (), delay_ms: int = 0, iterative: bool = False) -> SequencePolicy:
    return SequencePolicy(False, slots, IDLE, batching=BatchPolicy(preferred, delay_ms * MS), iterative=iterative)


POLICIES = {
    "flat": policy(0, direct(1)),
    "one slot": policy(1, direct(1)),
    "slots": policy(3, direct(3)),
    "half full": policy(4, direct(4, 0.5, 10), varies=False),
    "full": policy(2, direct(2, 1.0, 30)),
    "candidates": policy(2, oldest(3)),
    "preferred": policy(4, oldest(3, (2,), 10), varies=False),
    "flat candidates": policy(0, oldest(2)),
    "iterative": policy(2, oldest(3, iterative=True), varies=False),
}


class Watched(FakeWorker):
    """A worker that passes all events to the rules."""

    world: Sequenced

    def take_up(self) -> QueuedBatch | None:
        batch = super().take_up()
        for work in batch.work_items if batch is not None else ():
            self.world.begins(self, work)
        return batch

    def take(self, message: Any) -> None:
        super().take(message)
        for name in message.sequences if isinstance(message, EndSequences) else ():
            self.world.rules.told(self.peer, name)

    def finish(self, now: int, took: int = 0, rows_first: int = 0, error: tuple[str, str] | None = None) -> None:
        assert self.running is not None
        for work in self.running.work_items:
            self.world.rules.finishes(self.peer, self.world.asked[work.request], work.request in self.again)
        super().finish(now, took, rows_first, error)


put = sequence_scheduler.put
WORLDS: WeakKeyDictionary[State, Sequenced] = WeakKeyDictionary()


@pytest.fixture(autouse=True)
def _the_rules_hear_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def heard_put(state: State, version: Version, number: int, request: Request, now: int) -> None:
        WORLDS[state].put(version, number, request, now)

    monkeypatch.setattr(sequence_scheduler, "put", heard_put)


class Sequenced(World):
    """A world in which all links to workers are slow, and the rules get every event."""

    def __init__(self, model: ModelPolicy) -> None:
        super().__init__(LIMITS)
        assert model.sequence is not None
        self.rules = Rules(IDLE, model.sequence.slots, model.sequence.direct and model.max_batch > 0)
        self.asked: dict[int, Asked] = {}
        self.taken: set[Asked] = set()
        self.stories: dict[Sequence, Story] = {}
        WORLDS[self.core.state] = self

    def put(self, version: Version, number: int, request: Request, now: int) -> None:
        own = request.options is None
        put(self.core.state, version, number, request, now)
        asked = request.client.number, request.client_number
        assert request.options is not None
        if own:
            assert self.rules.must_take(asked, request.client.user, request.options.sequence, True, True, now)
        self.taken.add(asked)
        assert request.sequence is not None
        known = self.stories.setdefault(request.sequence, self.rules.of[asked])
        assert known is self.rules.of[asked], "the core has it in another sequence"

    def _spawn(self, effect: Any) -> None:
        super()._spawn(effect)
        plain = self.workers[effect.peer]
        worker = self.workers[effect.peer] = Watched(plain.peer, plain.name, plain.policy, plain.large)
        worker.world, worker.outbox = self, plain.outbox
        self.slow_to.add(effect.peer)
        self.slow_from.add(effect.peer)

    def tell(self, effect: Any) -> None:
        if isinstance(effect, Kill):
            assert effect.reason == "it is no longer needed", effect.reason
        if isinstance(effect, Send) and isinstance(effect.message, (Reply, Fail, FailHeld)):
            message = effect.message
            assert isinstance(message, Reply) or message.code != "INTERNAL", message
            given_up = not isinstance(message, Reply) and message.code in GIVEN_UP
            self.rules.answered((effect.peer, message.request), given_up, self.now)

    def begins(self, worker: FakeWorker, work: Work) -> None:
        request, options = self.core.state.requests[work.request], work.options
        assert options is not None
        asked = self.asked[work.request] = request.client.number, request.client_number
        start, end = options.sequence_start, options.sequence_end
        self.rules.begins(worker.peer, work.slot, asked, options.sequence, start, end)

    def sequence_slots(self) -> list[SequenceSlots]:
        generations = [version for model in self.core.state.models.values() for version in model.generations()]
        return [version.service.sequence_slots for version in generations if version.service.sequence_slots is not None]

    def bound_to(self, peer: int) -> list[Story]:
        version, instance = self.core.state.instances[peer]
        return (
            [self.stories[sequence] for sequence in version.service.sequence_slots.at(instance)]
            if version.service.sequence_slots
            else []
        )


class SequenceMachine(WorldMachine):
    world: Sequenced

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[Asked, bool] = {}
        self.sources = 0
        self.instances = 1
        self.parting: dict[Instance, set[Sequence]] = {}

    # ------------------------------------------------------------------------------------ tools

    def send(self, happened: list[tuple[int, Any]], together: bool = False) -> None:
        super().send(happened, together)
        if together:
            return
        for asked, expected in self.expected.items():
            assert (asked in self.world.taken) == expected, f"{asked} must {'' if expected else 'not '}be taken"
        self.expected.clear()

    def let_load(self) -> None:
        for worker in self.workers(lambda worker: worker.outbox):
            if isinstance(worker.outbox[0], events.Compiled):
                self.world.turn(self.world.heard(worker, 1))

    # ------------------------------------------------------------------------------------ rules

    @initialize(name=st.sampled_from(sorted(POLICIES)), instances=st.integers(1, 3))
    def begin(self, name: str, instances: int) -> None:
        self.model = POLICIES[name]
        self.world = Sequenced(self.model)
        self.instances = instances
        self.world.deploy(self.model, instances)
        self.let_load()
        self.connect(False)

    @precondition(lambda self: len(self.clients) < 4)
    @rule(other=st.booleans())
    def connect(self, other: bool) -> None:
        audience = "uid:2000" if other else "uid:1000"
        self.clients.append(self.world.connect(f"c{self.numbers}", audience=audience))

    def infer(self, client: FakeClient, name: int, start: bool, end: bool, shape: int = 1, timeout_ms: int = 0) -> Any:
        self.numbers += 1
        whole = (1, shape) if self.model.max_batch else (shape,)
        options = Options(sequence=name, sequence_start=start, sequence_end=end) if name else None
        x = Tensor("x", "FP32", whole, bytes(4 * shape))
        message = Infer(self.numbers, "m", 0, (x,), None, timeout_ms * 1000, options)
        client.sends(self.numbers)
        asked = client.peer, self.numbers
        if name:
            user = self.world.core.state.clients[client.peer].user
            self.expected[asked] = self.world.rules.must_take(asked, user, name, start, end, self.world.now)
        return client.peer, message

    @rule(
        which=st.integers(0, 9),
        name=st.integers(1, 5),
        flags=st.sampled_from(["", "", "", "start", "start", "end", "start end"]),
        shape=st.sampled_from([1, 1, 2]),
        timeout_ms=st.sampled_from([0, 0, 0, 0, 3, 15]),
        together=st.booleans(),
    )
    def ask(self, which: int, name: int, flags: str, shape: int, timeout_ms: int, together: bool) -> None:
        client = self.clients[which % len(self.clients)]
        shape = shape if self.model.inputs[0].dims == (-1,) else 1
        self.send([self.infer(client, name, "start" in flags, "end" in flags, shape, timeout_ms)], together)

    @rule(which=st.integers(0, 9), name=st.integers(1, 5), count=st.integers(1, 4), together=st.booleans())
    def whole_sequence(self, which: int, name: int, count: int, together: bool) -> None:
        client = self.clients[which % len(self.clients)]
        self.send([self.infer(client, name, n == 0, n == count - 1) for n in range(count)], together)

    @precondition(lambda self: self.model.sequence.iterative)
    @rule(which=st.integers(0, 9), count=st.integers(1, 2))
    def without_id(self, which: int, count: int) -> None:
        client = self.clients[which % len(self.clients)]
        self.send([self.infer(client, OWN, False, False) for _ in range(count)])

    @precondition(lambda self: any(client.open for client in self.clients))
    @rule(which=st.integers(0, 9), pick=st.integers(0, 30), together=st.booleans())
    def cancel(self, which: int, pick: int, together: bool) -> None:
        self.send([])
        busy = [client for client in self.clients if client.open]
        if busy:
            client = busy[which % len(busy)]
            number = sorted(client.open)[pick % len(client.open)]
            self.world.rules.broken(self.world.rules.of[client.peer, number])
            self.send([(client.peer, Cancel(number))], together)

    @precondition(lambda self: len(self.clients) > 1)
    @rule(which=st.integers(0, 9), really=st.integers(0, 3))
    def gone(self, which: int, really: int) -> None:
        if really:
            return
        self.send([])
        client = self.clients.pop(which % len(self.clients))
        for number in client.open:
            self.world.rules.answered((client.peer, number), True, self.world.now)
        self.world.gone(client)

    @precondition(lambda self: self.workers(lambda worker: worker.running))
    @rule(which=st.integers(0, 30), error=st.integers(0, 5), again=st.integers(0, 7))
    def finish(self, which: int, error: int, again: int) -> None:
        running = self.workers(lambda worker: worker.running)
        worker = running[which % len(running)]
        assert worker.running is not None
        if self.model.sequence is not None and self.model.sequence.iterative:
            worker.again = [w.request for place, w in enumerate(worker.running.work_items) if again >> place & 1]
        worker.finish(self.world.now, 0, 0, ("MODEL_FAILED", "no") if not error else None)

    @rule(ms=st.sampled_from([1, 4, 11, 60]))
    def time(self, ms: int) -> None:
        self.send([])
        self.world.advance(self.world.now + ms * MS)
        self.let_load()

    @rule(which=st.integers(0, 60))
    def crash(self, which: int) -> None:
        self.let_load()  # a version that cannot restart an instance refuses sequences, which these rules do not cover
        workers = self.workers(bool)
        if which < 6 and workers:
            self.send([])
            worker = workers[which % len(workers)]
            bound = self.world.bound_to(worker.peer)
            self.world.crash(worker)
            self.world.rules.dies(worker.peer, bound)

    @rule(instances=st.integers(1, 3), really=st.integers(0, 3))
    def scale(self, instances: int, really: int) -> None:
        """May scale up again while instances are still leaving."""
        if not really:
            self.deploy(self.sources, instances)

    @rule(really=st.integers(0, 5))
    def reload(self, really: int) -> None:
        if not really:
            self.sources += 1
            self.deploy(self.sources, self.instances)
            self.world.rules.generation += 1

    def deploy(self, source: int, instances: int) -> None:
        self.send([])
        specs = tuple(InstanceSpec(f"m_{index}") for index in range(instances))
        self.instances = instances
        self.world.turn([(0, events.Deploy("m", (events.Target(1, source, specs),)))])
        self.let_load()

    # ------------------------------------------------------------------------------------ what must be true

    @invariant()
    def first_come_first_served(self) -> None:
        """Each sequence that can have a slot has one, and no later sequence gets one before it."""
        if self.unsent or not hasattr(self, "world"):
            return
        for version in [version for model in self.world.core.state.models.values() for version in model.generations()]:
            sequence_slots = version.service.sequence_slots
            waiting = [s for s in sequence_slots.backlog if s.before is None] if sequence_slots is not None else []
            if sequence_slots is None or not waiting:
                continue
            for instance in version.instances:
                if instance.usable and not instance.retiring:
                    assert len(sequence_slots.at(instance)) == sequence_slots.policy.slots, (
                        "a slot is free, and somebody waits"
                    )

    @invariant()
    def who_leaves_takes_no_more(self) -> None:
        if hasattr(self, "world"):
            for instance, version in self.world.core.state.changes.retiring_instances.items():
                assert version.service.sequence_slots is not None
                now = set(version.service.sequence_slots.at(instance))
                assert now <= self.parting.setdefault(instance, now), "it has taken another one"

    @invariant()
    def nobody_idles(self) -> None:
        """No idle instance has a request that could run now."""
        if self.unsent or not hasattr(self, "world"):
            return
        for sequence_slots in self.world.sequence_slots():
            for instance, slots in sequence_slots.bound.items():
                ready = [s for s in slots if s is not None and s.requests and s.running is None]
                if ready and instance.usable and instance.idle:
                    version = ready[0].version
                    assert version.wake > self.world.now, "it could run, and does not"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.send([])
        self.finish_everything()
        world = self.world
        for client in self.clients:
            assert not client.open, f"never answered: {client.open}"
        assert not world.core.state.requests
        assert not world.core.state.sequences
        assert not any(
            sequence_slots.count or sequence_slots.latest or sequence_slots.waits
            for sequence_slots in world.sequence_slots()
        )
        assert all(sequence.state is SequenceState.ENDED for sequence in world.stories)
        assert not world.rules.left_at_workers()
        world.turn([(0, events.Drain(10 * MS))])
        self.finish_everything()
        assert world.drained
        assert not world.workers

    def is_quiet(self) -> bool:
        """Sequences that wait for their next request may remain."""
        due = self.world.core.deadline()
        return (due is None or due > self.world.now + LIMITS.leaving_ns // 2) and not self.world.core.state.requests


@pytest.mark.hypothesis
def test_sequence_rules_hold_under_random_events() -> None:
    run_machine(SequenceMachine, 80)
