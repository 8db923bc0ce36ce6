"""Optional latency metrics: quantiles of the last minute, and first response times. Off by default.

Quantiles come from log-linear buckets as in HDR histograms: 32 per power of two, for an error of at most 1.6 %.
Counting a value takes a shift, an addition and a dict update. The window slides in steps of 12 s.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct, field

_STEP_NS = 12_000_000_000
_STEPS = 5
_BITS = 5
BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's bucket bounds for first response times."""


def bucket(us: int) -> int:
    """Values below 64 have a bucket each."""
    shift = us.bit_length() - _BITS - 1
    return us if shift <= 0 else (shift << _BITS) + (us >> shift)


def middle(bucket: int) -> int:
    """The middle of the bucket's values."""
    shift = (bucket >> _BITS) - 1
    if shift <= 0:
        return bucket
    return (((bucket & ((1 << _BITS) - 1)) + (1 << _BITS)) << shift) + (1 << shift >> 1)


class Window(Struct):
    """Counts of durations in us over the last minute. `steps`: number of a 12 s step -> bucket -> count."""

    steps: dict[int, dict[int, int]] = {}

    def add(self, ns: int, count: int, now: int) -> None:
        step = now // _STEP_NS
        counts = self.steps.get(step)
        if counts is None:
            self._forget(step)
            counts = self.steps[step] = {}
        at = bucket(ns // 1000) if ns > 0 else 0
        counts[at] = counts.get(at, 0) + count

    def _forget(self, step: int) -> None:
        for old in [old for old in self.steps if old <= step - _STEPS]:
            del self.steps[old]

    def quantiles(self, shares: Sequence[float], now: int) -> list[float]:
        """In us; nan if nothing was counted."""
        self._forget(now // _STEP_NS)
        counts: Counter[int] = Counter()
        for part in self.steps.values():
            counts.update(part)
        total, below, at = sum(counts.values()), 0, 0
        if not total:
            return [math.nan] * len(shares)
        quantiles: dict[float, float] = {}
        ordered = sorted(counts.items())
        for share in sorted(shares):
            rank = max(1, math.ceil(share * total))
            while below + ordered[at][1] < rank:
                below += ordered[at][1]
                at += 1
            quantiles[share] = middle(ordered[at][0])
        return [quantiles[share] for share in shares]


class Summaries(Struct):
    """The windows of one model version. Each request counts at most once in each of them."""

    request: Window = field(default_factory=Window)
    queue: Window = field(default_factory=Window)
    input: Window = field(default_factory=Window)
    infer: Window = field(default_factory=Window)
    output: Window = field(default_factory=Window)
    hit: Window = field(default_factory=Window)
    """Requests answered from the response cache."""
    miss: Window = field(default_factory=Window)
    """Cache lookup and insertion time of requests that missed the cache."""

    def answered(self, arrivals: Sequence[int], taken: int, now: int) -> None:
        for arrived, count in Counter(arrivals).items():
            self.request.add(now - arrived, count, now)
            self.queue.add(taken - arrived, count, now)

    def queued(self, arrivals: Sequence[int], taken: int) -> None:
        for arrived in arrivals:
            self.queue.add(taken - arrived, 1, taken)

    def computed(self, answered: int, times: Sequence[int], now: int) -> None:
        """Counts input, inference and output times for this many answered requests."""
        if answered:
            for window, ns in zip((self.input, self.infer, self.output), times, strict=True):
                window.add(ns, answered, now)


class FirstResponses(Struct):
    """Histogram of first response times. `counts` has one more element than `edges_ms`, for longer times."""

    edges_ms: tuple[float, ...]
    counts: list[int]
    sum_ns: int = 0

    @classmethod
    def of(cls, edges_ms: Sequence[float]) -> FirstResponses:
        edges = tuple(sorted(set(edges_ms))) or BUCKETS_MS
        return cls(edges, [0] * (len(edges) + 1))

    def add(self, ns: int) -> None:
        self.counts[bisect_left(self.edges_ms, ns / 1e6)] += 1
        self.sum_ns += ns
