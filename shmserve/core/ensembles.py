"""Ensembles run: each step starts when its inputs are there, and the tensors stay where they were made.

A Run is one request to an ensemble. Its steps are requests like any other, in the queues of their models, except that
they are answered to the run. The rule of the file: an answer to a step is only noted when it comes (`Run.results`);
what follows from it is done by `advance`, after all events of the turn, and so never in the midst of a batch.

A tensor that a step made is kept until the last step that reads it has left its worker, or for the caller's answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core import graph
from shmserve.core.ends import Ends
from shmserve.core.graph import Graph
from shmserve.core.intake import Intake
from shmserve.core.request import Request
from shmserve.core.state import State
from shmserve.core.states import RequestState
from shmserve.core.statistics import Failure
from shmserve.core.versions import Version
from shmserve.errors import Internal, InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.messages import Fail, Handle, Options, Reply, Tensor, Wanted

INTERNAL = "internal"
"""The audience of what only workers read."""
_CHAINED, _QUEUED, _SENT, _DONE = RequestState.CHAINED, RequestState.QUEUED, RequestState.SENT, RequestState.DONE

_DEADLOCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"


class Kept(Struct, eq=False):
    """A tensor of the ensemble that exists. `readers`: steps that have not read it yet, and the caller."""

    tensor: Tensor
    readers: int
    made: bool
    """By a step, and so held here; otherwise it is the caller's."""


class Run(Struct, eq=False):
    """`out` are the requests of steps that have not ended. `over`: the caller has been answered."""

    request: Request
    graph: Graph
    needed: frozenset[int]
    wanted: dict[str, Wanted | None]
    held: dict[tuple[str, int], Version]
    """The models of all its steps, and of the steps of these. A run inside of another has what that one has."""
    members: dict[int, Version] = {}
    tensors: dict[str, Kept] = {}
    skipped: set[str] = set()
    """Tensors that will not be made, as a condition said no."""
    absent: set[str] = set()
    """Tensors that a model was to make, and did not."""
    pending: dict[int, int] = {}
    """For each step that has not started the tensors that it waits for."""
    ready: list[int] = []
    out: dict[int, Request] = {}
    left: dict[int, int] = {}
    """For each step that has started the rows whose answers have not come."""
    rows: dict[int, list[tuple[Tensor, ...]]] = {}
    """Answers of the rows of mapped steps."""
    results: list[tuple[Request, Reply | Fail]] = []
    failure: tuple[str, str] | None = None
    over: bool = False
    times: list[int] = []
    """What the batches of its steps took: input, infer, output ns."""

    def told(self, request: Request, message: Reply | Fail) -> None:
        self.results.append((request, message))
        spent: Sequence[int] = ()
        if request.chain is not None:
            spent = request.chain.times
        elif request.batch is not None and request.batch.times:
            taken, ready, computed, placed = request.batch.times
            spent = (ready - taken, computed - ready, placed - computed)
        for index, ns in enumerate(spent):
            self.times[index] += ns

    def fail(self, code: str, text: str) -> None:
        """The first failure is the one that is told."""
        if self.failure is None:
            self.failure = code, text


class Ensembles:
    def __init__(self, state: State, ends: Ends, intake: Intake) -> None:
        self._state = state
        self._ends = ends
        self._intake = intake

    # ------------------------------------------------------------------------------------ beginning

    def begin(self, request: Request, now: int) -> None:
        """A request to an ensemble that was found good, and is in the tables."""
        version = request.version
        assert version.graph is not None
        found = version.graph
        wanted: dict[str, Wanted | None] = dict.fromkeys(found.outputs)
        if request.outputs is not None:
            wanted = {output.name: output for output in request.outputs}
        held = request.run.held if request.run is not None else {}
        run = Run(request, found, found.needed(tuple(wanted)), wanted, held, times=[0, 0, 0])
        request.move(_CHAINED)
        request.chain = run
        version.users += 1
        self._state.stirred[run] = None
        try:
            self._take_members(run)
        except ServeError as error:
            run.fail(error.code, error.message)
            return
        given = {tensor.name: tensor for tensor in request.inputs}
        for index in run.needed:
            waits = found.waits[index]
            # An input that the caller may leave out, and has left out, is nothing to wait for.
            run.pending[index] = sum(name in found.maker or name in given for name in waits)
            if not run.pending[index]:
                run.ready.append(index)
        for name, tensor in given.items():
            self._appear(run, name, tensor, False)

    def _take_members(self, run: Run) -> None:
        for index in run.needed:
            step = run.graph.steps[index]
            run.members[index] = self._hold(run.held, step.model, step.version, run.request.options)

    def _hold(self, held: dict[tuple[str, int], Version], name: str, number: int, options: Options | None) -> Version:
        """The version that all steps of this name and number are run by, also when another has taken over."""
        member = held.get((name, number))
        if member is None:
            if options is not None and options.sequence:  # which goes on where it began
                member = self._intake.sequencer.version_of(name, number, options)
            member = member or self._state.look_up(name, number)
            if member.decoupled:  # since this very turn: otherwise the ensemble would not be served
                text = "may answer a request many times; ensembles cannot follow that"
                raise Unavailable(f"model '{name}' of a step {text}")
            held[name, number] = member
            member.users += 1
            for step in member.graph.steps if member.graph is not None else ():
                self._hold(held, step.model, step.version, options)
        return member

    def _follow(self, run: Run, index: int) -> None:
        """Of a sequence that goes on: its START may have come in this very turn, by way of another generation than the
        one that this run has held since it began."""
        step, options = run.graph.steps[index], run.request.options
        if options is None or not options.sequence or run.members[index].places is None:
            return
        member = self._intake.sequencer.version_of(step.model, step.version, options)
        if member is not None and member is not run.members[index]:
            run.members[index] = member
            key = (step.model, -1 - id(member))  # beside those that were named
            if key not in run.held:
                run.held[key] = member
                member.users += 1

    def _appear(self, run: Run, name: str, tensor: Tensor | None, made: bool) -> None:
        """The tensor is there; or, None, will never be."""
        readers = [index for index in run.graph.readers.get(name, ()) if index in run.needed]
        if tensor is not None:
            count = len(readers) + (made and name in run.wanted)
            kept = Kept(tensor, count, made)
            if count:
                run.tensors[name] = kept
            elif made:
                self._let_go(run, kept)
        for index in readers:
            run.pending[index] -= 1
            if not run.pending[index]:
                run.ready.append(index)

    # ------------------------------------------------------------------------------------ going on

    def advance(self, run: Run, now: int) -> None:
        """After answers have come, or the caller has gone."""
        if run.request.chain is None:  # all of it has been seen to
            return
        results, run.results = run.results, []
        for request, message in results:
            if isinstance(message, Fail):
                self._failed(run, request, message)
            elif run.failure is not None:
                self._drop(run, graph.handles_of(message.outputs))
            else:
                self._answered(run, request, message)
        while run.ready and run.failure is None:
            try:
                self._start(run, run.ready.pop(0), now)
            except ServeError as error:
                self._fail(run, error)
        if run.failure is not None and not run.over:
            self._answer_failure(run, now)
        elif not run.out and not run.results and not run.over:  # what was kept has come back at once
            self._answer(run, now)
        if run.over and not run.out:
            self._close(run)

    def _fail(self, run: Run, error: ServeError) -> None:
        run.fail(error.code, f"in ensemble '{run.request.version.model}', {error.message}")

    def _failed(self, run: Run, request: Request, message: Fail) -> None:
        index, row = request.step
        where = f"row {row} of step {index}: " if run.graph.steps[index].mapped else ""
        run.fail(message.code, f"in ensemble '{run.request.version.model}', {where}{message.text}")

    def _answered(self, run: Run, request: Request, message: Reply) -> None:
        index, row = request.step
        run.left[index] -= 1
        rows = run.rows.get(index)
        if rows is not None:
            rows[row] = message.outputs
            if run.left[index]:
                return
            del run.rows[index]
        try:
            outputs = self._gathered(run, index, rows) if rows is not None else message.outputs
        except ServeError as error:
            self._fail(run, error)
            for tensors in rows or ():
                self._drop(run, graph.handles_of(tensors))
            return
        self._finish_step(run, index, {tensor.name: tensor for tensor in outputs})

    def _gathered(self, run: Run, index: int, rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
        """The answers of all rows of a mapped step, put together."""
        policy = run.members[index].policy
        assert policy is not None
        tensors: dict[str, list[Tensor]] = {}
        for row in rows:
            for tensor in row:
                tensors.setdefault(tensor.name, []).append(tensor)
        for name, found in tensors.items():
            if len(found) != len(rows):
                raise InvalidRequest(f"'{name}' of step {index} came for {len(found)} of {len(rows)} rows only")
        return [graph.together(found, policy.max_batch > 0) for found in tensors.values()]

    def _finish_step(self, run: Run, index: int, outputs: dict[str, Tensor]) -> None:
        """It has left its worker: what it read may go, what it made is there."""
        for own, name in run.graph.steps[index].outputs:
            made = outputs.get(own)
            if made is None:  # an ensemble may have had its reasons
                (run.skipped if run.members[index].graph is not None else run.absent).add(name)
            self._appear(run, name, made and Tensor(name, made.dtype, made.shape, made.data), True)
        self._have_read(run, index)

    def _have_read(self, run: Run, index: int) -> None:
        for name in run.graph.waits[index]:
            kept = run.tensors.get(name)
            if kept is not None:
                kept.readers -= 1
                if not kept.readers:
                    del run.tensors[name]
                    self._let_go(run, kept)

    def _let_go(self, run: Run, kept: Kept) -> None:
        if kept.made and isinstance(kept.tensor.data, tuple):
            self._drop(run, kept.tensor.data)

    def _drop(self, run: Run, handles: tuple[Handle, ...] | list[Handle]) -> None:
        self._ends.drop(run.request.client, handles)

    # ------------------------------------------------------------------------------------ a step

    def _start(self, run: Run, index: int, now: int) -> None:
        self._follow(run, index)
        step, member = run.graph.steps[index], run.members[index]
        policy = member.policy
        assert policy is not None
        if step.condition and not self._holds(run, step.condition):
            self._skip(run, index)
            return
        required = {spec.name for spec in policy.inputs if not spec.optional}
        inputs = []
        for own, name in step.inputs:
            kept = run.tensors.get(name)
            if kept is not None:
                inputs.append((own, name, kept.tensor))
            elif own in required or name == step.mapped:
                if name in run.absent:
                    raise Internal(_DEADLOCK)
                if name in run.skipped:
                    self._skip(run, index)
                    return
        if not step.mapped:
            run.left[index] = 1
            self._ask(run, index, 0, [(own, tensor) for own, _, tensor in inputs], False, now)
            return
        over = run.tensors.get(step.mapped)
        if over is None:
            raise InvalidRequest(f"step {index} is mapped over '{step.mapped}', which is not there")
        rows = graph.rows_of(over.tensor) if over.tensor.shape[:1] != (0,) else []
        if not rows:
            specs = {spec.name: spec for spec in policy.outputs}
            self._finish_step(run, index, {own: graph.empty(own, specs[own]) for own, _ in step.outputs})
            return
        run.left[index] = len(rows)
        run.rows[index] = [() for _ in rows]
        for number, row in enumerate(rows):
            mine = [(own, row if name == step.mapped else tensor) for own, name, tensor in inputs]
            try:
                self._ask(run, index, number, mine, len(rows) > 1, now)
            except ServeError as error:
                raise type(error)(f"row {number} of step {index}: {error.message}") from error

    def _holds(self, run: Run, name: str) -> bool:
        kept = run.tensors.get(name)
        return kept is not None and graph.is_true(kept.tensor)

    def _skip(self, run: Run, index: int) -> None:
        for _, name in run.graph.steps[index].outputs:
            run.skipped.add(name)
            self._appear(run, name, None, True)
        self._have_read(run, index)

    def _ask(self, run: Run, index: int, row: int, given: list[tuple[str, Tensor]], outside: bool, now: int) -> None:
        """One request to the model of a step."""
        state, parent, member = self._state, run.request, run.members[index]
        step, policy, checker = run.graph.steps[index], member.policy, member.checker
        assert policy is not None
        assert checker is not None
        batches = policy.max_batch > 0
        dims = {spec.name: spec.dims for spec in policy.inputs}
        inputs = tuple(
            Tensor(own, tensor.dtype, graph.fit(tensor.shape, dims.get(own, tensor.shape), batches), tensor.data)
            for own, tensor in given
        )
        outputs, final = self._wanted(run, index)
        outside = outside or (final and parent.outside)
        rows, signature, inline, _ = checker.check(inputs, outputs)
        options = _passed_on(parent.options)
        client = parent.client
        if member.graph is None and all(instance.over for instance in member.instances):
            raise Unavailable(f"{member.label} has ended meanwhile{member.reason and f': {member.reason}'}")
        self._intake.check_step(client, member, inline, now)
        level = 0
        if not member.plain:
            heard = _without_sequence(options) if member.places is None and member.graph is None else options
            level = self._intake.level(client, member, step.version, heard, rows, now)
        segments = tuple(graph.check_parts(inputs))
        inline += graph.HANDLE_BYTES * len(segments)
        segments += tuple(wanted.place.segment for wanted in outputs if wanted.place is not None)
        if segments:
            state.ledger.use(segments)
        number = state.next_number()
        request = Request(
            number, parent.client, 0, member, inputs, outputs, options, rows, rows or 1, inline,
            signature, segments, (), (), now, level, deadline=parent.deadline,
            audience=parent.audience if final else INTERNAL, run=run, step=(index, row), outside=outside,
            special=True,
        )  # fmt: skip
        state.requests[number] = run.out[number] = request
        client.steps += 1
        self._intake.put(member, step.version, request, now)

    def _wanted(self, run: Run, index: int) -> tuple[tuple[Wanted, ...], bool]:
        """What is asked of the model of a step; and whether some of it is for the caller."""
        step = run.graph.steps[index]
        found, final = [], False
        for own, name in step.outputs:
            wanted = run.wanted.get(name)
            final = final or name in run.wanted
            if wanted is None or (wanted.place is None and not wanted.classes):
                if name in run.wanted or any(reader in run.needed for reader in run.graph.readers.get(name, ())):
                    found.append(Wanted(own))
                continue
            if wanted.classes and name in run.graph.readers:
                raise Unsupported(f"output '{name}' is read by other steps, and cannot come as classes")
            if wanted.place is not None and step.mapped:
                raise Unsupported(
                    f"output '{name}' comes in parts of a mapped step, and cannot be placed by the caller"
                )
            found.append(Wanted(own, wanted.place, wanted.classes))
        return tuple(found), final

    # ------------------------------------------------------------------------------------ the end

    def _answer(self, run: Run, now: int) -> None:
        """All steps are done."""
        request, policy = run.request, run.request.version.policy
        assert policy is not None
        dims = {spec.name: spec.dims for spec in policy.outputs}
        outputs = []
        for name, wanted in run.wanted.items():
            kept = run.tensors.get(name)
            if kept is not None:
                shape = kept.tensor.shape
                if wanted is None or not wanted.classes:
                    shape = graph.fit(shape, dims[name], policy.max_batch > 0)
                outputs.append(Tensor(name, kept.tensor.dtype, shape, kept.tensor.data))
            elif name not in run.skipped:
                self._fail(run, Internal(_DEADLOCK))
                self._answer_failure(run, now)
                return
        try:
            graph.check_parts(outputs)
        except ServeError as error:
            self._fail(run, error)
            self._answer_failure(run, now)
            return
        statistics = request.version.statistics
        statistics.answered([request.arrived], request.cost, request.arrived, now)
        statistics.ensemble_done(run.times, now)
        self._ends.pass_on(request, graph.handles_of(outputs))
        run.over = True
        self._ends.deliver(request, Reply(request.client_number, request.version.number, tuple(outputs)))

    def _answer_failure(self, run: Run, now: int) -> None:
        """Steps under way are dropped, or left alone where a worker has them; the caller is told now."""
        assert run.failure is not None
        run.over = True
        request, (code, text) = run.request, run.failure
        for step in list(run.out.values()):
            self._give_up(step)
        request.version.statistics.failed(
            Failure.CANCELED if code == "CANCELLED" else Failure.OTHER, now - request.arrived
        )
        if not run.out:
            self._ends.deliver(request, Fail(request.client_number, code, text))
            return
        self._ends.tell_failed(request, code, text)
        request.move(RequestState.LINGERING)
        request.client.requests.pop(request.client_number, None)

    def _give_up(self, step: Request) -> None:
        if step.state is _QUEUED:
            step.version.drop(step)
            self._state.dirty[step.version] = None
            self._ends.end(step)
            if step.version.order is not None:
                self._ends.answer_in_order(step.version)
        elif step.state is _SENT:
            self._ends.linger(step)
        elif step.state is _DONE:
            self._ends.drop_done(step)
        elif step.state is _CHAINED:
            assert step.chain is not None
            step.chain.fail("CANCELLED", "its ensemble has failed")
            self._state.stirred[step.chain] = None

    def _close(self, run: Run) -> None:
        """No worker has anything of it any more."""
        request = run.request
        if request.state is RequestState.LINGERING:
            self._ends.released(request)
        for kept in run.tensors.values():
            self._let_go(run, kept)
        for rows in run.rows.values():
            for tensors in rows:
                self._drop(run, graph.handles_of(tensors))
        for _, message in run.results:  # as one of its steps made way for another one
            if isinstance(message, Reply):
                self._drop(run, graph.handles_of(message.outputs))
        run.results.clear()
        run.tensors.clear()
        run.rows.clear()
        request.chain = None
        request.version.users -= 1
        if request.run is None:
            for member in run.held.values():
                member.users -= 1


def _passed_on(options: Options | None) -> Options | None:
    """What a step is told of the caller's options: all but what only concerns the ensemble's own answer."""
    return options if options is None or not options.window else replace(options, window=0)


def _without_sequence(options: Options | None) -> Options | None:
    """For a model that takes none: it may still look at the id, as it may for any request of an ensemble."""
    return options if options is None or not options.sequence else replace(options, sequence=0)
