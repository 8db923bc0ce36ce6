"""Whatever learns of requests, batches and instances without changing an answer: counters, traces and recordings.

Invariant: only this module counts in the `Statistics` of a version and its `Loads`. Successes are reported as lists, so
that a batch costs one call, and while nothing is traced or recorded, an event costs a comparison.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from shmserve.core.effects import Effect
from shmserve.core.owners.model import Model
from shmserve.core.owners.recording import Recording
from shmserve.core.owners.trace import PARAMETER, Traces
from shmserve.core.records import Batch, Instance, Lease, Request, Version
from shmserve.core.service.form import Reason
from shmserve.core.service.padding import rounded
from shmserve.core.stats.journeys import STEPS, Journey
from shmserve.core.stats.statistics import RESPONSES, FailureKind, ResponseCount, limit_in
from shmserve.errors import ModelFailed, ServeError, Unavailable
from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import LeasedBatch, Row

FOLLOWED = 64
"""Maximum number of requests to ensembles in flight that are followed."""


class Turn(Protocol):
    """What observers need to know of the core."""

    now: int
    effects: list[Effect]
    tracing: bool

    def log(self, level: str, text: str, **fields: Any) -> None: ...

    def next_number(self) -> int: ...


class Observers:
    def __init__(self, turn: Turn, contexts_per_second: int) -> None:
        self._turn = turn
        self.traces = Traces(contexts_per_second)
        self.recording: Recording | None = None
        self._followed: dict[int, dict[int, Journey]] = {}
        """Number of an ensemble's request in flight -> its steps, by number: those that have run, if it is
        followed, and those that have failed."""
        self.refusals: dict[str, int] = {}
        """Number of refused requests, by the limit that they exceeded, or else by error code."""

    @property
    def watching(self) -> bool:
        """True if further requests may be traced or recorded."""
        return bool(self.traces.samples) or self.recording is not None

    def record(self, models: Iterable[str], limit: int) -> Recording:
        """Records what these models do, until `stop_recording`; empty: all models."""
        self.recording = Recording(models, limit)
        return self.recording

    def stop_recording(self) -> None:
        """Records no more. What has been recorded can still be read."""
        self.recording = None

    # ------------------------------------------------------------------------------------ the way in

    def admitted(self, version: Version, requests: Sequence[Request]) -> None:
        """Requests of clients."""
        if self.traces.samples:
            self.traces.sample_due(version, requests)
        for request in requests:
            if request.options is not None and PARAMETER in request.options.parameters:
                self._trace_by_id(request)

    def run_begun(self, request: Request) -> None:
        """A request to an ensemble is followed if one is due."""
        journeys, now = request.version.statistics.journeys, self._turn.now
        if len(self._followed) < FOLLOWED and journeys.follows(now):
            self._followed[request.number] = {}

    def child_admitted(self, request: Request, parent: Request | None) -> None:
        """A step of the ensemble `parent`, or a call that a model makes for `parent`."""
        if parent is not None and self.traces.active:
            self.traces.sample_child(request, parent)

    def call_admitted(self, request: Request, parent: Request | None) -> None:
        self.child_admitted(request, parent)
        if request.options is not None and PARAMETER in request.options.parameters:
            self._trace_by_id(request)

    def _trace_by_id(self, request: Request) -> None:
        record = self.traces.begin_by_id(request, self._turn.now)
        if record is not None:
            self._turn.effects.append(record)

    def refused(self, version: Version | None, error: ServeError, count: int = 1) -> None:
        """This many requests were refused for the same reason. `version`: the one that would have served them."""
        why = limit_in(error.message) or error.code
        self.refusals[why] = self.refusals.get(why, 0) + count
        if self._turn.tracing:
            self._turn.log("debug", f"refused {count} request(s): {error.code}: {error.message}")
        if version is not None and isinstance(error, Unavailable):
            statistics = version.statistics
            statistics.fail_count += count
            statistics.failures[FailureKind.REJECTED] += count
            statistics.keep_error(error.code, error.message, self._turn.now, count)

    # ------------------------------------------------------------------------------------ batches

    def batch_done(self, version: Version, instance: Instance, batch: Batch, number: int) -> None:
        """A batch has run. Called before its responses are processed."""
        if self.traces.active:
            batch.number = number
        now, journeys, oldest = self._turn.now, version.statistics.journeys, batch.pieces[0][1][0]
        if journeys.is_slow(oldest.arrived, now) and oldest.batch is batch:
            journeys.add_slow(_journey(oldest, now), now)
        if self._followed:
            for request in batch.requests():
                steps = self._followed.get(request.parent)
                if steps is not None and len(steps) < STEPS:
                    steps[request.number] = _journey(request, now)
        if self.recording is not None:
            self.recording.batch_done(version, instance, batch, number, self._turn.now)

    def batch_over(self, version: Version, batch: Batch, times: tuple[int, int, int, int]) -> None:
        """The responses of a batch have been processed."""
        statistics, answered = version.statistics, batch.answered
        if version.service.padding is not None:
            longest, useful = batch.lengths()
            elements = batch.rows * rounded(longest, version.service.padding)
            statistics.elements += elements
            statistics.padded_elements += elements - useful
        if batch.early:
            statistics.queued(batch.early, times[0])
            answered += len(batch.early)
        statistics.ran(max(batch.rows, batch.slots), answered, batch.reason, times, self._turn.now)

    def leased(self, lease: Lease, batches: Sequence[LeasedBatch], reason: Reason) -> None:
        """Leased requests were answered, those of each packet in a batch."""
        version, statistics = lease.version, lease.version.statistics
        for arrived, taken, ready, computed, placed, rows, failed, count in batches:
            cost, good = max(rows, 1), count - failed
            for _ in range(failed):
                statistics.failed(FailureKind.BACKEND, ModelFailed.code, "", placed - arrived, placed)
            if good:
                self.answered(version, [arrived] * good, cost * good, taken, placed)
            times = (taken, ready, computed, placed)
            statistics.ran(cost * count, good, reason, times, placed)
            journeys = statistics.journeys
            if journeys.is_slow(arrived, placed):
                about = (lease.instance.spec.name, cost * count, reason.value, times)
                code = ModelFailed.code if failed else ""
                journey = Journey(version.model, version.number, arrived, placed, rows, "", code, "", *about)
                journeys.add_slow(journey, placed)
        if self.recording is not None:
            self.recording.leased(lease, batches, reason, iter(self._turn.next_number, 0))
        if self.traces.samples:
            self._turn.effects += self.traces.sample_leased(lease, batches, reason)

    # ------------------------------------------------------------------------------------ successes

    def answered(self, version: Version, arrivals: list[int], rows: int, taken: int, now: int) -> None:
        """Requests of a batch were answered with their only response. `taken`: when their batch was."""
        statistics = version.statistics
        if len(arrivals) == 1:
            statistics.answered_alone(arrivals[0], rows, taken, now)
        else:
            statistics.answered(arrivals, rows, taken, now)
        if statistics.first is not None:
            for arrived in arrivals:
                statistics.first.add(now - arrived)
        if statistics.streams is not None:
            for arrived in arrivals:
                statistics.streams.first.add(now - arrived)

    def computed(self, request: Request, taken: int) -> None:
        """A worker has sent the last response to a request; `responded` follows when it is delivered. `taken`: when its
        batch was; 0: not known yet."""
        statistics, now = request.version.statistics, self._turn.now
        if taken:
            statistics.answered_alone(request.arrived, request.cost, taken, now)
        else:
            statistics.answered_early(request.arrived, request.cost, now)
        batch = request.batch
        if batch is not None and taken:
            batch.answered += 1
        elif batch is not None:
            batch.early.append(request.arrived)

    def streamed(self, request: Request, row: Row, wanted: bool) -> None:
        """A decoupled model has sent a response. `wanted`: its caller has not left."""
        statistics, usual = request.version.statistics, "success" if row.outputs or row.parameters else "empty_response"
        if wanted:
            outcome = usual if row.error is None else "fail"
            if request.batch is None and row.times is not None:  # not part of the time of a batch
                statistics.infer_ns += row.times[0]
                statistics.output_ns += row.times[1]
        elif not row.more:
            outcome = "cancel"
        else:  # it was sent before the worker knew of the cancellation
            return
        index, responses = min(request.parts, RESPONSES - 1), statistics.responses
        while len(responses) <= index:
            responses.append(ResponseCount())
        responses[index].add(outcome, *(row.times or (0, 0)))

    def streams_ended(self, version: Version, instance: Instance) -> None:
        """The last open stream of an instance has ended."""
        version.statistics.streaming_ns += self._turn.now - instance.streaming_since

    def answered_in_batch(self, request: Request, taken: int) -> None:
        """The batch of the request is done, and further responses follow."""
        request.version.statistics.queued([request.arrived], taken)

    def cache_hit(self, request: Request, ns: int) -> None:
        """`ns`: from its arrival until its response was found."""
        statistics, now = request.version.statistics, self._turn.now
        statistics.cache_hits += 1
        statistics.cache_hit_ns += ns
        statistics.success_count += 1
        statistics.success_ns += ns
        statistics.request_times[ns.bit_length()] += 1
        if statistics.summaries is not None:
            statistics.summaries.request.add(ns, 1, now)
            statistics.summaries.hit.add(ns, 1, now)

    def cache_miss(self, request: Request, ns: int) -> None:
        """`ns`: for lookup and insertion."""
        statistics = request.version.statistics
        statistics.cache_misses += 1
        statistics.cache_miss_ns += ns
        if statistics.summaries is not None:
            statistics.summaries.miss.add(ns, 1, self._turn.now)

    def step_done(self, version: Version, step: int, queue_ns: int, spent: Sequence[int], failed: bool) -> None:
        """A step of an ensemble has ended. `spent`: input, infer and output ns; empty if no model ran, for instance
        because of the cache."""
        counts = version.statistics.steps
        if counts is None or step >= len(counts):  # nobody has asked for them, or a reload has added steps
            return
        count = counts[step]
        count.count += 1
        count.failed += failed
        count.queue_ns += queue_ns
        if spent:
            count.input_ns += spent[0]
            count.infer_ns += spent[1]
            count.output_ns += spent[2]

    def run_done(self, request: Request, times: Sequence[int]) -> None:
        """An ensemble has run. `times`: the total input, infer and output ns of its steps."""
        statistics, now = request.version.statistics, self._turn.now
        statistics.answered_alone(request.arrived, request.cost, request.arrived, now)
        statistics.ran(request.cost, 1, None, (0, *accumulate(times)), now)

    def responded(self, request: Request, outputs: tuple[Tensor, ...]) -> None:
        """A response with these outputs was sent."""
        if self.traces.active:
            self.traces.record_outputs(request, outputs)
        statistics, now = request.version.statistics, self._turn.now
        first, streams = statistics.first, statistics.streams
        if first is not None and not request.parts:
            first.add(now - request.arrived)
        if streams is not None:
            if request.responded:
                streams.between.add(now - request.responded)
            else:
                streams.first.add(now - request.arrived)
            request.responded = now

    # ------------------------------------------------------------------------------------ the way out

    def failed(self, version: Version, arrived: int, code: str, text: str, kind: FailureKind | None = None) -> None:
        """A request that was admitted has failed. `kind` None: its code says why."""
        now = self._turn.now
        version.statistics.failed(kind, code, text, now - arrived, now)
        if self._turn.tracing:
            self._turn.log("debug", f"{version.label} failed a request: {code}: {text}", model=version.model)

    def ended(self, request: Request, code: str, text: str) -> None:
        """The final response was sent. `code` "": the request succeeded; `text`: of the error."""
        steps = self._followed.pop(request.number, None) if self._followed else None
        if code or steps:
            journey = self._keep(request, code, text, steps or {})
            if code and request.is_step:
                others = self._followed.setdefault(request.parent, {})
                if request.number in others or len(others) < STEPS:
                    others[request.number] = journey
        if self.traces.active:
            record = self.traces.end(request, code, self._turn.now)
            if record is not None:
                self._turn.effects.append(record)
        if self.recording is not None:
            self.recording.ended(request, code, self._turn.now)

    def _keep(self, request: Request, code: str, text: str, steps: Mapping[int, Journey]) -> Journey:
        now, journeys = self._turn.now, request.version.statistics.journeys
        journey = _journey(request, now)
        journey.steps = list(steps.values())
        if code:
            journey.code, journey.text = code, text
            journeys.failed.append(journey)
        elif journeys.is_slow(request.arrived, now):
            journeys.add_slow(journey, now)
        return journey

    def forgotten(self, request: Request) -> None:
        """The request has left the core, with or without a response."""
        self._followed.pop(request.number, None)
        if self.traces.active:
            self.traces.forget(request)

    def check(self, requests: Container[int]) -> None:
        """Asserts that only requests in the core are followed. `requests`: their numbers."""
        assert all(number in requests for number in self._followed)

    # ------------------------------------------------------------------------------------ instances

    def loaded(self, model: Model, version: Version) -> None:
        model.loads.done += 1
        model.loads.done_ns += version.took_ns

    def load_failed(self, model: Model) -> None:
        model.loads.failed += 1

    def restarted(self, version: Version, instance: Instance) -> None:
        restarts, name = version.statistics.restarts, instance.spec.name
        restarts[name] = restarts.get(name, 0) + 1

    def woken(self, version: Version, ns: int) -> None:
        """`ns`: from the request that woke it until it was READY."""
        statistics = version.statistics
        statistics.wakes += 1
        statistics.wake_ns += ns
        statistics.wake_times[ns.bit_length()] += 1

    def wake_failed(self, version: Version) -> None:
        version.statistics.failed_wakes += 1

    def scaled(self, version: Version, instances: int) -> None:
        """The number of its instances was changed by this, because of its load."""
        if instances > 0:
            version.statistics.scaled_up += instances
        else:
            version.statistics.scaled_down -= instances


def _journey(request: Request, now: int) -> Journey:
    version, instance, batch, options = request.version, request.instance, request.batch, request.options
    journey = Journey(version.model, version.number, request.arrived, now, request.rows)
    if options is not None:
        journey.id = options.id
    if instance is not None and batch is not None:
        journey.instance, journey.batch_rows = instance.spec.name, batch.rows
        journey.reason, journey.times = batch.reason.value, batch.times
    return journey
