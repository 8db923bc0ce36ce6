"""Statistics of a model version.

Invariant: counters never decrease, and belong to the version number, across generations. Durations are sums in ns over
successful requests, unless stated otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from msgspec import Struct, field

from shmserve import histogram
from shmserve.core.limits import NAMED
from shmserve.core.service.form import Reason
from shmserve.core.stats.journeys import Journeys
from shmserve.core.stats.latencies import FirstResponses, Summaries
from shmserve.errors import ModelFailed


class FailureKind(IntEnum):
    """Why a request failed."""

    REJECTED = 0  # by a limit or a policy, before a worker had it
    CANCELED = 1  # by its caller, or because the caller disconnected
    BACKEND = 2  # by the model, or because its process ended
    OTHER = 3


_FAILURES = {"CANCELLED": FailureKind.CANCELED, "QUEUE_TIMEOUT": FailureKind.REJECTED}
_LIMIT = re.compile(rf"\(({'|'.join(row.name for row in NAMED)})\)")


def limit_in(text: str) -> str:
    """The limit named in parentheses in an error text, as in all texts about limits. Empty if there is none."""
    match = _LIMIT.search(text)
    return match[1] if match else ""


RESPONSES = 64
"""Number of responses counted separately by their index within the request; later ones count as the last. Without this
limit, the statistics would grow with the longest request."""


class BatchCount(Struct):
    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class ResponseCount(Struct):
    """Responses with the same index within their requests. Every field is a count and a sum in ns."""

    compute_infer: tuple[int, int] = (0, 0)
    compute_output: tuple[int, int] = (0, 0)
    success: tuple[int, int] = (0, 0)
    fail: tuple[int, int] = (0, 0)
    empty_response: tuple[int, int] = (0, 0)
    cancel: tuple[int, int] = (0, 0)

    def add(self, outcome: str, infer_ns: int, output_ns: int) -> None:
        """`outcome`: success, fail, empty_response or cancel."""
        self._add(outcome, infer_ns + output_ns)
        if outcome != "cancel":
            self._add("compute_infer", infer_ns)
        if outcome in ("success", "fail"):
            self._add("compute_output", output_ns)

    def _add(self, name: str, more_ns: int) -> None:
        count, ns = getattr(self, name)
        setattr(self, name, (count + 1, ns + more_ns))


class StepCount(Struct):
    """Executions of a step of an ensemble. `queue_ns`: from when its inputs existed until its batch was taken."""

    count: int = 0
    failed: int = 0
    """Those of `count` that failed."""
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class StreamTimes(Struct):
    """When the responses of a decoupled model were sent. Responses without outputs do not count."""

    first: histogram.Durations = field(default_factory=histogram.Durations)
    """From the arrival of each request to its first response."""
    between: histogram.Durations = field(default_factory=histogram.Durations)
    """Between consecutive responses of a request."""


RECENT_ERRORS = 10
ERROR_CHARACTERS = 2000


class RecentError(Struct):
    """`at`: when it last occurred, in ns on the broker's clock."""

    code: str
    text: str
    at: int
    count: int = 1


class Loads(Struct):
    """Loads of a model's versions."""

    done: int = 0
    failed: int = 0
    done_ns: int = 0


class Counter(NamedTuple):
    """A field of `Statistics` that is also a metric, and in the statistics of a version under its own name."""

    field: str
    metric: str
    help: str


COUNTERS = (
    Counter(
        "inference_count", "nv_inference_count", "rows computed; a request without a batch dimension counts as one"
    ),
    Counter("execution_count", "nv_inference_exec_count", "batches run"),
)


class Statistics(Struct):
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ns: int = 0
    success_count: int = 0
    success_ns: int = 0
    fail_count: int = 0
    fail_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    streaming_ns: int = 0
    """Total time in which instances had open streams, until the last one ended."""
    cache_hits: int = 0
    cache_hit_ns: int = 0
    cache_misses: int = 0
    cache_miss_ns: int = 0
    """Cache lookup and insertion time of the misses."""
    restarts: dict[str, int] = {}
    """Instance name -> number of restarts, counted once it has been READY."""
    scaled_up: int = 0
    """Instances added because requests waited too long."""
    scaled_down: int = 0
    """Instances removed because fewer were enough."""
    failures: list[int] = field(default_factory=lambda: [0] * len(FailureKind))
    """By FailureKind; the sum of all but CANCELED is fail_count."""
    reasons: dict[Reason, int] = {}
    batches: dict[int, BatchCount] = {}
    """By rows."""
    responses: list[ResponseCount] = []
    """For decoupled models: by index within the request. At most RESPONSES elements."""
    wakes: int = 0
    """How often it was woken from sleep."""
    failed_wakes: int = 0
    wake_ns: int = 0
    """Total time from a request that woke it until it was READY."""
    wake_times: list[int] = field(default_factory=histogram.empty)
    elements: int = 0
    """For models with padding: sum of rows x padded length of all batches."""
    padded_elements: int = 0
    """Padding among these elements."""
    request_times: list[int] = field(default_factory=histogram.empty)
    """Per request: from arrival to response."""
    queue_times: list[int] = field(default_factory=histogram.empty)
    """Per request: from arrival until its batch was taken."""
    batch_times: list[int] = field(default_factory=histogram.empty)
    """Per batch: from taken until its outputs are placed."""
    streams: StreamTimes | None = None
    """For decoupled models."""
    journeys: Journeys = field(default_factory=Journeys)
    errors: list[RecentError] = []
    """The latest RECENT_ERRORS different errors, oldest first."""
    steps: list[StepCount] | None = None
    """For ensembles, by step. None: not collected, because no client has queried them."""
    summaries: Summaries | None = None
    first: FirstResponses | None = None
    """None: not collected, the default."""

    def collect(self, summaries: bool, first: FirstResponses | None, decoupled: bool) -> None:
        """Turns on the latencies configured by the operator, and those of streams. Counters are kept unless the bucket
        bounds change."""
        if decoupled and self.streams is None:
            self.streams = StreamTimes()
        if summaries and self.summaries is None:
            self.summaries = Summaries()
        if first is not None and (self.first is None or self.first.edges_ms != first.edges_ms):
            self.first = first

    def count_steps(self, number: int) -> list[StepCount]:
        """The counts of this many steps of an ensemble, which are collected from the first call on."""
        if self.steps is None or len(self.steps) != number:
            self.steps = [StepCount() for _ in range(number)]
        return self.steps

    @property
    def rejected(self) -> int:
        return self.failures[FailureKind.REJECTED]

    @property
    def cancelled(self) -> int:
        return self.failures[FailureKind.CANCELED]

    @property
    def busy_ns(self) -> int:
        """Total time of completed batches, over all instances."""
        return sum(batch.input_ns + batch.infer_ns + batch.output_ns for batch in self.batches.values())

    def answered(self, arrivals: list[int], rows: int, taken: int, now: int) -> None:
        """Counts successful requests of a batch, answered now. Equal arrival times are adjacent, and are counted
        together. `arrivals` is not empty."""
        count, total = len(arrivals), sum(arrivals)
        self.success_count += count
        self.inference_count += rows
        self.success_ns += now * count - total
        self.queue_ns += max(0, taken * count - total)
        request_times, queue_times = self.request_times, self.queue_times
        last, run = arrivals[0], 0
        for arrived in arrivals:
            if arrived != last:
                request_times[(now - last).bit_length()] += run
                queue_times[(taken - last).bit_length()] += run
                last, run = arrived, 1
            else:
                run += 1
        request_times[(now - last).bit_length()] += run
        queue_times[(taken - last).bit_length()] += run
        if self.summaries is not None:
            self.summaries.answered(arrivals, taken, now)

    def answered_alone(self, arrived: int, rows: int, taken: int, now: int) -> None:
        """`answered` for a single request, for speed."""
        self.success_count += 1
        self.inference_count += rows
        self.success_ns += now - arrived
        if taken > arrived:
            self.queue_ns += taken - arrived
        self.request_times[(now - arrived).bit_length()] += 1
        self.queue_times[(taken - arrived).bit_length()] += 1
        if self.summaries is not None:
            self.summaries.answered([arrived], taken, now)

    def answered_early(self, arrived: int, rows: int, now: int) -> None:
        """Counts a request that is answered before it is known when its batch was taken; a call of `queued` follows."""
        self.success_count += 1
        self.inference_count += rows
        self.success_ns += now - arrived
        self.request_times[(now - arrived).bit_length()] += 1
        if self.summaries is not None:
            self.summaries.request.add(now - arrived, 1, now)

    def queued(self, arrivals: list[int], taken: int) -> None:
        for arrived in arrivals:
            if taken > arrived:
                self.queue_ns += taken - arrived
            self.queue_times[(taken - arrived).bit_length()] += 1
        if self.summaries is not None:
            self.summaries.queued(arrivals, taken)

    def failed(self, why: FailureKind | None, code: str, text: str, ns: int, now: int) -> None:
        """Counts a request that failed after `ns`. `why` None: the code says it."""
        why = _FAILURES.get(code, FailureKind.OTHER) if why is None else why
        self.failures[why] += 1
        if why is not FailureKind.CANCELED:  # the caller did not want the response
            self.fail_count += 1
            self.fail_ns += ns
        self.keep_error(code, text, now)

    def keep_error(self, code: str, text: str, now: int, count: int = 1) -> None:
        """Keeps an error for operators to read. Refusals differ only in their numbers, so one is kept for each code."""
        if code == "CANCELLED":
            return
        text = text[:ERROR_CHARACTERS]
        for index, error in enumerate(self.errors):
            if error.code == code and (error.text == text or code != ModelFailed.code):
                error.text, error.at = text, now
                error.count += count
                self.errors.append(self.errors.pop(index))
                return
        self.errors.append(RecentError(code, text, now, count))
        if len(self.errors) > RECENT_ERRORS:
            del self.errors[0]

    def ran(self, rows: int, answered: int, reason: Reason | None, times: Sequence[int], now: int) -> None:
        """Counts a batch, or a request to an ensemble, which has no reason. `times`: when it was taken, its inputs were
        gathered, its outputs computed, and placed. The time between them counts once for the batch, and for each of its
        requests that succeeded."""
        taken, ready, computed, placed = times
        input_ns, infer_ns, output_ns = ready - taken, computed - ready, placed - computed
        if reason is not None:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        count = self.batches.get(rows)
        if count is None:
            count = self.batches[rows] = BatchCount()
        count.count += 1
        count.input_ns += input_ns
        count.infer_ns += infer_ns
        count.output_ns += output_ns
        self.input_ns += input_ns * answered
        self.infer_ns += infer_ns * answered
        self.output_ns += output_ns * answered
        self.batch_times[(placed - taken).bit_length()] += 1
        self.execution_count += 1
        self.last_inference_ns = now
        if self.summaries is not None:
            self.summaries.computed(answered, (input_ns, infer_ns, output_ns), now)
