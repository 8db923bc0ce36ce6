"""Runs a batch of requests: gathers inputs, calls the backend, places outputs, and returns a `Row` for each request.

A Row is the result of one request, outputs or an error; it is unrelated to rows of tensors. Invariant: each request
gets exactly one Row, in the order of the batch, whatever the model does. The exceptions are requests that the model
answers by separate messages (Streamed) and requests of iterative models that run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shmserve.errors import ModelFailed, ServeError
from shmserve.protocol.messages import Failure, Row, Work
from shmserve.workers.backends.base import SeparateBackend, StackedBackend
from shmserve.workers.batch.padding import PaddedResults
from shmserve.workers.model_calls.answer import Answer, Request
from shmserve.workers.process.log import log_traceback, public

if TYPE_CHECKING:
    from shmserve.workers.backends.base import Backend
    from shmserve.workers.batch.gather import Gather, GatherGroup
    from shmserve.workers.batch.scatter import Results, Scatter

Times = tuple[int, int, int, int]
"""When the batch was taken, inputs were ready, outputs were computed, and outputs were placed (ns)."""
Ran = tuple[list[Row], Times, tuple[int, ...]]
"""The results of the answered requests, the times, and the ids of the requests to run again."""
Trace = Callable[[str, BaseException], None]
"""Reports the traceback of a failed model, with a description. In the server it is written to the log."""
clock = time.monotonic_ns


class Runner:
    """Runs batches on a loaded backend. `model_dir` is replaced in error messages for clients."""

    def __init__(
        self,
        instance: str,
        model_dir: str,
        backend: Backend,
        gather: Gather,
        scatter: Scatter,
        trace: Trace = log_traceback,
    ) -> None:
        self._trace = trace
        self._instance = instance
        self._model_dir = model_dir
        self._gather = gather
        self._scatter = scatter
        self._read = gather.read
        self._answered = self.row
        if isinstance(backend, StackedBackend):
            self._stacked: StackedBackend | None = backend
        else:
            assert isinstance(backend, SeparateBackend)
            self._stacked = None
            self._separate = backend

    def run(self, works: Sequence[Work]) -> Ran:
        """Runs one batch. Exceptions of the backend become errors of its requests."""
        return self._run_stacked(works) if self._stacked is not None else self._run_separate(works)

    def forget(self, sequences: Sequence[int | str]) -> None:
        """Drops the state of sequences that have ended. Hook of subclasses: this class keeps none."""

    # ------------------------------------------------------------------------------------ one array per input

    def _run_stacked(self, works: Sequence[Work]) -> Ran:
        """Groups are requests that can share arrays; usually there is one, which is the fast path."""
        taken = clock()
        groups, failures = self._gather.groups(works)
        if len(groups) == 1 and not failures:
            rows, ready, computed = self._run_group(groups[0])
            return rows, (taken, ready, computed, clock()), ()
        found: list[Row | None] = [None] * len(works)
        for place, error in failures:
            found[place] = failed(works[place], error)
        ready = computed = clock()
        first = 0
        for group in groups:
            rows, ready, computed = self._run_group(group)
            first = first or ready
            for place, row in zip(group.places, rows, strict=True):
                found[place] = row
        return [row for row in found if row is not None], (taken, first or ready, computed, clock()), ()

    def _run_group(self, group: GatherGroup) -> tuple[list[Row], int, int]:
        """Returns the results, when the inputs were ready, and when the outputs were computed."""
        assert self._stacked is not None
        if group.lengths:
            results: Results = PaddedResults(self._scatter, group.works, group.rows, group.lengths, group.length)
        else:
            results = self._scatter.results(group.works, group.rows)
        try:
            self._stacked.execute(group, results)
            computed = clock()
            return results.rows(), group.ready or computed, computed
        except Exception as error:
            results.abandon()
            now = clock()
            failure = self._failure(error)
            return [Row(work.request, (), failure) for work in group.works], group.ready or now, now

    # ------------------------------------------------------------------------------------ request by request

    def _run_separate(self, works: Sequence[Work]) -> Ran:
        taken = clock()
        found: list[Row | None] = [None] * len(works)
        requests: list[Request] = []
        places: list[int] = []
        read, length = self._read, self._gather.longest(works)
        for place, work in enumerate(works):
            try:
                requests.append(Request(work, read(work, length)))
                places.append(place)
            except ServeError as error:
                found[place] = failed(work, error)
        ready = clock()
        answers: list[Answer | None] = []
        again: list[int] = []
        if requests:
            try:
                answers = self._separate.execute(requests)
            except Exception as error:
                answers = self._separate.failed(requests, Answer(error=self._failure(error)))
        computed = clock()
        for place, answer in zip(places, answers, strict=True):
            if answer is not None and not answer.again:
                found[place] = self._answered(works[place], answer)
                continue
            self._unanswered(works[place], answer)
            if answer is not None:
                again.append(works[place].request)
        return [row for row in found if row is not None], (taken, ready, computed, clock()), tuple(again)

    def row(self, work: Work, answer: Answer) -> Row:
        """Converts an answer to a Row: places the outputs where their reader can map them."""
        if answer.error is not None:
            return Row(work.request, (), answer.error)
        if self._gather.pads:
            own = self._gather.length_of(work)
            results: Results = PaddedResults(self._scatter, (work,), work.rows, (own,), -1)
        else:
            results = self._scatter.results((work,), work.rows)
        try:
            for name, array in answer.outputs:
                results.put_named(name, array)
            return results.rows(answer.parameters)[0]
        except Exception as error:
            results.abandon()
            return Row(work.request, (), self._failure(error))

    def _unanswered(self, work: Work, answer: Answer | None) -> None:
        """Hook of subclasses: `answer` has no result for the request, which is answered separately (None) or runs
        again."""

    # ------------------------------------------------------------------------------------ failures

    def _failure(self, error: Exception) -> Failure:
        """Returns the error for clients. Reports the traceback too, unless the request itself is the cause."""
        if isinstance(error, ServeError) and not isinstance(error, ModelFailed):
            return Failure(error.code, public(str(error), self._model_dir))
        self._trace(f"model instance '{self._instance}' failed", error)
        what = str(error) if isinstance(error, ModelFailed) else f"{type(error).__name__}: {error}"
        text = f"Failed to process the request(s) for model instance '{self._instance}', message: {what}"
        return Failure(ModelFailed.code, public(text, self._model_dir))


def failed(work: Work, error: ServeError) -> Row:
    return Row(work.request, (), Failure(error.code, public(str(error))))
