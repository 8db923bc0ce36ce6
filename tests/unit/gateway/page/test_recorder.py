"""The recorded history, against lists of all values."""

from __future__ import annotations

import tracemalloc
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.page.recorder import COARSE, FINE, SERIES, SERVER, STEP, Recorder
from tests.support.hypothesis_profiles import examples

KEY = ("m", "1")
START = 5000


def values(number: float | None) -> dict[str, float | None]:
    return dict.fromkeys(SERIES, number)


POINTS = st.tuples(st.integers(1, 15), st.integers(0, 24).map(lambda halves: halves / 2), st.none() | st.integers(0, 5))
"""Seconds that passed, those of them that the value covers, and the value."""


@settings(max_examples=examples(60, quick=15))
@given(st.lists(POINTS, min_size=1, max_size=80))
def test_the_last_seconds_and_steps(points: list[tuple[int, float, int | None]]) -> None:
    recorder = Recorder()
    kept = np.full(START + sum(passed for passed, _, _ in points) + FINE + COARSE * STEP, np.nan)
    now = START
    for passed, seconds, value in points:
        now += passed
        recorder.record(now, seconds, [KEY], {KEY: values(value)})
        covered = ceil(seconds)
        covered = max(1, min(covered, passed if now - passed > START else covered))
        kept[now - covered + 1 : now + 1] = np.nan if value is None else value
    curves = recorder.curves(KEY)
    assert curves is not None
    np.testing.assert_array_equal(np.array(curves["fine"]["requests"], float), kept[now - FINE + 1 : now + 1])
    end = (now + 1) // STEP * STEP
    steps = kept[end - 6 * STEP : end].reshape(-1, STEP)
    for name, summary in (("requests", np.nanmean), ("queue", np.nanmax)):
        expected = [None if np.isnan(step).all() else pytest.approx(summary(step), rel=1e-3) for step in steps]
        assert curves["coarse"][name][-6:] == expected


def test_a_long_outage_is_a_gap() -> None:
    recorder = Recorder()
    recorder.record(START, 1, [KEY], {KEY: values(1)})
    recorder.record(START + 2 * COARSE * STEP, 1, [KEY], {KEY: values(2)})
    curves = recorder.curves(KEY)
    assert curves is not None
    assert curves["fine"]["requests"] == [None] * (FINE - 1) + [2]
    assert set(curves["coarse"]["requests"]) == {None}


def test_a_removed_version_leaves_nothing_to_the_next() -> None:
    recorder = Recorder()
    recorder.record(START, 1, [KEY], {KEY: values(1)})
    recorder.record(START + 1, 1, [], {})
    assert recorder.curves(KEY) is None
    recorder.record(START + 2, 1, [("n", "1")], {})
    curves = recorder.curves(("n", "1"))
    assert curves is not None
    assert curves["fine"]["requests"][-3:] == [None, None, 0]


def test_the_memory_of_1000_versions() -> None:
    keys = [(f"m{number}", "1") for number in range(1000)]
    tracemalloc.start()
    recorder = Recorder()
    recorder.record(START, 1, keys, {key: values(1) for key in keys})
    recorder.record(START + COARSE * STEP, 1, keys, {SERVER: values(1)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 16 << 20 < peak < 32 << 20
