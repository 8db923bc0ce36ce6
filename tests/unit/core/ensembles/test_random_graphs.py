"""Random ensembles, run by fake workers that compute, compared with direct computation.

A seed determines models, ensembles (also nested), requests, and the order of events. The memory of workers is checked:
blocks that are still read must exist, and all others must have been freed.

A model may send any number of responses to a request (`many`). For each response, all later steps are computed again.
Tensors are vectors (dims [-1]), matrices ([-1, -1]), conditions (BOOL [1]) and rows of these (BOOL [-1, 1]).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest

from shmserve.core import events
from shmserve.core.effects import Send
from shmserve.core.limits import Limits
from shmserve.core.owners.run import Run
from shmserve.core.owners.trace import Sample
from shmserve.core.policy import BatchPolicy, ModelPolicy, StepPolicy, TensorSpec
from shmserve.core.service import graph
from shmserve.core.state import WORKERS_FROM
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Cancel,
    Fail,
    FailHeld,
    Failure,
    Handle,
    Infer,
    More,
    Options,
    Part,
    Reply,
    Return,
    Tensor,
    Wanted,
)
from shmserve.protocol.worker_messages import Row, Work
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.world import World

Array = np.ndarray[Any, Any]
VECTOR, MATRIX, CONDITION, CONDITIONS = "vector", "matrix", "condition", "conditions"
DIMS = {VECTOR: (-1,), MATRIX: (-1, -1), CONDITION: (1,), CONDITIONS: (-1, 1)}
RANK = {VECTOR: 1, MATRIX: 2, CONDITION: 1, CONDITIONS: 2}
DTYPES = {VECTOR: "INT32", MATRIX: "INT32", CONDITION: "BOOL", CONDITIONS: "BOOL"}
ROWS = {VECTOR: MATRIX, CONDITION: CONDITIONS}
"""Kind of a row -> kind of the tensor of rows that a mapped step reads or makes."""
NUMPY = {"INT32": np.dtype("<i4"), "BOOL": np.dtype("?")}
PRIME = 1009


class Failed(Exception):
    """The model or the graph fails for this request."""


@dataclass
class Kind:
    """A model: `inputs` and `outputs` are kinds of tensors, by name. `steps` empty: it is not an ensemble."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    max_batch: int = 0
    optional: frozenset[str] = frozenset()
    salt: int = 0
    fragile: bool = False
    many: bool = False
    steps: list[StepPolicy] = field(default_factory=list)

    def policy(self, batching: BatchPolicy | None) -> ModelPolicy:
        inputs = tuple(_spec(name, kind, name in self.optional) for name, kind in self.inputs.items())
        outputs = tuple(_spec(name, kind, False) for name, kind in self.outputs.items())
        steps = tuple(self.steps) or None
        return ModelPolicy(
            self.name,
            1,
            self.max_batch,
            inputs,
            outputs,
            None if steps else batching,
            None,
            steps=steps,
            decoupled=self.many,
        )


def _spec(name: str, kind: str, optional: bool) -> TensorSpec:
    return TensorSpec(name, DTYPES[kind], DIMS[kind], optional)


def compute(kind: Kind, inputs: Mapping[str, Array]) -> list[dict[str, Array]]:
    """All responses of a model to a request, without the batch dimension."""
    total = kind.salt + sum((index + 1) * int(inputs[name].sum()) for index, name in enumerate(sorted(inputs)))
    if kind.fragile and total % 5 == 0:
        raise Failed(f"{kind.name} cannot")
    first = inputs[min(name for name in kind.inputs if name not in kind.optional)]
    return [_made(kind, first.shape[-1], total + 13 * number) for number in range(total % 5 if kind.many else 1)]


def _made(kind: Kind, width: int, total: int) -> dict[str, Array]:
    made = {}
    for index, (name, what) in enumerate(kind.outputs.items()):
        base = (np.arange(width) * (index + 2) + total) % PRIME
        if what == CONDITION:
            made[name] = np.array([(total + index) % 3 > 0])
        elif what == MATRIX:
            count = (total + index) % 5
            made[name] = ((base + np.arange(count)[:, None] * 7) % PRIME).astype("<i4").reshape(count, width)
        else:
            made[name] = base.astype("<i4")
    return made


def is_many(kinds: Mapping[str, Kind], name: str) -> bool:
    return kinds[name].many or any(is_many(kinds, step.model) for step in kinds[name].steps)


def answers(
    kinds: Mapping[str, Kind], name: str, inputs: Mapping[str, Array], wanted: Sequence[str] | None = None
) -> Iterator[dict[str, Array]]:
    """The responses of the model or ensemble, without skipped outputs. Raises Failed if it cannot continue."""
    kind = kinds[name]
    if not kind.steps:
        for made in compute(kind, inputs):
            yield {name: made[name] for name in wanted if name in made} if wanted is not None else made
        return
    outputs = tuple(kind.outputs) if wanted is None else tuple(wanted)
    yield from _Answers(kinds, kind, outputs).level(0, dict(inputs), set(kind.inputs))


class _Answers:
    """The responses of one ensemble. The level of a step is the number of steps with many responses that precede it."""

    def __init__(self, kinds: Mapping[str, Kind], kind: Kind, outputs: Sequence[str]) -> None:
        self.kinds, self.kind, self.outputs = kinds, kind, outputs
        self.maker = {tensor: index for index, step in enumerate(kind.steps) for _, tensor in step.outputs}
        self.needed = _needed(kind, outputs)
        self.read = _read_by(kind, self.needed, outputs)
        self.many = {index for index in self.needed if is_many(kinds, kind.steps[index].model)}
        self.levels = {index: self._level(index) for index in self.needed}
        sources = [self.levels[index] for index in self.many]
        if len(set(sources)) < len(sources) or any(kind.steps[index].mapped for index in self.many):
            raise Failed("not what can be followed")

    def _level(self, index: int) -> int:
        makers = [self.maker[name] for name in _reads(self.kind.steps[index]) if name in self.maker]
        return max((self._level(maker) + (maker in self.many) for maker in makers), default=0)

    def level(self, level: int, there: dict[str, Array], over: set[str]) -> Iterator[dict[str, Array]]:
        todo = {index for index in self.needed - self.many if self.levels[index] == level}
        while todo:
            for index in sorted(todo):
                step = self.kind.steps[index]
                if _reads(step) <= over:
                    there |= _step(self.kinds, step, there, self.read, set(self.maker))
                    over |= {tensor for _, tensor in step.outputs}
                    todo.remove(index)
        source = next((index for index in self.many if self.levels[index] == level), None)
        if source is None:
            yield {name: there[name] for name in self.outputs if name in there}
            return
        step = self.kind.steps[source]
        names = dict(step.outputs)
        over = over | set(names.values())
        given = _given(self.kinds, step, there, set(self.maker))
        if given is None:
            yield from self.level(level + 1, dict(there), set(over))
            return
        wanted = [own for own, tensor in step.outputs if tensor in self.read]
        for made in answers(self.kinds, step.model, given, wanted):
            found = {names[own]: array for own, array in made.items()}
            yield from self.level(level + 1, there | found, set(over))


def _reads(step: StepPolicy) -> set[str]:
    return {tensor for _, tensor in step.inputs} | ({step.condition} if step.condition else set())


def _needed(kind: Kind, outputs: Sequence[str]) -> set[int]:
    maker = {tensor: index for index, step in enumerate(kind.steps) for _, tensor in step.outputs}
    found: set[int] = set()
    todo = [maker[name] for name in outputs]
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            step = kind.steps[index]
            todo += [maker[t] for t in [*(t for _, t in step.inputs), step.condition] if t in maker]
    return found


def _read_by(kind: Kind, needed: set[int], outputs: Sequence[str]) -> set[str]:
    """Tensors that a step or the caller uses."""
    read = {tensor for index in needed for _, tensor in kind.steps[index].inputs}
    return read | {kind.steps[index].condition for index in needed} | set(outputs)


def _given(
    kinds: Mapping[str, Kind], step: StepPolicy, there: Mapping[str, Array], makers: set[str]
) -> dict[str, Array] | None:
    """The inputs of the step's model; None if it is skipped."""
    kind = kinds[step.model]
    if step.condition and not (step.condition in there and bool(there[step.condition].all())):
        return None
    given = {own: there[tensor] for own, tensor in step.inputs if tensor in there}
    lacking = [
        tensor
        for own, tensor in step.inputs
        if own not in given and (own not in kind.optional or tensor == step.mapped)
    ]
    if makers.intersection(lacking):
        return None
    if lacking and (step.mapped not in there or len(there[step.mapped])):
        raise Failed(f"{lacking} are missing")
    return given


def _step(
    kinds: Mapping[str, Kind], step: StepPolicy, there: Mapping[str, Array], read: set[str], makers: set[str]
) -> dict[str, Array]:
    """Tensors of the ensemble that the step computes; none if it is skipped."""
    given = _given(kinds, step, there, makers)
    if given is None:
        return {}
    wanted = [own for own, tensor in step.outputs if tensor in read]
    names = dict(step.outputs)
    if not step.mapped:
        (made,) = answers(kinds, step.model, given, wanted)
        return {names[own]: array for own, array in made.items()}
    rows_of = there[step.mapped]
    mapped = {own for own, tensor in step.inputs if tensor == step.mapped}
    rows = [
        next(answers(kinds, step.model, {own: a[row] if own in mapped else a for own, a in given.items()}, wanted))
        for row in range(len(rows_of))
    ]
    if not rows:
        return {names[own]: np.zeros((0, 0), "<i4") for own in wanted}
    put = {}
    for own in wanted:
        parts = [row[own] for row in rows if own in row]
        if parts and (len(parts) != len(rows) or len({part.shape for part in parts}) > 1):
            raise Failed(f"{own} is not there for all rows")
        if parts:
            put[names[own]] = np.stack(parts)
    return put


def models(random: Random, many: bool) -> dict[str, Kind]:
    """Some models that compute; `many`: the first one sends many responses."""
    found: dict[str, Kind] = {}
    for number in range(random.randint(2, 4)):
        batches = random.random() < 0.6
        count = random.randint(1, 3)
        inputs = {f"x{index}": VECTOR for index in range(count)}
        if not batches and random.random() < 0.3:
            inputs["x0"] = MATRIX
        optional = frozenset(name for name in inputs if name != "x0" and random.random() < 0.3)
        what = [VECTOR, VECTOR, CONDITION] if batches else [VECTOR, MATRIX, MATRIX, CONDITION]
        outputs = {f"y{index}": random.choice(what) for index in range(random.randint(1, 3))}
        max_batch = random.choice([1, 3, 8]) if batches else 0
        fragile = random.random() < 0.15
        found[f"m{number}"] = Kind(f"m{number}", inputs, outputs, max_batch, optional, random.randint(0, 999), fragile)
    found["m0"].many = many
    return found


def ensemble(random: Random, name: str, kinds: Mapping[str, Kind]) -> Kind | None:
    """An ensemble of these models; None if they do not fit together."""
    made = {f"i{index}": random.choice([VECTOR, VECTOR, MATRIX]) for index in range(random.randint(1, 3))}
    if random.random() < 0.3:
        made["ic"] = CONDITION
    inputs = dict(made)
    steps: list[StepPolicy] = []
    for _ in range(random.randint(1, 6)):
        model = random.choice(sorted(kinds))
        if is_many(kinds, model) and any(is_many(kinds, step.model) for step in steps) and random.random() < 0.9:
            continue  # two of them seldom make sense in one ensemble
        step = _random_step(random, model, kinds, made, len(steps))
        if step is not None:
            steps.append(step)
    made = {tensor: kind for tensor, kind in made.items() if tensor not in inputs}
    if not steps or not made:
        return None
    count = random.randint(1, len(made))
    outputs = {tensor: made[tensor] for tensor in sorted(random.sample(sorted(made), count))}
    optional = frozenset(tensor for tensor in inputs if tensor != "ic" and random.random() < 0.1)
    return Kind(name, inputs, outputs, 0, optional - {"i0"}, steps=random.sample(steps, len(steps)))


def _random_step(
    random: Random, name: str, kinds: Mapping[str, Kind], made: dict[str, str], number: int
) -> StepPolicy | None:
    kind = kinds[name]
    by_kind = {what: [tensor for tensor, found in made.items() if found == what] for what in DIMS}
    reads: list[tuple[str, str]] = []
    mapped = ""
    for own, what in kind.inputs.items():
        if own in kind.optional and random.random() < 0.5:
            continue
        rows = by_kind[ROWS[what]] if what in ROWS else []
        if rows and not mapped and random.random() < 0.5:
            mapped = random.choice(rows)
            reads.append((own, mapped))
        elif by_kind[what] and by_kind[what] != [mapped]:
            reads.append((own, random.choice(by_kind[what])))
        else:
            return None
    if [tensor for _, tensor in reads].count(mapped) > 1:
        return None
    condition = random.choice(by_kind[CONDITION]) if by_kind[CONDITION] and random.random() < 0.4 else ""
    makes = {own: what for own, what in kind.outputs.items() if not mapped or what in ROWS}
    if not makes:
        return None
    for own in makes:
        made[f"t{number}{own}"] = ROWS[makes[own]] if mapped else makes[own]
    outputs = tuple(sorted((own, f"t{number}{own}") for own in makes))
    return StepPolicy(name, 0, tuple(sorted(reads)), outputs, mapped, condition)


def example(random: Random, what: str) -> Array:
    if what == CONDITION:
        return np.array([random.random() < 0.6])
    shape = (random.randint(0, 4), 3) if what == MATRIX else (3,)
    return np.array([random.randint(0, 99) for _ in range(int(np.prod(shape)))], "<i4").reshape(shape)


MS = 10**6
SEEDS = int(os.environ.get("SHMSERVE_ENSEMBLE_SEEDS", "50"))
Place = tuple[int, int]


class Computing(World):
    """Workers that compute, and the memory of tensors."""

    def __init__(self, random: Random) -> None:
        super().__init__(Limits(backoff_ns=MS, backoff_max_ns=MS, execution_ns=0, load_ns=0))
        self.random = random
        self.kinds: dict[str, Kind] = {}
        self.memory: dict[int, dict[int, bytes]] = {}
        self.made_by: dict[Place, list[tuple[Run, str]]] = {}
        """Blocks of workers: the tensors that they are, or are a part of, from the innermost run to the outermost."""
        self.given: dict[tuple[int, int], int] = {}
        """Number of responses of a worker to a request."""
        self.inline = random.choice([0, 12, 1000])
        """Maximum size of tensors in messages."""

    def deploy_kind(self, kind: Kind) -> None:
        self.kinds[kind.name] = kind
        batching = self.random.choice([None, BatchPolicy(), BatchPolicy(), BatchPolicy(preserve_ordering=True)])
        self.deploy(kind.policy(batching), self.random.randint(1, 2))

    def _spawn(self, effect: Any) -> None:
        super()._spawn(effect)
        self.workers[effect.peer].compute = self.compute

    def made(self, worker: FakeWorker, work: Work) -> list[dict[str, Array]]:
        """All responses of the worker's model; raises Failed if there are none."""
        kind = self.kinds[worker.policy.name]
        given = {tensor.name: self.read(tensor) for tensor in work.inputs}
        if kind.max_batch:
            assert all(array.shape[0] == 1 for array in given.values()), "each request of these tests is one row"
            given = {name: array[0] for name, array in given.items()}
        return compute(kind, given)

    def compute(self, worker: FakeWorker, work: Work) -> Row:
        kind = self.kinds[worker.policy.name]
        try:
            made = self.made(worker, work)[self.given.get((worker.peer, work.request), 0)]
        except Failed as error:
            return Row(work.request, (), Failure("MODEL_FAILED", str(error)))
        wanted = work.outputs if work.outputs is not None else [Wanted(name) for name in kind.outputs]
        tensors = []
        for output in wanted:
            array = made[output.name]
            tensors.append(self._place(worker, work, output, array[None] if kind.max_batch else array))
        return Row(work.request, tuple(tensors))

    def answer_again(self, worker: FakeWorker, request: int) -> bool:
        """Sends one more response to a streamed request. False: its window is full."""
        work, key = worker.streams[request], (worker.peer, request)
        if request in worker.cancelled:
            worker.part(request, error=("CANCELLED", "given up"))
            return True
        try:
            remaining = len(self.made(worker, work)) - self.given.get(key, 0)
        except Failed as error:
            worker.part(request, error=("MODEL_FAILED", str(error)))
            return True
        if remaining and not worker.room[request]:
            return False
        worker.part(request, not remaining or (remaining == 1 and self.random.random() < 0.5), not remaining)
        self.given[key] = self.given.get(key, 0) + 1
        return True

    def _place(self, worker: FakeWorker, work: Work, output: Wanted, array: Array) -> Tensor:
        content = array.tobytes()
        dtype = "BOOL" if array.dtype == bool else "INT32"
        data: Any = content
        if output.place is not None:
            assert len(content) <= output.place.size
            data = (Handle(output.place.segment, output.place.offset, len(content)),)
        elif len(content) > (max(self.inline, 1) if work.inline else 1):
            data = (worker.allocate(work.audience, len(content)),)
            self.made_by[data[0].segment, data[0].offset] = self._tensors(work.request, output.name)
        if isinstance(data, tuple):
            self.memory.setdefault(data[0].segment, {})[data[0].offset] = content
        return Tensor(output.name, dtype, array.shape, data)

    def _tensors(self, request: int, name: str) -> list[tuple[Run, str]]:
        """The names of the output in the run of its step, in the enclosing run, and so on."""
        state, found = self.core.state, []
        while state.requests[request].is_step:
            run = state.runs[state.requests[request].parent]
            outputs = dict(run.graph.steps[run.positions[request].step].outputs)
            if name not in outputs:
                break
            name, request = outputs[name], run.request.number
            found.append((run, name))
        return found

    def read(self, tensor: Tensor) -> Array:
        data = tensor.data
        if isinstance(data, tuple):
            data = b"".join(self._bytes(handle) for handle in data)
        assert isinstance(data, bytes)
        return np.frombuffer(data, NUMPY[tensor.dtype]).reshape(tensor.shape)

    def _bytes(self, handle: Handle) -> bytes:
        blocks = self.memory[handle.segment]
        start = max((offset for offset in blocks if offset <= handle.offset), default=-1)
        found = blocks[start][handle.offset - start :][: handle.size]
        assert len(found) == handle.size, "read where nothing is any more"
        return found

    def _send(self, effect: Send) -> None:
        super()._send(effect)
        if isinstance(effect.message, Return) and effect.peer >= WORKERS_FROM:
            for handle in effect.message.handles:
                del self.memory[handle.segment][handle.offset]

    # ------------------------------------------------------------------------------------ what may still be there

    def check_memory(self) -> None:
        """No block of a running worker is kept after its last reader."""
        for segment, blocks in self.memory.items():
            if segment >> OWNER_SHIFT in self.workers:
                for offset in blocks:
                    assert self._is_needed((segment, offset)), self.made_by[segment, offset]

    def _is_needed(self, place: Place) -> bool:
        for run, name in self.made_by[place]:
            if self.core.state.runs.get(run.request.number) is run:
                return run.failure is not None or self._is_read(run, name)
        held = [handle for client in self.clients.values() for handle in client.holds]
        for request in self.core.state.requests.values():  # and waiting requests
            if isinstance(request.reply, Reply):
                held += references(request.reply.outputs)
        return any((handle.segment, handle.offset) == place for handle in held)

    def _is_read(self, run: Run, name: str) -> bool:
        if run.levels.sources:  # made once, or with each response: the end shows that nothing is forgotten
            return True
        (iteration,) = run.iterations()
        out = {spot.step for spot in run.positions.values()}
        over = {index for index, waits in iteration.pending.items() if not waits} - out
        readers = [index for index in run.graph.readers.get(name, ()) if index in run.needed]
        return name in run.wanted or run.graph.maker[name] in out or any(index not in over for index in readers)


class Story:
    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.world = Computing(random)
        kinds = models(random, seed % 2 == 1)
        self.ensembles: list[Kind] = []
        for number in range(random.randint(1, 3)):
            made = ensemble(random, f"e{number}", kinds)
            if made is not None:
                kinds[made.name] = made
                self.ensembles.append(made)
        for kind in kinds.values():
            self.world.deploy_kind(kind)
        self.clients = [self.world.connect(name, "lane") for name in "ab"]
        if seed % 4 >= 2:
            self.world.core.state.observers.traces.samples[""] = Sample(2, tensors=True)
        self.numbers = 0
        self.asked: dict[int, tuple[str, dict[str, Array], tuple[str, ...] | None]] = {}
        self.places: dict[int, dict[str, Handle]] = {}
        self.offsets = 0
        self.found: dict[int, list[dict[str, Array]]] = {}
        """All responses so far of streamed requests."""

    def ask(self) -> None:
        """A request to an ensemble, or to a model that is also a step's."""
        random, world = self.random, self.world
        client = random.choice(self.clients)
        kind = random.choice([*self.ensembles, *self.ensembles, *world.kinds.values()])
        given = {
            name: example(random, what)
            for name, what in kind.inputs.items()
            if name not in kind.optional or random.random() < 0.5
        }
        wanted = None
        if random.random() < 0.5:
            wanted = tuple(random.sample(sorted(kind.outputs), random.randint(1, len(kind.outputs))))
        self.numbers += 1
        number = self.numbers
        tensors = []
        for name, array in given.items():
            whole = array[None] if kind.max_batch else array
            inline = kind.inputs[name] == "condition" or random.random() < 0.6
            data: Any = whole.tobytes() if inline else (self._put(client, whole.tobytes()),)
            tensors.append(Tensor(name, "BOOL" if array.dtype == bool else "INT32", whole.shape, data))
        outputs = None
        if wanted is not None:
            outputs = tuple(Wanted(name, self._where(client, kind, name, number)) for name in wanted)
        self.asked[number] = kind.name, given, wanted
        window = random.choice([1, 2, 30]) if is_many(world.kinds, kind.name) or random.random() < 0.1 else 0
        client.sends(number, window)
        options = Options(window=window) if window else None
        world.turn([(client.peer, Infer(number, kind.name, 0, tuple(tensors), outputs, 0, options))])

    def _segment(self, client: FakeClient) -> int:
        if not client.own:
            self.world.turn([(client.peer, self.world.own_segment(client, 1 << 30))])
        return min(client.own)

    def _put(self, client: FakeClient, content: bytes) -> Handle:
        self.offsets += 4096
        handle = Handle(self._segment(client), self.offsets, len(content))
        self.world.memory.setdefault(handle.segment, {})[handle.offset] = content
        return handle

    def _where(self, client: FakeClient, kind: Kind, name: str, number: int) -> Handle | None:
        """Sometimes a place in the client's own memory; not for streamed outputs or conditions."""
        steps = [step for step in kind.steps for _, tensor in step.outputs if tensor == name]
        nested = any(self.world.kinds[step.model].steps for step in steps)
        if self.random.random() < 0.7 or nested or any(step.mapped for step in steps):
            return None
        if is_many(self.world.kinds, kind.name):
            return None
        if kind.outputs[name] == "condition":
            return None
        self.offsets += 4096
        place = Handle(self._segment(client), self.offsets, 4096)
        self.places.setdefault(number, {})[name] = place
        return place

    def proceed(self) -> bool:
        """One worker finishes its batch or sends another response, or a client extends its window. False: nothing can
        continue."""
        alive = [worker for worker in self.world.workers.values() if not worker.dead]
        todo: list[tuple[Any, int]] = [(worker, 0) for worker in alive if worker.running is not None]
        todo += [(worker, request) for worker in alive for request in worker.streams]
        todo += [(client, request) for client in self.clients for request in client.open if request in client.windows]
        self.random.shuffle(todo)
        for who, request in todo:
            if isinstance(who, FakeClient):
                if who.windows[request] > 2:
                    continue
                who.windows[request] += 1
                self.world.turn([(who.peer, More(request, 1))])
            elif not request:
                who.finish(self.world.now)
                self.world.settle()
            elif self.world.answer_again(who, request):
                self.world.settle()
            else:
                continue
            return True
        return False

    def give_back(self) -> None:
        for client in self.clients:
            held = list(client.holds.elements())
            for handle in held:
                client.give_back(handle)
            if held:
                self.world.turn([(client.peer, Return(tuple(held)))])

    def look(self, calm: bool) -> None:
        """Checks that each answer is correct."""
        for client in self.clients:
            for number, parts in client.parts.items():
                found = self.found.setdefault(number, [])
                kind = self.world.kinds[self.asked[number][0]]
                found += [self._arrays(kind, part.outputs, {}) for part in parts[len(found) :]]
            for number in client.order:
                self._look_at(number, client.answers[number], calm)
            client.order.clear()

    def _look_at(self, number: int, answer: Any, calm: bool) -> None:
        name, given, wanted = self.asked[number]
        kind = self.world.kinds[name]
        found = self.found.get(number, [])
        if isinstance(answer, Reply):
            assert not is_many(self.world.kinds, name), f"{name} is decoupled, and gave {answer}"
            found = [self._arrays(kind, answer.outputs, self.places.get(number, {}))]
        failed = False
        expected = []
        try:
            for made in answers(self.world.kinds, name, given, wanted):
                expected.append({output: array.tolist() for output, array in made.items()})
        except Failed:
            failed = True
        told = [{output: array.tolist() for output, array in arrays.items()} for arrays in found]
        if isinstance(answer, Part):  # the end and an empty response look alike
            told, expected = [one for one in told if one], [one for one in expected if one]
        if isinstance(answer, (Fail, FailHeld)):
            assert failed or not calm, f"{name} failed: {answer}"
            assert failed or answer.code in ("MODEL_FAILED", "CANCELLED"), answer
            assert told == expected[: len(told)], name
        else:
            assert not failed, f"{name} answered {answer}, and should have failed"
            assert told == expected, name

    def _arrays(self, kind: Kind, outputs: tuple[Tensor, ...], places: dict[str, Handle]) -> dict[str, Array]:
        found = {}
        for tensor in outputs:
            array = self.world.read(tensor)
            assert array.ndim == RANK[kind.outputs[tensor.name]] + (kind.max_batch > 0)
            found[tensor.name] = array[0] if kind.max_batch else array
            if tensor.name in places and array.size:
                assert [handle.segment for handle in references((tensor,))] == [places[tensor.name].segment]
        return found

    def end(self, calm: bool) -> None:
        while self.proceed():
            pass
        self.world.advance(self.world.now + 50 * MS)
        while self.proceed():
            self.world.advance(self.world.now + 50 * MS)
        self.look(calm)
        self.give_back()
        state = self.world.core.state
        assert not state.requests
        assert not state.ledger.holds
        assert not state.observers.traces.active
        assert all(not client.open and not client.held_inputs for client in self.clients)
        for worker in self.world.workers.values():
            assert not worker.out, f"never went back to {worker.name}: {worker.out}"
        versions = [version for model in state.models.values() for version in model.generations()]
        assert not any(version.users for version in versions)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_ensembles(seed: int) -> None:
    story = Story(seed)
    for _ in range(12):
        for _ in range(story.random.randint(0, 3)):
            story.ask()
            story.world.check_memory()
        for _ in range(story.random.randint(0, 6)):
            story.proceed()
            story.world.check_memory()
        story.look(True)
        if story.random.random() < 0.3:
            story.give_back()
    story.end(True)


@pytest.mark.parametrize("seed", range(1_000_000, 1_000_000 + SEEDS))
def test_random_ensembles_with_random_failures(seed: int) -> None:
    """Workers crash, requests are cancelled, clients disconnect: all other results are right, and nothing is left."""
    story = Story(seed)
    world, random = story.world, story.random
    for _ in range(40):
        what = random.random()
        if what < 0.4:
            story.ask()
        elif what < 0.8:
            story.proceed()
        elif what < 0.88:
            if world.workers:
                world.crash(random.choice(list(world.workers.values())))
            world.advance(world.now + random.choice([0, 2]) * MS)
        elif what < 0.97:
            client = random.choice(story.clients)
            if client.open:
                world.turn([(client.peer, Cancel(random.choice(sorted(client.open))))])
        else:
            client = random.choice(story.clients)
            story.look(False)
            story.clients.remove(client)
            world.gone(client)
            story.clients.append(world.connect("c", "lane"))
        story.look(False)
    story.end(False)
    world.turn([(0, events.Drain(10 * MS))])
    world.settle()
    assert world.drained


def test_shapes_follow_the_reshape_of_a_tensor() -> None:
    for shape, dims, reshaped, batches, expected in (
        ((8,), (8,), (4, 1, 2), False, (4, 1, 2)),
        ((3, 8), (8,), (4, 1, 2), True, (3, 4, 1, 2)),
        ((3, 5, 1, 7), (-1, 1, -1), (-1, -1), True, (3, 5, 7)),
        ((1,), (1,), (), False, ()),
        ((8,), (8,), None, False, (8,)),
        ((9,), (8,), (4, 1, 2), False, (9,)),
    ):
        assert graph.reshape(shape, dims, reshaped, batches) == expected
