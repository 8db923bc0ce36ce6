"""Runs a batch of requests: gathers inputs, calls the backend, places outputs, and returns a `Row` for each request.

A Row is the result of one request, outputs or an error; it is unrelated to rows of tensors. Invariant: each request
gets exactly one Row, in the order of the batch, whatever the model does. The exceptions are requests that the model
answers by separate messages (Streamed) and requests of iterative models that run again.

Models with sequences or ragged batches have hidden tensors, which are added and taken away around each batch, group or
request; backends see ordinary inputs and outputs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

from shmserve.errors import ModelFailed, ServeError
from shmserve.protocol.messages import Columns, Failure
from shmserve.protocol.work_items import WorkColumns
from shmserve.protocol.worker_messages import Row, Work, rows_of
from shmserve.workers.backends.base import OverlappingModel, SeparateModel, StackedModel
from shmserve.workers.batch.padding import PaddedResults
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.sequence_inputs import NULL
from shmserve.workers.model_calls.answer import Request, Response, Trace, failure_of
from shmserve.workers.process.log import public

if TYPE_CHECKING:
    from shmserve.workers.backends.base import BackendModel, Computation, ExecuteAlike
    from shmserve.workers.batch.gather import Gather, GatherGroup
    from shmserve.workers.batch.scatter import Scatter
    from shmserve.workers.hidden_tensors import HiddenTensors

Times = tuple[int, int, int, int]
"""When the batch was taken, inputs were ready, outputs were computed, and outputs were placed (ns)."""
Ran = tuple["list[Row] | Columns", Times, tuple[int, ...]]
"""The results of the answered requests, the times, and the ids of the requests to run again."""
clock = time.monotonic_ns
B = TypeVar("B", StackedModel, SeparateModel)


class Runner(ABC, Generic[B]):
    """Runs batches on a loaded backend. `model_dir` is replaced in error messages for clients."""

    def __init__(
        self,
        instance: str,
        model_dir: str,
        model: B,
        gather: Gather,
        scatter: Scatter,
        trace: Trace,
        hidden: HiddenTensors | None,
    ) -> None:
        self._trace = trace
        self._instance = instance
        self._model_dir = model_dir
        self._gather = gather
        self._scatter = scatter
        self._hidden = hidden
        self._model: B = model

    @abstractmethod
    def _run(self, work_items: Sequence[Work]) -> Ran:
        """Runs requests that may share one call of the backend."""

    def run(self, work_items: Sequence[Work]) -> tuple[list[Row], Times, tuple[int, ...]]:
        results, times, again = self.run_batch(work_items)
        return list(rows_of(results)), times, again

    def run_batch(self, work_items: Sequence[Work]) -> Ran:
        """Runs one batch. Exceptions of the backend become errors of its requests."""
        return self._run(work_items) if self._hidden is None else self._run_in_parts(work_items, self._hidden)

    def forget(self, sequences: Sequence[int | str]) -> None:
        if self._hidden is not None:
            self._hidden.forget(sequences)

    def _run_in_parts(self, work_items: Sequence[Work], hidden: HiddenTensors) -> Ran:
        taken = clock()
        failures = hidden.begin(work_items)
        parts = (
            (rows, ready, computed, again) for rows, (_, ready, computed, _), again in map(self._run, hidden.parts())
        )
        ran = _joined(work_items, taken, failures, parts)
        hidden.end()
        return ran

    def row(self, work: Work, response: Response) -> Row:
        """Converts a response to a Row: places the outputs where their reader can map them."""
        results, response.placed = response.placed, None
        if response.error is not None:
            if results is not None:
                results.abandon()
            return Row(work.request, (), response.error)
        if results is None:
            results = self.outputs_of(work)
        try:
            for name, array in response.outputs:
                results.put_named(name, array)
            return results.rows(response.parameters)[0]
        except Exception as error:
            results.abandon()
            return Row(work.request, (), self._failure(error))

    def outputs_of(self, work: Work) -> Results:
        """Returns the outputs of one response to a request, to be filled in."""
        if self._gather.pads:
            return PaddedResults(self._scatter, (work,), work.rows, (self._gather.length_of(work),), None)
        return Results(self._scatter, (work,), work.rows)

    def discard(self, row: Row) -> None:
        """Frees the outputs of a row that will not be sent."""
        self._scatter.release(row.outputs)

    def _failure(self, error: Exception) -> Failure:
        return failure_of(error, self._instance, self._model_dir, self._trace)

    def _abandon(self, work_items: Sequence[Work], results: Results, error: Exception) -> list[Row]:
        results.abandon()
        failure = self._failure(error)
        return [Row(work.request, (), failure) for work in work_items]


class StackedRunner(Runner[StackedModel]):
    """Calls the backend with one array per input."""

    def _run(self, work_items: Sequence[Work]) -> Ran:
        """Groups are requests that can share arrays; usually there is one, which is the fast path."""
        taken = clock()
        groups, failures = self._gather.groups(work_items)
        if len(groups) == 1 and not failures:
            results, ready, computed = self._run_group(groups[0])
            return results, (taken, ready, computed, clock()), ()
        unreadable = [(work_items[index], error) for index, error in failures]
        return _joined(work_items, taken, unreadable, ((*self._run_group(group), ()) for group in groups))

    def _run_group(self, group: GatherGroup) -> tuple[list[Row] | Columns, int, int]:
        """Returns the results, when the inputs were ready, and when the outputs were computed."""
        hidden = self._hidden
        if hidden is not None:
            group = hidden.in_slots(group, self._gather)
            results: Results = hidden.results(self._scatter, group)
        else:
            results = self._results(group)
        try:
            if hidden is not None:
                hidden.before(group)
            self._model.execute(group, results)
            computed = clock()
            answers, ran = results.answers(), True
        except Exception as error:
            computed = clock()
            answers, ran = self._abandon(group.work_items, results, error), False
        if hidden is not None:
            hidden.after(group, rows_of(answers), ran)
        return answers, group.ready or computed, computed

    def _results(self, group: GatherGroup) -> Results:
        if group.lengths:
            return PaddedResults(self._scatter, group.work_items, group.rows, group.lengths, group.length)
        return Results(self._scatter, group.work_items, group.rows)


class BegunBatch(Struct, eq=False):
    """A batch that has begun. `computation` None: it is not on the device. `group` None: it runs when it is finished.
    `rows`: the results of one that has failed."""

    work_items: Sequence[Work]
    taken: int
    group: tuple[GatherGroup, Results] | None = None
    computation: Computation | None = None
    rows: list[Row] | None = None


class OverlappingRunner(StackedRunner):
    """Runs batches in two steps, so that the next one can begin while one is on the device. Batches are finished in
    the order in which they began.

    Times: a batch that began while another was on the device counts as taken when that one was finished. So no time
    is counted for two batches, and each phase begins after the one before.
    """

    _model: OverlappingModel

    _finished = 0
    """When the last batch was finished."""

    def begin(self, work_items: Sequence[Work]) -> BegunBatch:
        taken = clock()
        self._scatter.exchange_buffers()
        groups, failures = self._gather.groups(work_items)
        if len(groups) != 1 or failures:
            return BegunBatch(work_items, taken)
        group, results = groups[0], self._results(groups[0])
        try:
            return BegunBatch(work_items, taken, (group, results), self._model.begin(group, results))
        except Exception as error:
            rows = self._abandon(work_items, results, error)
            return BegunBatch(work_items, taken, (group, results), None, rows)

    def finish(self, batch: BegunBatch) -> Ran:
        if batch.group is None:
            ran = self.run_batch(batch.work_items)
            self._finished = ran[1][3]
            return ran
        group, results = batch.group
        rows: list[Row] | Columns | None = batch.rows
        computed = 0
        if batch.computation is not None:
            try:
                batch.computation.finish()
                computed = clock()
                rows = results.answers()
            except Exception as error:
                rows = self._abandon(group.work_items, results, error)
        assert rows is not None
        taken = max(batch.taken, self._finished)
        ready = max(group.ready, taken)
        self._finished = clock()
        return rows, (taken, ready, max(computed or self._finished, ready), self._finished), ()


class SeparateRunner(Runner[SeparateModel]):
    """Calls the backend with the requests, each of which has its own arrays and response; or with all together if they
    are alike."""

    def _run(self, work_items: Sequence[Work]) -> Ran:
        taken = clock()
        execute_alike = self._model.execute_alike
        if execute_alike is not None and (group := self._alike(work_items)) is not None:
            return self._run_alike(execute_alike, work_items, group, taken)
        gather, hidden = self._gather, self._hidden
        rows: list[Row | None] = [None] * len(work_items)
        requests: list[Request] = []
        runnable: list[int] = []
        outputs_of = self.outputs_of
        length = gather.longest(work_items)
        for index, work in enumerate(work_items):
            try:
                arrays = gather.read(work, length) if hidden is None else hidden.read(gather, work, length)
                requests.append(Request(work, arrays, outputs_of))
                runnable.append(index)
            except ServeError as error:
                rows[index] = failed(work, error)
        if hidden is not None and hidden.slots and requests:
            requests, runnable = self._with_null_requests(requests, runnable, hidden, length)
        ready = clock()
        responses: list[Response | None] = []
        again: list[int] = []
        if requests:
            try:
                responses = self._model.execute(requests)
            except Exception as error:
                responses = self._model.failed(requests, Response(error=self._failure(error)))
        computed = clock()
        for index, response in zip(runnable, responses, strict=True):
            if index == NULL:
                if response is not None and response.placed is not None:
                    response.placed.abandon()
                continue
            if hidden is not None:
                rows[index] = self._row_with_states(work_items[index], response, hidden)
            elif response is not None and not response.again:
                rows[index] = self.row(work_items[index], response)
                continue
            if response is not None and response.again:
                again.append(work_items[index].request)
        return [row for row in rows if row is not None], (taken, ready, computed, clock()), tuple(again)

    def _alike(self, work_items: Sequence[Work]) -> GatherGroup | None:
        """Returns the batch as one group if its requests are alike."""
        if self._hidden is not None or self._gather.pads:
            return None
        plain = type(work_items) is WorkColumns or all(
            work.options is None and work.outputs is None for work in work_items
        )
        return self._gather.inline_group(work_items) if plain else None

    def _run_alike(self, execute: ExecuteAlike, work_items: Sequence[Work], group: GatherGroup, taken: int) -> Ran:
        results = Results(self._scatter, work_items, group.rows)
        rows: list[Row] | Columns
        try:
            responses, parameters = execute(group, results, self.outputs_of)
            computed = clock()
            if responses is not None:
                results.abandon()
                pairs = zip(work_items, responses, strict=True)
                rows = [self.row(work, response) for work, response in pairs if response is not None]
            else:
                rows = results.answers(parameters)
        except Exception as error:
            computed = clock()
            rows = self._abandon(work_items, results, error)
        return rows, (taken, group.ready or computed, computed, clock()), ()

    def _with_null_requests(
        self, requests: list[Request], indices: list[int], hidden: HiddenTensors, length: int
    ) -> tuple[list[Request], list[int]]:
        """Adds a null request (index NULL) for each empty slot. Each request is then at the index of its slot."""
        readable = [request.work for request in requests]
        filled = hidden.filled(readable, self._gather)
        if filled is readable:
            return requests, indices
        known = zip(requests, indices, strict=True)
        pairs = [
            (Request(work, hidden.read(self._gather, work, length), self.outputs_of), NULL)
            if work.request == NULL
            else next(known)
            for work in filled
        ]
        return [request for request, _ in pairs], [index for _, index in pairs]

    def _row_with_states(self, work: Work, response: Response | None, hidden: HiddenTensors) -> Row | None:
        """Returns the Row, or None if the request is answered separately or runs again. Keeps the states of its
        sequence."""
        states: dict[int, Any] = {}
        if response is not None:
            try:
                states, response = hidden.without_states(work, response)
            except ModelFailed as error:
                response = Response(error=self._failure(error), again=response.again)
        row = None if response is None or response.again else self.row(work, response)
        hidden.answered(work, response, states, row)
        return row


def runner_of(
    instance: str,
    model_dir: str,
    model: BackendModel,
    gather: Gather,
    scatter: Scatter,
    trace: Trace,
    hidden: HiddenTensors | None,
) -> Runner[Any]:
    kind: type[Runner[Any]] = StackedRunner if isinstance(model, StackedModel) else SeparateRunner
    if isinstance(model, OverlappingModel) and model.overlaps and hidden is None:
        kind = OverlappingRunner
    return kind(instance, model_dir, model, gather, scatter, trace, hidden)


def failed(work: Work, error: ServeError) -> Row:
    return Row(work.request, (), Failure(error.code, public(str(error))))


def _joined(
    work_items: Sequence[Work],
    taken: int,
    failures: Iterable[tuple[Work, ServeError]],
    runs: Iterable[tuple[list[Row] | Columns, int, int, tuple[int, ...]]],
) -> Ran:
    """Returns the rows of a batch whose requests run in several calls, in the order of the batch. `runs`: results, when
    inputs were ready and outputs computed, and requests to run again."""
    by_request = {work.request: failed(work, error) for work, error in failures}
    computed, first = clock(), 0
    again: tuple[int, ...] = ()
    for results, ready, end, more in runs:
        first, computed = first or ready, end
        again += more
        by_request.update((row.request, row) for row in rows_of(results))
    rows = [by_request[work.request] for work in work_items if work.request in by_request]
    return rows, (taken, first or computed, computed, clock()), again
