"""Groups the responses of all generator processes into windows.

Pure functions of the responses: no clock is read.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from shmserve.tools.load.analysis.latencies import window_percentiles
from shmserve.tools.load.generation.messages import Samples
from shmserve.tools.load.plan import SECOND, MeasureSettings, Objectives
from shmserve.tools.load.record import LoadWindow

LONGEST = 10
"""A window may be extended to this many times its length."""
PARTS = 5
"""Number of parts of a window in the timeline."""
Array = NDArray[np.int64]
GeneratorUse = dict[int, tuple[int, int]]
"""Generator process -> its CPU time so far, and the time of that reading, in ns."""
_NONE = np.empty(0, np.int64)


class ResponseColumns(Struct):
    """Responses that arrived within a window: columns with an item for each. `first`, `prompt` and `output` are empty
    without streams. `gaps`: times between the answers of all streams."""

    done: Array
    latency: Array
    delay: Array
    code: NDArray[np.int16]
    process: NDArray[np.int16]
    first: Array
    prompt: Array
    output: Array
    gaps: Array = _NONE

    @property
    def good(self) -> Array:
        """Latencies of successful responses."""
        result: Array = self.latency[self.code == 0]
        return result

    @property
    def between_tokens(self) -> Array:
        """The mean time between the tokens after the first, for each successful response of a language model; 0 if it
        has only one."""
        spent = np.where(self.first > 0, self.latency - self.first, 0) // np.maximum(1, self.output - 1)
        result: Array = np.where(self.output > 1, spent, 0)[self.code == 0]
        return result

    def met(self, objectives: Objectives) -> int:
        """The number of successful responses of a language model that met all objectives."""
        times = (
            (self.first[self.code == 0], objectives.ttft),
            (self.between_tokens, objectives.itl),
            (self.good, objectives.e2e),
        )
        return int(np.logical_and.reduce([values <= (limit or np.inf) for values, limit in times]).sum())


COLUMNS = tuple(name for name in ResponseColumns.__struct_fields__ if name != "gaps")
_NO_CODES = np.empty(0, np.int16)
_NOTHING = ResponseColumns(_NONE, _NONE, _NONE, _NO_CODES, _NO_CODES, _NONE, _NONE, _NONE)


class Collector:
    """Collects samples; `take` removes those of a window. The last second is kept for the progress display."""

    def __init__(self, processes: int) -> None:
        self._chunks: list[ResponseColumns] = []
        self._gaps: list[tuple[Array, Array]] = []
        self.errors: dict[int, list[str]] = {}
        self.until = dict.fromkeys(range(processes), 0)
        self.used: GeneratorUse = dict.fromkeys(range(processes), (0, 0))

    def add(self, process: int, samples: Samples) -> None:
        if process not in self.until:
            return  # the process takes no part in this load
        self.until[process] = samples.until_ns
        self.used[process] = (samples.cpu_ns, samples.until_ns)
        self.errors[process] = samples.errors
        sent = {name: getattr(samples, name) for name in COLUMNS if name != "process"}
        columns: dict[str, Any] = {
            name: np.frombuffer(data, np.int16 if name == "code" else np.int64) for name, data in sent.items()
        }
        count = len(columns["done"])
        if count:
            self._chunks.append(ResponseColumns(process=np.full(count, process, np.int16), **columns))
        if samples.gap:
            self._gaps.append((np.frombuffer(samples.gap_at, np.int64), np.frombuffer(samples.gap, np.int64)))

    def complete(self, end: int) -> bool:
        """Whether all responses before this time have been reported."""
        return min(self.until.values()) >= end

    def count(self, start: int) -> int:
        """Number of reported responses since `start`."""
        return sum(int((chunk.done >= start).sum()) for chunk in self._chunks)

    def peek(self, start: int, end: int) -> ResponseColumns:
        """The responses from `start` to before `end`."""
        return _joined(self._chunks, self._gaps, start, end)

    def take(self, start: int, end: int) -> ResponseColumns:
        """Returns the responses from `start` to before `end`, and drops these and all earlier ones, except those that
        the progress display still needs."""
        result = self.peek(start, end)
        shown = end - SECOND
        self._chunks = [_chosen(chunk, chunk.done >= shown) for chunk in self._chunks if chunk.done.max() >= shown]
        self._gaps = [(at[at >= end], gap[at >= end]) for at, gap in self._gaps if at[-1] >= end]
        return result

    def latest(self) -> tuple[int, ResponseColumns]:
        """The time up to which all responses have been reported, and the responses of the second before it."""
        end = min(self.until.values())
        return end, self.peek(end - SECOND, end)

    def error_counts(self, responses: ResponseColumns) -> Counter[str]:
        counts: Counter[str] = Counter()
        for process, texts in self.errors.items():
            codes = responses.code[(responses.process == process) & (responses.code > 0)]
            for code, count in zip(*np.unique(codes, return_counts=True), strict=True):
                counts[texts[int(code) - 1]] += int(count)
        return counts


def _chosen(chunk: ResponseColumns, where: Any) -> ResponseColumns:
    columns = {name: getattr(chunk, name) for name in COLUMNS}
    return replace(chunk, **{name: values[where] for name, values in columns.items() if len(values)})


def _joined(chunks: list[ResponseColumns], gaps: list[tuple[Array, Array]], start: int, end: int) -> ResponseColumns:
    parts = [_NOTHING, *(_chosen(chunk, (chunk.done >= start) & (chunk.done < end)) for chunk in chunks)]
    between = [_NONE, *(gap[(at >= start) & (at < end)] for at, gap in gaps)]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return ResponseColumns(gaps=np.concatenate(between), **columns)


def window_of(responses: ResponseColumns, start: int, end: int, origin: int, deadline_ns: int) -> LoadWindow:
    good = responses.good
    return LoadWindow(
        start_ns=start - origin,
        length_ns=end - start,
        good=len(good),
        failed=len(responses.code) - len(good),
        late=int((good > deadline_ns).sum()) if deadline_ns else 0,
        mean_ns=float(good.mean()) if len(good) else 0.0,
        percentiles=window_percentiles(good),
    )


def timeline(responses: ResponseColumns, start: int, end: int, origin: int) -> list[LoadWindow]:
    """The window in equal parts."""
    edges = [start + (end - start) * number // PARTS for number in range(PARTS + 1)]
    return [
        window_of(_chosen(responses, (responses.done >= left) & (responses.done < right)), left, right, origin, 0)
        for left, right in pairwise(edges)
    ]


def is_long_enough(length_ns: int, responses: int, settings: MeasureSettings) -> bool:
    """Whether a window of this length with this many responses may end."""
    return responses >= settings.min_responses or length_ns >= LONGEST * settings.window_ns
