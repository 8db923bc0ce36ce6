"""Send times of open loops, and how processes share a load."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.tools.load.generation.schedule import recorded_times, send_times, share, useful_processes
from shmserve.tools.load.plan import SECOND, ClosedLoop, Load, OpenLoop, ReplayLoop
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples


def merged(load: Load, processes: int, until: int) -> list[int]:
    times = [takewhile(lambda at: at < until, send_times(load, index, processes)) for index in range(processes)]
    return sorted(at for each in times for at in each)


@pytest.mark.parametrize("processes", [1, 3])
def test_constant_rates_and_recordings(processes: int) -> None:
    assert merged(OpenLoop(250.0, "constant"), processes, SECOND) == [number * 4_000_000 for number in range(250)]
    load = ReplayLoop((5, 6, 9))
    assert list(islice(send_times(load), 7)) == [0, 1, 4, 6, 7, 10, 12]  # a mean gap of 2 follows the last
    assert load.rate == pytest.approx(3 * SECOND / 6)


@pytest.mark.parametrize("processes", [1, 4])
def test_poisson_has_the_rate_and_the_spread(processes: int) -> None:
    """The distances of a Poisson process are exponential: their standard deviation is their mean."""
    times = merged(OpenLoop(1000.0, "poisson", seed=3), processes, 50 * SECOND)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1e6, rel=0.03)
    assert spread == pytest.approx(1e6, rel=0.05)
    assert times == merged(OpenLoop(1000.0, "poisson", seed=3), processes, 50 * SECOND)
    assert times != merged(OpenLoop(1000.0, "poisson", seed=4), processes, 50 * SECOND)


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_every_thousand_random_arrivals_take_the_time_of_the_nominal_rate(seed: int, processes: int) -> None:
    load = OpenLoop(2000.0, "poisson", seed)
    per_process = 3 * (1000 // processes)
    for index in range(processes):
        times = list(islice(send_times(load, index, processes), per_process))
        assert times == sorted(times)
        assert times[-1] == pytest.approx(per_process * processes * SECOND / load.rate, abs=1)
        due = [at * load.rate / processes / SECOND for at in times]
        assert all(0.85 < number / due[number - 1] < 1.15 for number in range(per_process // 3, per_process + 1))


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=20), st.integers(1, 5))
def test_processes_send_a_recording_once(times: list[int], processes: int) -> None:
    load = ReplayLoop(tuple(sorted(times)))
    count = 3 * len(times)
    alone = list(islice(send_times(load), count))
    each = [list(islice(send_times(load, index, processes), count)) for index in range(processes)]
    assert sorted(at for some in each for at in some)[: count // processes] == alone[: count // processes]
    assert alone == sorted(alone)


@given(st.integers(1, 100), st.integers(1, 16))
def test_callers_are_divided(concurrency: int, wanted: int) -> None:
    load = ClosedLoop(concurrency)
    processes = useful_processes(load, wanted)
    parts = [share(load, index, processes) for index in range(processes)]
    counts = [part.concurrency for part in parts if isinstance(part, ClosedLoop)]
    assert sum(counts) == concurrency
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


def test_recordings_are_read() -> None:
    text = '{"at": 2, "model": "m", "rows": 3}\n\n{"at": 0.5}\n{"at": 1, "model": "other"}\n0.25\n'
    assert recorded_times(text, "m", "file") == (SECOND // 4, SECOND // 2, 2 * SECOND)


@cases(
    ("1\nnot a time", "file, line 2: expected"),
    ('{"time": 1}', "file, line 1: expected"),
    ("-1\n2", "file, line 1: a time is from 0 to 1,000,000,000 seconds, not -1"),
    ("1e200\n2", r"file, line 1: a time is from 0 to 1,000,000,000 seconds, not 1e\+200"),
    ("2\n2", "file: all times of model 'm' are equal"),
    ('{"at": 1, "model": "other"}\n2', "file has 1 times for model 'm', and at least 2 are needed"),
)
def test_recordings_that_are_not_times(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        recorded_times(text, "m", "file")
