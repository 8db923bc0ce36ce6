"""The timeline of `shmserve trace`: what ran when, as a file in Chrome's trace event format, which Perfetto opens.

`Collected` holds the records of a recording, up to a limit. `TraceTimeline` writes the file, and `summary` computes the
numbers that the command prints.

A version of a model is a "process". Its rows are its instances, with batches and their parts; its queue, with a span
for each request that waits; requests that no batch answers (ensembles, responses from the cache); and streams that
continue after their batch. Arrows lead from a request to its batches, and from a request to its steps and the calls
that were made for it.

Invariant: spans of a row do not overlap, except a batch and its parts, and every arrow has both its ends.
"""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from msgspec import Struct

from shmserve.protocol.recorded import RecordedBatch, RecordedEnd, RecordedRequest
from shmserve.terminal.output import percentile
from shmserve.terminal.tables import duration_text, table


class Collected:
    """The records of a recording. Invariants: `batches` and `ends` contain records of at most `limit` requests. Other
    requests are only counted in `left_out`. A request counts once, however many records it has."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.batches: list[RecordedBatch] = []
        self.ends: dict[int, RecordedEnd] = {}
        """Number of the request -> its end."""
        self.clients: dict[int, str] = {}
        self._kept: set[int] = set()
        """Numbers of the requests in `batches` and `ends`."""
        self._dropped: set[int] = set()
        """Numbers of the requests that are left out."""
        self._left_out_by_server = 0

    @property
    def requests(self) -> int:
        return len(self._kept)

    @property
    def left_out(self) -> int:
        return len(self._dropped)

    @property
    def missing(self) -> int:
        """Number of requests that were recorded but are not kept."""
        return self.left_out + self._left_out_by_server

    def add(self, answer: dict[str, Any]) -> None:
        """Adds the records of one answer to `record`."""
        self._left_out_by_server = answer["left_out"]
        self.clients |= {int(number): name for number, name in answer["clients"].items()}
        for record in msgspec.convert(answer["records"], list[RecordedBatch | RecordedEnd]):
            if isinstance(record, RecordedBatch):
                if self._keeps({request.number for request in record.requests}):
                    self.batches.append(record)
            elif self._keeps({record.request.number}):
                self.ends[record.request.number] = record

    def _keeps(self, numbers: set[int]) -> bool:
        """Whether a record of these requests is kept, which requires that all of them are."""
        new = numbers - self._kept
        if new and (len(self._kept) + len(new) > self._limit or not new.isdisjoint(self._dropped)):
            self._dropped |= new
            return False
        self._kept |= new
        return True


LANES = 256
"""Maximum number of rows for one kind of span of a model; more would not be readable."""


def lanes(spans: Sequence[tuple[int, int]], limit: int = LANES) -> list[int | None]:
    """The lowest free row for each span (begin, end); None if `limit` rows are occupied."""
    result: list[int | None] = [None] * len(spans)
    occupied: list[tuple[int, int]] = []
    free: list[int] = []
    used = 0
    for place in sorted(range(len(spans)), key=lambda place: spans[place]):
        begin, end = spans[place]
        while occupied and occupied[0][0] <= begin:
            heappush(free, heappop(occupied)[1])
        if free:
            lane = heappop(free)
        elif used < limit:
            lane = used
            used += 1
        else:
            continue
        result[place] = lane
        heappush(occupied, (end, lane))
    return result


Event = dict[str, Any]
Model = tuple[str, int]
"""Name and version."""

PARTS = ("gather", "compute", "scatter")
SHOWN = 256
"""Maximum number of requests listed for a batch."""
ROWS = 10_000
"""Row numbers per model; row numbers are unique in the file."""
_REQUESTS, _QUEUE, _STREAMS = 1000, 2000, 3000
"""First numbers of these rows; those of instances are below."""
_NAMES = {_REQUESTS: "requests", _QUEUE: "queue", _STREAMS: "streams"}
REASONS = {
    "full": "no further request fits",
    "preferred": "it has a preferred size",
    "delay": "its oldest request has waited for the maximum delay",
    "shape": "the next request differs in shapes or optional inputs",
    "idle": "an instance was idle, and there was no reason to wait",
    "alone": "retried alone, after a batch with it killed its worker",
    "single": "the model takes one request at a time",
}


class _Span(Struct, eq=False):
    """A period of a request outside of batches. `row`: one of the constants above."""

    model: Model
    row: int
    begin: int
    end: int
    request: RecordedRequest
    code: str
    batch: RecordedBatch | None
    kind: str
    track: int = 0
    """Number of its row in the file; 0: it is not shown."""

    @property
    def name(self) -> str:
        what = {"cached": " (cached)", "stream": " (stream)"}.get(self.kind, "")
        return f"request {self.request.number}{what}{self.code and f': {self.code}'}"


class TraceTimeline:
    """A recording as trace events. `not_shown`: number of spans that did not fit into the rows of their model."""

    def __init__(self, collected: Collected) -> None:
        self._collected = collected
        self._batches = sorted(collected.batches, key=lambda batch: (batch.times[0], batch.times[3]))
        self._spans = list(self._find_spans())
        models = {(batch.model, batch.version) for batch in self._batches} | {span.model for span in self._spans}
        self._processes = {model: number for number, model in enumerate(sorted(models), 1)}
        times = [batch.times[0] for batch in self._batches] + [span.begin for span in self._spans]
        self.start = min(times, default=0)
        """Begin of the first span, in ns of the server's monotonic clock. Times in the file are relative to it."""
        self._names: dict[int, str] = {}
        """Row -> its name."""
        self._rows: dict[int, int] = {}
        """Batch (its id in this process) -> its row."""
        self._place_batches()
        self.not_shown = self._place_spans()
        self._flows = count(1)

    # ------------------------------------------------------------------------------------ layout

    def _find_spans(self) -> Iterator[_Span]:
        ends, seen = self._collected.ends, set[int]()
        ready: dict[int, int] = {}
        """Request -> when its last batch was done. An iterative model runs a request repeatedly."""
        for batch in self._batches:
            model = (batch.model, batch.version)
            taken, placed = batch.times[0], batch.times[3]
            for request in batch.requests:
                end = ends.get(request.number)
                code = end.code if end is not None else ""
                begin = min(ready.get(request.number, request.arrived), taken)
                ready[request.number] = placed
                seen.add(request.number)
                yield _Span(model, _QUEUE, begin, max(taken, begin + 1), request, code, batch, "queued")
                if end is not None and end.kind == "stream" and end.ended > placed:
                    yield _Span(model, _STREAMS, taken, end.ended, request, code, batch, "stream")
        for number, end in ends.items():
            if number not in seen:
                row = _REQUESTS if end.kind in ("ensemble", "cached") else _QUEUE
                begin = end.request.arrived
                last = max(end.ended, begin + 1)
                yield _Span((end.model, end.version), row, begin, last, end.request, end.code, None, end.kind)

    def _place_batches(self) -> None:
        """Gives each instance a row. Processes of one instance may overlap when one replaces another: the instance then
        gets more rows."""
        rows_of: dict[tuple[Model, str], dict[int, int]] = defaultdict(dict)
        """Instance -> its rows, each with the end of its last batch."""
        used: Counter[Model] = Counter()
        for batch in self._batches:
            model = (batch.model, batch.version)
            rows = rows_of[model, batch.instance]
            row = next((row for row, end in rows.items() if end <= batch.times[0]), 0)
            if not row:
                used[model] += 1
                row = self._processes[model] * ROWS + used[model]
                self._names[row] = batch.instance if not rows else f"{batch.instance} +{len(rows)}"
            rows[row] = batch.times[3]
            self._rows[id(batch)] = row

    def _place_spans(self) -> int:
        groups: dict[tuple[Model, int], list[_Span]] = defaultdict(list)
        for span in self._spans:
            groups[span.model, span.row].append(span)
        not_shown = 0
        for (model, row), spans in groups.items():
            for span, lane in zip(spans, lanes([(span.begin, span.end) for span in spans]), strict=True):
                if lane is None:
                    not_shown += 1
                    continue
                span.track = self._processes[model] * ROWS + row + lane
                self._names[span.track] = _NAMES[row] if not lane else f"{_NAMES[row]} +{lane}"
        return not_shown

    # ------------------------------------------------------------------------------------ events

    def events(self) -> Iterator[Event]:
        for (name, version), process in self._processes.items():
            yield _metadata("process_name", process, 0, {"name": f"{name} version {version}"})
            yield _metadata("process_sort_index", process, 0, {"sort_index": process})
        for row, name in sorted(self._names.items()):
            yield _metadata("thread_name", row // ROWS, row, {"name": name})
            yield _metadata("thread_sort_index", row // ROWS, row, {"sort_index": row})
        waiting: dict[int, list[_Span]] = defaultdict(list)
        """Batch (its id in this process) -> its requests."""
        for span in self._spans:
            if span.track:
                yield self._slice(span.track, span.name, span.begin, span.end, "request", self._request_args(span))
                if span.batch is not None and span.row == _QUEUE:
                    waiting[id(span.batch)].append(span)
        for batch in self._batches:
            yield from self._batch(batch, waiting[id(batch)])
        yield from self._children()
        yield from self._depths()

    def _batch(self, batch: RecordedBatch, spans: Iterable[_Span]) -> Iterator[Event]:
        row, times = self._rows[id(batch)], batch.times
        name = f"lease: {batch.rows}" if batch.lease else f"batch of {batch.rows}"
        yield self._slice(row, name, times[0], times[3], "batch", self._batch_args(batch))
        # Emitted before the parts of the batch: an arrow ends at the innermost slice that has begun.
        for span in spans:
            yield from self._arrow("batched", (span.track, span.end - 1), (row, times[0]))
        for part, begin, end in zip(PARTS, times, times[1:], strict=False):
            yield self._slice(row, part, begin, end, "part", {})

    def _children(self) -> Iterator[Event]:
        """Arrows from requests to their steps and calls."""
        begun: dict[int, tuple[int, int, int]] = {}
        """Request -> row, begin and end of its run."""
        for batch in self._batches:
            row = self._rows[id(batch)]
            begun |= {request.number: (row, batch.times[0], batch.times[3]) for request in batch.requests}
        begun |= {
            span.request.number: (span.track, span.begin, span.end)
            for span in self._spans
            if span.row != _QUEUE and span.track
        }
        for span in self._spans:
            place = begun.get(span.request.parent)
            if place is None or not span.track or span.row == _STREAMS or span.begin > span.request.arrived:
                continue
            row, begin, end = place
            if begin <= span.begin and begin < end:
                yield from self._arrow("for", (row, min(span.begin, end - 1)), (span.track, span.begin))

    def _depths(self) -> Iterator[Event]:
        """The number of waiting requests, as a curve for each model."""
        changes: dict[Model, Counter[int]] = defaultdict(Counter)
        for span in self._spans:
            if span.row == _QUEUE:
                changes[span.model][span.begin] += 1
                changes[span.model][span.end] -= 1
        for model, steps in changes.items():
            depth = 0
            for time in sorted(steps):
                if steps[time]:
                    depth += steps[time]
                    yield {
                        "ph": "C",
                        "name": "queued requests",
                        "pid": self._processes[model],
                        "ts": self._us(time),
                        "args": {"requests": depth},
                    }

    def _slice(self, row: int, name: str, begin: int, end: int, category: str, args: Event) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": row // ROWS,
            "tid": row,
            "ts": self._us(begin),
            "dur": (end - begin) / 1000,
            "args": args,
        }

    def _arrow(self, name: str, begin: tuple[int, int], end: tuple[int, int]) -> Iterator[Event]:
        number = next(self._flows)
        for phase, (row, time) in (("s", begin), ("f", end)):
            event = {
                "ph": phase,
                "name": name,
                "cat": "flow",
                "id": number,
                "pid": row // ROWS,
                "tid": row,
                "ts": self._us(time),
            }
            yield event if phase == "s" else event | {"bp": "e"}

    def _us(self, time: int) -> float:
        return (time - self.start) / 1000

    def _request_args(self, span: _Span) -> Event:
        request, batch = span.request, span.batch
        args: Event = {"request": request.number, "rows": request.rows, "client": self._client(request)}
        if request.own:
            args["number of the client"] = request.own
        if request.id:
            args["id"] = request.id
        if request.parent:
            args["made for request"] = request.parent
        args["result"] = span.code or ("its client did not wait for it" if request.gone and batch else "OK")
        if batch is not None:
            args |= {
                "waited us": (span.end - span.begin) / 1000,
                "batch": batch.number,
                "batch size": len(batch.requests),
                "reason": batch.reason,
            }
        return args

    def _batch_args(self, batch: RecordedBatch) -> Event:
        numbers = [request.number for request in batch.requests]
        args: Event = {
            "batch": batch.number,
            "rows": batch.rows,
            "reason": f"{batch.reason}: {REASONS.get(batch.reason, '')}".rstrip(": "),
            "requests": numbers[:SHOWN],
            "clients": sorted({self._client(request) for request in batch.requests})[:SHOWN],
            "longest wait us": max(max(0, batch.times[0] - request.arrived) for request in batch.requests) / 1000,
        }
        if len(numbers) > SHOWN:
            args["more requests"] = len(numbers) - SHOWN
        if batch.lease:
            args["lease"] = batch.lease
        return args

    def _client(self, request: RecordedRequest) -> str:
        name = self._collected.clients.get(request.client, "")
        return f"{request.client} ({name})" if name else str(request.client)


def _metadata(name: str, process: int, row: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": row, "args": args}


def opened(path: Path, is_gzip: bool) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=3)) if is_gzip else path.open("wb")


def write(file: IO[bytes], events: Iterable[Event], about: Event) -> None:
    """Writes the file, an event per line."""
    encode = msgspec.json.Encoder().encode
    file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n')
    for number, event in enumerate(events):
        file.write((b",\n" if number else b"") + encode(event))
    file.write(b"\n]}\n")


HEAD = ("MODEL", "REQUESTS", "FAILED", "BATCHES", "ROWS/BATCH", "QUEUE P50", "P99", "COMPUTE P50", "REASONS")


class _ModelTimes:
    def __init__(self) -> None:
        self.batches: list[RecordedBatch] = []
        self.codes: Counter[str] = Counter()
        self.requests: set[int] = set()


def summary(collected: Collected) -> list[dict[str, Any]]:
    models: dict[tuple[str, int], _ModelTimes] = defaultdict(_ModelTimes)
    for batch in collected.batches:
        times = models[batch.model, batch.version]
        times.batches.append(batch)
        times.requests.update(request.number for request in batch.requests)
    for number, end in collected.ends.items():
        times = models[end.model, end.version]
        times.requests.add(number)
        if end.code:
            times.codes[end.code] += 1
    return [_summary_of(name, version, times) for (name, version), times in sorted(models.items())]


def _summary_of(name: str, version: int, times: _ModelTimes) -> dict[str, Any]:
    batches = times.batches
    waits = [max(0, batch.times[0] - request.arrived) / 1000 for batch in batches for request in batch.requests]
    computes = [(batch.times[2] - batch.times[1]) / 1000 for batch in batches]
    return {
        "model": name,
        "version": version,
        "requests": len(times.requests),
        "failed": times.codes.total(),
        "batches": len(batches),
        "rows": sum(batch.rows for batch in batches),
        "queue_p50_us": percentile(waits, 50) if waits else None,
        "queue_p99_us": percentile(waits, 99) if waits else None,
        "compute_p50_us": percentile(computes, 50) if computes else None,
        "reasons": dict(Counter(batch.reason for batch in batches).most_common()),
        "errors": dict(times.codes.most_common()),
    }


def text(models: Sequence[dict[str, Any]]) -> str:
    return table(HEAD, [_row(entry) for entry in models], right=range(1, 8)) if models else ""


def _row(entry: dict[str, Any]) -> list[str]:
    batches = entry["batches"]
    return [
        f"{entry['model']} {entry['version']}",
        f"{entry['requests']:,}",
        f"{entry['failed']:,}",
        f"{batches:,}",
        f"{entry['rows'] / batches:.1f}" if batches else "",
        *(_us_text(entry[name]) for name in ("queue_p50_us", "queue_p99_us", "compute_p50_us")),
        ", ".join(f"{reason} {100 * number / batches:.0f} %" for reason, number in entry["reasons"].items()),
    ]


def _us_text(value: float | None) -> str:
    return "" if value is None else duration_text(value / 1e6)
