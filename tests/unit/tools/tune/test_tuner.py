"""Tuning with service times whose optimum is known by calculation, on simulated servers."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.terminal.console import Screen
from shmserve.tools.tune import html, report
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.fit import TimeSample, fit
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.predict import Prediction, RatePredictor
from shmserve.tools.tune.search import Search, SimulationPool
from shmserve.tools.tune.space import TunedModel
from shmserve.tools.tune.tuner import Events, Tuner, TuningOutcome
from tests.support.cases import cases
from tests.unit.tools.tune.simulated import (
    CONFIG,
    EACH_MIB,
    GPU_MIB,
    GROUPS,
    MIB,
    MS,
    SIZES,
    SimulatedBench,
    tuned,
)

QUICK = 300
"""Number of requests in a simulation, for tests with large differences."""
SWEET = {1: 2.0, 2: 2.5, 4: 3.2, 8: 4.0, 16: 20.0, 32: 42.0}
"""ms for a batch: 8 rows are the most efficient, with 2000 rows/s for each instance."""


def sweet(count: int, threads: int, rows: int) -> float:
    """Two cores: a third instance only takes time from the others, and a second thread saves a tenth."""
    return SWEET[rows] * (1.0 if count <= 2 else 1.15 * count / 2) * (0.9 if threads == 2 else 1.0)


def small() -> TunedModel:
    """Fewer sizes of batches to measure and to simulate, with the same optimum."""
    return tuned(CONFIG.replace("max_batch_size: 32", "max_batch_size: 8"))


class Steps(Events):
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.best: Prediction | None = None

    def step(self, name: str) -> None:
        self.steps.append(name)

    def simulated(self, done: int, total: int, best: Prediction | None) -> None:
        assert done <= total
        self.best = best


@pytest.fixture(scope="module")
def found() -> TuningOutcome:
    """The most requests per second with a p99 of 30 ms."""
    steps = Steps()
    outcome = Tuner(SimulatedBench(sweet), tuned(), Goal(30 * MS, simulated=QUICK), steps).run()
    assert steps.steps == ["measure", "calibrate", "search", "confirm"]
    assert steps.best is not None
    return outcome


def test_the_hidden_times_and_the_calculated_optimum_are_found(found: Any) -> None:
    one, two, both = (found.fits[pair] for pair in ((1, 1), (2, 1), (1, 2)))
    assert not one.affine
    times = (one.ns(8), one.ns(32), two.ns(8), both.ns(32))
    assert times == pytest.approx([SWEET[8] * MS, SWEET[32] * MS, SWEET[8] * MS, 0.9 * SWEET[32] * MS], rel=0.1)
    assert any("more than 3 instances" in text for text in found.times.skipped)
    # 2 instances of 2000 rows/s are the most that any setting can do: 1 has 2000 (2 threads: 2222), 3 have 3478.
    chosen = found.chosen
    assert (chosen.instances, chosen.threads, chosen.batch) == (2, 1, 8)
    confirmed = found.of(chosen)
    assert 0.85 * 4000 < confirmed.rate < 1.1 * 4000  # a measurement ends before a small overload shows
    assert found.holds
    assert abs(confirmed.predicted.rate / confirmed.rate - 1) < 0.1


def test_the_report_has_the_diff_and_the_changed_text(found: Any) -> None:
    assert report.diff(found, "models/net/config.pbtxt").splitlines()[:2] == [
        "--- a/models/net/config.pbtxt",
        "+++ b/models/net/config.pbtxt",
    ]
    assert report.diff(found, "/models/net/config.pbtxt").startswith("--- /models/net/config.pbtxt\n+++ /models/")
    changed = found.model.text_of(found.chosen)
    assert "count: 2 kind: KIND_CPU" in changed
    assert "preferred_batch_size: [ 8 ]" in changed
    assert "max_batch_size: 32  # the most\n" in changed
    text = report.text(found, Screen(False))
    assert "Best: 2 instances, 1 thread, batch 8" in text
    assert "A batch of 32 rows would take longer than the p99 allows." in text
    assert "The prediction of the rate was off by" in text
    known = json.loads(json.dumps(report.as_json(found, "net/config.pbtxt")))
    assert known["chosen"]["instances"] == 2
    assert known["holds"] is True
    assert len(known["service_times"]) == len(found.times.samples)
    page = html.page(found, "net/config.pbtxt")
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 3
    assert all(len(ElementTree.fromstring(each)) > 10 for each in drawings)
    assert "preferred_batch_size: [ 8 ]" in page


@pytest.mark.parametrize("policy", ["max_queue_size: 24", "default_timeout_microseconds: 25000"])
def test_queue_limits_do_not_change_the_optimum(policy: str) -> None:
    """Queue limits reject requests of a saturated model, which is how times are measured. The optimum stays the same,
    and the rate is the highest with less than 1 % rejected."""
    text = CONFIG.replace("dynamic_batching { }", f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}")
    bench = SimulatedBench(sweet)
    outcome = Tuner(bench, tuned(text), Goal(30 * MS, instances=(1, 2), simulated=QUICK), Events()).run()
    chosen: Any = outcome.of(outcome.chosen)
    assert (chosen.candidate.instances, chosen.candidate.batch) == (2, 8)
    assert 0.75 * 4000 < chosen.rate < 1.1 * 4000
    assert not chosen.error
    assert all(
        sample.batch_ns == pytest.approx(sweet(*sample.pair, round(sample.rows)) * MS, rel=0.1)
        for sample in outcome.times.samples
        if round(sample.rows) in SWEET
    )
    assert policy in outcome.model.text_of(chosen.candidate)
    # What was measured on the server at the end has the limits, as the model will have them.
    batching: Any = bench.applied[-1].dynamic_batching
    assert batching.default_queue_policy is not None
    assert any(point.refused for each in outcome.confirmed for point in each.points)
    assert "the queue limits of the model rejected" in report.text(outcome, Screen(False))
    json.dumps(report.as_json(outcome, "x"), allow_nan=False)


def test_two_groups_of_one_instance_are_two_instances() -> None:
    goal = Goal(30 * MS, instances=(1, 2), simulated=QUICK)
    outcome: Any = Tuner(SimulatedBench(sweet), tuned(GROUPS), goal, Events()).run()
    chosen = outcome.of(outcome.chosen)
    assert (chosen.candidate.instances, chosen.candidate.batch) == (1, 8)
    assert 0.85 * 4000 < chosen.rate < 1.1 * 4000
    assert abs(chosen.predicted.rate / chosen.rate - 1) < 0.1


def test_the_memory_limit_bounds_the_number_of_instances() -> None:
    # One instance of 100 MiB: a second thread is all that is left, 2222 rows/s instead of 2000.
    goal = Goal(30 * MS, memory=(EACH_MIB + 50) * MIB, confirm=2, simulated=QUICK)
    bench = SimulatedBench(sweet)
    outcome: Any = Tuner(bench, tuned(), goal, Events()).run()
    assert (outcome.chosen.instances, outcome.chosen.threads, outcome.chosen.batch) == (1, 2, 8)
    assert {config.instance_group[0].count for config in bench.applied} == {1}
    assert "they would need about 200 MiB, and --memory allows 150 MiB" in outcome.times.skipped[0]


@pytest.mark.parametrize(("objective", "instances"), [("", 1), ("memory", 1), ("latency", 2)])
def test_a_target_rate_takes_the_fewest_instances_or_the_objective(objective: str, instances: int) -> None:
    # 1000 requests/s: one instance can do 2000, and batches of 1 can do 500.
    goal = Goal(30 * MS, rate=1000.0, confirm=2, simulated=QUICK, instances=(1, 2), objective=objective)
    bench = SimulatedBench(sweet)
    outcome: Any = Tuner(bench, tuned(CONFIG.replace("count: 1", "count: 2")), goal, Events()).run()
    assert outcome.chosen.instances == instances
    assert outcome.chosen.batch > 2 or objective == "latency"
    assert outcome.holds
    sizes = [each["bytes"] for each in report.as_json(outcome, "x")["frontier"]]
    assert sizes == sorted(set(sizes)), "more memory only for a lower p99"
    assert EACH_MIB * MIB in sizes
    assert "Memory and latency" in html.page(outcome, "x")
    assert set(bench.opened) == {1000.0}
    text = report.text(outcome, Screen(False))
    assert "At 1,000 requests/s the p99 is" in text
    assert ("GPU MIB" in text, f" {outcome.chosen.instances * GPU_MIB} " in text) == (True, True)


@cases(
    (Goal(1 * MS, instances=(1, 1), simulated=QUICK), "No setting holds a p99 of 1 ms. A request alone takes 2."),
    (
        Goal(30 * MS, memory=50 * MIB, instances=(1, 1), simulated=QUICK),
        "The smallest setting needs 100 MiB, and --memory allows 50 MiB.",
    ),
)
def test_a_target_that_no_setting_meets(goal: Goal, text: str) -> None:
    outcome: Any = Tuner(SimulatedBench(sweet), tuned(), goal, Events()).run()
    assert outcome.chosen is None
    assert not outcome.holds
    assert report.diff(outcome, "x") == ""
    assert report.as_json(outcome, "x")["chosen"] is None
    assert "Nothing found" in html.page(outcome, "x")
    assert text in report.text(outcome, Screen(False))


@pytest.mark.parametrize("step", ["measure", "memory in measure", "calibrate", "search", "confirm", "before confirm"])
def test_an_interrupt_keeps_what_was_found(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(SimulatedBench):
        def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
            if step == "calibrate" or self.applied[-1] != small().config:
                raise KeyboardInterrupt
            return super().open(rate, seconds, give_up_ns)

        def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
            if step == "measure" and len(self.applied) == 3:
                raise KeyboardInterrupt
            return super().closed(callers, seconds, length)

        def gpu_memory(self) -> int:
            if step == "memory in measure":
                raise KeyboardInterrupt
            return super().gpu_memory()

    class Interrupting(Events):
        def step(self, name: str) -> None:
            if step == f"before {name}":  # the step is shown, but its work has not begun
                raise KeyboardInterrupt

        def simulated(self, done: int, total: int, best: Prediction | None) -> None:
            if step == "search" and done == 6:
                raise KeyboardInterrupt

    outcome: Any = Tuner(
        Interrupted(sweet), small(), Goal(30 * MS, instances=(1, 2), simulated=QUICK), Interrupting()
    ).run()
    assert outcome.interrupted == step.split()[-1]
    assert report.as_json(outcome, "x")["interrupted"] == outcome.interrupted
    assert (outcome.chosen is None) == (outcome.interrupted in ("measure", "calibrate"))
    if outcome.chosen is not None:
        assert outcome.chosen.batch == 8
        text = report.text(outcome, Screen(False))
        assert "Predicted, not measured" in text
        assert not outcome.holds


def test_requests_that_fail_or_are_too_large_end_the_tuning() -> None:
    with pytest.raises(ModelFailed, match="3 requests failed while batches of 1 were measured: out of memory"):
        Tuner(SimulatedBench(sweet, lambda count: True), tuned(), Goal(30 * MS, simulated=QUICK), Events()).run()
    with pytest.raises(InvalidRequest, match="requests of 64 rows: the largest batch of 'net' is 32"):
        Tuner(SimulatedBench(sweet), tuned(), Goal(30 * MS, rows=64, simulated=QUICK), Events())
    assert tuned().batches(6) == [6, 8, 16, 32]


def test_large_batches_that_only_a_delay_fills_are_found() -> None:
    """Batches of 32 rows take 38 ms and those of 16 rows 22 ms. Without a delay, the large ones start almost empty."""
    pairs = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1))
    samples = [TimeSample(*pair, rows, (6 + rows) * MS) for pair in pairs for rows in SIZES]
    predictor = RatePredictor(tuned(), Goal(60 * MS, simulated=600), fit(samples))
    with SimulationPool(1) as pool:
        ranked = Search(predictor, {}, pool, lambda done, total, best: None).run()
    assert ranked[0].candidate.batch == 32
    assert ranked[0].candidate.delay_us >= 10_000
