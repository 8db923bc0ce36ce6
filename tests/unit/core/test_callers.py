"""Which callers are remembered, and which of them are shown."""

from __future__ import annotations

from shmserve.core.stats.callers import KEPT, SHOWN, CallerCounts


def test_callers_with_the_most_in_flight_and_then_the_most_time_are_shown() -> None:
    counts = CallerCounts()
    for number in range(2 * SHOWN):
        counts.of(f"caller {number}").request_ns = number
    counts.of("caller 3").in_flight = 2
    assert [count.name for count in counts.largest()[:3]] == ["caller 3", "caller 19", "caller 18"]
    assert len(counts.largest()) == SHOWN


def test_the_callers_that_took_least_are_forgotten_unless_they_have_requests() -> None:
    counts = CallerCounts()
    busy = counts.of("busy")
    busy.in_flight = 1
    large = counts.of("large")
    large.request_ns = 5
    small = counts.of("small")
    for number in range(3 * KEPT):
        counts.of(f"user {number}").request_ns = 1
        assert len(list(counts)) <= KEPT + 1
    assert counts.of("busy") is busy
    assert counts.of("large") is large
    assert counts.of("small").number != small.number
