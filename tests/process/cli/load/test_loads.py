"""Loads of `shmserve bench` on a real server, over each transport.

No assertion depends on speed, except for the maximum rate of a model that needs 20 ms.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.tools.load import record
from shmserve.tools.load.measure import MeasureProgress, measure
from shmserve.tools.load.plan import SECOND, ClosedLoop, LoadPlan, OpenLoop, RequestInputs, Sequences
from tests.process.cli.load.bench_server import KINDS, QUICK, SERVICE_NS, BenchServer, one_point

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_loop_over_each_transport(
    kind: str, served: BenchServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes send files and strings; their report equals the server's counts, except for warm-up and end."""
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    inputs = RequestInputs(texts=(f"i_FP32=@{tmp_path}", 'i_BYTES=[["a", "bc", "", "d"], ["1", "2", "3", "4"]]'))
    before = served.requests("id")
    seen: list[MeasureProgress] = []
    plan = LoadPlan(
        model="id",
        endpoint=served.endpoints[kind],
        loads=(ClosedLoop(3),),
        inputs=inputs,
        settings=QUICK,
        processes=2,
    )
    run = measure(plan, on_progress=seen.append)
    (point,) = run.points
    assert not point.errors
    assert not point.failed
    assert (point.rows, point.cost.processes) == (2, 2)
    assert point.latency.count == sum(window.good for window in point.windows[slice(*point.used)])
    assert point.latency.count <= served.requests("id") - before
    server = point.server
    assert server is not None
    assert server.requests > 0
    assert server.rows == 2 * server.requests
    assert server.batches <= server.requests
    assert sum(int(rows) * count for rows, count in server.batch_sizes.items()) == server.rows
    assert point.usage is not None
    assert {"broker", "models"} <= set(point.usage.server)
    (tmp_path / "run").write_bytes(record.encode(run))
    assert record.read(tmp_path / "run") == run
    assert {"warm-up"} <= {progress.state.phase for progress in seen} <= {"warm-up", "window 1", "window 2"}
    assert capfd.readouterr() == ("", ""), "the processes end quietly"


@pytest.mark.usefixtures("threads")
def test_an_open_loop_above_capacity_is_reported_as_overloaded(served: BenchServer) -> None:
    """Sends 200 requests per second to a model that answers 50, so they pile up and latencies grow."""
    settings = replace(QUICK, window_ns=SECOND // 6, min_windows=3, max_windows=6)
    loads = (OpenLoop(200.0, "constant"),)
    plan = LoadPlan(model="slow", endpoint=served.endpoints["lane"], loads=loads, settings=settings, in_flight=4)
    point = one_point(plan)
    assert point.note.startswith("overloaded: ")
    assert not point.stable
    medians = [window.percentiles["p50"] for window in point.windows]
    assert medians == sorted(medians)
    assert medians[-1] > 4 * SERVICE_NS, "requests that wait in the generator wait longer than 4 in flight would"
    assert not point.errors


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http", "grpc"])
def test_a_stream_load_measures_first_and_later_responses_and_counts_failures(kind: str, served: BenchServer) -> None:
    plan = LoadPlan(
        model="talker",
        endpoint=served.endpoints[kind],
        stream=True,
        inputs=RequestInputs(texts=("count=5",)),
        settings=QUICK,
    )
    point = one_point(plan)
    assert not point.errors
    first, between = point.first_answer, point.between_answers
    assert first is not None
    assert between is not None
    assert first.count == point.latency.count
    assert abs(between.count - 4 * first.count) <= 4, "but for those of the streams at the edges"
    assert first.percentiles["p50"].mean < point.latency.percentiles["p50"].mean
    assert point.answers_per_s > 0
    failing = one_point(
        replace(plan, inputs=RequestInputs(texts=("count=-2",)))
    )  # the model fails after its last response
    assert failing.failed
    assert not failing.latency.count
    with pytest.raises(InvalidRequest, match=r"model 'talker' is decoupled and .*: use --stream"):
        measure(replace(plan, stream=False, inputs=RequestInputs()))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["lane", "http", "grpc"])
def test_a_sequence_load_sends_start_and_end_flags(kind: str, served: BenchServer) -> None:
    """The model refuses requests without a sequence, and those of a sequence that has not been started."""
    before, loads = served.requests("sequence"), (ClosedLoop(3), OpenLoop(100.0))
    plan = LoadPlan(
        model="sequence", endpoint=served.endpoints[kind], loads=loads, sequences=Sequences(3, 4), settings=QUICK
    )
    for point in measure(plan).points:
        assert not point.errors
        assert not point.failed
    assert served.requests("sequence") > before
    without = one_point(replace(plan, sequences=None, loads=(ClosedLoop(1),)))
    assert not without.latency.count
    assert without.failed
