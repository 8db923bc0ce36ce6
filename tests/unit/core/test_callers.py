"""Which callers are remembered."""

from __future__ import annotations

from shmserve.core.stats.callers import KEPT, CallerCounts


def test_the_callers_whose_requests_took_least_are_forgotten() -> None:
    counts = CallerCounts()
    large, small = counts.of("large"), counts.of("small")
    large.request_ns = 5
    for number in range(3 * KEPT):
        counts.of(f"user {number}").request_ns = 1
        assert len(counts.largest(2 * KEPT)) <= KEPT
    assert counts.of("large") is large
    assert counts.of("small").number != small.number
