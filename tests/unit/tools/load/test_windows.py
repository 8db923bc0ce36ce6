"""Responses grouped into windows, their latencies in histograms, and the use of processors and GPUs meanwhile."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.tools.load.analysis.latencies import DIGITS, LatencyHistogram, buckets, percentile_of, window_percentiles
from shmserve.tools.load.analysis.usage import Meter, UsageReading, is_local, server_pid, used
from shmserve.tools.load.analysis.windows import Collector, is_long_enough, timeline, window_of
from shmserve.tools.load.generation.messages import Samples
from shmserve.tools.load.one_load import between, latencies_of
from shmserve.tools.load.plan import SECOND, Endpoint, MeasureSettings, Objectives
from shmserve.tools.load.targets.base import latest_statistics
from tests.support.hypothesis_profiles import examples


def samples(
    until: int, done: Sequence[int], latency: Sequence[int], code: Sequence[int] = (), **more: bytes
) -> Samples:
    latencies = {"first": b"", "gap_at": b"", "gap": b"", "prompt": b"", "output": b""} | more
    return Samples(
        until_ns=until,
        cpu_ns=until // 2,
        done=array("q", done).tobytes(),
        latency=array("q", latency).tobytes(),
        delay=array("q", [0] * len(done)).tobytes(),
        code=array("h", code or [0] * len(done)).tobytes(),
        errors=["first text", "second text"],
        **latencies,
    )


def test_a_window_has_what_arrived_in_it() -> None:
    collector = Collector(2)
    collector.add(0, samples(100, [10, 50, 99], [1, 2, 3]))
    assert not collector.complete(100)
    collector.add(1, samples(120, [20, 100, 110], [4, 5, 6], [0, 0, 2]))
    assert collector.complete(100)
    assert not collector.complete(101)
    assert collector.count(50) == 4
    found = window_of(collector.take(20, 100), 20, 100, 10, deadline_ns=3)
    assert (found.start_ns, found.length_ns, found.good, found.failed, found.late) == (10, 80, 3, 0, 1)
    assert found.per_s == pytest.approx(3e9 / 80)
    assert found.in_time_per_s == pytest.approx(2e9 / 80)
    assert found.percentiles == {"p50": 3.0}
    rest = collector.take(100, 1000)
    assert (sorted(rest.latency.tolist()), rest.good.tolist()) == ([5, 6], [5])
    assert collector.error_counts(rest) == {"second text": 1}
    collector.add(2, samples(5, [1], [1]))
    assert collector.complete(100), "a process without callers is not waited for"
    collector = Collector(1)
    gaps = {"gap_at": array("q", [5, 15, 16]).tobytes(), "gap": array("q", [1, 2, 3]).tobytes()}
    collector.add(0, samples(20, [12, 18], [9, 8], first=array("q", [4, 0]).tobytes(), **gaps))
    part = collector.take(10, 16)
    assert (part.gaps.tolist(), part.first.tolist()) == ([2], [4])
    assert collector.take(16, 20).gaps.tolist() == [3]


def test_the_last_second_is_kept_for_the_progress_display() -> None:
    """Windows end every second; a rate that started from 0 at each would rise from 0 to its value."""
    collector = Collector(2)
    half = SECOND // 2
    collector.add(0, samples(3 * half, [1, half, 3 * half - 1], [1, 2, 3]))
    collector.add(1, samples(2 * SECOND, [SECOND, 3 * half], [4, 5]))
    collector.take(0, SECOND)
    end, recent = collector.latest()
    assert (end, sorted(recent.latency)) == (3 * half, [2, 3, 4]), "the other process has reported no further"
    collector.take(SECOND, 2 * SECOND)
    assert not len(collector.peek(0, SECOND).done)


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), max_size=60),
    st.lists(st.integers(1, 99), max_size=5),
    st.integers(1, 4),
)
def test_no_response_is_lost_or_counted_twice(
    responses: list[tuple[int, int]], bounds: list[int], processes: int
) -> None:
    collector = Collector(processes)
    for index in range(processes):
        part = sorted(responses[index::processes])
        collector.add(index, samples(100, [done for done, _ in part], [latency for _, latency in part]))
    edges = [0, *sorted(set(bounds)), 100]
    taken = [collector.take(start, end) for start, end in itertools.pairwise(edges)]
    assert sorted((done, latency) for part in taken for done, latency in zip(part.done, part.latency, strict=True)) == (
        sorted(responses)
    )


def test_windows_are_divided_and_extended() -> None:
    collector = Collector(1)
    collector.add(0, samples(200, [100, 119, 120, 199], [1, 2, 3, 4], [0, 0, 0, 1]))
    parts = timeline(collector.take(100, 200), 100, 200, 50)
    assert [(part.start_ns, part.length_ns) for part in parts] == [(50 + 20 * number, 20) for number in range(5)]
    assert [(part.good, part.failed) for part in parts] == [(2, 0), (1, 0), (0, 0), (0, 0), (0, 1)]
    settings = MeasureSettings(window_ns=100, min_responses=30)
    assert not is_long_enough(100, 29, settings)
    assert is_long_enough(100, 30, settings)
    assert is_long_enough(1000, 0, settings)


@settings(max_examples=examples(20))
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=300))
def test_percentiles_are_exact_to_the_digits_of_the_histogram(values: list[int]) -> None:
    histogram = LatencyHistogram()
    half = len(values) // 2
    histogram.add(np.array(values[:half], np.int64))
    histogram.add(np.array(values[half:], np.int64))
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    for share in (50.0, 90.0, 99.0):
        rank = max(1, int(share / 100 * len(values) + 0.5))  # HDR histograms take the nearest rank
        exact = sorted(values)[rank - 1]
        assert percentile_of(histogram.encoded(), share) == pytest.approx(exact, rel=2 * 10**-DIGITS, abs=1)
    counted = buckets(histogram.encoded())
    assert sum(count for _, count in counted) == len(values)
    assert [value for value, _ in counted] == sorted(value for value, _ in counted)


def test_rare_percentiles_need_many_values() -> None:
    histogram = LatencyHistogram()
    histogram.add(np.arange(1, 1001, dtype=np.int64))
    assert set(histogram.percentiles()) == {"p50", "p90", "p95", "p99"}
    assert set(window_percentiles(np.arange(1, 21, dtype=np.int64))) == {"p50", "p90", "p95"}
    assert window_percentiles(np.array([], np.int64)) == {}
    assert LatencyHistogram().percentiles() == {}
    assert LatencyHistogram().extremes == (0.0, 0.0)
    found = latencies_of([np.arange(1, 601, dtype=np.int64)] * 2, 0.95).percentiles
    assert found["p90"].half == 0, "both windows agree"
    assert "p99" in found
    few = latencies_of([np.arange(1, 61, dtype=np.int64)] * 20, 0.95).percentiles["p99"]
    assert (few.low, few.high) == (0, 2 * few.mean)


def test_requests_of_a_language_model_that_meet_objectives() -> None:
    """The last one failed; the third has a single token, and so no time between tokens."""
    numbers = {"first": [10, 20, 30, 5], "output": [11, 6, 1, 2], "prompt": [7, 7, 7, 7]}
    collector = Collector(1)
    more = {name: array("q", values).tobytes() for name, values in numbers.items()}
    collector.add(0, samples(9, [1, 2, 3, 4], [60, 120, 30, 9], [0, 0, 0, 1], **more))
    found = collector.take(0, 9)
    assert found.between_tokens.tolist() == [5, 20, 0]
    for limits, count in (({"ttft": 20}, 2), ({"itl": 5}, 2), ({"e2e": 60}, 2), ({"ttft": 20, "e2e": 60}, 1), ({}, 3)):
        assert found.met(Objectives(**limits)) == count, limits


def test_cpu_usage_is_the_difference_of_readings_by_role() -> None:
    """A process that started in between counts from 0; one that ended no longer counts."""
    before = UsageReading(10.0, {1: ("broker", 5.0), 2: ("models", 1.0), 3: ("models", 9.0)}, {"GPU 0": (0.9, 7)})
    middle = UsageReading(0.0, {}, {"GPU 0": (0.2, 30)})
    after = UsageReading(13.0, {1: ("broker", 6.0), 2: ("models", 1.5), 4: ("models", 0.5)}, {"GPU 0": (0.4, 20)})
    found = used([before, middle, after], 2.0)
    assert (found.machine, found.server) == (1.5, {"broker": 0.5, "models": 0.5})
    assert found.gpus == {"GPU 0": pytest.approx(0.3)}
    assert found.gpu_bytes == {"GPU 0": 30}
    assert not used([before, UsageReading(0.0, {}, {}), after], 2.0).gpus, "a GPU that could not always be read"


def test_a_server_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert server_pid(Endpoint(url=f"http://127.0.0.1:{port}")) == os.getpid()
    for url in (f"grpc://127.0.0.1:{port}", "unix:///nowhere/lane.sock", f"http://example.invalid:{port}"):
        assert server_pid(Endpoint(url=url)) == 0, "no process listens"


def test_a_server_is_recognised_as_local_by_its_url() -> None:
    for url in ("http://localhost:1", "grpc://127.0.0.5:1", "http://[::1]:1", "unix:///a", "ipc:///a", None):
        assert is_local(Endpoint(url=url)), url
    for url in ("http://10.0.0.1:1", "tcp://host:1"):
        assert not is_local(Endpoint(url=url)), url


def test_gpus_are_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    nvml: Any = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=25 * (handle + 1)),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle + 100),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reading = Meter(Endpoint(url="unix:///nowhere/lane.sock")).read()
    assert reading.gpus == {"GPU 0": (0.25, 100), "GPU 1": (0.5, 101)}

    def failing(*handles: int) -> Any:
        if handles in ((), (0,)):
            raise NVMLError
        return SimpleNamespace(gpu=50)

    nvml.nvmlDeviceGetUtilizationRates = failing
    assert Meter(Endpoint(url="unix:///nowhere/lane.sock")).read().gpus == {"GPU 1": (0.5, 101)}
    nvml.nvmlInit = failing
    assert Meter(Endpoint(url="unix:///nowhere/lane.sock")).read().gpus == {}


def statistics(count: int, ns: int, batches: int) -> dict[str, Any]:
    """Over gRPC, 64-bit numbers are texts, and zeros are left out."""
    names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "inference_count": str(2 * count),
        "execution_count": batches,
        "inference_stats": {name: {"count": str(count), "ns": str(ns * number)} for number, name in enumerate(names)},
        "batch_stats": [{"batch_size": "4", "compute_infer": {"count": str(batches)}}],
        "batch_reasons": {"full": batches, "idle": 1},
    }


def test_server_counters_are_differences() -> None:
    found: Any = between(statistics(10, 100, 3), statistics(30, 500, 8))
    assert (found.requests, found.failed, found.rows, found.batches) == (20, 0, 40, 5)
    assert found.parts == {"queue": 20, "gather": 40, "compute": 60, "scatter": 80}
    assert (found.batch_sizes, found.reasons, found.mean_batch) == ({"4": 5}, {"full": 5}, 8)
    assert between({}, {}) is None, "a server without statistics"
    first: Any = between({}, statistics(2, 10, 1))
    assert first.requests == 2
    entries = [{"version": version} for version in ("2", "10", "9")]
    assert latest_statistics({"model_stats": entries}) == {"version": "10"}
    assert latest_statistics({}) == {}
