"""The comparison of two saved runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.clients.load.analysis.compare import BETTER, MIXED, SAME, UNKNOWN, WORSE, compare
from shmserve.clients.load.plan import Open
from shmserve.errors import InvalidRequest
from tests.support.hypothesis_profiles import examples
from tests.unit.clients.load.points import point, run, steady, window

OLD = [1000, 1010, 990, 1005]


def test_a_clear_difference() -> None:
    slower = [value * 8 // 10 for value in OLD]
    found = compare(run(steady(1, OLD)), run(steady(1, slower, p50=1.25e6)))
    assert found.verdict == WORSE
    throughput, p50, p99 = found.changes
    assert (throughput.metric, throughput.verdict) == ("throughput", WORSE)
    assert throughput.relative is not None
    assert throughput.relative.mean == pytest.approx(-0.2, abs=0.001)
    assert throughput.relative.low < -0.2 < throughput.relative.high < 0
    assert (p50.metric, p50.verdict) == ("p50", WORSE)
    assert (p99.metric, p99.verdict) == ("p99", SAME)


def test_noise_is_no_difference() -> None:
    assert compare(run(steady(1, OLD)), run(steady(1, [900, 1100, 950, 1080]))).verdict == SAME
    assert compare(run(steady(1, OLD)), run(steady(1, OLD))).verdict == SAME


def test_a_difference_below_the_least_does_not_count() -> None:
    exact = [1000, 1000, 1000], [1005, 1005, 1005]
    assert compare(run(steady(1, exact[0])), run(steady(1, exact[1]))).verdict == SAME
    assert compare(run(steady(1, exact[0])), run(steady(1, exact[1])), least=0.001).verdict == BETTER


def test_better_here_and_worse_there() -> None:
    old = run(steady(1, OLD), steady(8, OLD))
    new = run(steady(1, [value * 2 for value in OLD]), steady(8, [value // 2 for value in OLD]))
    assert compare(old, new).verdict == MIXED


def test_the_throughput_of_an_open_loop_is_not_compared() -> None:
    load = Open(1000.0)
    one = run(point(load, [window(number, good) for number, good in enumerate(OLD)]))
    assert [change.metric for change in compare(one, one).changes] == ["p50", "p99"]


def test_one_window_is_too_few() -> None:
    assert compare(run(steady(1, [1000])), run(steady(1, [500]))).verdict == UNKNOWN


def test_runs_without_a_common_load() -> None:
    with pytest.raises(InvalidRequest, match=r"no load in common \(concurrency 1; concurrency 2\)"):
        compare(run(steady(1, OLD)), run(steady(2, OLD)))


def test_what_makes_runs_different_is_noted() -> None:
    old, new = run(steady(1, OLD)), run(steady(1, OLD))
    other = type(new)(**{name: getattr(new, name) for name in new.__struct_fields__} | {"machine": {"cores": "64"}})
    assert any(note.startswith("the machine differs") for note in compare(old, other).notes)
    assert not compare(old, new).notes


@settings(max_examples=examples(60))
@given(*[st.lists(st.integers(500, 1500), min_size=2, max_size=6) for _ in range(2)])
def test_the_other_way_round_the_verdict_is_the_opposite(first: list[int], second: list[int]) -> None:
    opposite = {BETTER: WORSE, WORSE: BETTER, SAME: SAME, UNKNOWN: UNKNOWN, MIXED: MIXED}
    one, other = run(steady(1, first)), run(steady(1, second))
    assert compare(other, one, least=0).verdict == opposite[compare(one, other, least=0).verdict]
