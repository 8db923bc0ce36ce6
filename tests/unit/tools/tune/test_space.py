"""Settings and their edits of config.pbtxt; fits of service times."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
from msgspec.structs import replace

from shmserve.errors import Unsupported
from shmserve.repo.config.schema import ModelConfig
from shmserve.tools.tune.fit import Spread, TimeSample, fit, spread_of
from shmserve.tools.tune.predict import Prediction
from shmserve.tools.tune.search import shortlist
from shmserve.tools.tune.space import Candidate, check_tunable
from tests.unit.tools.tune.simulated import CONFIG, GROUPS, MS, STREAM, tuned

PADDED = """name: "net"
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { max_queue_delay_microseconds: 100 }
parameters { key: "padding" value: { string_value: "ids" } }
"""


def completed(text: str) -> ModelConfig:
    return tuned(text).config


@pytest.mark.parametrize("text", [CONFIG, CONFIG.replace("dynamic_batching { }\n", ""), PADDED, GROUPS])
@pytest.mark.parametrize(
    "candidate",
    [Candidate(1, 1, 8), Candidate(3, 2, 4, 500), Candidate(2, 1, 64, 0, 16, 99), Candidate(2, 1, 8, 100, 1, 128)],
)
def test_the_edited_text_parses_to_the_candidate(text: str, candidate: Candidate) -> None:
    model = replace(tuned(text), largest=64)
    if not model.pads:
        candidate = replace(candidate, multiple=0, batch_cost=0)
    elif not candidate.multiple:
        candidate = replace(candidate, multiple=1, batch_cost=128)
    edited = completed(model.text_of(candidate))
    assert edited == model.config_of(candidate)
    assert replace(model, text=model.text_of(candidate), config=edited).current == candidate
    assert edited.max_batch_size >= model.config.max_batch_size


def test_unchanged_settings_leave_the_text_unchanged() -> None:
    model = tuned()
    assert model.edits(model.current) == []
    assert model.text_of(model.current) == CONFIG
    changed = model.text_of(replace(model.current, delay_us=700)).splitlines()
    lines = CONFIG.splitlines()
    lines[lines.index("dynamic_batching { }")] = "dynamic_batching { max_queue_delay_microseconds: 700 }"
    assert changed == lines


def test_default_threads_follow_the_instances() -> None:
    model = tuned(CONFIG.replace('parameters { key: "intra_op_thread_count" value: { string_value: "1" } }\n', ""), 4)
    assert model.current.threads == 4
    assert model.thread_counts(1) == [1, 2, 4]
    assert model.thread_counts(2) == [1, 2]
    assert [edit.path for edit in model.edits(Candidate(2, 2, 32))] == [("instance_group", "count")]
    assert [edit.path for edit in model.edits(Candidate(1, 1, 32))] == [("parameters", "intra_op_thread_count")]


def test_models_that_cannot_be_tuned_are_refused() -> None:
    for text, step, reason in (
        (CONFIG.replace("dynamic_batching { }", "sequence_batching { }"), False, "tune it alone"),
        (STREAM, True, "decoupled step"),
        (GROUPS.replace("host_policy", "passive: true host_policy"), False, "groups of several kinds"),
        (GROUPS.replace("count: 1", "count: 2", 1), False, "different counts"),
    ):
        with pytest.raises(Unsupported, match=reason):
            check_tunable(completed(text), step)
    with pytest.raises(Unsupported, match="language model, whose target is --slo"):
        check_tunable(replace(completed(STREAM), backend="vllm"))
    for text in (CONFIG, STREAM, GROUPS):
        check_tunable(completed(text))


def test_an_affine_fit() -> None:
    samples = [TimeSample(1, 1, rows, (2 + 0.5 * rows) * MS) for rows in (1, 2, 4, 8)]
    samples += [TimeSample(2, 1, rows, (2 + 0.5 * rows) * MS * (1.2 if rows == 1 else 1.5)) for rows in (1, 8)]
    fits = fit(samples)
    one, two = fits[1, 1], fits[2, 1]
    assert one.affine
    assert one.batch_ns == pytest.approx(2 * MS)
    assert one.row_ns == pytest.approx(0.5 * MS)
    assert one.error < 1e-9
    assert one.ns(32) == pytest.approx(18 * MS)
    assert one.rows_per_s(8, 1) == pytest.approx(8 / 0.006)
    assert two.scaled
    assert two.ns(1) == pytest.approx(3 * MS)
    assert two.ns(8) == pytest.approx(9 * MS)
    assert one.ns(4) * 1.2 < two.ns(4) < one.ns(4) * 1.5


def test_a_fit_with_lengths() -> None:
    samples = [
        TimeSample(1, 0, rows, 3 * MS + 2000 * rows * length, length) for rows in (1, 4, 8) for length in (10, 50, 100)
    ]
    found = fit(samples)[1, 0]
    assert found.element_ns == pytest.approx(2000)
    assert found.batch_ns + found.row_ns == pytest.approx(3 * MS, rel=1e-6)
    assert found.ns(8, 200) == pytest.approx(3 * MS + 2000 * 1600)


def test_the_spread_keeps_the_mean() -> None:
    # 2 ms for a row, of which a tenth pauses for 5 ms; 20 ms for a full batch, three of which are a latency.
    lone = [3.0 * MS] * 9 + [8.0 * MS]
    for full, grows in (([55.0 * MS, 65.0 * MS] * 5, False), ([20.0 * MS] * 9 + [120.0 * MS], True)):
        spread = spread_of(lone * 10, 1.0 * MS, full * 10, 10.0)
        assert sum(spread.factors) / len(spread.factors) == pytest.approx(1)
        assert sum(spread.pauses) == pytest.approx(0, abs=1)
        service = fit([TimeSample(1, 0, 1, 2.5 * MS), TimeSample(1, 0, 10, 25 * MS)])[1, 0].service(spread)
        drawn = [service.ns(10, Random(seed)) for seed in range(2000)]
        assert sum(drawn) / len(drawn) == pytest.approx(25 * MS, rel=0.1)
        assert (max(drawn) > 60 * MS) == grows
        assert (max(drawn) < 35 * MS) == (not grows)
        assert max(service.ns(1, Random(seed)) for seed in range(200)) == pytest.approx(7 * MS, rel=0.01)
    assert spread_of([], 0.0, [], 1.0) == Spread()


def test_the_shortlist_differs_in_more_than_the_delay() -> None:
    def told(rate: float, *settings: int) -> Prediction:
        return Prediction(Candidate(*settings), rate, 1.0, 1.0, 1.0, 1.0)

    ranked = [told(100, 2, 1, 8), told(99, 2, 1, 8, 500), told(95, 2, 1, 8, 800), told(90, 1, 2, 8), told(60, 1, 1, 8)]
    assert [each.rate for each in shortlist(ranked, 3, 0.75)] == [100, 90, 95]
    # Predicted alike, so that only chance would decide between the delays.
    assert [each.rate for each in shortlist(ranked, 9, 0.75)] == [100, 90, 95, 60]
    assert [each.rate for each in shortlist(ranked, 1, 0.75)] == [100]
    # One with other instances or threads is among the first two: if the fit of the best is wrong, so are its others.
    ranked = [told(100, 2, 1, 8), told(98, 2, 1, 16), told(97, 2, 1, 4), told(90, 1, 2, 8), told(60, 1, 1, 8)]
    assert [each.rate for each in shortlist(ranked, 4, 0.75)] == [100, 90, 98, 97]
    assert [each.rate for each in shortlist(ranked, 4, 0.95)] == [100, 98, 97, 90]


def test_the_pool_keeps_the_order() -> None:
    # In a separate process, because multiprocessing keeps a helper process until the end.
    program = """
from shmserve.tools.tune.search import SimulationPool
if __name__ == "__main__":
    for processes in (1, 2):
        with SimulationPool(processes) as pool:
            print(list(pool.run(abs, [-3, 2, -1])))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 2, 1]\n[3, 2, 1]\n", done.stderr
