"""Rates and percentiles between two documents, against numbers computed by hand or by numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.protocol.rates import percentiles
from shmserve.tools.top.view import make_view
from tests.support.cases import cases
from tests.support.clients.activity_documents import absent, client, counters, document, gpu, instance, model
from tests.support.hypothesis_profiles import examples


def test_rates_between_two_documents() -> None:
    more = {"rows": 900, "batches": 150, "reasons": {"idle": 120, "full": 30}, "cache_hits": 50, "cache_misses": 150}
    before = document(10, model("m", counted=counters(100, 4)))
    (row,) = make_view(before, document(12, model("m", counted=counters(300, 10, **more)))).models
    rates = {
        "requests_per_s": 103, "failed_per_s": 3, "rows_per_s": 400, "batches_per_s": 25, "mean_batch": 16,
        "queue_seconds": 0.001, "compute_seconds": 0.003, "busy": 200 * 0.003 / 2, "cache_hits": 0.25,
    }  # fmt: skip
    assert {key: row[key] for key in rates} == pytest.approx(rates)
    assert row["reasons"] == {"idle": 20, "full": 30}
    assert (row["requests"], row["failed"]) == (310, 10)
    assert all(0.002 < row[name] < 0.0042 for name in ("p50", "p95", "p99"))
    before = document(1, model("a", counted=counters(10)), model("b"))
    models = model("a", counted=counters(30, 2), queued=3), model("b", counted=counters(10), queued=4)
    after = document(3, *models, clients=[client(7, "x", in_flight=2)], gpus=[gpu(0), gpu(1, memory_used_bytes=None)])
    view = make_view(before, after)
    assert view.server["requests_per_s"] == pytest.approx(16)
    assert view.server["failed_per_s"] == pytest.approx(1)
    assert view.server["queued"] == 7
    assert view.server["cpu"] == pytest.approx(0.1)
    assert view.clients[0]["name"] == "x"
    assert [row["memory_share"] for row in view.gpus] == [0.25, None]
    assert view.interval == pytest.approx(2)


def test_figures_of_language_models() -> None:
    before, after = ({**model("m"), "language": {"generated_tokens": count}} for count in (100, 300))
    (row,) = make_view(document(10, before), document(12, after)).models
    assert (row["generated_tokens_per_s"], row["generated_tokens"], row["slots"]) == (pytest.approx(100), 300, None)


@cases(
    document(1, model("m", counted=counters(500))),  # it was unloaded and loaded again
    document(1, model("m", "2", counted=counters(1))),
    document(1, absent("m")),
    document(4, model("m", counted=counters(1))),  # of the same instant
    document(1, model("m", counted=counters(1)), server=document(1)["server"] | {"pid": 1}),
)
def test_documents_that_cannot_be_compared(before: dict[str, object]) -> None:
    (row,) = make_view(before, document(4, model("m", counted=counters(100)))).models
    assert row["requests_per_s"] is None
    assert row["reasons"] == {}


def test_states_of_models() -> None:
    view = make_view(
        None,
        document(
            1,
            model("degraded", degraded=True, reason="degraded, 0 of 1 instances: signal SIGSEGV"),
            model("failed", state="UNAVAILABLE", reason="load failed", instances=[]),
            absent("new"),
            model("asleep", asleep=True, instances=[instance("asleep_0_0", state="asleep", pid=0, memory_bytes=0)]),
            model("reloading", reloading=True),
            model("unloaded", state="UNAVAILABLE", reason="unloaded", instances=[instance("x", state="stopped")]),
            model("unchanged", last_failed_change={"time": 1.0, "reason": "bad file"}, changed_on_disk=True),
        ),
    )
    assert {row["model"]: (row["state"], row["instances"], row["reason"]) for row in view.models} == {
        "degraded": ("DEGRADED", "1/1", "degraded, 0 of 1 instances: signal SIGSEGV"),
        "failed": ("UNAVAILABLE", None, "load failed"),
        "new": ("not loaded", None, ""),
        "asleep": ("ASLEEP", "0/1", ""),
        "reloading": ("RELOADING", "1/1", ""),
        "unloaded": ("not loaded", None, ""),
        "unchanged": ("READY", "1/1", "the last change failed: bad file; changed on disk"),
    }
    assert [row["version"] for row in view.models if row["model"] == "new"] == [None]
    assert {row["instance"] for row in view.instances} == {
        "asleep_0_0",
        "degraded_0_0",
        "reloading_0_0",
        "unchanged_0_0",
    }


def test_instances() -> None:
    before = document(1, model("m", instances=[instance("m_0_0", cpu_seconds=1.0), instance("m_0_1", pid=1)]))
    after = document(
        3,
        model(
            "m",
            instances=[
                instance("m_0_0", cpu_seconds=2.5, batch_rows=6, batch_seconds=0.25, waiting_rows=8, in_flight=3),
                instance("m_0_1", pid=2, cpu_seconds=0.5),
                instance(
                    "m_0_2", state="backoff", reason="signal SIGSEGV", retry_seconds=2.5, kind="KIND_GPU", device=3
                ),
                instance("m_0_3", passive=True),
                instance("m_0_4", state="stopping", busy_seconds=20.0, batch_rows=1, batch_seconds=20.0),
            ],
        ),
    )
    view = make_view(before, after)
    first, replaced, lost, passive, slow = view.instances
    assert (first["busy_seconds"], first["batch_rows"], first["waiting_rows"], first["running"]) == (0.25, 6, 8, 3)
    assert first["cpu"] == pytest.approx(0.75)
    assert replaced["cpu"] is None, "another process has the name"
    assert replaced["busy_seconds"] is None
    assert (lost["device"], lost["reason"]) == ("gpu 3", "signal SIGSEGV; next attempt in 2.5 s")
    assert passive["state"] == "passive"
    assert (slow["slow"], slow["busy_seconds"]) == (True, 20.0)
    assert view.models[0]["instances"] == "2/4"
    assert view.models[0]["cpu"] == pytest.approx(0.75)
    assert view.models[0]["memory_bytes"] == 5 * (50 << 20)


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=200))
def test_percentiles_are_off_by_less_than_a_factor_of_two(times: list[int]) -> None:
    counts: dict[int, int] = {}
    for ns in times:
        counts[ns.bit_length()] = counts.get(ns.bit_length(), 0) + 1
    found = percentiles(counts)
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        exact = float(np.percentile(times, share, method="inverted_cdf")) / 1e9
        assert exact / 2 <= found[name] <= exact * 2
