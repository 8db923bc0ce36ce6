"""Runs ensembles: starts each step when its inputs exist. Tensors stay in the memory of the worker that produced them.

A Run (`core.owners.run`) is one request to an ensemble. Its steps are ordinary requests in the queues of their
models, except that their results go to the run. Invariant: a result is only recorded when it arrives (`Run.results`);
`advance` processes it after all events of the turn, never while a batch is being processed.

A tensor produced by a step is kept until the last step that reads it has left its worker, or until the caller's
response is sent. A step with many responses may be only a limited number of responses ahead of the caller
(`steps.WINDOW`), which gives backpressure.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.ensembles.steps import Steps
from shmserve.core.exit import exit, responses
from shmserve.core.intake.intake import Intake
from shmserve.core.intake.quotas import Quotas
from shmserve.core.owners.run import Iteration, KeptTensor, MappedStep, Run, StepPosition
from shmserve.core.records import Request
from shmserve.core.service import graph
from shmserve.core.state import State
from shmserve.core.states import RequestState
from shmserve.core.stats.statistics import FailureKind
from shmserve.errors import Internal, InvalidRequest, ServeError
from shmserve.protocol.messages import Fail, Part, Reply, Tensor, Value

_CLASSES = (-1,)
"""Dims of a classification output."""
ROWS_TOGETHER = 32
"""Rows of a run's mapped steps that are requested before another run gets its turn."""
_DEADLOCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"


class Ensembles:
    def __init__(self, state: State, intake: Intake, quotas: Quotas) -> None:
        self._state = state
        self._steps = Steps(state, intake, quotas)

    # ------------------------------------------------------------------------------------ results

    def advance(self, run: Run, now: int) -> None:
        """Processes the results that have arrived and starts steps, or ends a run that has failed."""
        if self._state.runs.get(run.request.number) is not run:  # already closed
            return
        if run.results:
            results, run.results = run.results, []
            for position, message in results:
                if isinstance(message, Fail):
                    self._failed(run, position, message)
                elif run.failure is not None:
                    run.drop(graph.handles_of(message.outputs))
                else:
                    self._answered(run, position, message)
        while run.failure is None and not run.over:
            try:
                if run.ready:
                    self._start(run, *run.ready.pop(0), now)
                elif run.levels.sources:
                    if not self._move_on(run):
                        break
                else:
                    if not run.open[0][0].remaining:
                        self._answer(run, run.open[0][0])
                    break
            except ServeError as error:
                self._fail(run, error)
        if run.failure is not None and not run.over:
            self._answer_failure(run)
        if run.over and not run.in_flight:
            self._close(run)

    def _fail(self, run: Run, error: ServeError) -> None:
        run.fail(error.code, f"in ensemble '{run.request.version.model}', {error.message}")

    def _failed(self, run: Run, position: StepPosition, message: Fail) -> None:
        index, row, _ = position
        where = f"row {row} of step {index}: " if run.graph.steps[index].mapped else ""
        run.fail(message.code, f"in ensemble '{run.request.version.model}', {where}{message.text}")

    def _answered(self, run: Run, position: StepPosition, message: Reply | Part) -> None:
        index, row, iteration = position
        if run.is_source(iteration, index):
            self._answered_again(run, iteration, index, message)
            return
        iteration.due[index] -= 1
        rows = iteration.rows.get(index)
        if rows is not None:
            rows[row] = message.outputs
            if iteration.due[index]:
                return
            del iteration.rows[index]
        try:
            outputs = self._gathered(run, index, rows) if rows is not None else message.outputs
        except ServeError as error:
            self._fail(run, error)
            for tensors in rows.values() if rows is not None else ():
                run.drop(graph.handles_of(tensors))
            return
        self._finish_step(run, iteration, index, outputs)

    def _answered_again(self, run: Run, iteration: Iteration, index: int, message: Reply | Part) -> None:
        """Processes a response of a source: starts another iteration of all steps that depend on it. The last response
        may be empty."""
        last = not isinstance(message, Part) or message.last
        if message.outputs or not (last and isinstance(message, Part)):
            produced = {tensor.name: tensor for tensor in message.outputs}
            outputs = [(name, produced.get(own)) for own, name in run.graph.steps[index].outputs]
            for kept in run.begin(iteration.level + 1, outputs, True, run.members[index].service.graph is not None):
                self._release_tensor(run, kept)
        if last:
            del run.sources[iteration.level]
            self._have_read(run, iteration, index)

    def _gathered(self, run: Run, index: int, rows: dict[int, tuple[Tensor, ...]]) -> list[Tensor]:
        """Concatenates the results of all rows of a mapped step."""
        policy = run.members[index].policy
        assert policy is not None
        tensors: dict[str, list[Tensor]] = {}
        for row in range(len(rows)):
            for tensor in rows[row]:
                tensors.setdefault(tensor.name, []).append(tensor)
        for name, parts in tensors.items():
            if len(parts) != len(rows):
                raise InvalidRequest(f"'{name}' of step {index} exists for only {len(parts)} of {len(rows)} rows")
        return [graph.together(parts, policy.max_batch > 0) for parts in tensors.values()]

    def _finish_step(self, run: Run, iteration: Iteration, index: int, outputs: Iterable[Tensor]) -> None:
        """Called when the step has left its worker: stores its outputs and releases its inputs."""
        produced = {tensor.name: tensor for tensor in outputs}
        skipped = run.members[index].service.graph is not None  # a nested ensemble may have skipped it
        for own, name in run.graph.steps[index].outputs:
            unread = run.appear(iteration, name, produced.get(own), True, skipped)
            if unread is not None:
                self._release_tensor(run, unread)
            run.settle(iteration, name)
        self._have_read(run, iteration, index)

    def _have_read(self, run: Run, iteration: Iteration, index: int) -> None:
        """Ends a step: releases the tensors that no other step will read."""
        iteration.remaining -= 1
        for name in run.graph.waits[index]:  # tensors not found belong to a level above, and stay until that ends
            kept = iteration.tensors.get(name)
            if kept is not None:
                kept.readers -= 1
                if not kept.readers:
                    del iteration.tensors[name]
                    self._release_tensor(run, kept)

    def _release_tensor(self, run: Run, kept: KeptTensor) -> None:
        if kept.produced and isinstance(kept.tensor.data, tuple):
            run.drop(kept.tensor.data)

    # ------------------------------------------------------------------------------------ starting steps

    def _start(self, run: Run, iteration: Iteration, index: int, now: int) -> None:
        if run.is_source(iteration, index) and run.open[iteration.level][0] is not iteration:
            iteration.held_back = True
            return
        options = run.request.options
        if options is not None and options.sequence:
            self._steps.follow(run, index, options)
        step = run.graph.steps[index]
        if step.condition and not self._holds(run, iteration, step.condition):
            self._skip(run, iteration, index)
            return
        inputs = []
        for planned in run.plans[index].inputs:
            name = planned.name
            kept = run.find(iteration, name)
            if kept is not None:
                inputs.append((planned, kept.tensor))
            elif planned.required:
                home = run.home(iteration, name)
                if name in home.absent:
                    raise Internal(_DEADLOCK)
                if name in home.skipped:
                    self._skip(run, iteration, index)
                    return
        if not step.mapped:
            iteration.due[index] = 1
            self._steps.submit(run, StepPosition(index, 0, iteration), inputs, False, now)
            return
        over = run.find(iteration, step.mapped)
        if over is None:
            raise InvalidRequest(f"step {index} is mapped over '{step.mapped}', which is missing")
        count, rows = graph.rows_of(over.tensor)
        if not count:
            specs = {spec.name: spec for spec in run.plans[index].policy.outputs}
            self._finish_step(run, iteration, index, [graph.empty(own, specs[own]) for own, _ in step.outputs])
            return
        iteration.due[index] = count
        iteration.rows[index] = {}
        run.mapped.append(MappedStep(index, iteration, inputs, rows, count))
        if len(run.mapped) == 1:
            self._queue_rows(run)

    def _queue_rows(self, run: Run) -> None:
        first = run.mapped[0]
        self._state.runs.with_rows.add(run.request.payer.user, run, first.count - first.next > ROWS_TOGETHER)

    def ask_rows(self, limit: int, now: int) -> int:
        """Requests rows of mapped steps, up to `limit`, round robin between users and runs. Returns the number of
        requests."""
        mapped = self._state.runs.with_rows
        requested = 0
        while mapped and requested < limit:
            run = mapped.pop()
            for _ in range(min(ROWS_TOGETHER, limit - requested)):
                if not run.mapped or run.failure is not None or run.over:
                    break
                requested += 1
                try:
                    self._ask_row(run, run.mapped[0], now)
                except ServeError as error:
                    self._fail(run, error)
                    self._state.runs.to_advance[run] = None
            if run.failure is not None or run.over:
                run.mapped.clear()
            elif run.mapped:
                self._queue_rows(run)
        return requested

    def _ask_row(self, run: Run, mapped: MappedStep, now: int) -> None:
        number, index = mapped.next, mapped.step
        mapped.next += 1
        if mapped.next == mapped.count:
            run.mapped.popleft()
        row, over = next(mapped.rows), run.graph.steps[index].mapped
        inputs = [(planned, row if planned.name == over else tensor) for planned, tensor in mapped.inputs]
        try:
            self._steps.submit(run, StepPosition(index, number, mapped.iteration), inputs, mapped.count > 1, now)
        except ServeError as error:
            raise type(error)(f"row {number} of step {index}: {error.message}") from error

    def _holds(self, run: Run, iteration: Iteration, name: str) -> bool:
        kept = run.find(iteration, name)
        return kept is not None and graph.is_true(kept.tensor)

    def _skip(self, run: Run, iteration: Iteration, index: int) -> None:
        nothing: list[tuple[str, Tensor | None]] = [(name, None) for _, name in run.graph.steps[index].outputs]
        if run.is_source(iteration, index):  # steps that do not need it run once
            run.begin(iteration.level + 1, nothing, True, True)
        else:
            for name, _ in nothing:
                iteration.skipped.add(name)
                run.settle(iteration, name)
        self._have_read(run, iteration, index)

    # ------------------------------------------------------------------------------------ responses and completion

    def _move_on(self, run: Run) -> bool:
        """Closes the first iteration of a level if it is done. True: one was closed, and others may continue."""
        for level in range(len(run.open) - 1, -1, -1):
            if not run.open[level]:
                continue
            first = run.open[level][0]
            if not run.is_done(first):
                return False
            if level == len(run.open) - 1:
                if not run.room:
                    return False
                self._answer_part(run, first)
                if run.over:
                    return False
            elif not level:
                self._is_over(run)
                exit.respond_part(self._state, run.request, (), None, True)
                return False
            run.open[level].popleft()
            self._close_iteration(run, first)
            self._give_way(run, level)
            return True
        return False

    def _give_way(self, run: Run, level: int) -> None:
        """After the end of an iteration: its source may send another response, and the next iteration may start its
        source."""
        request = run.sources.get(level - 1)
        if request is not None:
            responses.more(self._state, request, 1)
        if run.open[level] and run.open[level][0].held_back:
            run.ready.append((run.open[level][0], run.levels.sources[level]))

    def _outputs(self, run: Run, iteration: Iteration) -> tuple[Tensor, ...]:
        specs, batches, steps = run.graph.specs, run.graph.batches, run.graph.steps
        outputs = []
        for name, wanted in run.wanted.items():
            home = run.home(iteration, name)
            kept = home.tensors.get(name)
            if kept is not None:
                shape = kept.tensor.shape
                if wanted is None or not wanted.classes:
                    spec = specs[name]
                    if spec.reshape is None:
                        shape = graph.fit(shape, spec.dims, batches)
                    else:
                        inner = spec.reshape
                        shape = graph.reshape(graph.fit(shape, inner, batches), inner, spec.dims, batches)
                elif not steps[run.graph.maker[name]].mapped:
                    shape = graph.fit(shape, _CLASSES, batches)
                outputs.append(Tensor(name, kept.tensor.dtype, shape, kept.tensor.data))
        graph.check_parts(outputs)
        return tuple(outputs)

    def _answer(self, run: Run, iteration: Iteration) -> None:
        """Sends the only response: all steps are done."""
        request = run.request
        outputs = self._outputs(run, iteration)
        self._is_over(run)
        self._state.outputs.pass_on(request, graph.handles_of(outputs))
        reply = Reply(request.client_number, request.version.number, outputs, _sequence_of(request))
        exit.deliver(self._state, request, reply)

    def _answer_part(self, run: Run, iteration: Iteration) -> None:
        """Sends one of several responses. The last one is marked as last if it is already known to be, and has
        outputs."""
        outputs = self._outputs(run, iteration)
        last = bool(outputs) and run.is_last
        run.room -= 1
        self._state.outputs.pass_on(run.request, graph.handles_of(outputs))
        if last:
            self._is_over(run)
        exit.respond_part(self._state, run.request, outputs, _sequence_of(run.request), last)

    def _is_over(self, run: Run) -> None:
        """Counts a run that is about to send its last response."""
        run.over = True
        self._state.observers.run_done(run.request, run.times)

    def _answer_failure(self, run: Run) -> None:
        """Reports the failure to the caller now. Queued steps are dropped; workers may still run others."""
        assert run.failure is not None
        run.over = True
        request, (code, text) = run.request, run.failure
        for step in list(run.in_flight):
            self._give_up(step)
        kind = FailureKind.CANCELED if code == "CANCELLED" else FailureKind.OTHER
        self._state.observers.failed(request.version, request.arrived, code, text, kind)
        if not run.in_flight:
            exit.deliver(self._state, request, Fail(request.client_number, code, text))
            return
        request.requester.fail_early(request, code, text)
        request.move(RequestState.LINGERING)
        request.requester.detached(request)

    def _give_up(self, step: Request) -> None:
        if step.state is RequestState.QUEUED:
            step.version.drop(step)
            self._state.to_dispatch[step.version] = None
            exit.end(self._state, step)
            if step.version.service.order is not None:
                exit.respond_in_order(self._state, step.version)
        elif step.state in (RequestState.SENT, RequestState.OPEN):
            exit.linger(self._state, step)
        elif step.state is RequestState.DONE:
            exit.drop_done(self._state, step)
        elif step.state is RequestState.CHAINED:
            inner = self._state.runs[step.number]
            inner.fail("CANCELLED", "its ensemble has failed")
            self._state.runs.to_advance[inner] = None

    def _close_iteration(self, run: Run, iteration: Iteration) -> None:
        for kept in iteration.tensors.values():
            self._release_tensor(run, kept)
        for rows in iteration.rows.values():
            for tensors in rows.values():
                run.drop(graph.handles_of(tensors))

    def _close(self, run: Run) -> None:
        """Removes the run: no worker has any of its steps."""
        request = run.request
        if request.state is RequestState.LINGERING:
            exit.released(self._state, request)
        for iteration in run.iterations():
            self._close_iteration(run, iteration)
        for _, message in run.results:  # results of steps that were dropped
            if not isinstance(message, Fail):
                run.drop(graph.handles_of(message.outputs))
        run.results.clear()
        run.open.clear()
        run.ready.clear()
        run.sources.clear()
        del self._state.runs[request.number]
        request.version.users -= 1
        if not request.is_step:
            for member in run.held.values():
                member.users -= 1


def _sequence_of(request: Request) -> dict[str, Value] | None:
    """The response parameters for a sequence. Triton includes them in every response of an ensemble."""
    options = request.options
    if options is None or not options.sequence:
        return None
    return {
        "sequence_id": options.sequence,
        "sequence_start": options.sequence_start,
        "sequence_end": options.sequence_end,
    }
