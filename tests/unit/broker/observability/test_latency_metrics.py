"""Latencies as metrics: summaries, histograms, and the times between responses."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.broker.observability.metrics import MetricSettings
from shmserve.core.limits import Limits
from shmserve.core.stats import latencies
from shmserve.protocol.messages import Options
from tests.support.broker.metrics import MS, Seen, finish, infer, metrics, metrics_text, policy
from tests.support.core.world import World

SUFFIXES = ("_bucket", "_sum", "_count")
MODEL = {"model": "m", "version": "1"}
SUMMARIES = tuple(f"nv_inference_{what}_summary_us" for what in (
    "request", "queue", "compute_input", "compute_infer", "compute_output"
))  # fmt: skip
FIRST = "nv_inference_first_response_histogram_ms"


def test_summaries_cover_the_last_minute() -> None:
    """Summaries of the last minute, compared with the durations of the simulated requests; sum and count cover all
    time."""
    world = World(Limits(summaries=True))
    world.deploy(policy())
    client = world.connect("c")
    shown = MetricSettings(counter_latencies=False, summary_quantiles=(0.5, 1.0), cpu=False)
    assert "NaN" in metrics_text(world, shown), "nothing was counted"
    off = World()
    off.deploy(policy())
    text = metrics(off).text
    assert not any(name in text for name in (*SUMMARIES, FIRST))
    assert "nv_cpu_utilization" in text
    for number in range(1, 101):
        world.turn([infer(client, number)])
        world.now += number * MS
        finish(world, took=number * MS)
    seen = metrics(world, shown=shown)
    name = "nv_inference_compute_infer_summary_us"
    assert seen(name, **MODEL, quantile="0.5") == pytest.approx(50_000, rel=0.017)
    assert seen(name, **MODEL, quantile="1") == pytest.approx(100_000, rel=0.017)
    assert seen(f"{name}_count", **MODEL) == 100
    assert seen(f"{name}_sum", **MODEL) == 5050 * 1000
    assert seen("nv_inference_request_summary_us", **MODEL, quantile="0.5") == pytest.approx(50_000, rel=0.017)
    assert not seen.all("nv_inference_request_duration_us"), "counters were turned off"
    assert "nv_cpu" not in seen.text
    world.now += 75_000 * MS
    world.turn([])
    later = metrics_text(world, shown)
    assert f'{name}{{model="m",version="1",quantile="0.5"}} NaN' in later
    assert f'{name}_count{{model="m",version="1"}} 100' in later


def test_summaries_of_the_cache() -> None:
    world = World(Limits(summaries=True, cache_bytes=1 << 20))
    world.deploy(policy())
    world.deploy(replace(policy("n"), cached=True))
    world.core.state.cache.clock = itertools.count(0, 1000 * MS).__next__
    client = world.connect("c")
    cached = {"model": "n", "version": "1"}
    for number, name in enumerate("mnnnnn", 1):
        world.turn([infer(client, number, name)])
        if number <= 2:
            finish(world)
    seen = metrics(world, shown=MetricSettings(summary_quantiles=(0.5,), cpu=False))
    for name, kept, took in (("hit", 4, 1_000_000), ("miss", 1, 2_000_000)):
        summary = f"nv_cache_{name}_summary_per_model"
        assert seen(f"{summary}_count", **cached) == kept
        assert seen(f"{summary}_sum", **cached) == seen(f"nv_cache_{name}_duration_per_model", **cached) == kept * took
        assert seen(summary, **cached, quantile="0.5") == pytest.approx(took, rel=0.017)
        assert not seen.all(f"{summary}_count", **MODEL)
    assert not seen.all("nv_inference_request_summary_us_count", **cached)


def buckets_of(seen: Seen, name: str, **labels: str) -> dict[float, float]:
    return {float(dict(one)["le"]): count for one, count in seen.all(f"{name}_bucket", **labels).items()}


def test_times_to_the_first_response() -> None:
    """Uses the buckets of the model, or Triton's."""
    world = World(Limits(first_responses=True))
    world.deploy(policy())
    world.deploy(replace(policy("n"), first_response_ms=(4.0, 1.0)))
    client = world.connect("c")
    for number, (name, wait) in enumerate((("m", 100), ("m", 101), ("m", 9000), ("n", 1), ("n", 5)), 1):
        world.turn([infer(client, number, name)])
        world.now += wait * MS
        finish(world)
    seen = metrics(world)
    assert buckets_of(seen, FIRST, **MODEL) == {100: 1, 500: 2, 2000: 2, 5000: 2, math.inf: 3}
    assert (seen(f"{FIRST}_sum", **MODEL), seen(f"{FIRST}_count", **MODEL)) == (9201, 3)
    assert buckets_of(seen, FIRST, model="n") == {1: 1, 4: 1, math.inf: 2}


def test_times_between_responses() -> None:
    """For decoupled models only, with the same switch; cumulative, in power-of-two buckets."""
    world = World(Limits(first_responses=True))
    world.deploy(policy())
    world.deploy(replace(policy("s"), decoupled=True))
    client, worker = world.connect("c"), world.worker("s_0")
    world.turn([client.infer(1, "s", options=Options(window=9))])
    (request,) = worker.streams
    for wait in (1, 2, 40, 700, 20_000):
        worker.part(request)
        world.now += wait * MS
        world.turn(world.heard(worker))
    shown = MetricSettings(histogram_latencies=True)
    seen = metrics(world, shown=shown)
    name = "shmserve_inference_between_responses_histogram_ms"
    buckets = buckets_of(seen, name, model="s", version="1")
    assert min(buckets) == pytest.approx(1.05, rel=0.01)
    assert sorted(buckets)[-2] == pytest.approx(17180, rel=0.01)
    for edge, count in buckets.items():
        assert count == sum(wait <= edge for wait in (2, 40, 700, 20_000)), edge
    assert (seen(f"{name}_sum", model="s", version="1"), seen(f"{name}_count", model="s", version="1")) == (20_742, 4)
    assert not seen.all(f"{name}_count", **MODEL)
    assert f"{name}_count" not in metrics_text(world, MetricSettings())


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200), st.floats(0, 1))
def test_quantiles_are_close_to_the_exact_ones(durations: list[int], share: float) -> None:
    window = latencies.Window()
    for ns in durations:
        window.add(ns * 1000, 1, 0)
    exact = sorted(durations)[max(1, math.ceil(share * len(durations))) - 1]
    assert window.quantiles([share], 0)[0] == pytest.approx(exact, rel=1 / 63)
