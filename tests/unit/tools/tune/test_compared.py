"""The comparison of two outcomes of tune, and how busy the steps of an ensemble are, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import InvalidRequest
from shmserve.terminal.console import Screen
from shmserve.tools.tune import steps
from shmserve.tools.tune.compared import check, text
from shmserve.tools.tune.steps import StepUse, step_uses
from tests.support.cases import cases

TARGET = {"model": "m", "p99_ms": 20.0, "rate": None}


def outcome(rate: float | None, chosen: dict[str, int] | None, **ms: float) -> dict[str, Any]:
    """`ms`: of batches of so many rows, as r1=2.0."""
    times = [{"instances": 1, "rows": float(name[1:]), "measured_ms": value} for name, value in ms.items()]
    other = {"settings": {"instances": 9}, "rate": 5.0, "memory_bytes": 1}
    confirmed = [other, {"settings": chosen, "rate": rate, "memory_bytes": 3 << 20}] if chosen else [other]
    return TARGET | {
        "chosen": chosen,
        "confirmed": confirmed,
        "service_times": [*times, *({"instances": count, "rows": 1.0, "measured_ms": 99.0} for count in (1, 2))],
    }


def test_rates_and_times_beside_each_other() -> None:
    before = outcome(10000.0, {"instances": 1, "max_batch": 8, "delay_us": 0}, r1=2.0, r4=8.0)
    now = outcome(15000.0, {"instances": 2, "max_batch": 8, "delay_us": 0}, r1=1.0, r8=9.0)
    lines = [line.split() for line in text(before, now, Screen(False)).splitlines()[1:]]
    assert " ".join(lines[0]) == "setting instances 1, max_batch 8 instances 2, max_batch 8"
    assert lines[1:] == [
        ["requests/s", "10,000", "15,000", "+50%"],
        ["MiB", "3", "3", "+0%"],
        ["ms", "per", "batch", "of", "1", "2", "1", "-50%"],
    ]


def test_an_outcome_without_a_setting_has_no_rate() -> None:
    shown = text(outcome(None, None), outcome(7.0, {"instances": 1}), Screen(False))
    assert "requests/s" in shown
    assert shown.splitlines()[2].split() == ["requests/s", "-", "7"]


@cases(
    ([], "not what `shmserve tune --json` prints"),
    (TARGET, "not what `shmserve tune --json` prints"),
    (outcome(1.0, None) | {"p99_ms": 5.0}, r"its p99_ms is 5\.0, and here it is 20\.0"),
    (outcome(1.0, None) | {"model": "n"}, "its model is n, and here it is m"),
)
def test_only_outcomes_with_the_same_target_can_be_compared(before: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check(before, TARGET)
    assert check(outcome(1.0, None), TARGET)["chosen"] is None


def entry(name: str, *sizes: tuple[int, int, int]) -> dict[str, Any]:
    """`sizes`: rows of a batch, number of batches, and milliseconds of them all."""
    return {
        "name": name,
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": {"count": count, "ns": 0},
                "compute_infer": {"count": count, "ns": ms * 900_000},
                "compute_output": {"count": count, "ns": ms * 100_000},
            }
            for rows, count, ms in sizes
        ],
    }


def test_the_busiest_step_is_the_bottleneck() -> None:
    before = {"model_stats": [entry("a", (1, 5, 50)), entry("ensemble")]}
    entries = (
        entry("a", (1, 15, 250), (4, 10, 200)),
        entry("b", (8, 10, 900)),
        entry("ensemble"),
        entry("other", (1, 1, 1)),
    )
    after = {"model_stats": [*entries]}
    uses = step_uses(before, after, {"a": 2, "b": 1}, 1_000_000_000)
    assert uses == [StepUse("b", 1, 0.9, 90.0, 8.0), StepUse("a", 2, 0.2, 20.0, 2.5)]
    assert steps.text(uses, Screen(False)).splitlines()[1].split() == ["b", "1", "90%", "90", "8"]
    assert step_uses(before, before, {"a": 1}, 10**9) == [StepUse("a", 1, 0.0, 0.0, 0.0)], "a step that ran nothing"
